"""The frozen backbone equals timm's own pass, and a prompt does what its definition says and no more."""

import copy
import doctest
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

from probprompt import prompts as prompts_module
from probprompt.backbones.vit import FrozenViT
from probprompt.errors import UserError
from probprompt.prompts import ClassTokenShift, Prefix, Prompt, Prompts, Readout, Tokens

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

    prompts = {index: Prefix(draw(batch, length), draw(batch, length)) for index in blocks[:-1]}
    return prompts | {blocks[-1]: Prefix(draw(length - 2), draw(length - 2))}


def draw_tokens(blocks: list[int], batch: int = BATCH, length: int = 5, positioned: bool = False) -> dict[int, Tokens]:
    """Tokens of these blocks, the last ones shared by the batch and of another length."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(batch, length, WIDTH)] * (len(blocks) - 1) + [(length - 2, WIDTH)]
    pairs = zip(blocks, shapes, strict=True)
    return {index: Tokens(torch.randn(shape, generator=generator), positioned) for index, shape in pairs}


def draw_shifts(vit: FrozenViT, blocks: list[int], batch: int = BATCH) -> dict[int, ClassTokenShift]:
    """Shifts of these blocks, the last one shared by the batch."""
    generator = torch.Generator().manual_seed(4)
    found = {}
    for index in blocks:
        shape = (2, vit.attention_width) if index == blocks[-1] else (2, batch, vit.attention_width)
        key, value = 2 * torch.randn(shape, generator=generator)
        found[index] = ClassTokenShift(key, value)
    return found


def doubled(prompts: Prompts) -> dict[int, Prompt]:
    """The same in float64."""
    found: dict[int, Prompt] = {}
    for index, prompt in prompts.items():
        if isinstance(prompt, Tokens):
            found[index] = Tokens(prompt.tokens.double(), prompt.positioned)
        else:
            found[index] = type(prompt)(prompt.key.double(), prompt.value.double())
    return found


def distance(found: Tensor, expected: Tensor) -> float:
    """The largest difference of a feature vector, relative to its length."""
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())


def attend(attention: Any, tokens: Tensor, prompt: Prompt | None, place: int = 0) -> Tensor:
    """Attention with a prefix, or with the class token at its place shifted, as defined, one head after another."""
    weights = attention.qkv.weight.chunk(3)  # (W, D) each
    biases = (0.0, 0.0, 0.0) if attention.qkv.bias is None else attention.qkv.bias.chunk(3)
    query, key, value = (tokens @ w.T + b for w, b in zip(weights, biases, strict=True))  # (B, T, W)
    if isinstance(prompt, ClassTokenShift):
        for image in range(len(tokens)):
            key[image, place] += prompt.key if prompt.batch is None else prompt.key[image]
            value[image, place] += prompt.value if prompt.batch is None else prompt.value[image]
    outputs = []
    for head in range(attention.num_heads):
        rows = slice(head * attention.head_dim, (head + 1) * attention.head_dim)
        q, k, v = attention.q_norm(query[..., rows]), attention.k_norm(key[..., rows]), value[..., rows]
        if isinstance(prompt, Prefix):
            batch = (len(tokens), -1, -1)
            k = torch.cat([prompt.key[..., rows].expand(batch), k], dim=1)
            v = torch.cat([prompt.value[..., rows].expand(batch), v], dim=1)
        scores = torch.einsum("bqd,bkd->bqk", q, k) / attention.head_dim**0.5
        outputs.append(scores.softmax(dim=-1) @ v)
    output = attention.norm(torch.cat(outputs, dim=-1))
    if attention.gate is not None:
        output = output * torch.sigmoid(attention.gate(tokens))
    return attention.proj(output)  # type: ignore[no-any-return]


def reference(model: Any, images: Tensor, prompts: Prompts, readout: Readout = "class", layers: int = 0) -> Tensor:
    """What is read out in float64, all tokens through all blocks; those that join stand in front of all others."""
    readings: list[Tensor] = []
    model = copy.deepcopy(model).double()
    tokens = model.norm_pre(model._pos_embed(model.patch_embed(images.double())))
    place = 0  # of the class token
    for index, block in enumerate(model.blocks):
        prompt = prompts.get(index)
        if isinstance(prompt, Tokens):
            joined = prompt.tokens if prompt.batch else prompt.tokens.repeat(len(images), 1, 1)
            if prompt.positioned and model.pos_embed is not None and not model.no_embed_class:
                joined = joined + model.pos_embed[0, 0]
            tokens, place = torch.cat([joined, tokens], dim=1), place + joined.shape[1]
        tokens = tokens + block.ls1(attend(block.attn, block.norm1(tokens), prompt, place))
        tokens = tokens + block.ls2(block.mlp(block.norm2(tokens)))
        patches = tokens[:, place + model.num_prefix_tokens :]
        if len(model.blocks) - 1 - layers <= index < len(model.blocks) - 1:
            readings += [tokens[:, place], patches.sum(dim=1) / patches.shape[1]]
    if readout == "class before norm":
        return tokens[:, place]  # type: ignore[no-any-return]
    after = model.norm(tokens)
    found = after[:, place] if readout == "class" else after[:, :place].sum(dim=1) / place
    behind = [(one - one.mean(1, True)) / (one.var(1, correction=0, keepdim=True) + 1e-5).sqrt() for one in readings]
    return torch.cat([found, *behind], dim=1)


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
    assert distance(found.double(), reference(vit.model, images, doubled(prompts))) < 1e-5
    assert distance(found, vit.query(images)) > 1e-3


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("case", [case for case in CASES if case != "one_block"])
def test_readings_of_the_blocks_before_the_last_stand_behind_the_feature(case: str, layers: int) -> None:
    vit, images = FrozenViT(build(**CASES[case])), draw_images(case)
    assert vit.depth > 2
    prompts: Prompts = {**draw_prompts(vit, [0, vit.depth - 1]), **draw_tokens([1])}
    nothing: Prompts = {}
    for given in (nothing, prompts):
        found = vit.features(images, given, layers=layers)
        assert found.shape == (BATCH, vit.width * (1 + 2 * layers)) and found.dtype == torch.float32
        assert torch.equal(found[:, : vit.width], vit.features(images, given))
        assert distance(found.double(), reference(vit.model, images, doubled(given), layers=layers)) < 1e-5


@pytest.mark.parametrize("block", range(DEPTH))
def test_a_prefix_of_each_block_alone_matters(block: int) -> None:
    vit, images = FrozenViT(build()), draw_images()
    prompts = draw_prompts(vit, [block])
    found = vit.features(images, prompts)
    assert distance(found.double(), reference(vit.model, images, doubled(prompts))) < 1e-5
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
        (0, (4, WIDTH + 1), "the Prefix has width 49, the attention 48"),
        (1, (BATCH + 1, 4, WIDTH), "block 1: the Prefix is for 5 images, the batch has 4"),
        (1, (1, 4, WIDTH), "the Prefix is for 1 images"),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused(block: int, shape: tuple[int, ...], message: str) -> None:
    vit = FrozenViT(build())
    with pytest.raises(ValueError, match=message):
        vit.features(draw_images(), {block: Prefix(torch.zeros(shape), torch.zeros(shape))})


def test_something_else_than_a_prefix_is_refused() -> None:
    prompts: Any = {0: torch.zeros(4, WIDTH)}
    with pytest.raises(TypeError, match="a prompt is a Prefix, Tokens or a ClassTokenShift, got a Tensor"):
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


# Tokens that join the sequence


@each_case
def test_tokens_that_join_equal_the_definition(case: str) -> None:
    vit, images = FrozenViT(build(**CASES[case])), draw_images(case)
    prompts = draw_tokens(sorted({0, vit.depth // 2, vit.depth - 1}))
    found = vit.features(images, prompts)
    assert found.shape == (BATCH, vit.width) and found.dtype == torch.float32
    assert distance(found.double(), reference(vit.model, images, doubled(prompts))) < 1e-5
    assert distance(found, vit.query(images)) > 1e-3


@pytest.mark.parametrize("block", range(DEPTH))
def test_tokens_of_each_block_alone_matter_and_are_kept(block: int) -> None:
    vit, images = FrozenViT(build()), draw_images()
    prompts = draw_tokens([block])
    found = vit.features(images, prompts)
    assert distance(found.double(), reference(vit.model, images, doubled(prompts))) < 1e-5
    assert distance(found, vit.query(images)) > 1e-3
    if block < DEPTH - 1:  # kept: they are not what the last block alone would make of them
        assert distance(found, vit.features(images, {DEPTH - 1: prompts[block]})) > 1e-3


@pytest.mark.parametrize("case", CASES)
def test_positioned_tokens_have_the_place_of_the_class_token(case: str) -> None:
    vit, images = FrozenViT(build(**CASES[case])), draw_images(case)
    plain, positioned = draw_tokens([0, vit.depth - 1]), draw_tokens([0, vit.depth - 1], positioned=True)
    found, without = vit.features(images, positioned), vit.features(images, plain)
    assert distance(found.double(), reference(vit.model, images, doubled(positioned))) < 1e-5
    if case in ("no_embed_class", "no_positions"):
        assert torch.equal(found, without)
        return
    own = vit.model.pos_embed[0, 0]
    by_hand = vit.features(images, {index: Tokens(prompt.tokens + own) for index, prompt in plain.items()})
    assert distance(found, by_hand) < 1e-6
    assert distance(found, without) > 1e-5


def test_the_order_of_joined_tokens_does_not_matter() -> None:
    vit, images = FrozenViT(build()), draw_images()
    tokens = draw_tokens([0, 1])[0].tokens
    order = torch.tensor([3, 0, 1, 4, 2])
    for readout in ("class", "tokens"):
        found = vit.features(images, {0: Tokens(tokens[:, order])}, readout)
        assert distance(found, vit.features(images, {0: Tokens(tokens)}, readout)) < 1e-5


def test_tokens_that_repeat_the_sequence_have_no_effect_on_the_class_token() -> None:
    """Every token twice: attention weighs them as it did."""
    vit, images = FrozenViT(build()), draw_images()
    own = vit.model._pos_embed(vit.model.patch_embed(images))
    assert distance(vit.features(images, {0: Tokens(own)}), vit.query(images)) < 1e-5


def test_no_tokens_and_no_shift_have_no_effect() -> None:
    vit, images = FrozenViT(build()), draw_images()
    nothing, zero = Tokens(torch.zeros(0, WIDTH)), ClassTokenShift(torch.zeros(WIDTH), torch.zeros(WIDTH))
    assert distance(vit.features(images, {0: nothing, 1: zero, 2: nothing}), vit.query(images)) < 1e-6


def test_shared_tokens_and_shifts_are_the_same_for_every_image() -> None:
    vit, images = FrozenViT(build()), draw_images()
    tokens, (key, value) = torch.randn(4, WIDTH), torch.randn(2, WIDTH)
    pairs: list[tuple[Prompt, Prompt]] = [
        (Tokens(tokens), Tokens(tokens.expand(BATCH, -1, -1))),
        (Tokens(tokens, positioned=True), Tokens(tokens.expand(BATCH, -1, -1), positioned=True)),
        (ClassTokenShift(key, value), ClassTokenShift(key.expand(BATCH, -1), value.expand(BATCH, -1))),
    ]
    for shared, each in pairs:
        assert (shared.batch, each.batch) == (None, BATCH)
        assert torch.equal(vit.features(images, {1: shared}), vit.features(images, {1: each}))


# The shift of the class token


@each_case
def test_a_shift_of_the_class_token_equals_the_definition(case: str) -> None:
    vit, images = FrozenViT(build(**CASES[case])), draw_images(case)
    prompts = draw_shifts(vit, sorted({0, vit.depth // 2, vit.depth - 1}))
    found = vit.features(images, prompts)
    assert found.shape == (BATCH, vit.width) and found.dtype == torch.float32
    assert distance(found.double(), reference(vit.model, images, doubled(prompts))) < 1e-5
    assert distance(found, vit.query(images)) > 1e-3


@pytest.mark.parametrize("part", ["key", "value"])
@pytest.mark.parametrize("block", range(DEPTH))
def test_key_and_value_of_a_shift_matter_in_each_block(block: int, part: str) -> None:
    vit, images = FrozenViT(build(**CASES["registers"])), draw_images()
    drawn, nothing = draw_shifts(vit, [block])[block], torch.zeros(WIDTH)
    shift = ClassTokenShift(drawn.key, nothing) if part == "key" else ClassTokenShift(nothing, drawn.value)
    found = vit.features(images, {block: shift})
    assert distance(found.double(), reference(vit.model, images, doubled({block: shift}))) < 1e-5
    assert distance(found, vit.query(images)) > 1e-3


def test_a_shift_comes_before_the_norm_of_the_keys() -> None:
    """A huge shift only turns the normalised key, and so stays harmless."""
    vit, images = FrozenViT(build(**CASES["qk_norm"])), draw_images()
    direction, nothing = torch.randn(WIDTH), torch.zeros(WIDTH)
    far, farther = (vit.features(images, {1: ClassTokenShift(s * direction, nothing)}) for s in (1e4, 1e6))
    assert distance(far, farther) < 1e-3
    assert distance(far, vit.query(images)) > 1e-3


@pytest.mark.parametrize("case", ["plain", "registers", "qk_norm", "wide_heads", "all"])
def test_kinds_of_prompts_go_together(case: str) -> None:
    """Of tokens that join and a shift later on, the class token alone is shifted."""
    vit, images = FrozenViT(build(**CASES[case])), draw_images(case)
    prefixes, shifts, tokens = draw_prompts(vit, [0, 1, 2]), draw_shifts(vit, [1, 2]), draw_tokens([0, 1, 2])
    mixtures: tuple[Prompts, ...] = (
        {0: tokens[0], 1: shifts[1], 2: prefixes[2]},
        {0: tokens[0], 1: prefixes[1], 2: shifts[2]},
        {0: prefixes[0], 1: tokens[1], 2: shifts[2]},
        {0: shifts[1], 1: tokens[1], 2: tokens[2]},
    )
    for prompts in mixtures:
        found = vit.features(images, prompts)
        assert distance(found.double(), reference(vit.model, images, doubled(prompts))) < 1e-5
        outputs = vit.features(images, prompts, "tokens")
        assert distance(outputs.double(), reference(vit.model, images, doubled(prompts), "tokens")) < 1e-5


# What is read out


@each_case
def test_the_class_token_before_the_norm_is_what_goes_into_it(case: str) -> None:
    model, images = build(**CASES[case]), draw_images(case)
    into_norm: list[Tensor] = []
    hook = model.norm.register_forward_pre_hook(lambda module, inputs: into_norm.append(inputs[0]))
    with torch.no_grad():
        model.forward_features(images)
    hook.remove()
    vit = FrozenViT(model)
    found = vit.query(images, "class before norm")
    assert found.dtype == torch.float32 and distance(found, into_norm[0][:, 0]) < 1e-5
    assert distance(vit.model.norm(found), vit.query(images)) < 1e-5
    assert torch.equal(vit.features(images, readout="class before norm"), found)
    if case != "no_final_norm":
        assert distance(found, vit.query(images)) > 1e-3


@each_case
@pytest.mark.parametrize("readout", ["class before norm", "tokens"])
def test_what_is_read_out_with_tokens_equals_the_definition(case: str, readout: Readout) -> None:
    vit, images = FrozenViT(build(**CASES[case])), draw_images(case)
    prompts = draw_tokens(sorted({0, vit.depth // 2, vit.depth - 1}))
    found = vit.features(images, prompts, readout)
    assert found.shape == (BATCH, vit.width) and found.dtype == torch.float32
    assert distance(found.double(), reference(vit.model, images, doubled(prompts), readout)) < 1e-5
    assert distance(found, vit.features(images, prompts)) > 1e-3 or case == "no_final_norm"


def test_the_mean_is_taken_after_the_norm() -> None:
    vit, images = FrozenViT(build(depth=1)), draw_images()
    tokens = draw_tokens([0, 1])[0].tokens
    norm, vit.model.norm = vit.model.norm, nn.Identity()
    before = vit.features(images, {0: Tokens(tokens)}, "tokens")
    vit.model.norm = norm
    assert distance(vit.features(images, {0: Tokens(tokens)}, "tokens"), norm(before)) > 1e-3


def test_without_tokens_there_are_none_to_read_out() -> None:
    vit, images = FrozenViT(build()), draw_images()
    message = "no tokens were injected that could be read out: only Tokens can be, or the class token"
    prompts: tuple[Prompts, ...] = (
        {},
        draw_prompts(vit, [0, 2]),
        draw_shifts(vit, [1]),
        {0: Tokens(torch.zeros(0, WIDTH))},
    )
    for without in prompts:
        with pytest.raises(ValueError, match=message):
            vit.features(images, without, "tokens")
    with pytest.raises(ValueError, match=message):
        vit.query(images, "tokens")


# Common to all kinds


@pytest.mark.parametrize("readout", ["class", "tokens"])
@pytest.mark.parametrize("case", ["plain", "registers", "all"])
def test_gradients_reach_tokens_and_shifts_and_equal_those_of_the_definition(case: str, readout: Readout) -> None:
    vit, images = FrozenViT(build(**CASES[case])), draw_images(case)
    tokens, shifts = draw_tokens([0, 2], positioned=True), draw_shifts(vit, [1])
    drawn = [tokens[0].tokens, shifts[1].key, shifts[1].value, tokens[2].tokens]
    direction = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(5))

    def gradients(run: Callable[[Prompts], Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [part.detach().to(dtype).requires_grad_() for part in drawn]
        shift = ClassTokenShift(leaves[1], leaves[2])
        prompts: Prompts = {0: Tokens(leaves[0], True), 1: shift, 2: Tokens(leaves[3], True)}
        return list(torch.autograd.grad((run(prompts) * direction).sum(), leaves))

    found = gradients(lambda prompts: vit.features(images, prompts, readout), torch.float32)
    expected = gradients(lambda prompts: reference(vit.model, images, prompts, readout), torch.float64)
    for mine, theirs in zip(found, expected, strict=True):
        assert theirs.norm() > 1e-3
        assert (mine - theirs).norm() < 1e-4 * theirs.norm()
    assert all(parameter.grad is None for parameter in vit.parameters())


@pytest.mark.parametrize("readout", ["class", "class before norm", "tokens"])
@pytest.mark.parametrize("case", ["plain", "all"])
def test_an_image_with_tokens_and_shifts_does_not_depend_on_its_batch(case: str, readout: Readout) -> None:
    vit, images = FrozenViT(build(**CASES[case])), draw_images(case)
    tokens, shift = draw_tokens([0, 1])[0].tokens, draw_shifts(vit, [1, 2])[1]

    def run(some: slice) -> Tensor:
        own = ClassTokenShift(shift.key[some], shift.value[some])
        return vit.features(images[some], {0: Tokens(tokens[some]), 1: own, 2: Tokens(tokens[some])}, readout)

    together = run(slice(None))
    for index in range(BATCH):
        mine = slice(index, index + 1)
        assert distance(run(mine), together[mine]) < 1e-5


def test_half_precision_weights_take_tokens_and_shifts_of_float32() -> None:
    images, vit, half = draw_images(), FrozenViT(build()), FrozenViT(build().bfloat16())
    prompts: dict[int, Prompt] = {**draw_tokens([0, 2], positioned=True), **draw_shifts(vit, [1])}
    for readout in ("class", "class before norm", "tokens"):
        found = half.features(images, prompts, readout)
        assert found.dtype == torch.float32
        assert distance(found, vit.features(images, prompts, readout)) < 0.1


def test_an_empty_batch_takes_tokens_and_shifts() -> None:
    vit = FrozenViT(build())
    prompts: dict[int, Prompt] = {**draw_tokens([0, 2], batch=0), **draw_shifts(vit, [1], batch=0)}
    assert vit.features(draw_images(batch=0), prompts, "tokens").shape == (0, WIDTH)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (Tokens(torch.zeros(4, WIDTH + 1)), "block 1: the Tokens has width 49, the backbone 48"),
        (Tokens(torch.zeros(BATCH + 1, 4, WIDTH)), "block 1: the Tokens is for 5 images, the batch has 4"),
        (Tokens(torch.zeros(1, 4, WIDTH)), "block 1: the Tokens is for 1 images, the batch has 4"),
        (ClassTokenShift(*torch.zeros(2, 47)), "block 1: the ClassTokenShift has width 47, the attention 48"),
        (ClassTokenShift(*torch.zeros(2, 3, WIDTH)), "block 1: the ClassTokenShift is for 3 images, the batch has 4"),
    ],
)
def test_tokens_and_shifts_that_do_not_fit_are_refused(prompt: Prompt, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FrozenViT(build()).features(draw_images(), {1: prompt})


def test_tokens_have_the_width_of_the_backbone_and_shifts_that_of_the_attention() -> None:
    vit, images = FrozenViT(build(**CASES["wide_heads"])), draw_images()
    vit.features(images, {0: Tokens(torch.zeros(4, 48)), 1: ClassTokenShift(*torch.zeros(2, 72))})
    with pytest.raises(ValueError, match="the Tokens has width 72, the backbone 48"):
        vit.features(images, {0: Tokens(torch.zeros(4, 72))})
    with pytest.raises(ValueError, match="the ClassTokenShift has width 48, the attention 72"):
        vit.features(images, {0: ClassTokenShift(*torch.zeros(2, 48))})


def test_tokens_check_their_shapes() -> None:
    for shape in ((8,), (1, 2, 4, 8)):
        with pytest.raises(ValueError, match=r"tokens are \(B, P, D\), or \(P, D\) for the whole batch, got \("):
            Tokens(torch.zeros(shape))
    tokens = Tokens(torch.zeros(2, 4, 8))
    assert (tokens.batch, tokens.length, tokens.width, tokens.positioned) == (2, 4, 8, False)
    assert Tokens(torch.zeros(4, 8)).batch is None


def test_a_shift_checks_its_shapes() -> None:
    message = r"a shift is \(B, W\) or \(W,\) for key and value alike, got "
    for key, value in (((8,), (9,)), ((2, 8), (8,)), ((2, 3, 8), (2, 3, 8)), ((), ())):
        with pytest.raises(ValueError, match=message):
            ClassTokenShift(torch.zeros(key), torch.zeros(value))
    shift = ClassTokenShift(torch.zeros(2, 8), torch.zeros(2, 8))
    assert (shift.batch, shift.width) == (2, 8)
    assert ClassTokenShift(torch.zeros(8), torch.zeros(8)).batch is None


def test_doctests_of_prompts() -> None:
    result = doctest.testmod(prompts_module)
    assert result.failed == 0 and result.attempted >= 8


# Weights that learn


def test_weights_learn_when_they_are_let() -> None:
    vit, images = FrozenViT(build(num_classes=7, depth=2)), draw_images()
    head = {id(parameter) for parameter in vit.model.head.parameters()}
    assert len(head) == 2
    vit.unfreeze()
    vit.features(images).square().sum().backward()
    for name, parameter in vit.model.named_parameters():
        if id(parameter) in head:
            assert not parameter.requires_grad and parameter.grad is None, f"{name} is not used, and stays"
        else:
            assert parameter.requires_grad and parameter.grad is not None, name
            assert float(parameter.grad.abs().max()) > 0, name


def test_weights_that_are_frozen_again_get_no_gradient() -> None:
    vit, images = FrozenViT(build()), draw_images()
    before, queries = vit.fingerprint(), vit.query(images)
    vit.unfreeze()
    assert not vit.query(images).requires_grad, "a query is without gradient in any case"
    assert vit.features(images).requires_grad
    vit.unfreeze(False)
    assert not any(parameter.requires_grad for parameter in vit.parameters())
    assert not vit.features(images).requires_grad
    assert vit.fingerprint() == before and torch.equal(vit.query(images), queries)


def test_weights_that_learn_stay_in_evaluation_mode() -> None:
    vit, images = FrozenViT(build(**CASES["dropout"])), draw_images()
    queries = vit.query(images)
    vit.unfreeze()
    vit.train()
    assert not any(module.training for module in vit.modules())
    assert distance(vit.features(images).detach(), queries) < 1e-5


def test_gradients_of_weights_are_those_of_timm() -> None:
    model, images = build(**CASES["all"]), draw_images("all")
    timms = copy.deepcopy(model)
    vit = FrozenViT(model)
    vit.unfreeze()
    direction = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(6))
    (vit.features(images) * direction).sum().backward()
    (timms.forward_features(images)[:, 0] * direction).sum().backward()
    for (name, mine), theirs in zip(vit.model.named_parameters(), timms.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None, name
        assert (mine.grad - theirs.grad).norm() <= 1e-4 * theirs.grad.norm() + 1e-5, name
