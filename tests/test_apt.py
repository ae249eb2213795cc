"""APT: what is injected when, and what the merge of the tasks is."""

from statistics import NormalDist
from typing import Any

import pytest
import torch
from torch import Tensor

from method_helpers import injected, move, training
from probprompt import randomness
from probprompt.methods import EVALUATION, Context, Shape
from probprompt.methods.apt import APT, APTConfig

WIDTH, DEPTH = 6, 4
TRAINING = training(0, torch.tensor([0, 1]))


def fresh(seed: int = 7, width: int = WIDTH, **settings: Any) -> APT:
    return APT(APTConfig(**settings), Shape(width, DEPTH), seed)


def all_of(method: APT, context: Context = EVALUATION) -> Tensor:
    """All that is injected, as one tensor (blocks, 2, D)."""
    return torch.stack(list(injected(method, None, context).values())).detach().clone()


def train(method: APT, seed: int) -> Tensor:
    """Change what is trained, as an optimizer would."""
    move(method, seed, distance=1.0)
    return method.running.detach().clone()


def test_every_block_or_some_are_shifted_by_a_key_and_a_value() -> None:
    every, some = injected(fresh(), None), injected(fresh(blocks=(3, 1)), None)
    assert list(every) == [0, 1, 2, 3] and list(some) == [3, 1]
    assert all(torch.equal(shift, every[block]) for block, shift in some.items())
    assert not APT.needs_query and APT.preferred_head == "normalized"
    answer = fresh().prompts(None, TRAINING)
    assert answer.loss is None and all(prompt.batch is None for prompt in answer.prompts.values())


def test_shifts_start_as_small_normal_numbers_drawn_by_key() -> None:
    shifts = fresh(seed=3, width=2000).running.detach()
    drawn = randomness.uniform((2, 2000), 3, "initial shift", 2).double()
    for level, value in zip(drawn[1, :50].tolist(), shifts[2, 1, :50].tolist(), strict=True):
        assert value == pytest.approx(NormalDist(0, 0.02).inv_cdf(level), rel=1e-5, abs=1e-8)
    assert float(shifts.std()) == pytest.approx(0.02, rel=0.03) and abs(float(shifts.mean())) < 5e-4
    wide = fresh(width=2000, initial_std=1.0).running.detach()
    assert float(wide.abs().max()) <= 2 and float((wide.abs() > 1.9).float().mean()) > 0.005  # cut, not clamped
    assert int((wide.abs() == 2).sum()) == 0
    assert float(wide.std()) == pytest.approx(0.8796, abs=0.02)  # of a standard normal within two of its deviations


def test_training_uses_the_running_shifts_and_evaluation_the_merged_ones() -> None:
    method = fresh(ema=0.75)
    tasks = []
    merged = torch.zeros(DEPTH, 2, WIDTH)
    for task in range(4):
        method.begin_task(task, 2)
        now = train(method, task)
        tasks.append(now)
        assert torch.equal(all_of(method, TRAINING), now)
        # until its end, a task is not part of what evaluation sees; before the first end there is nothing else
        torch.testing.assert_close(all_of(method), merged if task else now)
        method.end_task(None)
        merged = now if task == 0 else 0.75 * merged + 0.25 * now
        torch.testing.assert_close(all_of(method), merged)
        assert torch.equal(method.running, now)  # merging leaves the running shifts where they are
    by_hand = 0.75**3 * tasks[0] + 0.25 * (0.75**2 * tasks[1] + 0.75 * tasks[2] + tasks[3])
    torch.testing.assert_close(all_of(method), by_hand)


@pytest.mark.parametrize(("ema", "kept"), [(0.0, 1), (1.0, 0)])
def test_the_ends_of_the_average_are_the_last_and_the_first_task(ema: float, kept: int) -> None:
    method = fresh(ema=ema)
    tasks = []
    for task in range(2):
        tasks.append(train(method, task))
        method.end_task(None)
    assert torch.equal(all_of(method), tasks[kept])


def test_only_the_running_shifts_learn() -> None:
    method = fresh()
    method.end_task(None)
    ((parameters, factor),) = method.groups()
    assert len(parameters) == 1 and parameters[0] is method.running and factor == 1
    assert not method.merged.requires_grad
    weight = torch.arange(2.0 * DEPTH * WIDTH).view(DEPTH, 2, WIDTH)
    (torch.stack(list(injected(method, None, TRAINING).values())) * weight).sum().backward()
    assert method.running.grad is not None and torch.equal(method.running.grad, weight)
    before = all_of(method)
    train(method, 1)
    assert torch.equal(all_of(method), before) and not torch.equal(all_of(method, TRAINING), before)
    method.end_task(None)
    merged = all_of(method)
    method.running.requires_grad_(False)
    method.end_task(None)
    assert torch.equal(all_of(method), merged) and not torch.equal(merged, method.running), "fixed, they merge no more"
