"""EvoPrompt against its rules, written down a second time with loops in float64."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from scipy.optimize import linprog
from torch import Tensor

from probprompt.errors import UserError
from probprompt.methods import EVALUATION, Context, Shape, TaskSummary, parse_config
from probprompt.methods.evo_prompt import CHUNK, EvoPrompt, EvoPromptConfig, match_neurons
from probprompt.prompts import Tokens

Array = NDArray[np.float64]

WIDTH, DEPTH, HIDDEN, TOKENS, BATCH = 6, 4, 3, 2, 5
BLOCKS = (0, 2)


def fresh(seed: int = 7, width: int = WIDTH, **settings: Any) -> EvoPrompt:
    small: dict[str, Any] = {"blocks": BLOCKS, "tokens": TOKENS, "hidden": HIDDEN, **settings}
    return EvoPrompt(EvoPromptConfig(**small), Shape(width, DEPTH), seed)


@torch.no_grad()
def move(method: EvoPrompt, seed: int, distance: float = 0.3) -> None:
    source = torch.Generator().manual_seed(seed)
    for parameter in method.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=source), alpha=distance)


def some_queries(count: int = BATCH, seed: int = 1) -> Tensor:
    return 3 * torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def summary_of(task: int, first: int = 4, images: int = 30, right: bool | None = None) -> TaskSummary:
    """Training images of three classes, of which some are classified correctly, or all, or none."""
    source = torch.Generator().manual_seed(40 + task)
    queries = 3 * torch.randn(images, WIDTH, generator=source)
    logits = torch.randn(images, 3, generator=source)
    labels = torch.randint(0, 3, (images,), generator=source)
    if right is not None:
        labels = logits.argmax(dim=1) if right else logits.argmin(dim=1)
    return TaskSummary(task, first, 3, labels + first, queries, torch.zeros(images, WIDTH), logits)


def array(value: Tensor) -> Array:
    return value.detach().double().numpy()


def tokens_of(method: EvoPrompt, query: Tensor, context: Context = EVALUATION) -> dict[int, Tensor]:
    found = {}
    for block, prompt in method.prompts(query, context).prompts.items():
        assert isinstance(prompt, Tokens) and not prompt.positioned
        found[block] = prompt.tokens
    return found


def neurons(inner: Array, outer: Array, query: Array) -> tuple[Array, Array]:
    """Hidden and output neurons of a block for one query."""
    hidden = np.array([max(0.0, float(row @ query)) for row in inner])
    return hidden, outer @ hidden


# Prompts


def test_tokens_are_written_by_a_bottleneck_per_block() -> None:
    method, query = fresh(), some_queries()
    move(method, 3)
    for context in (EVALUATION, Context(training=True, task=0)):
        found = tokens_of(method, query, context)
        assert list(found) == list(BLOCKS)
        for slot, block in enumerate(BLOCKS):
            assert found[block].shape == (BATCH, TOKENS, WIDTH)
            for image, row in enumerate(query):
                written = neurons(array(method.inner[slot]), array(method.outer[slot]), array(row))[1]
                expected = written.reshape(TOKENS, WIDTH)
                np.testing.assert_allclose(array(found[block][image]), expected, rtol=1e-4, atol=1e-5)


def test_the_query_is_taken_before_the_norm_and_all_blocks_are_prompted() -> None:
    method = fresh(blocks=None, hidden=16, tokens=5)
    assert method.query_readout == "class before norm"
    found = tokens_of(method, some_queries())
    assert list(found) == list(range(DEPTH))
    assert method.inner.shape == (DEPTH, 16, WIDTH) and method.outer.shape == (DEPTH, 5 * WIDTH, 16)


def test_weights_start_as_those_of_a_linear_layer() -> None:
    torch.manual_seed(0)
    method = fresh(hidden=25, width=400)
    for weights, inputs in ((method.inner, 400), (method.outer, 25)):
        largest = float(weights.detach().abs().max())
        assert 0.95 / math.sqrt(inputs) < largest <= 1 / math.sqrt(inputs)
        assert abs(float(weights.detach().mean())) < 0.05 / math.sqrt(inputs)
        assert not torch.equal(weights[0], weights[1])
    assert torch.equal(method.inner, fresh(hidden=25, width=400).inner)
    assert not torch.equal(method.inner, fresh(seed=8, hidden=25, width=400).inner)


def test_a_prediction_depends_on_its_own_image_alone() -> None:
    method, query = fresh(), some_queries(20)
    together = tokens_of(method, query)
    for image in range(20):
        alone = tokens_of(method, query[image : image + 1])
        for block in BLOCKS:
            torch.testing.assert_close(alone[block][0], together[block][image], rtol=1e-5, atol=1e-6)


def test_both_layers_learn() -> None:
    method = fresh()
    torch.stack(list(tokens_of(method, some_queries()).values())).square().sum().backward()
    for parameter in (method.inner, method.outer):
        assert parameter.grad is not None and parameter.grad.flatten(1).any(dim=1).all()
    assert {id(part) for part in next(iter(method.groups()))[0]} == {id(method.inner), id(method.outer)}


# Matching neurons


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
    source = torch.Generator().manual_seed(seed)
    new, old = torch.randn(2, 5, WIDTH, generator=source)
    new = new * torch.tensor([[1.0], [3.0], [0.2], [1.0], [2.0]])
    found = match_neurons(new, old)
    np.testing.assert_allclose(found.numpy(), plan_by_hand(array(new), array(old)), atol=1e-6)
    np.testing.assert_allclose(found.sum(dim=0).numpy(), np.ones(5), atol=1e-9)


def test_neurons_in_another_order_are_put_back() -> None:
    old = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(2))
    order = torch.randperm(8, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close((match_neurons(old[order], old).T @ old[order].double()).float(), old)


def test_a_dead_neuron_makes_no_trouble() -> None:
    old = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2))
    old[2] = 0
    assert match_neurons(old, old).isfinite().all()
    assert match_neurons(torch.zeros(4, WIDTH), old).isfinite().all()


# Fusion


def attributions_by_hand(method: EvoPrompt, slot: int, summary: TaskSummary) -> tuple[Array, Array]:
    """Mean ReLU activations over the images that are classified correctly."""
    assert summary.queries is not None
    hidden, written = np.zeros(HIDDEN), np.zeros(TOKENS * WIDTH)
    count = 0
    for query, label, logits in zip(summary.queries, summary.labels.tolist(), summary.logits, strict=True):
        if int(logits.argmax()) == label - summary.first:
            active, tokens = neurons(array(method.inner[slot]), array(method.outer[slot]), array(query))
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
        move(method, task)
        summary = summary_of(task)
        if task:
            expected = [fused_by_hand(method, slot, summary) for slot in range(2)]
        else:
            found = [attributions_by_hand(method, slot, summary) for slot in range(2)]
            names = ("inner", "outer", "hidden", "written")
            weights = (array(method.inner), array(method.outer))
            expected = [
                dict(zip(names, (weights[0][slot], weights[1][slot], *found[slot]), strict=True)) for slot in range(2)
            ]
        method.end_task(summary)
        outcome = {
            "inner": method.inner,
            "outer": method.outer,
            "hidden": method.hidden_attribution,
            "written": method.token_attribution,
        }
        for slot in range(2):
            for name, value in outcome.items():
                np.testing.assert_allclose(array(value[slot]), expected[slot][name], rtol=1e-4, atol=1e-5)


def test_a_memory_that_only_changed_the_order_of_its_neurons_is_the_reference() -> None:
    method = fresh(hidden=8)
    method.begin_task(1, 3)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(3))
    assert order.tolist() != list(range(8))
    with torch.no_grad():
        method.inner.copy_(method.inner[:, order])
        method.outer.copy_(method.outer[:, :, order])
    method.end_task(summary_of(1))
    torch.testing.assert_close(method.inner.detach(), method.reference_inner)
    torch.testing.assert_close(method.outer.detach(), method.reference_outer)


def test_what_was_not_trained_stays() -> None:
    method = fresh()
    method.begin_task(1, 3)
    before = tokens_of(method, some_queries())
    method.end_task(summary_of(1))
    after = tokens_of(method, some_queries())
    for block in BLOCKS:
        torch.testing.assert_close(after[block], before[block])


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
        np.testing.assert_allclose(array(method.hidden_attribution[slot]), hidden, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(array(method.token_attribution[slot]), written, rtol=1e-5, atol=1e-7)


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


def test_each_task_begins_with_its_own_reference() -> None:
    method = fresh()
    move(method, 1)
    method.begin_task(1, 3)
    assert torch.equal(method.reference_inner, method.inner) and torch.equal(method.reference_outer, method.outer)
    move(method, 2)
    assert not torch.equal(method.reference_inner, method.inner)


def test_a_method_saved_within_a_task_ends_it_the_same() -> None:
    method = fresh()
    method.begin_task(0, 3)
    method.end_task(summary_of(0))
    method.begin_task(1, 3)
    move(method, 2)
    again = fresh()
    for task in range(2):
        again.begin_task(task, 3)
    again.load_state_dict(method.state_dict(), strict=True)
    for each in (method, again):
        each.end_task(summary_of(1))
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in method.state_dict().items())


# New rows of the head


@pytest.mark.parametrize(
    ("width", "asked", "size"), [(6, 1, 1), (6, 2, 2), (6, 4, 6), (6, 192, 6), (3, 4, 3), (10, 4, 5), (192, 4, 4)]
)
def test_new_rows_are_mixed_from_old_ones_in_each_sub_head(width: int, asked: int, size: int) -> None:
    method = fresh(width=width, part=asked, temperature=0.3)
    source = torch.Generator().manual_seed(width)
    new, known, rows = (torch.randn(count, width, generator=source) for count in (2, 4, 4))
    found = method.initial_rows(new, known, rows)
    assert found is not None and found.shape == (2, width)
    for label in range(2):
        for part in range(width // size):
            cut = slice(part * size, (part + 1) * size)
            one, others, values = (array(value)[..., cut] for value in (new[label], known, rows))
            likeness = [float(one @ other) / np.linalg.norm(one) / np.linalg.norm(other) for other in others]
            weights = np.exp(np.array(likeness) / 0.3)
            expected = (weights / weights.sum()) @ values
            np.testing.assert_allclose(array(found[label])[cut], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("width", "sub_heads"), [(768, 192), (384, 96), (192, 48), (64, 16), (6, 1)])
def test_sub_heads_have_the_published_four_features_at_every_width(width: int, sub_heads: int) -> None:
    """Rows that tell their class mix with one set of weights in each sub-head, and another in the next."""
    source = torch.Generator().manual_seed(width)
    new, known = torch.randn(1, width, generator=source), torch.randn(2, width, generator=source)
    weights = fresh(width=width, temperature=1).initial_rows(new, known, torch.tensor([[0.0], [1.0]]).expand(2, width))
    assert weights is not None
    assert len(weights[0].unique_consecutive()) == sub_heads
    if sub_heads > 1:  # cosines between -1 and 1, not these two alone
        assert len(weights[0].unique()) > 3


def test_a_class_like_an_old_one_starts_with_its_row() -> None:
    method = fresh(width=48, part=12)
    source = torch.Generator().manual_seed(0)
    known, rows = torch.randn(5, 48, generator=source), torch.randn(5, 48, generator=source)
    found = method.initial_rows(7 * known[3:4], known, rows)
    assert found is not None
    torch.testing.assert_close(found[0], rows[3], rtol=0, atol=0.01)


def test_without_old_classes_or_composition_rows_start_as_the_head_wishes() -> None:
    new, known = some_queries(2), some_queries(3)
    assert fresh().initial_rows(new, known[:0], known[:0]) is None
    assert fresh(compositional=False).initial_rows(new, known, known) is None


# Settings


def test_blocks_outside_the_backbone_are_refused() -> None:
    with pytest.raises(UserError, match=rf"blocks 0 to {DEPTH - 1}.*\[{DEPTH}\]"):
        fresh(blocks=(0, DEPTH))


@pytest.mark.parametrize(
    "settings",
    [
        {"blocks": (1, 1)},
        {"blocks": ()},
        {"tokens": 0},
        {"hidden": 0},
        {"fusion": -0.1},
        {"fusion": 1.5},
        {"part": 0},
        {"sub_heads": 192},
        {"temperature": 0},
        {"token": 3},
    ],
    ids=str,
)
def test_settings_without_meaning_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        EvoPromptConfig(**settings)


def test_a_method_is_found_by_name() -> None:
    assert parse_config("evo-prompt") == EvoPromptConfig()
    assert EvoPromptConfig().marks() == ()
