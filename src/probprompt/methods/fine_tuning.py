"""Full fine-tuning: what happens without prompts when the whole transformer learns.

The baselines below every table (``ft``, ``ft++``) and the bound above it (``joint``). They train the backbone itself,
so their models hold a copy of it, and nothing protects what was learned before.
"""

from typing import ClassVar, Literal

from torch import Tensor

from probprompt.methods.base import Context, Method, MethodConfig, Prompted, Shape, register


class FineTuningConfig(MethodConfig):
    """Fine-tuning has no settings of its own."""

    name: Literal["ft"] = "ft"


class MaskedFineTuningConfig(MethodConfig):
    """Fine-tuning has no settings of its own."""

    name: Literal["ft++"] = "ft++"


class JointConfig(MethodConfig):
    """Joint training has no settings of its own."""

    name: Literal["joint"] = "joint"


@register
class FineTuning(Method):
    """The backbone learns every task, with the logits of all classes seen so far."""

    Config: ClassVar[type[MethodConfig]] = FineTuningConfig
    summary = "the whole backbone learns, all logits compared: forgets nearly everything (lower bound)"
    needs_query = False
    trains_backbone = True
    masked = False
    aligned = False

    def __init__(self, config: MethodConfig, shape: Shape, seed: int) -> None:
        super().__init__(shape, seed)

    def prompts(self, query: Tensor | None, context: Context) -> Prompted:
        """Inject nothing."""
        return Prompted()


@register
class MaskedFineTuning(FineTuning):
    """The backbone learns every task, with the logits of the task's own classes."""

    Config = MaskedFineTuningConfig
    summary = "the whole backbone learns, only the task's own logits compared (lower bound)"
    masked = True


@register
class Joint(FineTuning):
    """The backbone learns all tasks at once, with all their images: no continual learning."""

    Config = JointConfig
    summary = "the whole backbone learns all tasks at once (upper bound)"
    joint = True
