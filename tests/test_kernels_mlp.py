"""The MLP's kernels against PyTorch in float64, gradients by autograd; without a GPU in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from probprompt import randomness
from probprompt.errors import UserError

pytest.importorskip("triton")

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
# The interpreter multiplies the bits of bfloat16 numbers as if they were integers.
HALF = torch.bfloat16 if GPU else torch.float16

Layers = tuple[Tensor, Tensor | None, Tensor, Tensor | None]


def numbers(*shape: int, key: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers by name, rounded to a dtype."""
    return randomness.normal(shape, 0, key).to(DEVICE, dtype)


def layers(width: int, hidden: int, dtype: torch.dtype, bias: bool = True) -> Layers:
    """Weights and biases, so large that the GELU sees all of its bends."""
    weight1, weight2 = numbers(hidden, width, key="weight1"), numbers(width, hidden, key="weight2")
    bias1, bias2 = numbers(hidden, key="bias1", dtype=dtype), 5 * numbers(width, key="bias2", dtype=dtype)
    weight1, weight2 = (2 * weight1 / width**0.5).to(dtype), (weight2 / hidden**0.5).to(dtype)
    return weight1, bias1 if bias else None, weight2, bias2 if bias else None


def plainly(rows: Tensor, given: Layers, grad: Tensor) -> tuple[Tensor, Tensor]:
    """What the MLP gives in float64, and the gradient of the rows."""
    weight1, bias1, weight2, bias2 = (part if part is None else part.double() for part in given)
    assert weight1 is not None
    assert weight2 is not None
    wide = rows.double().requires_grad_()
    result = functional.linear(functional.gelu(functional.linear(wide, weight1, bias1)), weight2, bias2)
    result.backward(grad.double())
    assert wide.grad is not None
    return result.detach(), wide.grad


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """As near as a few roundings allow, where the largest number is 1."""
    assert found.shape == expected.shape
    assert found.dtype == dtype
    assert torch.isfinite(found).all()
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error <= (1e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps), f"{float(error):.2e} apart"


def check(count: int, width: int, hidden: int, dtype: torch.dtype, bias: bool = True) -> None:
    """Both ways against the plain one."""
    from probprompt.kernels.mlp import mlp, mlp_backward

    given = layers(width, hidden, dtype, bias)
    rows, grad = numbers(count, width, key="rows", dtype=dtype), numbers(count, width, key="grad", dtype=dtype)
    expected, expected_grad = plainly(rows, given, grad)
    assert_near(mlp(rows, *given), expected, dtype)
    assert_near(mlp_backward(grad, rows, *given[:3]), expected_grad, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "none"])
@pytest.mark.parametrize(("count", "width"), [(1, 16), (33, 32), (16, 48)])
def test_values_and_gradient(count: int, width: int, bias: bool, dtype: torch.dtype) -> None:
    check(count, width, 4 * width, dtype, bias)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_the_width_of_the_smallest_vit(dtype: torch.dtype) -> None:
    check(9 if dtype == torch.float32 else 67, 192, 768, dtype)


@pytest.mark.parametrize("hidden", [16, 80, 96])
def test_a_hidden_layer_of_another_width(hidden: int) -> None:
    """Chunks get smaller until they divide it."""
    check(20, 48, hidden, HALF)


