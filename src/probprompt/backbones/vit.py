"""A frozen vision transformer that returns the class token, with or without prompts.

It runs timm's modules and adds the prompts. Models with unknown parts are rejected, so that nothing is skipped.
"""

import hashlib
from dataclasses import dataclass
from typing import Any, Literal

import torch
from timm.layers.attention import Attention
from timm.layers.patch_embed import PatchEmbed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional

from probprompt import kernels
from probprompt.errors import UserError
from probprompt.kernels import vit_blocks
from probprompt.prompts import ClassTokenShift, Prefix, Prompt, Prompts, Readout, Tokens

SUPPORTED = (
    "Pass a plain timm VisionTransformer with a class token, built from Block and Attention (such as "
    "vit_base_patch16_224, vit_small_patch14_dinov2, vit_base_patch16_clip_224)."
)
"""Supported models, for error messages."""
# All parts that the forward pass runs or may skip.
_PARTS: dict[type[nn.Module], set[str]] = {
    VisionTransformer: {"patch_embed", "cls_token", "reg_token", "pos_embed", "pos_drop", "patch_drop"}
    | {"norm_pre", "blocks", "norm", "attn_pool", "fc_norm", "head_drop", "head"},
    PatchEmbed: {"proj", "norm"},
    Block: {"norm1", "attn", "ls1", "drop_path1", "norm2", "mlp", "ls2", "drop_path2"},
    Attention: {"qkv", "q_norm", "k_norm", "attn_drop", "norm", "gate", "proj", "proj_drop"},
}
Precision = Literal["fp32", "bf16"]  # precision of weights and computation
DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, eq=False)
class Embedded:
    """Embedded images, shared by passes with and without prompts."""

    tokens: Tensor  # (B, T, D)
    qkv: Tensor | None = None  # (B, T, 3 W): queries, keys and values of the first block

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def shape(self) -> torch.Size:
        """Shape of the tokens `(B, T, D)`."""
        return self.tokens.shape


@dataclass(frozen=True, eq=False)
class Fused:
    """Blocks for the fused kernels, and the tokens of a black image."""

    blocks: list[vit_blocks.FusedBlock]  # without the last
    last: vit_blocks.FusedBlock
    base: Tensor  # (1, T, D)


