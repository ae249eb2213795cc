"""Settings of a run: frozen, validated and complete."""

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from probprompt import heads, methods
from probprompt.data import datasets
from probprompt.data.transforms import Augmentation, Kernel
from probprompt.errors import UserError, suggest
from probprompt.heads import AnyHeadSettings
from probprompt.heads.linear import AlignmentConfig
from probprompt.methods import MethodConfig

_REFIT = {"lr": "rate", "min_lr": "final_rate", "first_lr": "first_rate", "lr_delay": "rate_delay"}
_REFIT |= {"optimizer": "optimiser"}
STORED_NAMES = {
    "data.stored_size": "data.stored_side",
    "backbone.normalization": "backbone.normalisation",
    "training.batch_size": "training.batch",
    "training.head_lr": "training.head_rate",
    "training.prompt_lr_scale": "training.prompt_rate_factor",
    "training.later_lr_scale": "training.later_rate_factor",
    "training.min_lr": "training.final_rate",
    **{f"alignment.{name}": f"alignment.{stored}" for name, stored in _REFIT.items()},
    "head.intermediate": "head.readings",
    "head.flip_average": "head.mirrored",
    "head.flip_augment": "head.with_mirrors",
    "head.compensate_drift": "head.follow",
    "method.regularization": "method.regularisation",
    "method.quantize": "method.quantise",
    "method.identity_lr_scale": "method.identity_rate_factor",
    "method.identity_row_lr": "method.identity_row_rate",
    "method.identity_batch_size": "method.identity_batch",
    **{f"method.identity_alignment.{name}": f"method.identity_alignment.{stored}" for name, stored in _REFIT.items()},
    "evaluation_batch_size": "evaluation_batch",
}
"""Names that files use for renamed settings. Files keep these names, so that every version reads them."""
STORED_VALUES = {
    "training.augmentation": {"crop+color": "crop+colour"},
    "head.kind": {"normalized": "normalised"},
    "head.intermediate": {"unprojected": "beside"},
}
"""Values that files use for renamed values, by setting."""
_PYTHON_NAMES = {stored: name for name, stored in STORED_NAMES.items()}
_PYTHON_VALUES = {
    STORED_NAMES.get(name, name): {stored: value for value, stored in values.items()}
    for name, values in STORED_VALUES.items()
}
_RENAMED_METHODS = ("probprompt", "vq-prompt", "hide-prompt")


def to_stored(settings: Mapping[str, Any], group: str = "") -> dict[str, Any]:
    """Return settings, nested or by dotted names, with the names that files use.

    >>> to_stored({"training": {"head_lr": 0.1, "augmentation": "crop+color"}}), to_stored({"quantize": True}, "method")
    ({'training': {'head_rate': 0.1, 'augmentation': 'crop+colour'}}, {'quantise': True})
    """
    return _respell(settings, STORED_NAMES, STORED_VALUES, group and f"{group}.")


def from_stored(settings: Mapping[str, Any], group: str = "") -> dict[str, Any]:
    """Return settings of a file, nested or by dotted names, with their names in Python.

    >>> from_stored({"training.head_rate": 0.1}), from_stored({"readings": "beside"}, "head")
    ({'training.head_lr': 0.1}, {'intermediate': 'unprojected'})
    """
    return _respell(settings, _PYTHON_NAMES, _PYTHON_VALUES, group and f"{group}.")


