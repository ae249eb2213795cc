"""Heads against their formulas, written down a second time in NumPy, and against themselves in another order."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from probprompt import randomness
from probprompt.config import parse_config
from probprompt.errors import UserError
from probprompt.heads import HEADS, closed_form, make_head
from probprompt.heads.closed_form import ClosedFormHead, RidgeHead, RidgeSettings
from probprompt.heads.head import Head
from probprompt.heads.linear import LinearHead, NormalizedHead

Array = NDArray[np.float64]

WIDTH, SEED = 6, 3
CONFIG = {"projections": 20, "ridge": 0.5}
CLOSED = ["ridge", "lda", "nearest-mean"]
SPREAD = (13, 2, 9, 7, 4)  # images of each class


def some_images(counts: Sequence[int] = SPREAD, noise: float = 0.7, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Features around a centre per class, and labels, in mixed order."""
    source = torch.Generator().manual_seed(seed)
    centres = 1 + 2 * torch.randn(len(counts), WIDTH, generator=source)
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    labels = labels[torch.randperm(len(labels), generator=source)]
    return centres[labels] + noise * torch.randn(len(labels), WIDTH, generator=source), labels


def build(kind: str, given: dict[str, Any] = CONFIG) -> Head:
    """Build a head with those of the given settings that it has."""
    settings = HEADS[kind].Settings
    return make_head(settings(**{name: given[name] for name in given if name in settings.model_fields}), WIDTH, SEED)


def closed(kind: str, config: dict[str, Any] = CONFIG) -> ClosedFormHead:
    head = build(kind, config)
    assert isinstance(head, ClosedFormHead)
    return head


def learned(kind: str, config: dict[str, Any] = CONFIG, images: tuple[Tensor, Tensor] | None = None) -> ClosedFormHead:
    """A head that was given everything at once."""
    features, labels = images or some_images()
    head = closed(kind, config)
    head.learn(features, labels, int(labels.max()) + 1, task_key=0)
    return head


def grown(kind: str, classes: int = 5) -> Head:
    """A head of any kind with something to predict by."""
    if kind in CLOSED:
        return learned(kind, images=some_images(SPREAD[:classes]))
    return build(kind).grow(classes)


def close(found: Tensor, expected: Tensor | Array, rtol: float) -> bool:
    """Equal up to a part of the largest number."""
    expected = torch.as_tensor(expected, dtype=torch.float64)
    return float((found.detach().double() - expected).abs().max()) <= rtol * float(expected.abs().max())


# All kinds


def test_every_kind_has_a_head() -> None:
    for kind, head in HEADS.items():
        assert type(build(kind)) is head


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_grows_and_answers_for_each_class(kind: str) -> None:
    head = build(kind)
    assert len(head) == 0 and head(torch.ones(4, WIDTH)).shape == (4, 0)
    assert kind != "ridge" or not head.get_buffer("gram").numel()  # the large one comes with the first class
    head.grow(2).grow(0).grow(3)
    assert len(head) == 5 and head(torch.ones(4, WIDTH)).shape == (4, 5)
    assert {name: tuple(value.shape) for name, value in head.state_dict().items()} == head.shapes(5)
    assert bool([*head.parameters()]) == head.trained


@pytest.mark.parametrize("before", [0, 2, 7])
@pytest.mark.parametrize("kind", HEADS)
def test_a_head_is_restored_whatever_its_size_was(kind: str, before: int) -> None:
    head, features = grown(kind), some_images(seed=2)[0]
    saved = head.state_dict()
    restored = build(kind).grow(before).restore(saved)
    assert len(restored) == 5 and torch.equal(restored(features), head(features))
    found = restored.state_dict()
    assert set(found) == set(saved)
    for name, value in saved.items():
        assert torch.equal(found[name], value) and found[name].dtype == value.dtype
        assert found[name].data_ptr() != value.data_ptr()  # the given tensors are not its own from now on
    loaded = build(kind).grow(3).grow(2)
    loaded.load_state_dict(saved)
    assert torch.equal(loaded(features), head(features))


