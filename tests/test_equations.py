"""The paper's equations against references that share no code with them, and at the ends of their range."""

import math
from collections.abc import Callable

import pytest
import torch
from sklearn.covariance import oas
from torch import Tensor
from torch.autograd import gradcheck
from torch.distributions import (
    Categorical,
    Independent,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
    kl_divergence,
)

from probprompt.equations import (
    aggregate,
    average,
    gaussian_kl,
    mixture_moments,
    relevance,
    sample_prompts,
    sampled_prompt,
    top_k,
    whitening,
)

B, M, N, K, D = 3, 2, 4, 5, 6


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers that float32 holds exactly, as float64."""
    return torch.randn(shape, generator=source(seed)).double()


def pool(tokens: int = M, size: int = N, features: int = D) -> tuple[Tensor, Tensor]:
    """Means and logarithms of standard deviations, (M, N, D), that float32 holds exactly."""
    shape = tokens, size, features
    return normal(*shape, seed=1), 0.25 * normal(*shape, seed=2)


def shares(*shape: int) -> Tensor:
    """Weights that sum to 1 over the last dimension."""
    return torch.softmax(normal(*shape, seed=3), dim=-1)


def squared_distance(query: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Mahalanobis distance from a density: log p = -(S² + D log 2π + log det Σ) / 2."""
    gaussian = MultivariateNormal(mean, covariance_matrix=torch.diag_embed((2 * log_std).exp()))
    constant = mean.shape[-1] * math.log(2 * math.pi) + 2 * log_std.sum(-1)
    log_density: Tensor = gaussian.log_prob(query[:, None, None, :])
    return -2 * log_density - constant


def mixture(weights: Tensor, mean: Tensor, log_std: Tensor) -> MixtureSameFamily:
    """The mixture itself, with full shapes (B, M, N, D)."""
    shape = (*weights.shape, mean.shape[-1])
    parts = Independent(Normal(mean.expand(shape), log_std.exp().expand(shape)), 1)
    return MixtureSameFamily(Categorical(weights), parts)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float(((found.double() - expected).abs() / expected.abs()).max())


# Relevance, Eqs. 2 and 3


@pytest.mark.parametrize("temperature", [1.0, math.sqrt(D), float(D)])
def test_relevance_against_densities(temperature: float) -> None:
    query, (mean, log_std) = normal(B, D), pool()
    expected = torch.softmax(-squared_distance(query, mean, log_std) / temperature, dim=-1)
    found = relevance(query, mean, log_std, temperature)
    assert found.shape == (B, M, N)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    narrow = relevance(query.float(), mean.float(), log_std.float(), temperature)
    assert (narrow - expected).abs().max() < 1e-6
    dense = torch.softmax(-(squared_distance(query, mean, log_std) + 2 * log_std.sum(-1)) / temperature, dim=-1)
    torch.testing.assert_close(relevance(query, mean, log_std, temperature, density=True), dense, rtol=1e-9, atol=0)


def test_the_density_at_a_temperature_of_two_is_bayes_rule() -> None:
    query, (mean, log_std) = normal(B, D), pool()
    whole = mixture(torch.full((B, M, N), 1 / N, dtype=torch.float64), mean, log_std)
    parts = whole.component_distribution.log_prob(query[:, None, None].expand(B, M, N, D))
    torch.testing.assert_close(relevance(query, mean, log_std, 2.0, density=True), parts.softmax(dim=-1))


@pytest.mark.parametrize("count", [2, 5, 40, 4000])
def test_whitened_queries_have_the_covariance_that_shrinkage_leaves(count: int) -> None:
    queries = 3 + normal(count, D) @ normal(D, D, seed=1)
    mean, matrix = whitening(queries.float())
    torch.testing.assert_close(mean, queries.float().double().mean(dim=0))
    shrunk, share = oas(queries.float().double().numpy())
    torch.testing.assert_close(matrix @ torch.from_numpy(shrunk) @ matrix, torch.eye(D, dtype=torch.float64))
    assert (share < 0.05) == (count > 100) and torch.allclose(matrix, matrix.T)
    same = whitening(queries[:1].expand(3, -1))  # no spread at all
    assert all(part.isfinite().all() for part in same)


