"""Presets: named settings of a method on a benchmark.

``published``: each method with the learning rates, epochs, batch sizes, augmentation and [0, 1] input of its authors.
    ProbPrompt, whose code is not public, follows the paper's wording and VQ-Prompt's protocol. Errors of published code
    are corrected; an option restores each and flags the results.
``matched``: one budget, augmentation, input, head and alignment for all methods.
``ridge``: ``matched`` with the ridge head and prompts trained on the first task, for every method that has prompts. On
    published benchmarks epochs, learning rate and head are those of the flagship.
``flagship``: ProbPrompt with the ridge head. The first task trains the prompts; every later one is a single pass and a
    solve. On published benchmarks with flip averaging, which was not tested on ImageNet-R and Tiny-ImageNet.
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
    """Return the nested settings of a method on a benchmark (a name or a folder).

    ``tasks`` changes a preset only if it is a number, not if it lists sizes or classes.
    """
    if preset not in NAMES:
        raise UserError(f"Unknown preset {preset!r}. {suggest(preset, NAMES)}")
    kind = methods.find(method)
    if preset == "flagship" and method != "probprompt":
        raise UserError(f"The preset 'flagship' supports only probprompt, not {method}. Use 'matched'.")
    base = {"preset": preset, "data": {"benchmark": benchmark}, "method": {"name": method}}
    if preset == "published":
        chosen = _published(kind, benchmark, tasks)
    else:
        chosen = {"matched": _matched, "ridge": _ridge, "flagship": _flagship}[preset](kind, benchmark)
    chosen = merge(base, chosen)
    return merge(chosen, {"data": {"tasks": tasks}}) if isinstance(tasks, int) else chosen


def has_prompts(method: type[Method]) -> bool:
    """Return True if the method trains prompts, not only a head or the backbone."""
    return method.learns and not method.trains_backbone


def resolve(preset: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested settings, which may name the preset, into those of a preset."""
    config = parse_config(given, any_head=True)  # the preset may choose the head
    name = preset or config.preset
    if name is None:
        return dict(given)
    base = settings(name, config.method.name, config.data.benchmark, config.data.tasks)
    return merge(merge(base, given), {"preset": name})


def of_run(preset: object, config: Mapping[str, Any], tasks: object) -> dict[str, Any] | None:
    """Return the preset's settings for a recorded run; None if its preset is unknown."""
    if preset not in NAMES:
        return None
    return settings(str(preset), config["method"]["name"], str(config["data"]["benchmark"]), tasks)


# Benchmarks

_TASKS = 10
_BENCHMARKS = {
    "cifar100": ("sup1k", 128),
    "imagenet-r": ("sup1k", 64),
    "cub200": ("sup21k", 128),
    "tiny-imagenet": ("sup1k", 128),
    "tu-berlin": ("sup1k", 64),
}
"""Backbone and batch size of the published benchmarks. All have ten tasks."""
PHOTOS = ("imagenet-r", "cub200")
"""Published code crops the full photos of these, not smaller copies."""


_EMOJI_R: Settings = {
    "data": {"tasks": 5},
    "backbone": {"name": "demo"},
    "training": {"epochs": 12, "batch_size": 16, "head_lr": 0.01, "crop_scale": (0.4, 1.0)},
    "alignment": {"lr": 0.003, "augmented_statistics": False},
}
"""Twenty classes in five tasks within two minutes on two cores, chosen on held-out training images. The published
learning rate of the alignment (1e-5) is meant for tens of thousands of images and has no effect here."""


def _batch(benchmark: str) -> int:
    return _BENCHMARKS[benchmark][1] if benchmark in _BENCHMARKS else 16 if benchmark == "emoji-r" else 64


def _surroundings(benchmark: str) -> Settings:
    """Return tasks, backbone and batch size."""
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
    chosen = method.published(experiment)
    if chosen is None:
        raise UserError(f"No settings were published for {method_name(method)}. Use the preset 'matched'.")
    if not known:  # an unknown benchmark uses our default weights
        chosen = {name: part for name, part in chosen.items() if name != "backbone"}
    whole = {"data": {"stored_size": "full"}} if benchmark in PHOTOS else {}
    base = {"backbone": {"normalization": "unit", "precision": "fp32"}, **whole}
    return merge(merge(_surroundings(benchmark), base), chosen)


