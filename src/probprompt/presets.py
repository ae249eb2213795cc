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

from collections.abc import Mapping
from typing import Any

from probprompt import methods
from probprompt.config import merge, parse_config
from probprompt.errors import UserError, suggest
from probprompt.methods.base import Method, method_name
from probprompt.methods.settings import NO_ALIGNMENT, Experiment, Setting, Settings

NAMES = ("published", "matched", "ridge", "flagship")


def settings(preset: str, method: str, benchmark: str, tasks: object = None) -> dict[str, Any]:
    """Nested settings of a method on a benchmark (a name or a folder), in its usual number of tasks or another.

    Tasks that are given by their sizes or classes, not by their number, are none of a preset's business.
    """
    if preset not in NAMES:
        raise UserError(f"no preset is called {preset!r}: {suggest(preset, NAMES)}")
    made = methods.find(method)
    if preset == "flagship" and method != "probprompt":
        raise UserError(f"the preset 'flagship' is for probprompt alone, not for {method}: use 'matched'")
    base = {"preset": preset, "data": {"benchmark": benchmark}, "method": {"name": method}}
    if preset == "published":
        chosen = _published(made, benchmark, tasks)
    else:
        chosen = {"matched": _matched, "ridge": _ridge, "flagship": _flagship}[preset](made, benchmark)
    chosen = merge(base, chosen)
    return merge(chosen, {"data": {"tasks": tasks}}) if isinstance(tasks, int) else chosen


def has_prompts(method: type[Method]) -> bool:
    """Return True if the method learns prompts, and neither only a head nor the backbone."""
    return method.learns and not method.trains_backbone