def exact(query: Tensor, mean: Tensor, log_std: Tensor) -> tuple[Tensor, Tensor]:
    """Squared distances, and relevance by them."""
    distance = ((query[:, None, None, :] - mean) / log_std.exp()).square().sum(-1)
    return distance, torch.softmax(-distance, dim=-1)


def test_relevance_decides_gaps_of_one_at_a_distance_of_1e5() -> None:
    """In float32 numbers near 1e5 are 1/128 apart, and sums of 768 of their parts lose more than that."""
    features, sigma = 768, 0.1
    query = 2 * normal(16, features, seed=4)
    middle = torch.rand(4, 1, features, generator=source(5)).double()
    mean = (middle + 1e-4 * normal(4, 10, features, seed=6)).float().double()
    log_std = torch.full_like(mean, math.log(sigma)).float().double()
    distance, expected = exact(query, mean, log_std)
    assert distance.min() > 1e5 and distance.max() < 1e6
    assert 0.15 < expected.max(-1).values.mean() < 0.95  # gaps of about 1
    assert (relevance(query.float(), mean.float(), log_std.float()) - expected).abs().max() < 1e-6


def test_relevance_near_the_means_of_very_narrow_gaussians() -> None:
    """With σ = 4.5e-5 the terms of an expanded square are 1e12 while S² is 700: it would be wrong by 1e-3."""
    features, sigma = 768, math.exp(-10)
    query = (5 * normal(1, features, seed=4)).float().double()
    mean = query + sigma * normal(M, 1, features, seed=5) + 0.02 * sigma * normal(M, N, features, seed=6)
    mean[:, N // 2 :] += 3
    mean, log_std = mean.float().double(), (-10 + 1e-3 * normal(M, N, features, seed=7)).float().double()
    distance, expected = exact(query, mean, log_std)
    assert distance.min() < 1e3 and distance.max() > 1e12
    assert 0.01 < expected[..., : N // 2].min() < 0.49
    assert (relevance(query.float(), mean.float(), log_std.float()) - expected).abs().max() < 1e-6


def test_relevance_of_equal_gaussians_is_equal_at_any_distance() -> None:
    mean = normal(M, 1, D).expand(M, N, D)
    found = relevance(100 * normal(B, D, seed=1).float(), mean.float(), torch.full((M, N, D), -10.0))
    torch.testing.assert_close(found, torch.full((B, M, N), 1 / N), rtol=0, atol=1e-6)


def test_relevance_of_an_image_does_not_depend_on_its_batch() -> None:
    query, (mean, log_std) = normal(B, D), pool()
    alone = torch.cat([relevance(one[None], mean, log_std) for one in query])
    torch.testing.assert_close(relevance(query, mean, log_std), alone, rtol=1e-13, atol=0)


# The K most relevant


@pytest.mark.parametrize("k", range(1, N + 1))
def test_top_k(k: int) -> None:
    weights = shares(B * M, N)
    for row, kept in zip(weights.tolist(), top_k(weights, k).tolist(), strict=True):
        largest = sorted(row)[-k:]
        assert kept == pytest.approx([weight / sum(largest) * (weight in largest) for weight in row])
    assert int((top_k(torch.full((N,), 1 / N), k) > 0).sum()) == k


# Moments of the mixture, Eqs. 5 to 7


def test_moments_against_the_mixture() -> None:
    weights, (mean, log_std) = shares(B, M, N).float().double(), pool()
    expected = mixture(weights, mean, log_std)
    center, std = mixture_moments(weights.float(), mean.float(), log_std.float())
    assert center.shape == std.shape == (B, M, D)
    assert center.is_contiguous() and std.is_contiguous()
    assert relative_error(center, (weights[..., None] * mean).sum(2)) < 1e-5
    torch.testing.assert_close(center.double(), expected.mean, rtol=1e-5, atol=1e-7)
    assert relative_error(std.square(), expected.variance) < 1e-5


@pytest.mark.parametrize("spread", [0.0, 1e-7, 1e-3, 1.0])
@pytest.mark.parametrize("level", [-10.0, 0.0, 5.0])
def test_moments_of_one_hot_weights_and_nearly_equal_means(spread: float, level: float) -> None:
    mean = (100 + spread * normal(M, N, D)).float()
    log_std = torch.full((M, N, D), level)
    weights = torch.eye(N)[:, None, :].expand(N, M, N)
    center, std = mixture_moments(weights, mean, log_std)
    torch.testing.assert_close(center, mean.transpose(0, 1), rtol=1e-6, atol=0)
    assert relative_error(std, log_std[0, 0].double().exp().expand(N, M, D)) < 1e-5


def test_moments_of_narrow_gaussians_side_by_side() -> None:
    """The means, near 100, differ by about σ = 4.5e-5: a difference of squares has no digit left."""
    mean = (100 + 1e-4 * normal(M, N, D, seed=8)).float().double()
    log_std, weights = torch.full((M, N, D), -10.0).double(), shares(B, M, N).float().double()
    center = (weights[..., None] * mean).sum(2, keepdim=True)
    expected = (weights[..., None] * ((2 * log_std).exp() + (mean - center).square())).sum(2).sqrt()
    _, std = mixture_moments(weights.float(), mean.float(), log_std.float())
    assert relative_error(std, expected) < 1e-5


# Sampling, Eq. 8


def test_samples_of_given_noise() -> None:
    center, scale, noise = normal(B, M, D), normal(B, M, D, seed=1).abs(), normal(M, K, D, seed=2)
    found = sample_prompts(center.float(), scale.float(), K, noise=noise.float())
    expected = torch.stack([center + scale * noise[:, k] for k in range(K)], dim=2)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)
    full = sample_prompts(center.float(), scale.float(), K, noise=noise.float().expand(B, M, K, D))
    torch.testing.assert_close(found, full, rtol=0, atol=0)


def test_samples_follow_the_generator_alone() -> None:
    center, scale, draws = normal(1, M, D), normal(1, M, D, seed=1).abs(), 20_000
    samples = sample_prompts(center, scale, draws, source(7))
    assert samples.shape == (1, M, draws, D)
    assert ((samples.mean(2) - center).abs() < 5 * scale / math.sqrt(draws)).all()
    assert ((samples.std(2) / scale - 1).abs() < 5 / math.sqrt(2 * draws)).all()
    torch.manual_seed(0)
    assert torch.equal(sample_prompts(center, scale, draws, generator=source(7)), samples)
    assert not torch.equal(sample_prompts(center, scale, draws, source(8)), samples)
    assert not torch.equal(sample_prompts(center, scale, K), sample_prompts(center, scale, K))


# Aggregation, Eqs. 9 and 10


def cosine(one: list[float], other: list[float]) -> float:
    product = math.fsum(a * b for a, b in zip(one, other, strict=True))
    return product / math.hypot(*one) / math.hypot(*other)


def test_aggregate_one_token_at_a_time() -> None:
    samples, query = normal(B, M, K, D), normal(B, D, seed=1)
    found = aggregate(samples.float(), query.float())
    assert found.shape == (B, M, D)
    for image in range(B):
        for token in range(M):
            rows = samples[image, token]
            scores = [math.exp(cosine(row.tolist(), query[image].tolist())) for row in rows]
            expected = torch.stack([score * row for score, row in zip(scores, rows, strict=True)]).sum(0)
            assert relative_error(found[image, token], expected / math.fsum(scores)) < 1e-5


def test_average() -> None:
    samples = normal(B, M, K, D)
    expected = torch.stack([samples[:, :, k] for k in range(K)]).sum(0) / K
    assert relative_error(average(samples.float()), expected) < 1e-5


@pytest.mark.parametrize("zero", ["samples", "query", "both"])
def test_aggregate_of_zero_vectors_is_finite(zero: str) -> None:
    samples = (normal(B, M, K, D) * (zero == "query")).float().requires_grad_()
    query = (normal(B, D) * (zero == "samples")).float().requires_grad_()
    prompt = aggregate(samples, query)
    gradients = torch.autograd.grad(prompt.square().sum() + prompt.sum(), (samples, query))
    assert all(tensor.isfinite().all() for tensor in (prompt, *gradients))


# Divergence, Eq. 14


def test_kl_against_the_library() -> None:
    mean_p, log_std_p = pool()
    mean_q, log_std_q = normal(M, N, D, seed=8), 0.5 * normal(M, N, D, seed=9)
    expected = kl_divergence(Normal(mean_p, log_std_p.exp()), Normal(mean_q, log_std_q.exp())).sum(-1)
    found = gaussian_kl(mean_p.float(), log_std_p.float(), mean_q.float(), log_std_q.float())
    assert found.shape == (M, N)
    assert relative_error(found, expected) < 1e-5
    single = gaussian_kl(mean_p[0, 0], log_std_p[0, 0], mean_q[0, 0], log_std_q[0, 0])
    assert single.shape == ()
    assert relative_error(single, expected[0, 0]) < 1e-9


def test_kl_is_zero_with_zero_gradient_at_equality() -> None:
    mean, log_std = (tensor.float() for tensor in pool())
    inputs = [tensor.clone().requires_grad_() for tensor in (mean, log_std, mean, log_std)]
    divergence = gaussian_kl(*inputs)
    assert (divergence == 0).all()
    assert all((gradient == 0).all() for gradient in torch.autograd.grad(divergence.sum(), inputs))


@pytest.mark.parametrize("difference", [1e-2, 1e-4, 1e-6])
def test_kl_near_equality(difference: float) -> None:
    """By the series of exp; exp(2r) - 1 - 2r in float32 has no digit left."""
    mean, log_std = (tensor.float() for tensor in pool())
    moved = mean + difference * normal(M, N, D, seed=8).float()
    widened = log_std + difference * normal(M, N, D, seed=9).float()
    r, delta = log_std.double() - widened.double(), mean.double() - moved.double()
    series = r.square() * (1 + 2 * r / 3 + r.square() / 3 + 2 * r.pow(3) / 15)
    expected = (series + delta.square() * (-2 * widened.double()).exp() / 2).sum(-1)
    assert relative_error(gaussian_kl(mean, log_std, moved, widened), expected) < 1e-5


# All of them


def test_what_has_no_meaning_is_refused() -> None:
    for temperature in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="temperature must be positive"):
            relevance(normal(B, D), *pool(), temperature)
    for k in (0, -1, N + 1):
        with pytest.raises(ValueError, match=f"between 1 and {N}.*got {k}"):
            top_k(shares(B, M, N), k)
    center, scale = normal(B, M, D), normal(B, M, D).abs()
    with pytest.raises(ValueError, match="at least 1, got 0"):
        sample_prompts(center, scale, 0)
    for shape in ((M, K + 1, D), (M + 1, K, D), (2, B, M, K, D)):
        with pytest.raises(RuntimeError, match="expand"):
            sample_prompts(center, scale, K, noise=torch.zeros(shape))


