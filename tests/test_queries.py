"""Queries of training views are asked for once by all runs of a process that see the same views, and change nothing."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from learner_helpers import Settings, build, changed, train, weights_of
from probprompt.backbones.vit import FrozenViT
from probprompt.engine import loader
from probprompt.runs.train import TrainingSetup

CODA = {"name": "coda-prompt", "components_per_task": 2, "tokens": 4, "blocks": [0, 2]}
EVO = {"name": "evo-prompt", "tokens": 2, "hidden": 4, "blocks": [0, 3]}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(loader.SWITCH, "keep")
    loader.forget_queries()
    yield
    loader.forget_queries()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images the backbone was asked about without prompts, call by call."""
    calls, query = list[int](), FrozenViT.query

    def counting(self: FrozenViT, images: Any, *others: Any, **more: Any) -> Tensor:
        calls.append(len(images.tokens) if hasattr(images, "tokens") else len(images))
        return query(self, images, *others, **more)

    monkeypatch.setattr(FrozenViT, "query", counting)
    return calls


def taught(settings: dict[str, Any], tasks: int = 2) -> TrainingSetup:
    """The first tasks learned, without what follows an epoch."""
    workshop = build(settings, DEVICE)
    for task in workshop.tasks[:tasks]:
        train(workshop.learner, task)
    return workshop


def same(one: TrainingSetup, other: TrainingSetup) -> bool:
    first, second = one.learner, other.learner
    return not (
        changed(weights_of(first.model.method), weights_of(second.model.method))
        or changed(weights_of(first.trained), weights_of(second.trained))
    )


@pytest.mark.parametrize("method", [None, CODA], ids=["same method", "another"])
def test_a_second_run_asks_nothing_and_learns_the_same(
    settings: Settings, asked: list[int], monkeypatch: pytest.MonkeyPatch, method: dict[str, Any] | None
) -> None:
    chosen = settings(training={"epochs": 2, "batch_size": 8})
    taught(chosen)
    assert sum(asked) == 2 * 2 * 16  # two tasks of 16 images, two epochs
    asked.clear()
    again = {**chosen, "method": method or chosen["method"]}
    second = taught(again)
    assert not asked
    monkeypatch.delenv(loader.SWITCH)
    assert same(taught(again), second) and sum(asked) == 2 * 2 * 16


@pytest.mark.parametrize(
    "change",
    [
        {"seeds": {"data": 7}},
        {"seeds": {"order": 7}},
        {"backbone": {"normalization": "unit"}},
        {"backbone": {"image_size": 48}},
        {"training": {"crop_scale": (0.5, 1.0)}},
        {"training": {"flip": False}},
        {"method": EVO},  # reads another query
    ],
    ids=str,
)
def test_other_views_or_weights_are_asked_anew(settings: Settings, change: dict[str, Any], asked: list[int]) -> None:
    chosen = settings(training={"epochs": 1, "batch_size": 8})
    taught(chosen, 1)
    asked.clear()
    name, values = next(iter(change.items()))
    taught({**chosen, name: values if name == "method" else {**chosen.get(name, {}), **values}}, 1)
    assert asked[-2:] == [8, 8]  # whatever a method asks before an epoch begins


def test_images_and_epochs_that_are_not_known_are_asked_about(settings: Settings, asked: list[int]) -> None:
    """The last, smaller batch is dropped: another size of batches may need more of the same order."""
    for epochs, batch, expected in ((1, 6, 12), (1, 8, 16), (1, 6, 0), (3, 8, 2 * 16)):
        asked.clear()
        taught(settings(training={"epochs": epochs, "batch_size": batch}), 1)
        assert sum(asked) == expected


def test_nothing_is_kept_beyond_the_room_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "ROOM", 100)
    one, other = loader.queries_of("one"), loader.queries_of("other")
    assert one is not None and other is not None and loader.queries_of("one") is one
    kept = torch.arange(20.0).view(5, 4)  # 80 bytes
    one.keep(0, 0, kept)
    other.keep(0, 0, torch.zeros(2, 4))
    part = one.get(0, 0, 3)
    assert part is not None and torch.equal(part, kept[:3])
    assert one.get(0, 0, 6) is None and one.get(0, 1, 1) is None and other.get(0, 0, 2) is None
    assert one.nbytes == 80 and other.nbytes == 0


def test_without_the_switch_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> None:
    monkeypatch.delenv(loader.SWITCH)
    assert loader.queries_of("one") is None
    assert taught(settings(training={"epochs": 1, "batch_size": 8}), 1).learner.loader.queries is None
