"""The control of every table: what the frozen backbone gives with no prompts at all."""

from typing import Literal

from torch import Tensor

from probprompt.methods.base import Context, Method, MethodConfig, Prompted, Shape, register


class LinearProbeConfig(MethodConfig):
    """A linear probe has no settings of its own."""

    name: Literal["linear-probe"] = "linear-probe"


@register
class LinearProbe(Method):
    """No prompts: only the head learns, on features that never change."""

    Config = LinearProbeConfig
    summary = "no prompts: a linear head on the frozen features (control)"
    needs_query = False

    def __init__(self, config: LinearProbeConfig, shape: Shape, seed: int) -> None:
        super().__init__(shape, seed)

    def prompts(self, query: Tensor | None, context: Context) -> Prompted:
        """Inject nothing."""
        return Prompted()
