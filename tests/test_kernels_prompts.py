"""ProbPrompt's kernels against its equations, gradients included; without a GPU in Triton's interpreter."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_helpers import DEVICE, GPU, assert_near, compile_for_a_gpu, normal
from probprompt import equations
from probprompt.errors import UserError
from probprompt.kernels import mixture as mixture_module
from probprompt.kernels.mixture import Learning, mixture

pytest.importorskip("triton")

from probprompt.kernels import gaussians as kernels_gaussians
from probprompt.kernels.gaussians import noise, sampled_prompt

SEED = 0x1234_5678_9ABC_DEF0
Tensors = tuple[Tensor, ...]
Moments = tuple[Tensor, Tensor, Tensor]


def key(number: int = SEED) -> Tensor:
    return torch.tensor([number], device=DEVICE)


def gradients(outputs: Tensors, inputs: Tensors) -> Tensors:
    """For a gradient of noise, so that no part of it can hide another."""
    slopes = [normal(*output.shape, seed=90 + index).to(output.dtype) for index, output in enumerate(outputs)]
    return torch.autograd.grad(outputs, inputs, slopes)


def check_gradients(found: Tensors, exact: Tensors, inputs: Tensors, tolerance: float) -> None:
    for one, other in zip(gradients(found, inputs), gradients(exact, inputs), strict=True):
        assert_near(one, other.double(), tolerance)


def philox(counter: tuple[int, int, int, int], seed: int, rounds: int) -> list[int]:
    """Philox4x32 of Salmon et al. (2011), in Python's own numbers."""
    c, low, high = list(counter), seed & 0xFFFFFFFF, seed >> 32
    for _ in range(rounds):
        one, two = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(two >> 32) ^ c[1] ^ low, two & 0xFFFFFFFF, (one >> 32) ^ c[3] ^ high, one & 0xFFFFFFFF]
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    return c


