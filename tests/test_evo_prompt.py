"""EvoPrompt against its rules, written down a second time with loops in float64."""

import math
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment, linprog
from torch import Tensor

from method_helpers import Array, array, close, injected, move, normal, training
from probprompt.methods import EVALUATION, Shape, TaskSummary
from probprompt.methods.evo_prompt import CHUNK, EvoPrompt, EvoPromptConfig, match_neurons, optimal_transport

WIDTH, DEPTH, HIDDEN, TOKENS, BATCH = 6, 4, 3, 2, 5
BLOCKS = (0, 2)


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fresh(seed: int = 7, width: int = WIDTH, **settings: Any) -> EvoPrompt:
    small: dict[str, Any] = {"blocks": BLOCKS, "tokens": TOKENS, "hidden": HIDDEN, **settings}
    return EvoPrompt(EvoPromptConfig(**small), Shape(width, DEPTH), seed)


def some_queries(count: int = BATCH) -> Tensor:
    return normal(count, WIDTH, scale=3)


def summary_of(task: int, first: int = 4, images: int = 30, right: bool | None = None) -> TaskSummary:
    """Training images of three classes, of which some are classified correctly, or all, or none."""
    queries, logits = normal(images, WIDTH, seed=40 + task, scale=3), normal(images, 3, seed=60 + task)
    labels = torch.randint(0, 3, (images,), generator=source(task))
    if right is not None:
        labels = logits.argmax(dim=1) if right else logits.argmin(dim=1)
    return TaskSummary(task, first, 3, labels + first, queries, torch.zeros(images, WIDTH), logits)


def neurons(inner: Array, outer: Array, query: Array) -> tuple[Array, Array]:
    """Hidden and output neurons of a block for one query."""
    hidden = np.array([max(0.0, float(row @ query)) for row in inner])
    return hidden, outer @ hidden


def test_tokens_are_written_by_a_bottleneck_per_block() -> None:
    method, query = fresh(), some_queries()
    move(method, 3)
    for context in (EVALUATION, training()):
        assert not any(getattr(one, "positioned", True) for one in method.prompts(query, context).prompts.values())
        found = injected(method, query, context)
        assert list(found) == list(BLOCKS)
        for slot, block in enumerate(BLOCKS):
            written = [neurons(array(method.inner[slot]), array(method.outer[slot]), row)[1] for row in array(query)]
            close(found[block], np.stack(written).reshape(BATCH, TOKENS, WIDTH), rtol=1e-4, atol=1e-5)
    torch.stack(list(found.values())).square().sum().backward()
    for parameter in (method.inner, method.outer):
        assert parameter.grad is not None and parameter.grad.flatten(1).any(dim=1).all()
    assert {id(part) for part in next(iter(method.groups()))[0]} == {id(method.inner), id(method.outer)}


def test_the_query_is_taken_before_the_norm_and_all_blocks_are_prompted() -> None:
    method = fresh(blocks=None, hidden=16, tokens=5)
    assert method.query_readout == "class before norm"
    assert list(injected(method, some_queries())) == list(range(DEPTH))
    assert method.inner.shape == (DEPTH, 16, WIDTH) and method.outer.shape == (DEPTH, 5 * WIDTH, 16)


def test_weights_start_as_those_of_a_linear_layer() -> None:
    method = fresh(hidden=25, width=400)
    for weights, inputs in ((method.inner, 400), (method.outer, 25)):
        assert 0.95 / math.sqrt(inputs) < float(weights.detach().abs().max()) <= 1 / math.sqrt(inputs)
        assert abs(float(weights.detach().mean())) < 0.05 / math.sqrt(inputs)


# Optimal transport against assignments, the line and brute force


@pytest.mark.parametrize("count", [1, 2, 7, 16, 40])
def test_transport_of_equal_weights_is_the_best_assignment(count: int) -> None:
    cost = torch.rand(count, count, generator=source(count)).requires_grad_()
    plan = optimal_transport(cost, torch.ones(count, requires_grad=True), torch.ones(count, dtype=torch.float16))
    rows, columns = linear_sum_assignment(cost.detach().numpy())
    expected = np.zeros((count, count))
    expected[rows, columns] = 1 / count
    np.testing.assert_allclose(plan.numpy(), expected, atol=1e-12)


