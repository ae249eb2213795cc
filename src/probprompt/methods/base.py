"""What a continual-learning method must answer; everything else is the engine's, once."""

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
        raise ValueError(f"blocks must be different and at least one, not {blocks}")
    return blocks


Blocks = Annotated[tuple[int, ...], AfterValidator(_different)]
"""A setting that names blocks, counted from 0; :meth:`Shape.check_blocks` asks whether the backbone has them."""


class MethodConfig(BaseModel):
    """The settings of a method; a subclass gives ``name`` a fixed default and adds its own fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str

    def marks(self) -> tuple[str, ...]:
        """What must be said beside every result: published behaviour that is wrong, and was asked for by an option."""
        return ()


@dataclass(frozen=True)
class Shape:
    """What a method may know of the backbone under it."""

    width: int
    depth: int

    def check_blocks(self, blocks: Iterable[int], setting: str = "method.blocks") -> None:
        """Refuse blocks that the backbone does not have, by the name of the setting that asks for them."""
        outside = [block for block in blocks if not 0 <= block < self.depth]
        if outside:
            raise UserError(
                f"the backbone has blocks 0 to {self.depth - 1}, but {setting} names {outside}: "
                f"set {setting} within that range"
            )


@dataclass(frozen=True, eq=False)
class Context:
    """What a method may know while it makes prompts: at evaluation nothing but what each image's own pixels say."""

    training: bool = False
    """Whether the prompts are made for a training step."""
    task: int | None = None
    """The task of the images, counted from 0: known of training images only."""
    labels: Tensor | None = None
    """Classes of the images (B,), numbered by their appearance in the stream: in a training step only."""
    first: int = 0
    """The number of the task's first class."""
    noise: Noise | None = None
    """Source of noise in a training step."""
    draw: int = 0
    """Which of a method's ``draws`` of noise is meant at evaluation."""
    keys: Tensor | None = None
    """A number for each image (B,) that its pixels decide: at evaluation, where a method asks for it."""
    sampled: bool | None = None
    """Diagnostics ask for prompts with noise of each image's own, or without any. None: as settings say."""


EVALUATION = Context()


@dataclass(frozen=True)
class Prompted:
    """What a method answers for a batch of queries: what to inject, and a loss of its own."""

    prompts: Prompts = field(default_factory=dict)
    loss: Tensor | None = None


@dataclass(frozen=True, eq=False)
class TaskSummary:
    """All training images of a task that was just trained, as the model sees them at evaluation."""

    task: int
    first: int
    classes: int
    labels: Tensor  # (n,), numbered by appearance in the stream
    queries: Tensor | None  # (n, D); None where the method needs no query
    features: Tensor  # (n, D), with the method's ``statistics_context``
    logits: Tensor  # (n, classes): over the task's own classes


