"""Blocks of a frozen ViT with custom kernels and a custom backward pass, faster than backbones.vit.

Frozen weights need no gradient, so a block's backward pass is four products, two norms and an attention. It needs the
inputs of both norms, queries, keys and values, the attention's output, and the hidden layer before its activation.
Residual sums are fused with the next norm, prefixes are read in place, and the first prompted block computes only the
prefix's gradient. In a narrow network, all after attention is one kernel per direction, which keeps only its input.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers.layer_scale import LayerScale
from timm.layers.mlp import Mlp
from torch import Tensor, nn
from torch.nn import functional

Prefixed = tuple[Tensor, Tensor]
"""Keys and values before the sequence's own, (B, P, W) each."""
KeptMlp = tuple[Tensor, ...]
"""State for the backward pass of an MLP: the sum (R, D) before its norm, and more if needed."""
Normed = tuple[Tensor, Tensor, Tensor]
"""Rows (R, D) after a norm, with means and reciprocal standard deviations before it, (R,) each."""


@dataclass(frozen=True, eq=False)
class Linear:
    """A frozen linear layer, with the following layer scale multiplied in."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, layer: Any, scale: Any = None) -> "Linear":
        """Copy a layer and the layer scale after it."""
        weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
        if isinstance(scale, LayerScale):
            wide = scale.gamma.detach().float()
            weight = (weight.float() * wide[:, None]).to(weight.dtype)
            bias = None if bias is None else (bias.float() * wide).to(bias.dtype)
        return cls(weight, bias)

    @property
    def parts(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias."""
        return self.weight, self.bias

    def __call__(self, rows: Tensor) -> Tensor:
        """Map rows (R, in) to (R, out)."""
        return functional.linear(rows, self.weight, self.bias)

    def back(self, gradient: Tensor) -> Tensor:
        """Map a gradient (R, out) to (R, in)."""
        return gradient @ self.weight


@dataclass(frozen=True, eq=False)
class Norm:
    """A frozen layer norm."""

    weight: Tensor
    bias: Tensor
    eps: float

    @property
    def parts(self) -> tuple[Tensor, Tensor, float]:
        """Weight, bias and the constant added to the variance."""
        return self.weight, self.bias, self.eps

    @classmethod
    def of(cls, layer: Any) -> "Norm":
        """Copy a layer."""
        return cls(layer.weight.detach(), layer.bias.detach(), float(layer.eps))


@dataclass(frozen=True, eq=False)
class Sum:
    """Tokens between two blocks."""

    total: Tensor  # (R, D)
    update: Tensor | None = None  # (R, D), still to be added
    normed: Normed | None = None
    """Result of the next norm, if computed."""

    def go_through(self, norm: Norm) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the complete sum and its norm."""
        from probprompt.kernels.pointwise import add_norm

        if self.normed is not None:
            return self.total, *self.normed
        return add_norm(self.total, self.update, *norm.parts)


class WideMlp:
    """The MLP of a block with its norm and both residual sums; the next norm completes the second."""

    def __init__(self, block: Any) -> None:
        self.norm = Norm.of(block.norm2)
        self.fc1, self.fc2 = Linear.of(block.mlp.fc1), Linear.of(block.mlp.fc2, block.ls2)

    def forward(self, before: Tensor, update: Tensor, following: Norm | None) -> tuple[Sum, KeptMlp]:
        """Map a sum (R, D) + (R, D) to the next one; ``following`` is the next norm."""
        from probprompt.kernels.pointwise import add_norm, gelu

        middle, normed, mean, rstd = add_norm(before, update, *self.norm.parts)
        hidden = self.fc1(normed)  # (R, 4 D)
        return Sum(middle, self.fc2(gelu(hidden))), (middle, mean, rstd, hidden)

    def backward(self, gradient: Tensor, kept: KeptMlp) -> Tensor:
        """Map the gradient (R, D) of the output sum to that of the input sum."""
        from probprompt.kernels.pointwise import gelu_backward, norm_backward

        middle, mean, rstd, hidden = kept
        normed = self.fc1.back(gelu_backward(self.fc2.back(gradient), hidden))  # (R, D)
        return norm_backward(normed, middle, self.norm.weight, mean, rstd, gradient)


class NarrowMlp(WideMlp):
    """The MLP in one kernel per direction, if the hidden layer is small enough for registers."""

    @staticmethod
    def fits(block: Any) -> bool:
        """Return True if a block's MLP is supported."""
        from probprompt.kernels.mlp import fits

        hidden, width = block.mlp.fc1.weight.shape
        return bool(hidden == 4 * width and fits(width))

    def forward(self, before: Tensor, update: Tensor, following: Norm | None) -> tuple[Sum, KeptMlp]:
        """Map a sum (R, D) + (R, D) to a complete one, with its norm."""
        from probprompt.kernels.mlp import mlp

        layers = (*self.fc1.parts, *self.fc2.parts)
        middle, after, normed = mlp(before, update, self.norm.parts, *layers, following.parts if following else None)
        return Sum(after, None, normed), (middle,)

    def backward(self, gradient: Tensor, kept: KeptMlp) -> Tensor:
        """Map the gradient (R, D) of the output sum to that of the input sum."""
        from probprompt.kernels.mlp import mlp_backward

        return mlp_backward(gradient, kept[0], self.norm.parts, *self.fc1.parts, self.fc2.weight)


