"""Weights are found by name, checked, and loaded completely or not at all."""

import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from huggingface_hub import constants
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer

from probprompt import checkpoints
from probprompt.checkpoints import Preprocessing, known, load_backbone
from probprompt.errors import UserError

# timm's own test model: 64 wide, 6 blocks, 160 px, trained weights "r160_in1k" on the hub.
ARCHITECTURE, TAGGED = "test_vit", "test_vit.r160_in1k"
DEMO: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
PREPARED = {"image_size": 32, "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
COLOURS = ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


@pytest.fixture(scope="module")
def model() -> Any:
    """A trained model, as far as these tests are concerned, with its head."""
    torch.manual_seed(0)
    model = timm.create_model(ARCHITECTURE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture
def weights(model: Any, tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    save_file(model.state_dict(), path)
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, and a hub that nobody answers for."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
    )
    return folder


def put_into_cache(cache: Path, repository: str, state: dict[str, torch.Tensor]) -> str:
    """Store weights as the hub's client does after a download; gives their hash."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    path = folder / "snapshots" / ("0" * 40) / "model.safetensors"
    path.parent.mkdir(parents=True)
    save_file(state, path)
    return sha256(path)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def timms_class_token(model: Any, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.forward_features(images)[:, 0]  # type: ignore[no-any-return]


# Files


def test_a_file_is_loaded_with_the_preprocessing_of_its_name(model: Any, weights: Path) -> None:
    loaded = load_backbone(TAGGED, weights=weights)
    config = model.pretrained_cfg
    assert loaded.preprocessing == Preprocessing(160, config["mean"], config["std"])
    assert (loaded.name, loaded.source, loaded.sha256) == (TAGGED, f"file:{weights}", sha256(weights))
    images = torch.randn(2, 3, 160, 160)
    torch.testing.assert_close(loaded.model.query(images), timms_class_token(model, images))
    assert load_backbone(ARCHITECTURE, weights=str(weights)).model.fingerprint() == loaded.model.fingerprint()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_become_float32(model: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "half.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in model.state_dict().items()}, path)
    loaded = load_backbone(ARCHITECTURE, weights=path).model
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    assert torch.equal(loaded.model.cls_token, model.cls_token.to(dtype).float())


def test_a_json_file_beside_the_weights_says_how_images_are_prepared(weights: Path) -> None:
    beside = weights.with_suffix(".json")
    beside.write_text(json.dumps({"preprocessing": PREPARED}))
    loaded = load_backbone(ARCHITECTURE, weights=weights)
    assert loaded.preprocessing == Preprocessing(32, *COLOURS) and loaded.model.image_size == 32
    assert load_backbone(ARCHITECTURE, weights=weights, image_size=64).preprocessing.image_size == 64
    beside.write_text(json.dumps({"something": "else"}))
    assert load_backbone(ARCHITECTURE, weights=weights).preprocessing.image_size == 160


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        (json.dumps({"preprocessing": {"image_size": 32, "mean": [0.5] * 3}}), "'std'"),
        (json.dumps({"preprocessing": PREPARED | {"mean": [0.5]}}), "three numbers"),
        (json.dumps({"preprocessing": PREPARED | {"std": [1, 1, 0]}}), "positive deviations"),
        (json.dumps({"preprocessing": 3}), "must hold"),
    ],
)
def test_a_bad_json_file_beside_the_weights_is_refused(weights: Path, content: str, message: str) -> None:
    weights.with_suffix(".json").write_text(content)
    with pytest.raises(UserError, match=message):
        load_backbone(ARCHITECTURE, weights=weights)


def test_the_image_size_can_be_changed(model: Any, weights: Path) -> None:
    loaded = load_backbone(ARCHITECTURE, weights=weights, image_size=96)
    assert loaded.model.image_size == loaded.preprocessing.image_size == 96
    assert loaded.sha256 == sha256(weights)
    resized: Any = timm.create_model(ARCHITECTURE).eval()
    resized.load_state_dict(model.state_dict())
    resized.set_input_size((96, 96))
    images = torch.randn(2, 3, 96, 96)
    torch.testing.assert_close(loaded.model.query(images), timms_class_token(resized, images))
    with pytest.raises(UserError, match=r"patches of \(16, 16\) pixels: 100 is not a multiple"):
        load_backbone(ARCHITECTURE, weights=weights, image_size=100)


def test_a_file_for_another_image_size_keeps_its_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    small = timm.create_model(ARCHITECTURE, img_size=64).eval()
    path = tmp_path / "small.safetensors"
    save_file(small.state_dict(), path)
    loaded = load_backbone(ARCHITECTURE, weights=path)
    assert loaded.model.image_size == loaded.preprocessing.image_size == 64
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(loaded.model.query(images), timms_class_token(small, images))


def test_a_file_that_does_not_fit_is_refused_with_the_names(model: Any, tmp_path: Path) -> None:
    state = model.state_dict()
    del state["norm.bias"]
    state["extra"] = torch.zeros(1)
    state["norm.weight"] = torch.zeros(65)
    path = tmp_path / "other.safetensors"
    save_file(state, path)
    with pytest.raises(UserError) as caught:
        load_backbone(ARCHITECTURE, weights=path)
    message = str(caught.value)
    assert "missing: norm.bias" in message and "unexpected: extra" in message
    assert "norm.weight (65,) instead of (64,)" in message and "head" not in message


def test_the_hash_is_checked(weights: Path) -> None:
    right = sha256(weights)
    assert load_backbone(ARCHITECTURE, weights=weights, expected_sha256=right.upper()).sha256 == right
    with pytest.raises(UserError, match=f"{right}, expected was {'0' * 64}"):
        load_backbone(ARCHITECTURE, weights=weights, expected_sha256="0" * 64)


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".bin"])
def test_a_pickle_is_refused_with_the_reason(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"weights{suffix}"
    path.write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(UserError, match=r"can run any code.*weights_only=True.*'weights\.safetensors'"):
        load_backbone(ARCHITECTURE, weights=path)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no file .*missing\.safetensors"):
        load_backbone(ARCHITECTURE, weights=tmp_path / "missing.safetensors")
    with pytest.raises(UserError, match=r"a \.safetensors file or 'random', got '.*npz'"):
        load_backbone(ARCHITECTURE, weights=tmp_path / "weights.npz")
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"not at all")
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        load_backbone(ARCHITECTURE, weights=broken)


# Random weights


def test_random_weights_are_the_same_each_time_and_recorded_as_random() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    loaded = load_backbone(ARCHITECTURE, weights="random")
    assert torch.equal(torch.get_rng_state(), before)
    assert loaded.source == "random" and loaded.sha256 == loaded.model.fingerprint()
    assert load_backbone(ARCHITECTURE, weights="random", image_size=96).sha256 == loaded.sha256


@pytest.mark.parametrize(("name", "architecture"), [("sup1k", "vit_base_patch16_224"), (TAGGED, ARCHITECTURE)])
def test_random_weights_never_bear_the_name_of_trained_ones(name: str, architecture: str) -> None:
    with pytest.raises(UserError, match=f"names trained weights: for random ones name '{architecture}'"):
        load_backbone(name, weights="random")


# The packaged weights


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "packaged"
    folder.mkdir()
    torch.manual_seed(0)
    save_file(VisionTransformer(**DEMO, num_classes=0).state_dict(), folder / "demo.safetensors")
    content = {"architecture": DEMO, "preprocessing": PREPARED, "sha256": sha256(folder / "demo.safetensors")}
    (folder / "demo.json").write_text(json.dumps(content))
    monkeypatch.setattr(checkpoints, "_PACKAGED", folder)
    return folder


def test_the_demo_comes_with_the_package(packaged: Path) -> None:
    loaded = load_backbone("demo")
    assert (loaded.name, loaded.source) == ("demo", "packaged")
    assert loaded.sha256 == sha256(packaged / "demo.safetensors")
    assert loaded.preprocessing == Preprocessing(32, *COLOURS)
    assert (loaded.model.width, loaded.model.depth, loaded.model.heads) == (48, 2, 3)
    assert load_backbone("demo", image_size=48).model.image_size == 48
    with pytest.raises(UserError, match="brings its own weights"):
        load_backbone("demo", weights="random")


def test_damaged_demo_weights_are_refused(packaged: Path) -> None:
    path = packaged / "demo.safetensors"
    right = sha256(path)
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    with pytest.raises(UserError, match=f"{sha256(path)}, expected was {right}"):
        load_backbone("demo")
    path.unlink()
    with pytest.raises(UserError, match="install the package again"):
        load_backbone("demo")


# The hub


def test_weights_in_the_cache_are_loaded_without_a_network(model: Any, cache: Path) -> None:
    stored = put_into_cache(cache, f"timm/{TAGGED}", model.state_dict())
    loaded = load_backbone(TAGGED, expected_sha256=stored)
    assert (loaded.source, loaded.sha256) == (f"hub:timm/{TAGGED}", stored)
    assert loaded.preprocessing == Preprocessing(160, model.pretrained_cfg["mean"], model.pretrained_cfg["std"])
    images = torch.randn(2, 3, 160, 160)
    torch.testing.assert_close(loaded.model.query(images), timms_class_token(model, images))
    assert not any(name.startswith("head") for name, _ in loaded.model.model.named_parameters())
    assert "state_dict" not in loaded.model.model.pretrained_cfg
    with pytest.raises(UserError, match="expected was"):
        load_backbone(TAGGED, expected_sha256="0" * 64)


def test_weights_on_the_hub_that_lack_something_are_not_loaded(model: Any, cache: Path) -> None:
    state = model.state_dict()
    del state["norm.bias"]
    put_into_cache(cache, f"timm/{TAGGED}", state)
    with pytest.raises(RuntimeError, match=r"norm\.bias"):
        load_backbone(TAGGED)


@pytest.mark.parametrize("name", ["sup1k", TAGGED])
def test_without_a_network_it_says_so_at_once(name: str, cache: Path) -> None:
    start = time.monotonic()
    with pytest.raises(UserError, match=r"not in the cache.*timm/.*could not be fetched.*weights=FILE"):
        load_backbone(name)
    assert time.monotonic() - start < 20


def test_offline_mode_is_respected(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="not in the cache"):
        load_backbone(TAGGED)


# Names


def test_the_known_checkpoints_are_listed_with_their_availability(cache: Path, packaged: Path) -> None:
    assert [(item.name, item.available) for item in known()] == [
        ("demo", True),
        ("sup1k", False),
        ("sup21k", False),
        ("dino1k", False),
    ]
    put_into_cache(cache, "timm/vit_base_patch16_224.dino", {"weight": torch.zeros(1)})
    (packaged / "demo.safetensors").unlink()
    assert {item.name: item.available for item in known()} == {
        "demo": False,
        "sup1k": False,
        "sup21k": False,
        "dino1k": True,
    }
    assert all(item.description and item.source and item.licence for item in known())


@pytest.mark.parametrize("name", ["sup1k", "sup21k", "dino1k"])
def test_named_checkpoints_agree_with_timm(name: str) -> None:
    checkpoint = checkpoints._NAMED[name]
    same = checkpoints._find_in_timm(checkpoint.architecture)
    assert checkpoint.name == name
    assert (checkpoint.preprocessing, checkpoint.source) == (same.preprocessing, same.source)
    assert checkpoint.licence == same.licence


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sup12k", "no backbone 'sup12k'.*Did you mean sup1k or sup21k"),
        ("vit_bse_patch16_224", "Did you mean vit_base_patch16_224"),
        ("vit_bse_patch16_224.dino", "Did you mean vit_base_patch16_224"),
        ("?", "Allowed: demo, sup1k, sup21k, dino1k, a timm name"),
        ("vit_base_patch16_224.dyno", "no weights 'dyno' .*vit_base_patch16_224.dino"),
        ("test_vit", "does not say which weights: .*test_vit.r160_in1k.*weights=FILE"),
        ("test_resnet.r160_in1k", "cannot be prompted: the model is a timm.models.resnet.ResNet"),
        ("vit_base_patch16_siglip_224.webli", "cannot be prompted: the model has no class token"),
        ("csatv2.r512_in1k", "cannot be prompted"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused(name: str, message: str, cache: Path) -> None:
    with pytest.raises(UserError, match=message):
        load_backbone(name)


def test_a_model_that_cannot_be_prompted_is_refused_with_a_file_too(weights: Path) -> None:
    with pytest.raises(UserError, match="cannot be prompted"):
        load_backbone("test_resnet", weights=weights)


def test_listing_needs_neither_torch_nor_timm() -> None:
    code = "import sys; from probprompt.checkpoints import known; known(); "
    code += "sys.exit(bool({'torch', 'timm'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