@pytest.mark.parametrize("kind", CLOSED)
def test_prediction_needs_no_sums_but_learning_does(kind: str) -> None:
    head, (features, labels) = learned(kind), some_images(seed=2)
    needed = {name: value for name, value in head.state_dict().items() if name not in head.learning_only}
    assert 0 < len(needed) < len(head.state_dict())
    restored = closed(kind).restore(needed)
    assert torch.equal(restored(features), head(features))
    assert set(restored.state_dict()) == set(needed)
    for forbidden in (lambda: restored.learn(features, labels, 0, 1), lambda: restored.grow(1)):
        with pytest.raises(ValueError, match="cannot learn"):
            forbidden()
    restored.restore(head.state_dict()).learn(features, labels, 0, 1)
    head.learn(features, labels, 0, 1)
    assert torch.equal(restored(features), head(features))


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_refuses_tensors_that_are_not_its_own(kind: str) -> None:
    saved = dict(grown(kind).state_dict())
    head = build(kind)
    for name in set(saved) - head.learning_only:
        with pytest.raises(ValueError, match=name):
            head.restore({other: value for other, value in saved.items() if other != name})
    with pytest.raises(ValueError, match="extra"):
        head.restore({**saved, "extra": torch.zeros(1)})
    for name in saved:
        with pytest.raises(ValueError, match=name):
            head.restore({**saved, name: torch.zeros(*saved[name].shape, 2)})
    assert len(head) == 0


@pytest.mark.parametrize("kind", HEADS)
def test_an_answer_depends_on_its_own_image_alone(kind: str) -> None:
    head, features = grown(kind), some_images(seed=2)[0]
    alone = torch.cat([head(one[None]) for one in features])
    torch.testing.assert_close(head(features), alone)
    assert torch.equal(head(features[:0]), alone[:0])


