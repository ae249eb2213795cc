"""HiDe-Prompt against its rules, written down a second time with loops in float64."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor

from probprompt.alignment import ClassStatistics
from probprompt.errors import UserError
from probprompt.methods import EVALUATION, Context, Shape, TaskSummary, parse_config
from probprompt.methods.hide_prompt import HiDePrompt, HiDePromptConfig, IdentityAlignmentConfig
from probprompt.prompts import Prefix

Array = NDArray[np.float64]

WIDTH, DEPTH, BATCH = 6, 5, 7
BLOCKS = (1, 3)
SIZES = (2, 3, 2)
"""Classes of each task."""


def fresh(sizes: tuple[int, ...] = SIZES, seed: int = 7, **settings: Any) -> HiDePrompt:
    """A small method at the beginning of its last task."""
    small: dict[str, Any] = {"blocks": BLOCKS, "tokens": 4, "contrast_centroids": 2, **settings}
    method = HiDePrompt(HiDePromptConfig(**small), Shape(WIDTH, DEPTH), seed)
    for task, classes in enumerate(sizes):
        method.begin_task(task, classes)
    return method


@torch.no_grad()
def moved(sizes: tuple[int, ...] = SIZES, **settings: Any) -> HiDePrompt:
    """A small method with everything somewhere else than it began."""
    method, source = fresh(sizes, **settings), torch.Generator().manual_seed(3)
    for value in (*method.parameters(), method.contrasts):
        value.add_(torch.randn(value.shape, generator=source), alpha=0.5)
    return method


def some_queries(count: int = BATCH, seed: int = 1) -> Tensor:
    return 3 * torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def training(labels: Tensor | None = None, task: int = 2, first: int = 5) -> Context:
    return Context(training=True, task=task, labels=labels, first=first)


def prefixes(method: HiDePrompt, query: Tensor, context: Context = EVALUATION) -> dict[int, Prefix]:
    """What is injected, with a prefix for every image."""
    found = {}
    for block, prompt in method.prompts(query, context).prompts.items():
        assert isinstance(prompt, Prefix)
        shape = (len(query), prompt.length, prompt.width)
        found[block] = Prefix(prompt.key.expand(shape), prompt.value.expand(shape))
    return found


def array(value: Tensor) -> Array:
    return value.detach().double().numpy()


# The task identity


def identity_logits(method: HiDePrompt, query: Tensor) -> Array:
    """The perceptron and the head once more, for one query (D,)."""
    head, values = method.identity, array(query)
    hidden = array(head.inner.weight) @ values + array(head.inner.bias)
    hidden = np.array([x / 2 * (1 + math.erf(x / math.sqrt(2))) for x in hidden])
    total = values + array(head.outer.weight) @ hidden + array(head.outer.bias)
    normal = (total - total.mean()) / np.sqrt(total.var() + 1e-5)
    seen = normal * array(head.norm.weight) + array(head.norm.bias)
    return np.asarray(array(head.weight) @ seen + array(head.bias))


def told_task(method: HiDePrompt, query: Tensor) -> int:
    best = int(identity_logits(method, query).argmax())
    return 0 if best < 2 else 1 if best < 5 else 2


def test_the_identity_is_a_residual_perceptron_with_rows_over_all_classes() -> None:
    method = moved()
    assert method.identity.inner.weight.shape == (2 * WIDTH, WIDTH)
    found = method.identity(some_queries())
    assert found.shape == (BATCH, 7)
    for query, logits in zip(some_queries(), found, strict=True):
        np.testing.assert_allclose(array(logits), identity_logits(method, query), rtol=1e-4, atol=1e-5)


def test_the_perceptron_starts_small_and_by_its_seed() -> None:
    torch.manual_seed(1)
    one = HiDePrompt(HiDePromptConfig(), Shape(48, DEPTH), 3).identity
    torch.manual_seed(2)
    same, other = (HiDePrompt(HiDePromptConfig(), Shape(48, DEPTH), seed).identity for seed in (3, 4))
    for layer in ("inner", "outer"):
        weight = getattr(one, layer).weight
        assert torch.equal(weight, getattr(same, layer).weight)
        assert not torch.equal(weight, getattr(other, layer).weight)
        assert float(weight.detach().std()) == pytest.approx(0.02, rel=0.1)
        assert not getattr(one, layer).bias.any()


def test_an_image_gets_the_prompt_of_the_task_of_its_most_likely_class() -> None:
    method, query = moved(), some_queries(60)
    pool, found = method.mixed(), prefixes(method, query)
    tasks = [told_task(method, row) for row in query]
    assert set(tasks) == {0, 1, 2}
    for image, task in enumerate(tasks):
        for slot, block in enumerate(BLOCKS):
            assert torch.equal(found[block].key[image], pool[task, slot, :2])
            assert torch.equal(found[block].value[image], pool[task, slot, 2:])
    assert method.tell_task(query).tolist() == tasks


def test_a_prediction_depends_on_its_own_image_alone() -> None:
    method, query = moved(), some_queries(20)
    together = prefixes(method, query)
    for image in range(20):
        alone = prefixes(method, query[image : image + 1])
        for block in BLOCKS:
            assert torch.equal(alone[block].key[0], together[block].key[image])
            assert torch.equal(alone[block].value[0], together[block].value[image])


def test_relevance_shows_the_chosen_task() -> None:
    method, query = moved(), some_queries()
    shown = method.relevance(query)
    assert list(shown) == list(BLOCKS)
    for part in shown.values():
        assert part.shape == (BATCH, 1, 3)
        assert part[:, 0].argmax(dim=1).tolist() == method.tell_task(query).tolist()
        assert (part.sum(dim=2) == 1).all()


def test_the_identity_learns_by_cross_entropy_of_the_tasks_own_classes() -> None:
    method, query = moved(), some_queries()
    labels = torch.tensor([5, 6, 5, 5, 6, 6, 5])
    loss = method.prompts(query, training(labels)).loss
    assert loss is not None
    expected = []
    for row, label in zip(query, labels.tolist(), strict=True):
        logits = identity_logits(method, row)[5:]
        expected.append(math.log(sum(math.exp(x - logits[label - 5]) for x in logits)))
    assert loss.item() == pytest.approx(sum(expected) / BATCH, rel=1e-5)
    loss.backward()
    weight = method.identity.weight.grad
    assert weight is not None and not weight[:5].any() and weight[5:].any()
    assert method.identity.inner.weight.grad is not None and method.identity.inner.weight.grad.any()
    assert all(prompt.grad is None for prompt in method.pool)


def test_without_labels_there_is_no_loss() -> None:
    method, query = moved(), some_queries()
    assert method.prompts(query, EVALUATION).loss is None
    assert method.prompts(query, method.statistics_context(1)).loss is None
    assert method.prompts(query, Context(task=2, labels=torch.full((BATCH,), 5))).loss is None


def test_prompts_and_identity_learn_as_each_would_alone() -> None:
    labels, query = torch.tensor([5, 6, 5, 5, 6, 6, 5]), some_queries()
    target = torch.randn(BATCH, 2, WIDTH, generator=torch.Generator().manual_seed(5))

    def learn(with_prompts: bool, with_identity: bool) -> HiDePrompt:
        method = moved()
        groups = [{"params": part, "lr": 0.05 * factor} for part, factor in method.groups()]
        optimiser = torch.optim.AdamW(groups, weight_decay=0)
        for _ in range(3):
            answer = method.prompts(query, training(labels))
            assert answer.loss is not None
            outcome = (prefixes(method, query, training(labels))[BLOCKS[0]].key - target).square().mean()
            optimiser.zero_grad()
            (with_prompts * outcome + with_identity * answer.loss).backward()
            optimiser.step()
        return method

    both, prompts, identity = learn(True, True), learn(True, False), learn(False, True)
    assert torch.equal(both.pool[2], prompts.pool[2]) and not torch.equal(both.pool[2], identity.pool[2])
    for one, other in zip(both.identity.parameters(), identity.identity.parameters(), strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(both.identity.weight, prompts.identity.weight)


LABELS = torch.tensor([5, 6, 5, 5, 6, 6, 5])


def learns_identity(method: HiDePrompt) -> bool:
    """Begin an epoch and tell whether the identity is trained in it."""
    method.begin_epoch()
    return method.prompts(some_queries(), training(LABELS)).loss is not None


@pytest.mark.parametrize(
    ("epochs", "expected"), [(None, [True] * 4), (1, [True] + [False] * 3), (3, [True] * 3 + [False])]
)
def test_the_identity_may_learn_in_the_first_epochs_of_every_task(epochs: int | None, expected: list[bool]) -> None:
    method = fresh(sizes=(2,), identity_epochs=epochs)
    for task, classes in ((1, 3), (2, 2)):
        for _ in range(5):
            method.begin_epoch()  # those of an earlier task do not count
        method.begin_task(task, classes)
    assert [learns_identity(method) for _ in range(4)] == expected
    assert HiDePromptConfig().identity_epochs is None


@pytest.mark.parametrize("done", range(5))
def test_a_task_resumed_after_some_epochs_counts_on(done: int) -> None:
    method = fresh(identity_epochs=3)
    for _ in range(done):
        method.begin_epoch()
    resumed = fresh(identity_epochs=3)
    resumed.load_state_dict(method.state_dict(), strict=True)
    ahead = [learns_identity(resumed) for _ in range(5)]
    assert ahead == [learns_identity(method) for _ in range(5)]
    assert ahead == [done + more < 3 for more in range(5)]


def test_an_identity_that_learns_no_more_stays_where_it_is() -> None:
    method = moved(identity_epochs=1)
    optimiser = torch.optim.AdamW([value for part, _ in method.groups() for value in part], lr=0.1, weight_decay=0.1)
    kept = []
    for _ in range(3):
        method.begin_epoch()
        answer = method.prompts(some_queries(), training(LABELS))
        outcome = prefixes(method, some_queries(), training(LABELS))[BLOCKS[0]].key.square().mean()
        optimiser.zero_grad()
        (outcome if answer.loss is None else outcome + answer.loss).backward()
        optimiser.step()
        kept.append((method.pool[2].detach().clone(), method.identity.inner.weight.detach().clone()))
    assert not torch.equal(kept[0][1], moved().identity.inner.weight)
    assert torch.equal(kept[0][1], kept[1][1]) and torch.equal(kept[1][1], kept[2][1])
    assert not torch.equal(kept[1][0], kept[2][0])


def test_a_clip_by_the_common_norm_couples_prompts_and_identity() -> None:
    """As the description warns: what the prompts learn then depends on whether the identity learns beside them."""

    def learned(with_identity: bool, clip: float) -> Tensor:
        method = moved()
        parameters = [value for part, _ in method.groups() for value in part]
        optimiser = torch.optim.AdamW(parameters, lr=0.05, weight_decay=0)
        for step in range(3):
            answer = method.prompts(some_queries(seed=step), training(LABELS))
            assert answer.loss is not None
            outcome = (prefixes(method, some_queries(), training(LABELS))[BLOCKS[0]].key - step).square().mean()
            optimiser.zero_grad()
            (outcome + with_identity * answer.loss).backward()
            torch.nn.utils.clip_grad_norm_(parameters, clip)
            optimiser.step()
        return torch.stack(list(method.pool)).detach()

    assert torch.equal(learned(True, math.inf), learned(False, math.inf))
    assert not torch.allclose(learned(True, 0.1), learned(False, 0.1), rtol=0, atol=1e-4)


def test_the_identity_learns_at_a_rate_of_its_own() -> None:
    method = fresh(identity_rate_factor=0.25)
    (prompts, one), (identity, quarter) = method.groups()
    assert (one, quarter) == (1.0, 0.25)
    assert [id(part) for part in prompts] == [id(method.pool[2])]
    assert {id(part) for part in identity} == {id(part) for part in method.identity.parameters()}


# Prompts


def test_a_task_prompt_starts_between_minus_one_and_one() -> None:
    method = fresh(copy_previous=False, momentum=0)
    every = torch.stack(list(method.pool)).detach()
    assert every.shape == (3, 2, 4, WIDTH)
    assert -1 <= every.min() < -0.8 and 0.8 < every.max() < 1
    assert abs(float(every.mean())) < 0.15
    assert len(every.flatten(0, 2).unique(dim=0)) == 3 * 2 * 4
    assert torch.equal(method.pool[1], fresh(copy_previous=False).pool[1])
    assert not torch.equal(method.pool[1], fresh(copy_previous=False, seed=8).pool[1])


def test_a_task_prompt_starts_as_the_one_before_ended() -> None:
    method = moved(sizes=(2, 3), momentum=0.25)
    before = method.mixed()[-1]
    method.begin_task(2, 2)
    assert torch.equal(method.pool[2], before) and not torch.equal(method.pool[2], method.pool[1])
    with torch.no_grad():
        method.pool[1].add_(1)
    assert torch.equal(method.pool[2], before)


def test_only_the_last_tasks_prompt_learns() -> None:
    method = moved()
    assert [prompt.requires_grad for prompt in method.pool] == [False, False, True]
    for prefix in prefixes(method, some_queries(), training()).values():
        (prefix.key.sum() + prefix.value.sum()).backward()
    assert method.pool[0].grad is None and method.pool[1].grad is None
    torch.testing.assert_close(method.pool[2].grad, torch.full((2, 4, WIDTH), BATCH * 0.99))


@pytest.mark.parametrize("momentum", [0.0, 0.01, 0.3])
def test_prompts_are_mixed_with_the_mean_of_those_before(momentum: float) -> None:
    """In training, and for good at the end: the mean is of prompts that were mixed themselves."""
    method = moved(sizes=(2, 2, 2, 2), momentum=momentum)
    final: list[Array] = []
    for prompt in method.pool:
        mixed = array(prompt)
        if final:
            mixed = (1 - momentum) * mixed + momentum * sum(final) / len(final)
        final.append(mixed)
    np.testing.assert_allclose(array(method.mixed()), np.stack(final), rtol=1e-5, atol=1e-6)
    learning = prefixes(method, some_queries(), training(task=3))[BLOCKS[1]]
    np.testing.assert_allclose(array(learning.key[2]), final[3][1, :2], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(array(learning.value[2]), final[3][1, 2:], rtol=1e-5, atol=1e-6)


def test_in_training_and_for_statistics_the_task_is_known() -> None:
    method, query = moved(), some_queries()
    for task in range(3):
        for context in (training(task=task), method.statistics_context(task)):
            found = method.prompts(query, context).prompts
            for slot, block in enumerate(BLOCKS):
                prefix = found[block]
                assert isinstance(prefix, Prefix) and prefix.batch is None
                assert torch.equal(prefix.key, method.mixed()[task, slot, :2])
    assert not method.statistics_context(1).training and method.statistics_context(1).labels is None


def test_before_any_task_nothing_is_injected() -> None:
    method = fresh(sizes=())
    assert method.prompts(some_queries(), EVALUATION).prompts == {}
    assert method.relevance(some_queries()) == {}


# The published mix-up


def test_the_mix_up_hands_out_keys_and_values_along_the_batch() -> None:
    query = some_queries(8)
    sound, mixed = (moved(legacy_reshape=choice) for choice in (False, True))
    own, found = prefixes(sound, query), prefixes(mixed, query)
    for block in BLOCKS:
        listed = np.stack([array(own[block].key), array(own[block].value)])  # (2, B, M / 2, D)
        wrong = listed.reshape(8, 2, 2, WIDTH)
        np.testing.assert_array_equal(array(found[block].key), wrong[:, 0])
        np.testing.assert_array_equal(array(found[block].value), wrong[:, 1])


def test_in_training_the_mix_up_gives_one_half_the_keys_and_the_other_the_values() -> None:
    method = moved(legacy_reshape=True)
    found = prefixes(method, some_queries(6), training())
    for slot, block in enumerate(BLOCKS):
        key, value = method.mixed()[2, slot, :2], method.mixed()[2, slot, 2:]
        for image in range(6):
            expected = key if image < 3 else value
            assert torch.equal(found[block].key[image], expected)
            assert torch.equal(found[block].value[image], expected)


def test_with_the_mix_up_predictions_depend_on_batch_mates() -> None:
    method, query = moved(legacy_reshape=True), some_queries(60)
    tasks = method.tell_task(query)
    image, (mate, other) = 0, [int((tasks == task).nonzero()[0, 0]) for task in (1, 2)]
    pairs = [prefixes(method, query[[image, mate]]), prefixes(method, query[[image, other]])]
    assert not torch.equal(pairs[0][1].value[0], pairs[1][1].value[0])
    alone = prefixes(method, query[:1])
    assert torch.equal(alone[1].key[0], prefixes(moved(), query[:1])[1].key[0])


def test_the_mix_up_is_marked() -> None:
    assert HiDePromptConfig().marks() == ()
    (mark,) = HiDePromptConfig(legacy_reshape=True).marks()
    assert "legacy_reshape" in mark and "batch mates" in mark


# The contrast


def contrast_by_hand(rows: Array, temperature: float) -> float:
    total = 0.0
    for index, row in enumerate(rows):
        scores = [float(row @ other) / temperature for other in rows]
        largest = max(scores)
        total += largest + math.log(sum(math.exp(score - largest) for score in scores)) - scores[index]
    return total / len(rows)


@pytest.mark.parametrize(("first", "temperature", "weight"), [(0, 0.8, 0.5), (2, 0.8, 0.5), (5, 2.0, 0.1)])
def test_the_contrast_is_over_past_centroids_and_the_batch(first: int, temperature: float, weight: float) -> None:
    method = moved(contrast=weight, contrast_temperature=temperature)
    features = 0.6 * some_queries(seed=4)
    loss = method.feature_loss(features, training(first=first))
    assert loss is not None and loss.dtype == torch.float32
    rows = np.concatenate([array(method.contrasts[:first]).reshape(-1, WIDTH), array(features)])
    assert len(rows) == 2 * first + BATCH
    expected = weight * contrast_by_hand(rows, temperature)
    assert loss.item() == pytest.approx(expected, rel=1e-5) and expected > 0.01


def test_the_contrast_pulls_on_both_sides_of_each_product() -> None:
    method = moved().double()
    features = (0.6 * some_queries(seed=4)).double().requires_grad_()

    def loss(values: Tensor) -> Tensor:
        found = method.feature_loss(values, training())
        assert found is not None
        return found

    assert torch.autograd.gradcheck(loss, (features,))


def test_without_weight_there_is_no_contrast() -> None:
    assert moved(contrast=0).feature_loss(some_queries(), training()) is None


# The end of a task


def direction(label: int) -> Tensor:
    """A far place for each class."""
    return 6 * torch.randn(WIDTH, generator=torch.Generator().manual_seed(100 + label))


def summary_of(task: int, first: int, classes: int, images: int = 24, seed: int = 0) -> TaskSummary:
    """Training images whose queries and features lie around places of their class."""
    labels = torch.arange(first, first + classes).repeat(images)
    source = torch.Generator().manual_seed(seed + task)
    noise = torch.randn(2, len(labels), WIDTH, generator=source)
    queries = torch.stack([direction(label) for label in labels.tolist()]) + noise[0]
    features = torch.stack([direction(50 + label) for label in labels.tolist()]) + noise[1]
    return TaskSummary(task, first, classes, labels, queries, features, torch.zeros(len(labels), classes))


def test_a_task_leaves_centroids_and_gaussians_of_its_classes() -> None:
    method = fresh(sizes=())
    key = (7, "hide-prompt")
    queries = ClassStatistics.empty(WIDTH, torch.device("cpu"), 10)
    features = ClassStatistics.empty(WIDTH, torch.device("cpu"), 2)
    for task, (first, classes) in enumerate([(0, 2), (2, 3)]):
        method.begin_task(task, classes)
        assert not method.contrasts[first:].any()
        summary = summary_of(task, first, classes)
        method.end_task(summary)
        assert summary.queries is not None
        queries = queries.extended(summary.queries, summary.labels, classes, (*key, task, "queries"))
        more = ClassStatistics.empty(WIDTH, torch.device("cpu"), 2)
        more = more.extended(summary.features, summary.labels - first, classes, (*key, task, "features"))
        features = ClassStatistics(torch.cat([features.mean, more.mean]), features.variance)
    assert torch.equal(method.query_mean, queries.mean) and torch.equal(method.query_variance, queries.variance)
    assert torch.equal(method.contrasts, features.mean)


def test_the_first_task_leaves_the_identity_and_later_ones_refit_all_of_it() -> None:
    method = fresh(sizes=(2,))
    before = {name: value.clone() for name, value in method.identity.state_dict().items()}
    method.end_task(summary_of(0, 0, 2))
    assert all(torch.equal(value, before[name]) for name, value in method.identity.state_dict().items())
    method.begin_task(1, 3)
    before = {name: value.clone() for name, value in method.identity.state_dict().items()}
    prompts = method.mixed()
    method.end_task(summary_of(1, 2, 3))
    after = method.identity.state_dict()
    assert all(not torch.equal(value, before[name]) for name, value in after.items())
    assert torch.equal(method.mixed(), prompts)


def test_the_refit_may_be_switched_off() -> None:
    method = fresh(sizes=(2,), identity_alignment={"enabled": False})
    method.end_task(summary_of(0, 0, 2))
    method.begin_task(1, 3)
    before = method.identity.weight.detach().clone()
    method.end_task(summary_of(1, 2, 3))
    assert torch.equal(method.identity.weight, before) and method.query_mean[2:].any()


def accuracy_of_tasks(method: HiDePrompt, sizes: tuple[int, ...]) -> float:
    right = []
    first = 0
    for task, classes in enumerate(sizes):
        queries = summary_of(task, first, classes, seed=77).queries
        assert queries is not None
        right.append((method.tell_task(queries) == task).double())
        first += classes
    return float(torch.cat(right).mean())


@pytest.mark.parametrize("sizes", [(2, 3, 2), (2, 1, 1)])
def test_the_task_of_an_image_is_told_after_each_task(sizes: tuple[int, ...]) -> None:
    """Trained on its own classes alone, a head cannot tell tasks apart; a single class is not trained at all."""
    alignment = {"rate": 0.02, "epochs": 15}
    method, first = fresh(sizes=(), identity_alignment=alignment, identity_row_rate=0.05), 0
    for task, classes in enumerate(sizes):
        method.begin_task(task, classes)
        summary = summary_of(task, first, classes)
        optimiser = torch.optim.AdamW([value for part, _ in method.groups() for value in part], lr=0.01)
        for _ in range(40 if classes > 1 else 0):
            loss = method.prompts(summary.queries, training(summary.labels, task, first)).loss
            assert loss is not None
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        method.end_task(summary)
        first += classes
    assert accuracy_of_tasks(method, sizes) > 0.95


# Saving and settings


def test_a_saved_method_is_rebuilt_by_its_tasks() -> None:
    quick = {"epochs": 2}
    method = fresh(sizes=(2,), identity_alignment=quick)
    method.end_task(summary_of(0, 0, 2))
    method.begin_task(1, 3)
    method.end_task(summary_of(1, 2, 3))
    with torch.no_grad():
        method.pool[1].add_(0.3)
    again = fresh(sizes=(2, 3), identity_alignment=quick)
    again.load_state_dict(method.state_dict(), strict=True)
    for task in (2, 3):
        query = some_queries(30, seed=task)
        one, other = prefixes(method, query), prefixes(again, query)
        assert all(torch.equal(one[block].key, other[block].key) for block in BLOCKS)
        for each in (method, again):
            each.begin_task(task, 2)
            each.end_task(summary_of(task, 2 * task + 1, 2))
        assert all(torch.equal(value, again.state_dict()[name]) for name, value in method.state_dict().items())


def test_a_method_whose_prompts_are_fixed_still_predicts() -> None:
    method = moved()
    method.requires_grad_(False)
    assert set(prefixes(method, some_queries())) == set(BLOCKS)
    assert all(not part for part, _ in method.groups())


def test_the_refit_has_the_published_settings_and_keeps_those_not_named() -> None:
    published = HiDePromptConfig().identity_alignment
    assert (published.optimiser, published.schedule, published.epochs, published.centroids) == ("sgd", "epoch", 30, 10)
    assert (published.rate, published.final_rate, published.weight_decay) == (0.00046875, 0, 0)
    given = parse_config({"name": "hide-prompt", "identity_alignment": {"epochs": 3}})
    assert given == HiDePromptConfig(identity_alignment=IdentityAlignmentConfig(epochs=3))
    assert isinstance(given, HiDePromptConfig) and given.identity_alignment.optimiser == "sgd"


def test_blocks_outside_the_backbone_are_refused() -> None:
    with pytest.raises(UserError, match=rf"blocks 0 to {DEPTH - 1}.*\[{DEPTH}\]"):
        fresh(blocks=(0, DEPTH))


@pytest.mark.parametrize(
    "settings",
    [
        {"blocks": (1, 1)},
        {"blocks": ()},
        {"tokens": 5},
        {"momentum": 1.0},
        {"momentum": -0.1},
        {"contrast": -1},
        {"contrast_temperature": 0},
        {"contrast_centroids": 0},
        {"identity_rate_factor": 0},
        {"identity_epochs": 0},
        {"identity_batch": 0},
        {"identity_alignment": {"optimiser": "adam"}},
        {"identity_alignment": {"epoch": 3}},
    ],
    ids=str,
)
def test_settings_without_meaning_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        HiDePromptConfig(**settings)
