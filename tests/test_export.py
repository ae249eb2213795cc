"""An ONNX file answers as the model does, whatever the method, the head and the number of images."""

import json
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
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

from page_world import read_blocks
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
    "probprompt": {"kind": "ridge", "projections": 30, "with_query": True},
    "coda-prompt": {"kind": "lda", "flip_average": True},
    "l2p": {"kind": "nearest-mean"},
}
# The graph of linear-probe (which several tests export) or of l2p, under heads that others have.
ALIKE = {"linear-probe", "lda", "nearest-mean", "ranpac", "ft", "ft++", "joint", "l2p++", "deep-l2p++"}


def images(count: int, side: int = SIDE) -> NDArray[np.uint8]:
    return np.random.RandomState(count).randint(0, 256, (count, side, side, 3)).astype(np.uint8)


def source(name: str, **more: Any) -> Source:
    """A model that has begun two tasks, with a head that knows four classes."""
    kind, depth = methods.find(name), 2 if name == "dual-prompt" else 1
    with torch.random.fork_rng():
        torch.manual_seed(3)
        vit = VisionTransformer(img_size=SIDE, patch_size=8, embed_dim=WIDTH, depth=depth, num_heads=2, num_classes=0)
    blocks = {"blocks": [0]} if "blocks" in kind.Config.model_fields else {}
    config = methods.parse_config({"name": name, **blocks, **SMALL.get(name, {})})
    method = kind.create(config, methods.Shape(WIDTH, depth), 0)
    for task in range(2):
        method.begin_task(task, 2)
    head = make_head(parse_config({"method": config, "head": HEADS.get(name, {})}).head, WIDTH, 0)
    if isinstance(head, ClosedFormHead):
        features = torch.randn(20, head.width, generator=torch.Generator().manual_seed(1))
        head.learn(features, torch.arange(20) % 4, 4, task_key=0)
    else:
        head.grow(4)
    model = PromptedModel(FrozenViT(vit), method, head)
    model.fix()
    return Source(model, ("ä", "b", "c|d", 'e"'), VIEW, lambda given: (head(given).softmax(dim=1),), **more)


