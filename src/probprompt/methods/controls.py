"""The controls of every table: what the frozen backbone gives with no prompts at all, under one head or another."""

from typing import Literal

from torch import Tensor

from probprompt.methods.base import Context, Method, MethodConfig, Prompted, Shape, register


class _Control(Method):
    """No prompts: only the head learns, on features that never change."""

    needs_query = False
    learns = False

    def __init__(self, config: MethodConfig, shape: Shape, seed: int) -> None:
        super().__init__(shape, seed)

    def prompts(self, query: Tensor | None, context: Context) -> Prompted:
        """Inject nothing."""
        return Prompted()


class LinearProbeConfig(MethodConfig):
    """A linear probe has no settings of its own."""

    name: Literal["linear-probe"] = "linear-probe"


@register
class LinearProbe(_Control):
    """A linear head, trained task by task."""

    Config = LinearProbeConfig
    summary = "no prompts: a linear head on the frozen features (control)"


class NearestMeanConfig(MethodConfig):
    """Nearest mean has no settings of its own."""

    name: Literal["nearest-mean"] = "nearest-mean"


@register
class NearestMean(_Control):
    """The class whose mean feature has the largest cosine."""

    Config = NearestMeanConfig
    summary = "no prompts, no training: the nearest class mean by cosine (control)"
    preferred_head = "nearest-mean"


class LDAConfig(MethodConfig):
    """LDA has no settings of its own: its shrinkage is the head's."""

    name: Literal["lda"] = "lda"


@register
class LDA(_Control):
    """Class means and one shared covariance."""

    Config = LDAConfig
    summary = "no prompts, no training: linear discriminant analysis (control)"
    preferred_head = "lda"


class RanPACConfig(MethodConfig):
    """RanPAC has no settings of its own: its projections and ridge are the head's."""

    name: Literal["ranpac"] = "ranpac"


@register
class RanPAC(_Control):
    """Ridge regression on random projections, without the adaptation of the first task (McDonnell et al., 2023)."""

    Config = RanPACConfig
    summary = "no prompts, no training: ridge regression on random projections (control)"
    preferred_head = "ridge"