def test_no_permutation_is_cheaper() -> None:
    cost = torch.rand(5, 5, generator=source()).double()
    plan = optimal_transport(cost, torch.ones(5), torch.ones(5))
    cheapest = min(sum(float(cost[i, j]) for i, j in enumerate(order)) for order in permutations(range(5)))
    assert float((plan * cost).sum()) == pytest.approx(cheapest / 5)


@pytest.mark.parametrize(("n", "m"), [(6, 6), (4, 9), (9, 4), (1, 5), (5, 1)])
def test_the_plan_carries_the_weights(n: int, m: int) -> None:
    start, end = 5 * torch.rand(n, generator=source(1)), 3 * torch.rand(m, generator=source(2))
    plan = optimal_transport(torch.rand(n, m, generator=source(3)), start, end)
    assert plan.shape == (n, m) and plan.dtype == torch.float64 and (plan >= 0).all()
    torch.testing.assert_close(plan.sum(dim=1), start.double() / start.double().sum(), rtol=0, atol=1e-9)
    torch.testing.assert_close(plan.sum(dim=0), end.double() / end.double().sum(), rtol=0, atol=1e-9)
    assert (plan > 1e-12).sum() <= n + m - 1  # a corner


def on_a_line(start: Tensor, end: Tensor, first: Tensor, second: Tensor) -> Array:
    """Between places on a line nothing overtakes: fill from left to right."""
    plan = np.zeros((len(start), len(end)))
    left, right = (first / first.sum()).tolist(), (second / second.sum()).tolist()
    rows, columns = start.argsort().tolist(), end.argsort().tolist()
    while rows and columns:
        i, j = rows[0], columns[0]
        amount = min(left[i], right[j])
        plan[i, j] += amount
        left[i] -= amount
        right[j] -= amount
        if left[i] <= right[j]:
            rows.pop(0)
        else:
            columns.pop(0)
    return plan


@pytest.mark.parametrize("seed", range(5))
def test_on_a_line_nothing_overtakes(seed: int) -> None:
    start, end = torch.randn(8, generator=source(seed)).double(), torch.randn(6, generator=source(seed + 9)).double()
    first, second = torch.rand(8, generator=source(seed + 20)).double(), torch.rand(6, generator=source(seed)).double()
    plan = optimal_transport((start[:, None] - end[None]).square(), first, second)
    np.testing.assert_allclose(plan.numpy(), on_a_line(start, end, first, second), atol=1e-9)


def test_a_point_without_weight_gives_and_takes_nothing() -> None:
    plan = optimal_transport(torch.rand(3, 3, generator=source()), torch.tensor([1.0, 0, 1]), torch.tensor([0, 1.0, 3]))
    assert not plan[1].any() and not plan[:, 0].any()
    assert float(plan.sum()) == pytest.approx(1)


@pytest.mark.parametrize("weights", [[1.0, 1.0], [1.0, -1.0, 1.0], [0.0, 0.0, 0.0], [1.0, math.nan, 1.0]], ids=str)
def test_weights_without_meaning_are_refused(weights: list[float]) -> None:
    good, bad = torch.ones(3), torch.tensor(weights)
    with pytest.raises(ValueError, match="source needs 3 weights"):
        optimal_transport(torch.zeros(3, 3), bad, good)
    with pytest.raises(ValueError, match="target needs 3 weights"):
        optimal_transport(torch.zeros(3, 3), good, bad)


def plan_by_hand(new: Array, old: Array) -> Array:
    """The transport plan from a linear program of its own; columns with a sum of 1."""
    count = len(new)
    cost = np.empty((count, count))
    for i in range(count):
        for j in range(count):
            cost[i, j] = ((new[i] / np.linalg.norm(new[i]) - old[j] / np.linalg.norm(old[j])) ** 2).sum()
    start, end = np.abs(new).sum(axis=1), np.abs(old).sum(axis=1)
    sums, wanted = [], []
    for index in range(count):
        for axis, weights in ((0, start), (1, end)):
            chosen = np.zeros((count, count))
            chosen[(index, slice(None)) if axis == 0 else (slice(None), index)] = 1
            sums.append(chosen.ravel())
            wanted.append(weights[index] / weights.sum())
    plan = np.asarray(linprog(cost.ravel(), A_eq=sums, b_eq=wanted).x).reshape(count, count)
    return np.asarray(plan / plan.sum(axis=0))


