"""Narrow weights, modules left in float32, and float8 products, against loops by hand on the same GPU."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fasttrain.core import devices
from fasttrain.optim.rounding import round_stochastically
from tests.gpu import models
from tests.gpu.models import BySgd, Rows, by_hand, fitted, initial, step_without_waiting
from tests.helpers import largest_difference, state


def test_bf16_true_is_a_model_cast_by_hand_with_a_loss_in_float32():
    model = initial().to(torch.bfloat16)
    expected = by_hand(model, lambda model, x: model(x.bfloat16()).float())
    trainer, losses = fitted(precision="bf16_true")
    assert losses == expected
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.bfloat16}
    assert largest_difference(state(trainer), model.state_dict()) == 0.0


def test_an_excluded_head_runs_in_float32_under_autocast():
    def output_of(model, x):
        with torch.autocast(models.DEVICE, torch.bfloat16):
            for block in model.blocks:
                x = block(x)
        return model.head(x.float())

    model = initial()
    expected = by_hand(model, output_of)
    trainer, losses = fitted(precision={"name": "bf16", "exclude": ["head"]})
    assert losses == expected
    assert losses != fitted(precision="bf16")[1]
    assert largest_difference(state(trainer), model.state_dict()) == 0.0


def test_auto_takes_what_the_device_has_in_hardware():
    device = torch.device(models.DEVICE)
    name = "bf16" if devices.multiplies_bf16(device) else "fp16" if devices.multiplies_fp16(device) else "fp32"
    trainer, losses = fitted(precision="auto")
    assert trainer.plan.strategies["precision"].name == name
    assert losses == fitted(precision=name)[1]


def test_stochastic_rounding_is_right_on_average_and_keeps_what_is_no_number():
    generator = torch.Generator(models.DEVICE).manual_seed(0)
    x = torch.full((2**20,), 1 + 2**-10, device=models.DEVICE)  # an eighth of the way from 1 to the next bfloat16
    rounded = round_stochastically(x, generator)
    assert set(rounded.unique().tolist()) == {1.0, 1 + 2**-7}
    # Five standard deviations of the mean of so many draws.
    assert (rounded.double().mean() - x[0].double()).abs() < 5 * 2**-7 * (1 / 8 * 7 / 8 / len(x)) ** 0.5
    exact = torch.tensor([0.0, -0.0, 1.5, -3.0, float("inf"), -float("inf")], device=models.DEVICE)
    assert torch.equal(round_stochastically(exact, generator).float(), exact)
    # The payload of a NaN that a GPU computes: all ones.
    nan = torch.full((4096,), 0x7FFFFFFF, dtype=torch.int32, device=models.DEVICE).view(torch.float32)
    assert round_stochastically(nan, generator).isnan().all()


# ---- float8

SMALL = {"min_features": models.WIDTH}
CONFIGS = {"tensorwise": {}, "rowwise": {}, "tensorwise, compiled": {"compile": "blocks"}}


class Products(TorchDispatchMode):
    """How many products were in float8, and how many were not."""

    def __init__(self):
        super().__init__()
        self.float8 = self.others = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.float8 += function is torch.ops.aten._scaled_mm.default
        self.others += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return function(*args, **(kwargs or {}))


@pytest.fixture
def has_float8():
    device = torch.device(models.DEVICE)
    if not devices.multiplies_float8(device):
        pytest.skip(f"{devices.described(device)} has no float8 products: they begin with compute capability 8.9")


@pytest.mark.usefixtures("has_float8")
@pytest.mark.parametrize("name", CONFIGS)
def test_float8_trains_as_bf16_does_within_its_digits(name):
    def output_of(model, x):
        with torch.autocast(models.DEVICE, torch.bfloat16):
            return model(x).float()

    expected = by_hand(initial(), output_of, steps=20)
    float8 = {"name": name.partition(",")[0], **SMALL}
    _, losses = fitted(float8=float8, precision="bf16", steps=20, **CONFIGS[name])
    # 3 bits of mantissa in products; the tests in emulation saw 4.5 % after 30 steps.
    assert losses == pytest.approx(expected, rel=0.05)
    assert losses != expected


@pytest.mark.usefixtures("has_float8")
@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_float8_products_are_the_devices_own_and_give_what_emulation_gives(name):
    settings = {"precision": "bf16", "steps": 4}
    _, emulated = fitted(float8={"name": name, **SMALL, "emulate": True}, **settings)
    _, losses = fitted(float8={"name": name, **SMALL}, **settings)
    assert losses == pytest.approx(emulated, rel=5e-3)
    trainer = BySgd(**{**models.SETTINGS, "device": models.DEVICE}, float8={"name": name, **SMALL}, precision="bf16")
    batch = next(trainer.feed.training(trainer.task, trainer.plan))
    with Products() as seen:
        trainer.compute_loss(batch)
    assert (seen.float8, seen.others) == (2 * models.BLOCKS, 1)


@pytest.mark.usefixtures("has_float8")
@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_float8_never_waits_for_the_device(name):
    settings = {**models.SETTINGS, "deterministic": False, "device": models.DEVICE, "precision": "bf16"}
    trainer = step_without_waiting(Rows(**settings, float8={"name": name, **SMALL}))
    assert trainer.step == 3