def _respell(
    settings: Mapping[str, Any], names: Mapping[str, str], values: Mapping[str, Mapping[str, str]], prefix: str
) -> dict[str, Any]:
    if prefix == "method." and settings.get("name", "probprompt") not in _RENAMED_METHODS:
        return dict(settings)  # a plug-in may have a setting of that name
    result = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            value = _respell(value, names, values, f"{name}.")
        elif isinstance(value, str):
            value = values.get(name, {}).get(value, value)
        result[names.get(name, name).removeprefix(prefix)] = value
    return result


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DataConfig(_Settings):
    """Images, and their split into tasks."""

    benchmark: str = "emoji-r"
    """Name of a benchmark, or a folder of class folders."""
    root: str | None = None
    """Folder of a published benchmark, or its parent. None: where ``probprompt data get`` writes."""
    test: str | None = None
    """Folder of test images, for a folder of images."""
    test_fraction: float = Field(0.2, gt=0, lt=1)
    """Share of a folder's images to hold out as test set if ``test`` is not set."""
    tasks: int | tuple[int, ...] | tuple[tuple[str, ...], ...] | None = None
    """Number of tasks, their sizes, or their class names. None: the benchmark's default; for a folder 10, or half
    the number of its classes if that is less."""
    validation: float = Field(0.0, ge=0, lt=1)
    """Share of the training images to hold out and evaluate on instead of the test set (of emoji-r two styles)."""
    per_class: int | None = Field(None, ge=1)
    """Maximum number of training images per class, the same images for every seed."""
    stored_size: int | Literal["full"] | None = None
    """Maximum short edge of stored images in pixels (bilinear reduction). None: 256/224 of the input size."""
    skip_unreadable: bool = False
    interpolation: Kernel = "bilinear"
    """Interpolation of evaluation views. Random crops are bilinear, except in HiDe-Prompt's settings."""
    center_crop: bool | None = None
    """Evaluate on the center of an image resized to 256/224 of the input. None: except for sets of small images."""

    def short_side(self, usual: int) -> int | None:
        """Return the maximum short edge of decoded images; None for full size.

        >>> DataConfig().short_side(256), DataConfig(stored_size=100).short_side(256)
        (256, 100)
        >>> DataConfig(stored_size="full").short_side(256) is None
        True
        """
        return None if self.stored_size == "full" else self.stored_size or usual


class BackboneConfig(_Settings):
    """The frozen vision transformer and its input."""

    name: str = "demo"
    """Named checkpoint, or any timm ``arch.tag``."""
    weights: str | None = None
    """Local weights file (safetensors, npz, torch) for the architecture ``name``, or ``random``."""
    image_size: int | None = Field(None, ge=8)
    normalization: Literal["backbone", "unit", "cifar100"] = "backbone"
    """``backbone``: as the weights were trained; ``unit``: [0, 1], as in the literature; ``cifar100``: mean and
    standard deviation of that set, as in HiDe-Prompt's code."""
    precision: Literal["fp32", "bf16"] | None = None
    """Precision of the frozen weights; prompts, statistics, heads and a trained backbone stay in float32 or wider.
    None: bf16 if the GPU or CPU has bf16 units, else fp32."""


