"""VQ-Prompt against its formulas, written down a second time with loops in float64."""

import doctest
import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor

from probprompt.errors import UserError
from probprompt.methods import EVALUATION, Context, Shape, parse_config, vq_prompt
from probprompt.methods.vq_prompt import VQPrompt, VQPromptConfig
from probprompt.prompts import Prefix

Array = NDArray[np.float64]

WIDTH, DEPTH, BATCH = 6, 5, 16
BLOCKS = (1, 3)
TRAINING = Context(training=True, task=0)

SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 5},
    {"temperature": 0.3},
    {"components": 1},
    {"tokens": 2},
    {"initial": "normal", "initial_scale": 0.02},
    {"quantise": False},
    {"quantise": False, "temperature": 5},
]


def fresh(seed: int = 7, width: int = WIDTH, **settings: Any) -> VQPrompt:
    small = {"blocks": BLOCKS, "tokens": 4, "components": 5, **settings}
    return VQPrompt(VQPromptConfig(**small), Shape(width, DEPTH), seed)


def moved(**settings: Any) -> VQPrompt:
    """A small method whose keys and pool are no longer where they began."""
    method = fresh(**settings)
    source = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=source), alpha=0.7)
    return method


def some_queries(count: int = BATCH, seed: int = 1) -> Tensor:
    return 0.5 + 1.5 * torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def tokens_of(method: VQPrompt, query: Tensor, context: Context = EVALUATION) -> dict[int, Tensor]:
    """Keys and values of every block, one after the other: (B, L, D)."""
    found = {}
    for block, prefix in method.prompts(query, context).prompts.items():
        assert isinstance(prefix, Prefix)
        found[block] = torch.cat([prefix.key, prefix.value], dim=1)
    return found


def loss_of(method: VQPrompt, query: Tensor) -> Tensor:
    loss = method.prompts(query, TRAINING).loss
    assert loss is not None
    return loss


# The paper once more, for one query and one block: keys (N, D), pool (N, L, D)


def paper_weights(query: Array, keys: Array, temperature: float) -> Array:
    scores = [math.exp(query @ key / math.sqrt(key @ key) / temperature) for key in keys]
    return np.array(scores) / sum(scores)


def paper_choice(soft: Array, pool: Array) -> int:
    distances = [sum(float(value) ** 2 for value in (soft - prompt).ravel()) for prompt in pool]
    return distances.index(min(distances))


def paper_prompts(method: VQPrompt, slot: int, queries: Tensor) -> tuple[Array, Array, list[int]]:
    """Soft and chosen prompts (B, L, D), and which are chosen."""
    keys, pool = method.keys[slot].detach().double().numpy(), method.pool[slot].detach().double().numpy()
    soft, chosen, which = [], [], []
    for query in queries.double().numpy():
        weights = paper_weights(query, keys, method.config.temperature)
        soft.append(sum(weight * prompt for weight, prompt in zip(weights, pool, strict=True)))
        which.append(paper_choice(soft[-1], pool))
        chosen.append(pool[which[-1]])
    return np.array(soft), np.array(chosen), which


# What is injected


