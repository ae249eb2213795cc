"""Learning tasks: what moves, what must not, and what is refused."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from probprompt.config import parse_config
from probprompt.data.views import Boxes
from probprompt.errors import UserError
from probprompt.heads import LinearHead
from probprompt.methods import Context, Prompted
from probprompt.methods.probprompt import ProbPrompt
from probprompt.runs import execute
from probprompt.runs.execute import Workshop, prepare
from probprompt.runs.progress import Watcher
from probprompt.training.learner import EpochResult, Learner, TaskImages

Settings = Callable[..., dict[str, Any]]
Weights = dict[str, Tensor]

PROBE = {"name": "linear-probe"}


def build(settings: dict[str, Any]) -> Workshop:
    if settings["method"]["name"] == PROBE["name"]:
        settings["method"] = PROBE
    return prepare(parse_config(settings), torch.device("cpu"), Watcher())


def quiet(steps: int) -> None:
    """Nobody watches."""


def train(learner: Learner, task: TaskImages) -> list[EpochResult]:
    """Learn a task up to the alignment."""
    learner.begin(task)
    optimiser = learner.optimiser()
    return [learner.train_epoch(task, epoch, optimiser, quiet) for epoch in range(learner.epochs(task))]


def teach(workshop: Workshop, tasks: int | None = None) -> Learner:
    """Learn the first tasks, alignment included."""
    for task in workshop.tasks[:tasks]:
        train(workshop.learner, task)
        workshop.learner.finish(task, quiet)
    return workshop.learner


def weights_of(module: nn.Module) -> Weights:
    """A copy of all parameters and buffers."""
    return {name: value.clone() for name, value in module.state_dict(keep_vars=True).items()}


def changed(before: Weights, after: Weights) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


def prompts_of(learner: Learner) -> ProbPrompt:
    assert isinstance(learner.model.method, ProbPrompt)
    return learner.model.method


def head_of(learner: Learner) -> Weights:
    return weights_of(learner.model.head)


def evaluation_features(learner: Learner, rows: Tensor) -> Tensor:
    with torch.no_grad():
        return learner.model.features(learner.viewer.evaluation(learner.images.store, rows))[0]


class Watched:
    """A viewer that notes which images are looked at in training, and where."""

    def __init__(self, learner: Learner) -> None:
        self.viewer, self.batches, self.boxes = learner.viewer, list[list[int]](), list[Boxes]()
        learner.viewer = self  # type: ignore[assignment]

    def view(self, store: Any, rows: Tensor, boxes: Boxes) -> Tensor:
        self.batches.append(rows.tolist())
        self.boxes.append(boxes)
        return self.viewer.view(store, rows, boxes)


# The loss


def test_a_step_is_cross_entropy_over_the_current_tasks_classes(settings: Settings) -> None:
    """One step of a linear probe on a whole later task, against AdamW's first step by hand."""
    rate = 0.01
    workshop = build(settings(method=PROBE, training={"epochs": 1, "batch": 500, "head_rate": rate}))
    learner, task = teach(workshop, 1), workshop.tasks[1]
    assert task.first == 2 and len(task) == 16
    features = evaluation_features(learner, task.rows).double()
    learner.begin(task)
    weight, bias = (parameter.detach().double() for parameter in learner.model.head.parameters())
    result = learner.train_epoch(task, 0, learner.optimiser(), quiet)

    scores = torch.exp(features @ weight[2:].T + bias[2:])
    chance = scores / scores.sum(dim=1, keepdim=True)  # over the two classes of the task
    truth = torch.stack([(task.labels == label).double() for label in (2, 3)], dim=1)
    slope = (chance - truth) / len(task)
    for before, after, gradient in (
        (weight, learner.model.head.weight, slope.T @ features),
        (bias, learner.model.head.bias, slope.sum(dim=0)),
    ):
        assert torch.equal(after[:2].double(), before[:2])
        expected = before[2:] - rate * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(after[2:].detach().double(), expected, rtol=0, atol=1e-4 * rate)
    assert result.loss == pytest.approx(float(-(chance.log() * truth).sum() / len(task)), rel=1e-4)
    assert result.accuracy == pytest.approx(100 * float((chance.argmax(1) == truth.argmax(1)).double().mean()))
    assert result.rate == rate


