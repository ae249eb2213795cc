"""Settings that methods share: tuned learning rates, and the protocols of published code."""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import Field

Positive = Annotated[float, Field(gt=0)]
Setting = str | float | bool | tuple[float, ...] | None
Settings = dict[str, dict[str, Setting]]
"""Some settings of a run by group."""


@dataclass(frozen=True)
class Experiment:
    """Benchmark for published settings."""

    protocol: str
    """Benchmark with published settings: this one, or ImageNet-R if the authors did not run it."""
    exact: bool
    """True if these settings were made for this benchmark."""
    known: bool
    """True if it is one of the published benchmarks."""
    batch: int
    """Default batch size on this benchmark."""
    tasks: int
    """Number of tasks."""


class TunedRates(NamedTuple):
    """Best learning rates of the prompts on emoji-r, as multiples of the head's, by preset.

    Chosen from 0.02, 0.1, 0.5, 2, 8 (``matched``) and 0.5, 2, 8, 32 (``ridge``) on held-out training images, two seeds.
    """

    matched: float | None = None
    ridge: float | None = None


NO_ALIGNMENT: Settings = {"alignment": {"enabled": False}}


def vq_protocol(experiment: Experiment, **method: Setting) -> Settings:
    """Return the settings of VQ-Prompt's code with its schedule, as the ProbPrompt paper."""
    bird = experiment.protocol == "cub200"
    return {
        "method": method,
        "training": {
            "epochs": 20,
            "head_lr": 0.0025,
            "prompt_lr_scale": 5.0,
            "schedule": "vq-epoch" if bird else "vq",
            "frozen_epochs": 2 if experiment.protocol == "cifar100" else 1,
            "nominal_steps": 400 // experiment.tasks if experiment.exact and not bird else None,
        },
        "alignment": {"lr": 1e-5, "first_lr": 1e-4, "lr_delay": 1, "batch_ratio": 2.0 if bird else 4.0},
    }


def coda_protocol(experiment: Experiment, head_lr: float = 1e-3, **method: Setting) -> Settings:
    """Return the settings of CODA-Prompt's code, also for DualPrompt, L2P++ and fine-tuning."""
    return {
        **NO_ALIGNMENT,
        "method": method,
        "training": {
            "epochs": 20 if experiment.protocol == "cifar100" else 50,
            "batch_size": 128 if experiment.known else experiment.batch,
            "head_lr": head_lr,
            "prompt_lr_scale": 1.0,
            "schedule": "vq-epoch",
        },
    }


def google_protocol(rate: float, batch: int, epochs: int, **method: Setting) -> Settings:
    """Return common settings of L2P, DualPrompt and HiDe-Prompt: 21k weights, clipping."""
    return {
        **NO_ALIGNMENT,
        "method": method,
        "backbone": {"name": "vit_base_patch16_224.orig_in21k"},
        "data": {"interpolation": "bicubic", "center_crop": True},
        "training": {
            "epochs": epochs,
            "batch_size": batch,
            "head_lr": rate * batch / 256,
            "prompt_lr_scale": 1.0,
            "schedule": "constant",
            "clip": 1.0,
            "crop_scale": (0.05, 1.0),
        },
    }
