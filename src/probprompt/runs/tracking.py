"""Sending a run's numbers to an experiment tracker, where one is wanted."""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from probprompt.errors import UserError, suggest


class Tracker(Protocol):
    """Takes named numbers at a step."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send numbers."""

    def close(self) -> None:
        """Send what is left."""


class _TensorBoard:
    def __init__(self, module: Any, folder: Path, config: Mapping[str, Any]) -> None:
        self._writer = module.SummaryWriter(str(folder / "tensorboard"))

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Project:
    """trackio and wandb share one interface."""

    def __init__(self, module: Any, folder: Path, config: Mapping[str, Any]) -> None:
        self._module = module
        module.init(project="probprompt", name=folder.name, config=dict(config))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._module.log(dict(values), step=step)

    def close(self) -> None:
        self._module.finish()


_KNOWN: dict[str, tuple[str, str, Callable[[Any, Path, Mapping[str, Any]], Tracker]]] = {
    "tensorboard": ("torch.utils.tensorboard", "track", _TensorBoard),
    "trackio": ("trackio", "trackio", _Project),
    "wandb": ("wandb", "wandb", _Project),
}


def check_tracker(name: str) -> None:
    """Refuse a tracker that is not known or not installed, before any work is done."""
    if name not in _KNOWN:
        raise UserError(f"no tracker is called {name!r}: {suggest(name, _KNOWN)}")
    module, extra, _ = _KNOWN[name]
    try:
        import_module(module)
    except ImportError:
        raise UserError(f"{name} is not installed: pip install 'probprompt[{extra}]'") from None


def open_tracker(name: str, folder: Path, config: Mapping[str, Any]) -> Tracker:
    """Open a tracker by name."""
    check_tracker(name)
    module, _, adapter = _KNOWN[name]
    return adapter(import_module(module), folder, config)