def judged(temperature: float, factor: float = 1.0) -> Source:
    """A model that answers novelty as well: the length of the feature, times a factor."""
    plain = source("linear-probe", outputs=("probabilities", "novelty"), facts={"temperature": temperature})

    def judge(features: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (plain.model.head(features) / temperature).softmax(dim=1), factor * features.double().norm(dim=1)

    return replace(plain, judge=judge)


def prepared(pixels: NDArray[np.uint8], view: View) -> torch.Tensor:
    """What the backbone is fed, by the definition."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (view.mean, view.std))
    return (torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255 - mean) / std


def session_of(path: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("name", sorted(set(methods.registered()) - ALIKE))
def test_any_method_answers_as_in_torch(name: str, tmp_path: Path) -> None:
    given = source(name)
    done = write_onnx(given, tmp_path / "model.onnx")
    assert done.difference < 1e-5 and done.outputs == ("probabilities",)
    session = session_of(done.path)
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


def test_the_file_answers_as_torch_and_describes_itself(probe: Exported) -> None:
    model, pixels, session = source("linear-probe").model, images(5), session_of(probe.path)
    probabilities, novelty = session.run(None, {"images": pixels})
    features = model.features(prepared(pixels, VIEW))[0].detach()
    np.testing.assert_allclose(probabilities, (model.head(features) / 0.3).softmax(dim=1).detach().numpy(), atol=1e-5)
    np.testing.assert_allclose(novelty, features.norm(dim=1).numpy(), rtol=1e-4)
    (given,), outputs = session.get_inputs(), [(one.name, one.shape) for one in session.get_outputs()]
    assert (given.name, given.shape, given.type) == ("images", ["batch", SIDE, SIDE, 3], "tensor(uint8)")
    assert outputs == [("probabilities", ["batch", 4]), ("novelty", ["batch"])]
    assert probe.outputs == ("probabilities", "novelty")
    said = {name: json.loads(text) for name, text in session.get_modelmeta().custom_metadata_map.items()}
    assert said["classes"] == ["ä", "b", "c|d", 'e"']
    assert said["preprocessing"]["image_size"] == SIDE and said["preprocessing"]["resize_short_side_to"] == 18
    assert said["preprocessing"]["normalised_in_graph"] == {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.25, 0.3]}
    assert said["probprompt"] == {"temperature": 0.3, "version": __version__}
    content = probe.path.read_bytes()
    assert len(content) == probe.bytes
    for trace in ("site-packages", "probprompt/", str(Path.cwd()), "stack_trace"):
        assert trace.encode() not in content


@pytest.mark.parametrize("other", [{"temperature": 1.0}, {"temperature": 0.3, "factor": 1.01}], ids=str)
def test_a_file_with_other_answers_is_never_put_in_place(
    probe: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, float]
) -> None:
    monkeypatch.setattr(onnx, "_translate", lambda graph, given: probe.path.read_bytes())
    path = tmp_path / "model.onnx"
    path.write_bytes(b"what was there before")
    with pytest.raises(UserError, match=r"on 1 image"):
        write_onnx(judged(**other), path)
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
    assert path.read_bytes() == b"what was there before"


def test_class_names_that_are_no_unicode_are_written() -> None:
    given = replace(source("linear-probe"), classes=("caf\udce9",))
    assert json.loads(metadata(given)["classes"].encode().decode()) == ["caf\udce9"]


def test_nothing_of_the_extra_is_imported_before_it_is_needed() -> None:
    files = sorted(Path(onnx.__file__).parents[1].rglob("*.py"))
    assert Path(onnx.__file__) in files
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"^\s*(import|from) (onnx|onnxscript|onnxruntime|onnx_ir)\b", text, re.MULTILINE), file


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_named(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"'{package}'. Run: pip install 'probprompt\[onnx\]'"):
        export_onnx(tmp_path, tmp_path / "model.onnx")


def test_places_that_cannot_be_written_are_told_at_once(tmp_path: Path) -> None:
    for path, message in (
        (tmp_path, "is a folder"),
        (tmp_path / "gone" / "model.onnx", "gone does not exist"),
        (tmp_path / "model.onnx", "No model"),
    ):
        with pytest.raises(UserError, match=message):
            export_onnx(tmp_path, path)


def test_noise_of_each_image_is_in_no_file(tmp_path: Path) -> None:
    given = source("probprompt")
    given.model.method.needs_keys = True
    with pytest.raises(UserError, match=r"method\.evaluation=mean"):
        write_onnx(given, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_a_model_too_large_for_one_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx, "LARGEST", 1000)
    with pytest.raises(UserError, match="2 GB"):
        write_onnx(source("linear-probe"), tmp_path / "model.onnx")


def test_the_model_of_a_run_is_read_as_it_is(settings: Command, tmp_path: Path) -> None:
    config = {**settings(head={"projections": 40}), "method": {"name": "ranpac"}}
    folder = api.train(out=tmp_path / "run", config=config).folder
    given, loaded = open_source(folder), load_model(folder)
    assert given.classes == loaded.class_names and given.outputs == ("probabilities",)
    assert given.facts["method"] == "ranpac" and set(given.facts["backbone"]) == {"name", "sha256"}
    pixels = torch.from_numpy(images(2, given.view.image_size))
    (found,) = onnx.Graph(given)(pixels)
    expected = loaded.model.predict(prepared(pixels.numpy(), given.view)).softmax(dim=1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


default_cfgs = generate_default_cfgs(
    {"two_block_vit.": {"input_size": (3, 32, 32), "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "num_classes": 0}}
)


def two_block_vit(pretrained: bool = False, **arguments: Any) -> Any:
    """Two blocks, of which a head reads one: what an export costs is their number."""
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 2, **arguments}
    return build_model_with_cfg(VisionTransformer, "two_block_vit", pretrained, **shape)


@pytest.fixture(scope="module")
def learned(pictures: Path) -> ContinualClassifier:
    """Knows three classes of one lesson and two of another."""
    if not timm.is_model("two_block_vit"):
        register_model(two_block_vit)
    classifier = ContinualClassifier(
        config={
            "backbone": {"name": "two_block_vit", "weights": "random"},
            "method": {"samples": 2, "components": 2, "tokens": 2, "blocks": [0]},
            "training": {"epochs": 1},
            "head": {"projections": 50, "layers": 1},
        }
    )
    for first, last in ((0, 3), (3, 5)):
        classifier.learn({f"class{label}": pictures / f"class{label}" for label in range(first, last)})
    return classifier


def test_a_classifier_is_exported(
    learned: ContinualClassifier, pictures: Path, tmp_path: Path, probprompt: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, pages = tmp_path / "birds.onnx", [block for block in read_blocks("docs/export.md") if block.is_elsewhere]
    monkeypatch.chdir(tmp_path)
    learned.save("birds")
    (command,) = [block.code for block in pages if block.language == "bash"]
    answer = probprompt(*shlex.split(command, comments=True)[1:])
    assert answer.code == 0 and "5 classes" in answer.out and "Checked with onnxruntime" in answer.out
    wide = [part.dims for part in onnx_file.load(str(path)).graph.initializer if sorted(part.dims) == [48, 192]]
    assert len(wide) == 4, "two blocks with two such layers each, which both passes share"

    predictor, session = learned.predictor, session_of(path)
    mean, std = (tuple(values.flatten().tolist()) for values in (predictor.viewer.mean, predictor.viewer.std))
    for count in BATCHES:
        pixels = images(count, side=32)
        probabilities, novelty = session.run(None, {"images": pixels})
        expected, far = predictor.judge(predictor.model.look(prepared(pixels, View(32, 0, "", mean, std))))
        assert probabilities.shape == (count, 5)
        np.testing.assert_allclose(probabilities, expected.numpy(), atol=1e-5)
        np.testing.assert_allclose(novelty, far.numpy(), rtol=1e-3, atol=1e-3)
    said = json.loads(session.get_modelmeta().custom_metadata_map["probprompt"])
    assert (said["classifier_version"], said["unknown_above"], set(said["backbone"])) == (2, 1.0, {"name", "sha256"})

    (code,) = [block.code for block in pages if block.language == "python"]
    check_the_page(code, learned, pictures)


def check_the_page(code: str, classifier: ContinualClassifier, pictures: Path) -> None:
    """The code of docs/export.md, with onnxruntime alone, sees in files what the classifier sees."""
    for name, of, size, orientation in (("a.jpg", "class0", (51, 40), 6), ("b.jpg", "class2", (31, 26), 1)):
        turned = Image.Exif()
        turned[0x0112] = orientation  # 6: as a phone that was held upright writes it
        with Image.open(pictures / of / "0.png") as picture:
            picture.resize(size).save(name, quality=95, exif=turned)
    found: dict[str, Any] = {}
    exec(compile(code, "docs/export.md", "exec"), found)
    answers = classifier.predict(["a.jpg", "b.jpg"])
    assert [answer.error for answer in answers] == [None, None]
    for answer, row, novelty in zip(answers, found["probabilities"], found["novelty"], strict=True):
        assert found["classes"][row.argmax()] == answer.label
        assert abs(row.max() - answer.probability) < 0.01 and abs(novelty - answer.novelty) < 0.02 * max(1, novelty)
