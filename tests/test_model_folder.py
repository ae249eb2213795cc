"""A trained model on disk is small, belongs to one backbone, predicts as it did in memory, and runs no code."""

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from probprompt import load_backbone, load_model
from probprompt.config import parse_config
from probprompt.errors import UserError
from probprompt.heads import LinearHead
from probprompt.progress import SILENT
from probprompt.runs import execute, model_folder
from probprompt.runs.model_folder import save_model
from probprompt.runs.record import Run
from probprompt.training.learner import Learner


@dataclass(frozen=True)
class Trained:
    """A run that has finished, and its model as it is in memory."""

    run: Run
    learner: Learner


def train(pictures: Path, out: Path, method: dict[str, Any], weights: str, **groups: dict[str, Any]) -> Trained:
    config = parse_config(
        {
            **groups,
            "data": {"benchmark": str(pictures), "tasks": 3},
            "backbone": {"name": "test_vit", "weights": weights, "image_size": 32},
            "method": method,
            "training": {"epochs": 1, "batch": 8, **groups.get("training", {})},
            "alignment": {"epochs": 1},
        }
    )
    workshop = execute.prepare(config, torch.device("cpu"), SILENT)
    run = Run.create(out, execute.describe(workshop, out.name))
    execute.Execution(run, workshop, None, SILENT, None).run_all()
    return Trained(run, workshop.learner)


PROBPROMPT = {"name": "probprompt", "samples": 3, "components": 4, "tokens": 4, "blocks": [0, 2]}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of weights of the tiny architecture."""
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
    """The trained model's folder, to be spoiled."""
    return Path(shutil.copytree(trained.run.model, tmp_path / "model"))


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "model.json"
    note = json.loads(path.read_text())
    change(note)
    path.write_text(json.dumps(note))


def tensor_file(folder: Path) -> Path:
    return folder / str(json.loads((folder / "model.json").read_text())["tensors"])


def images() -> torch.Tensor:
    return torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def test_a_loaded_model_predicts_as_the_one_in_memory(trained: Trained) -> None:
    loaded = load_model(trained.run.model)
    expected = trained.learner.model.predict(images())
    assert expected.shape == (5, 6) and expected.std() > 0
    assert torch.equal(loaded.model.predict(images()), expected)
    assert list(loaded.class_names) == trained.run.record["stream"]["classes"]


def test_a_method_without_prompts_is_loaded_as_well(pictures: Path, tmp_path: Path) -> None:
    trained = train(pictures, tmp_path / "run", {"name": "linear-probe"}, "random")
    loaded = load_model(trained.run.model)
    assert torch.equal(loaded.model.predict(images()), trained.learner.model.predict(images()))


