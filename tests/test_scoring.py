"""Accuracy over all classes seen, whatever the batches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from probprompt.config import parse_config
from probprompt.evaluation.scoring import Cache, Scorer
from probprompt.heads import LinearHead
from probprompt.progress import SILENT
from probprompt.runs.execute import Workshop, prepare

Counter = Callable[[Workshop], list[int]]
Settings = Callable[..., dict[str, Any]]

METHODS: list[dict[str, Any]] = [
    {},
    {"evaluation": "mean"},
    {"variant": "independent"},
    {"variant": "deterministic"},
    {"name": "linear-probe"},
]


def learned(settings: Settings, **method: Any) -> Workshop:
    """A model that tells some classes apart: its head compares with class means, two of them exchanged."""
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


def head_of(workshop: Workshop) -> LinearHead:
    assert isinstance(workshop.learner.model.head, LinearHead)
    return workshop.learner.model.head


def everything(workshop: Workshop) -> tuple[Tensor, Tensor]:
    """All test images and their labels."""
    tasks = workshop.test_tasks
    return torch.cat([task.rows for task in tasks]), torch.cat([task.labels for task in tasks])


def scorer_of(workshop: Workshop, batch: int) -> Scorer:
    scorer = workshop.scorer
    return Scorer(scorer.model, scorer.images, scorer.viewer, batch)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_accuracy_is_that_of_a_plain_loop_over_single_images(settings: Settings, method: dict[str, Any]) -> None:
    workshop = learned(settings, **method)
    model, store = workshop.scorer.model, workshop.scorer.images.store
    rows, labels = everything(workshop)
    right = 0
    for row, label in zip(rows.tolist(), labels.tolist(), strict=True):
        image = workshop.scorer.viewer.evaluation(store, torch.tensor([row]))
        logits = model.predict(image)[0].tolist()
        assert len(logits) == 6
        right += logits.index(max(logits)) == label
    assert 6 <= right < 12 == len(rows)
    assert workshop.scorer.accuracy(rows, labels) == pytest.approx(100 * right / len(rows))


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_logits_depend_neither_on_the_batch_nor_on_the_order(settings: Settings, method: dict[str, Any]) -> None:
    workshop = learned(settings, **method)
    rows, labels = everything(workshop)
    expected = workshop.scorer.logits(rows)
    mixed = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
    for batch in (1, 5):
        scorer = scorer_of(workshop, batch)
        found = torch.cat([scorer.logits(part) for part in rows[mixed].split(batch)])
        torch.testing.assert_close(found, expected[mixed], rtol=1e-4, atol=1e-3)
        assert scorer.accuracy(rows[mixed], labels[mixed]) == workshop.scorer.accuracy(rows, labels)


def test_accuracy_is_over_all_classes_seen(settings: Settings) -> None:
    workshop = learned(settings)
    first, head = workshop.test_tasks[0], head_of(workshop)
    with torch.no_grad():
        head.bias[5] += 1e6
    assert workshop.scorer.accuracy(first.rows, first.labels) == 0
    head.replace(head.weight[:2].detach(), head.bias[:2].detach())
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


def test_batches_that_overlap_compute_only_what_is_missing(settings: Settings, count_queries: Counter) -> None:
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


def test_queries_are_the_backbones_without_prompts(settings: Settings) -> None:
    workshop = learned(settings)
    rows = everything(workshop)[0]
    images = workshop.scorer.viewer.evaluation(workshop.scorer.images.store, rows)
    assert torch.equal(workshop.scorer.queries(rows), workshop.learner.model.backbone.query(images))


def test_a_head_that_learned_since_changes_the_score(settings: Settings) -> None:
    """Queries are kept, scores are not."""
    workshop = learned(settings)
    rows, labels = everything(workshop)
    before = workshop.scorer.accuracy(rows, labels)
    head = head_of(workshop)
    head.replace(-head.weight.detach(), -head.bias.detach())
    assert workshop.scorer.accuracy(rows, labels) < before


# What is kept


def prompt_of(workshop: Workshop) -> Tensor:
    """The Gaussians that decide the features."""
    return workshop.learner.model.method.get_parameter("mean").data


def test_features_of_prompts_that_are_fixed_are_computed_once(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    workshop = learned(settings)
    model, rows = workshop.learner.model, everything(workshop)[0]
    passes, original = list[int](), model.evaluated

    def counting(images: Tensor, *more: Any, **named: Any) -> Tensor:
        passes.append(len(images))
        return original(images, *more, **named)

    monkeypatch.setattr(model, "evaluated", counting)
    scorer = scorer_of(workshop, 100)
    assert not model.static
    scorer.features(rows)
    scorer.features(rows)
    assert len(passes) == 2, "prompts that learn are asked each time"
    model.fix()
    expected = scorer.features(rows[:5])
    assert passes[2:] == [5]
    found = scorer.features(rows)
    assert passes[2:] == [5, len(rows) - 5]
    assert torch.equal(found[:5], expected)
    assert torch.equal(scorer.features(rows.flip(0)), found.flip(0)) and len(passes) == 4
    torch.testing.assert_close(found, scorer_of(workshop, 100).features(rows), rtol=1e-4, atol=1e-3)


def test_features_of_prompts_that_learn_follow_them(settings: Settings) -> None:
    """What was seen while prompts learned is not kept when they are fixed."""
    workshop = learned(settings)
    rows = everything(workshop)[0]
    before = workshop.scorer.features(rows)
    prompt_of(workshop).add_(1.0)
    after = workshop.scorer.features(rows)
    assert not torch.allclose(after, before)
    workshop.learner.model.fix()
    assert torch.equal(workshop.scorer.features(rows), after)


def test_a_backbone_that_learns_is_asked_anew(settings: Settings) -> None:
    given = settings()
    given["method"] = {"name": "ft"}
    workshop = prepare(parse_config(given), torch.device("cpu"), SILENT)
    workshop.learner.begin(workshop.tasks[0])
    rows = everything(workshop)[0]
    queries, features = workshop.scorer.queries(rows), workshop.scorer.features(rows)
    with torch.no_grad():
        workshop.learner.model.backbone.model.norm.bias += 1.0
    for found, before in ((workshop.scorer.queries(rows), queries), (workshop.scorer.features(rows), features)):
        torch.testing.assert_close(found, before + 1.0)


def test_queries_are_read_out_as_the_method_asks(settings: Settings) -> None:
    given = settings()
    given["method"] = {"name": "evo-prompt"}
    workshop = prepare(parse_config(given), torch.device("cpu"), SILENT)
    backbone, rows = workshop.learner.model.backbone, everything(workshop)[0]
    images = workshop.scorer.viewer.evaluation(workshop.scorer.images.store, rows)
    found = workshop.scorer.queries(rows)
    assert torch.equal(found, backbone.query(images, "class before norm"))
    assert not torch.allclose(found, backbone.query(images))
    torch.testing.assert_close(workshop.scorer.features(rows), workshop.learner.model.features(images)[0])


def test_a_cache_computes_what_is_missing_together_and_once() -> None:
    asked: list[list[int]] = []

    def compute(rows: Tensor) -> Tensor:
        asked.append(rows.tolist())
        return torch.stack([rows.float(), -rows.float()], dim=1)

    cache = Cache(6)
    for rows, missing in (([4, 1], [4, 1]), ([1, 4], None), ([5, 1, 0], [5, 0]), ([], None), ([4, 4], None)):
        calls, places = len(asked), torch.tensor(rows, dtype=torch.long)
        found = cache.get(places, compute)
        assert torch.equal(found, torch.stack([places.float(), -places.float()], dim=1))
        assert asked[calls:] == ([] if missing is None else [missing])
