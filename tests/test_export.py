"""An ONNX file answers as the model does, whatever the method, the head and the number of images."""

import ast
import json
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx as onnx_file
import onnxruntime
import pytest
import timm
import torch
from numpy.typing import NDArray
from PIL import Image
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer

from page_marks import read_blocks
from probprompt import ContinualClassifier, __version__, api, load_model, methods
from probprompt.backbones.vit import FrozenViT
from probprompt.config import parse_config
from probprompt.engine.model import PromptedModel
from probprompt.errors import UserError
from probprompt.export import onnx
from probprompt.export.onnx import BATCHES, Exported, Source, View, export_onnx, metadata, open_source, write_onnx
from probprompt.heads import make_head
from probprompt.heads.closed_form import ClosedFormHead

SIDE, WIDTH = 16, 24
Command = Callable[..., Any]
VIEW = View(SIDE, 18, "bilinear", (0.5, 0.4, 0.3), (0.2, 0.25, 0.3))
SMALL: dict[str, dict[str, Any]] = {
    "probprompt": {"samples": 2, "components": 2, "tokens": 2},
    "dual-prompt": {"general_blocks": [0], "expert_blocks": [1]},
    "l2p": {"tokens": 2, "top_k": 2},
}
HEADS: dict[str, dict[str, Any]] = {
    "probprompt": {"kind": "ridge", "projections": 30, "with_query": True, "layers": 1},
    "coda-prompt": {"kind": "lda", "mirrored": True},
    "l2p": {"kind": "nearest-mean"},
}
# The same graph as that of linear-probe or ft, under heads that others have.
ALIKE = {"lda", "nearest-mean", "ranpac", "ft++", "joint"} | {"l2p++"}  # deep-l2p++ in fewer blocks


def images(count: int, side: int = SIDE) -> NDArray[np.uint8]:
    return np.random.RandomState(count).randint(0, 256, (count, side, side, 3)).astype(np.uint8)


def tiny_backbone(depth: int) -> FrozenViT:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = VisionTransformer(img_size=SIDE, patch_size=8, embed_dim=WIDTH, depth=depth, num_heads=2, num_classes=0)
    return FrozenViT(model)


def source(name: str, **more: Any) -> Source:
    """A model that has begun two tasks, with a head that knows four classes."""
    kind = methods.find(name)
    backbone = tiny_backbone(depth=2 if name in ("dual-prompt", "probprompt") else 1)
    blocks = {"blocks": [0]} if "blocks" in kind.Config.model_fields else {}
    config = methods.parse_config({"name": name, **blocks, **SMALL.get(name, {})})
    method = kind.create(config, methods.Shape(WIDTH, backbone.depth), 0)
    for task in range(2):
        method.begin_task(task, 2)
    head = make_head(parse_config({"method": config, "head": HEADS.get(name, {})}).head, WIDTH, 0)
    if isinstance(head, ClosedFormHead):
        features = torch.randn(20, head.width, generator=torch.Generator().manual_seed(1))
        head.learn(features, torch.arange(20) % 4, 4, task_key=0)
    else:
        head.grow(4)
    model = PromptedModel(backbone, method, head)
    model.fix()
    return Source(model, ("ä", "b", "c|d", 'e"'), VIEW, lambda given: (head(given).softmax(dim=1),), **more)


