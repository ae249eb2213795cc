"""ProbPrompt against the paper's equations, written down a second time with loops in float64."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor
from torch.distributions import Independent, Normal, kl_divergence

from probprompt.errors import UserError
from probprompt.methods import EVALUATION, Context, Shape, parse_config
from probprompt.methods.probprompt import ProbPrompt, ProbPromptConfig
from probprompt.prompts import Prefix
from probprompt.randomness import Noise

Array = NDArray[np.float64]

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
    {"relevance_temperature": "dim"},
    {"relevance_temperature": 0.5},
    {"evaluation": "mean"},
    {"variant": "deterministic"},
    {"variant": "independent"},
    {"variant": "independent", "samples": 0},
    {"variant": "independent", "aggregation": "mean", "top_k": 2},
    {"variant": "independent", "evaluation": "mean", "relevance_temperature": "sqrt_dim"},
]


def fresh(seed: int = 7, width: int = WIDTH, **settings: Any) -> ProbPrompt:
    """A small method before training."""
    small = {"blocks": BLOCKS, "tokens": 4, "components": 3, "samples": 5, **settings}
    return ProbPrompt(ProbPromptConfig(**small), Shape(width, DEPTH), seed)


def moved(seed: int = 7, **settings: Any) -> ProbPrompt:
    """A small method whose Gaussians are no longer where they began; the cached ones are."""
    method = fresh(seed, **settings)
    move(method, seed)
    return method


@torch.no_grad()
def move(method: ProbPrompt, seed: int, distance: float = 0.3) -> None:
    """Change what is trained, as an optimiser would."""
    source = torch.Generator().manual_seed(seed)
    for parameter in method.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn(parameter.shape, generator=source), alpha=distance)


def some_queries(count: int = BATCH, seed: int = 1) -> Tensor:
    """Queries in the midst of the Gaussians, so that no relevance is nearly 0 or 1."""
    return 0.5 + 0.7 * torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def training(seed: int = 5, task: int = 0) -> Context:
    return Context(training=True, task=task, noise=Noise(torch.tensor([seed])))


def training_noise(method: ProbPrompt, seed: int = 5, images: int = BATCH) -> list[Tensor]:
    """The noise of every block, (B, pools, N_s, D), as the generator of `training` gives it."""
    config = method.config
    pools = config.tokens * (config.components if config.variant == "independent" else 1)
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(images, pools, config.samples, WIDTH, generator=source) for _ in config.blocks]


def tokens_of(method: ProbPrompt, query: Tensor, context: Context = EVALUATION) -> dict[int, Tensor]:
    """Keys and values of every block, one after the other: (B, M, D)."""
    prefixes = prefixes_of(method, query, context)
    return {block: torch.cat([prefix.key, prefix.value], dim=1) for block, prefix in prefixes.items()}


def prefixes_of(method: ProbPrompt, query: Tensor, context: Context = EVALUATION) -> dict[int, Prefix]:
    """What is injected, all of it prefixes."""
    found = {}
    for block, prompt in method.prompts(query, context).prompts.items():
        assert isinstance(prompt, Prefix)
        found[block] = prompt
    return found


# The paper once more, for one query and one pool: mean and sigma (N, D), noise (N_s, D) or (N, N_s, D)


def paper_relevance(query: Array, mean: Array, sigma: Array, temperature: float, top_k: int | None) -> Array:
    scores = np.empty(len(mean))
    for n in range(len(mean)):
        precision = np.linalg.inv(np.diag(sigma[n] ** 2))
        scores[n] = math.exp(-((query - mean[n]) @ precision @ (query - mean[n])) / temperature)
    for n in np.argsort(scores)[: 0 if top_k is None else len(mean) - top_k]:
        scores[n] = 0.0
    return np.asarray(scores / scores.sum())


def paper_aggregate(samples: list[Array], query: Array, aggregation: str) -> Array:
    cosines = [sample @ query / math.sqrt(sample @ sample) / math.sqrt(query @ query) for sample in samples]
    weights = [math.exp(cosine) if aggregation == "cosine" else 1.0 for cosine in cosines]
    shares = np.array(weights) / sum(weights)
    return np.asarray(sum(share * sample for share, sample in zip(shares, samples, strict=True)))


def paper_mixture(scores: Array, mean: Array, sigma: Array, noise: Array, query: Array, aggregation: str) -> Array:
    middle, variance = np.zeros(len(query)), np.zeros(len(query))
    for n, score in enumerate(scores):
        middle += score * mean[n]
    for n, score in enumerate(scores):
        variance += score * (sigma[n] ** 2 + (mean[n] - middle) ** 2)
    if not len(noise):
        return middle
    return paper_aggregate([middle + np.sqrt(variance) * epsilon for epsilon in noise], query, aggregation)


def paper_independent(scores: Array, mean: Array, sigma: Array, noise: Array, query: Array, aggregation: str) -> Array:
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
    temperature = {"sqrt_dim": math.sqrt(WIDTH), "dim": WIDTH}.get(str(config.relevance_temperature))
    divisor = temperature or float(config.relevance_temperature)
    epsilons = noise.double().numpy()[:, :, : config.samples if sampled else 0]
    result = np.empty((len(query), config.tokens, WIDTH))
    for b, one in enumerate(query.double().numpy()):
        for m in range(config.tokens):
            scores = paper_relevance(one, means[m], sigmas[m], divisor, config.top_k)
            if config.variant == "independent":
                pool = epsilons[b, m * config.components : (m + 1) * config.components]
                result[b, m] = paper_independent(scores, means[m], sigmas[m], pool, one, config.aggregation)
            else:
                result[b, m] = paper_mixture(scores, means[m], sigmas[m], epsilons[b, m], one, config.aggregation)
    return result


def close(found: Tensor, expected: Array) -> None:
    np.testing.assert_allclose(found.detach().double().numpy(), expected, rtol=2e-5, atol=2e-6)


# Shapes


def test_the_first_four_tokens_are_keys_and_the_last_four_values() -> None:
    method = fresh(tokens=8, components=1, samples=0)
    prompts = prefixes_of(method, some_queries())
    assert list(prompts) == list(BLOCKS)
    for slot, block in enumerate(BLOCKS):
        assert prompts[block].key.shape == prompts[block].value.shape == (BATCH, 4, WIDTH)
        for image in range(BATCH):  # one Gaussian and no sampling: the tokens are the means, in order
            torch.testing.assert_close(prompts[block].key[image], method.mean[slot, :4, 0])
            torch.testing.assert_close(prompts[block].value[image], method.mean[slot, 4:, 0])


def test_the_papers_model_has_the_papers_number_of_parameters() -> None:
    method = ProbPrompt(ProbPromptConfig(), Shape(768, 12), 0)
    assert method.mean.shape == method.log_std.shape == (5, 8, 10, 768)
    assert sum(parameter.numel() for parameter in method.parameters()) == 614_400
    assert method.fixed_noise.shape == (5, 8, 30, 768)


# Tokens


def test_the_checks_below_look_at_real_mixtures() -> None:
    method = moved()
    for weights in method.relevance(some_queries()).values():
        assert 0.4 < weights.amax(dim=-1).mean() < 0.95


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_training_tokens_follow_the_paper(settings: dict[str, Any]) -> None:
    method, query = moved(**settings), some_queries()
    sampled = method.config.variant != "deterministic"
    found = tokens_of(method, query, training())
    for slot, noise in enumerate(training_noise(method)):
        close(found[BLOCKS[slot]], paper_tokens(method, slot, query, noise, sampled))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_evaluation_tokens_follow_the_paper_with_the_fixed_noise(settings: dict[str, Any]) -> None:
    method, query = moved(**settings), some_queries()
    sampled = method.config.variant != "deterministic" and method.config.evaluation == "sample"
    found = tokens_of(method, query)
    for slot, noise in enumerate(method.fixed_noise):
        close(found[BLOCKS[slot]], paper_tokens(method, slot, query, noise.expand(BATCH, -1, -1, -1), sampled))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_relevance_is_shown_as_it_is_used(settings: dict[str, Any]) -> None:
    method, query = moved(**settings), some_queries()
    shown = method.relevance(query)
    assert list(shown) == list(BLOCKS)
    found = tokens_of(moved(**{**settings, "samples": 0}), query)
    for slot, block in enumerate(BLOCKS):
        assert shown[block].shape == (BATCH, method.config.tokens, method.config.components)
        mixed = torch.einsum("bmn,mnd->bmd", shown[block], method.mean[slot])
        torch.testing.assert_close(found[block], mixed)


def test_top_k_leaves_k_components() -> None:
    for weights in moved(top_k=2).relevance(some_queries()).values():
        assert ((weights > 0).sum(dim=-1) == 2).all()
        torch.testing.assert_close(weights.sum(dim=-1), torch.ones(weights.shape[:2]))


@pytest.mark.parametrize(
    ("setting", "divisor"), [("sqrt_dim", math.sqrt(WIDTH)), ("dim", float(WIDTH)), (1, 1.0), (2.5, 2.5)]
)
def test_the_relevance_temperature(setting: str | float, divisor: float) -> None:
    assert fresh(relevance_temperature=setting).temperature == pytest.approx(divisor)


def test_the_deterministic_variant_has_unit_variance_and_neither_learns_it_nor_samples() -> None:
    method = fresh(variant="deterministic", initial_std=0.3)
    assert (method.log_std == 0).all() and (method.cached_log_std == 0).all()
    assert [name for name, _ in method.named_parameters()] == ["mean"], "what is never learned is not counted either"
    context, other, query = training(5), training(6), some_queries()
    first, second, third = (tokens_of(method, query, given) for given in (context, other, EVALUATION))
    assert context.noise is not None and context.noise._source is None  # never asked
    for block in BLOCKS:
        assert torch.equal(first[block], second[block]) and torch.equal(first[block], third[block])
    first[BLOCKS[0]].sum().backward()
    assert method.log_std.grad is None
    assert method.mean.grad is not None and method.mean.grad[0].abs().sum() > 0


# Initial parameters


@pytest.mark.parametrize(
    ("kind", "low", "high", "average", "deviation"),
    [
        ("uniform", 0, 1, 0.5, math.sqrt(1 / 12)),
        ("symmetric", -1, 1, 0, math.sqrt(1 / 3)),
        ("normal", -6, 6, 0, 1),
    ],
)
def test_initial_means(kind: str, low: float, high: float, average: float, deviation: float) -> None:
    for scale in (1.0, 0.02):
        mean = fresh(width=200, tokens=8, initial_mean=kind, initial_mean_scale=scale).mean.detach() / scale
        assert mean.min() >= low and mean.max() < high
        assert float(mean.mean()) == pytest.approx(average, abs=0.03)
        assert float(mean.std()) == pytest.approx(deviation, rel=0.03)
    if kind != "normal":
        assert mean.min() < low + 0.01 and mean.max() > high - 0.01
    else:
        assert mean.abs().max() > 2.5


@pytest.mark.parametrize("std", [1.0, 0.1, 2.0])
def test_initial_standard_deviation(std: float) -> None:
    torch.testing.assert_close(fresh(initial_std=std).log_std.exp(), torch.full((2, 4, 3, WIDTH), std))


def test_what_is_drawn_depends_on_the_seed_and_the_block_alone() -> None:
    method, same, other = fresh(), fresh(), fresh(seed=8)
    assert torch.equal(method.mean, same.mean) and torch.equal(method.fixed_noise, same.fixed_noise)
    assert not torch.equal(method.mean, other.mean) and not torch.equal(method.fixed_noise, other.fixed_noise)
    assert not torch.equal(method.mean[0], method.mean[1])
    alone = fresh(blocks=(BLOCKS[1],))
    assert torch.equal(alone.mean[0], method.mean[1])
    assert torch.equal(alone.fixed_noise[0], method.fixed_noise[1])


# Noise


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_every_draw_of_evaluation_follows_the_paper_with_noise_of_its_own(settings: dict[str, Any]) -> None:
    method, query = moved(**settings, evaluation_draws=3), some_queries()
    sampled = method.config.variant != "deterministic" and method.config.evaluation == "sample"
    assert method.draws == (3 if sampled and method.config.samples else 1)
    for draw in range(1, method.draws):
        found = tokens_of(method, query, Context(draw=draw))
        for slot, noise in enumerate(method.more_noise[draw - 1]):
            close(found[BLOCKS[slot]], paper_tokens(method, slot, query, noise.expand(BATCH, -1, -1, -1), sampled))
    assert torch.equal(method.fixed_noise, moved(**settings).fixed_noise)


def test_further_draws_are_others() -> None:
    method = fresh(evaluation_draws=3)
    draws = torch.cat([method.fixed_noise[None], method.more_noise])
    assert len(draws.flatten(1).unique(dim=0)) == 3 and "more_noise" not in method.state_dict()


def test_the_noise_of_evaluation_is_one_draw_per_block_token_and_sample() -> None:
    method = fresh(tokens=8, samples=30)
    assert method.fixed_noise.shape == (2, 8, 30, WIDTH)
    assert len(method.fixed_noise.flatten(0, 2).unique(dim=0)) == 2 * 8 * 30
    assert float(method.fixed_noise.mean()) == pytest.approx(0, abs=0.1)
    assert float(method.fixed_noise.std()) == pytest.approx(1, abs=0.1)


def test_evaluation_depends_on_no_other_image() -> None:
    method, query = moved(), some_queries(7)
    together, backwards = tokens_of(method, query), tokens_of(method, query.flip(0))
    for block in BLOCKS:
        torch.testing.assert_close(together[block], backwards[block].flip(0))
        for image in range(len(query)):
            alone = tokens_of(method, query[image : image + 1])[block]
            torch.testing.assert_close(together[block][image : image + 1], alone)


def test_evaluation_does_not_change_when_it_is_repeated_between_training_steps() -> None:
    method, query = moved(), some_queries()
    before = tokens_of(method, query)
    tokens_of(method, query, training())
    torch.manual_seed(99)
    after = tokens_of(method, query)
    assert all(torch.equal(before[block], after[block]) for block in BLOCKS)


def test_evaluation_with_the_mean_still_trains_with_samples() -> None:
    sampling, mean, query = moved(), moved(evaluation="mean"), some_queries()
    without = tokens_of(moved(samples=0), query)
    drawn, trained = tokens_of(sampling, query, training()), tokens_of(mean, query, training())
    evaluated = tokens_of(mean, query)
    for block in BLOCKS:
        assert torch.equal(trained[block], drawn[block])
        assert torch.equal(evaluated[block], without[block])
        assert not torch.allclose(evaluated[block], tokens_of(sampling, query)[block])


def test_training_noise_is_that_of_the_step() -> None:
    method, query = moved(), some_queries()
    one, same, other = (tokens_of(method, query, training(seed)) for seed in (5, 5, 6))
    for block in BLOCKS:
        assert torch.equal(one[block], same[block])
        assert not torch.isclose(one[block], other[block]).any()


def test_training_noise_is_fresh_for_every_image_token_and_block() -> None:
    method = fresh(components=1)
    with torch.no_grad():
        method.mean.fill_(0.5)  # all pools alike: only the noise can make tokens differ
    found = tokens_of(method, some_queries(1).expand(4, -1), training())
    every = torch.cat([found[block].flatten(0, 1) for block in BLOCKS])
    assert len(every.detach().unique(dim=0)) == len(every) == 2 * 4 * 4


def test_training_tokens_depend_on_neither_task_nor_labels() -> None:
    method, query = moved(), some_queries()
    told = Context(True, 3, torch.tensor([7, 8, 7]), 7, Noise(torch.tensor([5])))
    found, expected = tokens_of(method, query, told), tokens_of(method, query, training(5))
    assert all(torch.equal(found[block], expected[block]) for block in BLOCKS)


# Gradients


@pytest.mark.parametrize(
    "settings",
    [{}, {"variant": "independent"}, {"aggregation": "mean"}, {"top_k": 2}, {"samples": 0}, {"samples": 1}],
    ids=str,
)
@pytest.mark.parametrize("name", ["mean", "log_std"])
def test_gradients_go_through_relevance_moments_and_aggregation(settings: dict[str, Any], name: str) -> None:
    """A path that is cut anywhere makes the gradient differ from finite differences of the tokens themselves."""
    method, query = moved(**settings).double(), some_queries().double()
    parameter = getattr(method, name)
    source = torch.Generator().manual_seed(3)
    direction = torch.randn(parameter.shape, generator=source, dtype=torch.float64)
    weights = torch.randn(BATCH, 4, WIDTH, generator=source, dtype=torch.float64)

    def value() -> Tensor:
        return (weights * torch.stack(list(tokens_of(method, query, training()).values()))).sum()

    def moved_by(step: float) -> float:
        with torch.no_grad():
            parameter.add_(direction, alpha=step)
            result = float(value())
            parameter.add_(direction, alpha=-step)
        return result

    (gradient,) = torch.autograd.grad(value(), parameter)
    expected = (moved_by(1e-5) - moved_by(-1e-5)) / 2e-5
    assert float((gradient * direction).sum()) == pytest.approx(expected, rel=1e-6)
    assert abs(expected) > 1e-3
    assert (gradient != 0).flatten(1).any(dim=1).all()


# Distribution regularisation


def gaussians(mean: Tensor, log_std: Tensor) -> Independent[Normal]:
    return Independent(Normal(mean.detach().double(), log_std.detach().double().exp()), 1)


def divergence(method: ProbPrompt, reverse: bool = False) -> Tensor:
    """KL(cached || current) of every Gaussian, (blocks, M, N), or the other way round."""
    cached = gaussians(method.cached_mean, method.cached_log_std)
    current = gaussians(method.mean, method.log_std)
    found: Tensor = kl_divergence(current, cached) if reverse else kl_divergence(cached, current)
    return found


def test_regularisation_is_zero_without_gradient_where_nothing_moved() -> None:
    method = fresh(initial_std=0.7)
    loss = method.drift()
    loss.backward()
    assert loss.item() == 0
    for parameter in (method.mean, method.log_std):
        assert parameter.grad is not None and (parameter.grad == 0).all()


def test_regularisation_is_the_divergence_from_cached_to_current_per_component_summed_over_blocks() -> None:
    method = moved(blocks=(0, 1, 4), tokens=4, components=3)
    with torch.no_grad():
        method.log_std.add_(0.5)  # wider than the cached ones, so that the direction tells
    per_block = [sum(float(kl) for pool in block for kl in pool) / (4 * 3) for block in divergence(method)]
    assert method.drift().item() == pytest.approx(sum(per_block), rel=1e-5)
    reverse = float(divergence(method, reverse=True).mean(dim=(1, 2)).sum())
    assert reverse > 1.5 * sum(per_block)


def test_the_cached_gaussians_get_no_gradient() -> None:
    method = moved()
    method.drift().backward()
    assert not method.cached_mean.requires_grad and not method.cached_log_std.requires_grad
    for parameter in (method.mean, method.log_std):
        assert parameter.grad is not None and (parameter.grad != 0).all()


def test_the_loss_in_training_is_the_weighted_drift() -> None:
    method = moved(regularisation=0.25)
    loss = method.prompts(some_queries(), training()).loss
    assert loss is not None
    assert loss.item() == pytest.approx(0.25 * method.drift().item())
    assert method.prompts(some_queries(), EVALUATION).loss is None
    assert moved(regularisation=0).prompts(some_queries(), training()).loss is None


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
    method, query = fresh(regularisation=1.0), some_queries()
    used: list[tuple[Tensor, Tensor]] = []
    for step in range(3):
        used.append((method.mean.detach().clone(), method.log_std.detach().clone()))
        loss = method.prompts(query, training(step)).loss
        assert loss is not None
        between = kl_divergence(gaussians(*used[max(0, step - 1)]), gaussians(*used[step])).mean(dim=(1, 2)).sum()
        assert loss.item() == pytest.approx(float(between), rel=1e-5)
        assert (loss.item() == 0) == (step == 0)
        method.before_step()
        move(method, seed=step)
    assert torch.equal(method.cached_mean, used[-1][0])
    assert not torch.equal(method.cached_mean, method.mean)


# Saving and settings


def test_the_cache_is_saved_and_the_fixed_noise_is_drawn_again() -> None:
    method = moved()
    assert set(method.state_dict()) == {"mean", "log_std", "cached_mean", "cached_log_std"}
    loaded = fresh()
    loaded.load_state_dict(method.state_dict())
    found, expected = tokens_of(loaded, some_queries()), tokens_of(method, some_queries())
    assert all(torch.equal(found[block], expected[block]) for block in BLOCKS)
    assert loaded.drift().item() == method.drift().item() > 0


@pytest.mark.parametrize("blocks", [(DEPTH,), (0, 1, DEPTH + 3), (-1, 0)])
def test_blocks_outside_the_backbone_are_refused(blocks: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=rf"blocks 0 to {DEPTH - 1}.*method\.blocks") as problem:
        fresh(blocks=blocks)
    outside = [block for block in blocks if not 0 <= block < DEPTH]
    assert str(outside) in str(problem.value)


def test_the_last_block_may_be_prompted() -> None:
    assert list(tokens_of(fresh(blocks=(DEPTH - 1,)), some_queries())) == [DEPTH - 1]


@pytest.mark.parametrize(
    "settings",
    [
        {"blocks": (1, 1)},
        {"blocks": ()},
        {"tokens": 5},
        {"tokens": 0},
        {"components": 0},
        {"samples": -1},
        {"components": 4, "top_k": 5},
        {"top_k": 0},
        {"relevance_temperature": 0},
        {"relevance_temperature": "sqrt"},
        {"initial_std": 0},
        {"regularisation": -1},
        {"variant": "mix"},
        {"reference": "batch"},
        {"sample": 3},
    ],
    ids=str,
)
def test_settings_without_meaning_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ProbPromptConfig(**settings)


def test_a_method_is_found_by_name() -> None:
    assert parse_config("probprompt") == ProbPromptConfig()
    assert parse_config({"name": "probprompt", "samples": 3}) == ProbPromptConfig(samples=3)
    with pytest.raises(UserError, match="did you mean 'probprompt'"):
        parse_config("propprompt")
