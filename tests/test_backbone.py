"""The frozen backbone equals timm's own pass, and a prefix does what prefix attention says and no more."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from timm.layers.attention import Attention
from timm.layers.mlp import GluMlp, SwiGLU
from timm.layers.norm import RmsNorm
from timm.models import create_model
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import (
    DiffParallelScalingBlock,
    ParallelScalingBlock,
    ParallelThingsBlock,
    ResPostBlock,
    VisionTransformer,
)
from torch import Tensor, nn

from probprompt.backbone import FrozenViT
from probprompt.errors import UserError
from probprompt.prompts import Prefix, Prompts

WIDTH, HEADS, DEPTH, SIZE, BATCH = 48, 3, 3, 32, 4


def build(**changes: Any) -> Any:
    """A tiny ViT with every weight away from its initial value, so that no layer does next to nothing."""
    torch.manual_seed(0)
    attention = changes.pop("attention", None)
    arguments = {"img_size": SIZE, "patch_size": 8, "embed_dim": WIDTH, "depth": DEPTH, "num_heads": HEADS}
    model = VisionTransformer(**arguments | {"num_classes": 0} | changes)
    if attention is not None:
        for block in model.blocks:
            block.attn = Attention(WIDTH, **attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "registers": {"reg_tokens": 2},
    "no_embed_class": {"no_embed_class": True, "reg_tokens": 1},
    "no_positions": {"pos_embed": "none"},
    "pre_norm": {"pre_norm": True},
    "qk_norm": {"qk_norm": True},
    "layer_scale": {"init_values": 0.5},
    "dynamic_img_size": {"dynamic_img_size": True},
    "dynamic_img_pad": {"dynamic_img_size": True, "dynamic_img_pad": True},
    "oblong": {"img_size": (SIZE, 2 * SIZE)},
    "scale_norms": {"scale_attn_norm": True, "scale_mlp_norm": True},
    "glu": {"mlp_layer": GluMlp},
    "swiglu": {"mlp_layer": SwiGLU},
    "rms_norm": {"norm_layer": RmsNorm, "embed_norm_layer": RmsNorm},
    "no_qkv_bias": {"qkv_bias": False, "proj_bias": False},
    "no_final_norm": {"final_norm": False},
    "gate": {"attention": {"num_heads": HEADS, "gated": True, "qkv_bias": True}},
    "wide_heads": {"attention": {"num_heads": HEADS, "attn_head_dim": 24, "qkv_bias": True}},
    "one_block": {"depth": 1},
    "dropout": {f"{where}_rate": 0.5 for where in ("pos_drop", "patch_drop", "proj_drop", "attn_drop", "drop_path")},
    "all": {"reg_tokens": 2, "qk_norm": True, "init_values": 0.5, "pre_norm": True, "num_heads": 4}
    | {"scale_attn_norm": True, "dynamic_img_size": True, "mlp_layer": SwiGLU},
}
IMAGE_SHAPES = {"dynamic_img_size": (24, 48), "dynamic_img_pad": (21, 35), "oblong": (SIZE, 2 * SIZE)}

each_case = pytest.mark.parametrize("case", CASES)


def draw_images(case: str = "plain", batch: int = BATCH) -> Tensor:
    height, width = IMAGE_SHAPES.get(case, (SIZE, SIZE))
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(1))


def draw_prompts(vit: FrozenViT, blocks: list[int], batch: int = BATCH, length: int = 5) -> dict[int, Prefix]:
    """Prefixes of these blocks, the last one shared by the batch and of another length."""
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, vit.attention_width, generator=generator)

    prompts = {
        index: Prefix(
            draw(
                batch,
                length,
            ),
            draw(batch, length),
        )
        for index in blocks[:-1]
    }
    return prompts | {blocks[-1]: Prefix(draw(length - 2), draw(length - 2))}


def distance(found: Tensor, expected: Tensor) -> float:
    """The largest difference of a feature vector, relative to its length."""
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())


def attend(attention: Any, tokens: Tensor, prefix: Prefix | None) -> Tensor:
    """Prefix attention as it is defined, one head after another."""
    weights = attention.qkv.weight.chunk(3)  # (W, D) each
    biases = (0.0, 0.0, 0.0) if attention.qkv.bias is None else attention.qkv.bias.chunk(3)
    query, key, value = (tokens @ w.T + b for w, b in zip(weights, biases, strict=True))  # (B, T, W)
    outputs = []
    for head in range(attention.num_heads):
        rows = slice(head * attention.head_dim, (head + 1) * attention.head_dim)
        q, k, v = attention.q_norm(query[..., rows]), attention.k_norm(key[..., rows]), value[..., rows]
        if prefix is not None:
            batch = (len(tokens), -1, -1)
            k = torch.cat([prefix.key[..., rows].expand(batch), k], dim=1)
            v = torch.cat([prefix.value[..., rows].expand(batch), v], dim=1)
        scores = torch.einsum("bqd,bkd->bqk", q, k) / attention.head_dim**0.5
        outputs.append(scores.softmax(dim=-1) @ v)
    output = attention.norm(torch.cat(outputs, dim=-1))
    if attention.gate is not None:
        output = output * torch.sigmoid(attention.gate(tokens))
    return attention.proj(output)  # type: ignore[no-any-return]


def reference(model: Any, images: Tensor, prompts: Prompts) -> Tensor:
    """The prompted class token in float64, all tokens through all blocks."""
    model = copy.deepcopy(model).double()
    tokens = model.norm_pre(model._pos_embed(model.patch_embed(images.double())))
    for index, block in enumerate(model.blocks):
        tokens = tokens + block.ls1(attend(block.attn, block.norm1(tokens), prompts.get(index)))
        tokens = tokens + block.ls2(block.mlp(block.norm2(tokens)))
    return model.norm(tokens)[:, 0]  # type: ignore[no-any-return]


@each_case
def test_without_prompts_it_equals_timm(case: str) -> None:
    model, images = build(**CASES[case]), draw_images(case)
    with torch.no_grad():
        expected = model.forward_features(images)[:, 0]
    vit = FrozenViT(model)
    assert distance(vit.query(images), expected) < 1e-5
    assert torch.equal(vit.features(images), vit.query(images))
    assert torch.equal(vit.features(images, {}), vit.query(images))


@each_case
def test_with_prompts_it_equals_the_definition(case: str) -> None:
    vit, images = FrozenViT(build(**CASES[case])), draw_images(case)
    prompts = draw_prompts(vit, sorted({0, vit.depth // 2, vit.depth - 1}))
    found = vit.features(images, prompts)
    assert found.shape == (BATCH, vit.width) and found.dtype == torch.float32
    doubled = {index: Prefix(prefix.key.double(), prefix.value.double()) for index, prefix in prompts.items()}
    assert distance(found.double(), reference(vit.model, images, doubled)) < 1e-5
    assert distance(found, vit.query(images)) > 1e-3


@pytest.mark.parametrize("block", range(DEPTH))
def test_a_prefix_of_each_block_alone_matters(block: int) -> None:
    vit, images = FrozenViT(build()), draw_images()
    prompts = draw_prompts(vit, [block])
    doubled = {block: Prefix(prompts[block].key.double(), prompts[block].value.double())}
    found = vit.features(images, prompts)
    assert distance(found.double(), reference(vit.model, images, doubled)) < 1e-5
    assert distance(found, vit.query(images)) > 1e-3


@pytest.mark.parametrize("block", range(DEPTH))
def test_the_order_of_prefix_tokens_does_not_matter(block: int) -> None:
    vit, images = FrozenViT(build()), draw_images()
    key, value = torch.randn(2, BATCH, 6, WIDTH)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    found = vit.features(images, {block: Prefix(key[:, order], value[:, order])})
    assert distance(found, vit.features(images, {block: Prefix(key, value)})) < 1e-5
    other = vit.features(images, {block: Prefix(key[:, order], value)})  # the pairs are broken up
    assert distance(found, other) > 1e-4


@pytest.mark.parametrize("block", range(DEPTH))
def test_a_prefix_that_no_query_attends_to_has_no_effect(block: int) -> None:
    model, images = build(), draw_images()
    with torch.no_grad():
        model.blocks[block].attn.qkv.bias[:WIDTH] += 10.0  # all queries point one way, the prefix the other
    vit = FrozenViT(model)
    prefix = Prefix(torch.full((4, WIDTH), -50.0), torch.randn(4, WIDTH))
    assert distance(vit.features(images, {block: prefix}), vit.query(images)) < 1e-6


def test_a_prefix_that_repeats_the_sequence_has_no_effect() -> None:
    vit, images = FrozenViT(build()), draw_images()
    first = vit.model.blocks[0]
    tokens = first.norm1(vit.model._pos_embed(vit.model.patch_embed(images)))
    _, key, value = first.attn.qkv(tokens).chunk(3, dim=-1)
    assert distance(vit.features(images, {0: Prefix(key, value)}), vit.query(images)) < 1e-5


def test_an_empty_prefix_has_no_effect() -> None:
    vit, images = FrozenViT(build()), draw_images()
    empty = Prefix.split(torch.zeros(BATCH, 0, WIDTH))
    assert distance(vit.features(images, {0: empty, DEPTH - 1: empty}), vit.query(images)) < 1e-6


def test_a_batch_may_be_empty() -> None:
    vit = FrozenViT(build())
    assert vit.features(draw_images(batch=0), draw_prompts(vit, [0, 2], batch=0)).shape == (0, WIDTH)


def test_a_shared_prefix_is_the_same_prefix_for_every_image() -> None:
    vit, images = FrozenViT(build()), draw_images()
    key, value = torch.randn(2, 4, WIDTH)
    each = Prefix(key.expand(BATCH, -1, -1), value.expand(BATCH, -1, -1))
    assert torch.equal(vit.features(images, {1: Prefix(key, value)}), vit.features(images, {1: each}))


@pytest.mark.parametrize("case", ["plain", "all"])
def test_an_image_does_not_depend_on_its_batch(case: str) -> None:
    vit, images = FrozenViT(build(**CASES[case])), draw_images(case)
    key, value = torch.randn(2, BATCH, 4, WIDTH)
    together = vit.features(images, {0: Prefix(key, value), 2: Prefix(key, value)})
    for index in range(BATCH):
        mine = slice(index, index + 1)
        prefix = Prefix(key[mine], value[mine])
        assert distance(vit.features(images[mine], {0: prefix, 2: prefix}), together[mine]) < 1e-5


@pytest.mark.parametrize("case", ["plain", "all"])
def test_gradients_reach_the_prompts_and_equal_those_of_the_definition(case: str) -> None:
    vit, images = FrozenViT(build(**CASES[case])), draw_images(case)
    drawn = draw_prompts(vit, [0, 2])
    direction = torch.randn(BATCH, WIDTH)

    def gradients(run: Callable[[Prompts], Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [part.to(dtype).requires_grad_() for p in drawn.values() for part in (p.key, p.value)]
        prompts = {0: Prefix(leaves[0], leaves[1]), 2: Prefix(leaves[2], leaves[3])}
        return list(torch.autograd.grad((run(prompts) * direction).sum(), leaves))

    found = gradients(lambda prompts: vit.features(images, prompts), torch.float32)
    expected = gradients(lambda prompts: reference(vit.model, images, prompts), torch.float64)
    for mine, theirs in zip(found, expected, strict=True):
        assert theirs.norm() > 1e-3
        assert (mine - theirs).norm() < 1e-4 * theirs.norm()


def test_training_prompts_leaves_the_backbone_bit_identical() -> None:
    vit, images = FrozenViT(build(**CASES["dropout"])), draw_images()
    before, queries = vit.fingerprint(), vit.query(images)
    parent = nn.Module()
    parent.backbone, parent.tokens = vit, nn.Parameter(torch.randn(BATCH, 8, WIDTH))
    parent.train()
    optimiser = torch.optim.AdamW((p for p in parent.parameters() if p.requires_grad), lr=0.1)
    losses = []
    for _ in range(5):
        loss = (vit.features(images, {0: Prefix.split(parent.tokens)}) - 1).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert vit.fingerprint() == before
    assert torch.equal(vit.query(images), queries)
    assert all(p.grad is None and not p.requires_grad for p in vit.parameters())


def test_it_stays_in_evaluation_mode() -> None:
    vit = FrozenViT(build(**CASES["dropout"]).train())
    nn.Sequential(vit).train()
    assert not any(module.training for module in vit.modules())
    assert vit.train() is vit


def test_a_query_has_no_gradient() -> None:
    vit = FrozenViT(build())
    images = draw_images().requires_grad_()
    assert not vit.query(images).requires_grad


def test_the_fingerprint_sees_every_weight_and_its_name() -> None:
    vit = FrozenViT(build())
    before = vit.fingerprint()
    assert before == FrozenViT(build()).fingerprint() and len(before) == 64
    vit.model.blocks[2].mlp.fc2.bias.data[7] += 1e-6
    assert vit.fingerprint() != before
    assert FrozenViT(build().bfloat16()).fingerprint() != before


def test_half_precision_weights_give_float32_features() -> None:
    images = draw_images()
    vit, half = FrozenViT(build()), FrozenViT(build().bfloat16())
    prompts = draw_prompts(vit, [0, 2])
    found = half.features(images, prompts)
    assert found.dtype == half.query(images).dtype == torch.float32
    assert distance(found, vit.features(images, prompts)) < 0.1
    key, value = torch.randn(2, 4, WIDTH, requires_grad=True)
    gradient = torch.autograd.grad(half.features(images, {1: Prefix(key, value)}).sum(), value)[0]
    assert gradient.dtype == torch.float32 and gradient.abs().sum() > 0


def test_what_the_backbone_says_about_itself() -> None:
    vit = FrozenViT(build(depth=2))
    assert (vit.width, vit.depth, vit.heads, vit.attention_width, vit.image_size) == (48, 2, 3, 48, 32)
    assert FrozenViT(build(**CASES["oblong"])).image_size == (32, 64)
    assert FrozenViT(build(**CASES["wide_heads"])).attention_width == 72


@pytest.mark.parametrize(
    ("block", "shape", "message"),
    [
        (DEPTH, (4, WIDTH), "no block 3 to prompt: the backbone has 0 to 2"),
        (-1, (4, WIDTH), "no block -1 to prompt"),
        (0, (4, WIDTH + 1), "the prefix has width 49, the attention 48"),
        (1, (BATCH + 1, 4, WIDTH), "block 1: the prefix is for 5 images, the batch has 4"),
        (1, (1, 4, WIDTH), "the prefix is for 1 images"),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused(block: int, shape: tuple[int, ...], message: str) -> None:
    vit = FrozenViT(build())
    with pytest.raises(ValueError, match=message):
        vit.features(draw_images(), {block: Prefix(torch.zeros(shape), torch.zeros(shape))})


def test_something_else_than_a_prefix_is_refused() -> None:
    prompts: Any = {0: torch.zeros(4, WIDTH)}
    with pytest.raises(TypeError, match="a prompt is a Prefix, got a Tensor"):
        FrozenViT(build()).features(draw_images(), prompts)


def test_images_that_do_not_fit_are_refused() -> None:
    vit = FrozenViT(build())
    with pytest.raises(ValueError, match=r"takes images of \(H, W\) = \(32, 32\), got \(40, 32\)"):
        vit.query(torch.zeros(1, 3, 40, 32))
    with pytest.raises(ValueError, match=r"normalised floats \(B, 3, H, W\), got torch.uint8"):
        vit.query(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))
    with pytest.raises(ValueError, match="normalised floats"):
        vit.query(torch.zeros(3, 32, 32))


class OtherViT(VisionTransformer):
    """A subclass may compute anything."""


class MixingMlp(nn.Module):
    """A layer in which a token depends on the others: the last block's class token alone would be wrong."""

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens - tokens.mean(dim=1, keepdim=True)


