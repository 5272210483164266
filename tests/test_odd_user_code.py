"""What user code may forget, and what it may have set by hand."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fasttrain import ConfigError
from fasttrain.errors import FasttrainError
from tests.helpers import QUIET, Mlp


@pytest.mark.parametrize(
    ("given", "named"),
    [(None, "None"), (0.5, "a float"), ((torch.zeros(()),), "a tuple"), ({}, "an empty dict")],
)
@pytest.mark.parametrize("more", [{}, {"accumulation": {"name": "microbatches", "num": 2}}])
def test_a_loss_that_is_no_tensor_is_named(given, named, more):
    class Odd(Mlp):
        def loss(self, output, batch):
            return given

    with pytest.raises(FasttrainError, match=rf"the loss is {named}; return a 0-dim tensor"):
        Odd(batch_size=8, steps=1, **more, **QUIET).fit()


def test_a_step_of_ones_own_that_does_not_count_is_told_instead_of_going_on_for_ever():
    class Endless(Mlp):
        def train_step(self, batch):
            info = super().train_step(batch)
            self.step -= 1
            return info

    with pytest.raises(ConfigError, match=r"train_step left self\.step at 0; .*self\.step \+= 1"):
        Endless(batch_size=8, steps=2, **QUIET).fit()


def test_a_step_of_ones_own_that_returns_nothing_is_told():
    class Silent(Mlp):
        def train_step(self, batch):
            super().train_step(batch)

    with pytest.raises(ConfigError, match=r"train_step returned None; return StepInfo\(self\.step, loss\)"):
        Silent(batch_size=8, steps=2, **QUIET).fit()


class Frozen(Mlp):
    """A norm whose statistics the user froze."""

    whole = False

    def build_model(self):
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        (model if self.whole else model[1]).eval()
        return model


def test_a_part_put_into_evaluation_mode_stays_so_through_training_and_evaluation():
    trainer = Frozen(batch_size=8, epochs=2, **QUIET)
    trainer.fit()
    assert [module.training for module in trainer.model.modules()] == [True, True, False, True]
    assert trainer.model[1].num_batches_tracked == 0


def test_a_model_that_comes_in_evaluation_mode_is_trained():
    trainer = type("Pretrained", (Frozen,), {"whole": True})(batch_size=8, epochs=2, **QUIET)
    trainer.fit()
    assert all(module.training for module in trainer.model.modules())
    assert trainer.model[1].num_batches_tracked == 6


def test_an_evaluation_of_ones_own_model_gives_each_module_its_mode_back():
    trainer = Frozen(batch_size=8, **QUIET)
    modes = []

    def loss(output, batch):
        modes.append([module.training for module in trainer.model.modules()])
        return F.cross_entropy(output, batch[1])

    trainer.loss = loss
    trainer.evaluate()
    assert modes[0] == [False] * 4
    assert [module.training for module in trainer.model.modules()] == [True, True, False, True]