@pytest.mark.parametrize("seed", range(4))
def test_neurons_are_matched_by_the_directions_and_sizes_of_their_weights(seed: int) -> None:
    new, old = normal(2, 5, WIDTH, seed=seed)
    new = new * torch.tensor([[1.0], [3.0], [0.2], [1.0], [2.0]])
    found = match_neurons(new, old)
    np.testing.assert_allclose(found.numpy(), plan_by_hand(array(new), array(old)), atol=1e-6)
    np.testing.assert_allclose(found.sum(dim=0).numpy(), np.ones(5), atol=1e-9)


def test_a_dead_neuron_makes_no_trouble() -> None:
    old = normal(4, WIDTH, seed=2)
    old[2] = 0
    assert match_neurons(old, old).isfinite().all()
    assert match_neurons(torch.zeros(4, WIDTH), old).isfinite().all()


def attributions_by_hand(method: EvoPrompt, slot: int, summary: TaskSummary) -> tuple[Array, Array]:
    """Mean ReLU activations over the images that are classified correctly."""
    assert summary.queries is not None
    hidden, written = np.zeros(HIDDEN), np.zeros(TOKENS * WIDTH)
    count = 0
    for query, label, logits in zip(array(summary.queries), summary.labels.tolist(), summary.logits, strict=True):
        if int(logits.argmax()) == label - summary.first:
            active, tokens = neurons(array(method.inner[slot]), array(method.outer[slot]), query)
            hidden, written, count = hidden + active, written + np.maximum(tokens, 0), count + 1
    return hidden / count, written / count


def scaled(values: Array) -> Array:
    return np.asarray((values - values.min()) / (values.max() - values.min()))


def fused_by_hand(method: EvoPrompt, slot: int, summary: TaskSummary) -> dict[str, Array]:
    """One block after a later task, in float64."""
    config = method.config
    inner, outer = array(method.inner[slot]), array(method.outer[slot])
    old_inner, old_outer = array(method.reference_inner[slot]), array(method.reference_outer[slot])
    hidden, written = attributions_by_hand(method, slot, summary)
    past_hidden, past_written = array(method.hidden_attribution[slot]), array(method.token_attribution[slot])
    if config.transport:
        plan = plan_by_hand(inner, old_inner)
        inner, outer, hidden = plan.T @ inner, outer @ plan, plan.T @ hidden
    for_hidden, for_written = np.full(HIDDEN, config.fusion), np.full(TOKENS * WIDTH, config.fusion)
    if config.attribution:
        for_hidden += config.fusion * (scaled(hidden) - scaled(past_hidden))
        for_written += config.fusion * (scaled(written) - scaled(past_written))
    return {
        "inner": old_inner + for_hidden[:, None] * (inner - old_inner),
        "outer": old_outer + for_written[:, None] * (outer - old_outer),
        "hidden": np.maximum(past_hidden, hidden),
        "written": np.maximum(past_written, written),
    }


