"""Learning rates against the sequences measured in VQ-Prompt's code (shared facts of the field)."""

import doctest
import math

import pytest

import probprompt.engine.step
from probprompt.engine.step import Schedule


def test_doctests() -> None:
    assert doctest.testmod(probprompt.engine.step).failed == 0


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


def test_vq_epoch_starts_with_two_full_epochs_and_ends_near_a_tenth() -> None:
    schedule = Schedule("vq-epoch", epochs=20, steps_per_epoch=4)
    rates = [schedule.rate(step, 1.0) for step in range(80)]
    assert set(rates[:8]) == {1.0} and rates[8] < 1.0
    assert rates[-1] == pytest.approx(0.0974, abs=1e-4)
    assert len(set(rates)) == 19


def test_constant_stays() -> None:
    assert {Schedule("constant", 3, 5).rate(step, 0.5) for step in range(15)} == {0.5}


def test_a_single_step_is_at_the_base_rate() -> None:
    for kind in ("cosine", "vq", "vq-epoch", "constant"):
        assert math.isclose(Schedule(kind, 1, 1).rate(0, 0.1), 0.1)
