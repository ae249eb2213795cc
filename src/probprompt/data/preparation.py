"""How images are prepared, as it is recorded, and refusing to go on with any other way."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from probprompt.data.loading import Viewer
from probprompt.errors import UserError

_NUMBERS = ("image_size", "resized", "mean", "std")
_TOLERANCE = 1e-4  # of what is written in decimals


def preparation(viewer: Viewer) -> dict[str, Any]:
    """What a record says of it."""
    return {
        "image_size": viewer.size,
        "resized": viewer.resized,
        "mean": viewer.mean.flatten().tolist(),
        "std": viewer.std.flatten().tolist(),
        "interpolation": viewer.kernel,
    }


def refuse_other_preparation(recorded: Mapping[str, Any], viewer: Viewer) -> None:
    """Refuse to prepare images otherwise than was recorded: the same weights would see other inputs."""
    now = preparation(viewer)
    differ = [
        f"{name} {recorded[name]}, now {now[name]}"
        for name in _NUMBERS
        if name in recorded and not np.allclose(recorded[name], now[name], rtol=0, atol=_TOLERANCE)
    ]
    if differ:
        raise UserError(
            f"images would be prepared otherwise than they were ({'; '.join(differ)}): put back the JSON file beside "
            "the weights as it was, or begin anew"
        )
