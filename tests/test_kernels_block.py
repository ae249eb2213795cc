"""The kernels of a frozen block against PyTorch's own functions in float64, gradients by autograd.

They run on a GPU or, without one, in Triton's interpreter.
"""

import math
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernel_helpers import DEVICE, GPU, HALF, assert_near, compile_for_a_gpu, numbers
from probprompt.errors import UserError

pytest.importorskip("triton")

from probprompt.kernels.attention import attention, attention_backward
from probprompt.kernels.pointwise import add_norm, norm_backward


def precision(dtype: torch.dtype) -> float:
    """How far numbers of this dtype may be off after a handful of roundings."""
    return 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps


COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from probprompt.kernels import attention, pointwise

def build(kernel, tuning=None, exact=(), **fixed):
    types = {"scale": "fp32", "eps": "fp32", "count": "i32", **dict.fromkeys(exact, "*fp32")}
    given = {name: "constexpr" if name in fixed else types.get(name, "*bf16") for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(given) if given[name][0] == "*"}
    options = {"num_warps": 4} if tuning is None else attention._options(tuning)
    source = triton.compiler.ASTSource(kernel, given, places, aligned)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert built.metadata.shared <= 227 * 1024, (kernel.__name__, built.metadata.shared)
    return "wgmma.mma_async" in built.asm["ptx"]

single = ("mean", "rstd", "logsumexp", "delta", "result_key", "result_value")
block = {"width": 192, "rows": 8, "columns": 256}
build(pointwise._add_norm, None, single, **block, update=None)
build(pointwise._norm_backward, None, single, **block)
qkv = torch.empty(8, 197, 3 * 768, dtype=torch.bfloat16, device="meta")
prefix = (torch.empty(8, 4, 768, dtype=torch.bfloat16, device="meta"),) * 2
for table, kernel, own in (
    (attention.FORWARD, attention._forward, None),
    (attention.QUERIES_BACKWARD, attention._queries_backward, None),
    (attention.KEYS_BACKWARD, attention._keys_backward, True),
    (attention.PREFIX_BACKWARD, attention._keys_backward, False),
):
    tuning = attention._tuning(table, qkv, 12)
    plan = attention._plan(qkv, 12, prefix, tuning)
    fixed = {"plan": plan} if own is None else {"plan": attention._keys_plan(plan, own), "own": own}
    assert build(kernel, tuning, single, **fixed) == (own is not False), (kernel.__name__, own)
