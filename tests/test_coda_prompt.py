"""CODA-Prompt against its formulas, written down a second time with loops in float64."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from method_helpers import Array, array, check_gradient, close, injected, loss_of, move, normal, training
from probprompt.methods import EVALUATION, Context, Shape
from probprompt.methods.coda_prompt import CodaPrompt, CodaPromptConfig, orthogonality, orthonormal

WIDTH, DEPTH, BATCH = 12, 5, 7
BLOCKS = (1, 3)
TRAINING = training()
NAMES = ("components", "keys", "attention")


def fresh(width: int = WIDTH, **settings: Any) -> CodaPrompt:
    """A small method before its first task."""
    small = {"blocks": BLOCKS, "tokens": 4, "components_per_task": 3, **settings}
    return CodaPrompt(CodaPromptConfig(**small), Shape(width, DEPTH), 7)


def begun(tasks: int, **settings: Any) -> CodaPrompt:
    """A method that began so many tasks, and moved away from where each of them began."""
    method = fresh(**settings)
    for task in range(tasks):
        method.begin_task(task, 10)
        move(method, task)
    return method


def some_queries(count: int = BATCH) -> Tensor:
    return 0.5 + normal(count, WIDTH, scale=2)


def slices_of(method: CodaPrompt, name: str) -> list[Tensor]:
    slices = getattr(method, name)
    assert isinstance(slices, nn.ParameterList)
    return [part.detach() for part in slices]


def vectors_of(method: CodaPrompt, name: str, slot: int) -> Array:
    """All vectors of a block, one after the other: (N, features)."""
    return np.array([vector.double().numpy().ravel() for part in slices_of(method, name) for vector in part[slot]])


# The paper once more


def paper_weights(query: Array, keys: Array, attention: Array) -> Array:
    weights = []
    for key, attend in zip(keys, attention, strict=True):
        seen = query * attend
        weights.append(seen @ key / math.sqrt(seen @ seen) / math.sqrt(key @ key))
    return np.array(weights)


def paper_tokens(method: CodaPrompt, slot: int, queries: Tensor) -> Array:
    keys, attention = vectors_of(method, "keys", slot), vectors_of(method, "attention", slot)
    components = vectors_of(method, "components", slot).reshape(len(keys), -1, WIDTH)
    result = []
    for query in queries.double().numpy():
        weights = paper_weights(query, keys, attention)
        result.append(sum(weight * part for weight, part in zip(weights, components, strict=True)))
    return np.array(result)


def paper_penalty(vectors: Array) -> float:
    count = len(vectors)
    gaps = [(vectors[i] @ vectors[j] - (i == j)) ** 2 for i in range(count) for j in range(count)]
    return float(sum(gaps)) / count**2


def paper_gram_schmidt(drawn: Array, orthogonal: Array) -> Array:
    """The textbook's, one projection at a time, after vectors that are orthogonal to each other."""
    done = list(orthogonal)
    for vector in drawn:
        rest = vector - sum((vector @ other) / (other @ other) * other for other in done)
        done.append(rest / math.sqrt(rest @ rest))
    return np.array(done[len(orthogonal) :])


@pytest.mark.parametrize("context", [EVALUATION, TRAINING], ids=["evaluation", "training"])
@pytest.mark.parametrize("tasks", [1, 3])
@pytest.mark.parametrize("settings", [{}, {"tokens": 2}, {"components_per_task": 1}], ids=str)
def test_tokens_follow_the_paper(settings: dict[str, Any], tasks: int, context: Context) -> None:
    method, query = begun(tasks, **settings), some_queries()
    found = injected(method, query, context)
    assert list(found) == list(BLOCKS)
    for slot, block in enumerate(BLOCKS):
        close(found[block], paper_tokens(method, slot, query))


def test_the_first_half_of_the_tokens_are_keys_and_the_second_half_values() -> None:
    method = begun(1, blocks=(0,), components_per_task=1)
    with torch.no_grad():  # the attended query is the key: its cosine is 1
        method.attention[0].fill_(1.0)
        method.keys[0].copy_(some_queries(1)[None])
    torch.testing.assert_close(injected(method, some_queries(1))[0], method.components[0][0])