class FrozenViT(nn.Module):
    """A frozen timm vision transformer from images and prompts to class tokens.

    It always stays in evaluation mode, and gradients reach the prompts only.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        check_supported(model)
        self.model: Any = model.requires_grad_(False)
        self.learns = False
        self._fused: tuple[tuple[torch.device, torch.dtype], Fused | None] | None = None
        self.eval()
        self._compare_with_timm()

    @property
    def width(self) -> int:
        """Number of features (D)."""
        return int(self.model.embed_dim)

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return len(self.model.blocks)

    @property
    def heads(self) -> int:
        """Number of attention heads per block."""
        return int(self.model.blocks[0].attn.num_heads)

    @property
    def attention_width(self) -> int:
        """Width of a prefix token over all heads (W), nearly always equal to ``width``."""
        return _attention_width(self.model.blocks[0].attn)

    @property
    def image_size(self) -> int | tuple[int, int]:
        """Size of the images in pixels, or (height, width) if not square."""
        height, width = self.model.patch_embed.img_size
        return int(height) if height == width else (int(height), int(width))

    def train(self, mode: bool = True) -> "FrozenViT":
        """Stay in evaluation mode: dropout or stochastic depth would add noise."""
        return super().train(False)

    @property
    def precision(self) -> Precision:
        """Precision of the weights."""
        kind = self.model.patch_embed.proj.weight.dtype
        for name, dtype in DTYPES.items():
            if dtype == kind:
                return name
        raise UserError(f"Unsupported precision {kind} of the backbone's weights. Expected float32 or bfloat16.")

    def set_precision(self, precision: Precision) -> None:
        """Convert the weights to a precision."""
        self.model.to(DTYPES[precision])

    def unfreeze(self, learning: bool = True) -> None:
        """Train all weights that the forward pass uses, for full fine-tuning."""
        self.learns = self.learns or learning
        unused = {id(parameter) for parameter in self.model.head.parameters()}
        for parameter in self.model.parameters():
            parameter.requires_grad_(learning and id(parameter) not in unused)

    @torch.no_grad()
    def embed(self, images: Tensor) -> Embedded:
        """Embed images for both a query and a prompted pass."""
        _check_images(self.model, images)
        fast = self._fast()
        tokens = self._embed(images, fast)
        return Embedded(tokens, fast.blocks[0].project(tokens) if fast and fast.blocks else None)

    @torch.no_grad()
    def query(self, images: Tensor | Embedded, readout: Readout = "class", layers: int = 0) -> Tensor:
        """Compute features without prompts or gradient: `(B, 3, H, W)` to `(B, D or more)`."""
        return self.features(images, readout=readout, layers=layers)

    def features(
        self, images: Tensor | Embedded, prompts: Prompts | None = None, readout: Readout = "class", layers: int = 0
    ) -> Tensor:
        """Compute features with prompts: `(B, 3, H, W)` to `(B, D)`, float32.

        ``class`` is the class token after the final norm, ``class before norm`` the input of that norm, ``tokens`` the
        mean of the injected tokens after it. ``layers`` appends features of that number of intermediate blocks,
        `(B, D + 2 layers D)`: of each block the class token and the mean of the patches, both normalized.
        """
        prompts = prompts or {}
        _check_prompts(self.model, prompts, images.shape[0])  # len() would fix the batch size of an exported graph
        prompts = {index: _projected(self.model.blocks[index].attn, prompt) for index, prompt in prompts.items()}
        fast = self._fast()
        if isinstance(images, Tensor):
            _check_images(self.model, images)
            images = Embedded(self._embed(images, fast))
        own, block, prompt = images.tokens.shape[1], self.model.blocks[-1], prompts.get(self.depth - 1)
        tokens, mixed, intermediate = self._run_blocks(images, prompts, fast, readout, layers)  # (B, T, D)
        if isinstance(prompt, Tokens):
            tokens = self._join(tokens, prompt)  # (B, T + P, D)
        # The last block computes queries only for the tokens that are read.
        if mixed is None:
            tokens = _run_block(block, tokens, prompt, _tokens_read(readout, own, tokens.shape[1]))
        else:
            tokens = _finish_block(block, tokens[:, None], block.attn.proj(mixed)[:, None])  # (B, 1, D)
        if readout != "class before norm":
            tokens = self.model.norm(tokens)
        feature = tokens.float().mean(dim=1)  # (B, D)
        return torch.cat([feature, *intermediate], dim=1) if intermediate else feature

    def _run_blocks(
        self, images: Embedded, prompts: Prompts, fast: Fused | None, readout: Readout, layers: int
    ) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Run all blocks except the last; return tokens `(B, T, D)` and intermediate features.

        If fused kernels also cover the last block, return its input `(B, D)` and its attention's output `(B, W)`.
        """
        tokens, index, mixed, intermediate = images.tokens, 0, None, list[Tensor]()
        first_read = self.depth - 1 - layers
        while index < self.depth - 1:
            prompt, qkv = prompts.get(index), images.qkv if index == 0 else None
            if isinstance(prompt, Tokens):
                tokens, qkv, prompt = self._join(tokens, prompt), None, None  # (B, T + P, D)
            if fast is None or isinstance(prompt, ClassTokenShift):
                tokens = _run_block(self.model.blocks[index], tokens, prompt, slice(None))
                index += 1
            else:
                end = index + 1
                while end < self.depth - 1 and end <= first_read and isinstance(prompts.get(end), Prefix | None):
                    end += 1
                prefixes = [prompt, *(prompts.get(later) for later in range(index + 1, end))]
                expanded = [_expanded(prefix, tokens.shape[0]) for prefix in prefixes]
                plain = end == self.depth - 1 and end not in prompts and readout != "tokens"
                last = fast.last if plain and not layers and vit_blocks.readable(tokens.shape[1]) else None
                (tokens, mixed), index = vit_blocks.run(fast.blocks[index:end], tokens, expanded, qkv, last), end
            if index > first_read:
                intermediate += self._read(tokens, images.tokens.shape[1])
        return tokens, mixed, intermediate

    def _read(self, tokens: Tensor, own: int) -> tuple[Tensor, Tensor]:
        """Return the normalized class token and mean of the patches `(B, D)` after a block."""
        tokens = tokens.float()
        first, patches = tokens[:, 0], tokens[:, self.model.num_prefix_tokens : own].mean(dim=1)
        shape = tokens.shape[2:]
        return functional.layer_norm(first, shape), functional.layer_norm(patches, shape)

    def _fast(self) -> Fused | None:
        """Return fused blocks, or None unless blocks are frozen, in 16 bits and on a GPU."""
        weight = self.model.patch_embed.proj.weight
        if self.learns or weight.dtype not in (torch.bfloat16, torch.float16) or not kernels.usable(weight.device):
            return None
        key = (weight.device, weight.dtype)
        if self._fused is None or self._fused[0] != key:
            self._fused = (key, self._fuse())
        return self._fused[1]

    @torch.no_grad()
    def _fuse(self) -> Fused | None:
        patches = self.model.patch_embed
        blocks = vit_blocks.fuse(self.model.blocks)
        plain = isinstance(patches.norm, nn.Identity) and patches.flatten and not self.model.dynamic_img_size
        if blocks is None or not plain or patches.proj.kernel_size != patches.proj.stride:
            return None
        weight = patches.proj.weight
        black = torch.zeros(1, patches.num_patches, self.width, device=weight.device, dtype=weight.dtype)
        return Fused(blocks[:-1], blocks[-1], self.model._pos_embed(black))

    def _join(self, tokens: Tensor, prompt: Tokens) -> Tensor:
        added = prompt.tokens.to(tokens.dtype).expand(tokens.shape[0], -1, -1)  # (B, P, D)
        position = self.model.pos_embed
        if prompt.positioned and position is not None and not self.model.no_embed_class:
            added = added + position[:, :1]
        return torch.cat([tokens, added], dim=1)  # (B, T + P, D)

    def fingerprint(self) -> str:
        """Return the SHA-256 of all weights."""
        return fingerprint(self.model)

    def _embed(self, images: Tensor, fast: Fused | None) -> Tensor:
        """Return tokens `(B, T, D)`, the class token first."""
        images = images.to(self.model.patch_embed.proj.weight.dtype)
        if fast is None:
            tokens = self.model._pos_embed(self.model.patch_embed(images))
        else:
            tokens = _embed_patches(self.model.patch_embed.proj, images, fast.base)
        embedded: Tensor = self.model.norm_pre(self.model.patch_drop(tokens))
        return embedded

    @torch.no_grad()
    def _compare_with_timm(self) -> None:
        """Raise UserError if timm's forward pass differs, for example because of a hook."""
        weight = self.model.patch_embed.proj.weight
        shape = torch.Size([1, weight.shape[1], *self.model.patch_embed.img_size])
        image = torch.arange(shape.numel(), device=weight.device).sin().view(shape).to(weight.dtype)
        timms = self.model.forward_features(image)[:, 0].float()  # (1, D)
        error = float((self.features(image) - timms).norm() / timms.norm())
        # Rounding stays far below the bound, a missing layer far above it. "not <" also catches NaN.
        if not error < (1e-2 if weight.dtype == torch.float32 else 1e-1):
            raise UserError(
                f"The class token differs from timm's by a relative error of {error:.1e}: weights are not finite, or "
                f"hooks or unknown layers change it. {SUPPORTED}"
            )


