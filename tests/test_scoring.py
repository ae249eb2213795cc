"""Accuracy over all classes seen, independent of the batches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from probprompt.config import parse_config
from probprompt.engine.scorer import Cache, Scorer
from probprompt.heads.linear import LinearHead
from probprompt.progress import SILENT
from probprompt.runs.train import TrainingSetup, prepare

Counter = Callable[[TrainingSetup], list[int]]
Settings = Callable[..., dict[str, Any]]

METHODS: list[dict[str, Any]] = [
    {},
    {"evaluation": "mean"},
    {"variant": "independent"},
    {"variant": "deterministic"},
    {"name": "linear-probe"},
]


def learned(settings: Settings, **method: Any) -> TrainingSetup:
    """Return a model that distinguishes some classes: its head compares with class means, two of them exchanged."""
    given = settings(method=method)
    if method.get("name") == "linear-probe":
        given["method"] = method
    workshop = prepare(parse_config(given), torch.device("cpu"), SILENT)
    for task in workshop.tasks:
        workshop.learner.begin(task)
    means = []
    with torch.no_grad():
        for task in workshop.tasks:
            for label in range(task.first, task.first + task.classes):
                rows = task.rows[task.labels == label][:2]
                images = workshop.learner.viewer.evaluation(workshop.learner.images.store, rows)
                means.append(workshop.learner.model.features(images)[0].mean(dim=0))
        mean = torch.stack(means)[[0, 4, 2, 3, 1, 5]]
        head_of(workshop).replace(mean, -mean.square().sum(dim=1) / 2)
    return workshop


def head_of(workshop: TrainingSetup) -> LinearHead:
    assert isinstance(workshop.learner.model.head, LinearHead)
    return workshop.learner.model.head


def everything(workshop: TrainingSetup) -> tuple[Tensor, Tensor]:
    """Return all test images and their labels."""
    tasks = workshop.test_tasks
    return torch.cat([task.rows for task in tasks]), torch.cat([task.labels for task in tasks])


def scorer_of(workshop: TrainingSetup, batch: int) -> Scorer:
    scorer = workshop.scorer
    return Scorer(scorer.model, scorer.images, scorer.viewer, batch)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_scores_are_those_of_single_images_in_any_order(settings: Settings, method: dict[str, Any]) -> None:
    workshop = learned(settings, **method)
    model, store = workshop.scorer.model, workshop.scorer.images.store
    rows, labels = everything(workshop)
    right = 0
    for row, label in zip(rows.tolist(), labels.tolist(), strict=True):
        logits = model.predict(workshop.scorer.viewer.evaluation(store, torch.tensor([row])))[0].tolist()
        assert len(logits) == 6
        right += logits.index(max(logits)) == label
    assert 6 <= right < 12 == len(rows)
    assert workshop.scorer.accuracy(rows, labels) == pytest.approx(100 * right / len(rows))
    expected = workshop.scorer.logits(rows)
    mixed = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
    for batch in (1, 5):
        scorer = scorer_of(workshop, batch)
        found = torch.cat([scorer.logits(part) for part in rows[mixed].split(batch)])
        torch.testing.assert_close(found, expected[mixed], rtol=1e-4, atol=1e-3)
        assert scorer.accuracy(rows[mixed], labels[mixed]) == workshop.scorer.accuracy(rows, labels)


def test_accuracy_is_over_all_classes_of_the_present_head(settings: Settings) -> None:
    workshop = learned(settings)
    first, head = workshop.test_tasks[0], head_of(workshop)
    rows, labels = everything(workshop)
    images = workshop.scorer.viewer.evaluation(workshop.scorer.images.store, rows)
    assert torch.equal(workshop.scorer.queries(rows), workshop.learner.model.backbone.query(images))
    before = workshop.scorer.accuracy(rows, labels)
    weight, bias = head.weight.detach().clone(), head.bias.detach().clone()
    head.replace(-weight, -bias)
    assert workshop.scorer.accuracy(rows, labels) < before  # queries are kept, scores are not
    head.replace(weight, bias + 1e6 * torch.eye(6)[5])
    assert workshop.scorer.accuracy(first.rows, first.labels) == 0
    head.replace(weight[:2], bias[:2])
    assert workshop.scorer.accuracy(first.rows, first.labels) > 0


def test_each_query_is_computed_once(settings: Settings, count_queries: Counter) -> None:
    workshop = learned(settings)
    images = count_queries(workshop)
    scorer, seen = scorer_of(workshop, batch=3), 0
    for step, task in enumerate(workshop.test_tasks):
        seen += len(task)
        for earlier in workshop.test_tasks[: step + 1]:
            scorer.accuracy(earlier.rows, earlier.labels)
        assert sum(images) == seen
    scorer.queries(everything(workshop)[0].flip(0))
    assert sum(images) == seen


def test_overlapping_batches_compute_what_is_missing(settings: Settings, count_queries: Counter) -> None:
    workshop = learned(settings)
    rows = everything(workshop)[0]
    expected = scorer_of(workshop, 100).queries(rows)
    images = count_queries(workshop)
    scorer = scorer_of(workshop, 100)
    first = scorer.queries(rows[2:5])
    found = scorer.queries(rows)
    assert images == [3, len(rows) - 3]
    assert torch.equal(found[2:5], first)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    scorer = scorer_of(workshop, 100)
    scorer.queries(rows[4:6])
    torch.testing.assert_close(scorer.logits(rows), scorer_of(workshop, 100).logits(rows), rtol=1e-4, atol=1e-3)


def test_features_of_fixed_prompts_are_computed_once(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    workshop = learned(settings)
    model, rows = workshop.learner.model, everything(workshop)[0]
    passes, original = list[int](), model.evaluated

    def counting(images: Tensor, *more: Any, **named: Any) -> Tensor:
        passes.append(len(images))
        return original(images, *more, **named)

    monkeypatch.setattr(model, "evaluated", counting)
    scorer = scorer_of(workshop, 100)
    assert not model.static
    before = scorer.features(rows)
    model.method.get_parameter("mean").data.add_(1.0)  # the Gaussians that decide the features
    after = scorer.features(rows)
    assert len(passes) == 2 and not torch.allclose(after, before), "prompts that learn are computed each time"
    model.fix()
    expected = scorer.features(rows[:5])
    assert passes[2:] == [5]
    found = scorer.features(rows)
    assert passes[2:] == [5, len(rows) - 5]
    assert torch.equal(found[:5], expected)
    torch.testing.assert_close(found, after, rtol=1e-4, atol=1e-3)
    assert torch.equal(scorer.features(rows.flip(0)), found.flip(0)) and len(passes) == 4


def unlearned(settings: Settings, method: str) -> TrainingSetup:
    return prepare(parse_config({**settings(), "method": {"name": method}}), torch.device("cpu"), SILENT)


def test_backbone_that_learns_is_evaluated_again(settings: Settings) -> None:
    workshop = unlearned(settings, "ft")
    workshop.learner.begin(workshop.tasks[0])
    rows = everything(workshop)[0]
    queries, features = workshop.scorer.queries(rows), workshop.scorer.features(rows)
    with torch.no_grad():
        workshop.learner.model.backbone.model.norm.bias += 1.0
    for found, before in ((workshop.scorer.queries(rows), queries), (workshop.scorer.features(rows), features)):
        torch.testing.assert_close(found, before + 1.0)


def test_queries_are_read_out_as_the_method_requests(settings: Settings) -> None:
    workshop = unlearned(settings, "evo-prompt")
    backbone, rows = workshop.learner.model.backbone, everything(workshop)[0]
    images = workshop.scorer.viewer.evaluation(workshop.scorer.images.store, rows)
    found = workshop.scorer.queries(rows)
    assert torch.equal(found, backbone.query(images, "class before norm"))
    assert not torch.allclose(found, backbone.query(images))
    torch.testing.assert_close(workshop.scorer.features(rows), workshop.learner.model.features(images)[0])


def test_cache_computes_what_is_missing_once() -> None:
    asked: list[list[int]] = []

    def compute(rows: Tensor) -> Tensor:
        asked.append(rows.tolist())
        return torch.stack([rows.float(), -rows.float()], dim=1)

    cache = Cache(6)
    for rows, missing in (([4, 1], [4, 1]), ([1, 4], None), ([5, 1, 0], [5, 0]), ([], None), ([4, 4], None)):
        calls, places = len(asked), torch.tensor(rows, dtype=torch.long)
        assert torch.equal(cache.get(places, compute), torch.stack([places.float(), -places.float()], dim=1))
        assert asked[calls:] == ([] if missing is None else [missing])
