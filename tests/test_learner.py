"""Learning tasks: what moves, what must not, and what is refused."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import learner_helpers
from learner_helpers import Settings, changed, contexts_of, evaluation_features, quiet, teach, train, weights_of
from probprompt import equations
from probprompt.config import parse_config
from probprompt.data.transforms import JITTER_DRAWS, Boxes, Preprocessor, RandomViews
from probprompt.engine.learner import Learner
from probprompt.engine.loader import Drawn, Prefetcher, TaskImages
from probprompt.errors import UserError
from probprompt.heads.closed_form import RidgeHead
from probprompt.heads.linear import LinearHead
from probprompt.methods import EVALUATION, Context, Prompted, TaskSummary
from probprompt.methods.hide_prompt import HiDePrompt
from probprompt.methods.probprompt import ProbPrompt
from probprompt.runs import train as runs_train
from probprompt.runs.train import TrainingSetup

Weights = learner_helpers.Weights
PROBE = {"name": "linear-probe"}
HIDE: dict[str, Any] = {"name": "hide-prompt", "tokens": 4, "blocks": [0, 2], "identity_alignment": {"epochs": 1}}
EVO = {"name": "evo-prompt", "tokens": 2, "hidden": 4, "blocks": [0, 3]}


def build(settings: dict[str, Any]) -> TrainingSetup:
    """A linear probe has no settings of its own."""
    return build_with(PROBE if settings["method"]["name"] == PROBE["name"] else settings["method"], settings)


def build_with(method: dict[str, Any], settings: dict[str, Any]) -> TrainingSetup:
    """The same settings with another method."""
    return learner_helpers.build({**settings, "method": method})


def prompts_of(learner: Learner) -> ProbPrompt:
    assert isinstance(learner.model.method, ProbPrompt)
    return learner.model.method


def head_of(learner: Learner) -> Weights:
    return weights_of(learner.model.head)


class Watched:
    """A viewer that notes which images are looked at in training, and how."""

    def __init__(self, learner: Learner) -> None:
        self.viewer, self.batches, self.views = learner.viewer, list[list[int]](), list[RandomViews]()
        learner.loader.viewer = self  # type: ignore[assignment]

    @property
    def boxes(self) -> list[Boxes]:
        return [views.boxes for views in self.views]

    def random(self, store: Any, rows: Tensor, views: RandomViews) -> Tensor:
        self.batches.append(rows.tolist())
        self.views.append(views)
        return self.viewer.random(store, rows, views)

    def is_one_kernel(self, store: Any, augmentation: str) -> bool:
        return self.viewer.is_one_kernel(store, augmentation)  # type: ignore[arg-type]

    def evaluation(self, store: Any, rows: Tensor) -> Tensor:
        return self.viewer.evaluation(store, rows)


def test_a_step_is_cross_entropy_over_the_current_tasks_classes(settings: Settings) -> None:
    """One step of a linear probe on a whole later task, against AdamW's first step by hand."""
    rate = 0.01
    workshop = build(settings(method=PROBE, training={"epochs": 1, "batch_size": 500, "head_lr": rate}))
    learner, task = teach(workshop, 1), workshop.tasks[1]
    assert task.first == 2 and len(task) == 16
    features = evaluation_features(learner, task.rows).double()
    learner.begin(task)
    weight, bias = (parameter.detach().double() for parameter in learner.model.head.parameters())
    result = learner.train_epoch(task, 0, learner.optimizer(task), quiet)

    scores = torch.exp(features @ weight[2:].T + bias[2:])
    chance = scores / scores.sum(dim=1, keepdim=True)  # over the two classes of the task
    truth = torch.stack([(task.labels == label).double() for label in (2, 3)], dim=1)
    slope = (chance - truth) / len(task)
    for before, after, gradient in (
        (weight, learner.trained.weight, slope.T @ features),
        (bias, learner.trained.bias, slope.sum(dim=0)),
    ):
        assert torch.equal(after[:2].double(), before[:2])
        expected = before[2:] - rate * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(after[2:].detach().double(), expected, rtol=0, atol=1e-4 * rate)
    assert result.loss == pytest.approx(float(-(chance.log() * truth).sum() / len(task)), rel=1e-4)
    assert result.accuracy == pytest.approx(100 * float((chance.argmax(1) == truth.argmax(1)).double().mean()))
    assert result.rate == rate


def test_the_methods_losses_are_added_and_prompts_learn_at_five_times_the_rate(settings: Settings) -> None:
    """Its own and that on features."""
    rate = 0.01
    workshop = build(settings(training={"epochs": 1, "batch_size": 500, "head_lr": rate}))
    learner, task = workshop.learner, workshop.tasks[0]
    method, seen = prompts_of(learner), list[Context]()

    def own_loss(query: Tensor | None, context: Context) -> Prompted:
        return Prompted({}, method.mean.sum())

    def feature_loss(features: Tensor, context: Context) -> Tensor:
        assert features.shape == (16, 64)
        seen.append(context)
        return -3 * method.log_std.sum()

    method.prompts, method.feature_loss = own_loss, feature_loss  # type: ignore[method-assign]
    before = weights_of(method)
    learner.begin(task)
    head = head_of(learner)
    learner.train_epoch(task, 0, learner.optimizer(task), quiet)
    after = weights_of(method)
    torch.testing.assert_close(after["mean"], before["mean"] - 5 * rate)
    torch.testing.assert_close(after["log_std"], before["log_std"] + 5 * rate)
    step = (head_of(learner)["weight"] - head["weight"]).abs()
    assert step.max() <= 1.001 * rate and step.median() > 0.99 * rate
    assert len(seen) == 1 and seen[0].training and seen[0].labels is not None


