"""HiDe-Prompt against its rules, written down a second time with loops in float64."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from method_helpers import Array, array, close, injected, loss_of, normal, same, training
from probprompt.heads.linear import ClassStatistics
from probprompt.methods import EVALUATION, Context, Shape, TaskSummary, parse_config
from probprompt.methods.hide_prompt import HiDePrompt, HiDePromptConfig, IdentityAlignmentConfig

WIDTH, DEPTH, BATCH = 6, 5, 7
BLOCKS = (1, 3)
SIZES = (2, 3, 2)
"""Classes of each task."""
LABELS = torch.tensor([5, 6, 5, 5, 6, 6, 5])
LEARNING = training(2, LABELS, first=5)


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
    return normal(count, WIDTH, seed=seed, scale=3)


def identity_logits(method: HiDePrompt, query: Tensor) -> Array:
    """The perceptron and the head once more, for one query (D,)."""
    head, values = method.identity, array(query)
    hidden = array(head.inner.weight) @ values + array(head.inner.bias)
    hidden = np.array([x / 2 * (1 + math.erf(x / math.sqrt(2))) for x in hidden])
    total = values + array(head.outer.weight) @ hidden + array(head.outer.bias)
    normal = (total - total.mean()) / np.sqrt(total.var() + 1e-5)
    seen = normal * array(head.norm.weight) + array(head.norm.bias)
    return np.asarray(array(head.weight) @ seen + array(head.bias))


def test_the_identity_is_a_residual_perceptron_with_rows_over_all_classes() -> None:
    method = moved()
    assert method.identity.inner.weight.shape == (2 * WIDTH, WIDTH)
    found = method.identity(some_queries())
    assert found.shape == (BATCH, 7)
    for query, logits in zip(some_queries(), found, strict=True):
        close(logits, identity_logits(method, query), rtol=1e-4, atol=1e-5)


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
    pool, found, shown = method.mixed(), injected(method, query), method.relevance(query)
    best = [int(identity_logits(method, row).argmax()) for row in query]
    tasks = [0 if label < 2 else 1 if label < 5 else 2 for label in best]
    assert set(tasks) == {0, 1, 2} and method.tell_task(query).tolist() == tasks
    assert list(shown) == list(BLOCKS)
    for slot, block in enumerate(BLOCKS):
        assert torch.equal(found[block], pool[tasks, slot])
        assert torch.equal(shown[block], torch.eye(3)[tasks][:, None])


def test_the_identity_learns_by_cross_entropy_of_the_tasks_own_classes() -> None:
    method, query = moved(), some_queries()
    loss = loss_of(method, query, LEARNING)
    expected = []
    for row, label in zip(query, LABELS.tolist(), strict=True):
        logits = identity_logits(method, row)[5:]
        expected.append(math.log(sum(math.exp(x - logits[label - 5]) for x in logits)))
    assert loss.item() == pytest.approx(sum(expected) / BATCH, rel=1e-5)
    loss.backward()
    weight, inner = method.identity.weight.grad, method.identity.inner.weight.grad
    assert weight is not None and not weight[:5].any() and weight[5:].any()
    assert inner is not None and inner.any() and all(prompt.grad is None for prompt in method.pool)
    for context in (EVALUATION, method.statistics_context(1), Context(task=2, labels=torch.full((BATCH,), 5))):
        assert method.prompts(query, context).loss is None, "without labels there is no loss"


def learn(
    with_prompts: bool = True, with_identity: bool = True, clip: float = math.inf, **settings: Any
) -> list[tuple[Tensor, list[Tensor]]]:
    """The newest prompt and the identity after each of three epochs of one step."""
    method, query, target = moved(**settings), some_queries(), normal(BATCH, 4, WIDTH, seed=5)
    groups = [{"params": part, "lr": 0.05 * factor} for part, factor in method.groups()]
    parameters = [value for part, _ in method.groups() for value in part]
    optimizer, found = torch.optim.AdamW(groups, weight_decay=0), []
    for _ in range(3):
        method.begin_epoch()
        loss = with_prompts * (injected(method, query, LEARNING)[BLOCKS[0]] - target).square().mean()
        own = method.prompts(query, LEARNING).loss
        if own is not None:
            loss = loss + with_identity * own
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        identity = [value.detach().clone() for value in method.identity.parameters()]
        found.append((method.pool[2].detach().clone(), identity))
    return found


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(first, second) for first, second in zip(one, other, strict=True))


def test_prompts_and_identity_learn_as_each_would_alone() -> None:
    """But for a clip by the common norm, as the description warns."""
    both, prompts, identity = (learn(*given)[-1] for given in ((True, True), (True, False), (False, True)))
    assert torch.equal(both[0], prompts[0]) and not torch.equal(both[0], identity[0])
    assert equal(both[1], identity[1]) and not equal(both[1], prompts[1])
    beside, alone = (learn(True, with_identity, clip=0.01)[-1][0] for with_identity in (True, False))
    assert not torch.allclose(beside, alone, rtol=0, atol=1e-4)


def learns_identity(method: HiDePrompt) -> bool:
    """Begin an epoch and see whether the identity is trained in it."""
    method.begin_epoch()
    return method.prompts(some_queries(), LEARNING).loss is not None


@pytest.mark.parametrize("epochs, expected", [(None, [True] * 4), (1, [True] + [False] * 3), (3, [True] * 3 + [False])])
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
    first, second, third = learn(identity_epochs=1)
    assert not equal(first[1], list(moved().identity.parameters()))
    assert equal(first[1], second[1]) and equal(second[1], third[1])
    assert not torch.equal(second[0], third[0])


def test_the_identity_learns_at_a_rate_of_its_own() -> None:
    method = fresh(identity_lr_scale=0.25)
    (prompts, one), (identity, quarter) = method.groups()
    assert (one, quarter) == (1.0, 0.25)
    assert [id(part) for part in prompts] == [id(method.pool[2])]
    assert {id(part) for part in identity} == {id(part) for part in method.identity.parameters()}


def test_a_task_prompt_starts_between_minus_one_and_one() -> None:
    method = fresh(copy_previous=False, momentum=0)
    every = torch.stack(list(method.pool)).detach()
    assert every.shape == (3, 2, 4, WIDTH)
    assert -1 <= every.min() < -0.8 and 0.8 < every.max() < 1
    assert abs(float(every.mean())) < 0.15


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
    torch.stack(list(injected(method, some_queries(), training(2)).values())).sum().backward()
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
    close(method.mixed(), np.stack(final))
    close(injected(method, some_queries(), training(3))[BLOCKS[1]][2], final[3][1])


def test_in_training_and_for_statistics_the_task_is_known() -> None:
    method, query = moved(), some_queries()
    for task in range(3):
        for context in (training(task), method.statistics_context(task)):
            assert all(prompt.batch is None for prompt in method.prompts(query, context).prompts.values())
            for slot, tokens in enumerate(injected(method, query, context).values()):
                assert torch.equal(tokens, method.mixed()[task, slot].expand(BATCH, -1, -1))
    assert not method.statistics_context(1).training and method.statistics_context(1).labels is None


def test_before_any_task_nothing_is_injected() -> None:
    method = fresh(sizes=())
    assert method.prompts(some_queries(), EVALUATION).prompts == {}
    assert method.relevance(some_queries()) == {}


@pytest.mark.parametrize("context", [EVALUATION, training(2)], ids=["evaluation", "training"])
def test_the_mix_up_hands_out_keys_and_values_along_the_batch(context: Context) -> None:
    """In training it gives one half of the images the keys and the other the values."""
    query = some_queries(8)
    own, found = (injected(moved(legacy_reshape=choice), query, context) for choice in (False, True))
    for block in BLOCKS:
        listed = np.stack([array(own[block][:, :2]), array(own[block][:, 2:])])  # (2, B, M / 2, D)
        np.testing.assert_array_equal(array(found[block]), listed.reshape(8, 4, WIDTH))
    assert same(*(injected(moved(legacy_reshape=choice), query[:1], context) for choice in (False, True)))


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
    loss = method.feature_loss(features, training(2, first=first))
    assert loss is not None and loss.dtype == torch.float32
    rows = np.concatenate([array(method.contrasts[:first]).reshape(-1, WIDTH), array(features)])
    assert len(rows) == 2 * first + BATCH
    expected = weight * contrast_by_hand(rows, temperature)
    assert loss.item() == pytest.approx(expected, rel=1e-5) and expected > 0.01
    assert moved(contrast=0).feature_loss(features, training(2, first=first)) is None


def test_the_contrast_pulls_on_both_sides_of_each_product() -> None:
    method = moved().double()
    features = (0.6 * some_queries(seed=4)).double().requires_grad_()

    def loss(values: Tensor) -> Tensor:
        found = method.feature_loss(values, LEARNING)
        assert found is not None
        return found

    assert torch.autograd.gradcheck(loss, (features,))


def direction(label: int) -> Tensor:
    """A far place for each class."""
    return 6 * torch.randn(WIDTH, generator=torch.Generator().manual_seed(100 + label))


def summary_of(task: int, first: int, classes: int, images: int = 24, seed: int = 0) -> TaskSummary:
    """Training images whose queries and features lie around places of their class."""
    labels = torch.arange(first, first + classes).repeat(images)
    noise = torch.randn(2, len(labels), WIDTH, generator=torch.Generator().manual_seed(seed + task))
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


def test_the_identity_is_refitted_after_every_task_but_the_first() -> None:
    for enabled in (True, False):
        method = fresh(sizes=(2,), identity_alignment={"enabled": enabled})
        for task, (first, classes) in enumerate(((0, 2), (2, 3))):
            if task:
                method.begin_task(1, classes)
            before = {name: value.clone() for name, value in method.identity.state_dict().items()}
            prompts = method.mixed()
            method.end_task(summary_of(task, first, classes))
            stays = [torch.equal(value, before[name]) for name, value in method.identity.state_dict().items()]
            assert not any(stays) if task and enabled else all(stays)
            assert torch.equal(method.mixed(), prompts)
        assert method.query_mean[2:].any()


@pytest.mark.parametrize("sizes", [(2, 3, 2), (2, 1, 1)])
def test_the_task_of_an_image_is_known_after_each_task(sizes: tuple[int, ...]) -> None:
    """Trained on its own classes alone, a head cannot tell tasks apart; a single class is not trained at all."""
    alignment = {"lr": 0.02, "epochs": 15}
    method, firsts = fresh(sizes=(), identity_alignment=alignment, identity_row_lr=0.05), np.cumsum((0, *sizes))
    for task, classes in enumerate(sizes):
        method.begin_task(task, classes)
        summary = summary_of(task, int(firsts[task]), classes)
        assert summary.queries is not None
        optimizer = torch.optim.AdamW([value for part, _ in method.groups() for value in part], lr=0.01)
        for _ in range(40 if classes > 1 else 0):
            loss = loss_of(method, summary.queries, training(task, summary.labels, int(firsts[task])))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        method.end_task(summary)
    right = []
    for task, classes in enumerate(sizes):
        queries = summary_of(task, int(firsts[task]), classes, seed=77).queries
        assert queries is not None
        right.append((method.tell_task(queries) == task).double())
    assert float(torch.cat(right).mean()) > 0.95


def test_the_refit_has_the_published_settings_and_keeps_those_not_named() -> None:
    published = HiDePromptConfig().identity_alignment
    assert (published.optimizer, published.schedule, published.epochs, published.centroids) == ("sgd", "epoch", 30, 10)
    assert (published.lr, published.min_lr, published.weight_decay) == (0.00046875, 0, 0)
    given = parse_config({"name": "hide-prompt", "identity_alignment": {"epochs": 3}})
    assert given == HiDePromptConfig(identity_alignment=IdentityAlignmentConfig(epochs=3))
    assert isinstance(given, HiDePromptConfig) and given.identity_alignment.optimizer == "sgd"