@pytest.mark.parametrize(
    ("setting", "values"),
    [("kind", ["cosine"]), ("projections", [-1]), ("ridge", [0, math.inf]), ("shrinkage", [0, 1.1]), ("lambda", [1])],
)
def test_settings_without_meaning_are_refused(setting: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(UserError):
            parse_config({"head": {"kind": "lda" if setting == "shrinkage" else "ridge", setting: value}})


# Trained heads


@pytest.mark.parametrize("kind", ["linear", "normalized"])
def test_rows_start_as_pytorch_draws_them_from_seed_and_class(kind: str) -> None:
    head = build(kind).grow(2).grow(3)
    for label in range(5):
        drawn = (2 * randomness.uniform((WIDTH + 1,), SEED, "head", label) - 1) / math.sqrt(WIDTH)
        torch.testing.assert_close(head.weight[label].detach(), drawn[:WIDTH])
        expected = drawn[WIDTH] if kind == "linear" else torch.tensor(0.0)
        torch.testing.assert_close(head.state_dict()["bias"][label], expected)


def test_linear_logits() -> None:
    head, features = LinearHead(WIDTH, SEED).grow(3), some_images()[0]
    weight, bias = torch.randn(4, WIDTH), torch.randn(4)
    expected = torch.stack([features @ row + shift for row, shift in zip(weight, bias, strict=True)], dim=1)
    torch.testing.assert_close(head.logits(features, weight, bias), expected)
    head.replace(weight, bias)
    torch.testing.assert_close(head(features), expected)
    assert head.weight.requires_grad and head.bias.requires_grad


def test_normalised_logits_are_standardised_features_times_unit_rows() -> None:
    head, features = NormalizedHead(WIDTH, SEED).grow(4), some_images()[0]
    with torch.no_grad():
        head.weight.mul_(torch.tensor([[0.1], [1.0], [7.0], [300.0]]))
    x, weight = features.double().numpy(), head.weight.detach().double().numpy()
    standard = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    expected = standard @ (weight / np.sqrt((weight**2).sum(1, keepdims=True))).T
    assert close(head(features), expected, 1e-6)
    assert torch.equal(head.logits(features, head.weight, torch.full((4,), 9.0)), head(features))
    assert float(head(1000 * torch.randn(50, WIDTH)).detach().abs().max()) <= math.sqrt(WIDTH) + 1e-5


def test_a_normalised_head_never_has_a_bias() -> None:
    head = NormalizedHead(WIDTH, SEED)
    for step in (
        lambda: head.grow(3),
        lambda: head.replace(torch.randn(4, WIDTH), torch.randn(4)),
        lambda: head.restore({"weight": torch.randn(5, WIDTH), "bias": torch.ones(5)}),
        lambda: head.grow(2),
    ):
        step()
        assert torch.equal(head.bias, torch.zeros(len(head))) and not head.bias.requires_grad
        assert head.weight.requires_grad
    head(some_images()[0])[:, 0].sum().backward()
    assert head.bias.grad is None and head.weight.grad is not None
    # rows of length 1: a longer row is the same row, so the gradient stands at right angles to it
    assert abs(float(head.weight.grad[0] @ head.weight[0].detach())) < 1e-5 < float(head.weight.grad[0].norm())


# Closed forms against their formulas


def projected(head: RidgeHead, features: Tensor) -> Array:
    x = features.double().numpy()
    return x if head.projection is None else np.maximum(x @ head.projection.double().numpy(), 0)


@pytest.mark.parametrize("projections", [0, 20, 60])
@pytest.mark.parametrize("ridge", [1e-2, 1.0, 300.0])
def test_ridge_is_the_least_squares_solution_with_a_penalty(projections: int, ridge: float) -> None:
    features, labels = some_images()
    head = learned("ridge", {"projections": projections, "ridge": ridge})
    assert isinstance(head, RidgeHead)
    inner = projected(head, features)
    penalty = math.sqrt(ridge) * np.eye(inner.shape[1])
    targets = np.vstack([np.eye(5)[labels.numpy()], np.zeros((len(penalty), 5))])
    expected = np.linalg.lstsq(np.vstack([inner, penalty]), targets, rcond=None)[0]  # (L, C)
    assert close(head.solution().T, expected, 1e-9)
    assert head.weight.dtype == torch.float32 and head.gram.dtype == head.correlation.dtype == torch.float64
    test = some_images(seed=2)[0]
    assert close(head(test), projected(head, test) @ expected, 1e-4)
    assert float(head.strength) == ridge


@pytest.mark.parametrize("shrinkage", [1e-3, 0.3, 1.0])
def test_lda_is_the_difference_of_gaussian_likelihoods(shrinkage: float) -> None:
    features, labels = some_images()
    head = learned("lda", {"shrinkage": shrinkage})
    x, y = features.double().numpy(), labels.numpy()
    means = np.stack([x[y == label].mean(0) for label in range(5)])
    covariance = sum(np.outer(one - means[label], one - means[label]) for one, label in zip(x, y, strict=True)) / len(x)
    shrunk = (1 - shrinkage) * covariance + shrinkage * np.trace(covariance) / WIDTH * np.eye(WIDTH)
    test = some_images(seed=2)[0]
    precision = np.linalg.inv(shrunk)
    density = np.array(
        [[-(one - mean) @ precision @ (one - mean) / 2 for mean in means] for one in test.double().numpy()]
    )
    common = np.array([one @ precision @ one / 2 for one in test.double().numpy()])[:, None]
    assert close(head(test), density + common, 1e-5)


def test_lda_with_one_image_of_each_class_takes_the_nearest() -> None:
    features = 3 * torch.eye(WIDTH)[:3] + 0.1
    head = learned("lda", images=(features, torch.arange(3)))
    expected = -(torch.cdist(features, features) ** 2) / 2 + (features**2).sum(1, keepdim=True) / 2
    torch.testing.assert_close(head(features), expected, rtol=1e-4, atol=1e-4)


def test_nearest_mean_is_a_cosine() -> None:
    features, labels = some_images()
    head, test = learned("nearest-mean"), some_images(seed=2)[0]
    for label in range(5):
        mean = features[labels == label].mean(dim=0)
        expected = torch.nn.functional.cosine_similarity(test, mean[None])
        torch.testing.assert_close(head(test)[:, label], expected, rtol=1e-4, atol=1e-6)


# Sums: order and splits do not matter


def exact(head: ClosedFormHead) -> dict[str, Tensor]:
    """What a head stands on, in float64."""
    found = {name: head.get_buffer(name) for name in head.learning_only & set(head.shapes(1))}
    return {**found, "solution": head.solution()} if isinstance(head, RidgeHead) else found


def same_up_to(head: ClosedFormHead, other: ClosedFormHead, order: Tensor) -> None:
    """Two heads are equal, where class c of the one is class ``order[c]`` of the other."""
    by_class = {"correlation", "sums", "counts", "solution"}
    for name, value in exact(head).items():
        expected = exact(other)[name]
        assert close(value, expected[order] if name in by_class else expected, 1e-9), name
    features = some_images(seed=2)[0]
    torch.testing.assert_close(head(features), other(features)[:, order], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", CLOSED)
@pytest.mark.parametrize("tasks", [[[0, 1], [2, 3, 4]], [[4], [2], [0], [1], [3]], [[3, 1, 2], [0], [4]]], ids=str)
def test_tasks_in_any_order_equal_all_at_once(kind: str, tasks: list[list[int]]) -> None:
    features, labels = some_images()
    order = torch.tensor([label for task in tasks for label in task])
    place = order.argsort()  # of a class in the order of its appearance
    head = closed(kind)
    for number, task in enumerate(tasks):
        chosen = torch.isin(labels, torch.tensor(task))
        head.learn(features[chosen], place[labels[chosen]], len(task), number)
        assert len(head) == sum(map(len, tasks[: number + 1]))
    same_up_to(head, learned(kind), order)


@pytest.mark.parametrize("kind", CLOSED)
def test_more_images_of_known_classes_equal_all_at_once(kind: str) -> None:
    features, labels = some_images()
    first = torch.cat([(labels == label).nonzero()[:1, 0] for label in range(5)])  # one image of each class
    rest = torch.tensor([place for place in range(len(labels)) if place not in first.tolist()])
    head = closed(kind)
    head.learn(features[first], labels[first], 5, 0)
    for number, some in enumerate(rest.split(8), start=1):
        head.learn(features[some], labels[some], 0, number)
    head.learn(features[:0], labels[:0], 0, 99)
    same_up_to(head, learned(kind), torch.arange(5))


@pytest.mark.parametrize("kind", CLOSED)
def test_images_are_added_in_chunks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"projections": 20}
    whole = learned(kind, config)
    monkeypatch.setattr(closed_form, "CHUNK", 70)  # three images of 20 projections
    same_up_to(learned(kind, config), whole, torch.arange(5))


@pytest.mark.parametrize("kind", CLOSED)
@pytest.mark.parametrize("scale", [1e-6, 1, 1e5])
def test_short_and_long_features_are_learned_as_well(kind: str, scale: float) -> None:
    features, labels = some_images((30,) * 5, noise=0.3)
    for config in ({"projections": 40}, {"projections": 400, "ridge": 1e-6}):
        head = learned(kind, config, images=(scale * features, labels))
        logits = head(scale * features)
        assert bool(logits.isfinite().all())
        if scale >= 1 or kind != "ridge":  # absolute strengths may be too much for features that short
            assert float((logits.argmax(dim=1) == labels).float().mean()) > 0.98


@pytest.mark.parametrize("kind", CLOSED)
def test_what_cannot_be_learned_is_refused_and_changes_nothing(kind: str) -> None:
    head, (features, labels) = learned(kind), some_images()
    before = {name: value.clone() for name, value in head.state_dict().items()}
    broken = features.clone()
    broken[3, 2] = math.nan
    for images, of, classes in [
        (broken, labels, 0),
        (features, labels + 1, 0),
        (features, labels + 4, 6),  # class 5 to 8 of 5 known and 6 new ones
        (features, labels - 1, 0),
        (features, labels, 1),
    ]:
        with pytest.raises(ValueError, match=r"NaN|do not match"):
            head.learn(images, of, classes, 1)
    assert len(head) == 5
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())


