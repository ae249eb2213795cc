"""Class statistics and the refitting of the head on features drawn from them."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from learner_helpers import Settings, build, changed, evaluation_features, quiet, weights_of
from probprompt import randomness
from probprompt.engine.loader import TaskImages
from probprompt.heads.linear import AlignmentConfig, ClassStatistics, LinearHead, NormalizedHead, align, k_means
from probprompt.runs.train import TrainingSetup

WIDTH = 8
CPU = torch.device("cpu")
KEY = (0, "alignment", 1)


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def clusters(classes: int, spread: float = 0.25) -> ClassStatistics:
    """Classes well apart from each other."""
    mean = 2 * torch.randn(classes, 1, WIDTH, generator=source(1))
    return ClassStatistics(mean, torch.full_like(mean, spread))


def head_of(classes: int) -> LinearHead:
    return LinearHead(WIDTH, seed=3).grow(classes)


def refit(
    head: LinearHead,
    statistics: ClassStatistics,
    new: int,
    batch: int = 8,
    key: tuple[int | str, ...] = KEY,
    **given: Any,
) -> None:
    align(head, statistics, new, AlignmentConfig(**given), batch, 0.01, key)


@pytest.mark.parametrize("offset", [1, 1000])
def test_statistics_are_mean_and_population_variance_of_each_class(offset: float) -> None:
    """Far from zero, too: in float32, E[x²] - E[x]² of values around 1000 would lose the variance altogether."""
    features = torch.randn(41, WIDTH, generator=source()) * 3 + offset
    labels = torch.cat([torch.randint(0, 3, (40,), generator=source(2)), torch.tensor([3])])
    found = ClassStatistics.empty(WIDTH, CPU).extended(features, labels, 4)
    assert found.mean.shape == found.variance.shape == (len(found), 1, WIDTH) == (4, 1, WIDTH)
    for label in range(4):
        members = features[labels == label].double().numpy()
        np.testing.assert_allclose(found.mean[label, 0].numpy(), np.mean(members, axis=0), rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(found.variance[label, 0].numpy(), np.var(members, axis=0, ddof=0), rtol=1e-6)
    assert not found.variance[3].any(), "a class of one image has none"
    assert torch.equal(found.center, found.mean[:, 0])


def blobs(sizes: tuple[int, ...], distance: float = 10.0, seed: int = 0) -> Tensor:
    """Groups of points far apart, in a random order."""
    middle = distance * torch.randn(len(sizes), WIDTH, generator=source(seed)).repeat_interleave(
        torch.tensor(sizes), dim=0
    )
    points = middle + torch.randn(middle.shape, generator=source(seed + 1))
    return points[torch.randperm(len(points), generator=source(seed + 2))]


def inertia(points: np.ndarray[Any, Any], cluster: np.ndarray[Any, Any]) -> float:
    """Sum of squared distances to the mean of the own cluster."""
    members = [points[cluster == index] for index in np.unique(cluster)]
    return float(sum(((part - part.mean(axis=0)) ** 2).sum() for part in members))


@pytest.mark.parametrize("sizes", [(7, 3, 12, 5), (200, 2, 2)], ids=str)
def test_k_means_finds_groups_that_are_apart(sizes: tuple[int, ...]) -> None:
    """A start from any points at random would often miss the small groups beside a large one."""
    points = blobs(sizes, distance=100.0)
    for key in range(20):
        assert sorted(k_means(points, len(sizes), key, "test").bincount().tolist()) == sorted(sizes)


@pytest.mark.parametrize("seed", range(4))
def test_k_means_comes_to_rest_where_every_point_is_nearest_to_its_own_mean(seed: int) -> None:
    points = torch.randn(60, 3, generator=source(seed)) + 1000
    found = k_means(points, 5, seed).numpy()
    wide = points.double().numpy()
    means = np.stack([wide[found == index].mean(axis=0) for index in range(5)])
    distances = np.linalg.norm(wide[:, None] - means[None], axis=2)
    np.testing.assert_array_equal(distances.argmin(axis=1), found)
    assert inertia(wide, found) < 0.7 * inertia(wide, np.zeros(60, dtype=int))


def test_k_means_of_few_points_is_the_best_of_all_ways_for_some_start() -> None:
    points = torch.tensor([[0.0], [0.9], [2.0], [5.0], [5.5], [9.0]])
    wide = points.double().numpy()
    ways = [np.array([(code >> index) & 1 for index in range(6)]) for code in range(1, 63)]
    best = min(inertia(wide, way) for way in ways)
    found = [inertia(wide, k_means(points, 2, key).numpy()) for key in range(10)]
    assert min(found) == pytest.approx(best)


def test_k_means_depends_on_its_key_alone() -> None:
    points = torch.randn(50, WIDTH, generator=source())
    torch.manual_seed(1)
    first = k_means(points, 6, 3, "a")
    torch.manual_seed(2)
    assert torch.equal(first, k_means(points, 6, 3, "a"))
    assert any(not torch.equal(first, k_means(points, 6, 3, other)) for other in "bcd")


def test_coinciding_points_leave_clusters_empty_and_the_statistics_sound() -> None:
    features = torch.ones(9, WIDTH)
    assert len(k_means(features, 3, 0).unique()) == 1
    found = ClassStatistics.empty(WIDTH, CPU, 3).extended(features, torch.zeros(9, dtype=torch.long), 1)
    assert torch.equal(found.mean, torch.ones(1, 3, WIDTH)) and torch.equal(found.variance, torch.zeros(1, 3, WIDTH))


def test_every_cluster_of_a_class_has_its_own_moments() -> None:
    features = torch.cat([blobs((8, 5, 11), seed=3), blobs((20, 6, 9), seed=4)])
    labels = torch.tensor([2] * 24 + [3] * 35)
    first = ClassStatistics.empty(WIDTH, CPU, 3).extended(blobs((4, 4)), torch.tensor([0, 1] * 4), 2)
    found = first.extended(features, labels, 2, (5, "key"))
    assert found.mean.shape == found.variance.shape == (4, 3, WIDTH)
    assert torch.equal(found.mean[:2], first.mean) and torch.equal(found.variance[:2], first.variance)
    for label in (2, 3):
        members = features[labels == label]
        cluster = k_means(members, 3, 5, "key", "k-means", label)
        for index in range(3):
            part = members[cluster == index].double().numpy()
            np.testing.assert_allclose(found.mean[label, index].numpy(), part.mean(axis=0), rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(found.variance[label, index].numpy(), part.var(axis=0), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found.center, found.mean.sum(dim=1) / 3)


@pytest.mark.parametrize(("images", "different"), [(1, 1), (2, 1), (3, 1), (4, 2), (7, 3), (9, 4)])
def test_a_small_class_repeats_the_clusters_it_has(images: int, different: int) -> None:
    features = torch.randn(images, WIDTH, generator=source(images)) + 3
    found = ClassStatistics.empty(WIDTH, CPU, 10).extended(features, torch.zeros(images, dtype=torch.long), 1)
    rows = found.mean[0].unique(dim=0)
    assert found.mean.shape == (1, 10, WIDTH) and 1 <= len(rows) <= different
    if different == 1:
        torch.testing.assert_close(found.mean[0, 7], features.mean(dim=0))
    share = [int((found.mean[0] == row).all(dim=1).sum()) for row in rows]
    assert max(share) - min(share) <= 1


def test_an_image_that_stands_alone_is_no_gaussian() -> None:
    features = torch.cat([blobs((6, 6)), torch.full((1, WIDTH), 500.0)])
    found = ClassStatistics.empty(WIDTH, CPU, 3).extended(features, torch.zeros(13, dtype=torch.long), 1)
    assert found.mean.abs().max() < 100
    assert (found.variance > 0).all()
    alone = torch.tensor([[0.0] * WIDTH, [100.0] * WIDTH, [300.0] * WIDTH, [700.0] * WIDTH])
    pair = ClassStatistics.empty(WIDTH, CPU, 4).extended(alone, torch.zeros(4, dtype=torch.long), 1)
    assert pair.mean.isfinite().all()


def test_drawn_features_have_the_stored_moments_of_a_cluster_and_the_floor_on_top() -> None:
    mean = torch.tensor([[[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]], [[50.0, 0.0], [60.0, 0.0], [50.0, 10.0]]])
    variance = torch.tensor([[[0.01, 0.04], [0.04, 0.0], [0.09, 0.09]]]).repeat(2, 1, 1)
    labels, statistics = torch.tensor([0, 1]).repeat(30_000), ClassStatistics(mean, variance)
    drawn, again, other = (statistics.draw(labels, 0.01, source(seed)) for seed in (0, 0, 1))
    assert torch.equal(drawn, again) and not torch.equal(drawn, other)
    for label in range(2):
        of_class = drawn[labels == label].double()
        cluster = torch.cdist(of_class, mean[label].double()).argmin(dim=1)
        assert cluster.bincount().tolist() == pytest.approx([10_000] * 3, rel=0.03)
        for index in range(3):
            part = of_class[cluster == index]
            torch.testing.assert_close(part.mean(dim=0).float(), mean[label, index], rtol=0, atol=0.02)
            torch.testing.assert_close(part.var(dim=0).float(), variance[label, index] + 0.01, rtol=0.05, atol=0)
            assert abs(float(torch.corrcoef(part.T)[0, 1])) < 0.04


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


def cosine(base: float, final: float, steps: int) -> list[float]:
    return [final + (base - final) * (1 + math.cos(math.pi * step / steps)) / 2 for step in range(steps)]


def steps_of(settings: AlignmentConfig) -> list[float]:
    """The rates of the refit's steps, three an epoch."""
    if settings.schedule == "epoch":
        rates = [rate for rate in cosine(settings.lr, settings.min_lr, settings.epochs) for _ in range(3)]
    else:
        rates = cosine(settings.lr, settings.min_lr, 3 * settings.epochs)
        rates = [*rates[:1], *rates][: len(rates)] if settings.lr_delay else rates
    return rates if settings.first_lr is None else [settings.first_lr, *rates[1:]]


