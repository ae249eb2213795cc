"""Settings that belong together, by name: how a method is run on a benchmark.

``published``: each method as its authors ran it, with their rates, epochs, batches, augmentation and [0, 1] input;
    ProbPrompt, whose code is not public, in the paper's literal reading and VQ-Prompt's protocol. What is wrong in
    published code is not repeated: the correct behaviour is the default, and the other an option that marks results.
``matched``: one budget, augmentation, input, head and alignment for all methods.
``ridge``: as matched, with the ridge head on prompts that adapt in the first task, for every method that has prompts;
    on published benchmarks for as long, at the rate and under the very head that were chosen for the flagship.
``flagship``: ProbPrompt with the ridge head: prompts adapt in the first task, every later one is a pass over its images
    and a solve. On published benchmarks images are passed with their mirror images, untried on ImageNet-R and
    Tiny-ImageNet.
"""

from collections.abc import Callable, Mapping
from typing import Any

from probprompt import methods
from probprompt.config import merge
from probprompt.errors import UserError, suggest

Settings = dict[str, Any]

NAMES = ("published", "matched", "ridge", "flagship")
BASELINES = ("ft", "ft++", "joint")
CONTROLS = ("linear-probe", "nearest-mean", "lda", "ranpac")

ORIGINAL_21K = "vit_base_patch16_224.orig_in21k"
AUGREG_1K = "vit_base_patch16_224.augreg_in21k_ft_in1k"


def settings(preset: str, method: str, benchmark: str, tasks: object = None) -> Settings:
    """Nested settings of a method on a benchmark (a name or a folder), in its usual number of tasks or another.

    Tasks that are given by their sizes or classes, not by their number, are none of a preset's business.
    """
    if preset not in NAMES:
        raise UserError(f"no preset is called {preset!r}: {suggest(preset, NAMES)}")
    methods.find(method)
    if preset == "flagship" and method != "probprompt":
        raise UserError(f"the preset 'flagship' is for probprompt alone, not for {method}: use 'matched'")
    base: Settings = {"preset": preset, "data": {"benchmark": benchmark}, "method": {"name": method}}
    makers = {"published": _published, "matched": _matched, "ridge": _ridge, "flagship": _flagship}
    made = makers[preset](method, benchmark)
    made = merge(base, made)
    if isinstance(tasks, int):
        made = merge(made, {"data": {"tasks": tasks}})
    if preset == "published" and method == "coda-prompt":  # a hundred components over all tasks
        count = made["data"].get("tasks") or 10
        made = merge(made, {"method": {"components_per_task": max(1, round(100 / count))}})
    return made


def of_run(preset: object, config: Mapping[str, Any], tasks: object) -> Settings | None:
    """The same for what a run has recorded as its preset and settings; None where it has no preset of these."""
    if preset not in NAMES:
        return None
    return settings(str(preset), config["method"]["name"], str(config["data"]["benchmark"]), tasks)


# What each benchmark asks for -----------------------------------------------------------------------------------

_BENCHMARKS: dict[str, Settings] = {
    "cifar100": {"data": {"tasks": 10}, "backbone": {"name": "sup1k"}, "training": {"batch": 128}},
    "imagenet-r": {"data": {"tasks": 10}, "backbone": {"name": "sup1k"}, "training": {"batch": 64}},
    "cub200": {"data": {"tasks": 10}, "backbone": {"name": "sup21k"}, "training": {"batch": 128}},
    "tiny-imagenet": {"data": {"tasks": 10}, "backbone": {"name": "sup1k"}, "training": {"batch": 128}},
    "tu-berlin": {"data": {"tasks": 10}, "backbone": {"name": "sup1k"}, "training": {"batch": 64}},
}
PHOTOS = ("imagenet-r", "cub200")
"""Published code cuts their random crops from the whole photograph, not from a copy of it that is kept smaller."""


def are_smaller(data: Mapping[str, Any]) -> bool:
    """Whether a run's images are such copies, by its settings of data."""
    return data["benchmark"] in PHOTOS and data.get("stored_side") != "full"


_EMOJI_R: Settings = {
    "data": {"tasks": 5},
    "backbone": {"name": "demo"},
    "training": {"epochs": 12, "batch": 16, "head_rate": 0.01, "crop_scale": (0.4, 1.0)},
    "alignment": {"rate": 0.003, "augmented_statistics": False},
}
"""Twenty classes in five tasks within two minutes on two cores; chosen on held-out training images.

The published rate of the head's refit (1e-5) is made for tens of thousands of images and does nothing here."""


