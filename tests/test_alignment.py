"""Class statistics and the refitting of the head on features drawn from them."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from probprompt.config import AlignmentConfig, parse_config
from probprompt.heads import LinearHead
from probprompt.runs.execute import Workshop, prepare
from probprompt.runs.progress import Watcher
from probprompt.training.alignment import ClassStatistics, align
from probprompt.training.learner import TaskImages

Settings = Callable[..., dict[str, Any]]

WIDTH = 8
CPU = torch.device("cpu")
KEY = (0, "alignment", 1)


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def clusters(classes: int, spread: float = 0.25) -> ClassStatistics:
    """Classes well apart from each other."""
    mean = 2 * torch.randn(classes, WIDTH, generator=source(1))
    return ClassStatistics(mean, torch.full_like(mean, spread))


def head_of(classes: int) -> LinearHead:
    return LinearHead(WIDTH, seed=3).grow(classes)


def copy_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


def refit(
    head: LinearHead,
    statistics: ClassStatistics,
    new: int,
    batch: int = 8,
    key: tuple[int | str, ...] = KEY,
    **given: Any,
) -> None:
    align(head, statistics, new, AlignmentConfig(**given), batch, 0.01, key)


# Statistics


def test_statistics_are_mean_and_population_variance_of_each_class() -> None:
    features = torch.randn(40, WIDTH, generator=source()) * 3 + 1
    labels = torch.randint(0, 3, (40,), generator=source(2))
    found = ClassStatistics.empty(WIDTH, CPU).extended(features, labels, 3)
    assert len(found) == 3
    for label in range(3):
        members = features[labels == label].double().numpy()
        np.testing.assert_allclose(found.mean[label].numpy(), np.mean(members, axis=0), rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(found.variance[label].numpy(), np.var(members, axis=0, ddof=0), rtol=1e-6)


def test_later_classes_are_put_behind_and_the_earlier_ones_are_kept() -> None:
    first = ClassStatistics.empty(WIDTH, CPU).extended(torch.randn(6, WIDTH), torch.tensor([0, 1] * 3), 2)
    features, labels = torch.randn(9, WIDTH), torch.tensor([4, 2, 3] * 3)
    both = first.extended(features, labels, 3)
    assert (len(first), len(both)) == (2, 5)
    assert torch.equal(both.mean[:2], first.mean) and torch.equal(both.variance[:2], first.variance)
    torch.testing.assert_close(both.mean[2], features[1::3].mean(dim=0))
    torch.testing.assert_close(both.mean[4], features[0::3].mean(dim=0))


def test_statistics_are_exact_far_from_zero() -> None:
    """In float32, E[x²] - E[x]² of values around 1000 would lose the variance altogether."""
    features = 1000 + torch.randn(500, WIDTH, generator=source())
    found = ClassStatistics.empty(WIDTH, CPU).extended(features, torch.zeros(500, dtype=torch.long), 1)
    np.testing.assert_allclose(found.variance[0].numpy(), features.double().numpy().var(axis=0), rtol=1e-6)


def test_a_class_of_one_image_has_no_variance() -> None:
    found = ClassStatistics.empty(WIDTH, CPU).extended(torch.ones(1, WIDTH), torch.tensor([0]), 1)
    assert torch.equal(found.mean, torch.ones(1, WIDTH)) and torch.equal(found.variance, torch.zeros(1, WIDTH))


def test_drawn_features_have_the_stored_moments_and_the_floor_on_top() -> None:
    mean = torch.tensor([[1.0, -2.0, 5.0], [10.0, 0.0, -10.0]])
    variance = torch.tensor([[4.0, 0.25, 0.0], [1.0, 0.0, 9.0]])
    labels = torch.tensor([0, 1]).repeat(50_000)
    drawn = ClassStatistics(mean, variance).draw(labels, 0.5, source()).double()
    for label in range(2):
        of_class = drawn[labels == label]
        torch.testing.assert_close(of_class.mean(dim=0).float(), mean[label], rtol=0, atol=0.06)
        torch.testing.assert_close(of_class.var(dim=0).float(), variance[label] + 0.5, rtol=0.04, atol=0)
    centred = drawn[labels == 0] - mean[0]
    correlation = torch.corrcoef(centred.T) - torch.eye(3)
    assert correlation.abs().max() < 0.03


def test_draws_depend_on_the_generator_alone() -> None:
    statistics, labels = clusters(4), torch.tensor([3, 1, 1])
    first, again, other = (statistics.draw(labels, 1e-4, source(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert not torch.equal(first[1] - statistics.mean[1], first[2] - statistics.mean[1])


# Refitting


@pytest.mark.parametrize(
    ("old", "new", "batch", "ratio", "size"),
    [(3, 2, 8, 4.0, 32), (2, 4, 8, 1.5, 12), (5, 2, 7, 0.4, 3), (1, 2, 1, 0.1, 1)],
)
def test_an_epoch_has_a_batch_for_every_old_class(
    monkeypatch: pytest.MonkeyPatch, old: int, new: int, batch: int, ratio: float, size: int
) -> None:
    drawn: list[Tensor] = []
    original = ClassStatistics.draw

    def noting(statistics: ClassStatistics, labels: Tensor, floor: float, generator: torch.Generator) -> Tensor:
        drawn.append(labels)
        assert floor == 0.003
        return original(statistics, labels, floor, generator)

    monkeypatch.setattr(ClassStatistics, "draw", noting)
    refit(head_of(old + new), clusters(old + new), new, batch, batch_ratio=ratio, epochs=3, variance_floor=0.003)
    assert [len(labels) for labels in drawn] == [size] * (3 * old)
    for epoch in range(3):
        count = torch.cat(drawn[epoch * old : (epoch + 1) * old]).bincount(minlength=old + new)
        assert count.max() <= size and len(count) == old + new
    if size > 10:
        assert (torch.cat(drawn).bincount(minlength=old + new) > 0).all()
        assert not torch.equal(drawn[0], drawn[old])


class NotingAdamW(torch.optim.AdamW):
    """Notes the rates of its steps."""

    rates: list[float]
    decay: float

    def step(self, closure: Any = None) -> Any:
        (group,) = self.param_groups
        type(self).rates.append(group["lr"])
        type(self).decay = group["weight_decay"]
        return super().step(closure)


def cosine(base: float, final: float, steps: int) -> list[float]:
    return [final + (base - final) * (1 + math.cos(math.pi * step / steps)) / 2 for step in range(steps)]


@pytest.mark.parametrize("first", [None, 0.7])
def test_the_rate_falls_along_a_cosine_and_the_very_first_may_differ(
    monkeypatch: pytest.MonkeyPatch, first: float | None
) -> None:
    NotingAdamW.rates = []
    monkeypatch.setattr(torch.optim, "AdamW", NotingAdamW)
    refit(head_of(5), clusters(5), 2, epochs=4, rate=0.2, final_rate=0.05, first_rate=first, weight_decay=0.125)
    expected = cosine(0.2, 0.05, 12)
    assert NotingAdamW.rates == pytest.approx(expected if first is None else [first, *expected[1:]])
    assert NotingAdamW.decay == 0.125


def test_a_single_new_row_is_fitted_first_at_the_rate_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    NotingAdamW.rates = []
    monkeypatch.setattr(torch.optim, "AdamW", NotingAdamW)
    refit(head_of(4), clusters(4), 1, epochs=2, rate=0.002, final_rate=0.001, first_rate=0.7)
    assert NotingAdamW.rates == pytest.approx([*cosine(0.01, 0.001, 6), 0.7, *cosine(0.002, 0.001, 6)[1:]])


def test_the_first_step_is_as_large_as_its_rate() -> None:
    for first, size in ((None, 0.002), (0.05, 0.05)):
        head = head_of(3)
        before = copy_of(head)
        refit(head, clusters(3), 2, epochs=1, rate=0.002, first_rate=first, weight_decay=0)
        moved = (head.weight.detach() - before["weight"]).abs()
        assert float(moved.max()) == pytest.approx(size, rel=1e-3)


def test_all_rows_are_weighed_against_each_other() -> None:
    head, statistics = head_of(6), clusters(6)
    before = copy_of(head)
    refit(head, statistics, 2, epochs=1, rate=0.01)
    for name, value in head.state_dict().items():
        assert (value != before[name]).view(6, -1).any(dim=1).all()


def pseudo_accuracy(head: LinearHead, statistics: ClassStatistics, classes: range) -> float:
    labels = torch.tensor(list(classes)).repeat(200)
    with torch.no_grad():
        logits = head(statistics.draw(labels, 1e-4, source(9)))
    return 100 * float((logits.argmax(dim=1) == labels).double().mean())


def test_alignment_takes_the_bias_for_new_classes_from_the_head() -> None:
    head, statistics = head_of(6), clusters(6)
    with torch.no_grad():  # a sound classifier for both halves, but everything looks like a new class
        head.weight.copy_(statistics.mean)
        head.bias.copy_(-statistics.mean.square().sum(dim=1) / 2)
        head.bias[3:] += 40
    old, new = range(3), range(3, 6)
    assert pseudo_accuracy(head, statistics, old) < 50
    refit(head, statistics, 3, batch=32, epochs=20, rate=0.5)
    assert pseudo_accuracy(head, statistics, old) > 90
    assert pseudo_accuracy(head, statistics, new) > 90


def test_a_single_new_class_is_learned_while_the_old_rows_stay() -> None:
    head, statistics = head_of(5), clusters(5)
    with torch.no_grad():
        head.weight[:4] = statistics.mean[:4]
        head.bias[:4] = 20 - statistics.mean[:4].square().sum(dim=1) / 2
    before = copy_of(head)
    assert pseudo_accuracy(head, statistics, range(4, 5)) < 50
    settings = AlignmentConfig(epochs=30, rate=1e-9, final_rate=1e-9, weight_decay=0)
    align(head, statistics, 1, settings, 16, 0.2, KEY)
    assert pseudo_accuracy(head, statistics, range(4, 5)) > 90
    assert pseudo_accuracy(head, statistics, range(4)) > 90
    torch.testing.assert_close(head.weight[:4].detach(), before["weight"][:4], rtol=0, atol=1e-6)


def test_the_refit_depends_on_its_key() -> None:
    heads = [head_of(4) for _ in range(3)]
    for head, key in zip(heads, (KEY, KEY, (0, "alignment", 2)), strict=True):
        torch.manual_seed(len(key))
        refit(head, clusters(4), 2, key=key, rate=0.01)
    assert same(copy_of(heads[0]), copy_of(heads[1]))
    assert not same(copy_of(heads[0]), copy_of(heads[2]))


def test_after_the_first_task_there_is_nothing_to_align() -> None:
    head = head_of(3)
    before = copy_of(head)
    refit(head, clusters(3), 3, rate=0.5)
    assert same(copy_of(head), before)


# In a run


def build(settings: dict[str, Any]) -> Workshop:
    return prepare(parse_config(settings), CPU, Watcher())


def quiet(steps: int) -> None:
    """Nobody watches."""


def features_of(workshop: Workshop, task: TaskImages) -> Tensor:
    learner = workshop.learner
    with torch.no_grad():
        return learner.model.features(learner.viewer.evaluation(learner.images.store, task.rows))[0]


def finish(workshop: Workshop, task: TaskImages) -> None:
    workshop.learner.begin(task)
    workshop.learner.finish(task, quiet)


def test_the_first_task_gives_statistics_and_leaves_the_head(settings: Settings) -> None:
    workshop = build(settings())
    learner, task = workshop.learner, workshop.tasks[0]
    learner.begin(task)
    before = copy_of(learner.model)
    learner.finish(task, quiet)
    assert len(learner.statistics) == task.classes
    assert same(copy_of(learner.model), before)


def test_later_alignments_change_the_head_alone(settings: Settings) -> None:
    workshop = build(settings(alignment={"rate": 0.01}))
    learner = workshop.learner
    finish(workshop, workshop.tasks[0])
    for task in workshop.tasks[1:]:
        learner.begin(task)
        before, statistics = copy_of(learner.model), learner.statistics
        learner.finish(task, quiet)
        after = copy_of(learner.model)
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        assert moved == {"head.weight", "head.bias"}
        assert (after["head.weight"] != before["head.weight"]).any(dim=1).all()
        assert torch.equal(learner.statistics.mean[: task.first], statistics.mean)
        assert len(learner.statistics) == task.first + task.classes


def test_statistics_of_evaluation_views_are_those_of_the_features(settings: Settings) -> None:
    workshop = build(settings(data={"tasks": (4, 2)}, alignment={"augmented_statistics": False}))
    for task in workshop.tasks:
        features = features_of(workshop, task).double().numpy()
        finish(workshop, task)
        found = workshop.learner.statistics
        for label in range(task.first, task.first + task.classes):
            members = features[(task.labels == label).numpy()]
            assert len(members) == 8
            np.testing.assert_allclose(found.mean[label].numpy(), members.mean(axis=0), rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(found.variance[label].numpy(), members.var(axis=0), rtol=1e-3, atol=1e-6)


def test_augmented_statistics_are_wider(settings: Settings) -> None:
    plain, augmented = (build(settings(alignment={"augmented_statistics": choice})) for choice in (False, True))
    for workshop in (plain, augmented):
        finish(workshop, workshop.tasks[0])
    ratio = augmented.learner.statistics.variance.mean() / plain.learner.statistics.variance.mean()
    assert ratio > 1.2


def test_the_statistics_do_not_depend_on_the_evaluation_batch(settings: Settings) -> None:
    small, large = (build({**settings(), "evaluation_batch": batch}) for batch in (3, 128))
    for workshop in (small, large):
        finish(workshop, workshop.tasks[0])
    torch.testing.assert_close(small.learner.statistics.mean, large.learner.statistics.mean, rtol=1e-4, atol=1e-5)


def test_without_alignment_nothing_happens_after_training(settings: Settings) -> None:
    workshop = build(settings(alignment={"enabled": False}))
    finish(workshop, workshop.tasks[0])
    learner, task = workshop.learner, workshop.tasks[1]
    learner.begin(task)
    before = copy_of(learner.model)
    learner.finish(task, quiet)
    assert same(copy_of(learner.model), before)
    assert len(learner.statistics) == 0