def test_weights_do_not_depend_on_lengths_and_may_be_negative() -> None:
    method, query = begun(2), some_queries()
    plain = injected(method, query)
    with torch.no_grad():
        for part in (*method.keys, *method.attention):
            part.mul_(3)
    longer, against = injected(method, 5 * query), injected(method, -query)
    for block in BLOCKS:
        torch.testing.assert_close(longer[block], plain[block])
        torch.testing.assert_close(against[block], -plain[block])


def test_nothing_is_injected_before_the_first_task() -> None:
    assert not fresh().prompts(some_queries(), EVALUATION).prompts
    assert fresh().relevance(some_queries()) == {}


@pytest.mark.parametrize("name", NAMES)
def test_gradients_go_through_weights_and_components(name: str) -> None:
    method, query = begun(2).double(), some_queries().double()
    upstream = normal(2, BATCH, 4, WIDTH, seed=4).double()

    def exact() -> float:
        by_hand = [torch.from_numpy(paper_tokens(method, slot, query)) for slot in range(len(BLOCKS))]
        return float((torch.stack(by_hand) * upstream).sum())

    def value() -> Tensor:
        return (torch.stack(list(injected(method, query, TRAINING).values())) * upstream).sum()

    assert (check_gradient(value, getattr(method, name)[1], exact) != 0).flatten(1).any(dim=1).all()


def test_a_vector_of_zeros_has_weight_zero_and_a_finite_gradient() -> None:
    method = begun(1)
    with torch.no_grad():
        method.attention[0][:, 0] = 0
        method.keys[0][:, 1] = 0
    tokens = injected(method, torch.cat([some_queries(2), torch.zeros(1, WIDTH)]), TRAINING)
    assert all((part[2] == 0).all() and part.isfinite().all() for part in tokens.values())
    torch.stack(list(tokens.values())).sum().backward()
    assert all(part.grad is not None and part.grad.isfinite().all() for part in method.parameters())


def test_relevance_is_each_components_share_of_the_absolute_weights() -> None:
    method, query = begun(3), some_queries()
    shown, nothing = method.relevance(query), method.relevance(torch.zeros(1, WIDTH))
    assert list(shown) == list(BLOCKS)
    for slot, block in enumerate(BLOCKS):
        keys, attention = vectors_of(method, "keys", slot), vectors_of(method, "attention", slot)
        cosines = np.array([np.abs(paper_weights(one, keys, attention)) for one in array(query)])
        assert shown[block].shape == (BATCH, 1, 9)
        close(shown[block][:, 0], cosines / cosines.sum(axis=1, keepdims=True), atol=1e-7)
        torch.testing.assert_close(nothing[block], torch.full((1, 1, 9), 1 / 9))


@pytest.mark.parametrize("name", NAMES)
def test_a_new_slice_is_orthonormal_and_orthogonal_to_what_was_trained(name: str) -> None:
    method = begun(2)
    for slot in range(len(BLOCKS)):
        trained = vectors_of(method, name, slot)
        assert np.abs(trained @ trained.T - np.eye(6)).max() > 0.1
    method.begin_task(2, 10)
    for slot in range(len(BLOCKS)):
        vectors = vectors_of(method, name, slot)
        np.testing.assert_allclose(vectors[6:] @ vectors[6:].T, np.eye(3), atol=1e-6)
        np.testing.assert_allclose(vectors[6:] @ vectors[:6].T, 0, atol=2e-6)


def test_orthonormal_is_gram_schmidt() -> None:
    source = np.random.default_rng(0)
    drawn, base = source.normal(size=(4, 9)), np.linalg.qr(source.normal(size=(9, 3)))[0].T
    orthogonal = base * np.array([[0.1], [2.0], [30.0]])  # of any length
    askew = source.normal(size=(3, 3)) @ orthogonal  # the same span
    expected = paper_gram_schmidt(drawn, orthogonal)
    for earlier in (orthogonal, askew, np.concatenate([askew, askew]), np.concatenate([askew, np.zeros((1, 9))])):
        found = orthonormal(torch.from_numpy(drawn), torch.from_numpy(earlier))
        np.testing.assert_allclose(found, expected, atol=1e-10)
    first = orthonormal(torch.from_numpy(drawn), torch.zeros(0, 9, dtype=torch.float64))
    np.testing.assert_allclose(first, paper_gram_schmidt(drawn, np.zeros((0, 9))), atol=1e-12)


