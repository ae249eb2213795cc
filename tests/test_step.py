"""Learning rates by schedule, captured steps that do what plain ones do, and batches looked at ahead in order."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from timm.scheduler.step_lr import StepLRScheduler
from torch import Tensor

from learner_helpers import build, train
from probprompt import presets
from probprompt.config import parse_config
from probprompt.engine.loader import Inputs
from probprompt.engine.step import Schedule, look_ahead
from probprompt.kernels.cuda_graphs import SWITCH, WARM_UP, Captured

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


# Sequences measured in VQ-Prompt's code


def test_cosine_is_per_iteration_over_the_real_ones() -> None:
    schedule = Schedule("cosine", epochs=20, steps_per_epoch=39, final=1e-6)
    rates = [schedule.rate(step, 0.0025) for step in range(20 * 39)]
    assert rates[0] == 0.0025 and rates == sorted(rates, reverse=True) and 1e-6 < rates[-1] < 2e-6


def test_vq_makes_one_full_step_then_freezes_then_decays() -> None:
    schedule = Schedule("vq", epochs=20, steps_per_epoch=40, final=1e-6, frozen_epochs=2)
    rates = [schedule.rate(step, 0.0125) for step in range(800)]
    assert rates[0] == 0.0125
    assert set(rates[1:81]) == {1e-6}
    assert rates[81] == 0.0125 and rates[81:] == sorted(rates[81:], reverse=True)


def test_vq_may_count_nominal_steps_instead_of_real_ones() -> None:
    """The settings of the 10-task split of ImageNet-R: 40 nominal steps per epoch, of which a task has 31 to 46."""
    given = presets.settings("published", "vq-prompt", "imagenet-r")
    training = parse_config(given).training
    assert (training.schedule, training.epochs) == ("vq", 20) and training.nominal_steps == 40
    schedule = Schedule("vq", 20, training.nominal_steps, training.min_lr, training.frozen_epochs)
    by_hand = [1e-6] * 40 + [1e-6 + (1 - 1e-6) * (1 + math.cos(math.pi * step / 760)) / 2 for step in range(760)]
    rates = [schedule.rate(step, 1.0) for step in range(46 * 20)]
    assert rates == pytest.approx([1.0, *by_hand, *[1e-6] * 119])
    assert rates[31 * 20 - 1] > 0.1, "a small task ends early"
    tasks = {number: presets.settings("published", "probprompt", "imagenet-r", number) for number in (5, 20)}
    assert [tasks[number]["training"]["nominal_steps"] for number in (5, 20)] == [80, 20]
    for other in ("cub200", "tiny-imagenet", "tu-berlin", "emoji-r"):  # no published file states a number
        assert presets.settings("published", "vq-prompt", other)["training"]["nominal_steps"] is None


def test_step_divides_the_rate_by_ten_every_thirty_epochs() -> None:
    """timm's StepLRScheduler, told after each epoch that epoch's number."""
    schedule = Schedule("step", epochs=70, steps_per_epoch=2)
    rates = [schedule.rate(step, 1.0) for step in range(140)]
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    theirs, expected = StepLRScheduler(optimizer, decay_t=30, decay_rate=0.1), list[float]()
    for epoch in range(70):
        expected += [optimizer.param_groups[0]["lr"]] * 2
        theirs.step(epoch)
    assert rates == pytest.approx(expected) and min(rates) == pytest.approx(0.01)


def test_vq_epoch_starts_with_two_full_epochs_and_ends_near_a_tenth() -> None:
    schedule = Schedule("vq-epoch", epochs=20, steps_per_epoch=4)
    rates = [schedule.rate(step, 1.0) for step in range(80)]
    assert set(rates[:8]) == {1.0} and rates[8] < 1.0
    assert rates[-1] == pytest.approx(0.0974, abs=1e-4)
    assert len(set(rates)) == 19


@pytest.mark.parametrize("kind", ["cosine", "vq", "vq-epoch", "step", "constant"])
def test_a_single_step_is_at_the_base_rate_and_constant_stays(kind: Any) -> None:
    assert Schedule(kind, 1, 1).rate(0, 0.1) == pytest.approx(0.1)
    assert {Schedule("constant", 3, 5).rate(step, 0.5) for step in range(15)} == {0.5}


def batches(count: int, device: str = "cpu") -> Iterator[Inputs]:
    for number in range(count):
        images = torch.full((2, 3), float(number), device=device)
        labels, seed = torch.tensor([number, number], device=device), torch.tensor([10 * number], device=device)
        yield Inputs((images,), labels, seed)


def test_what_is_not_captured_is_called_as_it_is() -> None:
    given: list[Tensor] = []

    def function(values: Tensor) -> tuple[Tensor, ...]:
        given.append(values)
        return (values + 1,)

    plain = Captured(function, wanted=False)
    for number in range(2 * WARM_UP):
        values = torch.tensor([number])
        assert plain(values)[0] == number + 1 and given[-1] is values
    assert not plain.warm


def test_batches_come_in_order_with_what_was_seen_in_them() -> None:
    look = Captured(lambda images: (images * 2, images.sum()), wanted=False)
    learn = Captured(lambda *parts: (), wanted=False)
    found = list(look_ahead(batches(5), look, learn))
    assert [int(labels[0]) for labels, *_ in found] == [0, 1, 2, 3, 4]
    assert [int(seed) for _, seed, *_ in found] == [0, 10, 20, 30, 40]
    assert all(float(seen[0, 0]) == 2 * number for number, (_, _, seen, _) in enumerate(found))
    assert list(look_ahead(batches(0), look, learn)) == []


@on_a_gpu
def test_a_replay_gives_what_a_call_gives_without_calling_again() -> None:
    calls = 0

    def function(values: Tensor, others: Tensor) -> tuple[Tensor, ...]:
        nonlocal calls
        calls += 1
        return (values * 2 + others,)

    captured = Captured(function, wanted=True)
    for number in range(3 * WARM_UP):
        values, others = torch.full((4,), float(number), device="cuda"), torch.ones(4, device="cuda") * number
        assert torch.equal(captured(values, others)[0], values * 3)
    assert calls == WARM_UP + 1


@on_a_gpu
def test_what_cannot_be_captured_is_called_plainly_and_told() -> None:
    def function(values: Tensor) -> tuple[Tensor, ...]:
        return (values * float(values.sum()),)  # needs the host

    captured, values = Captured(function, wanted=True), torch.ones(3, device="cuda")
    with pytest.warns(RuntimeWarning, match="cannot be captured"):
        found = [captured(number * values)[0] for number in range(1, 3 * WARM_UP)]
    assert [float(one[0]) for one in found] == [3.0 * number**2 for number in range(1, 3 * WARM_UP)]


@on_a_gpu
def test_looking_ahead_beside_the_learning_mixes_nothing_up() -> None:
    seen: list[Tensor] = []
    total = torch.zeros(3, device="cuda")

    thin = torch.ones(4096, 3, device="cuda") / 4096  # products with a long inner side, for which cuBLAS has scratch

    def learn(labels: Tensor, seed: Tensor, looked: Tensor) -> tuple[Tensor, ...]:
        slow = torch.eye(2048, device="cuda")
        for _ in range(20):  # long enough for the next look to run beside it
            slow = slow @ slow
            kept = torch.ones(8, 4096, device="cuda") @ thin
        total.add_(looked[0] * slow[0, 0] * kept[0, 0] + labels[0] + seed[0])
        return ()

    def see(images: Tensor) -> tuple[Tensor, ...]:
        return (2 * (images[:, :1].expand(-1, 4096) @ thin),)

    look, captured = Captured(see, True, 1), Captured(learn, True, 0)
    for _ in range(2):
        for batch in look_ahead(batches(12, "cuda"), look, captured):
            captured(*batch)
        seen.append(total.clone())
    expected = sum(2 * number + number + 10 * number for number in range(12))
    assert look.warm and captured.warm
    assert seen[0].tolist() == [expected] * 3 and seen[1].tolist() == [2 * expected] * 3


@on_a_gpu
@pytest.mark.parametrize("method", ("probprompt", "vq-prompt", "coda-prompt", "hide-prompt", "l2p", "apt", "ft++"))
def test_captured_training_is_plain_training(settings: Any, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, more = [], {"identity_epochs": 1} if method == "hide-prompt" else {}
    for switch in ("on", "off"):
        monkeypatch.setenv(SWITCH, switch)
        chosen = {**settings(training={"epochs": 3, "batch_size": 4}), "method": {"name": method, **more}}
        workshop = build(chosen, "cuda")
        learner = workshop.learner
        results = train(learner, workshop.tasks[0])
        learned = [*learner.model.adaptable(), *learner.trained.parameters()]
        found.append((results, [parameter.detach().clone() for parameter in learned]))
    (first, ours), (second, plain) = found
    assert [one.loss for one in first] == pytest.approx([one.loss for one in second], rel=2e-2)
    for one, two in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, two, rtol=5e-2, atol=5e-3)