def _protocol(benchmark: str) -> str:
    """Whose published settings a benchmark takes that the authors did not run: those of ImageNet-R."""
    return benchmark if benchmark in ("cifar100", "imagenet-r", "cub200") else "imagenet-r"


def _surroundings(benchmark: str) -> Settings:
    """Tasks, backbone and batch; on a benchmark of one's own only the backbone's and batch's usual values."""
    if benchmark in _BENCHMARKS:
        return _BENCHMARKS[benchmark]
    return {"backbone": {"name": "demo"}, "training": {"batch": 16 if benchmark == "emoji-r" else 64}}


# Published ------------------------------------------------------------------------------------------------------

_NO_ALIGNMENT: Settings = {"alignment": {"enabled": False}}


def _published(method: str, benchmark: str) -> Settings:
    if method not in _AUTHORS:
        raise UserError(f"nobody has published settings for {method}: use the preset 'matched'")
    found = _AUTHORS[method](_protocol(benchmark), benchmark)
    if benchmark not in _BENCHMARKS:  # the user's benchmark, our weights
        found = {name: part for name, part in found.items() if name != "backbone"}
    whole = {"data": {"stored_side": "full"}} if benchmark in PHOTOS else {}
    return merge(merge(_surroundings(benchmark), {"backbone": {"normalisation": "unit"}, **whole}), found)


def _vq_protocol(protocol: str, benchmark: str) -> Settings:
    """VQ-Prompt's code, quirks of its schedule included; ProbPrompt says that it follows it."""
    bird = protocol == "cub200"
    return {
        "training": {
            "epochs": 20,
            "head_rate": 0.0025,
            "prompt_rate_factor": 5.0,
            "schedule": "vq-epoch" if bird else "vq",
            "frozen_epochs": 2 if protocol == "cifar100" else 1,
        },
        "alignment": {"rate": 1e-5, "first_rate": 1e-4, "batch_ratio": 2.0 if bird else 4.0},
    }


def _vq_prompt(protocol: str, benchmark: str) -> Settings:
    method = {"name": "vq-prompt", "temperature": 5.0 if protocol == "cub200" else 1.0}
    return merge(_vq_protocol(protocol, benchmark), {"method": method})


def _coda_protocol(protocol: str, benchmark: str) -> Settings:
    """CODA-Prompt's code, which also ran DualPrompt, L2P++, fine-tuning and the joint bound for its tables."""
    return {
        **_NO_ALIGNMENT,
        "training": {
            "epochs": 20 if protocol == "cifar100" else 50,
            "batch": 128 if benchmark in _BENCHMARKS else _surroundings(benchmark)["training"]["batch"],
            "head_rate": 1e-3,
            "prompt_rate_factor": 1.0,
            "schedule": "vq-epoch",
        },
    }


def _coda_prompt(protocol: str, benchmark: str) -> Settings:
    method = {"name": "coda-prompt", "orthogonality_weight": 0.0}
    return merge(_coda_protocol(protocol, benchmark), {"method": method})


def _fine_tuning(protocol: str, benchmark: str) -> Settings:
    return merge(_coda_protocol(protocol, benchmark), {"training": {"head_rate": 5e-5}})


def _google_protocol(rate: float, batch: int, epochs: int) -> Settings:
    """What L2P, DualPrompt and HiDe-Prompt share: the original 21k weights, Adam at a constant rate, clipping."""
    return {
        **_NO_ALIGNMENT,
        "backbone": {"name": ORIGINAL_21K},
        "data": {"interpolation": "bicubic"},
        "training": {
            "epochs": epochs,
            "batch": batch,
            "head_rate": rate * batch / 256,
            "prompt_rate_factor": 1.0,
            "schedule": "constant",
            "clip": 1.0,
            "crop_scale": (0.05, 1.0),
        },
    }


def _l2p(protocol: str, benchmark: str) -> Settings:
    return _google_protocol(rate=0.03, batch=16, epochs=5)


def _dual_prompt(protocol: str, benchmark: str) -> Settings:
    """The original's lengths count keys and values each: twice as many tokens here."""
    cifar = protocol == "cifar100"
    method = {
        "name": "dual-prompt",
        "general_tokens": 10,
        "expert_tokens": 10 if cifar else 40,
        "shared_keys": True,
        "copy_previous": True,
        "initial": "symmetric",
        "key_loss": "mean",
    }
    base = _google_protocol(rate=0.03 if cifar else 0.005, batch=24, epochs=5 if cifar else 50)
    return merge(base, {"method": method})


