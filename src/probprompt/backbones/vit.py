"""A frozen vision transformer that reads out the class token, with or without prompts.

The transformer itself is timm's: the loop here drives timm's own modules and only adds what a prompt injects.
A model that holds anything this loop does not know is refused, so that nothing is left out unnoticed.
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
    "supported are timm's plain VisionTransformer models with a class token, built from Block and Attention "
    "(such as vit_base_patch16_224, vit_small_patch14_dinov2, vit_base_patch16_clip_224)"
)
"""Which models can be frozen here, to be said where another is refused."""
# Every part that the pass below runs, or that plays a role only after it: what is not listed is unknown.
_PARTS: dict[type[nn.Module], set[str]] = {
    VisionTransformer: {"patch_embed", "cls_token", "reg_token", "pos_embed", "pos_drop", "patch_drop"}
    | {"norm_pre", "blocks", "norm", "attn_pool", "fc_norm", "head_drop", "head"},
    PatchEmbed: {"proj", "norm"},
    Block: {"norm1", "attn", "ls1", "drop_path1", "norm2", "mlp", "ls2", "drop_path2"},
    Attention: {"qkv", "q_norm", "k_norm", "attn_drop", "norm", "gate", "proj", "proj_drop"},
}
Precision = Literal["fp32", "bf16"]
"""What the frozen weights are held and computed in."""
DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, eq=False)
class Embedded:
    """Images on their way into the blocks: what a pass without and a pass with prompts share."""

    tokens: Tensor  # (B, T, D)
    qkv: Tensor | None = None  # (B, T, 3 W): queries, keys and values of the first block

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def shape(self) -> torch.Size:
        """Of the tokens: (B, T, D)."""
        return self.tokens.shape


@dataclass(frozen=True, eq=False)
class Fused:
    """What the fused path keeps: the blocks, the last one apart, and the tokens of a black image."""

    blocks: list[vit_blocks.FusedBlock]
    last: vit_blocks.FusedBlock
    base: Tensor  # (1, T, D)


class FrozenViT(nn.Module):
    """A timm vision transformer whose weights never change: images, and prompts to inject, to class tokens.

    It stays in evaluation mode whatever a parent module does, and gradients reach the prompts only.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        refuse_unsupported(model)
        self.model: Any = model.requires_grad_(False)
        self.learns = False
        self._fused: tuple[tuple[torch.device, torch.dtype], Fused | None] | None = None
        self.eval()
        self._compare_with_timm()

    @property
    def width(self) -> int:
        """The number of features (D)."""
        return int(self.model.embed_dim)

    @property
    def depth(self) -> int:
        """The number of blocks."""
        return len(self.model.blocks)

    @property
    def heads(self) -> int:
        """The number of attention heads in a block."""
        return int(self.model.blocks[0].attn.num_heads)

    @property
    def attention_width(self) -> int:
        """The width of a prefix token, all heads together (W): nearly always the same as ``width``."""
        return _attention_width(self.model.blocks[0].attn)

    @property
    def image_size(self) -> int | tuple[int, int]:
        """The side of the images, or (height, width) where they are not square."""
        height, width = self.model.patch_embed.img_size
        return int(height) if height == width else (int(height), int(width))

    def train(self, mode: bool = True) -> "FrozenViT":
        """Stay in evaluation mode: dropout or stochastic depth would make a frozen backbone random."""
        return super().train(False)

    @property
    def precision(self) -> Precision:
        """What the weights are held in."""
        kind = self.model.patch_embed.proj.weight.dtype
        for name, dtype in DTYPES.items():
            if dtype == kind:
                return name
        raise UserError(f"the backbone's weights are {kind}: the engine knows float32 and bfloat16 only")

    def set_precision(self, precision: Precision) -> None:
        """Round the weights."""
        self.model.to(DTYPES[precision])

    def unfreeze(self, learning: bool = True) -> None:
        """Let the weights learn, as full fine-tuning does; those that the pass never uses stay as they are."""
        self.learns = self.learns or learning
        unused = {id(parameter) for parameter in self.model.head.parameters()}
        for parameter in self.model.parameters():
            parameter.requires_grad_(learning and id(parameter) not in unused)

    @torch.no_grad()
    def embed(self, images: Tensor) -> Embedded:
        """What both a query and a prompted pass begin with: computed once, it may be given to either."""
        _check_images(self.model, images)
        fast = self._fast()
        tokens = self._embed(images, fast)
        return Embedded(tokens, fast.blocks[0].project(tokens) if fast and fast.blocks else None)

    @torch.no_grad()
    def query(self, images: Tensor | Embedded, readout: Readout = "class", layers: int = 0) -> Tensor:
        """What is read out without prompts or gradient: (B, 3, H, W) -> (B, D or more), float32."""
        return self.features(images, readout=readout, layers=layers)

    def features(
        self,
        images: Tensor | Embedded,
        prompts: Prompts | None = None,
        readout: Readout = "class",
        layers: int = 0,
    ) -> Tensor:
        """What is read out with prompts injected: (B, 3, H, W) -> (B, D), float32.

        ``class`` is the class token after the final norm, ``class before norm`` what goes into that norm, and
        ``tokens`` the mean of the injected tokens after it. ``layers`` puts readings of so many blocks before the last
        behind it, (B, D + 2 layers D): of each block the class token, then the mean of the patches, both normalised.
        """
        prompts = prompts or {}
        _check_prompts(self.model, prompts, images.shape[0])  # len() would fix the batch of an exported graph
        prompts = {index: _projected(self.model.blocks[index].attn, prompt) for index, prompt in prompts.items()}
        fast = self._fast()
        if isinstance(images, Tensor):
            _check_images(self.model, images)
            images = Embedded(self._embed(images, fast))
        own, block, prompt = images.tokens.shape[1], self.model.blocks[-1], prompts.get(self.depth - 1)
        tokens, mixed, readings = self._run_blocks(images, prompts, fast, readout, layers)  # (B, T, D)
        if isinstance(prompt, Tokens):
            tokens = self._join(tokens, prompt)  # (B, T + P, D)
        # The last block needs the tokens that are not read out as keys and values alone.
        if mixed is None:
            tokens = _run_block(block, tokens, prompt, _read_out(readout, own, tokens.shape[1]))
        else:
            tokens = _finish_block(block, tokens[:, None], block.attn.proj(mixed)[:, None])  # (B, 1, D)
        if readout != "class before norm":
            tokens = self.model.norm(tokens)
        feature = tokens.float().mean(dim=1)  # (B, D)
        return torch.cat([feature, *readings], dim=1) if readings else feature

    def _run_blocks(
        self, images: Embedded, prompts: Prompts, fast: Fused | None, readout: Readout, layers: int
    ) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """All blocks but the last (B, T, D); those that the fused path knows, many at a time.

        Where that path knows the last one, too: the class token before it (B, D) and what it mixes for it (B, W). At
        last the readings (B, D) of the last ``layers`` of these blocks.
        """
        tokens, index, mixed, readings = images.tokens, 0, None, list[Tensor]()
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
                readings += self._read(tokens, images.tokens.shape[1])
        return tokens, mixed, readings

    def _read(self, tokens: Tensor, own: int) -> tuple[Tensor, Tensor]:
        """The class token and the mean of the patches (B, D) of the tokens behind a block, normalised each."""
        tokens = tokens.float()
        read = tokens[:, 0], tokens[:, self.model.num_prefix_tokens : own].mean(dim=1)
        shape = tokens.shape[2:]
        return functional.layer_norm(read[0], shape), functional.layer_norm(read[1], shape)

    def _fast(self) -> Fused | None:
        """The fused path where it can be taken: frozen plain blocks, in 16 bits, on a GPU that runs the kernels."""
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
        """Put tokens behind the sequence: their place in it means nothing to attention."""
        added = prompt.tokens.to(tokens.dtype).expand(tokens.shape[0], -1, -1)  # (B, P, D)
        position = self.model.pos_embed
        if prompt.positioned and position is not None and not self.model.no_embed_class:
            added = added + position[:, :1]
        return torch.cat([tokens, added], dim=1)  # (B, T + P, D)

    def fingerprint(self) -> str:
        """SHA-256 over all weights: the same before and after training, to the bit."""
        return fingerprint(self.model)

    def _embed(self, images: Tensor, fast: Fused | None) -> Tensor:
        """Tokens (B, T, D), the class token first."""
        images = images.to(self.model.patch_embed.proj.weight.dtype)
        if fast is None:
            tokens = self.model._pos_embed(self.model.patch_embed(images))
        else:
            tokens = _embed_patches(self.model.patch_embed.proj, images, fast.base)
        embedded: Tensor = self.model.norm_pre(self.model.patch_drop(tokens))
        return embedded

    @torch.no_grad()
    def _compare_with_timm(self) -> None:
        """Refuse a model whose own pass gives something else, say because of a hook or a mixing layer."""
        weight = self.model.patch_embed.proj.weight
        shape = torch.Size([1, weight.shape[1], *self.model.patch_embed.img_size])
        image = torch.arange(shape.numel(), device=weight.device).sin().view(shape).to(weight.dtype)
        timms = self.model.forward_features(image)[:, 0].float()  # (1, D)
        error = float((self.features(image) - timms).norm() / timms.norm())
        # Rounding stays far below the bound, a forgotten layer far above it, and NaN is not below it either.
        if not error < (1e-2 if weight.dtype == torch.float32 else 1e-1):
            raise UserError(
                f"the class token of this model differs from timm's own by {error:.1e} of it: its weights "
                f"are not finite, or hooks or layers unknown here change what it computes; {SUPPORTED}"
            )