@dataclass
class Kept:
    """State for the backward pass of a block."""

    before: Tensor  # (R, D): what goes into the first norm, with its mean and spread
    mean: Tensor
    rstd: Tensor
    qkv: Tensor  # (B, T, 3 W)
    prefix: Prefixed | None
    mixed: Tensor  # (B, T, W)
    logsumexp: Tensor  # (B, heads, T)
    mlp: KeptMlp


class FusedBlock:
    """One block."""

    def __init__(self, block: Any) -> None:
        attention = block.attn
        self.norm1 = Norm.of(block.norm1)
        self.qkv, self.proj = Linear.of(attention.qkv), Linear.of(attention.proj, block.ls1)
        self.heads, self.scale = int(attention.num_heads), float(attention.scale)
        self.mlp = NarrowMlp(block) if NarrowMlp.fits(block) else WideMlp(block)

    def queries(self) -> Linear:
        """Return the part of the projection that makes queries."""
        width = self.qkv.weight.shape[0] // 3
        return Linear(self.qkv.weight[:width], None if self.qkv.bias is None else self.qkv.bias[:width])

    def keys_and_values(self) -> Linear:
        """Return the part of the projection that makes keys and values."""
        width = self.qkv.weight.shape[0] // 3
        return Linear(self.qkv.weight[width:], None if self.qkv.bias is None else self.qkv.bias[width:])

    def project(self, tokens: Tensor) -> Tensor:
        """Return queries, keys and values (B, T, 3 W) of tokens (B, T, D)."""
        from probprompt.kernels.pointwise import add_norm

        _, normed, _, _ = add_norm(tokens.flatten(0, 1), None, *self.norm1.parts)
        return self.qkv(normed).view(*tokens.shape[:2], -1)

    def forward(
        self, tokens: Sum, shape: torch.Size, prefix: Prefixed | None, qkv: Tensor | None, following: Norm | None
    ) -> tuple[Sum, Kept]:
        """Run the block on tokens (B, T, D); ``qkv`` and the following norm are optional."""
        from probprompt.kernels.attention import attention

        before, normed, mean, rstd = tokens.go_through(self.norm1)
        if qkv is None:
            qkv = self.qkv(normed).view(*shape[:2], -1)  # (B, T, 3 W)
        mixed, logsumexp = attention(qkv, self.heads, self.scale, prefix)  # (B, T, W)
        result, kept = self.mlp.forward(before, self.proj(mixed.flatten(0, 1)), following)
        return result, Kept(before, mean, rstd, qkv, prefix, mixed, logsumexp, kept)

    def backward(self, gradient: Tensor, kept: Kept, own: bool) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients (R, D) of the input (if requested) and of the prefix."""
        from probprompt.kernels.attention import attention_backward
        from probprompt.kernels.pointwise import norm_backward

        gradient = self.mlp.backward(gradient, kept.mlp)
        mixed = self.proj.back(gradient).view_as(kept.mixed)
        qkv, key, value = attention_backward(
            mixed, kept.qkv, kept.mixed, kept.logsumexp, self.heads, self.scale, kept.prefix, own
        )
        if qkv is None:
            return None, key, value
        normed = self.qkv.back(qkv.flatten(0, 1))
        return norm_backward(normed, kept.before, self.norm1.weight, kept.mean, kept.rstd, gradient), key, value


def fuse(blocks: Sequence[Any]) -> list[FusedBlock] | None:
    """Return fused blocks, or None if one has parts that the kernels do not support."""
    return [FusedBlock(block) for block in blocks] if all(map(_plain, blocks)) else None


def _plain(block: Any) -> bool:
    attention, mlp = block.attn, block.mlp
    nothing = (attention.q_norm, attention.k_norm, attention.norm, getattr(attention, "gate", None), mlp.norm)
    scales = (block.ls1, block.ls2)
    norms = (block.norm1, block.norm2)
    return (
        type(mlp) is Mlp
        and isinstance(mlp.fc1, nn.Linear)
        and type(mlp.act) is nn.GELU
        and mlp.act.approximate == "none"
        and all(part is None or isinstance(part, nn.Identity) for part in nothing)
        and all(isinstance(scale, nn.Identity | LayerScale) for scale in scales)
        and all(isinstance(norm, nn.LayerNorm) and norm.weight is not None and norm.bias is not None for norm in norms)
    )


def readable(length: int) -> bool:
    """Return True if the sequence is short enough for the last block's kernel."""
    from probprompt.kernels.attention import LONGEST

    return length <= LONGEST