def fingerprint(module: nn.Module) -> str:
    """Return the SHA-256 of all parameters and buffers of a module, sorted by name."""
    digest = hashlib.sha256()
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_supported(model: nn.Module) -> None:
    """Raise UserError unless the model is a plain ViT with a class token."""
    _check_parts(model, VisionTransformer, "The model")
    vit: Any = model  # timm's modules have no types
    _check_parts(vit.patch_embed, PatchEmbed, "The patch embedding")
    if vit.cls_token is None:
        raise UserError(f"The model has no class token (pooling {vit.global_pool!r}). {SUPPORTED}")
    if not isinstance(vit.fc_norm, nn.Identity):
        raise UserError(f"The final norm is for pooled patches (fc_norm, pooling {vit.global_pool!r}). {SUPPORTED}")
    if len(vit.blocks) == 0:
        raise UserError(f"The model has no blocks. {SUPPORTED}")
    for index, block in enumerate(vit.blocks):
        _check_parts(block, Block, f"Block {index}")
        _check_parts(block.attn, Attention, f"The attention of block {index}")
        if type(block.attn.qkv) is not nn.Linear:  # slicing its rows would bypass an adapter around it
            raise UserError(f"Block {index}: qkv is a {_kind(block.attn.qkv)}, not a Linear. {SUPPORTED}")