def fingerprint(module: nn.Module) -> str:
    """SHA-256 over the parameters and buffers of a module, in the order of their names."""
    digest = hashlib.sha256()
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def refuse_unsupported(model: nn.Module) -> None:
    """Raise a UserError that says what was found where the model is no plain ViT with a class token."""
    _refuse_unknown_parts(model, VisionTransformer, "the model")
    vit: Any = model  # the attributes of timm's modules have no types
    _refuse_unknown_parts(vit.patch_embed, PatchEmbed, "the patch embedding")
    if vit.cls_token is None:
        raise UserError(f"the model has no class token (its pooling is {vit.global_pool!r}); {SUPPORTED}")
    if not isinstance(vit.fc_norm, nn.Identity):
        raise UserError(
            f"the final norm of the model is for pooled patches, not for its class token (fc_norm, pooling "
            f"{vit.global_pool!r}); {SUPPORTED}"
        )
    if len(vit.blocks) == 0:
        raise UserError(f"the model has no blocks; {SUPPORTED}")
    for index, block in enumerate(vit.blocks):
        _refuse_unknown_parts(block, Block, f"block {index}")
        _refuse_unknown_parts(block.attn, Attention, f"the attention of block {index}")
        if type(block.attn.qkv) is not nn.Linear:  # slicing its rows would go past an adapter around it
            raise UserError(f"block {index}: qkv is a {_kind(block.attn.qkv)}, not a Linear; {SUPPORTED}")


