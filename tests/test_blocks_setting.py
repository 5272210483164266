"""The setting `blocks`: names of modules in the place of those that are found."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fasttrain import ConfigError
from fasttrain.models.resnet import build_resnet
from fasttrain.nn.blocks import find_blocks, named_blocks, names_of
from tests.helpers import QUIET, state
from tests.stack import Stack, StackModel

RUN = {"batch_size": 8, "steps": 2, **QUIET}
FULL = {"activation_checkpointing": "full"}


def replaced(model):
    """Names of the modules whose forward was replaced."""
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


def test_the_named_modules_are_the_blocks():
    trainer = Stack(**RUN, **FULL, blocks=["blocks.1", "head"])
    assert replaced(trainer.model) == ["head", "blocks.1"]
    plain = Stack(**RUN)
    plain.fit(), trainer.fit()
    assert all(torch.equal(value, state(plain)[name]) for name, value in state(trainer).items())


def test_without_names_the_blocks_are_found():
    assert replaced(Stack(**RUN, **FULL).model) == ["blocks.0", "blocks.1"]
    assert replaced(Stack(**RUN, **FULL, blocks=None).model) == ["blocks.0", "blocks.1"]


def test_names_in_the_config_go_before_those_of_the_trainer():
    class Own(Stack):
        def blocks(self, model):
            return [model.head]

    assert replaced(Own(**RUN, **FULL).model) == ["head"]
    assert replaced(Own(**RUN, **FULL, blocks=["blocks.*"]).model) == ["blocks.0", "blocks.1"]


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["layer1.*"], ["layer1.0"]),
        (["layer[13].*", "fc"], ["layer1.0", "layer3.0", "fc"]),
        (["layer3.0", "layer1.0"], ["layer1.0", "layer3.0"]),
        (["layer?"], ["layer1", "layer2", "layer3"]),
        (["layer1.*", "*.0"], ["layer1.0", "layer2.0", "layer3.0"]),
    ],
    ids=str,
)
def test_a_star_stays_between_two_dots_and_the_order_is_the_models(patterns, names):
    model = build_resnet("resnet8", num_classes=3)
    assert names_of(model, named_blocks(model, patterns)) == names


def test_a_module_under_two_names_is_one_block():
    model = StackModel(blocks=1)
    model.blocks = nn.ModuleList([model.blocks[0]] * 3)
    assert named_blocks(model, ["blocks.*"]) == named_blocks(model, ["blocks.2"]) == [model.blocks[0]]


WRONG = [
    (
        "layr1.*",
        "blocks=layr1.*: no module of _ResNet has such a name; use layer1.*, layer2.*, layer3.*; near it: layer",
    ),
    ("layer1.*.*.*", "blocks=layer1.*.*.*: no module of _ResNet has such a name; use layer1.*, layer2.*, layer3.*"),
    ("*.bn1.*", "no module of _ResNet has such a name"),
    ("", "blocks=: no module of _ResNet has such a name"),
]


@pytest.mark.parametrize(("pattern", "message"), WRONG)
def test_a_name_that_is_not_there_lists_those_that_are(pattern, message):
    with pytest.raises(ConfigError) as caught:
        named_blocks(build_resnet("resnet8", num_classes=3), ["fc", pattern])
    assert message in str(caught.value)


def test_where_no_blocks_are_found_the_parts_are_listed():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(ConfigError, match="no module of Sequential has such a name; its parts: 0, 1"):
        named_blocks(model, ["encoder.*"])


def test_a_list_and_a_block_inside_of_another_are_refused():
    model = StackModel()
    with pytest.raises(ConfigError, match=r"'blocks' is a ModuleList, which is never called itself; use blocks\.\*"):
        named_blocks(model, ["blocks"])
    with pytest.raises(ConfigError, match=r"'blocks\.0\.norm' lies inside of 'blocks\.0', which is chosen too"):
        named_blocks(model, ["blocks.*", "blocks.*.norm"])
    assert len(find_blocks(model)) == 2


def test_a_wrong_name_is_told_though_no_strategy_asks_for_blocks():
    with pytest.raises(ConfigError, match="blocks=layer9: no module of StackModel has such a name; use blocks"):
        Stack(**RUN, blocks=["layer9"])


def test_an_empty_list_is_refused():
    with pytest.raises(ConfigError, match=r"blocks=\[\] names no block; write null to have them found"):
        Stack(**RUN, blocks=[])
