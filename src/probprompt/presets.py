"""Settings that belong together, by name."""

from typing import Any

DEMO: dict[str, Any] = {
    "data": {"benchmark": "emoji-r", "tasks": 5},
    "backbone": {"name": "demo"},
    "training": {"epochs": 5, "batch": 32},
}
"""Twenty classes in five tasks within two minutes on two cores."""
