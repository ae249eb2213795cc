"""Weights are found by name, checked, and loaded completely or not at all."""

import argparse
import dataclasses
import hashlib
import json
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from huggingface_hub import constants
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer

from probprompt import FrozenViT
from probprompt.backbones import pretrained
from probprompt.backbones.pretrained import Preprocessing, download, find_file, known, load_backbone
from probprompt.cli.cmd_train import Listed, list_
from probprompt.errors import UserError
from run_cases import Bomb

# timm's own test model: 64 wide, 6 blocks, 160 px, trained weights "r160_in1k" on the hub.
ARCHITECTURE, TAGGED = "test_vit", "test_vit.r160_in1k"
DEMO: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
PREPARED = {"image_size": 32, "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
State = dict[str, torch.Tensor]
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
    """An empty cache of the hub, one of torch.hub, and an offline hub."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
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


def same_class_token(ours: FrozenViT, timms: Any, size: int = 160) -> None:
    images = torch.randn(2, 3, size, size)
    with torch.no_grad():
        torch.testing.assert_close(ours.query(images), timms.forward_features(images)[:, 0])


def refuse(reason: str, name: str = ARCHITECTURE, **options: Any) -> str:
    with pytest.raises(UserError, match=reason) as caught:
        load_backbone(name, **options)
    return str(caught.value)


# Files


def test_a_file_is_loaded_with_the_preprocessing_of_its_name(model: Any, weights: Path) -> None:
    loaded = load_backbone(TAGGED, weights=weights)
    config = model.pretrained_cfg
    assert loaded.preprocessing == Preprocessing(160, config["mean"], config["std"])
    assert (loaded.name, loaded.source, loaded.sha256) == (TAGGED, f"file:{weights}", sha256(weights))
    same_class_token(loaded.model, model)
    same = load_backbone(ARCHITECTURE, weights=str(weights), expected_sha256=loaded.sha256.upper())
    assert same.model.fingerprint() == loaded.model.fingerprint()
    refuse(f"expected {'0' * 64}, got {loaded.sha256}", weights=weights, expected_sha256="0" * 64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_become_float32(model: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "half.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in model.state_dict().items()}, path)
    loaded = load_backbone(ARCHITECTURE, weights=path).model
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    assert torch.equal(loaded.model.cls_token, model.cls_token.to(dtype).float())


def test_a_json_file_beside_the_weights_says_how_images_are_prepared(weights: Path) -> None:
    description = weights.with_suffix(".json")
    description.write_text(json.dumps({"preprocessing": PREPARED}))
    loaded = load_backbone(ARCHITECTURE, weights=weights)
    assert loaded.preprocessing == Preprocessing(32, *COLOURS) and loaded.model.image_size == 32
    assert load_backbone(ARCHITECTURE, weights=weights, image_size=64).preprocessing.image_size == 64
    description.write_text(json.dumps({"something": "else"}))
    assert load_backbone(ARCHITECTURE, weights=weights).preprocessing.image_size == 160


@pytest.mark.parametrize(
    ("preprocessing", "message"),
    [
        ({"image_size": 32, "mean": [0.5] * 3}, "'std'"),
        (PREPARED | {"mean": [0.5]}, "three numbers"),
        (PREPARED | {"std": [1, 1, 0]}, "3 positive standard deviations"),
        (3, "must contain"),
        (None, "is not JSON"),
    ],
)
def test_a_bad_json_file_beside_the_weights_is_refused(weights: Path, preprocessing: Any, message: str) -> None:
    weights.with_suffix(".json").write_text(json.dumps({"preprocessing": preprocessing}) if preprocessing else "{")
    refuse(message, weights=weights)


def test_the_image_size_can_be_changed(model: Any, weights: Path) -> None:
    loaded = load_backbone(ARCHITECTURE, weights=weights, image_size=96)
    assert loaded.model.image_size == loaded.preprocessing.image_size == 96
    assert loaded.sha256 == sha256(weights)
    resized: Any = timm.create_model(ARCHITECTURE).eval()
    resized.load_state_dict(model.state_dict())
    resized.set_input_size((96, 96))
    same_class_token(loaded.model, resized, 96)
    refuse(r"100 is not a multiple .*\(16, 16\)", weights=weights, image_size=100)


@pytest.mark.parametrize("npz", [False, True])
def test_positions_of_another_grid_need_an_image_size(tmp_path: Path, npz: bool) -> None:
    small: Any = timm.create_model(ARCHITECTURE, img_size=64).eval()
    path = save_npz(tmp_path / "small.npz", google(small)) if npz else tmp_path / "small.safetensors"
    if not npz:
        save_file(small.state_dict(), path)
    refuse(r"4x4 .*64 px.* 10x10 .160 px.* image_size=64 to keep", weights=path)
    loaded = load_backbone(ARCHITECTURE, weights=path, image_size=64)
    assert loaded.model.image_size == loaded.preprocessing.image_size == 64
    same_class_token(loaded.model, small, 64)
    if not npz:
        small.set_input_size((96, 96))
        same_class_token(load_backbone(ARCHITECTURE, weights=path, image_size=96).model, small, 96)


def test_an_architecture_alone_must_say_how_images_are_prepared(weights: Path) -> None:
    match = r"'vit_base_patch16_224' .*0\.5.*augreg2_in21k_ft_in1k.*0\.485.*\.dino.*weights\.json"
    refuse(match, "vit_base_patch16_224", weights=weights)
    for name in ("vit_base_patch16_224.dino", "dino1k", "vit_tiny_patch16_224"):  # which all say it
        refuse("does not fit this architecture", name, weights=weights)
    weights.with_suffix(".json").write_text(json.dumps({"preprocessing": PREPARED}))
    refuse("does not fit this architecture", "vit_base_patch16_224", weights=weights)


def test_a_file_that_does_not_fit_is_refused_with_the_names(model: Any, tmp_path: Path) -> None:
    state, path = model.state_dict(), tmp_path / "other.safetensors"
    save_file(state | {"pos_embed": torch.zeros(1, 1 + 15, 64)}, path)
    refuse(r"pos_embed \(1, 16, 64\) instead of \(1, 101, 64\)", weights=path, image_size=160)  # no square
    del state["norm.bias"]
    save_file(state | {"extra": torch.zeros(1), "norm.weight": torch.zeros(65)}, path)
    named = r"missing: norm\.bias; unexpected: extra; other shape: norm\.weight \(65,\) instead of \(64,\)\."
    refuse(named, weights=path)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    refuse(r"missing\.safetensors not found", weights=tmp_path / "missing.safetensors")
    refuse(r"a \.safetensors file, .* or 'random', got '.*\.h5'", weights=tmp_path / "weights.h5")
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"not at all")
    refuse("as safetensors: ", weights=broken)


# Files of torch


def before(prefix: str, state: State) -> State:
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


def other(state: State) -> State:
    return {name: tensor + 1 for name, tensor in state.items()}


HEAD = {"head.mlp.0.weight": torch.ones(3, 64), "head.last_layer.weight_g": torch.ones(3, 1)}
MASKED = {
    "mask_token": torch.ones(1, 1, 64),
    "decoder_embed.weight": torch.ones(8, 64),
    "decoder_pos_embed": torch.ones(4),
}
WRAPPED: dict[str, Callable[[State], dict[str, Any]]] = {
    "bare": lambda state: state,
    "state_dict": lambda state: {"state_dict": state, "epoch": 3, "best": 0.5},
    "model": lambda state: {"model": state | MASKED, "optimizer": {"state": {}, "param_groups": []}},
    "teacher": lambda state: {
        "student": before("module.backbone.", other(state)),
        "teacher": before("backbone.", state) | HEAD,
    },
    "distributed": lambda state: {"state_dict": before("module.encoder.", state) | before("module.", HEAD)},
    "safetensors": lambda state: before("module.backbone.", state),
    "nested": lambda state: {"model": {"state_dict": before("backbone.", state)}},
    "side by side": lambda state: {
        "model": before("teacher.backbone.", state)
        | before("student.backbone.", other(state))
        | before("teacher.", HEAD)
    },
}


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_weights_are_found_in_wrappers_of_common_files(wrapped: str, model: Any, weights: Path, tmp_path: Path) -> None:
    path = tmp_path / ("prefixed.safetensors" if wrapped == "safetensors" else "weights.pth")
    save: Callable[..., None] = save_file if wrapped == "safetensors" else torch.save
    save(WRAPPED[wrapped](model.state_dict()), path)
    loaded = load_backbone(TAGGED, weights=path)
    assert loaded.model.fingerprint() == load_backbone(TAGGED, weights=weights).model.fingerprint()
    assert (loaded.source, loaded.sha256) == (f"file:{path}", sha256(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda state: before("a.", state) | before("b.", other(state)), r"2 backbones: a\., b\."),
        (lambda state: before("module.", state | {"adapter.down": torch.ones(1)}), "unexpected: adapter.down"),
        (lambda state: before("module.", state) | {"adapter.down": torch.ones(1)}, "unexpected: adapter.down"),
        (lambda state: before("backbone.", {k: v for k, v in state.items() if k != "norm.bias"}), "missing: norm.bias"),
        (lambda state: state | {"cls_token": torch.ones(1, 1, 64, dtype=torch.int8)}, "not float: cls_token"),
        (
            lambda state: {"weights": state, "epoch": 3},
            "no weights .*state_dict, model. It contains: weights, epoch",
        ),
        (lambda state: list(state.values()), "no weights .*It contains: a list"),
        (lambda state: {"model": {}}, "no weights"),
    ],
)
def test_what_a_torch_file_holds_besides_is_refused_with_its_names(
    content: Callable[[State], Any], message: str, model: Any, tmp_path: Path
) -> None:
    path = tmp_path / "weights.pth"
    torch.save(content(model.state_dict()), path)
    refuse(message, weights=path)


def save_pickled(content: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(content, protocol=2))


def save_old(content: Any, path: Path) -> None:
    torch.save(content, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".bin", ".ckpt", ".pth.tar"])
@pytest.mark.parametrize("save", [torch.save, save_old, save_pickled])
def test_a_pickle_of_more_than_weights_is_rejected_and_nothing_of_it_runs(
    save: Callable[[Any, Path], None], suffix: str, model: Any, tmp_path: Path
) -> None:
    path, mark, state = tmp_path / f"weights{suffix}", tmp_path / "mark", dict(model.state_dict())
    for extra, name in ((Bomb(mark), "mkdir"), (argparse.Namespace(epochs=3), "argparse.Namespace")):
        save({"extra": extra, "state_dict": state}, path)
        text = refuse(rf"{name}.*.*Nothing was executed.*safetensors", weights=path)
        assert "weights_only" not in text, "the message must not say how to open it"
    assert not mark.exists()
    torch.save(Bomb(mark), path)
    torch.load(path, weights_only=False)
    assert mark.is_dir(), "the attack is a real one"


@pytest.mark.parametrize("suffix", [".pth", ".ckpt", ".safetensors", ".npz"])
def test_what_came_instead_of_the_weights_is_named(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"weights{suffix}"
    for content in ("<!DOCTYPE html>\n<title>404</title>", "\ufeff\n <html lang='en'>"):
        path.write_text(content, encoding="utf-8")
        refuse("an HTML page.*ownload the file again", weights=path)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    refuse("git-lfs pointer.*git lfs pull", weights=path)


def test_damaged_and_foreign_torch_files_are_rejected(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    torch.save(model.state_dict(), path)
    whole = path.read_bytes()
    foreign = (b"", b"not at all", b"\x1f\x8b\x08\x00")
    damaged = (b"\x80\x02}q\x00.", b"\x80\x02", whole[:1000], whole[:-1000], b"PK\x03\x04" + whole[4:50])
    for content in (*foreign, *damaged):
        path.write_bytes(content)
        refuse(r"weights\.pth as tensors .*ownload it again", weights=path)
    (tmp_path / "folder.pth").mkdir()
    refuse("folder.pth not found", weights=tmp_path / "folder.pth")


# Google's npz


def google(model: Any, layout: str = "") -> dict[str, np.ndarray[Any, Any]]:
    """The weights of a timm ViT as the npz archives of its JAX original hold them."""
    state = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    heads, width = model.blocks[0].attn.num_heads, model.embed_dim
    arrays = {
        "embedding/kernel": state["patch_embed.proj.weight"].transpose(2, 3, 1, 0),
        "embedding/bias": state["patch_embed.proj.bias"],
        "cls": state["cls_token"],
        "Transformer/posembed_input/pos_embedding": state["pos_embed"],
        "Transformer/encoder_norm/scale": state["norm.weight"],
        "Transformer/encoder_norm/bias": state["norm.bias"],
        "head/kernel": np.ones((width, 5), np.float32),
        "head/bias": np.ones(5, np.float32),
    }
    for index in range(len(model.blocks)):
        own, block = f"blocks.{index}.", f"Transformer/encoderblock_{index}/"
        attention = f"{block}MultiHeadDotProductAttention_1/"
        for part, name in enumerate(("query", "key", "value")):
            rows = slice(part * width, (part + 1) * width)
            arrays[f"{attention}{name}/kernel"] = state[f"{own}attn.qkv.weight"][rows].T.reshape(width, heads, -1)
            arrays[f"{attention}{name}/bias"] = state[f"{own}attn.qkv.bias"][rows].reshape(heads, -1)
        arrays[f"{attention}out/kernel"] = state[f"{own}attn.proj.weight"].T.reshape(heads, -1, width)
        arrays[f"{attention}out/bias"] = state[f"{own}attn.proj.bias"]
        for norm, number in (("norm1", 0), ("norm2", 2)):
            arrays[f"{block}LayerNorm_{number}/scale"] = state[f"{own}{norm}.weight"]
            arrays[f"{block}LayerNorm_{number}/bias"] = state[f"{own}{norm}.bias"]
        for number in range(2):
            arrays[f"{block}MlpBlock_3/Dense_{number}/kernel"] = state[f"{own}mlp.fc{number + 1}.weight"].T
            arrays[f"{block}MlpBlock_3/Dense_{number}/bias"] = state[f"{own}mlp.fc{number + 1}.bias"]
    return {f"{layout}{name}": array for name, array in arrays.items()}


def save_npz(path: Path, arrays: dict[str, np.ndarray[Any, Any]]) -> Path:
    with path.open("wb") as file:
        np.savez(file, allow_pickle=True, **arrays)
    return path


@pytest.mark.parametrize("layout", ["", "opt/target/"])
def test_an_npz_in_google_s_layout_is_loaded(layout: str, model: Any, weights: Path, tmp_path: Path) -> None:
    path = save_npz(tmp_path / "weights.npz", google(model, layout))
    loaded = load_backbone(TAGGED, weights=path)
    assert loaded.model.fingerprint() == load_backbone(TAGGED, weights=weights).model.fingerprint()
    assert (loaded.source, loaded.sha256) == (f"file:{path}", sha256(path))


FIRST = "Transformer/encoderblock_0/"
QUERY = f"{FIRST}MultiHeadDotProductAttention_1/query/kernel"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{FIRST}LayerNorm_0/scale": None}, f"missing: .*{FIRST}LayerNorm_0/scale"),
        ({"embedding/kernel": None}, "not in Google's ViT layout"),
        ({"adapter/kernel": np.ones(3)}, "unexpected: adapter/kernel"),
        ({QUERY.replace("_0/", "_6/"): np.ones((64, 2, 32))}, "blocks 7 instead of 6"),
        ({QUERY: np.ones((64, 4, 16))}, "heads 4 instead of 2"),
        ({"embedding/kernel": np.ones((8, 8, 3, 64), np.float32)}, r"patch \(8, 8\) instead of \(16, 16\)"),
        ({"embedding/kernel": np.ones((16, 16, 3, 32), np.float32)}, "width 32 instead of 64"),
        ({f"{FIRST}MlpBlock_3/Dense_0/kernel": np.ones((64, 7))}, "does not fit this architecture"),
    ],
)
def test_an_npz_that_does_not_fit_is_refused(changes: dict[str, Any], message: str, model: Any, tmp_path: Path) -> None:
    arrays = {name: array for name, array in (google(model) | changes).items() if array is not None}
    refuse(message, weights=save_npz(tmp_path / "weights.npz", arrays))


def test_weights_that_an_npz_cannot_hold_are_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaled: Any = timm.create_model(ARCHITECTURE, init_values=0.1)
    checkpoint = dataclasses.replace(pretrained.find_checkpoint(ARCHITECTURE), arguments={"init_values": 0.1})
    monkeypatch.setitem(pretrained._NAMED, "scaled", checkpoint)
    refuse(r"missing: blocks\.0\.ls1\.gamma", "scaled", weights=save_npz(tmp_path / "weights.npz", google(scaled)))


def test_damaged_and_foreign_npz_files_are_refused_and_nothing_of_them_runs(model: Any, tmp_path: Path) -> None:
    mark, path, alone = tmp_path / "mark", tmp_path / "weights.npz", tmp_path / "alone.npy"
    for name in ("embedding/kernel", f"{FIRST}LayerNorm_0/scale"):
        save_npz(path, google(model) | {name: np.array([Bomb(mark)], dtype=object)})
        refuse("allow_pickle=False", weights=path)
    assert not mark.exists()
    whole = save_npz(path, google(model)).read_bytes()
    np.save(alone, np.ones(3))
    for content in (b"", b"not at all", whole[:1000], alone.read_bytes()):
        path.write_bytes(content)
        refuse(r"weights\.npz as an npz of arrays", weights=path)


# Random weights


def test_random_weights_are_the_same_each_time_and_recorded_as_random() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    loaded = load_backbone(ARCHITECTURE, weights="random")
    assert torch.equal(torch.get_rng_state(), before)
    assert loaded.source == "random" and loaded.sha256 == loaded.model.fingerprint()
    assert load_backbone(ARCHITECTURE, weights="random", image_size=96).sha256 == loaded.sha256
    for name, architecture in (("sup1k", "vit_base_patch16_224"), (TAGGED, ARCHITECTURE)):
        refuse(f"For random weights, choose '{architecture}'", name, weights="random")


# The packaged weights


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "packaged"
    folder.mkdir()
    torch.manual_seed(0)
    save_file(VisionTransformer(**DEMO, num_classes=0).state_dict(), folder / "demo.safetensors")
    content = {"architecture": DEMO, "preprocessing": PREPARED, "sha256": sha256(folder / "demo.safetensors")}
    (folder / "demo.json").write_text(json.dumps(content))
    monkeypatch.setattr(pretrained, "_PACKAGED", folder)
    return folder


def test_the_demo_comes_with_the_package_whole(packaged: Path) -> None:
    loaded = load_backbone("demo")
    assert (loaded.name, loaded.source) == ("demo", "packaged")
    assert loaded.sha256 == sha256(packaged / "demo.safetensors")
    assert loaded.preprocessing == Preprocessing(32, *COLOURS)
    assert (loaded.model.width, loaded.model.depth, loaded.model.heads) == (48, 2, 3)
    assert load_backbone("demo", image_size=48).model.image_size == 48
    refuse("Remove --weights", "demo", weights="random")
    path = packaged / "demo.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    refuse(f"expected {loaded.sha256}, got {sha256(path)}", "demo")
    path.unlink()
    refuse("Reinstall probprompt", "demo")


# The hub


def test_weights_in_the_cache_are_loaded_without_a_network(model: Any, cache: Path) -> None:
    stored = put_into_cache(cache, f"timm/{TAGGED}", model.state_dict())
    loaded = load_backbone(TAGGED, expected_sha256=stored)
    assert (loaded.source, loaded.sha256) == (f"hub:timm/{TAGGED}", stored)
    assert loaded.preprocessing == Preprocessing(160, model.pretrained_cfg["mean"], model.pretrained_cfg["std"])
    same_class_token(loaded.model, model)
    assert not any(name.startswith("head") for name, _ in loaded.model.model.named_parameters())
    assert "state_dict" not in loaded.model.model.pretrained_cfg
    refuse("SHA-256 mismatch", TAGGED, expected_sha256="0" * 64)
    state = model.state_dict()
    del state["norm.bias"]
    save_file(state, next(cache.rglob("model.safetensors")))
    refuse(r"does not fit 'test_vit.r160_in1k'.*norm\.bias", TAGGED)


def test_a_damaged_file_in_the_cache_is_refused(model: Any, cache: Path) -> None:
    put_into_cache(cache, f"timm/{TAGGED}", model.state_dict())
    (link,) = cache.rglob("model.safetensors")
    blob = link.parents[2] / "blobs" / sha256(link)  # as the client stores large files
    blob.parent.mkdir()
    link.rename(blob)
    link.symlink_to(blob)
    assert load_backbone(TAGGED).sha256 == blob.name
    blob.write_bytes(blob.read_bytes()[:-1] + b"\0")
    refuse(rf"corrupted.*expected {blob.name}, got {sha256(blob)}", TAGGED)


def put_into_torch_cache(name: str, content: Any) -> Path:
    path = Path(torch.hub.get_dir()) / "checkpoints" / name  # torch's own word on where it is
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)
    return path


def test_weights_in_the_cache_of_torch_hub_are_loaded(model: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = dataclasses.replace(pretrained.find_checkpoint(TAGGED), torch_file="authors.pth")
    monkeypatch.setitem(pretrained._NAMED, "small", checkpoint)
    path = put_into_torch_cache("authors.pth", {"state_dict": before("module.", model.state_dict())})
    loaded = load_backbone("small")
    assert (loaded.source, loaded.sha256) == ("torch-hub:authors.pth", sha256(path))
    (listed,) = [item for item in known() if item.name == "small"]
    assert (listed.available, listed.place, listed.size) == (True, "torch.hub cache", path.stat().st_size)
    put_into_cache(cache, f"timm/{TAGGED}", model.state_dict())
    assert load_backbone("small").source == f"hub:timm/{TAGGED}"


@pytest.mark.parametrize("name", ["sup1k", TAGGED])
def test_without_a_network_it_says_so_at_once(name: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = time.monotonic()
    refuse(r"not in .*timm/.*could not be downloaded.*--weights .*weights=FILE", name)
    assert time.monotonic() - start < 20
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refuse("could not be downloaded", name)


def test_weights_are_found_or_fetched(model: Any, cache: Path, packaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert download("demo") == find_file("demo") == packaged / "demo.safetensors"
    assert find_file("sup1k") is None and find_file(TAGGED) is None
    monkeypatch.setattr(pretrained, "_download", lambda checkpoint: Path(checkpoint.source))
    assert download("sup1k") == Path("timm/vit_base_patch16_224.augreg2_in21k_ft_in1k")
    put_into_cache(cache, f"timm/{TAGGED}", model.state_dict())
    assert download(TAGGED) == find_file(TAGGED) == next(cache.rglob("model.safetensors"))
    for name, message in (("ibot1k", "no automatic"), ("test_vit", "no default weights"), ("tset", "Unknown backbone")):
        with pytest.raises(UserError, match=message):
            find_file(name)


# Names


def test_the_known_checkpoints_are_listed_with_their_availability(cache: Path, packaged: Path) -> None:
    names = ["demo", "sup1k", "sup21k", "ibot1k", "dino1k"]
    assert {item.name: item.available for item in known()} == dict.fromkeys(names, False) | {"demo": True}
    put_into_cache(cache, "timm/vit_base_patch16_224.dino", {"weight": torch.zeros(1)})
    (packaged / "demo.safetensors").unlink()
    assert {item.name: item.available for item in known()} == dict.fromkeys(names, False) | {"dino1k": True}
    assert [item.name for item in known()] == names
    assert all(item.description and item.source and item.license for item in known())
    architectures = [item.source.rpartition("/")[2].partition(".")[0] for item in known()[1:]]
    assert set(architectures) == {"vit_base_patch16_224"}  # what is timed in their place


def test_what_is_on_this_machine_is_listed_with_its_size(
    cache: Path, packaged: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    put_into_cache(cache, "timm/vit_base_patch16_224.dino", {"weight": torch.zeros(500_000)})
    put_into_cache(cache, f"timm/{TAGGED}", {"weight": torch.zeros(250_000)})
    put_into_cache(cache, "timm/resnet18.a1_in1k", {"weight": torch.zeros(1)})
    (cache / "models--timm--vit_tiny_patch16_224.augreg_in21k" / "refs").mkdir(parents=True)  # begun, never finished
    put_into_torch_cache(pretrained._NAMED["sup21k"].torch_file, torch.zeros(750_000))
    found = {item.name: item for item in known()}
    assert list(found)[5:] == [TAGGED] and found["demo"].size == (packaged / "demo.safetensors").stat().st_size
    assert found["sup1k"].size is None and found["sup1k"].place == ""
    list_(Listed.backbones)
    lines = {line.split()[0]: line.rstrip() for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert lines["dino1k"].endswith("2.0 MB, Hugging Face cache") and lines["sup1k"].endswith(" no")
    assert lines[TAGGED].endswith("1.0 MB, Hugging Face cache")
    assert lines["sup21k"].endswith("3.0 MB, torch.hub cache") and lines["demo"].endswith("MB, packaged")


REFUSED = (
    "vit_base_patch16_siglip_224.webli",
    "vit_small_patch16_dinov3.lvd1689m",
    "vit_medium_patch16_gap_240.sw_in12k",
    "vit_tiny_r_s16_p8_224.augreg_in21k",
    "vit_relpos_small_patch16_224.sw_in1k",
    "deit_tiny_distilled_patch16_224.fb_in1k",
    "test_vit2.r160_in1k",
)
TAKEN = (
    "deit3_small_patch16_224.fb_in1k",
    "deit_tiny_patch16_224.fb_in1k",
    "vit_base_patch16_224_miil.in21k",
    "vit_base_patch16_clip_quickgelu_224.openai",
    "vit_small_patch14_reg4_dinov2.lvd142m",
    "vit_tiny_patch16_224.augreg_in21k",
)


def test_only_what_can_be_prompted_is_listed(cache: Path, packaged: Path, weights: Path) -> None:
    for name in (*REFUSED, *TAKEN, "vit_tiny_patch16_224"):
        put_into_cache(cache, f"timm/{name}", {"weight": torch.zeros(1)})
    assert [item.name for item in known()][5:] == sorted(TAKEN)
    for name in REFUSED:
        refuse("Unsupported backbone", name)
    refuse("Unsupported backbone", "test_resnet", weights=weights)
    for name in TAKEN:
        refuse("does not fit", name, weights=weights)  # the model is built


def test_ibot_is_loaded_from_the_authors_file_alone(
    model: Any, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        UserError, match=r"no automatic.*checkpoint_teacher\.pth.*bytedance/ibot.*--weights .*weights=FILE"
    ):
        load_backbone("ibot1k")
    refuse("For random weights, choose 'vit_base_patch16_224'", "ibot1k", weights="random")
    small = dataclasses.replace(pretrained._NAMED["ibot1k"], architecture=ARCHITECTURE)
    monkeypatch.setitem(pretrained._NAMED, "ibot1k", small)
    path = tmp_path / "checkpoint_teacher.pth"
    torch.save({"state_dict": model.state_dict()}, path)
    loaded = load_backbone("ibot1k", weights=path)
    imagenet = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert (loaded.name, loaded.preprocessing) == ("ibot1k", Preprocessing(160, *imagenet))
    same_class_token(loaded.model, model)


@pytest.mark.parametrize("name", ["sup1k", "sup21k", "dino1k"])
def test_named_checkpoints_agree_with_timm(name: str) -> None:
    checkpoint = pretrained.find_checkpoint(name)
    same = pretrained.find_checkpoint(checkpoint.architecture)
    assert checkpoint.name == name
    assert (checkpoint.preprocessing, checkpoint.source) == (same.preprocessing, same.source)
    assert checkpoint.license == same.license
    assert checkpoint.torch_file == same.torch_file


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sup12k", "Unknown backbone 'sup12k'.*Did you mean sup1k or sup21k"),
        ("vit_bse_patch16_224", "Did you mean vit_base_patch16_224"),
        ("vit_bse_patch16_224.dino", "Did you mean vit_base_patch16_224"),
        ("?", "Choose demo, sup1k, sup21k, ibot1k, dino1k, a timm name"),
        ("vit_base_patch16_224.dyno", "no weights 'dyno' .*vit_base_patch16_224.dino"),
        ("test_vit", "no default weights.*test_vit.r160_in1k.*--weights .*weights=FILE"),
        ("test_resnet.r160_in1k", "Unsupported backbone .* timm.models.resnet.ResNet"),
        ("vit_base_patch16_siglip_224.webli", "Unsupported backbone .*no class token"),
        ("csatv2.r512_in1k", "Unsupported backbone"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused(name: str, message: str, cache: Path) -> None:
    refuse(message, name)


def test_listing_needs_neither_torch_nor_timm() -> None:
    code = "import sys; from probprompt.backbones.pretrained import known; known(); "
    code += "sys.exit(bool({'torch', 'timm'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
