"""The frozen backbone equals timm's own pass, and a prompt does what its definition says and no more."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from timm.layers.attention import Attention
from timm.layers.mlp import GluMlp, SwiGLU
from timm.layers.norm import RmsNorm
from timm.models import create_model
from timm.models import vision_transformer as zoo
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

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
    pairs = zip(blocks, [(batch, length, WIDTH)] * (len(blocks) - 1) + [(length - 2, WIDTH)], strict=True)
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
            found[index] = replace(prompt, key=prompt.key.double(), value=prompt.value.double())
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
    if isinstance(prompt, Prefix) and prompt.projected:
        parts = zip((prompt.key, prompt.value), weights[1:], biases[1:], strict=True)
        own = [part @ w.T + b for part, w, b in parts]  # (B, P, W) each
        heads = own[0].split(attention.head_dim, dim=-1)
        prompt = Prefix(torch.cat([attention.k_norm(part) for part in heads], dim=-1), own[1])
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


KINDS = ("prefixes", "projected prefixes", "tokens", "positioned tokens", "shifts")
MIXTURES = ("tokens, shift, prefix", "tokens, prefix, shift", "prefix, tokens, shift", "shift, tokens, tokens")


def draw(kind: str, vit: FrozenViT, blocks: list[int], batch: int = BATCH) -> Prompts:
    """Prompts of one kind for these blocks, or a mixture: a kind for each block."""
    if kind == "prefixes":
        return draw_prompts(vit, blocks, batch)
    if kind == "projected prefixes":
        parts = {block: prompt.tokens for block, prompt in draw_tokens(blocks, batch).items()}
        return {index: Prefix(part[..., :2, :], part[..., -2:, :], projected=True) for index, part in parts.items()}
    if kind in ("tokens", "positioned tokens"):
        return draw_tokens(blocks, batch, positioned=kind != "tokens")
    if kind == "shifts":
        return draw_shifts(vit, blocks, batch)
    plural = {"prefix": "prefixes", "shift": "shifts", "tokens": "tokens"}
    each = zip(blocks, kind.split(", "), strict=True)
    return {block: draw(plural[one], vit, [block, block + 1], batch)[block] for block, one in each}


def readouts_of(kind: str) -> tuple[Readout, ...]:
    return ("class", "class before norm", "tokens") if "tokens" in kind else ("class", "class before norm")


def some_blocks(vit: FrozenViT) -> list[int]:
    return sorted({0, vit.depth // 2, vit.depth - 1})


def check(vit: FrozenViT, images: Tensor, prompts: Prompts, readout: Readout = "class", layers: int = 0) -> Tensor:
    """Compare what is read out with the definition."""
    found = vit.features(images, prompts, readout, layers=layers)
    assert found.shape == (len(images), vit.width * (1 + 2 * layers)) and found.dtype == torch.float32
    assert distance(found.double(), reference(vit.model, images, doubled(prompts), readout, layers)) < 1e-5
    return found


@each_case
def test_without_prompts_it_equals_timm(case: str) -> None:
    model, images = build(**CASES[case]), draw_images(case)
    into_norm: list[Tensor] = []
    hook = model.norm.register_forward_pre_hook(lambda module, inputs: into_norm.append(inputs[0]))
    with torch.no_grad():
        expected = model.forward_features(images)[:, 0]
    hook.remove()
    vit = FrozenViT(model)
    assert distance(vit.query(images), expected) < 1e-5
    assert torch.equal(vit.features(images), vit.query(images))
    assert torch.equal(vit.features(images, {}), vit.query(images))
    before = vit.query(images, "class before norm")
    assert before.dtype == torch.float32 and distance(before, into_norm[0][:, 0]) < 1e-5
    assert torch.equal(vit.features(images, readout="class before norm"), before)
    assert (distance(before, expected) > 1e-3) == (case != "no_final_norm")


@pytest.mark.parametrize("kind", KINDS)
@each_case
def test_prompts_equal_the_definition(case: str, kind: str) -> None:
    vit, images = FrozenViT(build(**CASES[case])), draw_images(case)
    found = check(vit, images, draw(kind, vit, some_blocks(vit)))
    assert distance(found, vit.query(images)) > 1e-3
    if kind == "positioned tokens":
        same = torch.equal(found, vit.features(images, draw("tokens", vit, some_blocks(vit))))
        assert same == (case in ("no_embed_class", "no_positions"))


@pytest.mark.parametrize("readout", ["class before norm", "tokens"])
@each_case
def test_what_is_read_out_with_tokens_equals_the_definition(case: str, readout: Readout) -> None:
    vit, images = FrozenViT(build(**CASES[case])), draw_images(case)
    prompts = draw_tokens(some_blocks(vit))
    found = check(vit, images, prompts, readout)
    assert distance(found, vit.features(images, prompts)) > 1e-3 or case == "no_final_norm"


@pytest.mark.parametrize("case", [case for case in CASES if case != "one_block"])
def test_readings_of_the_blocks_before_the_last_stand_behind_the_feature(case: str) -> None:
    vit, images = FrozenViT(build(**CASES[case])), draw_images(case)
    prompts: Prompts = {**draw_prompts(vit, [0, vit.depth - 1]), **draw_tokens([1])}
    cases: tuple[tuple[Prompts, int], ...] = (({}, 1), (prompts, 2))
    for given, layers in cases:
        assert torch.equal(check(vit, images, given, layers=layers)[:, : vit.width], vit.features(images, given))


@pytest.mark.parametrize("readout", ["class", "tokens"])
@pytest.mark.parametrize("case", ["plain", "registers", "qk_norm", "wide_heads", "all"])
def test_kinds_of_prompts_go_together(case: str, readout: Readout) -> None:
    """Of tokens that join and a shift later on, the class token alone is shifted."""
    vit, images = FrozenViT(build(**CASES[case])), draw_images(case)
    for mixture in MIXTURES:
        check(vit, images, draw(mixture, vit, [0, 1, 2]), readout)


@pytest.mark.parametrize("kind", ["prefixes", "tokens", "key", "value"])
@pytest.mark.parametrize("block", range(DEPTH))
def test_a_prompt_of_each_block_alone_matters(block: int, kind: str) -> None:
    vit, images = FrozenViT(build(**CASES["registers"])), draw_images()
    if kind in ("key", "value"):
        shift, nothing = draw_shifts(vit, [block])[block], torch.zeros(WIDTH)
        part = ClassTokenShift(shift.key, nothing) if kind == "key" else ClassTokenShift(nothing, shift.value)
        prompts: Prompts = {block: part}
    else:
        prompts = draw(kind, vit, [block])
    found = check(vit, images, prompts)
    assert distance(found, vit.query(images)) > 1e-3
    if kind == "tokens" and block < DEPTH - 1:  # kept: they are not what the last block alone would make of them
        assert distance(found, vit.features(images, {DEPTH - 1: prompts[block]})) > 1e-3


@pytest.mark.parametrize("block", range(DEPTH))
def test_the_order_of_tokens_does_not_matter(block: int) -> None:
    vit, images = FrozenViT(build()), draw_images()
    key, value = torch.randn(2, BATCH, 6, WIDTH)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    found = vit.features(images, {block: Prefix(key[:, order], value[:, order])})
    assert distance(found, vit.features(images, {block: Prefix(key, value)})) < 1e-5
    other = vit.features(images, {block: Prefix(key[:, order], value)})  # the pairs are broken up
    assert distance(found, other) > 1e-4
    for readout in readouts_of("tokens"):
        found = vit.features(images, {block: Tokens(key[:, order])}, readout)
        assert distance(found, vit.features(images, {block: Tokens(key)}, readout)) < 1e-5


@pytest.mark.parametrize("block", range(DEPTH))
def test_a_prefix_that_no_query_attends_to_has_no_effect(block: int) -> None:
    model, images = build(), draw_images()
    with torch.no_grad():
        model.blocks[block].attn.qkv.bias[:WIDTH] += 10.0  # all queries point one way, the prefix the other
    vit = FrozenViT(model)
    prefix = Prefix(torch.full((4, WIDTH), -50.0), torch.randn(4, WIDTH))
    assert distance(vit.features(images, {block: prefix}), vit.query(images)) < 1e-6


def test_what_repeats_the_sequence_or_is_empty_has_no_effect() -> None:
    """Every token twice: attention weighs them as it did."""
    vit, images = FrozenViT(build()), draw_images()
    first = vit.model.blocks[0]
    own = vit.model._pos_embed(vit.model.patch_embed(images))
    _, key, value = first.attn.qkv(first.norm1(own)).chunk(3, dim=-1)
    nothing, empty = Tokens(zeros(0, WIDTH)), Prefix.split(zeros(BATCH, 0, WIDTH))
    shift = ClassTokenShift(*zeros(2, WIDTH))
    without: tuple[Prompts, ...] = ({0: Prefix(key, value)}, {0: Tokens(own)}, {0: nothing, 1: shift, 2: empty})
    for prompts in without:
        assert distance(vit.features(images, prompts), vit.query(images)) < 1e-5


@pytest.mark.parametrize("kind", [*KINDS, MIXTURES[0]])
def test_a_batch_may_be_empty(kind: str) -> None:
    vit = FrozenViT(build())
    assert vit.features(draw_images(batch=0), draw(kind, vit, [0, 1, 2], batch=0)).shape == (0, WIDTH)


def parts_of(prompt: Prompt) -> list[Tensor]:
    return [prompt.tokens] if isinstance(prompt, Tokens) else [prompt.key, prompt.value]


def with_parts(prompt: Prompt, parts: list[Tensor]) -> Prompt:
    """A prompt of the same kind."""
    names = ("tokens",) if isinstance(prompt, Tokens) else ("key", "value")
    made: dict[str, Any] = dict(zip(names, parts, strict=True))
    return replace(prompt, **made)


def test_a_shared_prompt_is_the_same_for_every_image() -> None:
    vit, images = FrozenViT(build()), draw_images()
    tokens, shift = torch.randn(2, 4, WIDTH), torch.randn(2, WIDTH)
    for shared in (Prefix(*tokens), Tokens(tokens[0]), Tokens(tokens[0], True), ClassTokenShift(*shift)):
        every = with_parts(shared, [part.expand(BATCH, *part.shape) for part in parts_of(shared)])
        assert (shared.batch, every.batch) == (None, BATCH)
        assert torch.equal(vit.features(images, {1: shared}), vit.features(images, {1: every}))


@pytest.mark.parametrize("kind", [*KINDS, *MIXTURES[:2]])
@pytest.mark.parametrize("case", ["plain", "all"])
def test_an_image_does_not_depend_on_its_batch(case: str, kind: str) -> None:
    vit, images = FrozenViT(build(**CASES[case])), draw_images(case)
    prompts = {block: prompt for block, prompt in draw(kind, vit, [0, 1, 2]).items() if prompt.batch}
    for readout in readouts_of(kind):
        together = vit.features(images, prompts, readout)
        for index in range(BATCH):
            mine = slice(index, index + 1)
            alone = {block: with_parts(one, [part[mine] for part in parts_of(one)]) for block, one in prompts.items()}
            assert distance(vit.features(images[mine], alone, readout), together[mine]) < 1e-5


@pytest.mark.parametrize(
    ("kind", "readout"),
    [("prefixes", "class"), (MIXTURES[0], "class"), (MIXTURES[3], "class"), (MIXTURES[2], "tokens")],
)
@pytest.mark.parametrize("case", ["plain", "registers", "all"])
def test_gradients_reach_the_prompts_and_equal_those_of_the_definition(case: str, kind: str, readout: Readout) -> None:
    vit, images = FrozenViT(build(**CASES[case])), draw_images(case)
    prompts = draw(kind, vit, [0, 1, 2])
    direction = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(5))

    def gradients(run: Callable[[Prompts], Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = {
            block: [part.detach().to(dtype).requires_grad_() for part in parts_of(prompt)]
            for block, prompt in prompts.items()
        }
        given = {block: with_parts(prompt, leaves[block]) for block, prompt in prompts.items()}
        every = [leaf for own in leaves.values() for leaf in own]
        return list(torch.autograd.grad((run(given) * direction).sum(), every))

    found = gradients(lambda prompts: vit.features(images, prompts, readout), torch.float32)
    expected = gradients(lambda prompts: reference(vit.model, images, prompts, readout), torch.float64)
    for mine, theirs in zip(found, expected, strict=True):
        assert theirs.norm() > 1e-3
        assert (mine - theirs).norm() < 1e-4 * theirs.norm()
    assert all(parameter.grad is None for parameter in vit.parameters())


def test_a_shift_comes_before_the_norm_of_the_keys() -> None:
    """A huge shift only turns the normalized key, and so stays harmless."""
    vit, images = FrozenViT(build(**CASES["qk_norm"])), draw_images()
    direction, nothing = torch.randn(WIDTH), torch.zeros(WIDTH)
    far, farther = (vit.features(images, {1: ClassTokenShift(s * direction, nothing)}) for s in (1e4, 1e6))
    assert distance(far, farther) < 1e-3
    assert distance(far, vit.query(images)) > 1e-3


# The backbone itself


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


def test_it_stays_in_evaluation_mode_and_a_query_has_no_gradient() -> None:
    vit, images = FrozenViT(build(**CASES["dropout"]).train()), draw_images()
    nn.Sequential(vit).train()
    assert vit.train() is vit and not any(module.training for module in vit.modules())
    assert not vit.query(images.requires_grad_()).requires_grad
    queries = vit.query(images)
    vit.unfreeze()
    vit.train()
    assert not any(module.training for module in vit.modules())
    assert distance(vit.features(images).detach(), queries) < 1e-5


def test_the_fingerprint_sees_every_weight_and_its_name() -> None:
    vit = FrozenViT(build())
    before = vit.fingerprint()
    assert before == FrozenViT(build()).fingerprint() and len(before) == 64
    vit.model.blocks[2].mlp.fc2.bias.data[7] += 1e-6
    assert vit.fingerprint() != before
    assert FrozenViT(build().bfloat16()).fingerprint() != before


@pytest.mark.parametrize("kind", ["prefixes", MIXTURES[0]])
def test_half_precision_weights_give_float32_features(kind: str) -> None:
    images, vit, half = draw_images(), FrozenViT(build()), FrozenViT(build().bfloat16())
    prompts = draw(kind, vit, [0, 1, 2])
    for readout in readouts_of(kind):
        found = half.features(images, prompts, readout)
        assert found.dtype == half.query(images).dtype == torch.float32
        assert distance(found, vit.features(images, prompts, readout)) < 0.1
    key, value = torch.randn(2, 4, WIDTH, requires_grad=True)
    gradient = torch.autograd.grad(half.features(images, {1: Prefix(key, value)}).sum(), value)[0]
    assert gradient.dtype == torch.float32 and gradient.abs().sum() > 0


def test_what_the_backbone_says_about_itself() -> None:
    vit = FrozenViT(build(depth=2))
    assert (vit.width, vit.depth, vit.heads, vit.attention_width, vit.image_size) == (48, 2, 3, 48, 32)
    assert FrozenViT(build(**CASES["oblong"])).image_size == (32, 64)
    assert FrozenViT(build(**CASES["wide_heads"])).attention_width == 72


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


# What is refused


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape)


@pytest.mark.parametrize(
    ("block", "prompt", "message"),
    [
        (DEPTH, Prefix(*zeros(2, 4, WIDTH)), "block 3 .* 0 to 2"),
        (-1, Prefix(*zeros(2, 4, WIDTH)), "block -1"),
        (0, Prefix(*zeros(2, 4, WIDTH + 1)), "the Prefix has width 49, the attention 48"),
        (1, Prefix(*zeros(2, BATCH + 1, 4, WIDTH)), "Block 1: the Prefix is for 5 images, the batch has 4"),
        (1, Prefix(*zeros(2, 1, 4, WIDTH)), "the Prefix is for 1 images"),
        (1, Tokens(zeros(4, WIDTH + 1)), "Block 1: the Tokens has width 49, the backbone 48"),
        (1, Tokens(zeros(BATCH + 1, 4, WIDTH)), "Block 1: the Tokens is for 5 images, the batch has 4"),
        (1, Tokens(zeros(1, 4, WIDTH)), "Block 1: the Tokens is for 1 images, the batch has 4"),
        (1, ClassTokenShift(*zeros(2, 47)), "Block 1: the ClassTokenShift has width 47, the attention 48"),
        (1, ClassTokenShift(*zeros(2, 3, WIDTH)), "Block 1: the ClassTokenShift is for 3 images, the batch has 4"),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused(block: int, prompt: Prompt, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FrozenViT(build()).features(draw_images(), {block: prompt})


def test_tokens_have_the_width_of_the_backbone_and_shifts_that_of_the_attention() -> None:
    vit, images = FrozenViT(build(**CASES["wide_heads"])), draw_images()
    vit.features(images, {0: Tokens(zeros(4, 48)), 1: ClassTokenShift(*zeros(2, 72))})
    with pytest.raises(ValueError, match="the Tokens has width 72, the backbone 48"):
        vit.features(images, {0: Tokens(zeros(4, 72))})
    with pytest.raises(ValueError, match="the ClassTokenShift has width 48, the attention 72"):
        vit.features(images, {0: ClassTokenShift(*zeros(2, 48))})


def test_what_is_no_prompt_and_images_that_do_not_fit_are_refused() -> None:
    vit, prompts = FrozenViT(build()), dict[int, Any]({0: zeros(4, WIDTH)})
    with pytest.raises(TypeError, match="got a Tensor"):
        vit.features(draw_images(), prompts)
    with pytest.raises(ValueError, match=r"\(32, 32\), got \(40, 32\)"):
        vit.query(zeros(1, 3, 40, 32))
    for images in (zeros(1, 3, 32, 32).to(torch.uint8), zeros(3, 32, 32)):
        with pytest.raises(ValueError, match="normalized float images"):
            vit.query(images)


def test_without_tokens_there_are_none_to_read_out() -> None:
    vit, images = FrozenViT(build()), draw_images()
    prompts: tuple[Prompts, ...] = ({}, draw_prompts(vit, [0, 2]), draw_shifts(vit, [1]), {0: Tokens(zeros(0, WIDTH))})
    for without in prompts:
        with pytest.raises(ValueError, match="Inject Tokens"):
            vit.features(images, without, "tokens")
    with pytest.raises(ValueError, match="Inject Tokens"):
        vit.query(images, "tokens")


class OtherViT(VisionTransformer):
    """A subclass may compute anything."""


class MixingMlp(nn.Module):
    """A layer in which a token depends on the others: the last block's class token alone would be wrong."""

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens - tokens.mean(dim=1, keepdim=True)