def whole(query: Tensor, mean: Tensor, log_std: Tensor) -> list[Tensor]:
    """Every equation in its place."""
    weights = top_k(relevance(query, mean, log_std), N - 1)
    center, std = mixture_moments(weights, mean, log_std)
    samples = sample_prompts(center, std, K, source())
    cached = mean.detach() + 0.1, log_std.detach() - 0.1
    averages = [aggregate(samples, query), average(samples)]
    return [weights, center, std, samples, *averages, gaussian_kl(*cached, mean, log_std)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_dtype_is_kept(dtype: torch.dtype) -> None:
    query, mean, log_std = (tensor.to(dtype) for tensor in (normal(B, D), *pool()))
    assert all(output.dtype == dtype for output in whole(query, mean, log_std))


EACH: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "relevance": (relevance, (normal(B, D), *pool())),
    "top": (lambda weights: top_k(weights, 2), (shares(B, M, N),)),
    "moments": (lambda *given: torch.cat(mixture_moments(*given)), (shares(B, M, N), *pool())),
    "samples": (lambda mean, std, noise: sample_prompts(mean, std, K, noise=noise), (*pool(), normal(K, D))),
    "aggregate": (aggregate, (normal(B, M, K, D), normal(B, D, seed=1))),
    "average": (average, (normal(B, M, K, D),)),
    "kl": (gaussian_kl, (*pool(), normal(M, N, D), 0.5 * normal(M, N, D, seed=9))),
}
TEMPERED = (lambda query, mean, log_std: relevance(query, mean, log_std, 7.0), EACH["relevance"][1])
ONE_HOT = (EACH["moments"][0], (torch.eye(N).double()[:B, None].expand(B, M, N), *pool()))
SAMPLED = (
    lambda mean, std, query: sampled_prompt(mean, std, query, normal(2, 2, 3, 5, seed=4)),
    (normal(2, 2, 5), normal(2, 2, 5, seed=1).abs() + 0.1, normal(2, 5, seed=2)),
)
DIFFERENTIABLE = {**EACH, "temperature": TEMPERED, "one-hot": ONE_HOT, "sampled": SAMPLED}


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_inputs_lose_only_the_last_digit(name: str, dtype: torch.dtype) -> None:
    function, inputs = EACH[name]
    narrow = [tensor.to(dtype) for tensor in inputs]
    expected = function(*(tensor.double() for tensor in narrow))
    precision = torch.finfo(dtype).eps
    torch.testing.assert_close(function(*narrow).double(), expected, rtol=precision, atol=1e-7)


