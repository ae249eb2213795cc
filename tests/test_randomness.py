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


def test_turned_noise_is_standard_and_each_images_own() -> None:
    """Moments over keys at every place, and correlations between images, features and samples."""
    images, pools, samples, width = 4000, 4, 3, 48
    bank = randomness.normal((pools, samples, width), 0, "bank")
    turns = randomness.Turns(torch.arange(images) << 20, pools, width, 1, "turns")
    noise = torch.stack([turns.back(bank[:, k].expand(images, -1, -1)) for k in range(samples)], dim=2)
    flat = noise.flatten(1)  # (images, pools samples width)
    assert flat.mean(dim=0).abs().max() < 5 / images**0.5
    spread = torch.stack([noise[:, :, k].square().mean(dim=0) for k in range(samples)])  # (samples, pools, width)
    expected = bank.square().mean(dim=(0, 2))[:, None, None]  # at every place all numbers of the bank come by
    assert ((spread / expected - 1).abs() < 0.15).all()
    assert 2 < float((flat**4).mean() / flat.square().mean() ** 2) < 4  # not two values with a sign
    between = flat[:500] @ flat[500:1000].T / flat.shape[1]
    assert abs(float(between.square().mean().sqrt()) * flat.shape[1] ** 0.5 - 1) < 0.2  # as of independent vectors
    assert between.abs().max() < 0.6 and abs(float(between.mean())) < 0.005
    assert (torch.corrcoef(noise[:, 0, 0].T) - torch.eye(width)).abs().max() < 6 / images**0.5
    values = randomness.normal((images, pools, width), 0, "values")
    assert torch.equal(turns.back(turns.turn(values)), values)
    assert torch.equal(turns.turn(values, signs=False).abs(), turns.turn(values).abs())


def test_bits_are_pinned_fair_and_depend_on_key_and_purpose() -> None:
    keys = torch.tensor([0, 1, -1, 2**62])
    found = randomness.bits(keys, 2, 3, "bits")
    assert torch.equal(found[1:], randomness.bits(keys[1:], 2, 3, "bits"))
    assert found[0].tolist() == [156516474843693214, -4679628506272161103]
    assert not torch.isin(randomness.bits(keys, 2, 4, "bits"), found).any() and found.unique().numel() == 8
    share = (randomness.bits(torch.arange(2000), 8)[..., None] >> torch.arange(64) & 1).double().mean(dim=(0, 1))
    assert (share - 0.5).abs().max() < 0.02


def test_generators_on_a_device_are_keyed() -> None:
    device = torch.device("cpu")
    one, same, other = (
        torch.randn(5, generator=randomness.generator(device, *key)) for key in ((1, "x"), (1, "x"), (2, "x"))
    )
    assert torch.equal(one, same) and not torch.equal(one, other)