def test_training_tells_the_method_task_labels_and_first_class(settings: Settings) -> None:
    workshop = build(settings(training={"epochs": 1, "batch_size": 5}))
    learner, task = teach(workshop, 1), workshop.tasks[1]
    label = dict(zip(task.rows.tolist(), task.labels.tolist(), strict=True))
    watched, seen = Watched(learner), contexts_of(learner.model.method)
    train(learner, task)
    assert len(seen) == len(watched.batches) == 3
    for context, rows in zip(seen, watched.batches, strict=True):
        assert (context.training, context.task, context.first) == (True, 1, 2)
        assert context.labels is not None and context.labels.tolist() == [label[row] for row in rows]


def gradients(learner: Learner, task: TaskImages) -> Weights:
    """Of an epoch's last step, as the optimiser meets them; nothing moves."""
    optimiser, found = learner.optimizer(task), Weights()
    names = {id(parameter): name for name, parameter in learner.model.named_parameters()}

    def note(*_: Any) -> None:
        for group in optimiser.param_groups:
            for parameter in group["params"]:
                found[names[id(parameter)]] = parameter.grad.clone()
        optimiser.zero_grad()

    optimiser.register_step_pre_hook(note)
    learner.train_epoch(task, 0, optimiser, quiet)
    return found


def length(gradient: Weights) -> float:
    return float(torch.cat([part.flatten() for part in gradient.values()]).norm())


def first_gradients(settings: dict[str, Any]) -> Weights:
    workshop = build(settings)
    workshop.learner.begin(workshop.tasks[0])
    return gradients(workshop.learner, workshop.tasks[0])


def test_gradients_are_clipped_by_the_norm_of_all_together(settings: Settings) -> None:
    whole = {"epochs": 1, "batch_size": 500}
    plain = first_gradients(settings(training=whole))
    assert set(plain) == {"head.weight", "head.bias", "method.mean", "method.log_std"}
    norm = length(plain)
    assert norm > 0.2
    for limit in (0.1, 0.5 * norm):
        clipped = first_gradients(settings(training={**whole, "clip": limit}))
        assert length(clipped) == pytest.approx(limit, rel=1e-4)
        for name, part in plain.items():
            torch.testing.assert_close(clipped[name], part * limit / norm, rtol=1e-4, atol=1e-7)
    assert changed(plain, first_gradients(settings(training={**whole, "clip": 2 * norm}))) == set()


@pytest.mark.parametrize(("method", "first"), [("ft", 0), ("ft++", 2)])
def test_fine_tuning_compares_all_classes_or_those_of_the_task(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, method: str, first: int
) -> None:
    """The gradient of a later task, against softmax and truth by hand: it reaches old rows of plain fine-tuning."""
    workshop = build_with({"name": method}, settings(training={"epochs": 1, "batch_size": 500}))
    learner, task = teach(workshop, 1), workshop.tasks[1]
    learner.begin(task)
    seen, original = list[Tensor](), learner.model.features

    def noting(*given: Any) -> tuple[Tensor, Tensor | None]:
        features, loss = original(*given)
        seen.append(features.detach().double())
        return features, loss

    monkeypatch.setattr(learner.model, "features", noting)
    watched = Watched(learner)
    found = gradients(learner, task)
    label = dict(zip(task.rows.tolist(), task.labels.tolist(), strict=True))
    labels = torch.tensor([label[row] for row in watched.batches[0]])
    weight, bias = (parameter.detach().double() for parameter in learner.trained.parameters())
    slope = torch.zeros(16, 4, dtype=torch.float64)
    slope[:, first:] = torch.softmax(seen[0] @ weight[first:].T + bias[first:], dim=1)
    slope[range(16), labels] -= 1
    torch.testing.assert_close(found["head.weight"].double(), slope.T @ seen[0] / 16, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found["head.bias"].double(), slope.mean(dim=0), rtol=1e-4, atol=1e-6)
    assert bool((found["head.weight"][:2] != 0).any()) == (method == "ft")
    for name in ("cls_token", "blocks.5.attn.qkv.weight"):
        assert float(found[f"backbone.model.{name}"].abs().max()) > 0


def test_the_reference_of_the_regularization_is_that_of_the_last_step(settings: Settings) -> None:
    workshop = build(settings(training={"epochs": 1, "batch_size": 500}))
    learner = workshop.learner
    method = prompts_of(learner)
    for task in workshop.tasks:
        before = weights_of(method)
        train(learner, task)  # a single step
        assert torch.equal(method.cached_mean, before["mean"])
        assert torch.equal(method.cached_log_std, before["log_std"])
        assert method.drift().item() > 0


@pytest.mark.parametrize("method", ["probprompt", "linear-probe"])
def test_training_moves_the_new_rows_of_the_head_alone(settings: Settings, method: str) -> None:
    workshop = build(settings(method={"name": method}))
    learner = workshop.learner
    for task in workshop.tasks:
        learner.begin(task)
        before = head_of(learner)
        learner.train_epoch(task, 0, learner.optimizer(task), quiet)
        after = head_of(learner)
        assert len(after["weight"]) == task.first + task.classes
        for name in ("weight", "bias"):
            assert torch.equal(after[name][: task.first], before[name][: task.first])
        assert (after["weight"][task.first :] != before["weight"][task.first :]).any(dim=1).all()
        learner.finish(task, quiet)