"""


def test_all_compile_for_a_gpu(tmp_path: Path) -> None:
    """Products must reach the tensor cores' own instruction."""
    compile_for_a_gpu(COMPILE, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("added", [True, False], ids=["added", "alone"])
@pytest.mark.parametrize(("rows", "width"), [(13, 192), (3, 70), (2, 1030)])
def test_add_norm(rows: int, width: int, added: bool, dtype: torch.dtype) -> None:
    x = 3 + numbers(rows, width, key="x", dtype=dtype)
    update = numbers(rows, width, key="update", dtype=dtype) if added else None
    weight, bias = numbers(width, key="weight"), numbers(width, key="bias")
    total, normed, mean, rstd = add_norm(x, update, weight, bias, 1e-3)

    expected = x if update is None else x + update  # both round the same sum
    assert torch.equal(total, expected)
    assert (total is x) == (update is None)
    wide = expected.double()
    assert normed.dtype == dtype
    assert_near(normed, functional.layer_norm(wide, (width,), weight.double(), bias.double(), 1e-3), precision(dtype))
    assert mean.dtype == rstd.dtype == torch.float32
    assert_near(mean, wide.mean(1), 1e-6)
    assert_near(rstd, (wide.var(1, correction=0) + 1e-3).rsqrt(), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("residual", [True, False], ids=["residual", "alone"])
@pytest.mark.parametrize(("rows", "width"), [(13, 192), (3, 70), (2, 1030)])
def test_norm_backward(rows: int, width: int, residual: bool, dtype: torch.dtype) -> None:
    x, grad = 3 + numbers(rows, width, key="x", dtype=dtype), numbers(rows, width, key="grad", dtype=dtype)
    weight, bias = numbers(width, key="weight"), numbers(width, key="bias")
    beside = numbers(rows, width, key="residual", dtype=dtype) if residual else None
    _, _, mean, rstd = add_norm(x, None, weight, bias, 1e-3)
    found = norm_backward(grad, x, weight, mean, rstd, beside)

    wide = x.double().requires_grad_()
    functional.layer_norm(wide, (width,), weight.double(), bias.double(), 1e-3).backward(grad.double())
    assert wide.grad is not None
    expected = wide.grad if beside is None else wide.grad + beside.double()
    assert found.dtype == dtype
    assert_near(found, expected, precision(dtype))


def test_a_row_of_equal_numbers_has_a_norm_and_a_gradient() -> None:
    x, weight, bias = torch.full((2, 24), 7.0, device=DEVICE), numbers(24, key="weight"), numbers(24, key="bias")
    _, normed, mean, rstd = add_norm(x, None, weight, bias, 1e-2)
    assert_near(normed, bias.double().expand(2, 24), 1e-4)
    assert_near(rstd, torch.full((2,), 10.0, device=DEVICE, dtype=torch.float64), 1e-6)
    assert torch.isfinite(norm_backward(x, x, weight, mean, rstd, None)).all()


def test_rows_too_wide_are_refused() -> None:
    wide = torch.zeros(1, 4097, device=DEVICE)
    with pytest.raises(UserError, match=r"up to 4096, got 4097.*KERNELS=off"):
        add_norm(wide, None, wide[0], wide[0], 1e-6)


class Case(NamedTuple):
    """Sizes of an attention. In float32 blocks have 32 rows, else 64 and more."""

    images: int
    length: int
    heads: int
    head: int
    prefix: int = 0
    dtype: torch.dtype = torch.float32

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.head)


CASES = {
    "less than a block": Case(2, 5, 2, 16),
    "blocks and some more, odd head": Case(1, 70, 2, 24, prefix=3),
    "whole blocks": Case(1, 64, 1, 16),
    "whole blocks and a prefix": Case(2, 32, 1, 64, prefix=4),
    "two blocks left over": Case(2, 31, 1, 16, prefix=4),
    "half": Case(1, 70, 2, 64, prefix=2, dtype=HALF),
    "half, short": Case(2, 20, 3, 16, prefix=1, dtype=HALF),
    "half, wide head": Case(1, 9, 1, 80, dtype=HALF),
}
if GPU:
    CASES |= {
        "ViT-B/16": Case(8, 197, 12, 64, prefix=4, dtype=HALF),
        "ViT-B/16 without prefix": Case(8, 197, 12, 64, dtype=HALF),
        "long": Case(2, 577, 2, 128, prefix=20, dtype=HALF),
        "long, single": Case(2, 577, 2, 64, prefix=20),
        "ViT-B/32": Case(8, 50, 12, 64, prefix=4, dtype=HALF),
    }
PREFIXED = [name for name, case in CASES.items() if case.prefix]


class Inputs(NamedTuple):
    grad: Tensor
    qkv: Tensor
    prefix: tuple[Tensor, Tensor] | None


Outcome = dict[str, Tensor]


def named(mixed: Tensor, logsumexp: Tensor, qkv: Tensor | None, key: Tensor | None, value: Tensor | None) -> Outcome:
    """What attention and its gradients gave, by name: those of the packed projection part by part."""
    parts = zip(("queries", "keys", "values"), (None,) * 3 if qkv is None else qkv.chunk(3, 2), strict=True)
    found = {"mixed": mixed, "logsumexp": logsumexp, **dict(parts), "prefix key": key, "prefix value": value}
    return {name: part for name, part in found.items() if part is not None}


def inputs(case: Case) -> Inputs:
    """A prefix is two halves of one tensor in single precision: its rows don't lie in order, and it is rounded late."""
    width = case.heads * case.head
    grad = numbers(case.images, case.length, width, key="grad", dtype=case.dtype)
    qkv = numbers(case.images, case.length, 3 * width, key="qkv", dtype=case.dtype)
    both = numbers(case.images, 2 * case.prefix, width, key="prefix", dtype=case.dtype).float()
    return Inputs(grad, qkv, (both[:, : case.prefix], both[:, case.prefix :]) if case.prefix else None)


def run(case: Case, given: Inputs, scale: float, own: bool = True) -> Outcome:
    """By the kernels."""
    mixed, logsumexp = attention(given.qkv, case.heads, scale, given.prefix)
    back = attention_backward(given.grad, given.qkv, mixed, logsumexp, case.heads, scale, given.prefix, own)
    return named(mixed, logsumexp, *back)


def reference(case: Case, given: Inputs, scale: float) -> Outcome:
    """By PyTorch in float64, from the same rounded numbers."""
    qkv = given.qkv.double().requires_grad_()
    prefix = [part.double().requires_grad_() for part in given.prefix or ()]
    query, *rest = qkv.unflatten(2, (3, case.heads, case.head)).permute(2, 0, 3, 1, 4)  # (B, heads, T, head) each
    if prefix:
        before = [part.unflatten(2, (case.heads, case.head)).transpose(1, 2) for part in prefix]
        rest = [torch.cat(pair, 2) for pair in zip(before, rest, strict=True)]
    key, value = rest
    mixed = functional.scaled_dot_product_attention(query, key, value, scale=scale).transpose(1, 2).flatten(2)
    mixed.backward(given.grad.double())
    logsumexp = (query @ key.mT * scale).logsumexp(3) / math.log(2)
    key_grad, value_grad = [part.grad for part in prefix] or (None, None)
    return named(mixed.detach(), logsumexp.detach(), qkv.grad, key_grad, value_grad)


@cache
def outcome(name: str) -> tuple[Outcome, Outcome]:
    """What the kernels say and what is right: a run takes the interpreter a while."""
    case = CASES[name]
    given = inputs(case)
    return run(case, given, case.scale), reference(case, given, case.scale)


@pytest.mark.parametrize("name", CASES)
def test_attention_and_its_gradients(name: str) -> None:
    case, (found, expected) = CASES[name], outcome(name)
    assert found.keys() == expected.keys() and found["mixed"].is_contiguous()
    for part, right in expected.items():
        assert found[part].dtype == (torch.float32 if part.split()[0] in ("logsumexp", "prefix") else case.dtype)
        assert_near(found[part], right, 1e-5 if part == "logsumexp" else precision(case.dtype))


@pytest.mark.parametrize("name", [*PREFIXED, "less than a block"])
def test_the_gradient_of_the_prefix_alone_or_none(name: str) -> None:
    case, (found, expected) = CASES[name], outcome(name)
    alone = run(case, inputs(case), case.scale, own=False)
    prefix = ["prefix key", "prefix value"] if case.prefix else []
    assert list(alone) == ["mixed", "logsumexp", *prefix]
    for part in prefix:
        assert_near(alone[part], expected[part], precision(case.dtype))
        assert_near(alone[part], found[part].double(), precision(case.dtype))


def test_a_shared_prefix_is_read_in_place() -> None:
    case = Case(3, 7, 2, 16, prefix=2)
    given = inputs(case)
    assert given.prefix is not None
    # Only the keys are shared, and the values part of something wider: each has strides of its own.
    given = given._replace(prefix=(given.prefix[0][:1].expand(3, -1, -1), given.prefix[1].repeat(1, 1, 2)[..., :32]))
    found, expected = run(case, given, case.scale), reference(case, given, case.scale)
    for part, right in expected.items():
        assert_near(found[part], right, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_large_logits_stay_finite(dtype: torch.dtype) -> None:
    case = Case(1, 5, 1, 16, prefix=1, dtype=dtype)
    given = inputs(case)
    found, expected = run(case, given, 50.0), reference(case, given, 50.0)
    assert float(expected["logsumexp"].abs().max()) > 300  # no exponential of this fits float32
    for part, right in expected.items():
        # Weights are nearly 0 and 1 here, and most gradients vanish: measure against the gradient that comes in.
        assert torch.isfinite(found[part]).all()
        assert float((found[part].double() - right).abs().max()) <= 50 * precision(dtype) * float(right.abs().max() + 1)


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")  # of padded keys' gradients, which go nowhere
def test_only_low_logits_leave_padded_keys_without_weight() -> None:
    """Rows that are padding give logit 0: beside keys at -400 each of them would outweigh all."""
    case = Case(1, 5, 1, 16)
    given = inputs(case)
    packed = torch.cat([torch.full((1, 5, 16), 5.0), torch.full((1, 5, 16), -5.0), torch.zeros(1, 5, 16)], 2).to(DEVICE)
    given = given._replace(qkv=packed + 0.01 * given.qkv)
    found, expected = run(case, given, 1.0), reference(case, given, 1.0)
    assert float(expected["logsumexp"].max()) < -300
    assert_near(found["mixed"], expected["mixed"], 1e-4)
    ours, right = (torch.cat([one[part] for part in ("queries", "keys", "values")], 2) for one in (found, expected))
    assert_near(ours, right, 1e-3)


@pytest.mark.parametrize("name", ["two blocks left over", *(["ViT-B/16"] if GPU else [])])
def test_every_run_gives_the_same_bits(name: str) -> None:
    case = CASES[name]
    again = run(case, inputs(case), case.scale)
    assert all(torch.equal(part, again[name]) for name, part in outcome(name)[0].items())


def test_what_the_kernel_cannot_read_is_refused() -> None:
    packed, turned = torch.zeros(1, 4, 96, device=DEVICE), torch.zeros(1, 32, 2, device=DEVICE).mT
    with pytest.raises(UserError, match="cannot split 480 columns"):
        attention(torch.zeros(1, 4, 480, device=DEVICE), 1, 1.0)
    with pytest.raises(UserError, match="cannot split 100 columns"):
        attention(torch.zeros(1, 4, 100, device=DEVICE), 2, 1.0)
    with pytest.raises(UserError, match="contiguous"):
        attention(packed[:, :1].expand(4, 2, 96), 2, 1.0)
    with pytest.raises(UserError, match="positive"):
        attention(packed, 2, 0.0)
    with pytest.raises(UserError, match="contiguous"):
        attention(packed, 2, 1.0, (turned, turned))