def test_the_reference_gives_the_published_words() -> None:
    assert philox((0, 0, 0, 0), 0, 10) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    assert philox((ones,) * 4, ones << 32 | ones, 10) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def reference_noise(row: int, pool: int, sample: int, feature: int) -> float:
    """Box and Muller's transformation of two of the four words."""
    words = philox((row, pool, feature, sample // 4), SEED, 7)
    radius, angle = words[sample % 4 // 2 * 2 :][:2]
    length, turn = math.sqrt(-2 * math.log((radius + 0.5) / 2**32)), 2 * math.pi * angle / 2**32
    return length * (math.sin(turn) if sample % 2 else math.cos(turn))


def test_noise_number_by_number() -> None:
    found = noise(2, 3, 6, 5, key(), first=7, place=2)
    exact = [reference_noise(7 + row, 2 + pool, sample, place) for row, pool, sample, place in np.ndindex(2, 3, 6, 5)]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.cpu().flatten(), torch.tensor(exact), rtol=1e-5, atol=1e-5)


def test_noise_is_standard_normal_and_independent() -> None:
    drawn: NDArray[np.float64] = noise(4, 4, 8, 2048, key(3)).double().cpu().numpy()  # 2**18 numbers
    assert stats.kstest(drawn.ravel(), "norm").pvalue > 1e-3
    assert stats.kstest(drawn.ravel() ** 2, "chi2", args=(1,)).pvalue > 1e-3
    assert 4 < np.abs(drawn).max() < 7
    error = 1 / math.sqrt(drawn.size)
    for power, moment, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((drawn**power).mean() - moment) < 4 * math.sqrt(spread) * error
    for axis in range(4):  # neighbours by row, pool, sample and feature
        one, two = np.delete(drawn, 0, axis), np.delete(drawn, -1, axis)
        for power in (1, 2):
            assert abs(np.corrcoef(one.ravel() ** power, two.ravel() ** power)[0, 1]) < 4 / math.sqrt(one.size)


def test_noise_depends_on_its_place_alone() -> None:
    whole = noise(3, 2, 6, 7, key())
    assert torch.equal(noise(1, 2, 6, 7, key(), first=2), whole[2:])
    assert torch.equal(noise(3, 1, 6, 7, key(), place=1), whole[:, 1:])
    assert torch.equal(noise(3, 2, 2, 7, key()), whole[:, :, :2])
    assert torch.equal(noise(3, 2, 6, 4, key()), whole[..., :4])
    assert len(whole.unique()) > 0.99 * whole.numel()
    for other in (SEED + 1, SEED ^ 1 << 40):  # both halves of the seed count
        assert not (noise(3, 2, 6, 7, key(other)) == whole).any()


# Sampled prompts, Eqs. 8 to 10


def gaussians(rows: int, count: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    mean, std = normal(rows, count, width), normal(rows, count, width, seed=1).abs() + 0.05
    return mean.requires_grad_(), std.requires_grad_(), 30 * normal(rows, width, seed=2)


def plain_prompt(mean: Tensor, std: Tensor, query: Tensor, drawn: Tensor, equal: bool = False) -> Tensor:
    """In float64."""
    mean, std, query, drawn = mean.double(), std.double(), query.double(), drawn.double()
    if equal:
        return equations.average(equations.sample_prompts(mean, std, drawn.shape[2], noise=drawn))
    return equations.sampled_prompt(mean, std, query, drawn)


@pytest.mark.parametrize(("width", "count", "equal"), [(24, 6, False), (16, 1, False), (5, 8, False), (12, 6, True)])
def test_fused_prompts_equal_the_equations_on_the_same_noise(width: int, count: int, equal: bool) -> None:
    mean, std, query = gaussians(2, 2, width)
    found = sampled_prompt(mean, std, query, key(), count, 3, equal)
    exact = plain_prompt(mean, std, query, noise(2, 2, count, width, key(), first=3), equal)
    assert found.dtype == torch.float32
    assert_near(found, exact, 2e-6)
    check_gradients((found,), (exact,), (mean, std), 5e-6)


@pytest.mark.parametrize("zero", ["query", "samples", "both"])
def test_zero_vectors(zero: str) -> None:
    mean, std, query = gaussians(1, 2, 7)
    if zero != "query":
        mean, std = torch.zeros_like(mean, requires_grad=True), torch.zeros_like(std, requires_grad=True)
    query = query * (zero == "samples")
    found = sampled_prompt(mean, std, query, key(), 3)
    exact = equations.sampled_prompt(mean, std, query, noise(1, 2, 3, 7, key()))
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-7)
    check_gradients((found,), (exact,), (mean, std), 1e-5)


def test_a_batch_in_parts_gives_the_same_prompts() -> None:
    mean, std, query = gaussians(3, 2, 6)
    whole = sampled_prompt(mean, std, query, key(), 5)
    part = sampled_prompt(mean[1:], std[1:], query[1:].bfloat16().float(), key(), 5, first=1)
    assert torch.equal(sampled_prompt(mean[1:], std[1:], query[1:], key(), 5, first=1), whole[1:])
    assert torch.equal(sampled_prompt(mean[1:], std[1:], query[1:].bfloat16(), key(), 5, first=1), part)
    assert not torch.equal(sampled_prompt(mean, std, query, key(7), 5), whole)


def test_what_the_sampling_kernel_refuses() -> None:
    mean, std, query = gaussians(1, 1, 4)
    with pytest.raises(ValueError, match="no gradient for the query"):
        sampled_prompt(mean, std, query.clone().requires_grad_(), key(), 2)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        sampled_prompt(mean, std, query, key(), 0)
    with pytest.raises(ValueError, match=r"float32, got torch\.float64"):
        sampled_prompt(mean.double(), std, query, key(), 2)
    with pytest.raises(UserError, match=r"got 5000.*KERNELS=off"):
        sampled_prompt(*gaussians(1, 1, 5000), key(), 2)


# Mixtures, Eqs. 2 to 7


def plain_mixture(
    query: Tensor,
    mean: Tensor,
    log_std: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    density: bool = False,
    gradient: Learning = "full",
) -> Moments:
    """In float64."""
    query, mean, log_std = query.double(), mean.double(), log_std.double()
    given = (mean.detach() if gradient == "none" else mean, log_std if gradient == "full" else log_std.detach())
    weights = equations.relevance(query, *given, temperature, density)
    weights = weights if top_k is None else equations.top_k(weights, top_k)
    return weights, *equations.mixture_moments(weights, mean, log_std)


def pool(count: int, size: int, width: int) -> tuple[Tensor, Tensor]:
    mean, log_std = normal(count, size, width, seed=3), 0.3 * normal(count, size, width, seed=4)
    return mean.requires_grad_(), log_std.requires_grad_()


@pytest.fixture(params=["plain", "kernels"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of mixture, whatever the machine; blocks are small, so that a few numbers fill more than one."""
    monkeypatch.setattr(mixture_module, "usable", lambda device: request.param == "kernels")
    monkeypatch.setattr(kernels_gaussians, "ROWS", 4)
    monkeypatch.setattr(kernels_gaussians, "COLUMNS", 4)
    return str(request.param)


@pytest.mark.parametrize(
    "settings",
    [(1.0, None), (6.0, None), (6.0, 2), (6.0, 2, True), (6.0, None, True, "means"), (6.0, None, False, "none")],
    ids=str,
)
def test_mixtures_equal_the_equations(way: str, settings: tuple[Any, ...]) -> None:
    query, (mean, log_std) = normal(5, 6), pool(2, 3, 6)  # two blocks of images, two of features
    found, exact = mixture(query, mean, log_std, *settings), plain_mixture(query, mean, log_std, *settings)
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == torch.float32 and one.is_contiguous()
        assert_near(one, other, 1e-7)
    first = 1 if "none" in settings else 0  # then the weights have no gradient
    check_gradients(found[first:], exact[first:], (mean, log_std), 1e-6)


@pytest.mark.parametrize("index", range(3), ids=["weights", "center", "std"])
def test_gradients_of_each_result_alone(way: str, index: int) -> None:
    query, (mean, log_std) = normal(2, 4), pool(1, 3, 4)
    found, exact = mixture(query, mean, log_std)[index], plain_mixture(query, mean, log_std)[index]
    check_gradients((found,), (exact,), (mean, log_std), 1e-6)


@pytest.mark.parametrize("top_k", [None, 2])
def test_gradients_of_mixtures(top_k: int | None) -> None:
    query, (mean, log_std) = normal(3, 4).double(), pool(2, 3, 4)
    inputs = (mean.detach().double().requires_grad_(), log_std.detach().double().requires_grad_())
    assert torch.autograd.gradcheck(lambda one, other: mixture(query, one, other, 3.0, top_k), inputs)


def test_only_the_means_may_be_learned(way: str) -> None:
    query, (mean, log_std) = normal(3, 4), pool(2, 3, 4)
    found, exact = mixture(query, mean, log_std.detach()), plain_mixture(query, mean, log_std)
    check_gradients(found, exact, (mean,), 1e-6)


def narrow(features: int) -> tuple[Tensor, Tensor, Tensor]:
    """Two of four means within σ = 4.5e-5 of the query, the others far away; S² from 1e2 to 1e11."""
    query = 5 * normal(1, features, seed=4)
    mean = query + math.exp(-10) * (normal(2, 1, features, seed=5) + 0.1 * normal(2, 4, features, seed=6))
    mean[:, 2:] += 3
    return query, mean, -10 + 1e-3 * normal(2, 4, features, seed=7)


def far(features: int) -> tuple[Tensor, Tensor, Tensor]:
    """Differences of 1 at distances of 1e5."""
    mean = normal(2, 1, features, seed=5) + 5e-4 * normal(2, 4, features, seed=6)
    return 3 * normal(4, features, seed=4), mean, torch.full_like(mean, math.log(0.03))


def beside(features: int) -> tuple[Tensor, Tensor, Tensor]:
    """Means near 100 that differ by about σ = 4.5e-5: there a difference of squares has no digit left."""
    mean = 100 + 1e-4 * normal(2, 4, features, seed=8)
    return 100 + 1e-4 * normal(3, features, seed=9), mean, torch.full_like(mean, -10.0)


@pytest.mark.parametrize("case", [narrow, far, beside])
def test_mixtures_at_the_ends_of_their_range(
    way: str, case: Callable[[int], tuple[Tensor, Tensor, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels_gaussians, "COLUMNS", 64)
    query, mean, log_std = case(64)
    distance = ((query.double()[:, None, None] - mean.double()) * (-log_std.double()).exp()).square().sum(-1)
    assert case is beside or distance.max() > 1e5
    exact_weights = torch.softmax(-distance, dim=-1)
    assert 0.02 < exact_weights.max(-1).values.mean() < 0.999  # not decided beforehand
    mean.requires_grad_()
    log_std.requires_grad_()
    found, exact = mixture(query, mean, log_std), plain_mixture(query, mean, log_std)
    assert (found[0] - exact_weights).abs().max() < 1e-6
    torch.testing.assert_close(found[1].double(), exact[1], rtol=1e-6, atol=0)
    torch.testing.assert_close(found[2].double(), exact[2], rtol=1e-6, atol=0)
    check_gradients(found, exact, (mean, log_std), 1e-4)


@pytest.mark.parametrize("level", [-10.0, 5.0])
def test_one_hot_weights_leave_one_gaussian(way: str, level: float) -> None:
    """The plain way's variance is a difference of numbers near 1e2, exact to 1e-16 of that: σ² is 2e-9."""
    mean = 100 * (1 + torch.eye(4, 5, device=DEVICE))[None]  # (1, 4, 5)
    log_std = torch.full_like(mean, level).requires_grad_()
    weights, center, std = mixture(mean[0].clone(), mean, log_std, 1e-3 * math.exp(-2 * min(level, 0)))
    assert torch.equal(weights[:, 0], torch.eye(4, device=DEVICE))
    torch.testing.assert_close(center[:, 0], mean[0], rtol=1e-6, atol=0)
    digits = 1e-3 if way == "plain" else 1e-6
    torch.testing.assert_close(std, torch.full_like(std, math.exp(level)), rtol=digits, atol=0)
    (gradient,) = torch.autograd.grad(std.sum(), log_std)
    assert gradient.isfinite().all()


class Largest(TorchDispatchMode):
    """Remembers how many numbers the largest tensor held that any operation gave."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.numbers = max(self.numbers, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


def test_the_whole_product_is_never_held() -> None:
    rows, count, size, width = 8, 3, 6, 10
    query, (mean, log_std) = normal(rows, width), pool(count, size, width)

    def largest(function: Callable[..., Moments]) -> int:
        watch = Largest()
        with watch:
            gradients(function(query, mean, log_std), (mean, log_std))
        return watch.numbers

    assert largest(plain_mixture) >= rows * count * size * width
    assert largest(mixture) <= max(rows * count * width, 2 * count * size * width)


def test_what_mixtures_refuse() -> None:
    query, (mean, log_std) = normal(3, 4), pool(2, 3, 4)
    for temperature in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="temperature must be positive"):
            mixture(query, mean, log_std, temperature)
    for top_k in (0, 4):
        with pytest.raises(ValueError, match=f"between 1 and 3.*got {top_k}"):
            mixture(query, mean, log_std, 1.0, top_k)
    with pytest.raises(ValueError, match="no gradient for the query"):
        mixture(query.requires_grad_(), mean, log_std)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from probprompt.kernels import gaussians, pixels

FLOATS = "mean std query prompt mixed weight grad grad_mean grad_std grad_centre centre result".split()
DOUBLES = "inverse weights variance boxes".split()
TYPES = {**dict.fromkeys(FLOATS, "*fp32"), **dict.fromkeys(DOUBLES, "*fp64"), "seed": "*i64", "pixels": "*u8"}
TYPES |= {"offsets": "*i64", "sizes": "*i64", "flip": "*i1"}
SUMS = dict.fromkeys(["grad_weights", "grad_mean", "grad_variance"], "*fp64")

def build(kernel, types=TYPES, **sizes):
    names = kernel.arg_names
    signature = {name: "constexpr" if name in sizes else {**TYPES, **types}.get(name, "i32") for name in names}
    fixed = {(names.index(name),): value for name, value in sizes.items()}
    source = triton.compiler.ASTSource(kernel, signature, fixed)
    triton.compile(source, target=GPUTarget("cuda", 90, 32))

prompts = {"pools": 40, "count": 30, "width": 192, "columns": 256}
build(gaussians._forward, **prompts, equal=False)
build(gaussians._backward, **prompts)
build(gaussians._write_noise, **prompts)
block = {"width": 192, "rows": gaussians.ROWS, "columns": gaussians.COLUMNS}
build(gaussians._distances, {"result": "*fp64"}, gaussians=400, **block)
build(gaussians._moments, pools=40, count=10, **block)
build(gaussians._moments_backward, SUMS, pools=40, count=10, **block)
build(pixels._crop, size=224, radius=2, rows=1, columns=pixels.PIXELS)
"""


def test_all_compile_for_a_gpu(tmp_path: Path) -> None:
    compile_for_a_gpu(COMPILE, tmp_path)


def test_kernels_here_are_the_ones_that_are_meant() -> None:
    assert type(kernels_gaussians._forward).__name__ == ("JITFunction" if GPU else "InterpretedFunction")