def with_extra_part(place: str) -> nn.Module:
    model = build()
    model.get_submodule(place).adapter = nn.Linear(WIDTH, WIDTH)
    return model  # type: ignore[no-any-return]


def with_adapted_projection() -> nn.Module:
    model = build()
    model.blocks[1].attn.qkv = nn.Sequential(model.blocks[1].attn.qkv)
    return model  # type: ignore[no-any-return]


def with_hybrid_stem() -> nn.Module:
    model = build()
    model.patch_embed = nn.Sequential(nn.Conv2d(3, 3, 1), model.patch_embed)
    return model  # type: ignore[no-any-return]


def with_hook() -> nn.Module:
    model = build()
    model.blocks[1].register_forward_hook(lambda module, inputs, output: 2 * output)
    return model  # type: ignore[no-any-return]


def with_mixing_layer() -> nn.Module:
    model = build()
    model.blocks[-1].mlp = MixingMlp()
    return model  # type: ignore[no-any-return]


def with_broken_weights() -> nn.Module:
    model = build()
    model.norm.weight.data[0] = float("nan")
    return model  # type: ignore[no-any-return]


def swin() -> nn.Module:
    return SwinTransformer(img_size=32, patch_size=4, window_size=4, embed_dim=16, depths=(1,), num_heads=(1,))


