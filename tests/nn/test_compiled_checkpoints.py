"""Checkpoints in compiled code: rules that differ in one process, results changed in place, and code that breaks graphs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fasttrain.compiler.apply import compile_forwards
from fasttrain.models.resnet import build_resnet
from fasttrain.nn.activations import kept_bytes
from fasttrain.nn.blocks import find_blocks
from fasttrain.nn.budget import set_budget
from fasttrain.nn.recompute import checkpoint_blocks
from fasttrain.nn.selective import keep_by_cost, keep_operations
from tests.helpers import largest_difference, points
from tests.stack import StackModel, gradients

# dynamo looks at it and hides the warning by itself, but not where warnings are errors. torch 2.14.1.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
AOT = {"backend": "aot_eager"}
RULES = {"full": None, "cost": keep_by_cost(), "matmuls": keep_operations(["matmuls", "convolutions"])}


@pytest.fixture(autouse=True)
def afresh():
    torch.compiler.reset()


def kept_by(keeps):
    model = StackModel()
    checkpoint_blocks(model.blocks, keeps=keeps)
    compile_forwards(model.blocks, **AOT)
    x = points()[0]
    model(x).sum().backward()
    return kept_bytes(lambda: model(x))


def test_two_rules_in_one_process_have_graphs_of_their_own():
    rules = [keep_by_cost(0.0), keep_by_cost(1e9), None, lambda operation, *_: operation is torch.ops.aten.gelu.default]
    alone = []
    for rule in rules:
        torch.compiler.reset()
        alone.append(kept_by(rule))
    torch.compiler.reset()
    assert [kept_by(rule) for rule in rules] == alone
    assert alone[0] > alone[1] == alone[2]
    assert alone[3] > alone[2]


@pytest.mark.parametrize("rule", RULES)
def test_a_resnet_whose_results_are_changed_in_place_trains_as_without(rule):
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = build_resnet("resnet8", num_classes=3, stem="small", width=8)
        if compiled:
            checkpoint_blocks(find_blocks(model), keeps=RULES[rule])
            compile_forwards(find_blocks(model), **AOT)
        x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        for _ in range(2):
            model(x).square().mean().backward()
        results.append({**gradients(model), **dict(model.named_buffers())})
    assert largest_difference(*results) < 1e-5


@pytest.mark.parametrize("rule", RULES)
def test_a_block_that_breaks_the_graph_is_checkpointed_all_the_same(rule):
    """Dynamo gives such a checkpoint up, and torch runs it as it is: statistics must move once there, too."""

    class Breaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

        def forward(self, x):
            x = F.silu(self.linear(x), inplace=True)
            torch._dynamo.graph_break()
            return F.dropout(self.norm(x), 0.5).relu()

    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        block = Breaks()
        if compiled:
            checkpoint_blocks([block], keeps=RULES[rule])
            compile_forwards([block], **AOT)
        torch.manual_seed(1)
        block(points()[0]).square().sum().backward()
        results.append({**gradients(block), **dict(block.named_buffers())})
    assert results[1]["norm.num_batches_tracked"].item() == 1
    assert largest_difference(*results) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("how", ["selective", "budget"])
def test_inductor_trains_as_eager_code_does_and_replays_the_masks_of_dropout(how):
    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return F.dropout(self.linear(x.sin()), 0.5).exp() * x

    torch.manual_seed(0)
    block = Dropped()
    if how == "selective":
        checkpoint_blocks([block], keeps=RULES["matmuls"])
    else:
        set_budget([block], 0.2)
    compile_forwards([block])
    x = torch.full((200, 8), 0.5, requires_grad=True)
    # Of y = exp(m h) x the mask m, 0 or 2, is read off the output; with it the gradients are those of eager code.
    output = block(x)
    output.sum().backward()
    again = x.detach().clone().requires_grad_()
    hidden = F.linear(again.sin(), block.linear.weight, block.linear.bias)
    mask = torch.where(output.detach() == x.detach(), 0.0, 2.0)
    assert 0.4 < (mask == 0).float().mean() < 0.6
    expected = torch.autograd.grad(((mask * hidden).exp() * again).sum(), [again, block.linear.weight])
    # Other rounding of exp, and sums of terms that cancel.
    assert (x.grad - expected[0]).abs().max() < 1e-5
    assert (block.linear.weight.grad - expected[1]).abs().max() < 1e-3
