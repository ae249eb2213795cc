"""The fused blocks give what the plain ones give, and the same gradients; on a GPU, or in Triton's interpreter."""

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from kernel_helpers import DEVICE
from kernel_helpers import normal as drawn
from probprompt import kernels
from probprompt.backbones.vit import FrozenViT, _run_block
from probprompt.kernels import vit_blocks
from probprompt.prompts import ClassTokenShift, Prefix, Prompts, Tokens

pytest.importorskip("triton")

WIDTH, BATCH = 32, 2


def vit(**settings: object) -> FrozenViT:
    """Four blocks of width 32, or another small one."""
    chosen = {"img_size": 16, "patch_size": 4, "embed_dim": WIDTH, "depth": 4, "num_heads": 2, "num_classes": 0}
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = FrozenViT(VisionTransformer(**{**chosen, **settings}))  # type: ignore[arg-type]
        for name, parameter in model.named_parameters():  # norms and scales that do something
            if "norm" in name or "gamma" in name:
                parameter.data += 0.3 * torch.randn_like(parameter)
    return model.to(DEVICE)


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels count as usable here; without a GPU the interpreter runs them."""
    monkeypatch.setattr(kernels, "usable", lambda device: True)


def of_kind(kind: str) -> tuple[Prompts, list[Tensor]]:
    """Prompts of a kind, and what learns in them."""
    learning = [drawn(BATCH, 2, 3, WIDTH, seed=seed).requires_grad_() for seed in range(2)]
    (one, two), (first, second) = learning[:2], (Prefix(part[:, 0], part[:, 1]) for part in learning[:2])
    prompts: dict[str, Prompts] = {
        "first blocks": {0: first, 1: second},
        "later blocks": {1: first, 2: second},
        "last block": {0: first, 3: second},
        "one for all": {0: Prefix(one[0, 0], one[0, 1]), 2: Prefix(two[0, 0], two[0, 1])},
        "tokens": {0: Tokens(one[:, 0], positioned=True), 1: second},
        "tokens later": {0: first, 2: Tokens(two[:, 0])},
        "shift": {1: ClassTokenShift(one[:, 0, 0], one[:, 1, 0]), 2: second},
        "none": {},
    }
    return prompts[kind], learning


def outcome(model: FrozenViT, kind: str, readout: str = "class") -> list[Tensor]:
    """Query, features, and the gradients of all that learns."""
    images, (prompts, learning) = drawn(BATCH, 3, 16, 16, seed=9), of_kind(kind)
    seen = model.embed(images)
    query = model.query(seen)
    features = model.features(seen, prompts, readout)  # type: ignore[arg-type]
    if prompts:
        (features * drawn(*features.shape, seed=4)).sum().backward()
    return [query, features.detach(), *(part.grad for part in learning if part.grad is not None)]


def close(found: list[Tensor], wanted: list[Tensor], most: float) -> bool:
    assert len(found) == len(wanted)
    return all(float((one - two).norm() / two.norm()) < most for one, two in zip(found, wanted, strict=True))


def agree(model: FrozenViT, kind: str, readout: str = "class") -> bool:
    """Whether fused blocks in half precision give what plain ones give in float32."""
    wanted = outcome(model, kind, readout)
    assert model._fast() is None  # float32 goes the plain way
    model.model.half()
    found = outcome(model, kind, readout)
    return model._fast() is not None and close(found, wanted, 5e-3)


KINDS = ("first blocks", "later blocks", "last block", "one for all", "tokens", "tokens later", "shift", "none")


@pytest.mark.parametrize(
    ("kind", "readout"), [*((kind, "class") for kind in KINDS), ("tokens", "class before norm"), ("tokens", "tokens")]
)
def test_values_and_gradients_are_those_of_the_plain_blocks(kind: str, readout: str, everywhere: None) -> None:
    assert agree(vit(), kind, readout)


@pytest.mark.parametrize(
    ("settings", "kind"),
    (
        ({"init_values": 0.5}, "first blocks"),
        ({"qkv_bias": False}, "first blocks"),
        ({"reg_tokens": 2}, "first blocks"),
        ({"no_embed_class": True, "reg_tokens": 1}, "first blocks"),
        ({"pre_norm": True}, "first blocks"),
        ({"mlp_ratio": 2}, "first blocks"),
        ({"embed_dim": 48, "num_heads": 3, "depth": 5}, "none"),
    ),
    ids=str,
)
def test_other_plain_models_are_fused_too(settings: dict[str, int], kind: str, everywhere: None) -> None:
    assert agree(vit(**settings), kind)


@pytest.mark.parametrize(
    "settings", ({"qk_norm": True}, {"act_layer": nn.SiLU}, {"dynamic_img_size": True}, None), ids=str
)
def test_what_the_kernels_do_not_know_goes_the_plain_way(settings: dict[str, object] | None, everywhere: None) -> None:
    """As does a backbone that learns."""
    model = vit(**settings or {})
    model.model.half()
    model.unfreeze(settings is None)
    assert model._fast() is None
    assert outcome(model, "first blocks")[1].isfinite().all()


@pytest.mark.parametrize("layers", (1, 3))
@pytest.mark.parametrize("kind", KINDS)
def test_readings_of_the_blocks_before_the_last_agree(kind: str, layers: int, everywhere: None) -> None:
    model = vit()
    images, (prompts, _) = drawn(BATCH, 3, 16, 16, seed=9), of_kind(kind)
    with torch.no_grad():
        wanted = model.features(model.embed(images), prompts, layers=layers)
        model.model.half()
        found = model.features(model.embed(images), prompts, layers=layers)
    assert model._fast() is not None and found.shape == (BATCH, WIDTH * (1 + 2 * layers))
    assert close(list(found.split(WIDTH, dim=1)), list(wanted.split(WIDTH, dim=1)), 1e-2)


def test_the_first_block_is_projected_once_for_both_passes(everywhere: None) -> None:
    model, images = vit(), drawn(BATCH, 3, 16, 16)
    model.model.half()
    seen = model.embed(images)
    assert seen.qkv is not None and seen.qkv.shape == (BATCH, 17, 3 * WIDTH)
    assert torch.equal(model.query(seen), model.query(images))


@pytest.mark.parametrize("ratio, kind", ((4, vit_blocks.NarrowMlp), (2, vit_blocks.WideMlp)), ids=("narrow", "wide"))
def test_exact_in_float32(ratio: int, kind: type) -> None:
    """The blocks by themselves in float32, where nothing is lost to rounding; gradients of the tokens included."""
    model = vit(init_values=0.7, mlp_ratio=ratio)
    blocks = vit_blocks.fuse(model.model.blocks)
    assert blocks is not None
    assert all(type(block.mlp) is kind for block in blocks)
    prefix = [drawn(BATCH, 3, WIDTH, seed=seed).requires_grad_() for seed in (1, 2)]
    tokens = drawn(BATCH, 17, WIDTH, seed=3).requires_grad_()
    plain = tokens
    for index, block in enumerate(model.model.blocks[:-1]):
        plain = _run_block(block, plain, Prefix(*prefix) if index == 1 else None, slice(None))
    weight = drawn(BATCH, 17, WIDTH, seed=4)
    wanted = torch.autograd.grad((plain * weight).sum(), [tokens, *prefix])
    found, mixed = vit_blocks.run(blocks[:-1], tokens, [None, (prefix[0], prefix[1]), None])
    assert mixed is None
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)
    for one, two in zip(torch.autograd.grad((found * weight).sum(), [tokens, *prefix]), wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)