_WIDE: dict[str, Setting] = {"projections": 10_000, "ridge_choice": "every"}
"""Ridge head for benchmarks of thousands of images, as wide as RanPAC's. Its penalty suits all classes so far."""

_MATCHED: Settings = {
    "training": {"epochs": 20, "head_lr": 0.0025, "prompt_lr_scale": 5.0, "schedule": "cosine"},
    "backbone": {"normalization": "backbone"},
}


def _matched(method: type[Method], benchmark: str) -> Settings:
    """Return the common protocol; fine-tuning, the lower bound, has no alignment."""
    budget = merge(_EMOJI_R, {"backbone": {"normalization": "backbone"}}) if benchmark == "emoji-r" else _MATCHED
    chosen = merge(_surroundings(benchmark), budget)
    if method.learns:
        chosen = merge(chosen, {"head": {"kind": "linear"}})
    elif benchmark in _BENCHMARKS and method.preferred_head == "ridge":
        chosen = merge(chosen, {"head": _WIDE})
    if method.trains_backbone:
        rate = method.matched_rate if benchmark == "emoji-r" else 5e-5
        return merge(chosen, {**NO_ALIGNMENT, "training": {"head_lr": rate, "prompt_lr_scale": 1.0}})
    return merge(chosen, _prompt_rate(method, benchmark, "matched"))


def _prompt_rate(method: type[Method], benchmark: str, preset: str) -> Settings:
    factor: float | None = getattr(method.tuned_rates, preset) if benchmark == "emoji-r" else None
    return {} if factor is None else {"training": {"prompt_lr_scale": factor}}


# Ridge head and flagship

_ADAPTED: Settings = {
    "training": {"epochs": 40, "prompt_lr_scale": 20.0},
    "head": {**_WIDE, "layers": 5, "intermediate": "projected", "flip_average": True},
}
"""Chosen for ProbPrompt on held-out images of CIFAR-100; flip averaging also on CUB-200 and TU-Berlin."""
_ADAPTED_ON: dict[str, Settings] = {"cub200": {"training": {"epochs": 100}, "head": {"layers": 0}}}
"""With few images in the first task: the best of 40, 100 and 200 epochs. Without intermediate features CUB-200 is
better on average over two backbones."""


def _ridge(method: type[Method], benchmark: str) -> Settings:
    if not has_prompts(method):
        raise UserError(f"The preset 'ridge' needs a method with prompts, not {method_name(method)}. Use 'matched'.")
    chosen = merge(_matched(method, benchmark), {"head": {"kind": "ridge"}, "training": {"adapt_tasks": 1}})
    chosen = merge(chosen, _prompt_rate(method, benchmark, "ridge"))
    return merge(merge(chosen, _ADAPTED), _ADAPTED_ON.get(benchmark, {})) if benchmark in _BENCHMARKS else chosen


def _flagship(method: type[Method], benchmark: str) -> Settings:
    """Return the settings; with few images the head also reads the query and three blocks."""
    if benchmark in _BENCHMARKS:
        return merge(_ridge(method, benchmark), {"method": {"initial_std": 0.1}})
    own = {"initial_std": 0.1, "relevance_temperature": "dim"}
    reads = {"with_query": True, "layers": 3, "intermediate": "projected"}
    return merge(_ridge(method, benchmark), {"method": own, "head": reads})


# Demo

_READS: dict[str, Setting] = {"layers": 3, "intermediate": "projected"}
_LIVE: dict[str, Setting] = {"relevance_temperature": "initial_std", "relevance_gradient": "none", "evaluation": "mean"}
_READ_OUT: dict[str, Setting] = {"injection": "read-tokens", "blocks": (0,)}
DEMO: tuple[tuple[str, str, Settings], ...] = (
    ("probprompt", "flagship", {"method": {**_LIVE, **_READ_OUT}}),
    ("vq-prompt", "ridge", {"head": {"with_query": True, **_READS}}),
    ("ranpac", "matched", {"head": _READS}),
)
"""Methods, presets and settings of the demo. All heads read the same blocks of the backbone."""
