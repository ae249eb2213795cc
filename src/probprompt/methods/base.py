"""Interface of continual-learning methods, and their registry."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict
from torch import Tensor, nn
from torch.nn import functional

from probprompt.errors import UserError, suggest
from probprompt.methods.settings import Experiment, Settings, TunedRates
from probprompt.prompts import Prompts, Readout
from probprompt.randomness import Noise


def _different(blocks: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(blocks)) != len(blocks) or not blocks:
        raise ValueError(f"Expected at least one block, each only once, got {blocks}.")
    return blocks


Blocks = Annotated[tuple[int, ...], AfterValidator(_different)]
"""Blocks, counted from 0; :meth:`Shape.check_blocks` compares them with the backbone."""


class MethodConfig(BaseModel):
    """Settings of a method; a subclass sets a default ``name`` and adds fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str

    def marks(self) -> tuple[str, ...]:
        """Return warnings for every result: published errors that the settings restore."""
        return ()


@dataclass(frozen=True)
class Shape:
    """Shape of the backbone, as a method sees it."""

    width: int
    depth: int

    def check_blocks(self, blocks: Iterable[int], setting: str = "method.blocks") -> None:
        """Reject blocks that the backbone does not have; the error names the setting."""
        outside = [block for block in blocks if not 0 <= block < self.depth]
        if outside:
            raise UserError(f"{setting} contains {outside}, but the backbone has only blocks 0 to {self.depth - 1}.")


@dataclass(frozen=True, eq=False)
class Context:
    """Input of a method besides queries; at evaluation nothing that depends on other images."""

    training: bool = False
    """True if the prompts are for a training step."""
    task: int | None = None
    """Task of the images, counted from 0: training images only."""
    labels: Tensor | None = None
    """Classes of the images (B,), numbered in order of appearance: training steps only."""
    first: int = 0
    """Number of the task's first class."""
    noise: Noise | None = None
    """Source of noise in a training step."""
    draw: int = 0
    """Index of the draw of noise at evaluation, of the method's ``draws``."""
    keys: Tensor | None = None
    """Number computed from each image's pixels (B,): at evaluation, if the method needs it."""
    sampled: bool | None = None
    """True if diagnostics request noise, different for each image. None: as configured."""


EVALUATION = Context()


@dataclass(frozen=True)
class Prompted:
    """Result of a method for a batch of queries: prompts, and the method's own loss."""

    prompts: Prompts = field(default_factory=dict)
    loss: Tensor | None = None


@dataclass(frozen=True, eq=False)
class TaskSummary:
    """All training images of a finished task, as the model sees them at evaluation."""

    task: int
    first: int
    classes: int
    labels: Tensor  # (n,), numbered by appearance in the stream
    queries: Tensor | None  # (n, D); None where the method needs no query
    features: Tensor  # (n, D), with the method's ``statistics_context``
    logits: Tensor  # (n, classes): over the task's own classes