class TrainingConfig(_Settings):
    """Training of prompts and head on one task."""

    epochs: int = Field(20, ge=1)
    batch_size: int = Field(128, ge=1)
    head_lr: float = Field(0.0025, gt=0, le=1e36)
    prompt_lr_scale: float = Field(5.0, gt=0, le=1e6)
    """Learning rate of the prompts as a multiple of ``head_lr``."""
    adapt_tasks: int | None = Field(None, ge=0)
    """Number of tasks that train the prompts; later tasks keep them frozen. None: all tasks for trained heads, the
    first task for closed-form heads. If more train them, earlier statistics no longer match the features
    (``head.compensate_drift``)."""
    later_lr_scale: float = Field(1.0, gt=0, le=1e6)
    """Factor on the learning rate of the prompts after the first task."""
    min_lr: float = Field(1e-6, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    schedule: Literal["cosine", "vq", "vq-epoch", "step", "constant"] = "cosine"
    """``vq`` and ``vq-epoch`` are the schedules of VQ-Prompt's code, ``step`` is HiDe-Prompt's."""
    nominal_steps: int | None = Field(None, ge=1)
    """Steps per epoch that the schedule assumes, as in VQ-Prompt's config files. None: the actual number."""
    frozen_epochs: int = Field(1, ge=0)
    """Epochs that the ``vq`` schedule spends at ``min_lr`` before its cosine."""
    crop_scale: tuple[float, float] = (0.08, 1.0)
    """Share of the image area that a random crop covers. Without trainable prompts, features are computed once from
    evaluation views, without crops and flips."""
    flip: bool = True
    augmentation: Augmentation = "crop"
    """``crop+color`` is EvoPrompt's, ``autoaugment+crop`` APT's, ``crop+brightness`` HiDe-Prompt's on CIFAR-100."""
    clip: float | None = Field(None, gt=0)
    """Maximum norm of the gradient."""


class SeedsConfig(_Settings):
    """Seeds of the class order, of the initial parameters, and of batches and noise."""

    order: int = Field(0, ge=0)
    init: int = Field(0, ge=0)
    data: int = Field(0, ge=0)


def _read_method(value: Any) -> MethodConfig:
    try:
        return methods.parse_config(value)
    except (TypeError, KeyError) as problem:
        raise ValueError(f"Expected a method's name or its settings, got {value!r}.") from problem


class RunConfig(_Settings):
    """All settings that decide the outcome of a run."""

    preset: str | None = None
    """Preset below these settings (:mod:`probprompt.presets`)."""
    data: DataConfig = DataConfig()
    backbone: BackboneConfig = BackboneConfig()
    method: Annotated[SerializeAsAny[MethodConfig], BeforeValidator(_read_method)] = Field(
        default_factory=lambda: methods.parse_config("probprompt")
    )
    head: AnyHeadSettings = Field(default=cast(Any, {}), validate_default=True)
    """Kind of head and its settings. Default: the method's preferred head."""
    training: TrainingConfig = TrainingConfig()
    alignment: AlignmentConfig = AlignmentConfig()
    seeds: SeedsConfig = SeedsConfig()
    evaluation_batch_size: int | None = Field(None, ge=1)
    """Batch size of evaluation. None: 128, and 512 on a GPU."""

    @field_validator("head", mode="before")
    @classmethod
    def _complete_head(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, Mapping):
            return value
        method = info.data.get("method")
        preferred = methods.find(method.name).preferred_head if method else "linear"
        return heads.complete(value, preferred, any_head=bool(info.context and info.context["any_head"]))

    def to_stored(self) -> dict[str, Any]:
        """Return all settings with the names that files use."""
        return to_stored(self.model_dump(mode="json"))

    def images_at_a_time(self, device: str) -> int:
        """Return the batch size of evaluation on this type of device."""
        wide = device == "cuda" and not self.method.marks()  # with some of these warnings, results depend on the batch
        return self.evaluation_batch_size or (512 if wide else 128)

    def adapts(self, task: int, trained_head: bool) -> bool:
        """Return True if this task (counted from 0) trains the prompts."""
        limit = self.training.adapt_tasks
        if limit is None and not trained_head:
            limit = 1  # a solve over all tasks needs features that do not change
        return limit is None or task < limit


def parse_config(settings: Mapping[str, Any], any_head: bool = False) -> RunConfig:
    """Validate nested settings.

    A setting of another kind of head is an error. With ``any_head`` it is dropped: earlier versions saved such
    settings, and a grid has one set of settings for all its heads.
    """
    try:
        return RunConfig.model_validate(settings, context={"any_head": any_head})
    except ValidationError as problem:
        known = list(field_names(RunConfig, settings))
        messages = dict.fromkeys(_explain(error, known) for error in problem.errors())
        raise UserError("\n".join(messages)) from None


def parse_stored(settings: Mapping[str, Any]) -> RunConfig:
    """Validate the settings of a file."""
    return parse_config(from_stored(settings), any_head=True)


def _explain(error: Any, known: list[str]) -> str:
    place = error["loc"]
    if place[:1] == ("head",):
        place = ("head", *place[2:])  # the second part is the kind of head
    where = ".".join(str(part) for part in place if not str(part).startswith(("literal", "function")))
    if error["type"] == "extra_forbidden":
        return unknown_setting(where, known)
    if where.startswith("data.tasks"):  # one error for all types of value that are allowed
        return "data.tasks: Expected a number of tasks, sizes such as [4, 4, 2], or lists of class names."
    if error["type"] == "value_error":
        message: str = error["msg"].removeprefix("Value error, ")
        return message if message.startswith(f"{where}.") else f"{where}: {message}"
    renamed = _PYTHON_VALUES.get(STORED_NAMES.get(where, where), {}).get(str(error["input"]))
    hint = f" It is now {renamed!r}." if renamed else ""
    return f"{where}: {error['msg']}, got {error['input']!r}.{hint}"


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Return settings with absolute paths, so that a run can be resumed from any folder."""
    paths = {name: _absolute(getattr(config.data, name)) for name in ("benchmark", "test", "root")}
    data = config.data.model_copy(update=paths)
    backbone = config.backbone.model_copy(update={"weights": _absolute(config.backbone.weights)})
    return config.model_copy(update={"data": data, "backbone": backbone})


def _absolute(name: str | None) -> str | None:
    if name is None or name == "random" or name in datasets.registered():
        return name
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() else name


def read_toml(path: Path) -> dict[str, Any]:
    """Read nested settings from a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise UserError(f"Cannot read {path}: {problem.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise UserError(f"{path} is not valid TOML: {problem}.") from None


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested settings. Another method or kind of head drops the settings of the first."""
    merged = dict(base)
    for key, value in over.items():
        if key == "method":
            value = _merge_method(merged.get("method"), value)
        elif key == "head" and isinstance(value, Mapping):
            value = _merge_head(merged.get("head") or {}, value)
        elif isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            value = merge(merged[key], value)
        merged[key] = value
    return merged


def _merge_method(base: Any, over: Any) -> dict[str, Any]:
    first = {"name": base} if isinstance(base, str) else dict(base or {})
    second = {"name": over} if isinstance(over, str) else dict(over)
    if "name" in second and second["name"] != first.get("name", "probprompt"):
        return second
    return merge(first, second)


def _merge_head(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    kind = over.get("kind")
    if kind in heads.HEADS and kind != base.get("kind"):
        base = {name: value for name, value in base.items() if name in heads.setting_names(kind)}
    return {**base, **over}


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by their dotted names.

    >>> flatten({"training": {"epochs": 3}, "evaluation_batch_size": 8})
    {'training.epochs': 3, 'evaluation_batch_size': 8}
    """
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted settings nested.

    >>> nest({"training.epochs": 3, "training.batch_size": 8})
    {'training': {'epochs': 3, 'batch_size': 8}}
    """
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        *groups, last = name.split(".")
        inner = nested
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[last] = value
    return nested


def apply_assignments(settings: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """Apply ``key=value`` assignments; keys are dotted, or the last part if it is unambiguous.

    >>> apply_assignments({}, ["training.epochs=3", "samples=5"])
    {'training': {'epochs': 3}, 'method': {'samples': 5}}
    """
    result = dict(settings)
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise UserError(f"Expected --set key=value, got {assignment!r}.")
        result = apply_values(result, {key.strip(): parse_value(text.strip())})
    return result


def apply_values(settings: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Apply values by their dotted or unambiguous names."""
    result = dict(settings)
    for key, value in values.items():
        for part in reversed(_resolve(key, list(field_names(RunConfig, result))).split(".")):
            value = {part: value}
        result = merge(result, value)
    return result


def _resolve(key: str, known: list[str]) -> str:
    if key in known or key == "method":
        return key
    leaf = key.rpartition(".")[2]
    near = [name for name in known if name.rpartition(".")[2] == leaf]
    if near and leaf == key:
        if len(near) > 1:
            raise UserError(f"Ambiguous setting {key!r}. Use {' or '.join(near)}.")
        return near[0]
    raise UserError(unknown_setting(key, known))


def unknown_setting(key: str, known: Sequence[str]) -> str:
    """Return the message for an unknown setting, with its new name or the nearest names."""
    renamed = [name for name, old in STORED_NAMES.items() if name in known and key in (old, old.rpartition(".")[2])]
    same = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
    if renamed:
        return f"Unknown setting {key!r}. It is now {' or '.join(map(repr, renamed))}."
    return f"Unknown setting {key!r}. {f'Did you mean {same[0]!r}?' if same else _nearest(key, known)}"


def _nearest(key: str, known: Sequence[str]) -> str:
    if "." in key:
        return suggest(key, known)
    leaves: dict[str, list[str]] = {}
    for name in known:
        leaves.setdefault(name.rpartition(".")[2], []).append(f"'{name}'")
    hint = suggest(key, leaves)
    for leaf, names in leaves.items():
        hint = hint.replace(f"'{leaf}'", " or ".join(names))
    return hint


def parse_value(text: str) -> Any:
    """Parse a TOML value; other text is a string, and ``none`` is None."""
    if text.lower() == "none":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def field_names(model: type[BaseModel], settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield all dotted names, with those of the chosen method and of every head."""
    for name, field in model.model_fields.items():
        inner: Any = field.annotation
        if name == "method" and model is RunConfig:
            chosen = settings.get("method")
            chosen = chosen.get("name") if isinstance(chosen, Mapping) else chosen
            inner = methods.find(chosen if isinstance(chosen, str) else "probprompt").Config
        if name == "head" and model is RunConfig:
            yield from (f"head.{setting}" for setting in heads.default_settings())
        elif isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from field_names(inner, settings, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
