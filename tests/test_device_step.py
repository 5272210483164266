"""The step on a device that is not the host, with no such device there: on `meta`, whose tensors hold no values.

A read of a value is an error there. Operations that lead from one side to the other, or mix the two, are told apart by
their arguments.
"""

from __future__ import annotations

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fasttrain.distributed.world import World
from tests.helpers import QUIET
from tests.stack import Restless, setting

META = torch.device("meta")


class Sides(TorchDispatchMode):
    """Operations of which one tensor is on the host and another on the device, and all reads of values."""

    def __init__(self):
        super().__init__()
        self.mixed, self.reads, self.total = [], [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.total += 1
        out = function(*args, **(kwargs or {}))
        sides = {leaf.device.type for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)}
        if len(sides) > 1:
            self.mixed.append(function.__name__)
        if function.__name__ == "_local_scalar_dense.default":
            self.reads.append(function.__name__)
        return out


class OnMeta(Restless):
    """Dropout and batch norm on a device."""

    def join(self, settings):
        return World(device=META)


class Counting(OnMeta):
    """Counts by itself, on whatever it is given."""

    def count(self, batch):
        return (batch[1] > 0).sum()


@pytest.fixture
def fused_on_meta(monkeypatch):
    """Stand for the fused kernels of CUDA, and demand what these demand of their arguments."""

    def kernel(*lists, lr, found_inf=None, grad_scale=None, **settings):
        assert {tensor.device for tensors in lists for tensor in tensors} == {META}
        assert grad_scale is None
        for scalar in (lr, found_inf):
            if isinstance(scalar, torch.Tensor):
                assert (scalar.dtype, scalar.device, scalar.numel()) == (torch.float32, META, 1)

    for name in ("_fused_sgd_", "_fused_adamw_"):
        monkeypatch.setattr(torch, name, kernel)
    monkeypatch.setattr("fasttrain.optim.fused.FUSED_ON", ("meta",))
    monkeypatch.setattr("fasttrain.optim.guarded.OBEYING", ("meta",))
    module = sys.modules[torch.optim.Optimizer.__module__]
    monkeypatch.setattr(module, "_get_fused_kernels_supported_devices", lambda: ["meta"])


STEPS = {
    "plain": {},
    "sgd": setting("optimizer", "sgd"),
    "clipping": setting("gradient_clipping", "norm"),
    "nonfinite=raise": setting("nonfinite", "raise"),
    "nonfinite=skip": setting("nonfinite", "skip"),
    "refusable and scheduled": setting("nonfinite", "skip")
    | setting("schedule", "cosine")
    | setting("gradient_clipping", "norm"),
    "average": setting("weight_averaging", "ema"),
    "refusable and averaged": setting("nonfinite", "skip")
    | setting("gradient_clipping", "value")
    | {"weight_averaging": {"name": "ema", "warmup": True, "every": 2, "start": 1}},
    "refusable and averaged alike": setting("nonfinite", "skip") | setting("weight_averaging", "swa"),
    "adaptive clipping": setting("gradient_clipping", "adaptive"),
    "microbatches": setting("accumulation", "microbatches"),
    "checkpointing": setting("activation_checkpointing", "full"),
}


@pytest.mark.usefixtures("fused_on_meta")
@pytest.mark.parametrize("kind", [OnMeta, Counting])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_stays_on_its_device(name, kind):
    trainer = kind(batch_size=8, steps=9, **QUIET, **STEPS[name])
    batches = trainer.feed.training(trainer.task, trainer.plan)
    trainer.model.train()
    for step in range(4):
        batch = next(batches)
        assert {leaf.device for leaf in tree_leaves(batch)} == {META}
        with Sides() as seen:
            info = trainer.train_step(batch)
        # The first step makes what a run keeps: the table of rates is copied once.
        assert seen.mixed == ([] if step else ["_to_copy.default"] * ("scheduled" in name)), step
        assert seen.reads == []
        assert seen.total > 100
    assert info.loss.device == META
    kept = [value for state in trainer.optimizer.state.values() for value in state.values()]
    kept += [group["lr"] for group in trainer.optimizer.param_groups] + list(trainer.plan._refused.values())
    assert {value.device for value in kept if isinstance(value, torch.Tensor)} == {META}


@pytest.mark.usefixtures("fused_on_meta")
def test_a_rate_that_a_device_reads_is_float32():
    trainer = OnMeta(batch_size=8, steps=9, **QUIET, **STEPS["refusable and scheduled"])
    trainer.train_step(next(trainer.feed.training(trainer.task, trainer.plan)))
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    assert [(rate.dtype, rate.device, rate.shape) for rate in rates] == [(torch.float32, META, ())] * 2


def test_sides_are_told_apart():
    with Sides() as seen:
        torch.ones((), device="meta") * torch.ones(())
        torch.ones(3).to("meta")
        torch.ones(()).item()
    assert seen.mixed == ["mul.Tensor", "_to_copy.default"]
    assert seen.reads == ["_local_scalar_dense.default"]