HIDE = {"name": "hide-prompt", "tokens": 4, "blocks": [0, 2]}
CASES: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "ridge": (PROBPROMPT, {"head": {"kind": "ridge", "projections": 30}}),
    "lda": ({"name": "linear-probe"}, {"head": {"kind": "lda", "shrinkage": 0.1}}),
    "preferred": ({"name": "nearest-mean"}, {}),
    "normalised": ({"name": "apt"}, {}),
    "grown by all tasks": (HIDE, {}),
    "grown by two tasks": (HIDE, {"training": {"adapt_tasks": 2}}),
    "never adapted": (PROBPROMPT, {"training": {"adapt_tasks": 0}}),
    "backbone": ({"name": "ft"}, {}),
    "joint": ({"name": "joint"}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_model_with_any_head_and_any_adaptation_is_loaded_as_it_was(
    pictures: Path, tmp_path: Path, case: str
) -> None:
    method, groups = CASES[case]
    trained = train(pictures, tmp_path / "run", method, "random", **groups)
    loaded = load_model(trained.run.model)
    expected = trained.learner.model.predict(images())
    assert expected.shape == (5, 6) and expected.std() > 0
    if loaded.model.method.trains_backbone:  # other kernels run where weights may learn
        torch.testing.assert_close(loaded.model.predict(images()), expected, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(loaded.model.predict(images()), expected)
    assert type(loaded.model.head) is type(trained.learner.model.head)
    assert loaded.model.static, "a loaded model must not learn by accident"
    assert not any(parameter.requires_grad for parameter in loaded.model.backbone.parameters())


@pytest.mark.parametrize(
    ("case", "adapted", "sizes", "head"),
    [
        ("ridge", 1, [2, 2, 2], "ridge"),
        ("preferred", 1, [2, 2, 2], None),
        ("grown by all tasks", 3, [2, 2, 2], None),
        ("grown by two tasks", 2, [2, 2, 2], None),
        ("never adapted", 0, [2, 2, 2], None),
        ("joint", 1, [6], None),
    ],
)
def test_the_note_says_how_the_model_is_built(
    pictures: Path, tmp_path: Path, case: str, adapted: int, sizes: list[int], head: str | None
) -> None:
    method, groups = CASES[case]
    trained = train(pictures, tmp_path / "run", method, "random", **groups)
    note = load_model(trained.run.model).note
    assert note["format"] == 2
    assert (note["adapted_tasks"], note["task_sizes"]) == (adapted, sizes)
    assert note["head"] == trained.run.record["config"]["head"] and note["head"]["kind"] == head
    assert note["method"] == trained.run.record["config"]["method"] and note["marks"] == []
    assert note["classes"] == trained.run.record["stream"]["classes"]


def test_published_mistakes_that_were_asked_for_mark_the_model(pictures: Path, tmp_path: Path) -> None:
    trained = train(pictures, tmp_path / "run", {**HIDE, "legacy_reshape": True}, "random")
    (mark,) = load_model(trained.run.model).note["marks"]
    assert mark.startswith("legacy_reshape: ") and trained.run.record["marks"] == [mark]


def test_what_only_learning_needs_is_kept_apart(pictures: Path, tmp_path: Path) -> None:
    method, groups = CASES["ridge"]
    folder = train(pictures, tmp_path / "run", method, "random", **groups).run.model
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
    with pytest.raises(ValueError, match="loaded without its sums: it predicts, but cannot learn"):
        head.grow(1)


def test_the_folder_of_a_run_stands_for_its_model(trained: Trained) -> None:
    logits = [load_model(folder).model.predict(images()) for folder in (trained.run.folder, str(trained.run.model))]
    assert torch.equal(*logits)


def test_a_folder_without_a_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no model: neither it nor a folder 'model' in it has a model\.json"):
        load_model(tmp_path)


def test_the_folder_holds_prompts_and_head_and_no_backbone(trained: Trained) -> None:
    files = sorted(path.name for path in trained.run.model.iterdir())
    note = json.loads((trained.run.model / "model.json").read_text())
    assert files == sorted(["model.json", note["tensors"], note["statistics"]])
    with safe_open(trained.run.model / note["tensors"], framework="pt") as opened:
        names = set(opened.keys())
    parts = {"mean", "log_std", "cached_mean", "cached_log_std"}
    assert names == {"head.weight", "head.bias", *(f"method.{part}" for part in parts)}
    assert sum(path.stat().st_size for path in trained.run.model.iterdir()) < 100_000


def test_loading_executes_no_code(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was unpickled")

    monkeypatch.setattr(torch, "load", refuse)
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    assert len(load_model(trained.run.model).class_names) == 6


def test_other_weights_are_refused_with_both_fingerprints(trained: Trained, copy: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    state = timm.create_model("test_vit", num_classes=0).state_dict()
    save_file(state, other)
    edit(copy, lambda note: note["backbone"].update(weights=str(other)))
    with pytest.raises(UserError, match="these are other weights") as refusal:
        load_model(copy)
    recorded = trained.run.record["backbone"]["sha256"]
    found = load_backbone("test_vit", other).sha256
    assert recorded != found and recorded in str(refusal.value) and found in str(refusal.value)


def test_another_architecture_is_refused(copy: Path) -> None:
    edit(copy, lambda note: note["backbone"].update(name="vit_tiny_patch16_224"))
    with pytest.raises(UserError, match=r"tiny\.safetensors does not fit this architecture"):
        load_model(copy)


def test_weights_may_lie_in_the_folder_or_beside_it(trained: Trained, copy: Path, weights: Path) -> None:
    edit(copy, lambda note: note["backbone"].update(weights="/elsewhere/tiny.safetensors"))
    for place in (copy, copy.parent):
        shutil.copy(weights, place / "tiny.safetensors")
        assert len(load_model(copy).class_names) == 6
        (place / "tiny.safetensors").unlink()


def test_missing_weights_are_told(copy: Path, tmp_path: Path) -> None:
    edit(copy, lambda note: note["backbone"].update(weights=str(tmp_path / "gone.safetensors")))
    with pytest.raises(UserError, match=r"there is no file .*gone\.safetensors"):
        load_model(copy)


@pytest.mark.parametrize("damage", ["cut", "changed", "missing", "foreign"])
def test_damaged_tensors_are_refused(copy: Path, damage: str) -> None:
    path = tensor_file(copy)
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "foreign":
        save_file({"head.weight": torch.zeros(6, 64)}, path)
    else:
        middle = len(whole) // 2
        rest = b"" if damage == "cut" else bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
        path.write_bytes(whole[:middle] + rest)
    reason = {"missing": "is missing", "foreign": "was not written by probprompt"}.get(damage, "is damaged")
    with pytest.raises(UserError, match=rf"{path.name} {reason}"):
        load_model(copy)


@pytest.mark.parametrize(
    "change",
    [
        lambda note: note["method"].update(components=5),
        lambda note: note["method"].update(colour="red"),
        lambda note: note.update(task_sizes=None),
        lambda note: note.pop("seed"),
        lambda note: note.pop("adapted_tasks"),
        lambda note: note.pop("head"),
        lambda note: note["head"].update(kind="cubic"),
        lambda note: note["head"].update(kind="ridge"),
        lambda note: note["head"].update(colour="red"),
    ],
    ids=[
        "other shapes",
        "unknown setting",
        "no tasks",
        "no seed",
        "no adaptation",
        "no head",
        "unknown head",
        "another head",
        "unknown setting of the head",
    ],
)
def test_a_description_that_does_not_fit_is_refused(copy: Path, change: Callable[[dict[str, Any]], object]) -> None:
    edit(copy, change)
    with pytest.raises(UserError, match=r"model\.json is damaged: it does not describe its tensors"):
        load_model(copy)


@pytest.mark.parametrize("content", ['{"format": 99}', '{"format": 1}', "[1]", '"model"'])
def test_another_format_is_refused(copy: Path, content: str) -> None:
    (copy / "model.json").write_text(content)
    with pytest.raises(UserError, match=r"has model format (99|1|None), this version reads 2"):
        load_model(copy)


def test_saving_again_removes_stale_tensors_and_keeps_strangers(trained: Trained, copy: Path) -> None:
    (copy / "model-0123456789abcdef.safetensors").write_bytes(b"of an earlier task")
    (copy / "notes.txt").write_text("of the user")
    note = json.loads((copy / "model.json").read_text())
    save_model(copy, trained.learner, {k: v for k, v in note.items() if k not in ("format", "tensors", "statistics")})
    files = sorted(path.name for path in copy.iterdir())
    assert files == sorted(["model.json", "notes.txt", note["tensors"], note["statistics"]])


def test_a_save_that_fails_half_way_leaves_the_old_model_whole(
    trained: Trained, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise UserError("the disk is full")

    before = load_model(copy).model.predict(images())
    note = json.loads((copy / "model.json").read_text())
    head = trained.learner.model.head
    assert isinstance(head, LinearHead)
    bias = head.bias.detach().clone()
    with torch.no_grad():
        head.bias.add_(torch.arange(6.0))
    try:
        monkeypatch.setattr(model_folder, "write_json", fail)
        with pytest.raises(UserError, match="disk is full"):
            save_model(copy, trained.learner, note)
        assert torch.equal(load_model(copy).model.predict(images()), before)
        monkeypatch.undo()
        save_model(copy, trained.learner, {k: v for k, v in note.items() if k not in ("tensors", "statistics")})
        assert not torch.equal(load_model(copy).model.predict(images()), before)
    finally:
        with torch.no_grad():
            head.bias.copy_(bias)
    assert len(list(copy.glob("*.safetensors"))) == 2