def _check_parts(module: nn.Module, expected: type[nn.Module], where: str) -> None:
    if type(module) is not expected:
        raise UserError(f"{where} is a {_kind(module)}, not a {expected.__name__}. {SUPPORTED}")
    parts = {name for name, _ in module.named_children()}
    parts |= {name for name, _ in module.named_parameters(recurse=False)}
    parts |= {name for name, _ in module.named_buffers(recurse=False)}
    unknown = sorted(parts - _PARTS[expected])
    if unknown:
        raise UserError(f"{where} has unknown parts: {', '.join(unknown)}. {SUPPORTED}")


def _kind(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__name__}"


def _check_images(model: Any, images: Tensor) -> None:
    size, shape = tuple(model.patch_embed.img_size), tuple(images.shape)
    if len(shape) != 4 or not images.is_floating_point():
        raise ValueError(f"Expected normalized float images (B, 3, H, W), got {images.dtype} of shape {shape}.")
    if not model.dynamic_img_size and shape[2:] != size:
        raise ValueError(f"Expected images of (H, W) = {size}, got {shape[2:]}.")


def _check_prompts(model: Any, prompts: Prompts, batch: int) -> None:
    for index, prompt in prompts.items():
        if index not in range(len(model.blocks)):
            raise ValueError(f"Unknown block {index!r} of a prompt. Expected 0 to {len(model.blocks) - 1}.")
        kind = type(prompt).__name__
        if not isinstance(prompt, Prefix | Tokens | ClassTokenShift):
            raise TypeError(f"Block {index}: expected a Prefix, Tokens or ClassTokenShift, got a {kind}.")
        owner, width = "attention", _attention_width(model.blocks[index].attn)
        if isinstance(prompt, Tokens) or (isinstance(prompt, Prefix) and prompt.projected):
            owner, width = "backbone", model.embed_dim
        if prompt.width != width:
            raise ValueError(f"Block {index}: the {kind} has width {prompt.width}, the {owner} {width}.")
        if prompt.batch not in (None, batch):
            raise ValueError(f"Block {index}: the {kind} is for {prompt.batch} images, the batch has {batch}.")


def _tokens_read(readout: Readout, own: int, length: int) -> slice:
    """Return which tokens of the last block are read: the class token or the injected tokens."""
    if readout != "tokens":
        return slice(0, 1)
    if own == length:
        raise ValueError("No tokens to read out. Inject Tokens, or read out the class token.")
    return slice(own, length)


def _attention_width(attention: Any) -> int:
    return int(attention.num_heads * attention.head_dim)


def _run_block(block: Any, tokens: Tensor, prompt: Prompt | None, read: slice) -> Tensor:
    """Run timm's Block with a prompt, for the tokens that are read `(B, T or fewer, D)`."""
    attended = _attend(block.attn, block.norm1(tokens), prompt, read)  # (B, T or fewer, D)
    return _finish_block(block, tokens[:, read], attended)


def _finish_block(block: Any, tokens: Tensor, attended: Tensor) -> Tensor:
    residual = tokens + block.drop_path1(block.ls1(attended))
    updated: Tensor = residual + block.drop_path2(block.ls2(block.mlp(block.norm2(residual))))
    return updated


