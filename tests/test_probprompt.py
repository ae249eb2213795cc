"""ProbPrompt against the paper's equations, written down a second time with loops in float64."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Independent, Normal, kl_divergence

from method_helpers import Array, check_gradient, close, injected, loss_of, move, normal, same, training
from probprompt import equations
from probprompt.errors import UserError
from probprompt.methods import EVALUATION, Context, Shape
from probprompt.methods.probprompt import ProbPrompt, ProbPromptConfig
from probprompt.prompts import Prefix
from probprompt.randomness import Turns

WIDTH, DEPTH, BATCH = 6, 5, 3
BLOCKS = (1, 3)

SETTINGS: list[dict[str, Any]] = [
    {},
    {"samples": 0},
    {"samples": 1},
    {"components": 1},
    {"tokens": 2},
    {"top_k": 1},
    {"top_k": 2},
    {"top_k": 3, "relevance_temperature": "dim"},
    {"aggregation": "mean"},
    {"relevance_temperature": "sqrt_dim"},
    {"relevance_temperature": "initial_std", "initial_std": 3.0},
    {"relevance_temperature": "dim"},
    {"relevance_temperature": 0.5},
    {"evaluation": "mean"},
    {"evaluation": "image"},
    {"evaluation": "image", "variant": "independent", "aggregation": "mean"},
    {"evaluation_samples": 3, "aggregation_temperature": 0.1},
    {"query": "unit", "initial_log_std_scale": 0.5},
    {"query": "whitened", "evaluation": "image"},
    {"relevance": "density", "relevance_temperature": 2.0},
    {"relevance": "density", "top_k": 2, "variant": "independent"},
    {"variant": "deterministic"},
    {"variant": "independent"},
    {"variant": "independent", "samples": 0},
    {"variant": "independent", "aggregation": "mean", "top_k": 2},
    {"variant": "independent", "evaluation": "mean", "relevance_temperature": "sqrt_dim"},
]


def fresh(seed: int = 7, **settings: Any) -> ProbPrompt:
    """A small method before training."""
    small = {"blocks": BLOCKS, "tokens": 4, "components": 3, "samples": 5, **settings}
    return ProbPrompt(ProbPromptConfig(**small), Shape(WIDTH, DEPTH), seed)


def moved(**settings: Any) -> ProbPrompt:
    """A small method whose Gaussians are no longer where they began; the cached ones are."""
    method = fresh(**settings)
    move(method, 7)
    method.see_queries(some_queries(9)) if method.statistics else None
    return method


def some_queries(count: int = BATCH) -> Tensor:
    """Queries in the midst of the Gaussians, so that no relevance is nearly 0 or 1."""
    return 0.5 + normal(count, WIDTH, scale=0.7)


def training_noise(method: ProbPrompt, seed: int = 5, images: int = BATCH) -> list[Tensor]:
    """The noise of every block, (B, pools, N_s, D), as the generator of `training` gives it."""
    config = method.config
    pools = config.tokens * (config.components if config.variant == "independent" else 1)
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(images, pools, config.samples, WIDTH, generator=source) for _ in config.blocks]


# The paper once more, for one query and one pool: mean and sigma (N, D), noise (N_s, D) or (N, N_s, D)


def paper_query(method: ProbPrompt, query: Array) -> Array:
    if method.config.query == "whitened":
        return np.asarray((query - method.query_mean.numpy()) @ method.whitening.numpy())
    return query / math.sqrt(query @ query) if method.config.query == "unit" else query


def paper_relevance(
    query: Array, mean: Array, sigma: Array, temperature: float, top_k: int | None, density: bool
) -> Array:
    scores = np.empty(len(mean))
    for n in range(len(mean)):
        covariance = np.diag(sigma[n] ** 2)
        distance = (query - mean[n]) @ np.linalg.inv(covariance) @ (query - mean[n])
        scores[n] = math.exp(-(distance + density * math.log(np.linalg.det(covariance))) / temperature)
    for n in np.argsort(scores)[: 0 if top_k is None else len(mean) - top_k]:
        scores[n] = 0.0
    return np.asarray(scores / scores.sum())


def paper_aggregate(samples: list[Array], query: Array, aggregation: tuple[str, float]) -> Array:
    cosines = [sample @ query / math.sqrt(sample @ sample) / math.sqrt(query @ query) for sample in samples]
    weights = [math.exp(cosine / aggregation[1]) if aggregation[0] == "cosine" else 1.0 for cosine in cosines]
    shares = np.array(weights) / sum(weights)
    return np.asarray(sum(share * sample for share, sample in zip(shares, samples, strict=True)))


def paper_mixture(
    scores: Array, mean: Array, sigma: Array, noise: Array, query: Array, aggregation: tuple[str, float]
) -> Array:
    middle, variance = np.zeros(len(query)), np.zeros(len(query))
    for n, score in enumerate(scores):
        middle += score * mean[n]
    for n, score in enumerate(scores):
        variance += score * (sigma[n] ** 2 + (mean[n] - middle) ** 2)
    if not len(noise):
        return middle
    return paper_aggregate([middle + np.sqrt(variance) * epsilon for epsilon in noise], query, aggregation)


def paper_independent(
    scores: Array, mean: Array, sigma: Array, noise: Array, query: Array, aggregation: tuple[str, float]
) -> Array:
    prompt = np.zeros(len(query))
    for n, score in enumerate(scores):
        samples = [mean[n] + sigma[n] * epsilon for epsilon in noise[n]]
        prompt += score * (paper_aggregate(samples, query, aggregation) if samples else mean[n])
    return prompt


def paper_tokens(method: ProbPrompt, slot: int, query: Tensor, noise: Tensor, sampled: bool) -> Array:
    """All tokens of a block, (B, M, D), from the noise (B, pools, N_s, D)."""
    config = method.config
    means = method.mean[slot].detach().double().numpy()  # (M, N, D)
    sigmas = np.exp(method.log_std[slot].detach().double().numpy())  # (M, N, D)
    named = {"sqrt_dim": math.sqrt(WIDTH), "dim": WIDTH, "initial_std": 1 / config.initial_std**2}
    temperature = named.get(str(config.relevance_temperature))
    divisor = temperature or float(config.relevance_temperature)
    epsilons = noise.double().numpy()[:, :, : config.samples if sampled else 0]
    density, aggregation = config.relevance == "density", (config.aggregation, config.aggregation_temperature)
    result = np.empty((len(query), config.tokens, WIDTH))
    for b, one in enumerate(paper_query(method, each) for each in query.double().numpy()):
        for m in range(config.tokens):
            scores = paper_relevance(one, means[m], sigmas[m], divisor, config.top_k, density)
            if config.variant == "independent":
                pool = epsilons[b, m * config.components : (m + 1) * config.components]
                result[b, m] = paper_independent(scores, means[m], sigmas[m], pool, one, aggregation)
            else:
                result[b, m] = paper_mixture(scores, means[m], sigmas[m], epsilons[b, m], one, aggregation)
    return result


def own_noise(keys: Tensor, noise: Tensor, slot: int) -> Tensor:
    """The noise of a block (G, N_s, D), turned for every image: (B, G, N_s, D)."""
    if not noise.shape[1]:
        return noise.expand(len(keys), -1, -1, -1)
    turns = Turns(keys, noise.shape[0], WIDTH, 7, "turned noise", slot)
    return torch.stack([turns.back(part.expand(len(keys), -1, -1)) for part in noise.unbind(dim=1)], dim=2)


def test_the_first_half_of_the_tokens_are_keys() -> None:
    """One Gaussian and no sampling: the tokens are the means, in order; in the last block as well."""
    method = fresh(tokens=8, components=1, samples=0, blocks=(1, DEPTH - 1))
    found = injected(method, some_queries())
    assert list(found) == [1, DEPTH - 1]
    for slot, tokens in enumerate(found.values()):
        torch.testing.assert_close(tokens, method.mean[slot, :, 0].expand(BATCH, -1, -1))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_tokens_follow_the_paper(settings: dict[str, Any]) -> None:
    """In training, at evaluation with the fixed noise, and in every further draw with noise of its own."""
    method, query = moved(**settings, evaluation_draws=3), some_queries()
    random = method.config.variant != "deterministic"
    sampled, keys = random and method.config.evaluation != "mean", torch.tensor([7, -1, 2**60])
    assert method.draws == (3 if sampled and method.config.samples else 1)
    assert method.needs_keys == (method.config.evaluation == "image")
    cases = [(training(), random, training_noise(method))]
    for draw, noise in enumerate(method.fixed_noise.unbind(1)):
        shared = [part.expand(BATCH, -1, -1, -1) for part in noise]
        own = [own_noise(keys, part, slot) for slot, part in enumerate(noise)]
        cases.append((Context(draw=draw, keys=keys), sampled, own if method.needs_keys else shared))
        cases.append((Context(draw=draw, keys=keys, sampled=True), random, own))
        cases.append((Context(draw=draw, sampled=False), False, shared))
    for context, with_noise, noises in cases:
        found = injected(method, query, context)
        for slot, noise in enumerate(noises):
            close(found[BLOCKS[slot]], paper_tokens(method, slot, query, noise, with_noise), 2e-5, 2e-6)
    assert torch.equal(method.fixed_noise[:, 0], moved(**settings).fixed_noise[:, 0])


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_relevance_is_shown_as_it_is_used(settings: dict[str, Any]) -> None:
    shown = moved(**settings).relevance(some_queries())
    method = moved(**{**settings, "samples": 0, "evaluation_samples": None})
    found = injected(method, some_queries())
    assert list(shown) == list(BLOCKS)
    for slot, block in enumerate(BLOCKS):
        assert shown[block].shape == (BATCH, 4 if "tokens" not in settings else 2, settings.get("components", 3))
        torch.testing.assert_close(found[block], torch.einsum("bmn,mnd->bmd", shown[block], method.mean[slot]))
        if not settings:
            assert 0.4 < shown[block].amax(dim=-1).mean() < 0.95, "the tests of this file look at real mixtures"


def test_the_deterministic_variant_has_unit_variance_and_neither_learns_it_nor_samples() -> None:
    method = fresh(variant="deterministic", initial_std=0.3)
    assert (method.log_std == 0).all() and (method.cached_log_std == 0).all()
    assert [name for name, _ in method.named_parameters()] == ["mean"], "what is never learned is not counted either"
    context, query = training(seed=5), some_queries()
    first = injected(method, query, context)
    assert context.noise is not None and context.noise._source is None  # never asked
    assert same(first, injected(method, query, training(seed=6))) and same(first, injected(method, query))
    first[BLOCKS[0]].sum().backward()
    assert method.mean.grad is not None and method.mean.grad[0].abs().sum() > 0


def test_the_noise_of_evaluation_is_one_per_draw_block_token_and_sample() -> None:
    method = fresh(tokens=8, samples=30, evaluation_draws=3)
    every = method.fixed_noise
    assert every.shape == (2, 3, 8, 30, WIDTH) and len(every.flatten(0, 3).unique(dim=0)) == 3 * 2 * 8 * 30
    assert abs(float(every.mean())) < 0.1 and float(every.std()) == pytest.approx(1, abs=0.1)


def test_evaluation_with_the_mean_still_trains_with_samples() -> None:
    sampling, mean, query = moved(), moved(evaluation="mean"), some_queries()
    assert same(injected(mean, query, training()), injected(sampling, query, training()))
    assert same(injected(mean, query), injected(moved(samples=0), query))
    assert not torch.allclose(injected(mean, query)[1], injected(sampling, query)[1])


def test_training_noise_is_that_of_the_step_and_of_nothing_else() -> None:
    method, query = moved(), some_queries()
    one, other = (injected(method, query, training(seed=seed)) for seed in (5, 6))
    assert same(one, injected(method, query, training(3, torch.tensor([7, 8, 7]), 7, seed=5)))
    assert not any(torch.isclose(one[block], other[block]).any() for block in BLOCKS)


def test_training_noise_is_fresh_for_every_image_token_and_block() -> None:
    method = fresh(components=1)
    with torch.no_grad():
        method.mean.fill_(0.5)  # all pools alike: only the noise can make tokens differ
    found = injected(method, some_queries(1).expand(4, -1), training())
    every = torch.cat([found[block].flatten(0, 1) for block in BLOCKS])
    assert len(every.detach().unique(dim=0)) == len(every) == 2 * 4 * 4


@pytest.mark.parametrize(
    "settings",
    [
        *({}, {"variant": "independent"}, {"aggregation": "mean"}, {"top_k": 2}, {"samples": 0}, {"samples": 1}),
        *({"relevance": "density"}, {"query": "whitened", "aggregation_temperature": 0.2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["mean", "log_std"])
def test_gradients_go_through_relevance_moments_and_aggregation(settings: dict[str, Any], name: str) -> None:
    method, query = moved(**settings).double(), some_queries().double()
    weights = normal(BATCH, 4, WIDTH, seed=4).double()

    def value() -> Tensor:
        return (weights * torch.stack(list(injected(method, query, training()).values()))).sum()

    gradient = check_gradient(value, getattr(method, name))
    assert (gradient != 0).flatten(1).any(dim=1).all()


@pytest.mark.parametrize("kind", ["means", "none"])
@pytest.mark.parametrize("settings", [{}, {"relevance": "density", "top_k": 2}], ids=str)
def test_the_gradient_of_the_relevance_stops_where_it_is_told_to(settings: dict[str, Any], kind: str) -> None:
    """Against autograd through the equations, detached by hand."""
    method, query = moved(**settings, relevance_gradient=kind, samples=0).double(), some_queries().double()
    weights = normal(BATCH, 4, WIDTH, seed=4).double()
    sum((weights * part).sum() for part in injected(method, query, training()).values()).backward()  # type: ignore[union-attr]
    for slot in range(len(BLOCKS)):
        mean, log_std = (part[slot].detach().requires_grad_() for part in (method.mean, method.log_std))
        given = (mean, log_std.detach()) if kind == "means" else (mean.detach(), log_std.detach())
        relevance = equations.relevance(query, *given, density=method.config.relevance == "density")
        relevance = equations.top_k(relevance, 2) if settings else relevance
        (weights * equations.mixture_moments(relevance, mean, log_std)[0]).sum().backward()
        assert method.mean.grad is not None and method.log_std.grad is not None
        torch.testing.assert_close(method.mean.grad[slot], mean.grad)
        assert (method.log_std.grad[slot] == 0).all()  # a mean prompt reaches them through the relevance alone


def test_prompts_are_injected_where_the_settings_say() -> None:
    query, tokens = some_queries(), injected(moved(), some_queries())
    for injection, projected in (("prefix", False), ("projected", True)):
        for block, prompt in moved(injection=injection).prompts(query, EVALUATION).prompts.items():
            assert isinstance(prompt, Prefix) and prompt.projected == projected
            assert torch.equal(torch.cat([prompt.key, prompt.value], dim=1), tokens[block])
    for prompt in moved(halves=False).prompts(query, EVALUATION).prompts.values():
        assert isinstance(prompt, Prefix) and torch.equal(prompt.key, prompt.value) and prompt.length == 4
    for injection, readout in (("tokens", "class"), ("read-tokens", "tokens")):
        method = moved(injection=injection)
        assert method.readout == readout and same(injected(method, query), tokens)


def test_deviations_may_begin_apart_and_learn_at_their_own_rate() -> None:
    log_std = fresh(initial_std=2.0, initial_log_std_scale=0.5).log_std.detach() - math.log(2.0)
    assert 0 <= log_std.min() < 0.05 and 0.45 < log_std.max() < 0.5 and log_std.unique().numel() > 100
    method = fresh(log_std_lr_scale=0.1)
    (means, one), (deviations, scale) = method.groups()
    assert means[0] is method.mean and deviations[0] is method.log_std and (one, scale) == (1.0, 0.1)
    fixed = fresh(log_std_lr_scale=0)
    assert [name for name, _ in fixed.named_parameters()] == ["mean"] and [
        len(parts) for parts, _ in fixed.groups()
    ] == [1]
    assert [(len(parts), scale) for parts, scale in fresh().groups()] == [(2, 1.0)]


def test_noise_of_each_image_asks_for_keys() -> None:
    with pytest.raises(UserError, match="keys"):
        injected(moved(evaluation="image"), some_queries())


def gaussians(mean: Tensor, log_std: Tensor) -> Independent[Normal]:
    return Independent(Normal(mean.detach().double(), log_std.detach().double().exp()), 1)


def test_drift_is_zero_without_gradient_where_nothing_moved() -> None:
    method = fresh(initial_std=0.7)
    torch.testing.assert_close(method.log_std.exp(), torch.full((2, 4, 3, WIDTH), 0.7))
    loss = method.drift()
    loss.backward()
    assert loss.item() == 0
    assert all(value.grad is not None and (value.grad == 0).all() for value in (method.mean, method.log_std))


def test_drift_is_the_divergence_from_cached_to_current_per_component_summed_over_blocks() -> None:
    method = moved(blocks=(0, 1, 4), tokens=4, components=3)
    with torch.no_grad():
        method.log_std.add_(0.5)  # wider than the cached ones, so that the direction tells
    cached, current = gaussians(method.cached_mean, method.cached_log_std), gaussians(method.mean, method.log_std)
    expected = sum(sum(float(kl) for pool in block for kl in pool) / 12 for block in kl_divergence(cached, current))
    assert method.drift().item() == pytest.approx(expected, rel=1e-5)
    assert float(kl_divergence(current, cached).mean(dim=(1, 2)).sum()) > 1.5 * expected
    method.drift().backward()
    assert not method.cached_mean.requires_grad and not method.cached_log_std.requires_grad
    assert all(value.grad is not None and (value.grad != 0).all() for value in (method.mean, method.log_std))


def test_the_loss_in_training_is_the_weighted_drift() -> None:
    method = moved(regularization=0.25)
    assert loss_of(method, some_queries(), training()).item() == pytest.approx(0.25 * method.drift().item())
    assert method.prompts(some_queries(), EVALUATION).loss is None
    assert moved(regularization=0).prompts(some_queries(), training()).loss is None


HOOKS: dict[str, Callable[[ProbPrompt], None]] = {
    "step": lambda method: method.before_step(),
    "epoch": lambda method: method.begin_epoch(),
    "task": lambda method: method.begin_task(1, 2),
}


@pytest.mark.parametrize("reference", HOOKS)
@pytest.mark.parametrize("event", HOOKS)
def test_the_cache_moves_with_its_reference_alone(reference: str, event: str) -> None:
    method = moved(reference=reference)
    before = method.drift().item()
    assert before > 0
    HOOKS[event](method)
    moves = event == reference
    assert method.drift().item() == (0 if moves else before)
    assert torch.equal(method.cached_mean, method.mean) == moves
    assert torch.equal(method.cached_log_std, method.log_std) == moves


def test_every_step_is_compared_with_the_parameters_of_the_step_before() -> None:
    method, query = fresh(regularization=1.0), some_queries()
    used: list[tuple[Tensor, Tensor]] = []
    for step in range(3):
        used.append((method.mean.detach().clone(), method.log_std.detach().clone()))
        loss = loss_of(method, query, training(seed=step))
        between = kl_divergence(gaussians(*used[max(0, step - 1)]), gaussians(*used[step])).mean(dim=(1, 2)).sum()
        assert loss.item() == pytest.approx(float(between), rel=1e-5)
        assert (loss.item() == 0) == (step == 0)
        method.before_step()
        move(method, seed=step)
    assert torch.equal(method.cached_mean, used[-1][0])
    assert not torch.equal(method.cached_mean, method.mean)
