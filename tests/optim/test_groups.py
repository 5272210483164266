"""Parameter groups: what decays, at which rate each part learns, and that no parameter is lost."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fasttrain import ConfigError
from fasttrain.nn.blocks import find_blocks
from fasttrain.optim.groups import Group, Grouping, embedding_weights, layer_factors, parameter_groups
from tests.helpers import QUIET
from tests.stack import Stack, StackModel


class Words(nn.Module):
    """Embeddings, two blocks, a norm, and a head that may be tied to the embedding."""

    def __init__(self, tied=True):
        super().__init__()
        self.word, self.bag = nn.Embedding(10, 4), nn.EmbeddingBag(10, 4)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(4, 1, 8) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 10)
        if tied:
            self.head.weight = self.word.weight


def by_name(groups, key):
    return {name: group[key] for group in groups for name in group["param_names"]}


def groups_of(model, **settings):
    return parameter_groups(model, lr=0.1, weight_decay=0.5, settings=Grouping(**settings), blocks=find_blocks(model))


def test_norms_biases_and_embeddings_do_not_decay_and_each_can_be_asked_to():
    model = Words(tied=False)
    decays = {name for name, decay in by_name(groups_of(model), "weight_decay").items() if decay}
    assert len(decays) == 9
    assert {name for name in decays if not name.startswith("blocks")} == {"head.weight"}
    with_norms = {n for n, d in by_name(groups_of(model, decay_norms=True), "weight_decay").items() if d}
    assert {name for name, _ in model.named_parameters()} - with_norms == {"word.weight", "bag.weight"}
    with_embeddings = {n for n, d in by_name(groups_of(model, decay_embeddings=True), "weight_decay").items() if d}
    assert with_embeddings - decays == {"word.weight", "bag.weight"}


def test_a_head_that_is_tied_to_an_embedding_is_that_embedding():
    """It stands once, under its first name, and does not decay."""
    model = Words()
    assert embedding_weights(model) == {id(model.word.weight), id(model.bag.weight)}
    decays = by_name(groups_of(model), "weight_decay")
    assert "head.weight" not in decays
    assert decays["word.weight"] == 0.0
    params = [p for group in groups_of(model) for p in group["params"]]
    assert len(params) == len({id(p) for p in params}) == len(list(model.parameters()))


def test_groups_of_equal_settings_are_one():
    assert len(parameter_groups(StackModel(), lr=0.1, weight_decay=0.0)) == 1
    assert len(parameter_groups(StackModel(), lr=0.1, weight_decay=0.1)) == 2


def test_layer_decay_multiplies_the_rate_once_for_each_block_above():
    rates = by_name(groups_of(Words(tied=False), layer_decay=0.5), "lr")
    assert rates["word.weight"] == rates["bag.weight"] == 0.1 * 0.5**3
    assert rates["blocks.0.linear1.weight"] == rates["blocks.0.norm1.bias"] == 0.1 * 0.5**2
    assert rates["blocks.1.linear1.weight"] == 0.1 * 0.5
    assert rates["norm.weight"] == rates["head.weight"] == 0.1
    assert len(rates) == len(list(Words(tied=False).parameters()))


def test_a_head_is_known_by_its_name_where_it_is_registered_first():
    model = StackModel()
    names = [name for name, _ in model.named_parameters()]
    assert names.index("head.weight") < names.index("blocks.0.norm.weight")
    factors = layer_factors(model, list(model.blocks), 0.5)
    assert factors[id(model.head.weight)] == 1.0
    assert factors[id(model.embed.weight)] == 0.5**3


def test_what_lies_between_blocks_has_the_rate_of_the_block_before_it():
    model = nn.ModuleDict(
        {"a": nn.Linear(1, 1), "b": nn.Linear(1, 1), "between": nn.Linear(1, 1), "c": nn.Linear(1, 1)}
    )
    factors = layer_factors(model, [model["a"], model["b"], model["c"]], 0.5)
    assert [factors[id(model[n].weight)] for n in ("a", "b", "between", "c")] == [0.125, 0.25, 0.25, 0.5]


def test_the_trainer_names_the_blocks_of_layer_decay_and_the_schedule_keeps_the_ratios():
    class Named(Stack):
        def blocks(self, model):
            return [model.blocks[1]]

    trainer = Named(batch_size=8, steps=4, optimizer={"name": "adamw", "layer_decay": 0.5}, schedule="linear", **QUIET)
    factors = by_name(trainer.optimizer.param_groups, "initial_lr")
    assert factors["blocks.1.norm.weight"] == 1e-3 * 0.5
    assert factors["blocks.0.norm.weight"] == 1e-3 * 0.25
    trainer.train_step(next(trainer.feed.training(trainer.task, trainer.plan)))
    rates = by_name(trainer.optimizer.param_groups, "lr")
    assert rates["blocks.1.norm.weight"] == 1e-3 * 0.5 * 0.75
    assert rates["blocks.0.norm.weight"] == 1e-3 * 0.25 * 0.75


@pytest.mark.parametrize("value", [0.0, -0.5, 1.5])
def test_a_layer_decay_that_is_no_factor_is_refused(value):
    with pytest.raises(ConfigError, match=f"layer_decay={value} must be above 0 and at most 1; often"):
        Grouping(layer_decay=value)


def test_groups_by_name_have_a_rate_and_decay_of_their_own_and_the_first_match_wins():
    given = (Group(match="head.*", lr=0.7), Group(match="*.bias", weight_decay=0.25), Group(match="head.bias", lr=9.0))
    model = Words(tied=False)
    groups = groups_of(model, groups=given, layer_decay=0.5)
    rates, decays = by_name(groups, "lr"), by_name(groups, "weight_decay")
    assert (rates["head.weight"], rates["head.bias"]) == (0.7, 0.7)
    assert (decays["head.weight"], decays["head.bias"]) == (0.5, 0.0)  # as for all others
    assert (rates["norm.bias"], decays["norm.bias"]) == (0.1, 0.25)
    assert len(rates) == len(list(model.parameters()))


def test_a_pattern_may_be_any_name_of_a_shared_parameter():
    groups = groups_of(Words(), groups=(Group(match="head.weight", lr=0.7),))
    assert by_name(groups, "lr")["word.weight"] == 0.7


def test_a_pattern_that_matches_nothing_is_refused_with_names_near_it():
    with pytest.raises(ConfigError, match=r"optimizer.groups\[0\].match=haed.\* matches no parameter; .* example head"):
        groups_of(Words(tied=False), groups=(Group(match="haed.*"),))


def test_groups_are_written_in_yaml_and_saved_in_the_run(tmp_path):
    settings = {"batch_size": 8, "steps": 1, "log": {"every": 1}, "run": {"dir": str(tmp_path), "name": "a", "id": "b"}}
    groups = [{"match": "head.*", "lr": 0.5}, {"match": "embed.*", "weight_decay": 0.0}]
    trainer = Stack(optimizer={"name": "adamw", "groups": groups}, **settings)
    assert by_name(trainer.optimizer.param_groups, "lr")["head.bias"] == 0.5
    trainer.fit()
    from fasttrain.config import load

    again = load(tmp_path / "a" / "b" / "config.yaml", ["trainer=tests.stack:Stack"])
    assert again.strategies["optimizer"] == trainer.resolved.strategies["optimizer"]
    assert again.strategies["optimizer"].groups == (
        Group(match="head.*", lr=0.5),
        Group(match="embed.*", weight_decay=0.0),
    )


def test_a_mistake_within_a_group_is_told_with_its_key():
    with pytest.raises(ConfigError, match=r"optimizer\.groups\[0\]\.rate"):
        Stack(batch_size=8, optimizer={"name": "adamw", "groups": [{"match": "head.*", "rate": 0.5}]}, **QUIET)
    with pytest.raises(ConfigError, match=r"optimizer\.groups\[0\]\.match"):
        Stack(batch_size=8, optimizer={"name": "adamw", "groups": [{"lr": 0.5}]}, **QUIET)


def test_frozen_parameters_are_in_no_group():
    model = StackModel()
    model.embed.requires_grad_(False)
    assert len(by_name(parameter_groups(model, lr=0.1, weight_decay=0.1), "lr")) == 14


def test_a_pattern_of_frozen_parameters_alone_is_no_mistake():
    """Which parameters train may change, by adapters for example, while the groups of a config stay."""
    model = StackModel()
    model.embed.requires_grad_(False)
    groups = groups_of(model, groups=(Group(match="embed.*", lr=0.5),))
    assert 0.5 not in by_name(groups, "lr").values()
    assert torch.is_tensor(groups[0]["params"][0])