UNSUPPORTED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "resnet": (lambda: create_model("test_resnet"), "the model is a timm.models.resnet.ResNet"),
    "swin": (swin, "SwinTransformer, not a VisionTransformer"),
    "subclass": (lambda: OtherViT(32, 8, embed_dim=48, depth=1, num_heads=3), "OtherViT"),
    "hybrid": (with_hybrid_stem, "the patch embedding is .*Sequential, not a PatchEmbed"),
    "no class token": (lambda: build(class_token=False, global_pool="avg"), "no class token .* 'avg'"),
    "norm after pooling": (lambda: build(global_pool="avg"), "fc_norm, pooling 'avg'"),
    "no blocks": (lambda: build(depth=0), "has no blocks"),
    "parallel": (
        lambda: build(block_fn=ParallelScalingBlock),
        "block 0 is .*ParallelScalingBlock, not a Block",
    ),
    "parallel things": (lambda: build(block_fn=ParallelThingsBlock), "ParallelThingsBlock"),
    "post-norm": (lambda: build(block_fn=ResPostBlock), "ResPostBlock"),
    "parallel diff": (lambda: build(block_fn=DiffParallelScalingBlock), "DiffParallelScalingBlock"),
    "diff attention": (lambda: build(attn_layer="diff"), "attention of block 0 is .*DiffAttention"),
    "part of the model": (lambda: with_extra_part(""), "the model holds parts .*: adapter"),
    "part of a block": (lambda: with_extra_part("blocks.1"), "block 1 holds parts .*: adapter"),
    "part of an attention": (
        lambda: with_extra_part("blocks.2.attn"),
        "attention of block 2 holds .*: adapter",
    ),
    "adapted projection": (with_adapted_projection, "qkv is a .*Sequential, not a Linear"),
    "hook": (with_hook, "differs from timm's own"),
    "mixing layer": (with_mixing_layer, "differs from timm's own"),
    "broken weights": (with_broken_weights, "not finite"),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_a_model_that_is_not_known_is_refused(kind: str) -> None:
    make, message = UNSUPPORTED[kind]
    with pytest.raises(UserError, match=message) as caught:
        FrozenViT(make())
    assert "supported are timm's plain VisionTransformer models" in str(caught.value)


