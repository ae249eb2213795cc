"""Baselines: heads on the frozen backbone without prompts, fine-tuning, and joint training."""

from typing import ClassVar, Literal

from torch import Tensor

from probprompt.methods.base import Context, Method, MethodConfig, Prompted, Shape, register
from probprompt.methods.settings import Experiment, Settings, coda_protocol, vq_protocol


class _Control(Method):
    """No prompts: only the head learns, on features that never change."""

    needs_query = False
    learns = False

    @classmethod
    def published(cls, experiment: Experiment) -> Settings:
        """Return the protocol of VQ-Prompt."""
        return vq_protocol(experiment)

    def __init__(self, config: MethodConfig, shape: Shape, seed: int) -> None:
        super().__init__(shape, seed)

    def prompts(self, query: Tensor | None, context: Context) -> Prompted:
        """Inject nothing."""
        return Prompted()


class LinearProbeConfig(MethodConfig):
    """Settings of the linear probe."""

    name: Literal["linear-probe"] = "linear-probe"


@register
class LinearProbe(_Control):
    """A linear head, trained task by task."""

    Config = LinearProbeConfig
    summary = "no prompts: a linear head on the frozen features (control)"


class NearestMeanConfig(MethodConfig):
    """Settings of nearest mean."""

    name: Literal["nearest-mean"] = "nearest-mean"


@register
class NearestMean(_Control):
    """Nearest class mean by cosine."""

    Config = NearestMeanConfig
    summary = "no prompts, no training: the nearest class mean by cosine (control)"
    preferred_head = "nearest-mean"


class LDAConfig(MethodConfig):
    """Settings of LDA; the shrinkage is the head's."""

    name: Literal["lda"] = "lda"


@register
class LDA(_Control):
    """Class means and one shared covariance."""

    Config = LDAConfig
    summary = "no prompts, no training: linear discriminant analysis (control)"
    preferred_head = "lda"


class RanPACConfig(MethodConfig):
    """Settings of RanPAC; projections and ridge penalty are the head's."""

    name: Literal["ranpac"] = "ranpac"


@register
class RanPAC(_Control):
    """Ridge regression on random projections, without training on the first task (McDonnell et al., 2023)."""

    Config = RanPACConfig
    summary = "no prompts, no training: ridge regression on random projections (control)"
    preferred_head = "ridge"

    @classmethod
    def published(cls, experiment: Experiment) -> Settings:
        """Return the projections and the choice of lambda of the authors' code."""
        return {"head": {"kind": "ridge", "projections": 10_000, "ridge_choice": "last"}}


class FineTuningConfig(MethodConfig):
    """Settings of fine-tuning."""

    name: Literal["ft"] = "ft"


class MaskedFineTuningConfig(MethodConfig):
    """Settings of masked fine-tuning."""

    name: Literal["ft++"] = "ft++"


class JointConfig(MethodConfig):
    """Settings of joint training."""

    name: Literal["joint"] = "joint"


@register
class FineTuning(Method):
    """Fine-tuning of the backbone on every task, with the logits of all classes seen so far."""

    Config: ClassVar[type[MethodConfig]] = FineTuningConfig
    summary = "the whole backbone learns, all logits compared: forgets nearly everything (lower bound)"
    matched_rate = 2e-4
    needs_query = False
    trains_backbone = True
    masked = False
    aligned = False

    @classmethod
    def published(cls, experiment: Experiment) -> Settings:
        """Return the settings of CODA-Prompt's code, which ran these bounds."""
        return coda_protocol(experiment, head_lr=5e-5)

    def __init__(self, config: MethodConfig, shape: Shape, seed: int) -> None:
        super().__init__(shape, seed)

    def prompts(self, query: Tensor | None, context: Context) -> Prompted:
        """Inject nothing."""
        return Prompted()


@register
class MaskedFineTuning(FineTuning):
    """Fine-tuning of the backbone on every task, with the logits of the task's classes."""

    Config = MaskedFineTuningConfig
    summary = "the whole backbone learns, only the task's own logits compared (lower bound)"
    masked = True


@register
class Joint(FineTuning):
    """Fine-tuning of the backbone on all tasks jointly: not continual learning."""

    Config = JointConfig
    summary = "the whole backbone learns all tasks jointly (upper bound)"
    matched_rate = 5e-4
    joint = True