@pytest.mark.parametrize(("count", "earlier"), [(3, 4), (3, 5), (3, 6), (3, 40), (6, 0), (7, 0), (20, 0), (20, 4)])
def test_vectors_without_room_are_orthogonal_within_their_slice_as_far_as_it_goes(count: int, earlier: int) -> None:
    width = 6
    source = torch.Generator().manual_seed(count + earlier)
    before = torch.randn(earlier, width, generator=source, dtype=torch.float64)
    found = orthonormal(torch.randn(count, width, generator=source, dtype=torch.float64), before)
    assert found.shape == (count, width)
    room = max(0, width - earlier)
    cosines = (found @ found.mT).abs()
    torch.testing.assert_close(cosines.diagonal(), torch.ones(count, dtype=torch.float64))
    assert (found[:room] @ before.mT).abs().max() < 1e-10 if room and earlier else True
    alike = cosines - torch.eye(count)
    fitting = alike[: min(count, width), : min(count, width)]
    assert fitting.max() < 1e-10  # up to the width, a slice is orthonormal whatever came before
    assert alike.max() < 0.999  # and beyond it, no vector is there twice


@pytest.mark.parametrize(("width", "each"), [(6, 4), (4, 10), (48, 10), (1, 2)])
def test_a_narrow_backbone_can_learn_more_tasks_than_it_has_room_for(width: int, each: int) -> None:
    method = fresh(width=width, components_per_task=each, tokens=2, orthogonality_weight=0.1)
    for task in range(7):
        method.begin_task(task, 10)
        for name in NAMES:
            newest = slices_of(method, name)[-1].flatten(2)
            torch.testing.assert_close(newest.norm(dim=-1), torch.ones(len(BLOCKS), each))
        move(method, task)
    query = normal(3, width)
    assert loss_of(method, query, TRAINING).isfinite()
    assert all(tokens.isfinite().all() for tokens in injected(method, query, TRAINING).values())


def test_only_the_newest_slice_learns() -> None:
    method, query = begun(3, orthogonality_weight=0.5), some_queries()
    newest = {id(getattr(method, name)[2]) for name in NAMES}
    assert {id(part) for parts, _ in method.groups() for part in parts} == newest
    before = {name: [part.clone() for part in slices_of(method, name)] for name in NAMES}
    optimiser = torch.optim.AdamW([{"params": parts} for parts, _ in method.groups()], lr=0.01, weight_decay=0.1)
    answer = method.prompts(query, TRAINING)
    assert answer.loss is not None
    (torch.stack(list(injected(method, query, TRAINING).values())).square().sum() + answer.loss).backward()
    optimiser.step()
    for name in NAMES:
        after = slices_of(method, name)
        assert torch.equal(after[0], before[name][0]) and torch.equal(after[1], before[name][1])
        assert not torch.isclose(after[2], before[name][2], rtol=0, atol=1e-6).any()


def test_the_loss_is_the_weighted_penalty_over_all_slices_and_blocks() -> None:
    vectors = torch.tensor([[2.0, 0.0], [1.0, 1.0]])  # X X^T = [[4, 2], [2, 2]]
    assert orthogonality(vectors).item() == pytest.approx((3**2 + 2**2 + 2**2 + 1**2) / 4)
    method = begun(3, orthogonality_weight=0.25)
    expected = sum(paper_penalty(vectors_of(method, name, slot)) for name in NAMES for slot in range(len(BLOCKS)))
    assert loss_of(method, some_queries(), TRAINING).item() == pytest.approx(0.25 * expected, rel=1e-5)
    assert expected > 0.1
    assert begun(2).prompts(some_queries(), TRAINING).loss is None, "it has no weight by default"
    assert method.prompts(some_queries(), EVALUATION).loss is None


def test_new_slices_add_no_overlap_of_their_own() -> None:
    method = fresh()
    for task in range(4):  # 4 x 3 = 12 keys fill the width
        method.begin_task(task, 10)
        assert method.overlap().item() < 1e-10
    method.begin_task(4, 10)
    assert method.overlap().item() > 1e-3
