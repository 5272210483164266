"""Stochastic rounding to bfloat16: exact where it can be, right on average elsewhere."""

from __future__ import annotations

import pytest
import torch

from fasttrain.optim.rounding import round_stochastically


def seeded():
    return torch.Generator().manual_seed(0)


def test_what_bfloat16_holds_stays_to_the_bit():
    held = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)  # all there are
    rounded = round_stochastically(held.float(), seeded())
    numbers = ~held.isnan()
    assert torch.equal(rounded.view(torch.int16)[numbers], held.view(torch.int16)[numbers])
    assert rounded[~numbers].isnan().all()
    assert numbers.sum() == 2**16 - 2 * 127


def test_every_nan_stays_one():
    """CUDA's is 0x7fffffff, whose payload would carry into the sign."""
    bits = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, 0x7FC00000], dtype=torch.int32)
    assert round_stochastically(bits.view(torch.float32), seeded()).isnan().all()


@pytest.mark.parametrize("value", [1.0 + 1 / 512, 1.0 + 1 / 8192, -(1.0 + 3 / 1024), 3e-40, 1e30])
def test_the_mean_is_the_value(value):
    n = 2**20
    x = torch.full((n,), value, dtype=torch.float32)
    rounded = round_stochastically(x, seeded()).double()
    low, high = rounded.min().item(), rounded.max().item()
    exact = x[0].double().item()
    assert low <= exact <= high
    assert len(rounded.unique()) == 2
    # Five standard errors of a mean over n draws from two values.
    probability = (exact - low) / (high - low)
    bound = 5 * (high - low) * (probability * (1 - probability) / n) ** 0.5
    assert abs(rounded.mean().item() - exact) < bound


def test_rounding_to_the_nearest_would_lose_what_this_keeps():
    weight, update = torch.ones(4096), 1e-4
    nearest, stochastic, generator = weight.bfloat16(), weight.bfloat16(), seeded()
    for _ in range(100):
        nearest = (nearest.float() + update).bfloat16()
        stochastic = round_stochastically(stochastic.float() + update, generator)
    assert torch.equal(nearest, weight.bfloat16())
    assert stochastic.float().mean().item() == pytest.approx(1.01, abs=5e-4)


def test_the_same_generator_gives_the_same_bits_and_strides_stay():
    x = torch.randn(4, 3, 8, 8, generator=seeded()).to(memory_format=torch.channels_last)
    one, other = (round_stochastically(x, seeded()) for _ in range(2))
    assert torch.equal(one, other)
    assert one.stride() == x.stride()