def run(
    blocks: Sequence[FusedBlock],
    tokens: Tensor,
    prefixes: Sequence[Prefixed | None],
    qkv: Tensor | None = None,
    last: FusedBlock | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run blocks with prefixes on tokens (B, T, D); ``qkv`` is the first one's, if known.

    Returns the tokens. With the model's last block, of which only the first token is read, returns that token (B, D)
    before the block, and the block's attention output for it (B, W).
    """
    flat = [part for prefix in prefixes for part in (prefix or (None, None))]
    learning = [tokens, *(part for part in flat if part is not None)]
    if torch.is_grad_enabled() and any(part.requires_grad for part in learning):
        result: tuple[Tensor, Tensor | None] = _Pass.apply(  # type: ignore[no-untyped-call]
            blocks, last, qkv, tokens, *flat
        )
        return result
    with torch.no_grad():
        return _forward(blocks, last, qkv, tokens, flat, keep_from=len(blocks))[0]


@dataclass
class KeptLast:
    """State for the backward pass of the last block's attention."""

    before: Tensor  # (R, D): what goes into its first norm, with its mean and spread
    mean: Tensor
    rstd: Tensor
    query: Tensor  # (B, W)
    packed: Tensor  # (B, T, 2 W): keys and values
    weights: Tensor  # (B, heads, T)


def _forward(
    blocks: Sequence[FusedBlock],
    last: FusedBlock | None,
    qkv: Tensor | None,
    tokens: Tensor,
    flat: Sequence[Tensor | None],
    keep_from: int,
) -> tuple[tuple[Tensor, Tensor | None], list[Kept], KeptLast | None]:
    """Run the blocks, keeping state for the backward pass from block ``keep_from`` on."""
    sums, everything = Sum(tokens.flatten(0, 1)), []
    after: list[Norm | None] = [*(block.norm1 for block in blocks[1:]), last.norm1 if last else None]
    for index, (block, following) in enumerate(zip(blocks, after, strict=True)):
        key, value = flat[2 * index], flat[2 * index + 1]
        prefix = None if key is None or value is None else (key, value)
        sums, kept = block.forward(sums, tokens.shape, prefix, qkv if index == 0 else None, following)
        if index >= keep_from:
            everything.append(kept)
    if last is None:
        total, update = sums.total, sums.update
        return ((total if update is None else total + update).view_as(tokens), None), everything, None
    first, mixed, kept_last = _read_out(last, sums, tokens.shape)
    return (first, mixed), everything, kept_last


def _read_out(last: FusedBlock, tokens: Sum, shape: torch.Size) -> tuple[Tensor, Tensor, KeptLast]:
    """Return the first tokens, and the last block's attention output for them."""
    from probprompt.kernels.attention import read

    before, normed, mean, rstd = tokens.go_through(last.norm1)
    packed = last.keys_and_values()(normed).view(*shape[:2], -1)  # (B, T, 2 W)
    query = last.queries()(normed.view(shape)[:, 0])  # (B, W)
    mixed, weights = read(query, packed, last.heads, last.scale)
    return before.view(shape)[:, 0].clone(), mixed, KeptLast(before, mean, rstd, query, packed, weights)


def _read_out_backward(last: FusedBlock, kept: KeptLast, first: Tensor, mixed: Tensor) -> Tensor:
    """Return the gradient of all tokens (R, D) for those of first tokens and attention output."""
    from probprompt.kernels.attention import read_backward
    from probprompt.kernels.pointwise import norm_backward

    images, length = kept.packed.shape[:2]
    query, packed = read_backward(mixed, kept.query, kept.packed, kept.weights, last.heads, last.scale)
    normed = last.keys_and_values().back(packed.flatten(0, 1))  # (R, D)
    normed.view(images, length, -1)[:, 0] += last.queries().back(query)
    gradient: Tensor = norm_backward(normed, kept.before, last.norm1.weight, kept.mean, kept.rstd, None)
    gradient.view(images, length, -1)[:, 0] += first
    return gradient


class _Pass(torch.autograd.Function):
    """The blocks with their backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        blocks: Sequence[FusedBlock],
        last: FusedBlock | None,
        qkv: Tensor | None,
        tokens: Tensor,
        *flat: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the blocks."""
        ctx.blocks, ctx.last, ctx.shape, ctx.own = blocks, last, tokens.shape, ctx.needs_input_grad[3]
        prompted = [index for index, key in enumerate(flat[::2]) if key is not None]
        ctx.first = 0 if ctx.own or not prompted else prompted[0]
        result, ctx.kept, ctx.kept_last = _forward(blocks, last, qkv, tokens, flat, ctx.first)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Propagate through the blocks; the first prompted one needs only the prefix's gradient."""
        found: list[Tensor | None] = [None] * (2 * len(ctx.blocks))
        if ctx.last is None:
            gradient = gradients[0].contiguous().flatten(0, 1)  # (R, D)
        else:
            gradient = _read_out_backward(ctx.last, ctx.kept_last, *gradients)
        for index in range(len(ctx.blocks) - 1, ctx.first - 1, -1):
            own = ctx.own or index > ctx.first
            gradient, key, value = ctx.blocks[index].backward(gradient, ctx.kept.pop(), own)
            found[2 * index], found[2 * index + 1] = key, value
        return None, None, None, gradient.view(ctx.shape) if ctx.own else None, *found
