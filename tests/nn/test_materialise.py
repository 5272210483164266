"""Models built on the meta device: their weights are those of the same model built in memory, and ties stay."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fasttrain import ConfigError
from fasttrain.nn.materialise import is_on_meta, materialise
from tests.helpers import QUIET
from tests.stack import Stack, StackModel


class Tied(nn.Module):
    """An embedding tied to a head: 40 weights, and a bias of 10."""

    def __init__(self):
        super().__init__()
        self.word, self.norm, self.head = nn.Embedding(10, 4), nn.BatchNorm1d(4), nn.Linear(4, 10)
        self.head.weight = self.word.weight

    def forward(self, tokens):
        return self.head(self.norm(self.word(tokens)))


def on_meta(make):
    with torch.device("meta"):
        return make()


@pytest.mark.parametrize("make", [Tied, StackModel])
def test_weights_and_buffers_are_those_of_the_model_built_in_memory(make):
    torch.manual_seed(0)
    expected = make()
    after = torch.rand(1)
    model = on_meta(make)
    assert is_on_meta(model)
    torch.manual_seed(0)
    assert materialise(model, torch.device("cpu")) is model
    assert torch.equal(torch.rand(1), after)
    assert not is_on_meta(model)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in expected.state_dict().items())
    assert list(model.state_dict()) == list(expected.state_dict())


def test_what_nothing_fills_is_refused_by_name():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    with pytest.raises(ConfigError, match=r"Sequential was built on the meta device, and nothing fills 1.scale; give"):
        materialise(on_meta(lambda: nn.Sequential(nn.Linear(3, 3), Scale())), torch.device("cpu"))


def test_a_method_init_weights_has_the_last_word():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.scale = nn.Linear(3, 3), nn.Parameter(torch.ones(3))

        def init_weights(self):
            for parameter in self.parameters():
                nn.init.constant_(parameter, 7.0)

    model = materialise(on_meta(Own), torch.device("cpu"))
    assert {value for p in model.parameters() for value in p.flatten().tolist()} == {7.0}


def test_what_init_weights_forgets_is_refused_and_what_it_replaces_is_not():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.scale = nn.Linear(3, 3), nn.Parameter(torch.ones(3))
            self.register_buffer("positions", torch.arange(3))
            self.register_buffer("table", torch.arange(3.0))

        def init_weights(self):
            nn.init.ones_(self.scale)

    class Whole(Own):
        def init_weights(self):
            super().init_weights()
            self.positions = torch.arange(3)
            self.table.copy_(torch.arange(3.0))

    with pytest.raises(ConfigError, match="nothing fills positions, table; give its module a method reset_parameters"):
        materialise(on_meta(Own), torch.device("cpu"))
    model = materialise(on_meta(Whole), torch.device("cpu"))
    assert model.positions.tolist() == model.table.tolist() == [0, 1, 2]


def test_what_has_memory_already_is_left_alone():
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    model[0] = nn.Linear(2, 2)
    kept = model[0].weight
    before = kept.detach().clone()
    materialise(model, torch.device("cpu"))
    assert model[0].weight is kept
    assert torch.equal(kept, before)


def test_the_trainer_trains_a_model_built_on_meta_as_the_one_built_in_memory():
    class OnMeta(Stack):
        def build_model(self):
            return on_meta(StackModel)

    settings = {"batch_size": 8, "steps": 3, **QUIET}
    plain, trainer = Stack(**settings), OnMeta(**settings)
    plain.fit()
    trainer.fit()
    assert all(torch.equal(p, q) for p, q in zip(plain.model.parameters(), trainer.model.parameters(), strict=True))