class Method(nn.Module):
    """A continual-learning method: queries to prompts, with its parameters and memory.

    A subclass sets ``Config`` and is registered by :func:`register`. Parameters are trained; buffers are saved with
    them.
    """

    Config: ClassVar[type[MethodConfig]]
    summary: ClassVar[str]
    needs_query: ClassVar[bool] = True
    """True if prompts depend on the image, through its query: the feature of the frozen backbone."""
    query_readout: ClassVar[Readout] = "class"
    """Output of the frozen pass that is the query."""
    readout: Readout = "class"
    """Output of the prompted pass that the head reads."""
    preferred_head: ClassVar[str] = "linear"
    """Default kind of head."""
    aligned: ClassVar[bool] = True
    """True if a trained head is aligned after each task by default."""
    masked: ClassVar[bool] = True
    """True if training compares only the classes of the task (else all classes seen)."""
    learns: ClassVar[bool] = True
    """True if anything except the head learns."""
    trains_backbone: ClassVar[bool] = False
    joint: ClassVar[bool] = False
    """True if all tasks are learned jointly: an upper bound, not continual learning."""
    needs_summary: ClassVar[bool] = False
    """True if :meth:`end_task` needs the task's training images."""
    needs_prototypes: ClassVar[bool] = False
    """True if :meth:`initial_rows` is called."""
    step_key: object = None
    """Key, besides tensors, of the operations of a training step; it may change between epochs."""
    needs_keys: bool = False
    """True if prompts at evaluation depend on the keys of the images."""
    statistics: tuple[str, ...] = ()
    """Buffers that :meth:`see_queries` fills."""
    draws: int = 1
    """Number of draws of noise at evaluation, over which features are averaged."""
    tuned_rates: ClassVar[TunedRates] = TunedRates()
    matched_rate: ClassVar[float] = 5e-5
    """Best learning rate of the backbone on emoji-r: of 5e-5, 2e-4, 5e-4 and 1e-3, in the same way."""
    sums_loss: bool = False
    """True if the method's loss is a sum over the batch (else a mean, or independent of it)."""

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        self.seed = seed

    @classmethod
    def create(cls, config: MethodConfig, shape: Shape, seed: int) -> Self:
        """Build the method from its settings."""
        return cls(config, shape, seed)  # type: ignore[arg-type, call-arg]

    @classmethod
    def published(cls, experiment: Experiment) -> Settings | None:
        """Return the settings of the authors, nested as in a run; None if they published none."""
        return None

    def begin_task(self, task: int, classes: int) -> None:
        """Grow or re-initialize for task number ``task`` with ``classes`` new classes.

        Names and shapes of tensors must depend only on the tasks so far: a saved method is rebuilt by the same calls,
        then loaded. Random numbers come from :mod:`probprompt.randomness`.
        """

    def see_queries(self, queries: Tensor) -> None:
        """Take statistics of the first task's training queries ``(n, D)``, before training."""

    def copy_statistics(self, other: "Method") -> None:
        """Copy the statistics of another method of this kind."""
        known = other.state_dict()
        self.load_state_dict({name: known[name] for name in self.statistics}, strict=False)

    def begin_epoch(self) -> None:
        """Start an epoch."""

    def before_step(self) -> None:
        """Read the parameters just used, before the optimizer changes them."""

    def end_task(self, summary: TaskSummary | None) -> None:
        """End the task, before the head is aligned."""

    def groups(self) -> Iterable[tuple[list[nn.Parameter], float]]:
        """Yield trainable parameters with a factor on the prompts' learning rate."""
        yield [parameter for parameter in self.parameters() if parameter.requires_grad], 1.0

    def prompts(self, query: Tensor | None, context: Context) -> Prompted:
        """Return the prompts for queries ``(B, D)``, and in training the method's own loss."""
        raise NotImplementedError

    def feature_loss(self, features: Tensor, context: Context) -> Tensor | None:
        """Return a loss on the prompted features ``(B, D)``, in addition to the cross-entropy."""
        return None

    def statistics_context(self, task: int) -> Context:
        """Return the context in which training images are seen for feature statistics."""
        return EVALUATION

    def initial_rows(self, prototypes: Tensor, known: Tensor, rows: Tensor) -> Tensor | None:
        """Return the initial rows of the head for new classes (new, D); None for the default.

        ``prototypes`` (new, D) and ``known`` (old, D) are mean queries of classes, ``rows`` (old, D) those of the head.
        """
        return None

    def relevance(self, query: Tensor) -> dict[int, Tensor]:
        """Return the use of each component per block and query: ``(B, M, N)``; may be empty."""
        return {}


def cosines(query: Tensor, keys: Tensor) -> Tensor:
    """Return float64 cosines ``(B, N)`` of queries ``(B, D)`` with keys ``(N, D)``.

    They are computed row by row, so that rounding cannot depend on the batch.
    """
    direction = functional.normalize(query.double(), dim=-1)[:, None]  # (B, 1, D)
    return (direction * functional.normalize(keys.double(), dim=-1)).sum(dim=-1)  # (B, N)


ENTRY_POINTS = "probprompt.methods"
"""Entry point group of plug-in methods: ``name = "module:Class"``."""
_REGISTRY: dict[str, type[Method]] = {}


@cache
def _load_plugins() -> None:
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            entry.load()
        except Exception as problem:
            raise UserError(f"The method {entry.name!r} of {entry.value} cannot be loaded: {problem}.") from problem


def register(method: type[Method]) -> type[Method]:
    """Register a method under the name in its settings."""
    name = method_name(method)
    if name in _REGISTRY:
        raise ValueError(f"Two methods are named {name!r}: {_REGISTRY[name]} and {method}.")
    _REGISTRY[name] = method
    return method


def method_name(method: type[Method]) -> str:
    """Return the name in the settings of a method."""
    name: str = method.Config.model_fields["name"].default
    return name


def registered() -> Mapping[str, type[Method]]:
    """Return all methods by name, with plug-ins."""
    _load_plugins()
    return dict(sorted(_REGISTRY.items()))


def find(name: str) -> type[Method]:
    """Return a method by name."""
    if name not in _REGISTRY:
        _load_plugins()
    if name not in _REGISTRY:
        raise UserError(f"Unknown method {name!r}. {suggest(name, _REGISTRY)} List all with 'probprompt list methods'.")
    return _REGISTRY[name]


def parse_config(value: Any) -> MethodConfig:
    """Parse a name, or a mapping with a name, into that method's settings."""
    if isinstance(value, MethodConfig):
        return value
    given = {"name": value} if isinstance(value, str) else dict(value)
    return find(str(given.get("name", "probprompt"))).Config.model_validate(given)