@pytest.mark.parametrize("context", [EVALUATION, TRAINING], ids=["evaluation", "training"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_tokens_follow_the_paper(settings: dict[str, Any], context: Context) -> None:
    method, query = moved(**settings), some_queries()
    found = tokens_of(method, query, context)
    assert list(found) == list(BLOCKS)
    for slot, block in enumerate(BLOCKS):
        soft, chosen, _ = paper_prompts(method, slot, query)
        expected = chosen if method.config.quantise else soft
        np.testing.assert_allclose(found[block].detach().numpy(), expected, rtol=1e-5, atol=1e-6)


def test_the_checks_look_at_several_prompts_of_the_pool() -> None:
    method, query = moved(), some_queries()
    for slot in range(len(BLOCKS)):
        soft, chosen, which = paper_prompts(method, slot, query)
        assert len(set(which)) >= 2
        assert np.abs(soft - chosen).max() > 0.1


def test_a_chosen_prompt_is_one_of_the_pool_to_the_last_bit() -> None:
    method, query = moved(), some_queries()
    for context in (EVALUATION, TRAINING):
        for slot, tokens in enumerate(tokens_of(method, query, context).values()):
            _, _, which = paper_prompts(method, slot, query)
            assert torch.equal(tokens, method.pool[slot][which])


def test_the_first_half_of_the_tokens_are_keys_and_the_second_half_values() -> None:
    method = fresh(components=1, tokens=8)
    prompts = method.prompts(some_queries(2), EVALUATION).prompts
    for slot, block in enumerate(BLOCKS):
        prefix = prompts[block]
        assert isinstance(prefix, Prefix)
        assert torch.equal(prefix.key, method.pool[slot, :, :4].expand(2, -1, -1))
        assert torch.equal(prefix.value, method.pool[slot, :, 4:].expand(2, -1, -1))


def test_the_soft_prompt_decides_and_not_the_largest_weight() -> None:
    pool = torch.tensor([-1.0, 1.0, 0.1])[:, None, None].expand(3, 2, 4)  # the third lies between the other two
    soft = torch.einsum("bn,nld->bld", torch.tensor([[0.40, 0.41, 0.19]]), pool)
    assert vq_prompt.nearest(soft, pool).tolist() == [2]


def test_all_tokens_are_chosen_together() -> None:
    pool = torch.tensor([[[0.0], [0.0]], [[1.0], [4.0]]])  # (2, 2, 1): two prompts of two tokens
    soft = torch.tensor([[[0.9], [1.0]]])  # its first token is nearer to the second prompt's, both are to the first's
    assert vq_prompt.nearest(soft, pool).tolist() == [0]


def test_squared_distances_count() -> None:
    pool = torch.tensor([[[3.0, 0.0, 0.0]], [[2.0, 2.0, 0.0]]])  # absolute values: 3 and 4; squares: 9 and 8
    assert vq_prompt.nearest(torch.zeros(1, 1, 3), pool).tolist() == [1]


# Relevance


def with_keys(keys: Tensor, **settings: Any) -> VQPrompt:
    method = fresh(width=keys.shape[1], blocks=(0,), components=len(keys), **settings)
    with torch.no_grad():
        method.keys[0] = keys
    return method


@pytest.mark.parametrize(("temperature", "odds"), [(1.0, 3.0), (0.5, 9.0), (2.0, math.sqrt(3.0))])
def test_weights_of_a_query_by_hand(temperature: float, odds: float) -> None:
    method = with_keys(torch.tensor([[3.0, 0.0], [0.0, 5.0]]), temperature=temperature)
    weights = method.relevance(torch.tensor([[math.log(3), 0.0]]))[0]
    torch.testing.assert_close(weights, torch.tensor([[[odds, 1.0]]]) / (odds + 1))


def test_keys_are_normalised_and_queries_are_not() -> None:
    method, longer, query = moved(), moved(), some_queries()
    with torch.no_grad():
        longer.keys.mul_(torch.tensor([0.1, 1.0, 3.0, 10.0, 0.5])[:, None])
    for block, weights in method.relevance(query).items():
        torch.testing.assert_close(longer.relevance(query)[block], weights)
        assert not torch.allclose(method.relevance(2 * query)[block], weights, atol=0.05)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_relevance_is_the_softmax_over_the_pool(settings: dict[str, Any]) -> None:
    method, query = moved(**settings), some_queries()
    shown = method.relevance(query)
    assert list(shown) == list(BLOCKS)
    for slot, block in enumerate(BLOCKS):
        keys = method.keys[slot].detach().double().numpy()
        expected = [paper_weights(one, keys, method.config.temperature) for one in query.double().numpy()]
        assert shown[block].shape == (BATCH, 1, method.config.components)
        np.testing.assert_allclose(shown[block][:, 0].detach().numpy(), expected, rtol=1e-5, atol=1e-7)


# Gradients and losses


def test_the_gradient_goes_straight_through_to_the_soft_prompt() -> None:
    query, upstream = some_queries(), torch.randn(2, BATCH, 4, WIDTH, generator=torch.Generator().manual_seed(3))
    gradients = []
    for quantise in (True, False):
        method = moved(quantise=quantise)
        tokens = torch.stack(list(tokens_of(method, query, TRAINING).values()))
        gradients.append(torch.autograd.grad((tokens * upstream).sum(), [method.pool, method.keys]))
    for hard, soft in zip(*gradients, strict=True):
        torch.testing.assert_close(hard, soft)
        assert (soft != 0).all()


def test_the_losses_by_hand() -> None:
    method, query = moved(commitment_weight=0.4, pool_weight=0.1), some_queries()
    total = 0.0
    for slot in range(len(BLOCKS)):
        soft, chosen, _ = paper_prompts(method, slot, query)
        squares = [float(value) ** 2 for value in (soft - chosen).ravel()]
        total += 0.5 * sum(squares) / (BATCH * 4 * WIDTH)
    assert loss_of(method, query).item() == pytest.approx(total, rel=1e-5)
    assert total > 0.01


def test_the_pool_loss_moves_the_chosen_prompts_alone() -> None:
    method, query = moved(commitment_weight=0, pool_weight=0.3), some_queries()
    pool_gradient, keys_gradient = torch.autograd.grad(
        loss_of(method, query), [method.pool, method.keys], allow_unused=True
    )
    assert keys_gradient is None or (keys_gradient == 0).all()
    for slot in range(len(BLOCKS)):
        soft, chosen, which = paper_prompts(method, slot, query)
        expected = np.zeros(method.pool[slot].shape)
        for image, entry in enumerate(which):
            expected[entry] += 0.3 * 2 * (chosen[image] - soft[image]) / (BATCH * 4 * WIDTH)
        np.testing.assert_allclose(pool_gradient[slot].numpy(), expected, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("name", ["pool", "keys"])
def test_the_commitment_loss_moves_the_soft_prompts_alone(name: str) -> None:
    """The gradient equals finite differences of the distance to prompts that stay where they are."""
    method, query = moved(commitment_weight=0.7, pool_weight=0).double(), some_queries().double()
    targets = [paper_prompts(method, slot, query)[1] for slot in range(len(BLOCKS))]
    parameter: Tensor = getattr(method, name)
    source = torch.Generator().manual_seed(3)
    direction = torch.randn(parameter.shape, generator=source, dtype=torch.float64)

    def distance(step: float) -> float:
        with torch.no_grad():
            parameter.add_(direction, alpha=step)
            softs = [paper_prompts(method, slot, query)[0] for slot in range(len(BLOCKS))]
            parameter.add_(direction, alpha=-step)
        return sum(0.7 * float(((soft - to) ** 2).mean()) for soft, to in zip(softs, targets, strict=True))

    (gradient,) = torch.autograd.grad(loss_of(method, query), parameter)
    expected = (distance(1e-5) - distance(-1e-5)) / 2e-5
    assert float((gradient * direction).sum()) == pytest.approx(expected, rel=1e-6)
    assert abs(expected) > 1e-4


def test_evaluation_and_soft_prompts_have_no_loss() -> None:
    query = some_queries()
    assert moved().prompts(query, EVALUATION).loss is None
    assert moved(quantise=False).prompts(query, TRAINING).loss is None
    assert loss_of(moved(), query).dtype == torch.float32


def test_the_defaults_are_those_of_the_published_code() -> None:
    config = VQPromptConfig()
    assert (config.commitment_weight, config.pool_weight, config.temperature) == (0.4, 0.1, 1.0)
    method = VQPrompt(config, Shape(768, 12), 0)
    assert sum(parameter.numel() for parameter in method.parameters()) == 345_600
    assert method.pool.shape == (5, 10, 8, 768) and method.keys.shape == (5, 10, 768)
    assert list(method.prompts(torch.zeros(1, 768), EVALUATION).prompts) == [0, 1, 2, 3, 4]


# Precision, and independence of other images


def test_no_other_image_matters() -> None:
    method, query = moved(), some_queries(33)
    together, backwards = tokens_of(method, query), tokens_of(method, query.flip(0))
    for block in BLOCKS:
        assert torch.equal(together[block], backwards[block].flip(0))
        for image in range(len(query)):
            assert torch.equal(together[block][image], tokens_of(method, query[image : image + 1])[block][0])


def test_small_differences_decide_though_the_prompts_are_large() -> None:
    """In float32 a soft prompt near 1000 is off by 6e-5, more than what tells these prompts apart."""
    method, query = moved(), some_queries(64)
    with torch.no_grad():
        method.pool.mul_(3e-4).add_(1000)
    for slot, tokens in enumerate(tokens_of(method, query).values()):
        _, _, which = paper_prompts(method, slot, query)
        assert len(set(which)) >= 2
        assert torch.equal(tokens, method.pool[slot][which])


def test_autocast_changes_nothing() -> None:
    method, query = moved(), some_queries()
    plain, loss = tokens_of(method, query), loss_of(method, query)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = tokens_of(method, query)
        assert torch.equal(loss_of(method, query), loss)
    for block in BLOCKS:
        assert cast[block].dtype == torch.float32 and torch.equal(cast[block], plain[block])
    assert tokens_of(method, query.bfloat16())[BLOCKS[0]].dtype == torch.float32


# Initial parameters


@pytest.mark.parametrize(
    ("kind", "low", "high", "average", "deviation"),
    [
        ("uniform", 0, 1, 0.5, math.sqrt(1 / 12)),
        ("symmetric", -1, 1, 0, math.sqrt(1 / 3)),
        ("normal", -6, 6, 0, 1),
    ],
)
def test_initial_parameters(kind: str, low: float, high: float, average: float, deviation: float) -> None:
    method = fresh(width=400, initial=kind, initial_scale=0.02)
    for drawn in (method.pool.detach() / 0.02, method.keys.detach()):
        assert drawn.min() >= low and drawn.max() < high
        assert float(drawn.mean()) == pytest.approx(average, abs=0.04)
        assert float(drawn.std()) == pytest.approx(deviation, rel=0.04)


def test_what_is_drawn_depends_on_the_seed_and_the_block_alone() -> None:
    method, same, other = fresh(), fresh(), fresh(seed=8)
    assert torch.equal(method.pool, same.pool) and torch.equal(method.keys, same.keys)
    assert not torch.equal(method.pool, other.pool) and not torch.equal(method.keys, other.keys)
    assert not torch.equal(method.pool[0], method.pool[1]) and not torch.equal(method.keys[0], method.keys[1])
    assert not torch.isin(method.keys, method.pool).any()
    alone = fresh(blocks=(BLOCKS[1],))
    assert torch.equal(alone.pool[0], method.pool[1]) and torch.equal(alone.keys[0], method.keys[1])


def test_a_new_task_changes_nothing() -> None:
    method = moved()
    before = {name: tensor.clone() for name, tensor in method.state_dict().items()}
    method.begin_task(1, 10)
    assert set(before) == {"pool", "keys"}
    assert all(torch.equal(tensor, before[name]) for name, tensor in method.state_dict().items())
    assert all(parameter.requires_grad for parameter in method.parameters())


# Settings


@pytest.mark.parametrize("blocks", [(DEPTH,), (0, DEPTH + 3), (-1, 0)])
def test_blocks_outside_the_backbone_are_refused(blocks: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=rf"blocks 0 to {DEPTH - 1}.*method\.blocks"):
        fresh(blocks=blocks)


@pytest.mark.parametrize(
    "settings",
    [
        {"blocks": (1, 1)},
        {"blocks": ()},
        {"tokens": 5},
        {"tokens": 0},
        {"components": 0},
        {"temperature": 0},
        {"commitment_weight": -1},
        {"pool_weight": -1},
        {"initial": "zero"},
        {"initial_scale": 0},
        {"samples": 3},
    ],
    ids=str,
)
def test_settings_without_meaning_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        VQPromptConfig(**settings)


def test_the_method_is_found_by_name() -> None:
    assert parse_config({"name": "vq-prompt", "temperature": 5}) == VQPromptConfig(temperature=5)
    assert VQPromptConfig().marks() == ()


def test_doctests() -> None:
    result = doctest.testmod(vq_prompt)
    assert result.failed == 0 and result.attempted > 0
