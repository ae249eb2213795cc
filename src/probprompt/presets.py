"""Settings that belong together, by name."""

from typing import Any

DEMO: dict[str, Any] = {
    "data": {"benchmark": "emoji-r", "tasks": 5},
    "backbone": {"name": "demo"},
    "training": {
        "epochs": 12,
        "batch": 16,
        "head_rate": 0.01,
        "crop_scale": (0.4, 1.0),
        "adapt_tasks": 1,
    },
    "alignment": {"rate": 0.003, "augmented_statistics": False},
}
"""Twenty classes in five tasks within two minutes on two cores; chosen on held-out training images.

Prompts adapt to drawings in the first task and are then fixed: learning them anew in every task moves the features
of old classes away from their stored statistics, and ends no better than no prompts at all (docs/demo.md).
"""

DEMO_PROBPROMPT: dict[str, Any] = {
    "name": "probprompt",
    "blocks": tuple(range(8)),
    "relevance_temperature": "dim",
    "initial_std": 0.1,
}
"""ProbPrompt's own settings there, chosen in the same way."""