def test_mixed_dtypes_give_the_wider_one() -> None:
    query, (mean, log_std) = normal(B, D).bfloat16(), (tensor.float() for tensor in pool())
    weights = relevance(query, mean, log_std)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, relevance(query.float(), mean, log_std), rtol=0, atol=0)
    assert aggregate(normal(B, M, K, D).float(), query).dtype == torch.float32
    assert sample_prompts(mean.bfloat16(), log_std, K).dtype == torch.float32


def test_autocast_changes_nothing() -> None:
    inputs = [tensor.float() for tensor in (normal(B, D), *pool())]
    expected = whole(*inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = whole(*inputs)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("low", [-10.0, 0.0, 5.0])
@pytest.mark.parametrize("high", [-10.0, 0.0, 5.0])
def test_values_and_gradients_are_finite_over_the_whole_range(dtype: torch.dtype, low: float, high: float) -> None:
    """Also where the relevance is one-hot, or a query lies on a mean."""
    mean, _ = pool()
    log_std = torch.full_like(mean, low)
    log_std[:, ::2] = high
    query = torch.cat([100 * normal(B, D), mean[0, :1]])
    inputs = [tensor.to(dtype).requires_grad_() for tensor in (query, mean, log_std)]
    outputs = whole(*inputs)
    gradients = torch.autograd.grad(torch.stack([output.sum() for output in outputs]).sum(), inputs)
    assert (outputs[2] > 0).all()
    assert all(tensor.isfinite().all() for tensor in (*outputs, *gradients))
    one_hot = (outputs[0].max(-1).values == 1).any()
    assert one_hot or max(low, high) == 5.0


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients(name: str) -> None:
    function, inputs = DIFFERENTIABLE[name]
    assert gradcheck(function, tuple(tensor.clone().requires_grad_() for tensor in inputs))


@pytest.mark.parametrize(("shared", "temperature"), [(True, 1.0), (False, 1.0), (True, 0.1)])
def test_the_short_way_to_a_sampled_prompt_equals_the_long_one(shared: bool, temperature: float) -> None:
    batch, tokens, count, width = 5, 4, 7, 96
    mean, std = normal(batch, tokens, width), normal(batch, tokens, width, seed=1).abs() + 0.01
    query, noise = 50 * normal(batch, width, seed=2), normal(batch, tokens, count, width, seed=3)
    noise = noise[0] if shared else noise
    short = sampled_prompt(mean.float(), std.float(), query.float(), noise.float(), temperature)
    exact = aggregate(sample_prompts(mean, std, count, noise=noise), query, temperature)
    assert short.dtype == torch.float32
    assert (short - exact).norm() / exact.norm() < 1e-6
    torch.testing.assert_close(short.double(), exact, rtol=1e-5, atol=1e-6)