def test_a_prefix_checks_its_shapes() -> None:
    with pytest.raises(ValueError, match=r"of one shape, got \(4, 8\) and \(5, 8\)"):
        Prefix(torch.zeros(4, 8), torch.zeros(5, 8))
    with pytest.raises(ValueError, match=r"a prefix is \(B, P, W\), or \(P, W\) .*, got \(8,\)"):
        Prefix(torch.zeros(8), torch.zeros(8))
    prefix = Prefix(torch.zeros(2, 4, 8), torch.zeros(2, 4, 8))
    assert (prefix.batch, prefix.length, prefix.width) == (2, 4, 8)
    assert Prefix(torch.zeros(4, 8), torch.zeros(4, 8)).batch is None


def test_tokens_are_split_into_keys_then_values() -> None:
    tokens = torch.arange(2 * 6 * 3).reshape(2, 6, 3)
    prefix = Prefix.split(tokens)
    assert torch.equal(torch.cat([prefix.key, prefix.value], dim=1), tokens)
    assert torch.equal(Prefix.split(tokens[0]).value, tokens[0, 3:])
    with pytest.raises(ValueError, match="7 prompt tokens cannot be half keys and half values"):
        Prefix.split(torch.zeros(2, 7, 8))
    with pytest.raises(ValueError, match=r"prompt tokens are \(B, M, D\)"):
        Prefix.split(torch.zeros(8))
