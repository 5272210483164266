"""Which blocks are found in well-known models, and that a copy of a changed model computes with its own weights."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
import torchvision.models
from torch import nn

from fasttrain import ConfigError
from fasttrain.compiler.apply import compile_forwards
from fasttrain.models.bert import Bert, BertForMaskedLM
from fasttrain.models.bert_config import BertConfig
from fasttrain.models.resnet import build_resnet
from fasttrain.nn.blocks import find_blocks
from fasttrain.nn.recompute import checkpoint_blocks
from tests.stack import StackModel

TINY = BertConfig(vocabulary=50, width=16, layers=3, heads=2, feedforward=32)


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3)


FOUND = {
    "resnet18": (torchvision.models.resnet18, {"BasicBlock": 8}, "layer1.0", "layer4.1"),
    "resnet50": (torchvision.models.resnet50, {"Bottleneck": 16}, "layer1.0", "layer4.2"),
    "vit_b_16": (
        torchvision.models.vit_b_16,
        {"EncoderBlock": 12},
        "encoder.layers.encoder_layer_0",
        "encoder.layers.encoder_layer_11",
    ),
    "swin_t": (
        torchvision.models.swin_t,
        {"SwinTransformerBlock": 12},
        "features.1.0",
        "features.7.1",
    ),
    "mobilenet_v3_small": (
        torchvision.models.mobilenet_v3_small,
        {"InvertedResidual": 11},
        "features.1",
        "features.11",
    ),
    "convnext_tiny": (torchvision.models.convnext_tiny, {"CNBlock": 18}, "features.1.0", "features.7.2"),
    "densenet121": (
        torchvision.models.densenet121,
        {"_DenseLayer": 58},
        "features.denseblock1.denselayer1",
        "features.denseblock4.denselayer16",
    ),
    "TransformerEncoder": (encoder, {"TransformerEncoderLayer": 3}, "layers.0", "layers.2"),
    "Transformer": (
        lambda: nn.Transformer(16, 2, 2, 3, 32, batch_first=True),
        {"TransformerEncoderLayer": 2, "TransformerDecoderLayer": 3},
        "encoder.layers.0",
        "decoder.layers.2",
    ),
    "Bert": (lambda: Bert(TINY), {"Block": 3}, "layers.0", "layers.2"),
    "BertForMaskedLM": (lambda: BertForMaskedLM(TINY), {"Block": 3}, "encoder.layers.0", "encoder.layers.2"),
    "our resnet8": (lambda: build_resnet("resnet8", num_classes=3), {"BasicBlock": 3}, "layer1.0", "layer3.0"),
    "our resnet50": (lambda: build_resnet("resnet50", num_classes=3), {"Bottleneck": 16}, "layer1.0", "layer4.2"),
}


@pytest.mark.parametrize("name", FOUND)
def test_the_blocks_of_a_well_known_model_are_found(name):
    build, kinds, first, last = FOUND[name]
    with torch.device("meta"):
        model = build()
    blocks = find_blocks(model)
    names = {id(module): name for name, module in model.named_modules()}
    assert Counter(type(block).__name__ for block in blocks) == kinds
    assert (names[id(blocks[0])], names[id(blocks[-1])]) == (first, last)
    ordered = [names[id(block)] for block in blocks]
    assert ordered == [name for name, _ in model.named_modules() if name in set(ordered)]
    inside = {id(part) for block in blocks for part in list(block.modules())[1:]}
    assert not inside & {id(block) for block in blocks}, "a block lies in another one"


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(2, 2),
        nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),
        nn.ModuleList([nn.MultiheadAttention(4, 2), nn.MultiheadAttention(4, 2)]),
        nn.Sequential(nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2)), nn.Linear(2, 2)),
    ],
    ids=["a layer", "plain layers", "layers of torch with parts", "one group"],
)
def test_a_model_with_nothing_repeated_says_what_to_write(model):
    with pytest.raises(ConfigError) as caught:
        find_blocks(model)
    assert str(caught.value) == (
        f"no repeated blocks were found in {type(model).__name__}; override blocks(model) in the Trainer and "
        "return the modules to take as units, or name them: blocks=[layer1.*, layer2.*]."
    )


def test_a_block_that_is_run_several_times_is_found_once():
    """ALBERT: one layer under every number."""
    model = StackModel(blocks=1)
    model.blocks = nn.ModuleList([model.blocks[0]] * 4)
    assert find_blocks(model) == [model.blocks[0]]


def test_the_only_layer_of_a_model_is_a_block():
    model = StackModel(blocks=1)
    assert find_blocks(model) == [model.blocks[0]]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("change", ["checkpointed", "compiled", "both"])
def test_a_copy_of_a_changed_model_computes_with_its_own_weights(change):
    torch.compiler.reset()
    torch.manual_seed(0)
    model = StackModel()
    if change != "compiled":
        checkpoint_blocks(find_blocks(model))
    if change != "checkpointed":
        compile_forwards(find_blocks(model), backend="aot_eager")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    plain = StackModel()
    plain.load_state_dict(other.state_dict())
    x = torch.randn(3, 8)
    assert torch.equal(other(x), plain(x))
    other(x).sum().backward()
    plain(x).sum().backward()
    for (name, one), two in zip(other.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one.grad, two.grad, atol=1e-6), name
    assert all(parameter.grad is None for parameter in model.parameters())