def test_the_methods_own_loss_is_added_and_prompts_learn_at_five_times_the_rate(settings: Settings) -> None:
    rate = 0.01
    workshop = build(settings(training={"epochs": 1, "batch": 500, "head_rate": rate}))
    learner, task = workshop.learner, workshop.tasks[0]
    method = prompts_of(learner)

    def only_a_loss(query: Tensor | None, context: Context) -> Prompted:
        return Prompted({}, method.mean.sum() - 2 * method.log_std.sum())

    method.prompts = only_a_loss  # type: ignore[method-assign]
    before = weights_of(method)
    learner.begin(task)
    head = head_of(learner)
    learner.train_epoch(task, 0, learner.optimiser(), quiet)
    after = weights_of(method)
    torch.testing.assert_close(after["mean"], before["mean"] - 5 * rate)
    torch.testing.assert_close(after["log_std"], before["log_std"] + 5 * rate)
    step = (head_of(learner)["weight"] - head["weight"]).abs()
    assert step.max() <= 1.001 * rate and step.median() > 0.99 * rate


def test_the_reference_of_the_regularisation_is_that_of_the_last_step(settings: Settings) -> None:
    workshop = build(settings(training={"epochs": 1, "batch": 500}))
    learner = workshop.learner
    method = prompts_of(learner)
    for task in workshop.tasks:
        before = weights_of(method)
        train(learner, task)  # a single step
        assert torch.equal(method.cached_mean, before["mean"])
        assert torch.equal(method.cached_log_std, before["log_std"])
        assert method.drift().item() > 0


# What moves


@pytest.mark.parametrize("method", ["probprompt", "linear-probe"])
def test_old_rows_of_the_head_do_not_move_before_the_alignment(settings: Settings, method: str) -> None:
    workshop = build(settings(method={"name": method}))
    learner = workshop.learner
    for task in workshop.tasks:
        before = head_of(learner)
        train(learner, task)
        after = head_of(learner)
        for name in ("weight", "bias"):
            assert len(after[name]) == task.first + task.classes
            assert torch.equal(after[name][: task.first], before[name])
        learner.finish(task, quiet)


def test_every_new_row_of_the_head_is_trained(settings: Settings) -> None:
    workshop = build(settings())
    learner, task = teach(workshop, 1), workshop.tasks[1]
    learner.begin(task)
    before = head_of(learner)
    learner.train_epoch(task, 0, learner.optimiser(), quiet)
    assert (head_of(learner)["weight"][task.first :] != before["weight"][task.first :]).any(dim=1).all()


def test_a_row_of_the_head_starts_where_its_seed_and_class_say() -> None:
    at_once, by_tasks, other = LinearHead(16, 3).grow(5), LinearHead(16, 3).grow(2).grow(3), LinearHead(16, 4).grow(5)
    assert changed(weights_of(at_once), weights_of(by_tasks)) == set()
    assert changed(weights_of(at_once), weights_of(other)) == {"weight", "bias"}
    every = torch.cat([at_once.weight, at_once.bias[:, None]], dim=1).detach()
    assert len(every.unique()) == every.numel()
    assert every.abs().max() <= 0.25 and every.min() < -0.2 and every.max() > 0.2  # 1 / sqrt(16)


@pytest.mark.parametrize(
    ("method", "moving"),
    [
        ({}, {"method.mean", "method.log_std", "method.cached_mean", "method.cached_log_std"}),
        ({"variant": "deterministic"}, {"method.mean", "method.cached_mean"}),
        (PROBE, set[str]()),
    ],
    ids=["mixture", "deterministic", "linear-probe"],
)
def test_only_declared_parameters_change(settings: Settings, method: dict[str, Any], moving: set[str]) -> None:
    workshop = build(settings(method=method))
    model = workshop.learner.model
    fingerprint = model.backbone.fingerprint()
    learner = teach(workshop, 1)
    before = weights_of(model)
    for task in workshop.tasks[1:]:
        train(learner, task)
        learner.finish(task, quiet)
    after = weights_of(model)
    assert changed(before, after) == {"head.weight", "head.bias", *moving}
    assert model.backbone.fingerprint() == fingerprint
    assert all(parameter.grad is None for parameter in model.backbone.parameters())


# The optimiser


