"""Forwards and backwards beside the training: nothing of the run moves."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers import QUIET, points, state
from tests.stack import Restless


class Odd(nn.Module):
    """Keeps a buffer that its forward puts another tensor in the place of, and an empty one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("replaced", torch.zeros(2), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, x):
        self.replaced = self.replaced + 1
        return x


def generators():
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), [random.random() for _ in range(3)]


def test_generators_buffers_modes_and_what_is_known_of_the_batch_are_what_they_were():
    trainer = Restless(batch_size=8, steps=3, **QUIET)
    trainer.model.odd = Odd()
    trainer.model.train()
    trainer.model.blocks[1].eval()
    trainer.task.fed, trainer.plan.weight = "a batch", 0.25
    held = trainer.model.odd.replaced
    modes = {name: module.training for name, module in trainer.model.named_modules()}
    before = state(trainer)
    assert trainer.context().undisturbed is not None
    drawn = []
    for inside in (False, True):
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)
        if inside:
            with trainer.context().undisturbed():
                generators()
                trainer.model.train()
                trainer.model.odd(trainer.model(points()[0]))
                assert trainer.model.odd.replaced is not held
                assert trainer.model.blocks[0].norm.num_batches_tracked == 1
                trainer.task.fed, trainer.plan.weight = None, None
                trainer.figures.watching = True
        drawn.append(generators())
    assert drawn[0] == drawn[1]
    after = state(trainer)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert trainer.model.odd.replaced is held
    assert held.tolist() == [0, 0]
    assert {name: module.training for name, module in trainer.model.named_modules()} == modes
    assert (trainer.task.fed, trainer.plan.weight, trainer.figures.watching) == ("a batch", 0.25, False)


def test_what_is_logged_meanwhile_is_not_kept():
    trainer = Restless(batch_size=8, steps=3, **QUIET)
    trainer.figures.watching = True
    with trainer.context().undisturbed():
        trainer.log("my/figure", 1.0)
    assert trainer.figures.watching
    assert trainer.figures.take_sums() == {}


def test_everything_is_given_back_after_an_error_too():
    trainer = Restless(batch_size=8, steps=3, **QUIET)
    before, drawn = state(trainer), torch.get_rng_state()
    with pytest.raises(ValueError, match="planted"), trainer.context().undisturbed():
        trainer.model(points()[0])
        raise ValueError("planted")
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(value, before[name]) for name, value in state(trainer).items())


class Remembers(nn.Module):
    """Keeps a state of its own, in attributes that torch knows nothing of."""

    def __init__(self):
        super().__init__()
        self.calls, self.mean, self.seen, self.names = 0, torch.zeros(()), [], {"a": 1}
        self.draws, self.dice, self.dealt = torch.Generator(), random.Random(1), np.random.default_rng(1)
        self.cache = None

    def forward(self, x):
        self.calls += 1
        self.mean.mul_(0.9).add_(x.detach().mean())
        self.cache = x.detach() if self.cache is None else torch.cat([self.cache, x.detach()])
        self.seen.append(self.calls)
        self.names["b"] = self.names.pop("a", 0)
        self.fresh = True
        return x

    def told(self):
        drawn = torch.rand(1, generator=self.draws).item(), self.dice.random(), self.dealt.random()
        kept = self.calls, self.mean.item(), list(self.seen), dict(self.names), self.cache, hasattr(self, "fresh")
        return kept, drawn


def test_what_user_code_keeps_in_attributes_is_what_it_was():
    trainer = Restless(batch_size=8, steps=3, **QUIET)
    own = trainer.model.own = Remembers()
    mean, seen, names = own.mean, own.seen, own.names
    trainer.counted, trainer.dice = 5, random.Random(2)
    with trainer.context().undisturbed():
        first = own.told(), trainer.dice.random()
        own(points()[0])
        trainer.counted += 1
        trainer.made = "inside"
    with trainer.context().undisturbed():
        assert (own.told(), trainer.dice.random()) == first
    assert (own.mean, own.seen, own.names) == (mean, seen, names)
    assert own.mean is mean
    assert own.seen is seen
    assert own.names is names
    assert trainer.counted == 5
    assert not hasattr(trainer, "made")


def test_a_large_tensor_among_the_attributes_is_no_copy(monkeypatch):
    trainer = Restless(batch_size=8, steps=3, **QUIET)
    trainer.images = torch.zeros(2**22 + 1)
    copied = []
    clone = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda tensor: copied.append(tensor.nbytes) or clone(tensor))
    with trainer.context().undisturbed():
        pass
    assert copied
    assert max(copied) < 2**16