def _hide_prompt(protocol: str, benchmark: str) -> Settings:
    """HiDe-Prompt's own protocol, but for two things.

    Its step schedule for CIFAR-100 is a cosine here, and the gradients of prompts and task identity, which it trains
    apart, are clipped by their common norm. Its batch of 24 is one of eight GPUs.
    """
    cifar = protocol == "cifar100"
    rate = 0.03 * 24 / 256
    contrast = {"cifar100": 0.1, "cub200": 0.01}.get(protocol, 0.5)
    base = _google_protocol(rate=0.03, batch=24, epochs=150 if protocol == "imagenet-r" else 50)
    found: Settings = {
        "method": {
            "name": "hide-prompt",
            "tokens": 10 if cifar else 40,
            "contrast": contrast,
            "identity_rate_factor": 1 / 3 if protocol == "cub200" else 1 / 60,
            "identity_epochs": 20,
        },
        "training": {
            "batch": 192 if benchmark in _BENCHMARKS else 24,
            "head_rate": rate / 10,
            "prompt_rate_factor": 10.0,
            "schedule": "cosine",
        },
        "alignment": {
            "enabled": True,
            "centroids": 10,
            "optimiser": "sgd",
            "schedule": "epoch",
            "epochs": 30,
            "rate": 0.005,
            "final_rate": 0.0,
            "weight_decay": 0.0,
            "batch_ratio": 120 / 192 if benchmark in _BENCHMARKS else 5.0,
            "augmented_statistics": False,
        },
    }
    if cifar:
        found["backbone"] = {"normalisation": "cifar100"}
    return merge(base, found)


def _evo_prompt(protocol: str, benchmark: str) -> Settings:
    return {
        **_NO_ALIGNMENT,
        "backbone": {"name": AUGREG_1K},
        "data": {"interpolation": "bicubic"},
        "training": {
            "epochs": 20 if protocol == "cifar100" else 50,
            "batch": 64,
            "head_rate": 0.005,
            "prompt_rate_factor": 1.0,
            "schedule": "constant",
            "clip": 1.0,
            "augmentation": "crop+colour",
        },
    }


def _apt(protocol: str, benchmark: str) -> Settings:
    rate, epochs, ema = {"cifar100": (0.004, 30, 0.7), "cub200": (0.02, 25, 0.7)}.get(protocol, (0.003, 30, 0.8))
    return {
        **_NO_ALIGNMENT,
        "method": {"name": "apt", "ema": ema},
        "training": {
            "epochs": epochs,
            "batch": 64,
            "head_rate": rate,
            "prompt_rate_factor": 1.0,
            "schedule": "vq-epoch",
            "augmentation": "autoaugment+crop",
        },
    }


def _ranpac(protocol: str, benchmark: str) -> Settings:
    return {"head": {"kind": "ridge", "projections": 10_000}}


_AUTHORS: Mapping[str, Callable[[str, str], Settings]] = {
    "probprompt": _vq_protocol,
    "vq-prompt": _vq_prompt,
    "coda-prompt": _coda_prompt,
    "dual-prompt": _dual_prompt,
    "l2p": _l2p,
    "l2p++": _coda_protocol,
    "deep-l2p++": _coda_protocol,
    "hide-prompt": _hide_prompt,
    "evo-prompt": _evo_prompt,
    "apt": _apt,
    "ft": _fine_tuning,
    "ft++": _fine_tuning,
    "joint": _fine_tuning,
    "linear-probe": _vq_protocol,
    "nearest-mean": _vq_protocol,
    "lda": _vq_protocol,
    "ranpac": _ranpac,
}


# Matched --------------------------------------------------------------------------------------------------------

_WIDE: Settings = {"projections": 10_000, "ridge_choice": "every"}
"""A ridge head for benchmarks of thousands of images, as wide as RanPAC's; its strength suits all classes so far."""

