"""VQ-Prompt against its formulas, written down a second time with loops in float64."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from method_helpers import Array, array, check_gradient, close, injected, loss_of, move, normal, training
from probprompt.methods import EVALUATION, Context, Shape, vq_prompt
from probprompt.methods.vq_prompt import VQPrompt, VQPromptConfig

WIDTH, DEPTH, BATCH = 6, 5, 16
BLOCKS = (1, 3)
TRAINING = training()

SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 5},
    {"temperature": 0.3},
    {"components": 1},
    {"tokens": 2},
    {"initial": "normal", "initial_scale": 0.02},
    {"quantize": False},
    {"quantize": False, "temperature": 5},
]


def fresh(width: int = WIDTH, **settings: Any) -> VQPrompt:
    small = {"blocks": BLOCKS, "tokens": 4, "components": 5, **settings}
    return VQPrompt(VQPromptConfig(**small), Shape(width, DEPTH), 7)


def moved(**settings: Any) -> VQPrompt:
    """A small method whose keys and pool are no longer where they began."""
    method = fresh(**settings)
    move(method, 7, distance=0.7)
    return method


def some_queries(count: int = BATCH) -> Tensor:
    return 0.5 + normal(count, WIDTH, scale=1.5)


# The paper once more, for one query and one block: keys (N, D), pool (N, L, D)


def paper_weights(query: Array, keys: Array, temperature: float) -> Array:
    scores = [math.exp(query @ key / math.sqrt(key @ key) / temperature) for key in keys]
    return np.array(scores) / sum(scores)


def paper_choice(soft: Array, pool: Array) -> int:
    distances = [sum(float(value) ** 2 for value in (soft - prompt).ravel()) for prompt in pool]
    return distances.index(min(distances))


def paper_prompts(method: VQPrompt, slot: int, queries: Tensor) -> tuple[Array, Array, list[int]]:
    """Soft and chosen prompts (B, L, D), and which are chosen."""
    keys, pool = array(method.keys[slot]), array(method.pool[slot])
    soft, chosen, which = [], [], []
    for query in queries.double().numpy():
        weights = paper_weights(query, keys, method.config.temperature)
        soft.append(sum(weight * prompt for weight, prompt in zip(weights, pool, strict=True)))
        which.append(paper_choice(soft[-1], pool))
        chosen.append(pool[which[-1]])
    return np.array(soft), np.array(chosen), which


@pytest.mark.parametrize("context", [EVALUATION, TRAINING], ids=["evaluation", "training"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_tokens_follow_the_paper(settings: dict[str, Any], context: Context) -> None:
    method, query = moved(**settings), some_queries()
    found = injected(method, query, context)
    assert list(found) == list(BLOCKS)
    for slot, block in enumerate(BLOCKS):
        soft, chosen, which = paper_prompts(method, slot, query)
        close(found[block], chosen if method.config.quantize else soft)
        if method.config.quantize:
            assert torch.equal(found[block], method.pool[slot][which]), "it is one of the pool to the last bit"
        if not settings:
            assert len(set(which)) >= 2 and np.abs(soft - chosen).max() > 0.1


def test_the_first_half_of_the_tokens_are_keys_and_the_second_half_values() -> None:
    method = fresh(components=1, tokens=8)
    for slot, tokens in enumerate(injected(method, some_queries(2)).values()):
        assert torch.equal(tokens, method.pool[slot].expand(2, -1, -1))


@pytest.mark.parametrize(
    ("soft", "pool", "expected"),
    [
        # weights 0.40, 0.41 and 0.19: the third, between the other two, is nearest though it weighs least
        ([[0.029]], [[[-1.0]], [[1.0]], [[0.1]]], 2),
        # the first token is nearer to the second prompt's, both tokens together are to the first's
        ([[0.9], [1.0]], [[[0.0], [0.0]], [[1.0], [4.0]]], 0),
        # absolute values: 3 and 4; squares: 9 and 8
        ([[0.0, 0.0, 0.0]], [[[3.0, 0.0, 0.0]], [[2.0, 2.0, 0.0]]], 1),
    ],
    ids=["the soft prompt decides", "all tokens together", "squared distances"],
)
def test_nearest(soft: list[Any], pool: list[Any], expected: int) -> None:
    assert vq_prompt.nearest(torch.tensor([soft]), torch.tensor(pool)).tolist() == [expected]


@pytest.mark.parametrize(("temperature", "odds"), [(1.0, 3.0), (0.5, 9.0), (2.0, math.sqrt(3.0))])
def test_weights_of_a_query_by_hand(temperature: float, odds: float) -> None:
    method = fresh(width=2, blocks=(0,), components=2, temperature=temperature)
    with torch.no_grad():
        method.keys[0] = torch.tensor([[3.0, 0.0], [0.0, 5.0]])
    weights = method.relevance(torch.tensor([[math.log(3), 0.0]]))[0]
    torch.testing.assert_close(weights, torch.tensor([[[odds, 1.0]]]) / (odds + 1))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_relevance_is_the_softmax_over_the_pool(settings: dict[str, Any]) -> None:
    method, query = moved(**settings), some_queries()
    shown = method.relevance(query)
    assert list(shown) == list(BLOCKS)
    for slot, block in enumerate(BLOCKS):
        keys = array(method.keys[slot])
        expected = [paper_weights(one, keys, method.config.temperature) for one in array(query)]
        assert shown[block].shape == (BATCH, 1, method.config.components)
        close(shown[block][:, 0], np.array(expected), atol=1e-7)


def test_the_gradient_goes_straight_through_to_the_soft_prompt() -> None:
    query, upstream = some_queries(), normal(2, BATCH, 4, WIDTH, seed=3)
    gradients = []
    for quantize in (True, False):
        method = moved(quantize=quantize)
        tokens = torch.stack(list(injected(method, query, TRAINING).values()))
        gradients.append(torch.autograd.grad((tokens * upstream).sum(), [method.pool, method.keys]))
    for hard, soft in zip(*gradients, strict=True):
        torch.testing.assert_close(hard, soft)
        assert (soft != 0).all()


def test_the_losses_by_hand() -> None:
    method, query = moved(commitment_weight=0.4, pool_weight=0.1), some_queries()
    total = 0.0
    for slot in range(len(BLOCKS)):
        soft, chosen, _ = paper_prompts(method, slot, query)
        total += 0.5 * sum(float(value) ** 2 for value in (soft - chosen).ravel()) / (BATCH * 4 * WIDTH)
    assert loss_of(method, query, TRAINING).item() == pytest.approx(total, rel=1e-5)
    assert total > 0.01
    assert VQPromptConfig(commitment_weight=0.4, pool_weight=0.1, temperature=1.0) == VQPromptConfig()
    assert method.prompts(query, EVALUATION).loss is None
    assert moved(quantize=False).prompts(query, TRAINING).loss is None


def test_the_pool_loss_moves_the_chosen_prompts_alone() -> None:
    method, query = moved(commitment_weight=0, pool_weight=0.3), some_queries()
    loss = loss_of(method, query, TRAINING)
    pool_gradient, keys_gradient = torch.autograd.grad(loss, [method.pool, method.keys], allow_unused=True)
    assert keys_gradient is None or (keys_gradient == 0).all()
    for slot in range(len(BLOCKS)):
        soft, chosen, which = paper_prompts(method, slot, query)
        expected = np.zeros(method.pool[slot].shape)
        for image, entry in enumerate(which):
            expected[entry] += 0.3 * 2 * (chosen[image] - soft[image]) / (BATCH * 4 * WIDTH)
        close(pool_gradient[slot], expected, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("name", ["pool", "keys"])
def test_the_commitment_loss_moves_the_soft_prompts_alone(name: str) -> None:
    """The gradient equals finite differences of the distance to prompts that stay where they are."""
    method, query = moved(commitment_weight=0.7, pool_weight=0).double(), some_queries().double()
    targets = [paper_prompts(method, slot, query)[1] for slot in range(len(BLOCKS))]

    def distance() -> float:
        softs = [paper_prompts(method, slot, query)[0] for slot in range(len(BLOCKS))]
        return sum(0.7 * float(((soft - to) ** 2).mean()) for soft, to in zip(softs, targets, strict=True))

    check_gradient(lambda: loss_of(method, query, TRAINING), getattr(method, name), distance)


def test_small_differences_decide_though_the_prompts_are_large() -> None:
    """In float32 a soft prompt near 1000 is off by 6e-5, more than what distinguishes these prompts."""
    method, query = moved(), some_queries(64)
    with torch.no_grad():
        method.pool.mul_(3e-4).add_(1000)
    for slot, tokens in enumerate(injected(method, query).values()):
        _, _, which = paper_prompts(method, slot, query)
        assert len(set(which)) >= 2
        assert torch.equal(tokens, method.pool[slot][which])