@pytest.mark.parametrize("kind", CLOSED)
def test_other_number_formats_are_welcome(kind: str) -> None:
    features, labels = some_images()
    rough = features.bfloat16()
    head, expected = learned(kind, images=(rough, labels)), learned(kind, images=(rough.float(), labels))
    assert torch.equal(head(rough), expected(rough.float()))
    assert head(features.double()).dtype == torch.float32 and not head(features).requires_grad


# The strength of the ridge


def held_out(labels: Tensor, task_key: int) -> list[int]:
    """A fifth of each class, as the seed draws it."""
    found = []
    for label in labels.unique().tolist():
        places = [place for place, of in enumerate(labels.tolist()) if of == label]
        order = randomness.permutation(len(places), SEED, "ridge", task_key, label)
        found += [places[index] for index in order[: max(1, round(len(places) / 5))]]
    return found


def by_hand(head: RidgeHead, features: Tensor, labels: Tensor, task_key: int) -> tuple[list[float], float, list[int]]:
    """Mean held-out error of every strength, the standard error at the best, and which images were held out."""
    held = held_out(labels, task_key)
    rest = [place for place in range(len(labels)) if place not in held]
    inner, targets = projected(head, features), np.eye(int(labels.max()) + 1)[labels.numpy()]
    means, deviations = [], []
    for strength in closed_form.STRENGTHS:
        solution = np.linalg.solve(
            inner[rest].T @ inner[rest] + strength * np.eye(inner.shape[1]), inner[rest].T @ targets[rest]
        )
        errors = ((inner[held] @ solution - targets[held]) ** 2).sum(axis=1)
        means.append(float(errors.mean()))
        deviations.append(float(errors.std(ddof=1)) / math.sqrt(len(held)))
    return means, deviations[int(np.argmin(means))], held