@pytest.mark.parametrize(
    ("method", "training", "expected"),
    [
        (None, {}, {"method.mean": 0.01, "method.log_std": 0.01}),
        (None, {"later_lr_scale": 0.25}, {"method.mean": 0.0025, "method.log_std": 0.0025}),
        ({**HIDE, "identity_lr_scale": 0.5}, {}, {"method.pool.1": 0.01, "method.identity.": 0.005}),
        ({"name": "ft"}, {"prompt_lr_scale": 0.1}, {"backbone.model.": 0.0002}),
    ],
    ids=str,
)
def test_the_optimiser_holds_what_learns_at_its_rate(
    settings: Settings, method: dict[str, Any] | None, training: dict[str, Any], expected: dict[str, float]
) -> None:
    """Of the second task."""
    given = settings(training={"head_lr": 0.002, **training})
    workshop = build(given) if method is None else build_with(method, given)
    learner, task = workshop.learner, workshop.tasks[1]
    for each in workshop.tasks[:2]:
        learner.begin(each)
    groups, found = learner.optimizer(task).param_groups, dict[str, float]()
    names = {id(parameter): name for name, parameter in learner.model.named_parameters()}
    for group in groups:
        assert group["betas"] == (0.9, 0.999) and group["weight_decay"] == 0
        found |= {names[id(parameter)]: group["base"] for parameter in group["params"]}
    assert found.pop("head.weight") == found.pop("head.bias") == 0.002
    for name, rate in found.items():
        (own,) = [value for prefix, value in expected.items() if name.startswith(prefix)]
        assert rate == pytest.approx(own), name
    assert all(any(name.startswith(prefix) for name in found) for prefix in expected)


def test_the_rate_falls_along_a_cosine_over_the_steps_of_the_task(settings: Settings) -> None:
    workshop = build(settings(training={"epochs": 2, "batch_size": 8, "head_lr": 1.0, "min_lr": 0.0}))
    learner, task = workshop.learner, workshop.tasks[0]
    learner.begin(task)
    optimiser, found = learner.optimizer(task), []
    optimiser.register_step_pre_hook(lambda *_: found.append([group["lr"] for group in optimiser.param_groups]))
    optimiser.register_step_pre_hook(lambda *_: optimiser.zero_grad())  # nothing moves: only the rates are wanted
    for epoch in range(2):
        learner.train_epoch(task, epoch, optimiser, quiet)
    assert [rates[0] for rates in found] == pytest.approx([1.0, 0.853553, 0.5, 0.146447], abs=1e-5)
    assert [rates[1] for rates in found] == pytest.approx([5 * rates[0] for rates in found])


