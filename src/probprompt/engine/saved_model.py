"""A trained model on disk: a few MB of tensors, and a JSON that names the backbone.

Tensor files are named after their contents and ``model.json`` is replaced last, so the folder always holds one complete
model. Loading executes no code.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from probprompt.config import RunConfig, from_stored
from probprompt.engine.build import ModelState, build_model, fill, group, load_frozen
from probprompt.engine.learner import Learner
from probprompt.engine.model import PromptedModel
from probprompt.errors import UserError
from probprompt.heads.linear import ClassStatistics
from probprompt.storage import read_json, read_tensors, write_error, write_json, write_named_by_contents

FORMAT = 2


@dataclass(frozen=True)
class LoadedModel:
    """A model read from disk, ready to predict."""

    model: PromptedModel
    class_names: tuple[str, ...]
    note: dict[str, Any]


def save_model(folder: Path, learner: Learner, note: dict[str, Any], learning: bool = True) -> None:
    """Write prompts and head, and separately the larger tensors for further learning."""
    tensors, later = saved_tensors(learner), learning_only(learner)
    later |= {name for name in tensors if name.startswith(("statistics.", "trained."))}
    needed, rest = ({name: tensors[name] for name in tensors if (name in later) is part} for part in (False, True))
    files = {
        "tensors": write_named_by_contents(folder, "model", needed),
        "statistics": write_named_by_contents(folder, "statistics", rest) if learning else None,
    }
    write_json(folder / "model.json", {"format": FORMAT, **note, **files})
    for stale in folder.glob("*.safetensors"):
        if stale.name not in files.values():
            try:
                stale.unlink()
            except OSError as problem:
                raise write_error(stale, problem) from problem


def disk_sizes(folder: Path) -> dict[str, float]:
    """Return the size of a written model in MB: to predict, and to continue learning."""
    note = read_json(folder / "model.json")
    use, rest = ((folder / note[name]).stat().st_size / 1e6 for name in ("tensors", "statistics"))
    return {"use": use, "learn": use + rest}


def load_model(folder: str | Path, device: torch.device | None = None) -> LoadedModel:
    """Read the model of a run, or a model folder; the backbone must match."""
    given = Path(folder)
    home = given if (given / "model.json").is_file() else given / "model"
    if not (home / "model.json").is_file():
        raise UserError(f"No model found in {given}: neither it nor its folder 'model' contains model.json.")
    note = read_json(home / "model.json")
    version = note.get("format") if isinstance(note, dict) else None
    if version != FORMAT:
        raise UserError(f"{home} has model format {version!r}, this version reads {FORMAT}. Update probprompt.")
    try:
        return _build(home, note, device or torch.device("cpu"))
    except (KeyError, TypeError, ValueError) as problem:  # an edited description
        raise UserError(f"{home / 'model.json'} is corrupted: it does not match its tensors ({problem}).") from problem


def _build(folder: Path, note: dict[str, Any], where: torch.device) -> LoadedModel:
    tensors, _ = read_tensors(folder / note["tensors"], where)
    weights = {name: value for name, value in note["backbone"].items() if name != "sha256"}
    stored = {"method": note["method"], "head": note["head"], "backbone": weights, "seeds": {"init": note["seed"]}}
    config = RunConfig.model_validate(from_stored(stored), context={"any_head": True})
    backbone = load_frozen(config.backbone, note["backbone"]["sha256"], folder)
    state = ModelState(tuple(note["task_sizes"][: note["adapted_tasks"]]), tensors)
    model = build_model(config, backbone, where, "fp32", state)
    model.fix()
    return LoadedModel(model, tuple(note["classes"]), note)


def learning_only(learner: Learner) -> set[str]:
    """Return the names of the head's tensors that only learning needs."""
    return {f"head.{name}" for name in learner.model.head.learning_only}


def learner_tensors(learner: Learner) -> dict[str, Tensor]:
    """Return all learned tensors: method, head, class statistics, and a trained backbone."""
    model = learner.model
    tensors = {f"method.{name}": value for name, value in model.method.state_dict().items()}
    tensors.update({f"head.{name}": value for name, value in model.head.state_dict().items()})
    if learner.trained is not model.head:
        tensors.update({f"trained.{name}": value for name, value in learner.trained.state_dict().items()})
    if model.method.trains_backbone:
        tensors.update({f"backbone.{name}": value for name, value in model.backbone.state_dict().items()})
    tensors["statistics.mean"] = learner.statistics.mean
    tensors["statistics.variance"] = learner.statistics.variance
    if model.method.needs_prototypes:
        tensors["statistics.prototypes"] = learner.prototypes
    if learner.before is not None:
        tensors["before"] = learner.before
    return tensors


def saved_tensors(learner: Learner) -> dict[str, Tensor]:
    """Return the tensors to write, without what follows from others."""
    return {**learner_tensors(learner), **{f"head.{name}": part for name, part in learner.model.head.saved().items()}}


def restore_tensors(learner: Learner, tensors: dict[str, Tensor]) -> None:
    """Load the result of :func:`learner_tensors`."""
    fill(learner.model, tensors)
    restore_learning(learner, tensors)


def restore_learning(learner: Learner, tensors: Mapping[str, Tensor]) -> None:
    """Load what only learning needs: class statistics and the head that trains prompts."""
    if learner.trained is not learner.model.head:
        learner.trained.restore(group(tensors, "trained"))
    learner.statistics = ClassStatistics(tensors["statistics.mean"], tensors["statistics.variance"])
    learner.prototypes = tensors.get("statistics.prototypes", learner.prototypes)
    learner.before = tensors.get("before")