def _attend(attention: Any, tokens: Tensor, prompt: Prompt | None, read: slice) -> Tensor:
    """Run timm's Attention with a prefix or a shift of the class token's keys and values."""

    def split_heads(tokens: Tensor) -> Tensor:
        heads = tokens.reshape(*tokens.shape[:2], attention.num_heads, attention.head_dim)
        return heads.transpose(1, 2)  # (B, heads, T, head width)

    def put_before(prefix: Tensor, tokens: Tensor) -> Tensor:
        prefix = split_heads(prefix.to(tokens.dtype).expand(tokens.shape[0], -1, -1))  # (B, heads, P, head width)
        return torch.cat([prefix, tokens], dim=2)  # (B, heads, P + T, head width)

    query, key, value = _project(attention, tokens, read)  # (B, T, W) each
    if isinstance(prompt, ClassTokenShift):
        key, value = _shift_class_token(key, prompt.key), _shift_class_token(value, prompt.value)
    query, key, value = map(split_heads, (query, key, value))
    query, key = attention.q_norm(query), attention.k_norm(key)
    if isinstance(prompt, Prefix):
        key, value = put_before(prompt.key, key), put_before(prompt.value, value)
    mixed = functional.scaled_dot_product_attention(query, key, value, scale=attention.scale)
    mixed = attention.norm(mixed.transpose(1, 2).flatten(2))  # (B, T or fewer, W)
    gate = getattr(attention, "gate", None)  # newer versions of timm only
    if gate is not None:
        mixed = mixed * gate(tokens[:, read]).sigmoid()
    attended: Tensor = attention.proj_drop(attention.proj(mixed))  # (B, T or fewer, D)
    return attended


def _projected(attention: Any, prompt: Prompt) -> Prompt:
    if not isinstance(prompt, Prefix) or not prompt.projected:
        return prompt
    width, weight, bias = _attention_width(attention), attention.qkv.weight, attention.qkv.bias
    key, value = (
        functional.linear(part.to(weight.dtype), weight[rows], None if bias is None else bias[rows])
        for part, rows in ((prompt.key, slice(width, 2 * width)), (prompt.value, slice(2 * width, None)))
    )
    heads = key.unflatten(-1, (attention.num_heads, attention.head_dim))
    return Prefix(attention.k_norm(heads).flatten(-2), value)


def _expanded(prefix: Prompt | None, batch: int) -> tuple[Tensor, Tensor] | None:
    if not isinstance(prefix, Prefix):
        return None
    return prefix.key.expand(batch, -1, -1), prefix.value.expand(batch, -1, -1)


def _embed_patches(projection: nn.Conv2d, images: Tensor, base: Tensor) -> Tensor:
    """Embed patches by a matrix product, which equals a convolution without overlap."""
    from probprompt.kernels.pixels import patches as cut

    rows = cut(images, projection.kernel_size[0], projection.kernel_size[1])  # (B patches, 3 p p)
    patches = functional.linear(rows, projection.weight.flatten(1), projection.bias)
    patches = patches.view(len(images), -1, base.shape[2])  # (B, patches, D)
    tokens = base.new_empty(len(images), *base.shape[1:])  # (B, T, D)
    before = base.shape[1] - patches.shape[1]
    tokens[:, :before] = base[:, :before]
    torch.add(patches, base[:, before:], out=tokens[:, before:])
    return tokens


def _shift_class_token(tokens: Tensor, shift: Tensor) -> Tensor:
    first = tokens[:, :1] + shift.to(tokens.dtype).expand(tokens.shape[0], -1)[:, None]  # (B, 1, W)
    return torch.cat([first, tokens[:, 1:]], dim=1)


def _project(attention: Any, tokens: Tensor, read: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Project to queries (of the tokens that are read), keys and values `(B, T, W)`."""
    if read == slice(None):
        query, key, value = attention.qkv(tokens).chunk(3, dim=-1)
        return query, key, value
    weight, bias = attention.qkv.weight, attention.qkv.bias  # (3 W, D), (3 W): queries, keys, values
    width = _attention_width(attention)
    query = functional.linear(tokens[:, read], weight[:width], None if bias is None else bias[:width])
    both = functional.linear(tokens, weight[width:], None if bias is None else bias[width:])  # (B, T, 2 W)
    key, value = both.chunk(2, dim=-1)
    return query, key, value