@pytest.mark.parametrize("first", [None, 0.7])
@pytest.mark.parametrize(
    "given",
    [{"optimizer": "adamw", "schedule": "step"}, {"lr_delay": 1}, {"optimizer": "sgd", "schedule": "epoch"}],
)
@pytest.mark.parametrize("new", [2, 1])
def test_rates_fall_along_a_cosine_and_the_very_first_may_differ(
    new: int, given: dict[str, Any], first: float | None
) -> None:
    """A single new row is fitted before, with AdamW at the rate of training."""
    settings = AlignmentConfig(epochs=4, lr=0.002, min_lr=0.001, first_lr=first, weight_decay=0.125, **given)
    names, rates = list[str](), list[float]()

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        (group,) = optimizer.param_groups
        names.append(type(optimizer).__name__)
        rates.append(group["lr"])
        assert group["weight_decay"] == 0.125
        assert (group.get("momentum", 0.9), group.get("nesterov", False)) == (0.9, False)

    handle = register_optimizer_step_pre_hook(note)
    align(head_of(3 + new), clusters(3 + new), new, settings, 8, 0.01, KEY)
    handle.remove()
    before = cosine(0.01, 0.001, 12) if new == 1 else []
    assert rates == pytest.approx([*before, *steps_of(settings)])
    assert names == ["AdamW"] * len(before) + [{"adamw": "AdamW", "sgd": "SGD"}[settings.optimizer]] * 12