@pytest.mark.parametrize("noise", [0.05, 1.0, 4.0, 30.0])
def test_the_strength_is_the_largest_within_a_standard_error_of_the_best(noise: float) -> None:
    images = some_images((10, 20, 31), noise)
    for last in range(1, 4):  # chosen by the best of each task, as RanPAC's code does
        parts = parts_of((10, 20, 31, 12, 9, 14), noise)[:last]
        ours = closed("ridge", {"projections": 12, "ridge_choice": "last"})
        for task, (features, labels) in enumerate(parts):
            ours.learn(features, labels, 2, task_key=task)
        assert isinstance(ours, RidgeHead)
        means = by_hand(ours, features, labels, task_key=last - 1)[0]
        assert float(ours.strength) == closed_form.STRENGTHS[int(np.argmin(means))]
    head = learned("ridge", {"projections": 12}, images)
    assert isinstance(head, RidgeHead)
    means, deviation, held = by_hand(head, *images, task_key=0)
    assert len(held) == 2 + 4 + 6
    good = [
        strength for strength, mean in zip(closed_form.STRENGTHS, means, strict=True) if mean <= min(means) + deviation
    ]
    assert float(head.strength) == max(good)


def test_the_strength_is_chosen_once_and_saved() -> None:
    head = learned("ridge", {"projections": 12}, some_images((20, 20, 20), 0.05))
    chosen = float(head.get_buffer("strength"))
    features, labels = some_images((40, 40), 30.0, seed=5)
    head.learn(features, labels + 3, 2, task_key=1)
    assert float(head.get_buffer("strength")) == chosen
    other = learned("ridge", {"projections": 12}, (features, labels))
    assert float(other.get_buffer("strength")) != chosen
    restored = closed("ridge", {"projections": 12}).restore(head.state_dict())
    assert float(restored.get_buffer("strength")) == chosen


@pytest.mark.parametrize("counts", [(30,), (1, 1, 1), (9, 1, 1)], ids=str)
def test_without_images_to_choose_by_the_strength_follows_the_gram_matrix(counts: tuple[int, ...]) -> None:
    features, labels = some_images(counts)
    head = learned("ridge", {"projections": 12}, (features, labels))
    assert isinstance(head, RidgeHead) and bool(head.strength.isnan())
    inner = projected(head, features)
    gram = inner.T @ inner
    solution = np.linalg.solve(gram + 0.1 * np.trace(gram) / 12 * np.eye(12), inner.T @ np.eye(len(counts))[labels])
    assert close(head.solution().T, solution, 1e-9)
    more, of = some_images((2, 2), seed=8)
    head.learn(more, of + len(counts), 2, task_key=1)
    assert float(head.strength) in closed_form.STRENGTHS  # the first task that can choose does


@pytest.mark.parametrize("labels", [[0, 0, 1, 1], [0]], ids=str)
@pytest.mark.parametrize("kind", CLOSED)
def test_features_of_no_length_are_no_division_by_zero(kind: str, labels: list[int]) -> None:
    images = torch.zeros(len(labels), WIDTH), torch.tensor(labels)
    head = learned(kind, {"projections": 12}, images)
    assert torch.equal(head(torch.zeros(1, WIDTH)), torch.zeros(1, len(head)))


@pytest.mark.parametrize("ridge", [1e-6, 1e-30])
def test_a_strength_that_is_lost_in_rounding_gives_the_shortest_exact_fit(ridge: float) -> None:
    """Fewer images than projections: the Gram matrix has no inverse."""
    features, labels = some_images()
    head = learned("ridge", {"projections": 200, "ridge": ridge}, (1e5 * features, labels))
    assert isinstance(head, RidgeHead)
    shortest = np.linalg.lstsq(projected(head, 1e5 * features), np.eye(5)[labels.numpy()], rcond=None)[0]  # (L, C)
    assert close(head.solution().T, shortest, 1e-2)