@pytest.mark.parametrize(
    "settings",
    [{}, {"transport": False}, {"attribution": False}, {"fusion": 0.2}, {"transport": False, "attribution": False}],
    ids=str,
)
def test_a_later_task_is_fused_into_the_reference(settings: dict[str, Any]) -> None:
    method = fresh(**settings)
    for task in range(3):
        method.begin_task(task, 3)
        assert torch.equal(method.reference_inner, method.inner) and torch.equal(method.reference_outer, method.outer)
        move(method, task)
        summary = summary_of(task)
        expected = []
        for slot in range(2):
            if task:
                expected.append(fused_by_hand(method, slot, summary))
            else:
                hidden, written = attributions_by_hand(method, slot, summary)
                inner, outer = array(method.inner[slot]), array(method.outer[slot])
                expected.append({"inner": inner, "outer": outer, "hidden": hidden, "written": written})
        method.end_task(summary)
        found: dict[str, Tensor] = {"inner": method.inner, "outer": method.outer}
        found |= {"hidden": method.hidden_attribution, "written": method.token_attribution}
        for slot in range(2):
            for name, value in found.items():
                close(value[slot], expected[slot][name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("order", [list(range(8)), [3, 0, 7, 1, 6, 2, 5, 4]], ids=["untrained", "reordered"])
def test_a_memory_whose_neurons_only_changed_their_order_is_the_reference(order: list[int]) -> None:
    method = fresh(hidden=8)
    method.begin_task(1, 3)
    with torch.no_grad():
        method.inner.copy_(method.inner[:, order])
        method.outer.copy_(method.outer[:, :, order])
    method.end_task(summary_of(1))
    torch.testing.assert_close(method.inner.detach(), method.reference_inner)
    torch.testing.assert_close(method.outer.detach(), method.reference_outer)


def test_a_neuron_that_only_the_new_task_uses_moves_all_the_way_and_one_of_the_past_stays() -> None:
    method = fresh(transport=False)
    method.begin_task(1, 3)
    move(method, 5)
    learned = method.inner.detach().clone()
    with torch.no_grad():
        method.inner[:, 0] = 0.1  # sees every query below, and sees it most
        method.inner[:, 1:] = -method.inner[:, 1:].abs()
        learned.copy_(method.inner)
    method.hidden_attribution.copy_(torch.tensor([0.0, 4.0, 2.0]).expand(2, 3))
    summary = summary_of(1, right=True)
    assert summary.queries is not None
    summary.queries.abs_()
    method.end_task(summary)
    torch.testing.assert_close(method.inner[:, 0].detach(), learned[:, 0])
    torch.testing.assert_close(method.inner[:, 1].detach(), method.reference_inner[:, 1])
    quarter = method.reference_inner[:, 2] + 0.25 * (learned[:, 2] - method.reference_inner[:, 2])
    torch.testing.assert_close(method.inner[:, 2].detach(), quarter)


def test_many_images_are_averaged_in_parts() -> None:
    method, summary = fresh(), summary_of(0, images=CHUNK + 90, right=True)
    method.begin_task(0, 3)
    method.end_task(summary)
    for slot in range(2):
        hidden, written = attributions_by_hand(method, slot, summary)
        close(method.hidden_attribution[slot], hidden, atol=1e-7)
        close(method.token_attribution[slot], written, atol=1e-7)


def test_a_task_without_one_correct_image_says_nothing_of_its_neurons() -> None:
    method = fresh()
    method.begin_task(0, 3)
    method.end_task(summary_of(0))
    past = method.hidden_attribution.clone()
    method.begin_task(1, 3)
    move(method, 4)
    method.end_task(summary_of(1, right=False))
    assert torch.equal(method.hidden_attribution, past)
    assert all(value.isfinite().all() for value in method.state_dict().values())


@pytest.mark.parametrize(
    ("width", "asked", "size"), [(6, 1, 1), (6, 2, 2), (6, 4, 6), (6, 192, 6), (3, 4, 3), (10, 4, 5), (192, 4, 4)]
)
def test_new_rows_are_mixed_from_old_ones_in_each_sub_head(width: int, asked: int, size: int) -> None:
    method = fresh(width=width, part=asked, temperature=0.3)
    new, known, rows = (normal(count, width, seed=seed) for seed, count in enumerate((2, 4, 4)))
    found = method.initial_rows(new, known, rows)
    assert found is not None and found.shape == (2, width)
    for label in range(2):
        for part in range(width // size):
            cut = slice(part * size, (part + 1) * size)
            one, others, values = (array(value)[..., cut] for value in (new[label], known, rows))
            likeness = [float(one @ other) / np.linalg.norm(one) / np.linalg.norm(other) for other in others]
            weights = np.exp(np.array(likeness) / 0.3)
            close(found[label][cut], (weights / weights.sum()) @ values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("width", "sub_heads"), [(768, 192), (384, 96), (192, 48), (64, 16), (6, 1)])
def test_sub_heads_have_the_published_four_features_at_every_width(width: int, sub_heads: int) -> None:
    """Rows that tell their class mix with one set of weights in each sub-head, and another in the next."""
    new, known = normal(1, width, seed=2), normal(2, width, seed=3)
    weights = fresh(width=width, temperature=1).initial_rows(new, known, torch.tensor([[0.0], [1.0]]).expand(2, width))
    assert weights is not None
    assert len(weights[0].unique_consecutive()) == sub_heads
    if sub_heads > 1:  # cosines between -1 and 1, not these two alone
        assert len(weights[0].unique()) > 3


def test_a_class_like_an_old_one_starts_with_its_row() -> None:
    method = fresh(width=48, part=12)
    known, rows = normal(2, 5, 48)
    found = method.initial_rows(7 * known[3:4], known, rows)
    assert found is not None
    torch.testing.assert_close(found[0], rows[3], rtol=0, atol=0.01)


def test_without_old_classes_or_composition_rows_start_as_the_head_wishes() -> None:
    new, known = some_queries(2), some_queries(3)
    assert fresh().initial_rows(new, known[:0], known[:0]) is None
    assert fresh(compositional=False).initial_rows(new, known, known) is None