class Method(nn.Module):
    """A continual-learning method: queries to prompts, with whatever it learns and remembers.

    A subclass sets ``Config`` and is registered by :func:`register`. Its parameters are what is trained; its
    buffers are saved with them.
    """

    Config: ClassVar[type[MethodConfig]]
    summary: ClassVar[str]
    needs_query: ClassVar[bool] = True
    """Whether prompts depend on the image, through the frozen backbone's answer without prompts."""
    query_readout: ClassVar[Readout] = "class"
    """What of the frozen pass is the query."""
    readout: Readout = "class"
    """What of the prompted pass goes to the head."""
    preferred_head: ClassVar[str] = "linear"
    """The head where the user names none."""
    aligned: ClassVar[bool] = True
    """Whether a trained head is realigned after each task where the user does not say."""
    masked: ClassVar[bool] = True
    """Whether training compares the classes of the task alone (else all classes seen)."""
    learns: ClassVar[bool] = True
    """Whether anything but the head learns."""
    trains_backbone: ClassVar[bool] = False
    joint: ClassVar[bool] = False
    """Whether all tasks are learned at once: an upper bound, no continual learning."""
    needs_summary: ClassVar[bool] = False
    """Whether :meth:`end_task` is given the task's training images as the model sees them."""
    needs_prototypes: ClassVar[bool] = False
    """Whether :meth:`initial_rows` is asked."""
    step_key: object = None
    """What decides, beside tensors, which operations a training step consists of: it may change from epoch to epoch."""
    needs_keys: bool = False
    """Whether prompts at evaluation depend on the keys of the images."""
    statistics: tuple[str, ...] = ()
    """Buffers that :meth:`see_queries` fills."""
    draws: int = 1
    """From so many draws of noise prompts are made at evaluation, and the features that they lead to averaged."""
    tuned_rates: ClassVar[TunedRates] = TunedRates()
    matched_rate: ClassVar[float] = 5e-5
    """Best learning rate on emoji-r where the backbone learns: of 5e-5, 2e-4, 5e-4 and 1e-3, in the same way."""
    sums_loss: bool = False
    """Whether the method's own loss is a sum over the batch (else a mean, or none of the batch's)."""

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        self.seed = seed

    @classmethod
    def create(cls, config: MethodConfig, shape: Shape, seed: int) -> Self:
        """Build the method from its own settings."""
        return cls(config, shape, seed)  # type: ignore[arg-type, call-arg]

    @classmethod
    def published(cls, experiment: Experiment) -> Settings | None:
        """Return the settings of the authors, nested as in a run; None if they published none."""
        return None

    def begin_task(self, task: int, classes: int) -> None:
        """Grow or re-initialise for task number ``task`` of so many new classes.

        Names and shapes of what is there afterwards depend on the tasks so far and nothing else: a saved method is
        rebuilt by the same calls and then given its tensors. Random numbers come from :mod:`probprompt.randomness`.
        """

    def see_queries(self, queries: Tensor) -> None:
        """Take statistics of the first task's training queries (n, D), before anything is learned."""

    def copy_statistics(self, other: "Method") -> None:
        """Take over the statistics of another method of this kind."""
        known = other.state_dict()
        self.load_state_dict({name: known[name] for name in self.statistics}, strict=False)

    def begin_epoch(self) -> None:
        """Take note that an epoch begins."""

    def before_step(self) -> None:
        """Take note of the parameters just used, before the optimiser changes them."""

    def end_task(self, summary: TaskSummary | None) -> None:
        """Take note that the task is trained; the head is realigned afterwards."""

    def groups(self) -> Iterable[tuple[list[nn.Parameter], float]]:
        """Trainable parameters with a factor on the prompts' learning rate."""
        yield [parameter for parameter in self.parameters() if parameter.requires_grad], 1.0

    def prompts(self, query: Tensor | None, context: Context) -> Prompted:
        """Answer what to inject for these queries (B, D), and the method's own loss in training."""
        raise NotImplementedError

    def feature_loss(self, features: Tensor, context: Context) -> Tensor | None:
        """A loss on the prompted features (B, D) of a training step, beside the cross-entropy."""
        return None

    def statistics_context(self, task: int) -> Context:
        """How the training images of a task are seen when statistics of their features are taken."""
        return EVALUATION

    def initial_rows(self, prototypes: Tensor, known: Tensor, rows: Tensor) -> Tensor | None:
        """Where the head's rows for new classes start: (new, D).

        ``prototypes`` (new, D) and ``known`` (old, D) are mean queries of classes, ``rows`` (old, D) those of the
        head. None leaves the head's own start.
        """
        return None

    def relevance(self, query: Tensor) -> dict[int, Tensor]:
        """Show, per block, how strongly each component is used for each query: (B, M, N). Empty without such."""
        return {}


def cosines(query: Tensor, keys: Tensor) -> Tensor:
    """Cosines of queries (B, D) with keys (N, D): (B, N), float64.

    In float64 and row by row, so that no rounding which depends on the batch can change what an image chooses.
    """
    direction = functional.normalize(query.double(), dim=-1)[:, None]  # (B, 1, D)
    return (direction * functional.normalize(keys.double(), dim=-1)).sum(dim=-1)  # (B, N)


ENTRY_POINTS = "probprompt.methods"
"""Entry point group under which an installed package offers a method: ``name = "module:Class"``."""
_REGISTRY: dict[str, type[Method]] = {}


@cache
def _load_plugins() -> None:
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            entry.load()
        except Exception as problem:
            raise UserError(f"The method {entry.name!r} of {entry.value} cannot be loaded: {problem}.") from problem


def register(method: type[Method]) -> type[Method]:
    """Make a method known by the name its settings carry."""
    name = method_name(method)
    if name in _REGISTRY:
        raise ValueError(f"two methods are called {name!r}: {_REGISTRY[name]} and {method}")
    _REGISTRY[name] = method
    return method


def method_name(method: type[Method]) -> str:
    """Return the name that the settings of a method carry."""
    name: str = method.Config.model_fields["name"].default
    return name


def registered() -> Mapping[str, type[Method]]:
    """Return all methods by name, those of other packages included."""
    _load_plugins()
    return dict(sorted(_REGISTRY.items()))


def find(name: str) -> type[Method]:
    """Look a method up by name."""
    if name not in _REGISTRY:
        _load_plugins()
    if name not in _REGISTRY:
        raise UserError(f"no method is called {name!r}: {suggest(name, _REGISTRY)}")
    return _REGISTRY[name]


def parse_config(value: Any) -> MethodConfig:
    """Turn a name, or a mapping with a name, into that method's settings."""
    if isinstance(value, MethodConfig):
        return value
    given = {"name": value} if isinstance(value, str) else dict(value)
    return find(str(given.get("name", "probprompt"))).Config.model_validate(given)