def resolve(preset: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Lay nested settings, which may name the preset, over those of a preset for their method and benchmark."""
    asked = parse_config(given, any_head=True)  # the preset may choose the head
    name = preset or asked.preset
    if name is None:
        return dict(given)
    base = settings(name, asked.method.name, asked.data.benchmark, asked.data.tasks)
    return merge(merge(base, given), {"preset": name})


def of_run(preset: object, config: Mapping[str, Any], tasks: object) -> dict[str, Any] | None:
    """The same for what a run has recorded as its preset and settings; None where it has no preset of these."""
    if preset not in NAMES:
        return None
    return settings(str(preset), config["method"]["name"], str(config["data"]["benchmark"]), tasks)


# What each benchmark asks for -----------------------------------------------------------------------------------

_TASKS = 10
_BENCHMARKS = {
    "cifar100": ("sup1k", 128),
    "imagenet-r": ("sup1k", 64),
    "cub200": ("sup21k", 128),
    "tiny-imagenet": ("sup1k", 128),
    "tu-berlin": ("sup1k", 64),
}
"""Backbone and batch size of the published benchmarks, which come in ten tasks."""
PHOTOS = ("imagenet-r", "cub200")
"""Published code cuts their random crops from the whole photograph, not from a copy of it that is kept smaller."""


_EMOJI_R: Settings = {
    "data": {"tasks": 5},
    "backbone": {"name": "demo"},
    "training": {"epochs": 12, "batch_size": 16, "head_lr": 0.01, "crop_scale": (0.4, 1.0)},
    "alignment": {"lr": 0.003, "augmented_statistics": False},
}
"""Twenty classes in five tasks within two minutes on two cores; chosen on held-out training images.

The published rate of the head's refit (1e-5) is made for tens of thousands of images and does nothing here."""


def _batch(benchmark: str) -> int:
    return _BENCHMARKS[benchmark][1] if benchmark in _BENCHMARKS else 16 if benchmark == "emoji-r" else 64


def _surroundings(benchmark: str) -> Settings:
    """Return tasks, backbone and batch size; on an unknown benchmark only the defaults of the last two."""
    known = benchmark in _BENCHMARKS
    backbone = _BENCHMARKS[benchmark][0] if known else "demo"
    tasks: Settings = {"data": {"tasks": _TASKS}} if known else {}
    return {**tasks, "backbone": {"name": backbone}, "training": {"batch_size": _batch(benchmark)}}


def _published(method: type[Method], benchmark: str, tasks: object) -> Settings:
    known, exact = benchmark in _BENCHMARKS, benchmark in ("cifar100", "imagenet-r", "cub200")
    experiment = Experiment(
        protocol=benchmark if exact else "imagenet-r",
        exact=exact,
        known=known,
        batch=_batch(benchmark),
        tasks=tasks if isinstance(tasks, int) else _TASKS,
    )
    found = method.published(experiment)
    if found is None:
        raise UserError(f"nobody has published settings for {method_name(method)}: use the preset 'matched'")
    if not known:  # the user's benchmark, our weights
        found = {name: part for name, part in found.items() if name != "backbone"}
    whole = {"data": {"stored_size": "full"}} if benchmark in PHOTOS else {}
    base = {"backbone": {"normalization": "unit", "precision": "fp32"}, **whole}
    return merge(merge(_surroundings(benchmark), base), found)


_WIDE: dict[str, Setting] = {"projections": 10_000, "ridge_choice": "every"}
"""A ridge head for benchmarks of thousands of images, as wide as RanPAC's; its strength suits all classes so far."""

_MATCHED: Settings = {
    "training": {"epochs": 20, "head_lr": 0.0025, "prompt_lr_scale": 5.0, "schedule": "cosine"},
    "backbone": {"normalization": "backbone"},
}


def _matched(method: type[Method], benchmark: str) -> Settings:
    """One protocol for all. Fine-tuning is what happens without any care, so it has no alignment."""
    budget = merge(_EMOJI_R, {"backbone": {"normalization": "backbone"}}) if benchmark == "emoji-r" else _MATCHED
    found = merge(_surroundings(benchmark), budget)
    if method.learns:
        found = merge(found, {"head": {"kind": "linear"}})
    elif benchmark in _BENCHMARKS and method.preferred_head == "ridge":
        found = merge(found, {"head": _WIDE})
    if method.trains_backbone:
        rate = method.matched_rate if benchmark == "emoji-r" else 5e-5
        return merge(found, {**NO_ALIGNMENT, "training": {"head_lr": rate, "prompt_lr_scale": 1.0}})
    return merge(found, _prompt_rate(method, benchmark, "matched"))


def _prompt_rate(method: type[Method], benchmark: str, preset: str) -> Settings:
    """Return the learning rate of the prompts that was tuned on emoji-r, there."""
    factor: float | None = getattr(method.tuned_rates, preset) if benchmark == "emoji-r" else None
    return {} if factor is None else {"training": {"prompt_lr_scale": factor}}


# The ridge head, and the flagship -------------------------------------------------------------------------------

_ADAPTED: Settings = {
    "training": {"epochs": 40, "prompt_lr_scale": 20.0},
    "head": {**_WIDE, "layers": 5, "intermediate": "projected", "flip_average": True},
}
"""Chosen on held-out images of CIFAR-100, for ProbPrompt (results/cifar100.md); mirror images on those of
CUB-200 and TU-Berlin, too (results/cifar100.md)."""
_ADAPTED_ON: dict[str, Settings] = {"cub200": {"training": {"epochs": 100}, "head": {"layers": 0}}}
"""Where the first task has few images: the best of 40, 100 and 200 epochs there (results/cub200.md). A head
that reads no blocks before the last does better there in the mean over two backbones (results/cub200.md)."""


def _ridge(method: type[Method], benchmark: str) -> Settings:
    if not has_prompts(method):
        raise UserError(f"the preset 'ridge' is for methods with prompts, not for {method_name(method)}: use 'matched'")
    found = merge(_matched(method, benchmark), {"head": {"kind": "ridge"}, "training": {"adapt_tasks": 1}})
    found = merge(found, _prompt_rate(method, benchmark, "ridge"))
    return merge(merge(found, _ADAPTED), _ADAPTED_ON.get(benchmark, {})) if benchmark in _BENCHMARKS else found


def _flagship(method: type[Method], benchmark: str) -> Settings:
    """Where images are few, the head reads the query and three blocks before the last beside the prompted feature."""
    if benchmark in _BENCHMARKS:
        return merge(_ridge(method, benchmark), {"method": {"initial_std": 0.1}})
    own = {"initial_std": 0.1, "relevance_temperature": "dim"}
    reads = {"with_query": True, "layers": 3, "intermediate": "projected"}  # results/emoji-r.md
    return merge(_ridge(method, benchmark), {"method": own, "head": reads})


# The demo -------------------------------------------------------------------------------------------------------

_READS: dict[str, Setting] = {"layers": 3, "intermediate": "projected"}
_LIVE: dict[str, Setting] = {"relevance_temperature": "initial_std", "relevance_gradient": "none", "evaluation": "mean"}
_READ_OUT: dict[str, Setting] = {"injection": "read-tokens", "blocks": (0,)}
DEMO: tuple[tuple[str, str, Settings], ...] = (
    ("probprompt", "flagship", {"method": {**_LIVE, **_READ_OUT}}),
    ("vq-prompt", "ridge", {"head": {"with_query": True, **_READS}}),
    ("ranpac", "matched", {"head": _READS}),
)
"""What the demo runs: methods, presets, and settings over these. All heads read the same blocks of the backbone."""