def test_the_optimiser_holds_the_head_and_the_prompts_at_their_rates(settings: Settings) -> None:
    workshop = build(settings(training={"schedule": "constant", "head_rate": 0.002, "epochs": 1}))
    learner, task = workshop.learner, workshop.tasks[0]
    learner.begin(task)
    optimiser = learner.optimiser()
    learner.train_epoch(task, 0, optimiser, quiet)
    rates = {id(parameter): group["lr"] for group in optimiser.param_groups for parameter in group["params"]}
    method, head = prompts_of(learner), learner.model.head
    assert rates == {
        id(head.weight): 0.002,
        id(head.bias): 0.002,
        id(method.mean): pytest.approx(0.01),
        id(method.log_std): pytest.approx(0.01),
    }
    for group in optimiser.param_groups:
        assert group["betas"] == (0.9, 0.999) and group["weight_decay"] == 0


def test_the_rate_falls_along_a_cosine_over_the_steps_of_the_task(settings: Settings) -> None:
    workshop = build(settings(training={"epochs": 2, "batch": 8, "head_rate": 1.0, "final_rate": 0.0}))
    learner, task = workshop.learner, workshop.tasks[0]
    learner.begin(task)
    optimiser, found = learner.optimiser(), []
    optimiser.register_step_pre_hook(lambda *_: found.append([group["lr"] for group in optimiser.param_groups]))
    optimiser.register_step_pre_hook(lambda *_: optimiser.zero_grad())  # nothing moves: only the rates are wanted
    for epoch in range(2):
        learner.train_epoch(task, epoch, optimiser, quiet)
    assert [rates[0] for rates in found] == pytest.approx([1.0, 0.853553, 0.5, 0.146447], abs=1e-5)
    assert [rates[1] for rates in found] == pytest.approx([5 * rates[0] for rates in found])


