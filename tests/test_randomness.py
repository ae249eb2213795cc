"""Draws depend on their key only, today and in later versions."""

import torch

from probprompt import randomness


def test_streams_are_pinned() -> None:
    """A saved model's evaluation noise is drawn again when it is loaded: these numbers must never change."""
    drawn = randomness.normal((3,), 7, "evaluation noise", 2)
    assert torch.allclose(drawn, torch.tensor([-0.249559, 0.740041, -1.459173]), atol=1e-6)
    assert randomness.permutation(6, 1, "order").tolist() == [0, 3, 5, 1, 2, 4]


def test_keys_are_independent() -> None:
    draws = [randomness.normal((4000,), seed, word) for seed in (0, 1) for word in ("a", "b")]
    assert torch.corrcoef(torch.stack(draws)).triu(diagonal=1).abs().max() < 0.06
    assert not torch.equal(randomness.uniform((2,), 1, 23), randomness.uniform((2,), 12, 3))


def test_uniform_is_below_one_and_normal_is_standard() -> None:
    drawn = randomness.uniform((100_000,), 0, "u")
    assert drawn.min() >= 0 and drawn.max() < 1 and abs(drawn.mean() - 0.5) < 0.01
    normal = randomness.normal((100_000,), 0, "n")
    assert abs(normal.mean()) < 0.02 and abs(normal.std() - 1) < 0.02


def test_generators_on_a_device_are_keyed() -> None:
    device = torch.device("cpu")
    one, same, other = (
        torch.randn(5, generator=randomness.generator(device, *key)) for key in ((1, "x"), (1, "x"), (2, "x"))
    )
    assert torch.equal(one, same) and not torch.equal(one, other)