def _refuse_unknown_parts(module: nn.Module, expected: type[nn.Module], where: str) -> None:
    if type(module) is not expected:
        raise UserError(f"{where} is a {_kind(module)}, not a {expected.__name__}; {SUPPORTED}")
    parts = {name for name, _ in module.named_children()}
    parts |= {name for name, _ in module.named_parameters(recurse=False)}
    parts |= {name for name, _ in module.named_buffers(recurse=False)}
    unknown = sorted(parts - _PARTS[expected])
    if unknown:
        raise UserError(f"{where} holds parts that are not known here: {', '.join(unknown)}; {SUPPORTED}")


def _kind(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__name__}"


def _check_images(model: Any, images: Tensor) -> None:
    size, shape = tuple(model.patch_embed.img_size), tuple(images.shape)
    if len(shape) != 4 or not images.is_floating_point():
        raise ValueError(f"images are normalised floats (B, 3, H, W), got {images.dtype} of shape {shape}")
    if not model.dynamic_img_size and shape[2:] != size:
        raise ValueError(f"the backbone takes images of (H, W) = {size}, got {shape[2:]}")


def _check_prompts(model: Any, prompts: Prompts, batch: int) -> None:
    for index, prompt in prompts.items():
        if index not in range(len(model.blocks)):
            raise ValueError(f"no block {index!r} to prompt: the backbone has 0 to {len(model.blocks) - 1}")
        kind = type(prompt).__name__
        if not isinstance(prompt, Prefix | Tokens | ClassTokenShift):
            raise TypeError(f"block {index}: a prompt is a Prefix, Tokens or a ClassTokenShift, got a {kind}")
        what, width = "attention", _attention_width(model.blocks[index].attn)
        if isinstance(prompt, Tokens) or (isinstance(prompt, Prefix) and prompt.projected):
            what, width = "backbone", model.embed_dim
        if prompt.width != width:
            raise ValueError(f"block {index}: the {kind} has width {prompt.width}, the {what} {width}")
        if prompt.batch not in (None, batch):
            raise ValueError(f"block {index}: the {kind} is for {prompt.batch} images, the batch has {batch}")