def test_a_run_builds_one_optimiser_per_task(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    built: list[torch.optim.AdamW] = []
    original = Learner.optimiser

    def counting(learner: Learner) -> torch.optim.AdamW:
        built.append(original(learner))
        assert not built[-1].state
        return built[-1]

    monkeypatch.setattr(Learner, "optimiser", counting)
    execute.train(parse_config(settings(training={"epochs": 1})), tmp_path / "run", "cpu")
    assert len(built) == 3
    for optimiser, classes in zip(built, (2, 4, 6), strict=True):
        assert [len(parameter) for parameter in optimiser.param_groups[0]["params"]] == [classes, classes]
        assert all(state["step"] == 2 for state in optimiser.state.values())


# Batches


@pytest.mark.parametrize(
    ("batch", "size", "steps"), [(1, 1, 16), (5, 5, 3), (8, 8, 2), (9, 9, 1), (16, 16, 1), (500, 16, 1)]
)
def test_batches_are_at_most_the_task_and_the_smaller_last_one_is_dropped(
    settings: Settings, batch: int, size: int, steps: int
) -> None:
    workshop = build(settings(training={"epochs": 1, "batch": batch}, method={"samples": 1, "blocks": [0]}))
    learner, task = workshop.learner, workshop.tasks[1]
    learner.begin(workshop.tasks[0])
    learner.begin(task)
    watched, advanced = Watched(learner), list[int]()
    learner.train_epoch(task, 0, learner.optimiser(), advanced.append)
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


def observe(workshop: Workshop) -> Seen:
    learner, method = workshop.learner, prompts_of(workshop.learner)
    watched, seeds, original = Watched(learner), list[int](), method.prompts

    def noting(query: Tensor | None, context: Context) -> Prompted:
        assert context.generator is not None and context.task == len(learner.model.head) // 2 - 1
        seeds.append(context.generator.initial_seed())
        return original(query, context)

    method.prompts = noting  # type: ignore[method-assign]
    for task in workshop.tasks:
        train(learner, task)
    return Seen(watched.batches, [(boxes.height * boxes.width).sort().values for boxes in watched.boxes], seeds)


def test_order_views_and_noise_are_new_in_every_epoch_and_task(settings: Settings) -> None:
    workshop = build(settings(training={"epochs": 2, "batch": 16}))
    seen = observe(workshop)
    first, second = seen.batches[:2]
    assert sorted(first) == sorted(second) == workshop.tasks[0].rows.tolist()
    assert first != second
    assert len(set(seen.seeds)) == len(seen.seeds) == 6
    areas = seen.areas
    assert not any(torch.equal(areas[one], areas[other]) for one in range(6) for other in range(one))


def test_order_views_and_noise_come_from_the_data_seed(settings: Settings) -> None:
    short = {"epochs": 1, "batch": 16}
    first, again, other = (
        observe(build(settings(training=short, seeds={"data": data, "init": init})))
        for data, init in ((0, 0), (0, 1), (1, 0))
    )
    for step in range(3):
        assert first.batches[step] == again.batches[step] != other.batches[step]
        assert torch.equal(first.areas[step], again.areas[step])
        assert not torch.equal(first.areas[step], other.areas[step])
        assert first.seeds[step] == again.seeds[step] != other.seeds[step]


# Tasks of one class


def test_a_later_task_of_one_class_is_learned_by_the_alignment_alone(settings: Settings) -> None:
    workshop = build(
        settings(
            data={"tasks": (3, 2, 1)},
            method=PROBE,
            training={"epochs": 30, "batch": 8, "head_rate": 0.02},
            alignment={"epochs": 10},
        )
    )
    learner, last = workshop.learner, workshop.tasks[2]
    assert [learner.epochs(task) for task in workshop.tasks] == [30, 30, 0]
    teach(workshop, 2)
    own, old = workshop.test_tasks[2], workshop.test_tasks[:2]
    before = sum(workshop.scorer.accuracy(task.rows, task.labels) for task in old) / 2
    assert train(learner, last) == []
    assert workshop.scorer.accuracy(own.rows, own.labels) <= 50
    learner.finish(last, quiet)
    assert len(learner.model.head) == len(learner.statistics) == 6
    assert evaluated_on_training_images(learner, last) >= 80
    after = sum(workshop.scorer.accuracy(task.rows, task.labels) for task in old) / 2
    assert after >= before - 20


def evaluated_on_training_images(learner: Learner, task: TaskImages) -> float:
    logits = learner.model.predict(learner.viewer.evaluation(learner.images.store, task.rows))
    return 100 * float((logits.argmax(dim=1) == task.labels).double().mean())


def test_a_first_task_of_one_class_is_refused(settings: Settings) -> None:
    with pytest.raises(UserError, match="first task has only one class"):
        build(settings(data={"tasks": (1, 5)}))


def test_a_task_of_one_class_is_refused_without_alignment(settings: Settings) -> None:
    with pytest.raises(UserError, match=r"task 2 has only one class.*alignment\.enabled"):
        build(settings(data={"tasks": (2, 1, 3)}, alignment={"enabled": False}))


def test_a_refused_task_leaves_the_model_as_it_was(settings: Settings) -> None:
    workshop = build(settings())
    alone = TaskImages(0, 0, 1, workshop.tasks[0].rows[:8], workshop.tasks[0].labels[:8])
    with pytest.raises(UserError, match="first task"):
        workshop.learner.begin(alone)
    assert len(workshop.learner.model.head) == 0


# Fixed prompts


def test_prompts_adapted_to_the_first_task_alone_stay_as_they_are(settings: Settings) -> None:
    workshop = build(settings(training={"adapt_tasks": 1}))
    learner, rows = workshop.learner, workshop.tasks[0].rows
    method = prompts_of(learner)
    start, unseen = weights_of(method), evaluation_features(learner, rows)
    teach(workshop, 1)
    adapted, features = weights_of(method), evaluation_features(learner, rows)
    assert changed(start, adapted) == {"mean", "log_std", "cached_mean", "cached_log_std"}
    assert not torch.equal(features, unseen)
    static = [learner.model.static]
    for task in workshop.tasks[1:]:
        train(learner, task)
        learner.finish(task, quiet)
        static.append(learner.model.static)
        assert not changed(adapted, weights_of(method)) & {"mean", "log_std"}
        assert torch.equal(evaluation_features(learner, rows), features)
    assert static == [False, True, True]
    assert [len(group["params"]) for group in learner.optimiser().param_groups] == [2]


@pytest.mark.parametrize(("adapt", "moving"), [(None, 3), (0, 0), (2, 2), (9, 3)])
def test_prompts_learn_in_as_many_tasks_as_set(settings: Settings, adapt: int | None, moving: int) -> None:
    workshop = build(settings(training={"adapt_tasks": adapt, "epochs": 1}))
    method, moved = prompts_of(workshop.learner), 0
    for task in workshop.tasks:
        before = method.mean.detach().clone()
        train(workshop.learner, task)
        moved += not torch.equal(method.mean, before)
    assert moved == moving


def test_static_features_are_computed_once_per_task(
    settings: Settings, count_queries: Callable[[Workshop], list[int]]
) -> None:
    workshop = build(settings(method=PROBE, training={"epochs": 3}))
    images = count_queries(workshop)
    teach(workshop)
    assert sum(images) == sum(len(task) for task in workshop.tasks)


# Divergence


@pytest.mark.parametrize(("bad_task", "bad_epoch"), [(0, 0), (1, 1)])
def test_a_loss_that_is_no_number_stops_with_task_and_epoch(settings: Settings, bad_task: int, bad_epoch: int) -> None:
    workshop = build(settings())
    learner, task = teach(workshop, bad_task), workshop.tasks[bad_task]
    learner.begin(task)
    optimiser = learner.optimiser()
    for epoch in range(bad_epoch):
        learner.train_epoch(task, epoch, optimiser, quiet)
    with torch.no_grad():
        prompts_of(learner).mean[0, 0, 0, 0] = float("nan")
    with pytest.raises(UserError, match=rf"diverged.*task {bad_task + 1}, epoch {bad_epoch + 1}\b"):
        learner.train_epoch(task, bad_epoch, optimiser, quiet)


def test_an_absurd_rate_stops_with_the_settings_to_lower(settings: Settings) -> None:
    workshop = build(settings(training={"head_rate": 1e36, "epochs": 5}))
    with pytest.raises(UserError, match=r"task 1, epoch \d.*training\.head_rate \(1e\+36\).*prompt_rate_factor"):
        train(workshop.learner, workshop.tasks[0])


def test_parameters_that_are_no_number_stop_although_the_loss_was_one(settings: Settings) -> None:
    workshop = build(settings(training={"epochs": 1, "batch": 500}))
    learner, task = workshop.learner, workshop.tasks[0]
    learner.begin(task)
    optimiser = learner.optimiser()

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
    optimiser = learner.optimiser()
    optimiser.register_step_pre_hook(lambda *_: optimiser.zero_grad())  # nothing moves
    learner.model.features = lambda images, *_: (torch.full((len(images), 64), math.nan), None)  # type: ignore[method-assign]
    with pytest.raises(UserError, match="the loss became nan in task 1, epoch 1"):
        learner.train_epoch(task, 0, optimiser, quiet)


# Seeds


def learned(settings: dict[str, Any]) -> Weights:
    learner = teach(build(settings), 2)
    return {
        **weights_of(learner.model.method),
        **head_of(learner),
        "statistics": torch.cat([learner.statistics.mean, learner.statistics.variance]),
    }


def test_the_same_seeds_give_the_same_bits(settings: Settings) -> None:
    first = learned(settings())
    torch.manual_seed(1234)
    assert changed(first, learned(settings())) == set()


@pytest.mark.parametrize("seed", ["init", "data"])
def test_other_seeds_give_another_model(settings: Settings, seed: str) -> None:
    first, second = learned(settings()), learned(settings(seeds={seed: 1}))
    assert changed(first, second) == set(first)


def test_the_data_seed_leaves_the_beginning_alone(settings: Settings) -> None:
    first, second = build(settings()), build(settings(seeds={"data": 1}))
    assert changed(weights_of(first.learner.model.method), weights_of(second.learner.model.method)) == set()
    for workshop in (first, second):
        workshop.learner.begin(workshop.tasks[0])
    assert changed(head_of(first.learner), head_of(second.learner)) == set()


def test_a_refit_that_diverges_is_told(settings: Settings) -> None:
    config = parse_config(settings(alignment={"rate": 1e35, "final_rate": 1e35}))
    workshop = prepare(config, torch.device("cpu"), Watcher())
    with pytest.raises(UserError, match=r"refit of the head diverged after task 2: lower alignment\.rate"):
        for task in workshop.tasks[:2]:
            workshop.learner.begin(task)
            workshop.learner.finish(task, lambda _: None)