def judged(temperature: float, factor: float = 1.0) -> Source:
    """A model that answers novelty as well: the length of the feature, times a factor."""
    plain = source("linear-probe", outputs=("probabilities", "novelty"), facts={"temperature": temperature})

    def judge(features: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = features.double()
        return (plain.model.head(features) / temperature).softmax(dim=1), factor * wide.norm(dim=1)

    return replace(plain, judge=judge)


def prepared(pixels: NDArray[np.uint8], view: View) -> torch.Tensor:
    """What the backbone is fed, by the definition."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (view.mean, view.std))
    return (torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255 - mean) / std


def run(path: Path, pixels: NDArray[np.uint8]) -> list[NDArray[np.float32]]:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    answers: list[NDArray[np.float32]] = session.run(None, {"images": pixels})
    return answers


@pytest.mark.parametrize("name", sorted(set(methods.registered()) - ALIKE))
def test_any_method_answers_as_in_torch(name: str, tmp_path: Path) -> None:
    given = source(name)
    done = write_onnx(given, tmp_path / "model.onnx")
    assert done.difference < 1e-5 and done.outputs == ("probabilities",)
    session = onnxruntime.InferenceSession(str(done.path), providers=["CPUExecutionProvider"])
    for count in (*BATCHES, 40):
        pixels = images(count)
        (found,) = session.run(None, {"images": pixels})
        expected = given.model.predict(prepared(pixels, VIEW)).softmax(dim=1).numpy()
        assert found.shape == (count, 4) and expected.std() > 0
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A small file, written once."""
    return write_onnx(judged(0.3), tmp_path_factory.mktemp("onnx") / "probe.onnx")


def test_probabilities_have_the_temperature_and_novelty_stands_beside_them(probe: Exported) -> None:
    model, pixels = source("linear-probe").model, images(5)
    probabilities, novelty = run(probe.path, pixels)
    features = model.features(prepared(pixels, VIEW))[0].detach()
    expected = (model.head(features) / 0.3).softmax(dim=1).detach().numpy()
    np.testing.assert_allclose(probabilities, expected, atol=1e-5)
    np.testing.assert_allclose(novelty, features.norm(dim=1).numpy(), rtol=1e-4)
    assert probe.outputs == ("probabilities", "novelty")


def test_the_file_says_what_its_user_must_know(probe: Exported) -> None:
    session = onnxruntime.InferenceSession(str(probe.path), providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    assert (given.name, given.shape, given.type) == ("images", ["batch", SIDE, SIDE, 3], "tensor(uint8)")
    assert [(one.name, one.shape) for one in session.get_outputs()] == [
        ("probabilities", ["batch", 4]),
        ("novelty", ["batch"]),
    ]
    said = {name: json.loads(text) for name, text in session.get_modelmeta().custom_metadata_map.items()}
    assert said["classes"] == ["ä", "b", "c|d", 'e"']
    assert said["preprocessing"]["image_size"] == SIDE and said["preprocessing"]["resize_short_side_to"] == 18
    assert said["preprocessing"]["normalised_in_graph"] == {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.25, 0.3]}
    assert said["probprompt"] == {"temperature": 0.3, "version": __version__}


def test_the_file_names_no_folder_of_this_machine(probe: Exported) -> None:
    content = probe.path.read_bytes()
    assert len(content) == probe.bytes
    for trace in ("site-packages", "probprompt/", str(Path.cwd()), "stack_trace"):
        assert trace.encode() not in content


def test_a_file_that_answers_otherwise_is_never_put_in_place(
    probe: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx, "_translate", lambda graph, given: probe.path.read_bytes())
    path = tmp_path / "model.onnx"
    path.write_bytes(b"what was there before")
    with pytest.raises(UserError, match=r"was not written: with 1 image.* answers otherwise than torch"):
        write_onnx(judged(1.0), path)
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
    assert path.read_bytes() == b"what was there before"


def test_novelty_that_differs_is_noticed_as_well(
    probe: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx, "_translate", lambda graph, given: probe.path.read_bytes())
    with pytest.raises(UserError, match="answers otherwise than torch"):
        write_onnx(judged(0.3, factor=1.01), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_class_names_that_are_no_unicode_are_written_all_the_same() -> None:
    given = replace(source("linear-probe"), classes=("caf\udce9",))
    assert json.loads(metadata(given)["classes"].encode().decode()) == ["caf\udce9"]


def test_nothing_of_the_extra_is_imported_before_it_is_needed() -> None:
    files = sorted(Path(onnx.__file__).parents[1].rglob("*.py"))
    assert Path(onnx.__file__) in files
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            named += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not {name.partition(".")[0] for name in named} & {"onnx", "onnxscript", "onnxruntime", "onnx_ir"}


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_named_with_the_command_that_brings_it(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"needs the package '{package}': pip install 'probprompt\[onnx\]'"):
        export_onnx(tmp_path, tmp_path / "model.onnx")


def test_places_that_cannot_be_written_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder: name the file"):
        export_onnx(tmp_path, tmp_path)
    with pytest.raises(UserError, match=r"there is no folder .*gone to write model\.onnx into"):
        export_onnx(tmp_path, tmp_path / "gone" / "model.onnx")
    with pytest.raises(UserError, match="holds no model"):
        export_onnx(tmp_path, tmp_path / "model.onnx")


def test_a_model_too_large_for_one_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx, "LARGEST", 1000)
    with pytest.raises(UserError, match="one ONNX file holds 2 GB"):
        write_onnx(source("linear-probe"), tmp_path / "model.onnx")


def test_the_model_of_a_run_is_read_as_it_is(pictures: Path, tmp_path: Path) -> None:
    config = {
        "data": {"benchmark": str(pictures), "tasks": 3},
        "backbone": {"name": "test_vit", "weights": "random", "image_size": 32},
        "method": {"name": "ranpac"},
    }
    folder = api.train(out=tmp_path / "run", config=config).folder
    given, loaded = open_source(folder), load_model(folder)
    assert given.classes == loaded.class_names and given.outputs == ("probabilities",)
    assert given.facts["method"] == "ranpac" and set(given.facts["backbone"]) == {"name", "sha256"}
    pixels = torch.from_numpy(images(2, given.view.image_size))
    (found,) = onnx.Graph(given)(pixels)
    expected = loaded.model.predict(prepared(pixels.numpy(), given.view)).softmax(dim=1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


# A saved classifier --------------------------------------------------------------------------------------------------

default_cfgs = generate_default_cfgs(
    {"two_block_vit.": {"input_size": (3, 32, 32), "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "num_classes": 0}}
)


def two_block_vit(pretrained: bool = False, **arguments: Any) -> Any:
    """Two blocks, of which a head reads one: what an export costs is their number."""
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 2, **arguments}
    return build_model_with_cfg(VisionTransformer, "two_block_vit", pretrained, **shape)


@pytest.fixture(scope="module")
def small_vit() -> str:
    """A small architecture that timm knows by its name, while these tests run."""
    if not timm.is_model("two_block_vit"):
        register_model(two_block_vit)
    return "two_block_vit"


@dataclass(frozen=True)
class Saved:
    """A classifier in memory and on disk."""

    classifier: ContinualClassifier
    folder: Path


def classes(pictures: Path, first: int, last: int) -> dict[str, list[Path]]:
    return {f"class{label}": sorted((pictures / f"class{label}").iterdir()) for label in range(first, last)}


@pytest.fixture(scope="module")
def saved(small_vit: str, pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    classifier = ContinualClassifier(
        config={
            "backbone": {"name": small_vit, "weights": "random"},
            "method": {"samples": 2, "components": 2, "tokens": 2, "blocks": [0]},
            "training": {"epochs": 1},
            "head": {"projections": 50, "layers": 1},
        }
    )
    classifier.learn(classes(pictures, 0, 3))
    folder = tmp_path_factory.mktemp("models") / "model"
    classifier.save(folder)
    return Saved(classifier, folder)


def check(classifier: ContinualClassifier, path: Path) -> None:
    predictor = classifier.predictor
    viewer = predictor.viewer
    view = View(32, 0, "", tuple(viewer.mean.flatten().tolist()), tuple(viewer.std.flatten().tolist()))
    for count in BATCHES:
        pixels = images(count, side=32)
        probabilities, novelty = run(path, pixels)
        expected, far = predictor.judge(predictor.look_at(prepared(pixels, view)))
        assert probabilities.shape == (count, len(classifier.classes))
        np.testing.assert_allclose(probabilities, expected.numpy(), atol=1e-5)
        np.testing.assert_allclose(novelty, far.numpy(), rtol=1e-3, atol=1e-3)


def test_a_classifier_is_exported_before_and_after_it_learned_more(
    saved: Saved, pictures: Path, tmp_path: Path, probprompt: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "birds.onnx"
    monkeypatch.chdir(tmp_path)
    told = probprompt("export", saved.folder)
    assert told.code == 2 and "name the format" in told.err and not path.exists()
    shutil.copytree(saved.folder, tmp_path / "birds")
    answer = probprompt(*shlex.split(code_of_the_page("bash"), comments=True)[1:])
    assert answer.code == 0 and "3 classes" in answer.out and "checked with onnxruntime" in answer.out
    check(saved.classifier, path)
    wide = [part.dims for part in onnx_file.load(str(path)).graph.initializer if sorted(part.dims) == [48, 192]]
    assert len(wide) == 4, "two blocks with two such layers each, which both passes share"
    run_the_page(saved.classifier, pictures, tmp_path, monkeypatch)
    saved.classifier.learn(classes(pictures, 3, 5))
    saved.classifier.save(saved.folder)
    assert export_onnx(saved.folder, path).classes == saved.classifier.classes
    check(saved.classifier, path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    said = json.loads(session.get_modelmeta().custom_metadata_map["probprompt"])
    assert (
        said["classifier_version"] == 2 and said["unknown_above"] == 1.0 and set(said["backbone"]) == {"name", "sha256"}
    )


def code_of_the_page(language: str) -> str:
    """The block of docs/export.md in this language that is left to these tests."""
    (block,) = [b for b in read_blocks("docs/export.md") if b.mark.elsewhere and b.language == language]
    return block.code


def run_the_page(
    classifier: ContinualClassifier, pictures: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code of docs/export.md, with onnxruntime alone, sees in files what the classifier sees."""
    for name, of, size in (("a.jpg", "class0", (51, 40)), ("b.jpg", "class2", (31, 26))):
        turned = Image.Exif()
        turned[0x0112] = 6 if name == "a.jpg" else 1  # as a telephone that was held upright writes it
        with Image.open(pictures / of / "0.png") as picture:
            picture.resize(size).save(folder / name, quality=95, exif=turned)
    monkeypatch.chdir(folder)
    found: dict[str, Any] = {}
    exec(compile(code_of_the_page("python"), "docs/export.md", "exec"), found)
    answers = classifier.predict(["a.jpg", "b.jpg"])
    assert [answer.error for answer in answers] == [None, None]
    for answer, row, novelty in zip(answers, found["probabilities"], found["novelty"], strict=True):
        assert found["classes"][row.argmax()] == answer.label
        assert abs(row.max() - answer.probability) < 0.01 and abs(novelty - answer.novelty) < 0.02 * max(1, novelty)
