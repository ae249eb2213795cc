"""What a continual-learning method must answer; everything else is the engine's, once."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from probprompt.errors import UserError, suggest
from probprompt.prompts import Prompts


class MethodConfig(BaseModel):
    """The settings of a method; a subclass gives ``name`` a fixed default and adds its own fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str


@dataclass(frozen=True)
class Shape:
    """What a method may know of the backbone under it."""

    width: int
    depth: int


@dataclass(frozen=True)
class Context:
    """What a method may know while it makes prompts: at evaluation neither a task nor a generator."""

    task: int | None = None
    generator: torch.Generator | None = None

    @property
    def training(self) -> bool:
        """Whether the prompts are made for a training step."""
        return self.task is not None


EVALUATION = Context()


@dataclass(frozen=True)
class Prompted:
    """What a method answers for a batch of queries: what to inject, and a loss of its own."""

    prompts: Prompts = field(default_factory=dict)
    loss: Tensor | None = None


class Method(nn.Module):
    """A continual-learning method: queries to prompts, with whatever it learns and remembers.

    A subclass sets ``Config`` and is registered by :func:`register`. Its parameters are what is trained; its
    buffers are saved with them.
    """

    Config: ClassVar[type[MethodConfig]]
    summary: ClassVar[str]
    needs_query: ClassVar[bool] = True

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        self.seed = seed

    @classmethod
    def create(cls, config: MethodConfig, shape: Shape, seed: int) -> Self:
        """Build the method from its own settings."""
        return cls(config, shape, seed)  # type: ignore[arg-type, call-arg]

    def begin_task(self, task: int, classes: int) -> None:
        """Grow or re-initialise for task number ``task`` of so many new classes; must depend on nothing else."""

    def begin_epoch(self) -> None:
        """Take note that an epoch begins."""

    def before_step(self) -> None:
        """Take note of the parameters just used, before the optimiser changes them."""

    def prompts(self, query: Tensor | None, context: Context) -> Prompted:
        """Answer what to inject for these queries (B, D), and the method's own loss in training."""
        raise NotImplementedError

    def relevance(self, query: Tensor) -> dict[int, Tensor]:
        """Show, per block, how strongly each component is used for each query: (B, M, N). Empty without such."""
        return {}


_REGISTRY: dict[str, type[Method]] = {}


def register(method: type[Method]) -> type[Method]:
    """Make a method known by the name its settings carry."""
    name = method.Config.model_fields["name"].default
    if name in _REGISTRY:
        raise ValueError(f"two methods are called {name!r}: {_REGISTRY[name]} and {method}")
    _REGISTRY[name] = method
    return method


def registered() -> Mapping[str, type[Method]]:
    """All methods by name."""
    return dict(sorted(_REGISTRY.items()))


def find(name: str) -> type[Method]:
    """Look a method up by name."""
    if name not in _REGISTRY:
        raise UserError(f"no method is called {name!r}: {suggest(name, _REGISTRY)}")
    return _REGISTRY[name]


def parse_config(value: Any) -> MethodConfig:
    """Turn a name, or a mapping with a name, into that method's settings."""
    if isinstance(value, MethodConfig):
        return value
    given = {"name": value} if isinstance(value, str) else dict(value)
    return find(str(given.get("name", "probprompt"))).Config.model_validate(given)
