"""Floating-point operations of a pass through the backbone, counted from its shape.

Counted are the matrix products, two operations for each multiplication with its addition: what a machine's matrix
peak is measured in. Norms, activations, softmax, the head and a method's own arithmetic are left out: together they are
about a hundredth of a pass. The count is nominal: what passes share is counted in each, and what a kernel computes a
second time to save memory is not counted. The last block counts the tokens that are read out alone, as the engine
computes it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

from torch import nn

from probprompt.backbone import FrozenViT
from probprompt.prompts import Prefix, Prompts, Readout, Tokens


@dataclass(frozen=True)
class ViTShape:
    """What of a vision transformer decides the count."""

    depth: int
    width: int  # D
    attention_width: int  # W, all heads together
    tokens: int  # T: patches, the class token and registers
    patches: int
    patch_inputs: int  # numbers in a patch: 3 p p
    mlp_weights: int  # of one block
    gated: bool = False  # whether a block's attention has an output gate

    @classmethod
    def of(cls, backbone: FrozenViT) -> Self:
        """Read it from a backbone."""
        model: Any = backbone.model
        block, patch = model.blocks[0], model.patch_embed
        layers = [layer for layer in block.mlp.modules() if isinstance(layer, nn.Linear)]
        return cls(
            depth=backbone.depth,
            width=backbone.width,
            attention_width=backbone.attention_width,
            tokens=int(patch.num_patches + model.num_prefix_tokens),
            patches=int(patch.num_patches),
            patch_inputs=int(patch.proj.weight[0].numel()),
            mlp_weights=sum(layer.weight.numel() for layer in layers),
            gated=getattr(block.attn, "gate", None) is not None,
        )


@dataclass(frozen=True)
class Count:
    """Operations for one image."""

    query: int
    """The pass without prompts; 0 where the method asks for none."""
    prompted: int
    """The pass with prompts (or without, for a method that has none)."""
    backward: int
    """The way back from the features to the prompts, through frozen weights."""
    draws: int = 1
    """How many passes with prompts a prediction takes the mean of."""
    looks: int = 1
    """How many views of an image it looks at."""

    @property
    def passes(self) -> int:
        """How many passes a prediction takes."""
        return self.looks * (bool(self.query) + self.draws)

    @property
    def inference(self) -> int:
        """What a prediction costs."""
        return self.looks * (self.query + self.draws * self.prompted)

    @property
    def training(self) -> int:
        """What a training step costs per image."""
        return self.query + self.prompted + self.backward


@dataclass(frozen=True)
class _Block:
    """Operations of the parts of one block, forward."""

    index: int
    projections: int  # to queries, keys and values
    attention: int  # two products: queries with keys, weights with values
    behind: int  # the output projection, the gate and the perceptron


def _blocks(shape: ViTShape, prompts: Prompts, readout: Readout) -> Iterator[_Block]:
    width, inner, tokens = shape.width, shape.attention_width, shape.tokens
    for index in range(shape.depth):
        prompt = prompts.get(index)
        tokens += prompt.length if isinstance(prompt, Tokens) else 0
        seen = tokens + (prompt.length if isinstance(prompt, Prefix) else 0)
        read = tokens
        if index == shape.depth - 1:
            read = tokens - shape.tokens if readout == "tokens" else 1
        layers = width * inner * (2 if shape.gated else 1) + shape.mlp_weights
        yield _Block(
            index=index,
            projections=2 * width * inner * (read + 2 * tokens),
            attention=2 * 2 * inner * read * seen,
            behind=2 * layers * read,
        )


def _embedding(shape: ViTShape) -> int:
    return 2 * shape.patches * shape.patch_inputs * shape.width


def forward(shape: ViTShape, prompts: Prompts | None = None, readout: Readout = "class") -> int:
    """Operations of a pass over one image with these prompts."""
    blocks = _blocks(shape, prompts or {}, readout)
    return _embedding(shape) + sum(block.projections + block.attention + block.behind for block in blocks)


def backward(shape: ViTShape, prompts: Prompts | None = None, readout: Readout = "class", learns: bool = False) -> int:
    """Operations of the way back for one image.

    Frozen weights get no gradient, so a product costs as much on the way back as forward, and not twice; attention,
    whose both factors get one, costs twice its two products. Nothing is done before the first prompted block, and in it
    a prefix needs neither the gradient of the queries nor that of the block's input. ``learns`` counts a backbone that
    is trained: every weight's gradient too, from the patches on.
    """
    prompts = prompts or {}
    if not prompts and not learns:
        return 0
    first = 0 if learns else min(prompts)
    total = _embedding(shape) if learns else 0
    for block in _blocks(shape, prompts, readout):
        if block.index < first:
            continue
        only_prompt = block.index == first and not learns and not isinstance(prompts[first], Tokens)
        layers = block.behind + (0 if only_prompt else block.projections)
        products = 3 if only_prompt else 4
        total += layers * (2 if learns else 1) + block.attention * products // 2
    return total


def flops(
    backbone: FrozenViT,
    prompts: Prompts | None = None,
    query: bool = True,
    readout: Readout = "class",
    learns: bool = False,
) -> Count:
    """Count the operations for one image: the query pass, the pass with these prompts, and the way back.

    ``query`` says whether the method asks for a query, ``learns`` whether the backbone itself is trained.
    """
    shape = ViTShape.of(backbone)
    return Count(
        query=forward(shape) if query else 0,
        prompted=forward(shape, prompts, readout),
        backward=backward(shape, prompts, readout, learns),
    )