def edited(edit: Callable[[Any], object]) -> Callable[[], nn.Module]:
    """A model of which something is changed."""

    def make() -> nn.Module:
        model: nn.Module = build()
        edit(model)
        return model

    return make


def with_part(place: str) -> Callable[[], nn.Module]:
    return edited(lambda model: setattr(model.get_submodule(place), "adapter", nn.Linear(WIDTH, WIDTH)))


def adapt(model: Any) -> None:
    model.blocks[1].attn.qkv = nn.Sequential(model.blocks[1].attn.qkv)


def hybrid(model: Any) -> None:
    model.patch_embed = nn.Sequential(nn.Conv2d(3, 3, 1), model.patch_embed)


def swin() -> nn.Module:
    return SwinTransformer(img_size=32, patch_size=4, window_size=4, embed_dim=16, depths=(1,), num_heads=(1,))


UNSUPPORTED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "resnet": (lambda: create_model("test_resnet"), "The model is a timm.models.resnet.ResNet"),
    "swin": (swin, "SwinTransformer, not a VisionTransformer"),
    "subclass": (lambda: OtherViT(32, 8, embed_dim=48, depth=1, num_heads=3), "OtherViT"),
    "hybrid": (edited(hybrid), "The patch embedding is .*Sequential, not a PatchEmbed"),
    "no class token": (lambda: build(class_token=False, global_pool="avg"), "no class token .* 'avg'"),
    "norm after pooling": (lambda: build(global_pool="avg"), "fc_norm, pooling 'avg'"),
    "no blocks": (lambda: build(depth=0), "has no blocks"),
    "parallel": (lambda: build(block_fn=zoo.ParallelScalingBlock), "Block 0 is .*ParallelScalingBlock, not a Block"),
    "parallel things": (lambda: build(block_fn=zoo.ParallelThingsBlock), "ParallelThingsBlock"),
    "post-norm": (lambda: build(block_fn=zoo.ResPostBlock), "ResPostBlock"),
    "parallel diff": (lambda: build(block_fn=zoo.DiffParallelScalingBlock), "DiffParallelScalingBlock"),
    "diff attention": (lambda: build(attn_layer="diff"), "attention of block 0 is .*DiffAttention"),
    "part of the model": (with_part(""), "The model has unknown parts: adapter"),
    "part of a block": (with_part("blocks.1"), "Block 1 has unknown parts: adapter"),
    "part of an attention": (with_part("blocks.2.attn"), "attention of block 2 has .*: adapter"),
    "adapted projection": (edited(adapt), "qkv is a .*Sequential, not a Linear"),
    "hook": (edited(lambda vit: vit.blocks[1].register_forward_hook(lambda *given: 2 * given[2])), "timm's by"),
    "mixing layer": (edited(lambda vit: setattr(vit.blocks[-1], "mlp", MixingMlp())), "differs from timm's by"),
    "broken weights": (edited(lambda vit: vit.norm.weight.data.fill_(float("nan"))), "not finite"),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_a_model_that_is_not_known_is_refused(kind: str) -> None:
    make, message = UNSUPPORTED[kind]
    with pytest.raises(UserError, match=message) as caught:
        FrozenViT(make())
    assert "plain timm VisionTransformer" in str(caught.value)