@pytest.mark.parametrize("width", [192, 256] if GPU else [48])
def test_large_blocks_of_rows(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """How rows are cut and what is held in registers makes no difference."""
    from probprompt.kernels import mlp

    given, rows = layers(width, 4 * width, HALF), numbers(131, width, key="rows", dtype=HALF)
    grad = numbers(131, width, key="grad", dtype=HALF)
    small, small_grad = mlp.mlp(rows, *given), mlp.mlp_backward(grad, rows, *given[:3])
    monkeypatch.setattr(mlp, "FEW", 0)
    assert torch.equal(mlp.mlp(rows, *given), small)
    expected, expected_grad = plainly(rows, given, grad)
    assert_near(small, expected, HALF)
    tuning = mlp.BACKWARD[max(192, width)]
    for held in (0, 1, 2):
        monkeypatch.setattr(mlp, "BACKWARD", {width: tuning._replace(held=held, stages=2)})
        found = mlp.mlp_backward(grad, rows, *given[:3])
        assert_near(found, expected_grad, HALF)
        assert torch.equal(found, small_grad)


def test_a_row_does_not_depend_on_the_others() -> None:
    from probprompt.kernels.mlp import mlp, mlp_backward

    given, rows = layers(16, 64, torch.float32), numbers(5, 16, key="rows")
    grad = numbers(5, 16, key="grad")
    alone = torch.cat([mlp(row[None], *given) for row in rows])
    torch.testing.assert_close(mlp(rows, *given), alone, rtol=0, atol=2e-6)
    pairs = zip(grad, rows, strict=True)
    alone = torch.cat([mlp_backward(gradient[None], row[None], *given[:3]) for gradient, row in pairs])
    torch.testing.assert_close(mlp_backward(grad, rows, *given[:3]), alone, rtol=0, atol=2e-6)


def test_rows_beyond_the_last_are_neither_used_nor_written() -> None:
    from probprompt.kernels import mlp

    weight1, bias1, weight2, bias2 = given = layers(32, 128, torch.float32)
    rows, grad, result, slope = (torch.full((32, 32), torch.nan, device=DEVICE) for _ in range(4))
    rows[:19], grad[:19] = numbers(19, 32, key="rows"), numbers(19, 32, key="grad")
    grid, options = mlp._launch(rows, weight1, mlp.FORWARD)
    mlp._forward[grid](rows, weight1, bias1, weight2, bias2, result, 19, **options)
    mlp._backward[grid](grad, rows, weight1, bias1, weight2, slope, 19, **options)
    for found, expected in zip((result, slope), plainly(rows[:19], given, grad[:19]), strict=True):
        assert_near(found[:19], expected, torch.float32)
        assert found[19:].isnan().all()


def through_gelu(x: Tensor) -> tuple[Tensor, Tensor]:
    """The GELU of numbers (R, 16) and its derivative, by layers that hand each number on as it is."""
    from probprompt.kernels.mlp import mlp, mlp_backward

    unit = torch.eye(32, 16, device=DEVICE)
    across = unit.t().contiguous()
    return mlp(x, unit, None, across, None), mlp_backward(torch.ones_like(x), x, unit, None, across)


def test_gelu_is_exact_to_rounding() -> None:
    """Where the GPU has its own exponential, that is right to 2e-7."""
    x = torch.linspace(-6, 6, 16 * 200, device=DEVICE).view(-1, 16)
    value, slope = (found.double() for found in through_gelu(x))
    wide = x.double()
    share, density = torch.special.ndtr(wide), torch.exp(-wide * wide / 2) / (2 * torch.pi) ** 0.5
    error = 2 * value / wide - 1 - torch.erf(wide / 2**0.5)
    assert error[wide.abs() > 0.01].abs().max() < (4e-7 if GPU else 2e-7)
    assert (slope - share - wide * density).abs().max() < (4e-7 if GPU else 2e-7)


def test_gelu_far_from_zero() -> None:
    far = torch.tensor([0.0, 7, 10, 12, 13, 20, 30, 50, 100, 300, 1e3, 2e3, 5e3, 1e4, 1.5e4, 2e4], device=DEVICE)
    value, slope = through_gelu(torch.stack([far, -far]))
    torch.testing.assert_close(value[0], far, rtol=1e-7, atol=0)
    torch.testing.assert_close(slope[0, 1:], torch.ones(15, device=DEVICE), rtol=0, atol=2e-7)
    assert value[1].abs().max() < 1e-10
    assert slope[1, 1:].abs().max() < 1e-9
    assert slope[0, 0] == pytest.approx(0.5, abs=2e-7)


def test_widths() -> None:
    from probprompt.kernels.mlp import fits

    assert [width for width in range(1, 400) if fits(width)] == [
        *(16, 32, 48, 64, 80, 96, 128, 144, 160, 192, 256),
    ]


def test_what_is_given_must_fit() -> None:
    from probprompt.kernels.mlp import mlp, mlp_backward

    weight1, bias1, weight2, bias2 = layers(32, 128, torch.float32)
    rows = numbers(3, 32, key="rows")
    with pytest.raises(UserError, match="not 384 and 1536"):
        mlp(numbers(3, 384, key="rows"), *layers(384, 1536, torch.float32))
    with pytest.raises(UserError, match="not 32 and 40"):
        mlp(rows, *layers(32, 40, torch.float32))
    with pytest.raises(UserError, match=r"not \(3, 32\), \(128, 32\), \(128, 32\)"):
        mlp(rows, weight1, bias1, weight2.t(), bias2)
    with pytest.raises(UserError, match="one dtype that lie in order"):
        mlp(rows, weight1, bias1, weight2.half(), bias2)
    with pytest.raises(UserError, match=r"contiguous\(\)"):
        mlp_backward(numbers(32, 3, key="grad").t(), rows, weight1, bias1, weight2)
    with pytest.raises(UserError, match="as many rows"):
        mlp_backward(rows[:2], rows, weight1, bias1, weight2)


COMPILE = """
import re, subprocess, sys, torch, triton
from triton.backends.compiler import GPUTarget
from probprompt.kernels import mlp

def build(kernel, table, width, name):
    rows = torch.empty(25216, width, dtype=torch.bfloat16, device="meta")
    _, options = mlp._launch(rows, torch.empty(4 * width, width, device="meta"), table)
    plan = options.pop("plan")
    types = {"count": "i32", "plan": "constexpr"}
    given = {part: types.get(part, "*bf16") for part in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, part in enumerate(given) if given[part][0] == "*"}
    source = triton.compiler.ASTSource(kernel, given, {"plan": plan}, aligned)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert built.metadata.shared <= 227 * 1024, (name, built.metadata.shared)
    assert "wgmma.mma_async" in built.asm["ptx"], name
    with open(sys.argv[1], "wb") as file:
        file.write(built.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    usage = subprocess.run([tool, "-res-usage", sys.argv[1]], capture_output=True, text=True, check=True).stdout
    assert "STACK:0" in usage, (name, usage)

build(mlp._forward, mlp.FORWARD, 192, "forward")
build(mlp._backward, mlp.BACKWARD, 192, "backward")
"""


def test_all_compile_for_a_gpu(tmp_path: Path) -> None:
    """The interpreter runs what the compiler refuses; registers must do, and the tensor cores' own instruction."""
    outside = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment = {**outside, "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILE, str(tmp_path / "kernel.cubin")]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