def by_hand(
    head: LinearHead, statistics: ClassStatistics, new: int, settings: AlignmentConfig
) -> tuple[Tensor, Tensor]:
    """The refit with a batch of 8, once more in float64 with the optimizers written out."""
    old, seen, size = len(statistics) - new, len(statistics), round(8 * settings.batch_ratio)
    values = [head.weight.detach().double(), head.bias.detach().double()]
    moments, squares = [torch.zeros_like(value) for value in values], [torch.zeros_like(value) for value in values]
    rates = iter(cosine(settings.lr, settings.min_lr, old * settings.epochs))
    count = 0
    for epoch in range(settings.epochs):
        generator = randomness.generator(CPU, *KEY, epoch)
        mixed = torch.randperm(seen * size, generator=generator)[: old * size]
        for labels in (mixed % seen).split(size):
            features = statistics.draw(labels, settings.variance_floor, generator).double()
            count, rate = count + 1, next(rates)
            logits = features @ values[0].T + values[1]
            error = (logits.softmax(dim=1) - nn.functional.one_hot(labels, seen)) / len(labels)
            for index, slope in enumerate((error.T @ features, error.sum(dim=0))):
                value = values[index]
                if settings.optimizer == "sgd":
                    moments[index] = 0.9 * moments[index] + slope + settings.weight_decay * value
                    values[index] = value - rate * moments[index]
                else:
                    moments[index] = 0.9 * moments[index] + 0.1 * slope
                    squares[index] = 0.999 * squares[index] + 0.001 * slope**2
                    spread = (squares[index] / (1 - 0.999**count)).sqrt() + 1e-8
                    step = moments[index] / (1 - 0.9**count) / spread
                    values[index] = value * (1 - rate * settings.weight_decay) - rate * step
    return values[0].float(), values[1].float()