SHIFT = r"\(B, W\) or \(W,\)"


@pytest.mark.parametrize(
    ("make", "shapes", "message"),
    [
        (Prefix, [(4, 8), (5, 8)], r"got \(4, 8\) and \(5, 8\)"),
        (Prefix, [(8,), (8,)], r"\(B, P, W\), or \(P, W\) .*, got \(8,\)"),
        (Prefix.split, [(2, 7, 8)], "Cannot split 7 prompt tokens"),
        (Prefix.split, [(8,)], r"\(B, M, D\), or \(M, D\)"),
        (Tokens, [(8,)], r"\(B, P, D\), or \(P, D\)"),
        (Tokens, [(1, 2, 4, 8)], r"\(B, P, D\), or \(P, D\)"),
        (ClassTokenShift, [(8,), (9,)], SHIFT),
        (ClassTokenShift, [(2, 8), (8,)], SHIFT),
        (ClassTokenShift, [(2, 3, 8), (2, 3, 8)], SHIFT),
        (ClassTokenShift, [(), ()], SHIFT),
    ],
)
def test_a_prompt_checks_its_shapes(make: Callable[..., Prompt], shapes: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(*(zeros(*shape) for shape in shapes))


def test_a_prompt_knows_its_batch_length_and_width() -> None:
    prefix, tokens, shift = Prefix(*zeros(2, 2, 4, 8)), Tokens(zeros(2, 4, 8)), ClassTokenShift(*zeros(2, 2, 8))
    assert (prefix.batch, prefix.length, prefix.width) == (tokens.batch, tokens.length, tokens.width) == (2, 4, 8)
    assert (shift.batch, shift.width, tokens.positioned) == (2, 8, False)
    assert Prefix(*zeros(2, 4, 8)).batch is Tokens(zeros(4, 8)).batch is ClassTokenShift(*zeros(2, 8)).batch is None
    sequence = torch.arange(2 * 6 * 3).reshape(2, 6, 3)
    split = Prefix.split(sequence)
    assert torch.equal(torch.cat([split.key, split.value], dim=1), sequence)
    assert torch.equal(Prefix.split(sequence[0]).value, sequence[0, 3:])
