"""APT: what is injected when, and what the merge of the tasks is."""

from statistics import NormalDist
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from probprompt import randomness
from probprompt.errors import UserError
from probprompt.methods import EVALUATION, Context, Shape, parse_config
from probprompt.methods.apt import APT, APTConfig
from probprompt.prompts import ClassTokenShift

WIDTH, DEPTH = 6, 4
TRAINING = Context(training=True, task=0, labels=torch.tensor([0, 1]))


def fresh(seed: int = 7, width: int = WIDTH, **settings: Any) -> APT:
    return APT(APTConfig(**settings), Shape(width, DEPTH), seed)


def injected(method: APT, context: Context = EVALUATION) -> dict[int, Tensor]:
    """Key and value of every block: (2, D)."""
    found = {}
    for block, shift in method.prompts(None, context).prompts.items():
        assert isinstance(shift, ClassTokenShift) and shift.batch is None
        found[block] = torch.stack([shift.key, shift.value])
    return found


def all_of(method: APT, context: Context = EVALUATION) -> Tensor:
    """All that is injected, as one tensor (blocks, 2, D)."""
    return torch.stack(list(injected(method, context).values())).detach().clone()


@torch.no_grad()
def train(method: APT, seed: int) -> Tensor:
    """Change what is trained, as an optimiser would."""
    method.running.add_(torch.randn(method.running.shape, generator=torch.Generator().manual_seed(seed)))
    return method.running.detach().clone()


def test_every_block_is_shifted_by_a_key_and_a_value_of_its_own() -> None:
    found = injected(fresh())
    assert list(found) == [0, 1, 2, 3]
    every = torch.cat([*found.values()])  # (blocks 2, D)
    assert every.shape == (2 * DEPTH, WIDTH) and len(every.unique(dim=0)) == 2 * DEPTH
    assert sum(parameter.numel() for parameter in fresh().parameters()) == 2 * DEPTH * WIDTH
    assert not APT.needs_query and APT.preferred_head == "normalised"
    assert fresh().prompts(None, TRAINING).loss is None


def test_some_blocks_may_be_left_out_and_the_others_start_alike() -> None:
    every, some = injected(fresh()), injected(fresh(blocks=(3, 1)))
    assert list(some) == [3, 1]
    assert all(torch.equal(shift, every[block]) for block, shift in some.items())


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
    assert torch.equal(fresh().running, fresh().running) and not torch.equal(fresh().running, fresh(seed=8).running)


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
    found = method.prompts(None, TRAINING).prompts
    for block, shift in found.items():
        assert isinstance(shift, ClassTokenShift)
        (10.0 * (block + 1) * shift.key.sum() + shift.value.sum()).backward()
    expected = torch.tensor([[10.0 * (block + 1), 1.0] for block in range(DEPTH)])
    assert method.running.grad is not None
    assert torch.equal(method.running.grad, expected[:, :, None].expand(-1, -1, WIDTH))
    before = all_of(method)
    train(method, 1)
    assert torch.equal(all_of(method), before) and not torch.equal(all_of(method, TRAINING), before)
    assert not method.merged.requires_grad


def test_shifts_that_are_fixed_merge_no_more() -> None:
    method = fresh()
    train(method, 1)
    method.end_task(None)
    train(method, 2)
    method.end_task(None)
    before = all_of(method)
    method.running.requires_grad_(False)
    method.end_task(None)
    assert torch.equal(all_of(method), before) and not torch.equal(before, method.running)


def test_a_saved_method_goes_on_where_it_was() -> None:
    method = fresh()
    untrained = fresh()
    untrained.load_state_dict(method.state_dict())
    assert torch.equal(all_of(untrained), method.running)
    for task in range(2):
        method.begin_task(task, 2)
        train(method, task)
        method.end_task(None)
    assert set(method.state_dict()) == {"running", "merged", "has_merged"}
    loaded = fresh(seed=1)
    for task in range(2):
        loaded.begin_task(task, 2)
    loaded.load_state_dict(method.state_dict())
    for one in (method, loaded):
        train(one, 5)
        one.end_task(None)
    assert torch.equal(all_of(loaded), all_of(method))
    assert torch.equal(all_of(loaded, TRAINING), all_of(method, TRAINING))


@pytest.mark.parametrize("blocks", [(DEPTH,), (-1, 0)])
def test_blocks_outside_the_backbone_are_refused(blocks: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=rf"blocks 0 to {DEPTH - 1}.*method\.blocks"):
        fresh(blocks=blocks)


@pytest.mark.parametrize(
    "settings",
    [{"blocks": ()}, {"blocks": (1, 1)}, {"ema": 1.1}, {"ema": -0.1}, {"initial_std": 0}, {"tokens": 8}],
    ids=str,
)
def test_settings_without_meaning_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        APTConfig(**settings)


def test_it_is_found_by_name() -> None:
    assert parse_config("apt") == APTConfig(ema=0.7, blocks=None) and APTConfig().marks() == ()