_MATCHED: Settings = {
    "training": {"epochs": 20, "head_rate": 0.0025, "prompt_rate_factor": 5.0, "schedule": "cosine"},
    "backbone": {"normalisation": "backbone"},
}
_FACTORS: dict[str, float] = {
    "apt": 2.0,
    "coda-prompt": 0.1,
    "deep-l2p++": 0.5,
    "dual-prompt": 0.5,
    "evo-prompt": 0.1,
    "hide-prompt": 2.0,
    "l2p": 0.1,
    "l2p++": 0.5,
    "probprompt": 0.5,
    "vq-prompt": 0.5,
}
"""How much faster than the head a method's prompts learn on emoji-r: the best of 0.02, 0.1, 0.5, 2 and 8 for each, on
held-out training images, two seeds."""
_FINE_TUNING_RATES: dict[str, float] = {"ft": 2e-4, "ft++": 2e-4, "joint": 5e-4}
"""The best of 5e-5, 2e-4, 5e-4 and 1e-3 there, in the same way."""


def _matched(method: str, benchmark: str) -> Settings:
    """One protocol for all. Fine-tuning is what happens without any care, so it has no alignment."""
    budget = merge(_EMOJI_R, {"backbone": {"normalisation": "backbone"}}) if benchmark == "emoji-r" else _MATCHED
    found = merge(_surroundings(benchmark), budget)
    if method not in CONTROLS:
        found = merge(found, {"head": {"kind": "linear"}})
    if method in BASELINES:
        rate = _FINE_TUNING_RATES[method] if benchmark == "emoji-r" else 5e-5
        return merge(found, merge(_NO_ALIGNMENT, {"training": {"head_rate": rate, "prompt_rate_factor": 1.0}}))
    if benchmark == "emoji-r" and method in _FACTORS:
        found = merge(found, {"training": {"prompt_rate_factor": _FACTORS[method]}})
    if benchmark in _BENCHMARKS and method == "ranpac":
        found = merge(found, {"head": _WIDE})
    return found


# The ridge head, and the flagship -------------------------------------------------------------------------------

_RIDGE_FACTORS: dict[str, float] = {
    "apt": 2.0,
    "coda-prompt": 0.5,
    "deep-l2p++": 0.5,
    "dual-prompt": 8.0,
    "evo-prompt": 0.5,
    "hide-prompt": 8.0,
    "l2p": 8.0,
    "l2p++": 0.5,
    "probprompt": 8.0,
    "vq-prompt": 0.5,
}
"""As above, under the ridge head: the best of 0.5, 2, 8 and 32."""
_ADAPTED: Settings = {
    "training": {"epochs": 40, "prompt_rate_factor": 20.0},
    "head": {**_WIDE, "layers": 5, "readings": "projected", "mirrored": True},
}
"""Chosen on held-out images of CIFAR-100, for ProbPrompt (results/cifar100-flagship.md); mirror images on those of
CUB-200 and TU-Berlin, too (results/further.md)."""
_ADAPTED_ON: dict[str, Settings] = {"cub200": {"training": {"epochs": 100}, "head": {"layers": 0}}}
"""Where the first task has few images: the best of 40, 100 and 200 epochs there (results/cub200-flagship.md). A head
that reads no blocks before the last does better there in the mean over two backbones (results/cub200-mirrored.md)."""


def _ridge(method: str, benchmark: str) -> Settings:
    if method in BASELINES or method in CONTROLS:
        raise UserError(f"the preset 'ridge' is for methods with prompts, not for {method}: use 'matched'")
    found = merge(_matched(method, benchmark), {"head": {"kind": "ridge"}, "training": {"adapt_tasks": 1}})
    if benchmark == "emoji-r" and method in _RIDGE_FACTORS:
        found = merge(found, {"training": {"prompt_rate_factor": _RIDGE_FACTORS[method]}})
    return merge(merge(found, _ADAPTED), _ADAPTED_ON.get(benchmark, {})) if benchmark in _BENCHMARKS else found


def _flagship(method: str, benchmark: str) -> Settings:
    """Where images are few, the head reads the query and three blocks before the last beside the prompted feature."""
    own: Settings = {"name": "probprompt", "initial_std": 0.1}
    if benchmark in _BENCHMARKS:
        return merge(_ridge(method, benchmark), {"method": own})
    own = {**own, "relevance_temperature": "dim"}
    reads = {"with_query": True, "layers": 3, "readings": "projected"}  # results/emoji-r-layers.md
    return merge(_ridge(method, benchmark), {"method": own, "head": reads})


# The demo -------------------------------------------------------------------------------------------------------

DEMO: tuple[tuple[str, str], ...] = (("probprompt", "flagship"), ("ranpac", "matched"), ("linear-probe", "matched"))
"""What the demo runs, each a method and a preset: ProbPrompt beside what the frozen backbone gives without prompts."""
