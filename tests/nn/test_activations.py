"""The counter of activation bytes, by hand and beside torch's saved-tensor hooks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from fasttrain.models.resnet import build_resnet
from fasttrain.nn.activations import LiveStorages, kept_bytes

FLOAT = 4


def test_what_a_small_model_keeps_is_counted_by_hand():
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    x = torch.randn(10, 8)
    # The input of GELU and of the second layer, and the output. The input of the model was there before.
    assert kept_bytes(lambda: model(x)) == 10 * (16 + 16 + 4) * FLOAT
    with torch.no_grad():
        assert kept_bytes(lambda: model(x)) == 10 * 4 * FLOAT


def test_views_parameters_and_results_in_place_are_no_new_bytes():
    weight = nn.Parameter(torch.ones(4, 8))

    def forward():
        x = weight.t().view(8, 2, 2).transpose(0, 1)  # views of a parameter
        y = x * 2
        return y[0].relu_(), weight.detach(), x

    assert kept_bytes(forward) == 32 * FLOAT


def test_what_was_freed_does_not_count_and_the_peak_does():
    x = torch.ones(100)
    with LiveStorages() as live:
        y = x + 1
        z = y + 1
        assert live.bytes() == 200 * FLOAT
        del y
        assert live.bytes() == 100 * FLOAT
        z = z.exp_()
    assert live.peak == 200 * FLOAT
    del z
    assert live.bytes() == 0


def test_what_a_checkpoint_holds_outside_of_autograd_counts():
    first, second = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
    x = torch.randn(10, 8)

    def forward():
        return checkpoint(second, first(x), use_reentrant=False, preserve_rng_state=False)

    assert kept_bytes(forward) == 10 * (8 + 8) * FLOAT
    assert kept_bytes(lambda: second(first(x))) == 10 * (8 + 64 + 64 + 8) * FLOAT


def test_a_device_can_be_counted_alone():
    with FakeTensorMode(), LiveStorages("cuda") as live:
        on_host = torch.empty(100)
        on_device = on_host.to("cuda") + 1
        assert live.bytes() == 100 * FLOAT
        on_host = on_device.to("cpu")
        assert live.bytes() == 100 * FLOAT
        assert live.peak == 200 * FLOAT
    assert on_host.shape == (100,)


@pytest.mark.parametrize("where", ["fake", "meta"])
def test_fake_and_meta_tensors_count_as_real_ones_do(where):
    def counted(model, x):
        return kept_bytes(lambda: model(x))

    model, x = build_resnet("resnet18", num_classes=3, stem="small", width=8), torch.randn(4, 3, 8, 8)
    real = counted(model, x)
    if where == "fake":
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert (
                counted(build_resnet("resnet18", num_classes=3, stem="small", width=8), torch.empty(4, 3, 8, 8)) == real
            )
    else:
        assert counted(model.to("meta"), x.to("meta")) == real
    assert real > 4 * 3 * 8 * 8 * FLOAT
