"""Sequences of various lengths on a GPU: torch's kernel for them against a mask, and no wait for the device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fasttrain.nn import attention
from fasttrain.nn.attention import attend_within, block_diagonal
from fasttrain.nn.boundaries import boundaries
from tests.gpu import models
from tests.test_text_layouts import build

LENGTHS = [100, 28, 1, 127, 60, 68]  # three rows of 128


@pytest.fixture
def has_varlen():
    if not attention.takes_varlen(torch.device(models.DEVICE, 0), torch.bfloat16, 64, 0.0):
        pytest.skip("torch's attention for variable lengths begins with compute capability 8.0")


def packed(dtype, head=64):
    generator = torch.Generator(models.DEVICE).manual_seed(0)
    shape, on = (sum(LENGTHS), 4, head), {"device": models.DEVICE, "dtype": dtype}
    parts = [torch.randn(shape, generator=generator, **on).requires_grad_() for _ in range(3)]
    within = boundaries(LENGTHS)
    return parts, within._replace(cu_seqlens=within.cu_seqlens.to(models.DEVICE))


def by_mask(parts, within):
    """In float32, under a block-diagonal mask."""
    rows = (part.float().view(3, 128, 4, -1).transpose(1, 2) for part in parts)
    output = F.scaled_dot_product_attention(*rows, attn_mask=block_diagonal(within, rows=3))
    return output.transpose(1, 2).reshape(parts[0].shape)


@pytest.mark.usefixtures("has_varlen")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_for_variable_lengths_gives_what_a_mask_gives(dtype):
    parts, within = packed(dtype)
    upstream = torch.randn(parts[0].shape, device=models.DEVICE)
    expected = by_mask(parts, within)
    exact = torch.autograd.grad(expected, parts, upstream)
    output = attend_within(*parts, within)
    assert output.dtype == dtype
    found = torch.autograd.grad(output, parts, upstream.to(dtype))
    digits = torch.finfo(dtype).eps
    assert (output.float() - expected).norm() / expected.norm() < 2 * digits
    for one, other in zip(found, exact, strict=True):
        assert (one.float() - other.float()).norm() / other.float().norm() < 4 * digits


@pytest.mark.usefixtures("has_varlen")
def test_it_is_one_call_whatever_the_number_of_sequences():
    parts, within = packed(torch.bfloat16)
    with torch.profiler.profile() as profile:
        attend_within(*parts, within)
    called = {event.key: event.count for event in profile.key_averages()}
    assert sum(count for key, count in called.items() if "varlen_attn" in key and "::" in key) >= 1
    assert not any("scaled_dot_product" in key for key in called)


def test_float32_attends_sequence_by_sequence_and_agrees_with_a_mask():
    parts, within = packed(torch.float32)
    output = attend_within(*parts, within)
    assert torch.allclose(output, by_mask(parts, within), atol=1e-5)


@pytest.mark.parametrize("layout", ["padded", "packed", "unpadded"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_layout_trains_on_the_gpu_to_the_same_loss(layout, precision):
    def losses(layout):
        trainer = build(layout=layout, device=models.DEVICE, precision=precision, steps=6, epochs=None)
        return trainer.fit()["final_loss"]

    assert losses(layout) == pytest.approx(losses("padded"), rel=1e-4 if precision == "fp32" else 2e-2)


@pytest.mark.usefixtures("has_varlen")
@pytest.mark.parametrize("layout", ["packed", "unpadded"])
def test_a_step_never_waits_for_the_device(layout):
    trainer = build(layout=layout, device=models.DEVICE, precision="bf16", steps=8, epochs=None, log={"every": 100})
    models.step_without_waiting(trainer)
