"""A saved model is small, belongs to one backbone, predicts as it did in memory, and runs no code."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from probprompt import load_backbone, load_model, methods
from probprompt.config import from_stored, parse_config
from probprompt.engine import saved_model
from probprompt.engine.learner import Learner
from probprompt.engine.saved_model import LoadedModel, save_model
from probprompt.errors import UserError
from probprompt.heads.linear import LinearHead
from probprompt.progress import SILENT, ProgressCallback
from probprompt.runs import train as runs_train
from probprompt.runs.run import Run
from run_cases import BACKBONE, CPU, PROBPROMPT


class Trained(NamedTuple):
    """A finished run, and its model in memory."""

    run: Run
    learner: Learner


def train(pictures: Path, out: Path, method: dict[str, Any], weights: str, **groups: dict[str, Any]) -> Trained:
    base = {
        "data": {"benchmark": str(pictures), "tasks": 3},
        "backbone": {**BACKBONE, "weights": weights},
        "method": method,
        "training": {"epochs": 1, "batch_size": 8, **groups.get("training", {})},
        "alignment": {"epochs": 1},
    }
    workshop = runs_train.prepare(parse_config({**groups, **base}), CPU, ProgressCallback())
    run = Run.create(out, runs_train.describe(workshop, out.name))
    runs_train.RunLoop(run, workshop, None, SILENT, None).run_all()
    return Trained(run, workshop.learner)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = timm.create_model("test_vit", num_classes=0)
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    save_file(model.state_dict(), path)
    return path


@pytest.fixture(scope="module")
def trained(pictures: Path, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(pictures, tmp_path_factory.mktemp("runs") / "probprompt", PROBPROMPT, str(weights))


@pytest.fixture
def copy(trained: Trained, tmp_path: Path) -> Path:
    """A copy of the model, to be changed."""
    return Path(shutil.copytree(trained.run.model, tmp_path / "model"))


def read_note(folder: Path) -> dict[str, Any]:
    """Return the note of a model without its format and files."""
    note = json.loads((folder / "model.json").read_text())
    return {name: value for name, value in note.items() if name not in ("format", "tensors", "statistics")}


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "model.json"
    note = json.loads(path.read_text())
    change(note)
    path.write_text(json.dumps(note))


def images() -> torch.Tensor:
    return torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def assert_predicts_as_in_memory(folder: Path, trained: Trained) -> LoadedModel:
    loaded = load_model(folder)
    expected = trained.learner.model.predict(images())
    assert expected.shape == (5, 6) and expected.std() > 0
    if loaded.model.method.trains_backbone:  # other kernels run where weights may learn
        torch.testing.assert_close(loaded.model.predict(images()), expected, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(loaded.model.predict(images()), expected)
    assert list(loaded.class_names) == trained.run.record.stream.classes == loaded.note["classes"]
    return loaded


def test_model_folder(trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = trained.run.model
    note = json.loads((folder / "model.json").read_text())
    assert {path.name for path in folder.iterdir()} == {"model.json", note["tensors"], note["statistics"]}
    with safe_open(folder / note["tensors"], framework="pt") as opened:
        names = set(opened.keys())
    parts = {"mean", "log_std", "cached_mean", "cached_log_std"}
    assert names == {"head.weight", "head.bias", *(f"method.{part}" for part in parts)}  # and no backbone
    assert sum(path.stat().st_size for path in folder.iterdir()) < 100_000
    refuse = Mock(side_effect=AssertionError("something was unpickled"))
    monkeypatch.setattr(torch, "load", refuse)
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    for place in (folder, trained.run.folder):  # the folder of the run stands for its model
        assert_predicts_as_in_memory(place, trained)
    with pytest.raises(UserError, match="No model found"):
        load_model(tmp_path)


HIDE = {"name": "hide-prompt", "tokens": 4, "blocks": [0, 2]}
CASES: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]], int, list[int]]] = {
    "linear-probe": ({"name": "linear-probe"}, {}, 3, [2, 2, 2]),
    "ridge": (PROBPROMPT, {"head": {"kind": "ridge", "projections": 30}}, 1, [2, 2, 2]),
    "lda": ({"name": "linear-probe"}, {"head": {"kind": "lda", "shrinkage": 0.1}}, 1, [2, 2, 2]),
    "preferred": ({"name": "nearest-mean"}, {}, 1, [2, 2, 2]),
    "normalized": ({"name": "apt"}, {}, 3, [2, 2, 2]),
    "grown by all tasks": (HIDE, {}, 3, [2, 2, 2]),
    "grown by two tasks": (HIDE, {"training": {"adapt_tasks": 2}}, 2, [2, 2, 2]),
    "never adapted": (PROBPROMPT, {"training": {"adapt_tasks": 0}}, 0, [2, 2, 2]),
    "backbone": ({"name": "ft"}, {}, 3, [2, 2, 2]),
    "joint": ({"name": "joint"}, {}, 1, [6]),
    "published mistake": ({**HIDE, "legacy_reshape": True}, {}, 3, [2, 2, 2]),
}
"""Methods, other settings, tasks that adapt and sizes of tasks."""


@pytest.mark.parametrize("case", CASES)
def test_any_head_and_adaptation_is_loaded_as_saved(pictures: Path, tmp_path: Path, case: str) -> None:
    method, groups, adapted, sizes = CASES[case]
    trained = train(pictures, tmp_path / "run", method, "random", **groups)
    loaded = assert_predicts_as_in_memory(trained.run.model, trained)
    assert type(loaded.model.head) is type(trained.learner.model.head)
    assert loaded.model.static, "a loaded model must not learn by accident"
    assert not any(parameter.requires_grad for parameter in loaded.model.backbone.parameters())
    note, config, preferred = loaded.note, trained.run.record.config, methods.find(method["name"]).preferred_head
    assert note["format"] == 2 and note["marks"] == trained.run.record.marks
    assert [mark.partition(":")[0] for mark in note["marks"]] == ["legacy_reshape"] * (case == "published mistake")
    assert (note["adapted_tasks"], note["task_sizes"]) == (adapted, sizes)
    assert note["head"] == config["head"]
    assert from_stored(note["head"], "head")["kind"] == groups.get("head", {}).get("kind", preferred)
    assert note["method"] == config["method"]
    if case == "ridge":
        assert_statistics_are_separate(trained.run.model)


def assert_statistics_are_separate(folder: Path) -> None:
    note = json.loads((folder / "model.json").read_text())
    names = []
    for file in ("tensors", "statistics"):
        with safe_open(folder / note[file], framework="pt") as opened:
            names.append(set(opened.keys()))
    needed, rest = names
    assert "head.weight" in needed and {name.partition(".")[0] for name in needed} == {"head", "method"}
    assert rest == {
        *(f"head.{name}" for name in ("gram", "correlation", "strength")),
        *(f"trained.{name}" for name in ("weight", "bias")),
        *(f"statistics.{name}" for name in ("mean", "variance")),
    }
    (folder / note["statistics"]).unlink()
    head = load_model(folder).model.head
    with pytest.raises(ValueError, match="cannot learn"):
        head.grow(1)


def test_other_weights_are_rejected_with_both_hashes(trained: Trained, copy: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    save_file(timm.create_model("test_vit", num_classes=0).state_dict(), other)
    edit(copy, lambda note: note["backbone"].update(weights=str(other)))
    with pytest.raises(UserError, match="SHA-256 mismatch") as refusal:
        load_model(copy)
    recorded = trained.run.record.backbone.sha256
    found = load_backbone("test_vit", other).sha256
    assert recorded != found and recorded in str(refusal.value) and found in str(refusal.value)


def test_weights_are_searched_and_must_fit(copy: Path, weights: Path, tmp_path: Path) -> None:
    edit(copy, lambda note: note["backbone"].update(name="vit_tiny_patch16_224"))
    with pytest.raises(UserError, match=r"tiny\.safetensors does not fit this architecture"):
        load_model(copy)
    edit(copy, lambda note: note["backbone"].update(name="test_vit", weights="/elsewhere/tiny.safetensors"))
    for place in (copy, copy.parent):
        shutil.copy(weights, place / "tiny.safetensors")
        assert len(load_model(copy).class_names) == 6
        (place / "tiny.safetensors").unlink()
    edit(copy, lambda note: note["backbone"].update(weights=str(tmp_path / "gone.safetensors")))
    with pytest.raises(UserError, match=r"gone\.safetensors not found"):
        load_model(copy)


@pytest.mark.parametrize("damage", ["cut", "changed", "missing", "foreign"])
def test_corrupted_tensors_are_rejected(copy: Path, damage: str) -> None:
    path = copy / str(json.loads((copy / "model.json").read_text())["tensors"])
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "foreign":
        save_file({"head.weight": torch.zeros(6, 64)}, path)
    else:
        middle = len(whole) // 2
        rest = b"" if damage == "cut" else bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
        path.write_bytes(whole[:middle] + rest)
    reason = {"missing": "does not exist", "foreign": "was not written by probprompt"}.get(damage, "is corrupted")
    with pytest.raises(UserError, match=rf"{path.name} {reason}"):
        load_model(copy)


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "other shapes": lambda note: note["method"].update(components=5),
    "unknown setting": lambda note: note["method"].update(colour="red"),
    "no tasks": lambda note: note.update(task_sizes=None),
    "no seed": lambda note: note.pop("seed"),
    "no adaptation": lambda note: note.pop("adapted_tasks"),
    "no head": lambda note: note.pop("head"),
    "unknown head": lambda note: note["head"].update(kind="cubic"),
    "another head": lambda note: note["head"].update(kind="ridge"),
    "unknown setting of the head": lambda note: note["head"].update(colour="red"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_wrong_descriptions_are_rejected(copy: Path, change: str) -> None:
    edit(copy, CHANGES[change])
    with pytest.raises(UserError, match=r"model\.json"):
        load_model(copy)


@pytest.mark.parametrize("content", ['{"format": 99}', '{"format": 1}', "[1]", '"model"'])
def test_other_formats_are_rejected(copy: Path, content: str) -> None:
    (copy / "model.json").write_text(content)
    with pytest.raises(UserError, match=r"has model format (99|1|None)"):
        load_model(copy)


def test_saving_again_removes_only_stale_tensors(trained: Trained, copy: Path) -> None:
    before, note = {path.name for path in copy.iterdir()}, read_note(copy)
    (copy / "model-0123456789abcdef.safetensors").write_bytes(b"of an earlier task")
    (copy / "notes.txt").write_text("of the user")
    save_model(copy, trained.learner, note)
    assert {path.name for path in copy.iterdir()} == before | {"notes.txt"}


def test_interrupted_save_keeps_the_old_model(trained: Trained, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise UserError("the disk is full")

    before, note = load_model(copy).model.predict(images()), read_note(copy)
    head = trained.learner.model.head
    assert isinstance(head, LinearHead)
    bias = head.bias.detach().clone()
    with torch.no_grad():
        head.bias.add_(torch.arange(6.0))
    try:
        with monkeypatch.context() as full:
            full.setattr(saved_model, "write_json", fail)
            with pytest.raises(UserError, match="disk is full"):
                save_model(copy, trained.learner, note)
        assert torch.equal(load_model(copy).model.predict(images()), before)
        save_model(copy, trained.learner, note)
        assert not torch.equal(load_model(copy).model.predict(images()), before)
    finally:
        with torch.no_grad():
            head.bias.copy_(bias)
    assert len(list(copy.glob("*.safetensors"))) == 2
