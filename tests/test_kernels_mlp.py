"""The MLP's kernels against PyTorch in float64, gradients by autograd; without a GPU in Triton's interpreter."""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernel_helpers import DEVICE, GPU, HALF, compile_for_a_gpu, numbers
from kernel_helpers import assert_near as assert_nearer
from probprompt.errors import UserError

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from probprompt.kernels import mlp  # noqa: E402

Layers = tuple[Tensor, Tensor | None, Tensor, Tensor | None]
EPS = 1e-3


def rows_of(count: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, what is added to them, and a gradient."""
    before, update = 1 + numbers(count, width, key="before"), numbers(count, width, key="update")
    return before.to(dtype), update.to(dtype), numbers(count, width, key="grad", dtype=dtype)


def norm_of(width: int, dtype: torch.dtype) -> mlp.Norm:
    """A norm all of whose parts matter."""
    weight, bias = 1 + 0.4 * numbers(width, key="norm"), 0.5 * numbers(width, key="shift")
    return weight.to(dtype), bias.to(dtype), EPS


def layers(width: int, hidden: int, dtype: torch.dtype, bias: bool = True) -> Layers:
    """Weights and biases, so large that the GELU sees all of its bends."""
    weight1, weight2 = numbers(hidden, width, key="weight1"), numbers(width, hidden, key="weight2")
    bias1, bias2 = numbers(hidden, key="bias1", dtype=dtype), 5 * numbers(width, key="bias2", dtype=dtype)
    weight1, weight2 = (2 * weight1 / width**0.5).to(dtype), (weight2 / hidden**0.5).to(dtype)
    return weight1, bias1 if bias else None, weight2, bias2 if bias else None


def plainly(middle: Tensor, norm: mlp.Norm, given: Layers, grad: Tensor) -> tuple[Tensor, Tensor]:
    """What comes after the MLP in float64, and the gradient of what comes before it."""
    weight1, bias1, weight2, bias2 = (part if part is None else part.double() for part in given)
    assert weight1 is not None and weight2 is not None
    wide = middle.double().requires_grad_()
    normed = functional.layer_norm(wide, wide.shape[1:], norm[0].double(), norm[1].double(), norm[2])
    result = wide + functional.linear(functional.gelu(functional.linear(normed, weight1, bias1)), weight2, bias2)
    result.backward(grad.double())
    assert wide.grad is not None
    return result.detach(), wide.grad


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """As near as a few roundings allow, where the largest number is 1."""
    assert found.dtype == dtype
    assert_nearer(found, expected, 1e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps)


def check(count: int, width: int, hidden: int, dtype: torch.dtype, bias: bool = True, following: bool = False) -> None:
    """Both ways against the plain one, and the next norm if it comes along."""
    norm, given = norm_of(width, dtype), layers(width, hidden, dtype, bias)
    before, update, grad = rows_of(count, width, dtype)
    weight, shift, eps = 1 - norm[1], norm[0], 10 * EPS
    middle, after, normed = mlp.mlp(before, update, norm, *given, (weight, shift, eps) if following else None)
    assert torch.equal(middle, before + update)
    expected, expected_grad = plainly(middle, norm, given, grad)
    assert_near(after, expected, dtype)
    assert_near(mlp.mlp_backward(grad, middle, norm, *given[:3]), expected_grad, dtype)
    assert (normed is not None) == following
    if normed is not None:
        wide = after.double()
        assert_near(normed[0], functional.layer_norm(wide, (width,), weight.double(), shift.double(), eps), dtype)
        torch.testing.assert_close(normed[1].double(), wide.mean(dim=1), rtol=1e-4, atol=1e-5)
        spread = (wide.var(dim=1, correction=0) + eps).rsqrt()
        torch.testing.assert_close(normed[2].double(), spread, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("following", [True, False], ids=["norm", "none"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "none"])
@pytest.mark.parametrize(("count", "width"), [(1, 16), (33, 32), (19, 48)])
def test_values_gradient_and_next_norm(count: int, width: int, bias: bool, following: bool, dtype: torch.dtype) -> None:
    check(count, width, 4 * width, dtype, bias, following)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_the_width_of_the_smallest_vit(dtype: torch.dtype) -> None:
    """More rows than a block has, with the next norm."""
    check(19 if dtype == torch.float32 else 67, 192, 768, dtype, following=True)


@pytest.mark.parametrize("hidden", [16, 80, 96])
def test_a_hidden_layer_of_another_width(hidden: int) -> None:
    """Chunks get smaller until they divide it."""
    check(20, 48, hidden, HALF)


def test_the_norm_is_of_the_rounded_sum() -> None:
    """Rows so far from zero that the sum rounds to whole numbers, which changes what the norm makes of them."""
    norm, (weight1, bias1, weight2, bias2) = norm_of(32, HALF), layers(32, 128, HALF)
    given = weight1, bias1, 500 * weight2, bias2
    _, update, grad = rows_of(8, 32, HALF)
    middle, after, _ = mlp.mlp(torch.full_like(update, 1.5 / torch.finfo(HALF).eps), update, norm, *given)
    assert torch.equal(middle, middle.round())
    expected, expected_grad = plainly(middle, norm, given, grad)
    assert_near(after, expected, HALF)
    assert_near(mlp.mlp_backward(grad, middle, norm, *given[:3]), expected_grad, HALF)


@pytest.mark.parametrize("width", [192, 256] if GPU else [48])
def test_large_blocks_of_rows(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """How rows are cut and what is held in registers makes no difference."""
    norm, given = norm_of(width, HALF), layers(width, 4 * width, HALF)
    before, update, grad = rows_of(131, width, HALF)
    middle, small, _ = mlp.mlp(before, update, norm, *given)
    small_grad = mlp.mlp_backward(grad, middle, norm, *given[:3])
    expected, expected_grad = plainly(middle, norm, given, grad)
    assert_near(small, expected, HALF)
    monkeypatch.setattr(mlp, "FEW", 0)
    monkeypatch.setattr(mlp, "FORWARD", {width: mlp.Tuning(128, 32, 8, 2)})
    large_middle, large, _ = mlp.mlp(before, update, norm, *given)
    assert torch.equal(large_middle, middle)
    assert_near(large, expected, HALF)
    for held in (0, 1, 2):
        monkeypatch.setattr(mlp, "BACKWARD", {width: mlp.Tuning(128, 32, 8, 2, held)})
        found = mlp.mlp_backward(grad, middle, norm, *given[:3])
        assert_near(found, expected_grad, HALF)
        assert_near(found, small_grad.double(), HALF)


def test_the_same_twice() -> None:
    norm, given = norm_of(48, HALF), layers(48, 192, HALF)
    before, update, grad = rows_of(70 if GPU else 20, 48, HALF)
    middle, after, _ = mlp.mlp(before, update, norm, *given)
    assert torch.equal(mlp.mlp(before, update, norm, *given)[1], after)
    back = mlp.mlp_backward(grad, middle, norm, *given[:3])
    assert torch.equal(mlp.mlp_backward(grad, middle, norm, *given[:3]), back)


def test_a_row_does_not_depend_on_the_others() -> None:
    norm, given = norm_of(16, torch.float32), layers(16, 64, torch.float32)
    before, update, grad = (part[:, None] for part in rows_of(5, 16, torch.float32))  # (5, 1, 16)
    middle, after, _ = mlp.mlp(before[:, 0], update[:, 0], norm, *given)
    alone = torch.cat([mlp.mlp(row, more, norm, *given)[1] for row, more in zip(before, update, strict=True)])
    torch.testing.assert_close(after, alone, rtol=0, atol=3e-6)
    pairs = zip(grad, middle[:, None], strict=True)
    alone = torch.cat([mlp.mlp_backward(gradient, row, norm, *given[:3]) for gradient, row in pairs])
    torch.testing.assert_close(mlp.mlp_backward(grad[:, 0], middle, norm, *given[:3]), alone, rtol=0, atol=3e-6)


def test_rows_beyond_the_last_are_neither_used_nor_written() -> None:
    norm, given = norm_of(32, torch.float32), layers(32, 128, torch.float32)
    before, update, grad, middle, after, slope = (torch.full((32, 32), torch.nan, device=DEVICE) for _ in range(6))
    before[:19], update[:19], grad[:19] = rows_of(19, 32, torch.float32)
    grid, options = mlp._launch(before, given[0], mlp.FORWARD)
    mlp._forward[grid](before, update, *norm, *given, None, None, 0.0, middle, after, None, None, None, 19, **options)
    mlp._backward[grid](grad, middle, *norm, *given[:3], slope, 19, **options)
    assert torch.equal(middle[:19], before[:19] + update[:19])
    for found, expected in zip((after, slope), plainly(middle[:19], norm, given, grad[:19]), strict=True):
        assert_near(found[:19], expected, torch.float32)
    assert all(part[19:].isnan().all() for part in (middle, after, slope))


@triton.jit
def _both(x: tl.tensor, value: tl.tensor, slope: tl.tensor, size: tl.constexpr) -> None:
    place = tl.program_id(0) * size + tl.arange(0, size)
    given = tl.load(x + place)
    tl.store(value + place, mlp._gelu(given))
    tl.store(slope + place, mlp._gelu_slope(given))


def through_gelu(x: Tensor) -> tuple[Tensor, Tensor]:
    """The GELU of a multiple of 32 numbers and its derivative."""
    value, slope = torch.empty_like(x), torch.empty_like(x)
    _both[(x.numel() // 32,)](x, value, slope, size=32)
    return value, slope


def test_gelu_is_exact_to_rounding() -> None:
    """Where the GPU has its own exponential, that is right to 2e-7."""
    x = torch.linspace(-6, 6, 32 * 50, device=DEVICE)
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
    assert float(slope[0, 0]) == pytest.approx(0.5, abs=2e-7)


def test_widths() -> None:
    assert [width for width in range(1, 400) if mlp.fits(width)] == [16, 32, 48, 64, 80, 96, 128, 144, 160, 192, 256]


def test_what_is_given_must_fit() -> None:
    norm, given, single = norm_of(32, torch.float32), layers(32, 128, torch.float32), torch.float32
    weight1, bias1, weight2, bias2 = given
    rows, update, grad = rows_of(3, 32, single)
    wide = numbers(3, 384, key="rows")
    with pytest.raises(UserError, match=r"got 384 and 1536.*KERNELS=off"):
        mlp.mlp(wide, wide, norm_of(384, single), *layers(384, 1536, single))
    with pytest.raises(UserError, match="got 32 and 40"):
        mlp.mlp(rows, update, norm, *layers(32, 40, single))
    with pytest.raises(UserError, match=r"got \(3, 32\), \(128, 32\), \(128, 32\)"):
        mlp.mlp(rows, update, norm, weight1, bias1, weight2.t(), bias2)
    with pytest.raises(UserError, match=r"got \(16,\) and \(16,\)"):
        mlp.mlp(rows, update, norm_of(16, single), *given)
    with pytest.raises(UserError, match="one dtype"):
        mlp.mlp(rows, update, norm, weight1, bias1, weight2.half(), bias2)
    with pytest.raises(UserError, match=r"contiguous\(\)"):
        mlp.mlp_backward(numbers(32, 3, key="grad").t(), rows, norm, weight1, bias1, weight2)
    with pytest.raises(UserError, match=r"got \(3, 32\) and \(2, 32\)"):
        mlp.mlp_backward(grad[:2], rows, norm, weight1, bias1, weight2)
    with pytest.raises(UserError, match=r"got \(2, 32\) and \(3, 32\)"):
        mlp.mlp(rows[:2], update, norm, *given)


COMPILE = """
import re, subprocess, sys, torch, triton
from triton.backends.compiler import GPUTarget
from probprompt.kernels import mlp

def build(kernel, table, width, name):
    rows = torch.empty(25216, width, dtype=torch.bfloat16, device="meta")
    for count in (25216, 100):
        _, options = mlp._launch(rows[:count], torch.empty(4 * width, width, device="meta"), table)
        build_one(kernel, options, name)

def build_one(kernel, options, name):
    plan = options.pop("plan")
    name = name, plan
    types = {"count": "i32", "eps": "fp32", "next_eps": "fp32", "plan": "constexpr", "mean": "*fp32", "rstd": "*fp32"}
    given = {part: types.get(part, "*bf16") for part in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, part in enumerate(given) if given[part][0] == "*"}
    source = triton.compiler.ASTSource(kernel, given, {"plan": plan}, aligned)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert built.metadata.shared <= 227 * 1024, (name, built.metadata.shared)
    assert "wgmma.mma_async" in built.asm["ptx"], name
    with open(sys.argv[1], "wb") as file:
        file.write(built.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    listing = subprocess.run([tool, "-sass", sys.argv[1]], capture_output=True, text=True, check=True).stdout
    lines = {int(place, 16): line for place, line in re.findall(r"/\\*([0-9a-f]{4,5})\\*/ +(.*?);", listing)}
    jumps = [(place, int(line.split("BRA 0x")[1], 16)) for place, line in lines.items() if "BRA 0x" in line]
    loops = [[lines[place] for place in lines if back <= place <= end] for end, back in jumps if back < end]
    inner = min((loop for loop in loops if any("HGMMA" in line for line in loop)), key=len)
    # Registers do for the loop, and what the tensor cores read they find where it is.
    found = [line for line in inner if any(name in line for name in ("LDL", "STL", "LDSM"))]
    assert not found, (name, found)

build(mlp._forward, mlp.FORWARD, 192, "forward")
build(mlp._backward, mlp.BACKWARD, 192, "backward")
"""


def test_all_compile_for_a_gpu(tmp_path: Path) -> None:
    """A loop's registers must do, and products reach the tensor cores' own instruction."""
    compile_for_a_gpu(COMPILE, tmp_path)
