"""Reported faults of frozen parameters, each kind by the name of its case."""

# The names of the cases are written in capitals.

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fasttrain import Data, Trainer
from tests.helpers import Recorder, largest_difference, points, state

BACKBONE = ("conv", "norm", "block.0", "block.1")


class Pictures(Trainer):
    """A backbone with batch norms, one of them without weights of its own, and a head."""

    def build_data(self):
        x, y = points()
        return Data(train=(x.view(-1, 2, 2, 2), y), evaluation=(x[:8].view(-1, 2, 2, 2), y[:8]))

    def build_model(self):
        model = nn.Sequential()
        model.add_module("conv", nn.Conv2d(2, 8, 2, padding=1))
        model.add_module("norm", nn.BatchNorm2d(8))
        model.add_module("block", nn.Sequential(nn.Conv2d(8, 8, 2), nn.BatchNorm2d(8, affine=False), nn.ReLU()))
        model.add_module("flat", nn.Flatten())
        model.add_module("head", nn.Sequential(nn.Linear(32, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)))
        return model

    def loss(self, output, batch):
        return F.cross_entropy(output, batch[1])


def settings(**given):
    return {"batch_size": 8, "steps": 3, "log": {"every": 1}, "run": {"dir": None}, **given}


def moved(trainer, before):
    """The entries of the state that are not what they were, to the bit."""
    after = state(trainer)
    return {name for name in before if not torch.equal(before[name], after[name])}


def of_the_backbone(names):
    return {name for name in names if not name.startswith("head")}


FREEZES = {
    "what is frozen": {"freeze": ["conv", "norm.*", "block"]},
    "what trains": {"train": ["head"]},
}


@pytest.mark.parametrize("how", FREEZES)
def test_FROZEN_3_a_frozen_backbone_keeps_the_bits_of_its_parameters_and_buffers(how):
    trainer = Pictures(**settings(adapters={"name": "freeze", **FREEZES[how]}))
    before = state(trainer)
    assert len(of_the_backbone(before)) == 12
    trainer.fit()
    changed = moved(trainer, before)
    assert of_the_backbone(changed) == set()
    assert changed == {name for name in before if name.startswith("head")}
    assert len(changed) == 9  # two layers, a norm, its statistics and their count


def test_FROZEN_3_evaluations_and_calls_of_train_do_not_wake_the_statistics():
    class Waking(Pictures):
        def train_step(self, batch):
            self.model.train()
            return super().train_step(batch)

    trainer = Waking(**settings(adapters={"name": "freeze", "train": ["head"]}, evaluate={"every": 1}))
    before = state(trainer)
    trainer.fit()
    assert of_the_backbone(moved(trainer, before)) == set()
    assert trainer.model.head[1].training


def test_FROZEN_3_statistics_move_on_where_that_is_asked_for():
    trainer = Pictures(**settings(adapters={"name": "freeze", "train": ["head"], "statistics": True}))
    before = state(trainer)
    trainer.fit()
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    assert of_the_backbone(moved(trainer, before)) == {f"{n}.{s}" for n in ("norm", "block.1") for s in statistics}


class Interrupt(Recorder):
    """Stops after a number of steps."""

    def __init__(self, after):
        super().__init__()
        self.after = after

    def stepped(self, record):
        super().stepped(record)
        if record["step"] == self.after:
            self.run.request_stop("test")


class UnfrozenByHand(Pictures):
    """Unfreezes in the step itself, once, as user code does. The optimizer holds every parameter."""

    def build_optimizer(self, model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model.conv.requires_grad_(False)
        return optimizer

    def train_step(self, batch):
        if self.step == 3:
            self.model.conv.requires_grad_(True)
        return super().train_step(batch)


# How it is unfrozen at epoch 1 of 4; an epoch has three steps.
UNFREEZES = {
    "in epochs": (Pictures, {"adapters": {"name": "freeze", "freeze": ["conv"], "unfreeze": {"conv.*": "1ep"}}}),
    "in steps": (Pictures, {"adapters": {"name": "freeze", "freeze": ["conv"], "unfreeze": {"*": 3}}}),
    "by hand": (UnfrozenByHand, {}),
}


@pytest.mark.parametrize("stop", [2, 3, 4, 7])
@pytest.mark.parametrize("how", UNFREEZES)
def test_FROZEN_4_what_was_unfrozen_trains_on_after_a_resume(tmp_path, how, stop):
    cls, given = UNFREEZES[how]
    given = settings(**given, epochs=4)
    del given["steps"]
    straight = cls(**given, observers=[whole := Recorder()])
    start = state(straight)
    straight.fit()
    assert len(whole.steps) == 12
    given["run"] = {"dir": str(tmp_path), "name": "a", "id": "b"}
    first = cls(**given, observers=[Interrupt(stop)])
    assert first.fit()["steps"] == stop
    assert torch.equal(first.model.conv.weight, start["conv.weight"]) == (stop <= 3)
    resumed = cls(**given, resume="auto", observers=[rest := Recorder()])
    assert not resumed.model.conv.weight.requires_grad
    resumed.fit()
    assert resumed.model.conv.weight.requires_grad
    assert [r["loss"] for r in rest.steps] == [r["loss"] for r in whole.steps[stop:]]
    assert largest_difference(state(straight), state(resumed)) == 0.0
    assert not torch.equal(resumed.model.conv.weight, first.model.conv.weight)