@pytest.mark.parametrize("centroids", [1, 3])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_refit_is_what_it_says(optimizer: str, centroids: int) -> None:
    mean = 2 * torch.randn(5, centroids, WIDTH, generator=source(1))
    statistics = ClassStatistics(mean, torch.full_like(mean, 0.5))
    settings = AlignmentConfig(optimizer=optimizer, epochs=3, lr=0.03, min_lr=0.01, weight_decay=0.1)
    head = head_of(5)
    weight, bias = by_hand(head, statistics, 2, settings)
    before = head.weight.detach().clone()
    align(head, statistics, 2, settings, 8, 0.01, KEY)
    torch.testing.assert_close(head.weight.detach(), weight, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(head.bias.detach(), bias, rtol=1e-4, atol=1e-5)
    assert (before - weight).abs().max() > 0.01


def test_a_head_without_biases_keeps_it_that_way() -> None:
    head, statistics = NormalizedHead(WIDTH, seed=3).grow(6), clusters(6)
    before = weights_of(head)
    refit(head, statistics, 1, batch=16, epochs=15, lr=0.05)
    assert torch.equal(head.bias, torch.zeros(6)) and not head.bias.requires_grad
    assert (head.weight != before["weight"]).any(dim=1).all()
    assert pseudo_accuracy(head, statistics, range(6)) > 90


@pytest.mark.parametrize(("new", "fixed"), [(1, True), (4, False)], ids=["fixed head", "first task"])
def test_a_fixed_head_or_one_of_the_first_task_stays(new: int, fixed: bool) -> None:
    head = head_of(4).requires_grad_(not fixed)
    before = weights_of(head)
    refit(head, clusters(4), new, lr=0.5)
    assert not changed(weights_of(head), before)


class ShiftedHead(LinearHead):
    """A head that learns a shift of the features beside its rows."""

    def __init__(self, width: int, seed: int) -> None:
        super().__init__(width, seed)
        self.shift = nn.Parameter(torch.zeros(width))

    def logits(self, features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return super().logits(features + self.shift, weight, bias)


def test_what_a_head_learns_beside_its_rows_is_refitted_too_but_not_for_a_single_row() -> None:
    for new, rate, moves in ((2, 0.01, True), (1, 1e-12, False)):
        head = ShiftedHead(WIDTH, seed=3).grow(4)
        refit(head, clusters(4), new, lr=rate, min_lr=0, weight_decay=0)
        assert (float(head.shift.detach().abs().max()) > 1e-3) == moves
        assert all(parameter.grad is None for parameter in head.parameters())
    assert (head.weight[3] != ShiftedHead(WIDTH, seed=3).grow(4).weight[3]).all()


def pseudo_accuracy(head: LinearHead, statistics: ClassStatistics, classes: range) -> float:
    labels = torch.tensor(list(classes)).repeat(200)
    with torch.no_grad():
        logits = head(statistics.draw(labels, 1e-4, source(9)))
    return 100 * float((logits.argmax(dim=1) == labels).double().mean())


def test_alignment_takes_the_bias_for_new_classes_from_the_head() -> None:
    head, statistics = head_of(6), clusters(6)
    with torch.no_grad():  # a sound classifier for both halves, but everything looks like a new class
        head.weight.copy_(statistics.center)
        head.bias.copy_(-statistics.center.square().sum(dim=1) / 2)
        head.bias[3:] += 40
    old, new = range(3), range(3, 6)
    assert pseudo_accuracy(head, statistics, old) < 50
    refit(head, statistics, 3, batch=32, epochs=20, lr=0.5)
    assert pseudo_accuracy(head, statistics, old) > 90
    assert pseudo_accuracy(head, statistics, new) > 90


def test_a_single_new_class_is_learned_while_the_old_rows_stay() -> None:
    head, statistics = head_of(5), clusters(5)
    with torch.no_grad():
        head.weight[:4] = statistics.center[:4]
        head.bias[:4] = 20 - statistics.center[:4].square().sum(dim=1) / 2
    before = weights_of(head)
    assert pseudo_accuracy(head, statistics, range(4, 5)) < 50
    settings = AlignmentConfig(epochs=30, lr=1e-9, min_lr=1e-9, weight_decay=0)
    align(head, statistics, 1, settings, 16, 0.2, KEY)
    assert pseudo_accuracy(head, statistics, range(4, 5)) > 90
    assert pseudo_accuracy(head, statistics, range(4)) > 90
    torch.testing.assert_close(head.weight[:4].detach(), before["weight"][:4], rtol=0, atol=1e-6)


def test_the_refit_depends_on_its_key() -> None:
    heads = [head_of(4) for _ in range(3)]
    for head, key in zip(heads, (KEY, KEY, (0, "alignment", 2)), strict=True):
        torch.manual_seed(len(key))
        refit(head, clusters(4), 2, key=key, lr=0.01)
    assert not changed(weights_of(heads[0]), weights_of(heads[1]))
    assert changed(weights_of(heads[0]), weights_of(heads[2]))


def finish(workshop: TrainingSetup, task: TaskImages) -> None:
    workshop.learner.begin(task)
    workshop.learner.finish(task, quiet)


def test_alignments_change_the_head_alone_after_every_task_but_the_first(settings: Settings) -> None:
    workshop = build(settings(alignment={"lr": 0.01}))
    learner = workshop.learner
    for task in workshop.tasks:
        learner.begin(task)
        before, statistics = weights_of(learner.model), learner.statistics
        learner.finish(task, quiet)
        after = weights_of(learner.model)
        assert changed(before, after) == ({"head.weight", "head.bias"} if task.index else set())
        assert not task.index or (after["head.weight"] != before["head.weight"]).any(dim=1).all()
        assert torch.equal(learner.statistics.mean[: task.first], statistics.mean)
        assert len(learner.statistics) == task.first + task.classes


@pytest.mark.parametrize("batch", [3, 128])
def test_statistics_of_evaluation_views_are_those_of_the_features(settings: Settings, batch: int) -> None:
    chosen = settings(data={"tasks": (4, 2)}, alignment={"augmented_statistics": False})
    workshop = build({**chosen, "evaluation_batch_size": batch})
    for task in workshop.tasks:
        features = evaluation_features(workshop.learner, task.rows).double().numpy()
        finish(workshop, task)
        found = workshop.learner.statistics
        for label in range(task.first, task.first + task.classes):
            members = features[(task.labels == label).numpy()]
            assert len(members) == 8
            np.testing.assert_allclose(found.mean[label, 0].numpy(), members.mean(axis=0), rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(found.variance[label, 0].numpy(), members.var(axis=0), rtol=1e-3, atol=1e-6)


def test_a_run_may_have_several_gaussians_per_class(settings: Settings) -> None:
    given = {"centroids": 3, "optimizer": "sgd", "schedule": "epoch", "lr": 0.01}
    workshop = build(settings(alignment=given))
    for task in workshop.tasks[:2]:
        finish(workshop, task)
    found = workshop.learner.statistics
    assert found.mean.shape[:2] == (len(workshop.learner.model.head), 3)
    assert all(len(rows.unique(dim=0)) > 1 for rows in found.mean)


def test_augmented_statistics_are_wider(settings: Settings) -> None:
    plain, augmented = (build(settings(alignment={"augmented_statistics": choice})) for choice in (False, True))
    for workshop in (plain, augmented):
        finish(workshop, workshop.tasks[0])
    ratio = augmented.learner.statistics.variance.mean() / plain.learner.statistics.variance.mean()
    assert ratio > 1.2
