"""One module per method. Every module in this folder is imported, so a new method needs no registration."""

from importlib import import_module
from pkgutil import iter_modules

from probprompt.methods.base import (
    EVALUATION,
    Context,
    Method,
    MethodConfig,
    Prompted,
    Shape,
    TaskSummary,
    find,
    parse_config,
    register,
    registered,
)

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = [
    "EVALUATION",
    "Context",
    "Method",
    "MethodConfig",
    "Prompted",
    "Shape",
    "TaskSummary",
    "find",
    "parse_config",
    "register",
    "registered",
]