def _read_out(readout: Readout, own: int, length: int) -> slice:
    """Which tokens of the last block are read: the class token, first, or those that joined, last."""
    if readout != "tokens":
        return slice(0, 1)
    if own == length:
        raise ValueError("no tokens were injected that could be read out: only Tokens can be, or the class token")
    return slice(own, length)


def _attention_width(attention: Any) -> int:
    return int(attention.num_heads * attention.head_dim)


def _run_block(block: Any, tokens: Tensor, prompt: Prompt | None, read: slice) -> Tensor:
    """Run timm's Block with a prompt in its attention, for the tokens that are read: (B, T or fewer, D)."""
    attended = _attend(block.attn, block.norm1(tokens), prompt, read)  # (B, T or fewer, D)
    return _finish_block(block, tokens[:, read], attended)


def _finish_block(block: Any, tokens: Tensor, attended: Tensor) -> Tensor:
    """What timm's Block does after its attention, for tokens (B, T or fewer, D)."""
    residual = tokens + block.drop_path1(block.ls1(attended))
    updated: Tensor = residual + block.drop_path2(block.ls2(block.mlp(block.norm2(residual))))
    return updated


def _attend(attention: Any, tokens: Tensor, prompt: Prompt | None, read: slice) -> Tensor:
    """Run timm's Attention with a prefix before its keys and values, or the class token's shifted."""

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
    """Send a prefix that is still to be projected through the attention's own weights."""
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
    """The prefix's keys and values, (B, P, W) each."""
    if not isinstance(prefix, Prefix):
        return None
    return prefix.key.expand(batch, -1, -1), prefix.value.expand(batch, -1, -1)


def _embed_patches(projection: nn.Conv2d, images: Tensor, base: Tensor) -> Tensor:
    """Patches by one product, which is what a convolution without overlap is, put behind the other tokens of base."""
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
    """Add to the first token of each sequence (B, T, W)."""
    first = tokens[:, :1] + shift.to(tokens.dtype).expand(tokens.shape[0], -1)[:, None]  # (B, 1, W)
    return torch.cat([first, tokens[:, 1:]], dim=1)


def _project(attention: Any, tokens: Tensor, read: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Project to queries, keys and values, each (B, T, W); queries only of the tokens that are read."""
    if read == slice(None):
        query, key, value = attention.qkv(tokens).chunk(3, dim=-1)
        return query, key, value
    weight, bias = attention.qkv.weight, attention.qkv.bias  # (3 W, D), (3 W): queries, keys, values
    width = _attention_width(attention)
    query = functional.linear(tokens[:, read], weight[:width], None if bias is None else bias[:width])
    both = functional.linear(tokens, weight[width:], None if bias is None else bias[width:])  # (B, T, 2 W)
    key, value = both.chunk(2, dim=-1)
    return query, key, value