def test_runs_build_one_optimiser_per_task(settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built: list[torch.optim.AdamW] = []
    original = Learner.optimizer

    def counting(learner: Learner, task: TaskImages) -> torch.optim.AdamW:
        built.append(original(learner, task))
        assert not built[-1].state
        return built[-1]

    monkeypatch.setattr(Learner, "optimizer", counting)
    runs_train.train(parse_config({**settings(training={"epochs": 1}), "method": PROBE}), tmp_path / "run", "cpu")
    assert len(built) == 3
    for optimiser, classes in zip(built, (2, 4, 6), strict=True):
        assert [len(parameter) for parameter in optimiser.param_groups[0]["params"]] == [classes, classes]
        assert all(state["step"] == 2 for state in optimiser.state.values())


@pytest.mark.parametrize(("batch", "size", "steps"), [(1, 1, 16), (5, 5, 3), (9, 9, 1), (500, 16, 1)])
def test_batches_are_at_most_the_task_and_the_smaller_last_one_is_dropped(
    settings: Settings, batch: int, size: int, steps: int
) -> None:
    workshop = build(settings(training={"epochs": 1, "batch_size": batch}, method={"samples": 1, "blocks": [0]}))
    learner, task = workshop.learner, workshop.tasks[1]
    learner.begin(workshop.tasks[0])
    learner.begin(task)
    watched, advanced = Watched(learner), list[int]()
    learner.train_epoch(task, 0, learner.optimizer(task), advanced.append)
    assert learner.steps(task) == steps == sum(advanced)
    assert [len(rows) for rows in watched.batches] == [size] * steps
    seen = [row for rows in watched.batches for row in rows]
    assert len(set(seen)) == len(seen)
    assert set(seen) <= set(task.rows.tolist())


@dataclass(frozen=True)
class Seen:
    """What training saw, step by step: images, sizes of their views (without their order), seeds of the noise."""

    batches: list[list[int]]
    areas: list[Tensor]
    seeds: list[int]


def observe(workshop: TrainingSetup) -> Seen:
    learner = workshop.learner
    watched, contexts, seeds = Watched(learner), contexts_of(learner.model.method), list[int]()
    for task in workshop.tasks:
        train(learner, task)
        for context in contexts:
            assert context.noise is not None and context.task == task.index
            seeds.append(int(context.noise.seed))
        contexts.clear()
    return Seen(watched.batches, [boxes.places[:, 2:4].prod(dim=1).sort().values for boxes in watched.boxes], seeds)


def test_order_views_and_noise_follow_data_seed_epoch_and_task(settings: Settings) -> None:
    seeds = [{"data": data, "init": init} for data, init in ((0, 0), (0, 1), (1, 0))]
    workshops = [build(settings(training={"epochs": 2, "batch_size": 16}, seeds=chosen)) for chosen in seeds]
    first, again, other = map(observe, workshops)
    assert sorted(first.batches[0]) == sorted(first.batches[1]) == workshops[0].tasks[0].rows.tolist()
    assert first.batches[0] != first.batches[1]
    assert len(set(first.seeds)) == len(first.seeds) == 6
    assert not any(torch.equal(first.areas[one], first.areas[two]) for one in range(6) for two in range(one))
    for step in range(6):
        assert first.batches[step] == again.batches[step] != other.batches[step]
        assert torch.equal(first.areas[step], again.areas[step])
        assert not torch.equal(first.areas[step], other.areas[step])
        assert first.seeds[step] == again.seeds[step] != other.seeds[step]


@pytest.mark.parametrize("flip", (True, False))
def test_images_cut_out_within_a_step_are_those_cut_before_it(
    settings: Settings, flip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, found = settings(training={"epochs": 1, "batch_size": 16, "flip": flip}), list[Weights]()
    for within in (False, True):
        monkeypatch.setattr(Preprocessor, "is_one_kernel", lambda *_, within=within: within)
        found.append(weights_of(teach(build(chosen), 1).model.head))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


Draws = list[dict[int, tuple[Tensor, float]]]


def draws_of(settings: dict[str, Any]) -> Draws:
    """For every epoch: the color draws of each image, and the area of its box."""
    workshop = build(settings)
    learner, found = workshop.learner, Draws()
    for task in workshop.tasks[:2]:
        learner.begin(task)
        for epoch in range(2):
            watched = Watched(learner)
            learner.train_epoch(task, epoch, learner.optimizer(task), quiet)
            learner.loader.viewer = watched.viewer
            found.append({})
            for rows, views in zip(watched.batches, watched.views, strict=True):
                assert views.augmentation == settings["training"]["augmentation"] and views.draws is not None
                areas = views.boxes.places[:, 2:4].prod(dim=1).tolist()
                found[-1] |= dict(zip(rows, zip(views.draws, areas, strict=True), strict=True))
    return found


def test_augmentation_is_drawn_by_image_and_epoch_whatever_the_batches(settings: Settings) -> None:
    def draws(batch: int, augmentation: str = "crop+color", **seeds: int) -> Draws:
        training = {"epochs": 2, "batch_size": batch, "augmentation": augmentation}
        return draws_of(settings(training=training, method={"samples": 1, "blocks": [0]}, seeds=seeds))

    first, other, reseeded, plain = draws(4), draws(16, init=3), draws(16, data=1), draws(16, "crop")
    assert [len(epoch) for epoch in first] == [16] * 4
    for epoch in range(4):
        assert first[epoch].keys() == other[epoch].keys()
        for row, (draw, area) in first[epoch].items():
            assert torch.equal(draw, other[epoch][row][0]) and area == other[epoch][row][1]
            assert not torch.equal(draw, reseeded[epoch][row][0])
            assert plain[epoch][row][0].shape == (0,), "plain crops leave the colors alone"
    every = torch.stack([draw for epoch in first for draw, _ in epoch.values()])
    assert every.shape == (4 * 16, JITTER_DRAWS)
    assert len(every.unique()) == every.numel(), "every image and epoch has draws of its own"


def test_a_later_task_of_one_class_is_learned_by_the_alignment_alone(settings: Settings) -> None:
    training = {"epochs": 30, "batch_size": 8, "head_lr": 0.02}
    workshop = build(settings(data={"tasks": (3, 2, 1)}, method=PROBE, training=training, alignment={"epochs": 10}))
    learner, last = workshop.learner, workshop.tasks[2]
    assert [learner.epochs(task) for task in workshop.tasks] == [30, 30, 0]
    teach(workshop, 2)
    own, old = workshop.test_tasks[2], workshop.test_tasks[:2]
    before = sum(workshop.scorer.accuracy(task.rows, task.labels) for task in old) / 2
    assert train(learner, last) == []
    assert workshop.scorer.accuracy(own.rows, own.labels) <= 50
    learner.finish(last, quiet)
    assert len(learner.model.head) == len(learner.statistics) == 6
    logits = learner.model.predict(learner.viewer.evaluation(learner.images.store, last.rows))
    assert float((logits.argmax(dim=1) == last.labels).double().mean()) >= 0.8
    assert sum(workshop.scorer.accuracy(task.rows, task.labels) for task in old) / 2 >= before - 20


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"data": {"tasks": (1, 5)}}, "first task has only one class"),
        ({"head": {"kind": "nearest-mean"}, "data": {"tasks": (1, 5)}}, "first task has only one class"),
        ({"data": {"tasks": (2, 1, 3)}, "alignment": {"enabled": False}}, r"Task 2 has only one.*alignment\.enabled"),
    ],
    ids=str,
)
def test_a_task_of_one_class_is_refused_where_it_cannot_be_learned(
    settings: Settings, groups: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        build(settings(**groups))


def test_a_refused_task_leaves_the_model_as_it_was(settings: Settings) -> None:
    workshop = build(settings())
    alone = TaskImages(0, 0, 1, workshop.tasks[0].rows[:8], workshop.tasks[0].labels[:8])
    with pytest.raises(UserError, match="first task"):
        workshop.learner.begin(alone)
    assert len(workshop.learner.model.head) == 0


RIDGE = {"kind": "ridge", "projections": 30, "ridge": 10.0}


@pytest.mark.parametrize("groups", [{"training": {"adapt_tasks": 1}}, {"head": RIDGE}], ids=["as set", "closed form"])
def test_prompts_adapted_to_the_first_task_alone_stay_as_they_are(
    settings: Settings, count_queries: Callable[[TrainingSetup], list[int]], groups: dict[str, Any]
) -> None:
    workshop = build({**settings(**groups), "evaluation_batch_size": 5})
    learner, rows, closed = workshop.learner, workshop.tasks[0].rows, "head" in groups
    method = prompts_of(learner)
    start, unseen = weights_of(method), evaluation_features(learner, rows)
    teach(workshop, 1)
    adapted, features = weights_of(method), evaluation_features(learner, rows)
    assert changed(start, adapted) == {"mean", "log_std", "cached_mean", "cached_log_std"}
    assert not torch.equal(features, unseen)
    images, static = count_queries(workshop), [learner.model.static]
    for task in workshop.tasks[1:]:
        seen = sum(images)
        assert len(train(learner, task)) == (0 if closed else 2)
        learner.finish(task, quiet)
        assert not closed or sum(images) == seen + len(task), "one pass, and no other"
        static.append(learner.model.static)
        moved = changed(adapted, weights_of(method))
        assert not moved & {"mean", "log_std"} and not (closed and moved)
        assert torch.equal(evaluation_features(learner, rows), features)
    assert static == [False, True, True]
    if closed:
        assert len(learner.model.head) == 6 and len(learner.trained) == 2 and len(learner.statistics) == 0
    else:
        assert [len(group["params"]) for group in learner.optimizer(task).param_groups] == [2]


@pytest.mark.parametrize(
    ("head", "adapt", "moving"),
    [({}, None, 3), ({}, 0, 0), ({}, 2, 2), ({}, 9, 3), (RIDGE, None, 1), (RIDGE, 0, 0), (RIDGE, 2, 2)],
    ids=str,
)
def test_as_many_tasks_adapt_as_set(settings: Settings, head: dict[str, Any], adapt: int | None, moving: int) -> None:
    workshop = build(settings(head=head, training={"adapt_tasks": adapt, "epochs": 1}))
    learner, moved = workshop.learner, 0
    method = prompts_of(learner)
    assert [learner.epochs(task) for task in workshop.tasks] == ([1] * moving + [0] * (3 - moving) if head else [1] * 3)
    for task in workshop.tasks:
        before = method.mean.detach().clone()
        train(learner, task)
        learner.finish(task, quiet)
        moved += not torch.equal(method.mean, before)
    assert moved == moving and len(learner.trained) == (2 * moving if head else 6) and len(learner.model.head) == 6


def test_what_the_head_knows_follows_the_prompts(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tasks in which prompts move features of known classes, from what they were to what they are; in no other."""
    told = list[tuple[Tensor, Tensor]]()
    monkeypatch.setattr(RidgeHead, "compensate_drift", lambda head, before, after, key: told.append((before, after)))
    head = {"kind": "ridge", "projections": 8, "compensate_drift": True}
    workshop = build(settings(training={"adapt_tasks": 2, "epochs": 1}, head=head))
    learner = workshop.learner
    for task in workshop.tasks:
        before = evaluation_features(learner, task.rows)
        train(learner, task)
        learner.finish(task, quiet)
        if task.index == 1:
            ((found, after),) = told
            torch.testing.assert_close(found, before)
            torch.testing.assert_close(after, evaluation_features(learner, task.rows))
            assert not torch.allclose(found, after)
    assert len(told) == 1 and learner.before is None


def test_features_at_evaluation_are_the_mean_over_all_draws(settings: Settings) -> None:
    chosen = settings(head={"kind": "ridge", "projections": 0, "layers": 1})
    workshop = build({**chosen, "method": {**chosen["method"], "evaluation_draws": 3}})
    model = workshop.learner.model
    images = workshop.learner.viewer.evaluation(workshop.learner.images.store, workshop.tasks[0].rows[:4])
    with torch.no_grad():
        each = [model.features(images, Context(draw=draw), layers=1)[0] for draw in range(3)]
        torch.testing.assert_close(model.look(images), (each[0] + each[1] + each[2]) / 3)
    assert not torch.allclose(each[0], each[1]) and not torch.allclose(each[1], each[2])


def test_noise_of_each_image_follows_its_pixels_wherever_it_is_looked_at(settings: Settings) -> None:
    """In the loader, in the scorer, in batches and alone, of a mirror image, and after saving."""
    chosen = settings(head={"kind": "ridge", "projections": 0, "flip_average": True})
    workshop = build({**chosen, "method": {**chosen["method"], "evaluation": "image", "initial_std": 3.0}})
    learner, scorer = workshop.learner, workshop.scorer
    model, store, rows = learner.model, learner.images.store, workshop.tasks[0].rows
    learner.fit(workshop.tasks[0])
    model.fix()
    images, keys = learner.viewer.evaluation(store, rows), store.keys(rows)
    assert keys.unique().numel() == len(rows) and model.known(store, rows).keys is not None
    with torch.no_grad():
        found = learner.look(workshop.tasks[0], quiet)
        alone = [model.look(image[None], keys=key[None]) for image, key in zip(images, keys, strict=True)]
        torch.testing.assert_close(torch.cat(alone), found, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(model.look(images, keys=keys.flip(0)), found, rtol=1e-2, atol=1e-2)
        views = [(image, Context(keys=keys)) for image in (images, images.flip(-1))]
        both = sum(model.features(image, context)[0] for image, context in views) / 2
    torch.testing.assert_close(found[:, : model.backbone.width], both, rtol=1e-4, atol=1e-5)
    tested = workshop.test_tasks[0].rows[:3]
    seen = scorer.viewer.evaluation(scorer.images.store, tested)
    expected = model.predict(seen, keys=scorer.images.store.keys(tested))
    torch.testing.assert_close(scorer.logits(tested), expected, rtol=1e-4, atol=1e-4)


def test_statistics_of_queries_are_of_the_first_task_and_then_stay(settings: Settings) -> None:
    chosen = settings()
    workshop = build({**chosen, "method": {**chosen["method"], "query": "whitened"}})
    learner, method = workshop.learner, prompts_of(workshop.learner)
    for task in workshop.tasks:
        before = method.whitening.clone()
        learner.fit(task)
        assert torch.equal(method.whitening, before) == (task.index > 0)
        if task.index == 0:
            queries = learner.loader.compute(task, only_queries=True)[1]
            assert queries is not None
            for name, value in zip(method.statistics, equations.whitening(queries), strict=True):
                torch.testing.assert_close(method.state_dict()[name], value)


@pytest.mark.parametrize(("head", "epochs"), [("linear", [3] * 3), ("lda", [0] * 3)])
def test_static_features_are_computed_once_per_task(
    settings: Settings, count_queries: Callable[[TrainingSetup], list[int]], head: str, epochs: list[int]
) -> None:
    workshop = build(settings(head={"kind": head}, method=PROBE, training={"epochs": 3}))
    images, learner = count_queries(workshop), workshop.learner
    assert [learner.epochs(task) for task in workshop.tasks] == epochs
    teach(workshop)
    assert sum(images) == sum(len(task) for task in workshop.tasks)
    assert learner.model.static and len(learner.trained) == (6 if head == "linear" else 0)


def test_a_method_is_told_of_the_tasks_it_adapts_to_and_of_no_other(settings: Settings) -> None:
    workshop = build_with(HIDE, settings(training={"adapt_tasks": 2, "epochs": 1}))
    learner, told = workshop.learner, list[tuple[str, int]]()
    method = learner.model.method
    assert isinstance(method, HiDePrompt)
    begin, end = method.begin_task, method.end_task

    def note_begin(task: int, classes: int) -> None:
        told.append(("begin", task))
        begin(task, classes)

    def note_end(summary: TaskSummary | None) -> None:
        assert summary is not None
        told.append(("end", summary.task))
        end(summary)

    method.begin_task, method.end_task = note_begin, note_end  # type: ignore[method-assign]
    assert [learner.adapts(task) for task in workshop.tasks] == [True, True, False]
    teach(workshop)
    assert told == [("begin", 0), ("end", 0), ("begin", 1), ("end", 1)] and len(method.pool) == 2
    assert learner.model.static and len(learner.model.head) == 6


def test_replaying_the_tasks_makes_a_method_of_the_same_shapes(settings: Settings) -> None:
    """What a saved run relies on."""
    given = settings(training={"adapt_tasks": 2, "epochs": 1})
    learned, replayed = build_with(HIDE, given), build_with(HIDE, given)
    teach(learned)
    for task in replayed.tasks:
        replayed.learner.begin_method(task)
    method = replayed.learner.model.method
    method.load_state_dict(learned.learner.model.method.state_dict())
    assert changed(weights_of(method), weights_of(learned.learner.model.method)) == set()
    assert replayed.learner.model.static and len(replayed.learner.model.head) == 0


def test_a_closed_form_head_learns_the_features_of_evaluation(settings: Settings) -> None:
    workshop = build(settings(head=RIDGE, training={"epochs": 1}))
    learner = teach(workshop)
    by_hand = RidgeHead(64, seed=0, projections=30, ridge=10.0)
    for task in workshop.tasks:
        by_hand.learn(evaluation_features(learner, task.rows), task.labels, task.classes, task.index)
    found = learner.model.head
    assert isinstance(found, RidgeHead)
    torch.testing.assert_close(found.gram, by_hand.gram, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(found.correlation, by_hand.correlation, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(found.weight, by_hand.weight, rtol=1e-2, atol=1e-4)


def test_a_closed_form_head_takes_a_first_task_of_one_class_where_no_prompts_learn(settings: Settings) -> None:
    given = settings(head={"kind": "nearest-mean"}, method=PROBE, data={"tasks": (1, 1, 4)})
    assert len(teach(build(given)).model.head) == 6


@pytest.mark.parametrize("method", [HIDE, EVO], ids=lambda method: str(method["name"]))
def test_the_summary_is_what_the_model_makes_of_the_tasks_images(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, method: dict[str, Any]
) -> None:
    workshop = build_with(method, {**settings(training={"epochs": 1}), "evaluation_batch_size": 5})
    learner, task = teach(workshop, 1), workshop.tasks[1]
    given = list[TaskSummary | None]()
    monkeypatch.setattr(learner.model.method, "end_task", given.append)
    train(learner, task)
    before = learner.trained.weight.detach().clone(), learner.trained.bias.detach().clone()
    learner.finish(task, quiet)
    (summary,) = given
    assert summary is not None and summary.queries is not None
    assert (summary.task, summary.first, summary.classes) == (1, 2, 2)
    assert torch.equal(summary.labels, task.labels)
    model, images = learner.model, learner.viewer.evaluation(learner.images.store, task.rows)
    context = Context(task=1) if method is HIDE else EVALUATION
    with torch.no_grad():
        queries = model.backbone.query(images, "class" if method is HIDE else "class before norm")
        features = model.features(images, context)[0]
    torch.testing.assert_close(summary.queries, queries, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(summary.features, features, rtol=1e-4, atol=1e-4)
    logits = features @ before[0][2:].T + before[1][2:]  # before the head was realigned
    torch.testing.assert_close(summary.logits, logits, rtol=1e-3, atol=1e-3)
    assert not any(part.requires_grad for part in (summary.queries, summary.features, summary.logits))


def test_a_method_that_needs_no_summary_is_given_none(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    workshop = build(settings(training={"epochs": 1}))
    given = list[TaskSummary | None]()
    monkeypatch.setattr(workshop.learner.model.method, "end_task", given.append)
    teach(workshop, 2)
    assert given == [None, None]


def test_new_rows_are_placed_by_mean_queries_of_classes(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    workshop = build_with(EVO, {**settings(training={"epochs": 1}), "evaluation_batch_size": 5})
    learner, asked = workshop.learner, list[tuple[Tensor, Tensor, Tensor]]()
    rows = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))

    def placed(prototypes: Tensor, known: Tensor, old: Tensor) -> Tensor | None:
        asked.append((prototypes, known, old.clone()))
        return rows if len(known) else None

    monkeypatch.setattr(learner.model.method, "initial_rows", placed)

    def mean_queries(task: TaskImages) -> Tensor:
        images = learner.viewer.evaluation(learner.images.store, task.rows)
        queries = learner.model.backbone.query(images, "class before norm")
        return torch.stack([queries[task.labels == label].mean(dim=0) for label in (task.first, task.first + 1)])

    first, second = workshop.tasks[:2]
    learner.begin(first)
    assert torch.equal(learner.trained.weight, LinearHead(64, 0).grow(2).weight), "none leaves the head's own start"
    before = head_of(learner)
    learner.begin(second)
    own = LinearHead(64, 0).grow(4)
    assert torch.equal(learner.trained.weight[:2], before["weight"]) and torch.equal(learner.trained.weight[2:], rows)
    assert torch.equal(learner.trained.bias, own.bias), "biases stay"
    for (prototypes, known, old), task in zip(asked, (first, second), strict=True):
        torch.testing.assert_close(prototypes, mean_queries(task), rtol=1e-4, atol=1e-4)
        assert len(known) == len(old) == task.first
    assert torch.equal(asked[1][1], asked[0][0]) and torch.equal(asked[1][2], before["weight"])
    assert torch.equal(learner.prototypes, torch.cat([asked[0][0], asked[1][0]]))


def test_rows_are_placed_where_the_method_adapts_alone(settings: Settings) -> None:
    workshop = build_with(EVO, settings(training={"epochs": 1, "adapt_tasks": 1}))
    teach(workshop, 1)
    workshop.learner.begin(workshop.tasks[1])
    assert torch.equal(workshop.learner.trained.weight[2:], LinearHead(64, 0).grow(4).weight[2:])
    assert len(workshop.learner.prototypes) == 2


@pytest.mark.parametrize(
    ("method", "enabled", "aligned"),
    [
        ("probprompt", None, True),
        ("probprompt", False, False),
        ("linear-probe", None, True),
        ("ft", None, False),
        ("ft", True, True),
    ],
)
def test_a_head_is_realigned_as_set_or_else_as_the_method_has_it(
    settings: Settings, method: str, enabled: bool | None, aligned: bool
) -> None:
    given = settings(alignment={"enabled": enabled, "lr": 0.01}, training={"epochs": 1})
    workshop = build(given if method == "probprompt" else {**given, "method": {"name": method}})
    learner = teach(workshop, 1)
    train(learner, workshop.tasks[1])
    before = head_of(learner)
    learner.finish(workshop.tasks[1], quiet)
    assert learner.aligns == aligned
    assert changed(before, head_of(learner)) == ({"weight", "bias"} if aligned else set())
    assert len(learner.statistics) == (4 if aligned else 0)


@pytest.mark.parametrize("augmented", [False, True])
def test_statistics_see_images_as_the_method_says(settings: Settings, augmented: bool) -> None:
    """HiDe-Prompt knows the task of training images: its statistics are of features with their own task's prompt."""
    workshop = build_with(HIDE, settings(alignment={"augmented_statistics": augmented}, training={"epochs": 1}))
    learner, task = teach(workshop, 1), workshop.tasks[1]
    method = learner.model.method
    assert isinstance(method, HiDePrompt)
    method.tell_task = lambda query: torch.zeros(len(query), dtype=torch.long)  # type: ignore[method-assign]
    watched = Watched(learner)
    train(learner, task)
    trained = len(watched.views)
    learner.finish(task, quiet)
    assert len(watched.views) - trained == int(augmented)
    store = learner.images.store
    if augmented:
        assert watched.batches[-1] == task.rows.tolist()
        images = watched.viewer.random(store, task.rows, watched.views[-1])
    else:
        images = watched.viewer.evaluation(store, task.rows)
    with torch.no_grad():
        own, told = (learner.model.features(images, context)[0] for context in (Context(task=1), EVALUATION))
    assert not torch.allclose(own, told, atol=1e-3)
    for label in (2, 3):
        members = own[task.labels == label]
        torch.testing.assert_close(learner.statistics.mean[label, 0], members.mean(dim=0), rtol=1e-4, atol=1e-4)
        spread = members.var(dim=0, correction=0)
        torch.testing.assert_close(learner.statistics.variance[label, 0], spread, rtol=1e-3, atol=1e-5)


def test_statistics_of_tasks_without_adaptation_see_images_as_at_evaluation(settings: Settings) -> None:
    workshop = build_with(HIDE, settings(training={"epochs": 1, "adapt_tasks": 1}))
    teach(workshop, 2)
    learner, task = workshop.learner, workshop.tasks[1]
    features = evaluation_features(learner, task.rows)
    expected = torch.stack([features[task.labels == label].mean(dim=0) for label in (2, 3)])
    torch.testing.assert_close(learner.statistics.mean[2:, 0], expected, rtol=1e-4, atol=1e-4)


def test_joint_training_learns_all_tasks_as_one(settings: Settings) -> None:
    workshop = build_with({"name": "joint"}, settings(training={"epochs": 1}))
    apart = build(settings())
    (whole,) = workshop.tasks
    assert (whole.index, whole.first, whole.classes) == (0, 0, 6)
    label = {row: own for one in apart.tasks for row, own in zip(one.rows.tolist(), one.labels.tolist(), strict=True)}
    assert dict(zip(whole.rows.tolist(), whole.labels.tolist(), strict=True)) == label
    assert len(workshop.test_tasks) == 3
    for mine, theirs in zip(workshop.test_tasks, apart.test_tasks, strict=True):
        assert (mine.first, mine.classes) == (theirs.first, theirs.classes)
        assert torch.equal(mine.rows, theirs.rows) and torch.equal(mine.labels, theirs.labels)
    learner = teach(workshop)
    assert len(learner.model.head) == 6 and not learner.aligns


def test_parameters_are_counted_by_what_learns(settings: Settings) -> None:
    rows, prompts = 2 * (64 + 1), 2 * (2 * 4 * 4 * 64)
    backbone = sum(parameter.numel() for parameter in build(settings()).learner.model.backbone.parameters())
    for given, method, expected in (
        (settings(training={"epochs": 1}), None, prompts + rows),
        (settings(training={"epochs": 1}), PROBE, rows),
        (settings(training={"epochs": 1}), {"name": "ft"}, backbone + rows),
        (settings(training={"epochs": 1}, head=RIDGE), None, prompts + 2 * 30),
        (settings(head={"kind": "lda"}), PROBE, rows),
        (settings(head={"kind": "nearest-mean"}), PROBE, 2 * 64),
    ):
        assert teach(build(given) if method is None else build_with(method, given), 1).parameters() == expected


@pytest.mark.parametrize(("bad_task", "bad_epoch"), [(0, 0), (1, 1)])
def test_a_loss_that_is_no_number_stops_with_task_and_epoch(settings: Settings, bad_task: int, bad_epoch: int) -> None:
    workshop = build(settings())
    learner, task = teach(workshop, bad_task), workshop.tasks[bad_task]
    learner.begin(task)
    optimiser = learner.optimizer(task)
    for epoch in range(bad_epoch):
        learner.train_epoch(task, epoch, optimiser, quiet)
    with torch.no_grad():
        prompts_of(learner).mean[0, 0, 0, 0] = float("nan")
    with pytest.raises(UserError, match=rf"diverged.*task {bad_task + 1}, epoch {bad_epoch + 1}\b"):
        learner.train_epoch(task, bad_epoch, optimiser, quiet)


def test_an_absurd_rate_stops_with_the_settings_to_lower(settings: Settings) -> None:
    workshop = build(settings(training={"head_lr": 1e36, "epochs": 5}))
    with pytest.raises(UserError, match=r"task 1, epoch \d.*training\.head_lr \(1e\+36\).*prompt_lr_scale"):
        train(workshop.learner, workshop.tasks[0])


def test_parameters_that_are_no_number_stop_although_the_loss_was_one(settings: Settings) -> None:
    workshop = build(settings(training={"epochs": 1, "batch_size": 500}))
    learner, task = workshop.learner, workshop.tasks[0]
    learner.begin(task)
    optimiser = learner.optimizer(task)

    def spoil(*_: Any) -> None:
        with torch.no_grad():
            prompts_of(learner).log_std[-1, -1, -1, -1] = float("inf")

    optimiser.register_step_post_hook(spoil)
    with pytest.raises(UserError, match="diverged"):
        learner.train_epoch(task, 0, optimiser, quiet)


def test_a_loss_that_is_no_number_stops_although_all_parameters_are(settings: Settings) -> None:
    workshop = build(settings(method=PROBE))
    learner, task = workshop.learner, workshop.tasks[0]
    learner.begin(task)
    optimiser = learner.optimizer(task)
    optimiser.register_step_pre_hook(lambda *_: optimiser.zero_grad())  # nothing moves
    learner.model.features = lambda images, *_: (torch.full((len(images), 64), math.nan), None)  # type: ignore[method-assign]
    with pytest.raises(UserError, match="the loss is nan in task 1, epoch 1"):
        learner.train_epoch(task, 0, optimiser, quiet)


def learned(settings: dict[str, Any]) -> Weights:
    learner = teach(build(settings), 2)
    statistics = torch.cat([learner.statistics.mean, learner.statistics.variance])
    return {**weights_of(learner.model.method), **head_of(learner), "statistics": statistics}


def test_the_same_seeds_give_the_same_bits_and_others_another_model(settings: Settings) -> None:
    first = learned(settings())
    torch.manual_seed(1234)
    assert changed(first, learned(settings())) == set()
    for seed in ("init", "data"):
        assert changed(first, learned(settings(seeds={seed: 1}))) == set(first), seed


def test_the_data_seed_leaves_the_beginning_alone(settings: Settings) -> None:
    first, second = (build(settings(seeds={"data": seed})).learner.model for seed in (0, 1))
    assert changed(weights_of(first.method), weights_of(second.method)) == set()


def test_a_refit_that_diverges_is_told(settings: Settings) -> None:
    workshop = build(settings(alignment={"lr": 1e35, "min_lr": 1e35}))
    with pytest.raises(UserError, match=r"after task 2\. Lower alignment\.lr"):
        for task in workshop.tasks[:2]:
            workshop.learner.begin(task)
            workshop.learner.finish(task, quiet)


def test_what_is_drawn_ahead_is_what_would_be_drawn() -> None:
    asked: list[tuple[int, int]] = []

    def draw(task: TaskImages, epoch: int) -> Drawn:
        asked.append((len(task), epoch))
        return Drawn(torch.tensor([len(task), epoch]), torch.zeros(1, 2), None)

    def task(images: int) -> TaskImages:
        return TaskImages(0, 0, 2, torch.arange(images), torch.zeros(images, dtype=torch.long))

    ahead, two, three = Prefetcher(draw, epochs=3), task(2), task(3)
    found = [ahead.take(*given).order.tolist() for given in ((two, 0), (two, 1), (two, 2), (three, 0), (two, 1))]
    assert found == [[2, 0], [2, 1], [2, 2], [3, 0], [2, 1]]
    # The third epoch is the last; a task of another size does not get what was drawn for this one.
    assert asked[:4] == [(2, 0), (2, 1), (2, 2), (3, 0)] and (2, 1) in asked[4:]