@pytest.mark.parametrize(("intermediate", "projected"), [("unprojected", 12), ("projected", 48)])
def test_intermediate_stand_beside_the_projections_or_are_projected(
    intermediate: Literal["unprojected", "projected"], projected: int
) -> None:
    config = RidgeSettings(projections=30, ridge=2.0, with_query=True, layers=3, intermediate=intermediate)
    head = make_head(config, width=6, seed=3)
    assert isinstance(head, RidgeHead) and head.width == 6 * 8 and head.layers == 3
    assert head.projection is not None and head.projection.shape == (projected, 30)
    features, labels = torch.randn(40, 48, generator=torch.Generator().manual_seed(4)), torch.arange(40) % 4
    head.learn(features, labels, 4, task_key=0)
    rest = 12**0.5 * features[:, projected:]
    hidden = torch.cat([(features[:, :projected] @ head.projection).relu(), rest], dim=1).double()
    torch.testing.assert_close(head.lift(features), hidden.float())
    wanted = torch.nn.functional.one_hot(labels, 4).double()
    expected = torch.linalg.solve(hidden.T @ hidden + 2.0 * torch.eye(hidden.shape[1]), hidden.T @ wanted)
    torch.testing.assert_close(head.weight, expected.T.float(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(head(features), (hidden @ expected).float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("images", (12, 60))
def test_the_strengths_are_compared_by_their_true_solutions(images: int) -> None:
    """Whether fewer images or fewer projections make the smaller matrix, the solutions are the same."""
    head = RidgeHead(6, 3, projections=30, ridge=None).grow(3)
    source = torch.Generator().manual_seed(4)
    features, labels = torch.randn(images, 6, generator=source), torch.arange(images) % 3
    hidden = (features.double() @ head.projection.double()).relu()  # type: ignore[union-attr]
    wanted = torch.nn.functional.one_hot(labels, 3).double()
    for strength, found in zip(closed_form.STRENGTHS, head._candidates(features, labels), strict=True):
        if strength >= 1e-3:
            expected = torch.linalg.solve(hidden.T @ hidden + strength * torch.eye(30), hidden.T @ wanted)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


EVERY = {"projections": 12, "ridge_choice": "every"}


@pytest.mark.parametrize("kind", ["ridge", "lda", "nearest-mean"])
def test_all_views_of_an_image_are_learned_as_images(kind: str) -> None:
    config = {"projections": 12, "ridge": 1.0}
    (features, labels), (others, _) = some_images((9, 7, 12), 1.0), some_images((9, 7, 12), 3.0)
    seen, apart = closed(kind, config), closed(kind, config)
    seen.learn(torch.stack([features, others], dim=1), labels, 3, task_key=0)
    apart.learn(torch.cat([features, others]), torch.cat([labels, labels]), 3, task_key=0)
    for name, value in apart.state_dict().items():
        torch.testing.assert_close(seen.state_dict()[name], value, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("choice", ["first", "every"])
def test_no_view_of_an_image_that_judges_a_strength_is_learned_before(choice: Literal["first", "every"]) -> None:
    """Classes are given out by lot, so that nothing can be known of an image but by its own views."""
    source = torch.Generator().manual_seed(5)
    features, labels = torch.randn(60, WIDTH, generator=source), torch.randint(3, (60,), generator=source)
    config = {"projections": 400, "ridge_choice": choice}
    once, twice, leaking = (closed("ridge", config) for _ in range(3))
    once.learn(features, labels, 3, task_key=0)
    twice.learn(torch.stack([features, features], dim=1), labels, 3, task_key=0)
    leaking.learn(torch.cat([features, features]), torch.cat([labels, labels]), 3, task_key=0)
    found = [float(head.get_buffer("strength")) for head in (once, twice, leaking)]
    assert found[1] in (found[0], 10 * found[0]) and found[2] * 100 <= found[1]


def parts_of(counts: Sequence[int], noise: float) -> list[tuple[Tensor, Tensor]]:
    """The images of two classes at a time."""
    features, labels = some_images(counts, noise)
    return [(features[labels // 2 == pair], labels[labels // 2 == pair]) for pair in range(len(counts) // 2)]


def test_chosen_after_every_task_the_strength_is_the_largest_that_is_as_good_as_the_best() -> None:
    """Written down a second time, image by image: what each strength got wrong of all that was held out."""
    head, resumed = closed("ridge", EVERY), closed("ridge", EVERY)
    plain = closed("ridge", {"projections": 12, "ridge": 1.0})
    assert isinstance(head, RidgeHead)
    parts, wrong, seen = parts_of((30, 26, 24, 40, 33, 31), 2.5), list[Array](), list[int]()
    for task, (features, labels) in enumerate(parts):
        for one in (head, resumed, plain):
            one.learn(features, labels, 2, task_key=task)
        resumed = closed("ridge", EVERY).restore(resumed.state_dict())
        held = held_out(labels, task)
        rest = [place for place in range(len(labels)) if place not in held]
        earlier = parts[:task]
        inner = np.concatenate([projected(head, part) for part, _ in earlier] + [projected(head, features[rest])])
        classes = torch.cat([of for _, of in earlier] + [labels[rest]]).numpy()
        targets = np.eye(2 * task + 2)[classes]
        tried = []
        for strength in closed_form.STRENGTHS:
            solution = np.linalg.solve(inner.T @ inner + strength * np.eye(inner.shape[1]), inner.T @ targets)
            tried.append((projected(head, features[held]) @ solution).argmax(axis=1) != labels[held].numpy())
        wrong.append(np.array(tried, dtype=np.float64))
        every = np.concatenate(wrong, axis=1)  # (strengths, all that were held out)
        best = int(every.mean(axis=1).argmin())
        worse = every - every[best]
        good = worse.mean(axis=1) <= worse.std(axis=1) / math.sqrt(every.shape[1])
        assert float(head.strength) == closed_form.STRENGTHS[int(good.nonzero()[0].max())]
        seen.append(every.shape[1])
    assert seen == [11, 24, 37] and int(head.trials[0, 0]) == 37
    for name, value in head.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), "what was tried is saved and gone on from"
    for name in ("gram", "correlation"):  # the sums are those of all images
        torch.testing.assert_close(head.get_buffer(name), plain.get_buffer(name), rtol=1e-12, atol=1e-9)


def test_a_strength_that_is_set_is_never_tried() -> None:
    head = closed("ridge", {"projections": 12, "ridge": 0.5, "ridge_choice": "every"})
    features, labels = some_images()
    head.learn(features, labels, 5, task_key=0)
    assert float(head.get_buffer("strength")) == 0.5 and "trials" not in head.state_dict()


def test_chosen_after_every_task_classes_of_one_image_are_learned_as_well() -> None:
    head = closed("ridge", EVERY)
    features, labels = some_images((1, 1, 1))
    head.learn(features, labels, 3, task_key=0)
    assert bool(head.get_buffer("strength").isnan()) and head(features).argmax(dim=1).tolist() == labels.tolist()


# Features that move


def moving(kind: str, count: int = 80) -> tuple[ClosedFormHead, ClosedFormHead, Tensor, Tensor]:
    """A head that has learned features, one that has learned where a linear map takes them, and other such features."""
    features, labels = some_images((20, 20, 20, 20), 1.0)
    generator = torch.Generator().manual_seed(1)
    move = torch.eye(features.shape[1]) + 0.3 * torch.randn(features.shape[1], features.shape[1], generator=generator)
    old, new = (closed(kind, {"projections": 0, "ridge": 1.0}) for _ in range(2))
    old.learn(features, labels, 4, task_key=0)
    new.learn(features @ move, labels, 4, task_key=0)
    others = torch.randn(count, features.shape[1], generator=generator)
    return old, new, others, others @ move


@pytest.mark.parametrize("kind", ["ridge", "lda", "nearest-mean"])
def test_sums_follow_features_that_a_linear_map_moves(kind: str) -> None:
    old, new, before, after = moving(kind)
    sums = {name: value.clone() for name, value in old.state_dict().items() if name in old.learning_only}
    old.compensate_drift(before, after, task_key=1)
    for name in old.learning_only & set(new.state_dict()):
        torch.testing.assert_close(old.get_buffer(name), new.get_buffer(name), rtol=1e-3, atol=1e-2)
    assert not torch.allclose(old.get_buffer(old.totals), sums[old.totals], rtol=0.1)
    features, labels = some_images((6, 6, 6, 6), 1.0)
    for head in (old, new):
        head.learn(features, labels, 0, task_key=1)
    torch.testing.assert_close(old(features), new(features), rtol=1e-2, atol=1e-2)


def test_with_few_images_only_what_they_span_follows() -> None:
    """Images of two directions say nothing about the others: a class that lies across them stays where it is."""
    old = closed("nearest-mean")
    features = torch.zeros(4, WIDTH)
    features[:2, 0], features[2:, 2] = 1.0, 1.0
    old.learn(features, torch.tensor([0, 0, 1, 1]), 2, task_key=0)
    before = torch.zeros(5, WIDTH)
    before[:, :2] = torch.randn(5, 2, generator=torch.Generator().manual_seed(2))
    old.compensate_drift(before, 2 * before, task_key=1)
    expected = torch.zeros(2, WIDTH, dtype=torch.float64)
    expected[0, 0], expected[1, 2] = 4.0, 2.0
    torch.testing.assert_close(old.get_buffer("sums"), expected, rtol=1e-3, atol=1e-3)


def test_nothing_follows_what_stays_or_cannot_be_predicted() -> None:
    old, _, before, _ = moving("ridge", 40)
    sums = {name: value.clone() for name, value in old.state_dict().items()}
    old.compensate_drift(before, before, task_key=1)
    assert all(torch.equal(value, sums[name]) for name, value in old.state_dict().items())
    noise = torch.randn(before.shape, generator=torch.Generator().manual_seed(9))
    old.compensate_drift(before, before + 0.5 * noise, task_key=1)
    totals = sums["correlation"]
    assert float((old.get_buffer("correlation") - totals).norm()) < 0.15 * float(totals.norm())


def test_projections_follow_as_well() -> None:
    """Random ReLU projections move by no linear map, but nearly so where features move a little."""
    features, labels = some_images((40, 40, 40), 1.0)
    move = torch.eye(features.shape[1]) * 1.3
    heads_of = [closed("ridge", {"projections": 16, "ridge": 1.0}) for _ in range(3)]
    stays, follows, new = heads_of
    for head, given in ((stays, features), (follows, features), (new, features @ move)):
        head.learn(given, labels, 3, task_key=0)
    others = torch.randn(200, features.shape[1], generator=torch.Generator().manual_seed(3))
    follows.compensate_drift(others, others @ move, task_key=1)

    def far(head: ClosedFormHead) -> float:
        return float((head.get_buffer("gram") - new.get_buffer("gram")).norm() / new.get_buffer("gram").norm())

    assert far(follows) < 0.01 < 0.3 < far(stays)


# Half of what is symmetric is saved


@pytest.mark.parametrize("kind", ["ridge", "lda"])
@pytest.mark.parametrize("strip", [1, 5, 1000])
def test_half_of_the_squares_is_saved_and_all_of_them_come_back(
    kind: str, strip: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closed_form, "STRIP", strip)
    head = learned(kind)
    assert head.moments is not None
    whole, saved = head.get_buffer(head.moments), head.saved()
    ends = [min(start + strip, len(whole)) for start in range(0, len(whole), strip)]
    widths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    assert saved[head.moments].numel() == sum(end * width for end, width in zip(ends, widths, strict=True))
    again = closed(kind).restore(saved)
    torch.testing.assert_close(again.get_buffer(head.moments), whole, rtol=1e-14, atol=1e-14)
    assert torch.equal(again.get_buffer(head.moments), again.get_buffer(head.moments).T)
    assert torch.equal(again.get_buffer(head.moments).tril(), whole.tril())
    features, labels = some_images((3, 4, 2), seed=5)
    for other in (head, again):
        other.learn(features, labels, 0, task_key=7)
    assert torch.equal(again.weight, head.weight) and torch.equal(head.saved()["weight"], again.saved()["weight"])
    assert torch.equal(head.saved()[head.moments], again.saved()[head.moments])
    assert closed(kind).restore(head.state_dict())(features).equal(head(features))  # as it was saved before


def test_half_a_matrix_of_another_size_is_refused() -> None:
    head = learned("ridge")
    tensors = head.saved()
    with pytest.raises(ValueError, match="are not half a matrix of"):
        closed("ridge").restore({**tensors, "gram": tensors["gram"][:-1]})
