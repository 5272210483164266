"""The memory budget of compiled code: bytes, FLOPs, one process with several, and the masks of dropout."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fasttrain.compiler.apply import compile_forwards
from fasttrain.errors import ConfigError
from fasttrain.nn.activations import kept_bytes
from fasttrain.nn.budget import set_budget
from fasttrain.nn.recompute import checkpoint_blocks
from tests.helpers import largest_difference, points
from tests.stack import StackModel, gradients

# dynamo looks at it and hides the warning by itself, but not where warnings are errors. torch 2.14.1.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
VECTOR = 24 * 8 * 4


@pytest.fixture(autouse=True)
def afresh():
    torch.compiler.reset()


def test_a_torch_that_would_not_look_at_the_budget_is_refused(monkeypatch):
    monkeypatch.delattr(torch.autograd.graph, "region_activation_memory_budget")
    with pytest.raises(
        ConfigError, match=r"takes no budget for single graphs .*; use activation_checkpointing=selective"
    ):
        set_budget([nn.Linear(2, 2)], 0.5)


class Products(TorchDispatchMode):
    """Counts matrix products, in compiled code as well."""

    def __init__(self):
        super().__init__()
        self.number = 0

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def budgeted(budget, dropout=0.0):
    torch.manual_seed(0)
    model = StackModel(dropout=dropout)
    if budget is not None:
        set_budget(model.blocks, budget)
    compile_forwards(model.blocks, backend="aot_eager")
    return model


def counted(model):
    x = points()[0]
    model(x).sum().backward()  # compiles
    kept = kept_bytes(lambda: model(x))
    with Products() as products:
        model(x).sum().backward()
    return kept, products.number


def test_a_smaller_budget_keeps_less_and_computes_more():
    kept, products = zip(*(counted(budgeted(budget)) for budget in (None, 1.0, 0.5, 0.0)), strict=True)
    assert kept[0] == kept[1] > kept[2] > kept[3]
    assert products[0] == products[1] <= products[2] <= products[3]
    assert products[1] < products[3]
    # Inputs of blocks and the last output, as checkpointing whole blocks keeps them.
    assert kept[3] <= 5 * VECTOR


def test_two_budgets_in_one_process_do_not_influence_each_other():
    """Blocks of two models share code, and torch its settings; neither is where the budget is."""
    alone = {}
    for budget in (0.0, 1.0):
        torch.compiler.reset()
        alone[budget] = counted(budgeted(budget))
    torch.compiler.reset()
    before = torch._functorch.config.save_config_portable()
    models = {budget: budgeted(budget) for budget in (0.0, 1.0)}
    assert [counted(models[budget]) for budget in (0.0, 1.0, 0.0)] == [alone[0.0], alone[1.0], alone[0.0]]
    assert counted(budgeted(None)) == alone[1.0]
    assert torch._functorch.config.save_config_portable() == before


@pytest.mark.parametrize("budget", [0.0, 0.3, 1.0])
def test_numbers_are_those_of_eager_code(budget):
    x = points()[0]
    plain, model = StackModel(), budgeted(budget)
    plain.load_state_dict(model.state_dict())
    for each in (plain, model):
        each(x).square().sum().backward()
    assert largest_difference(gradients(plain), gradients(model)) < 1e-4


@pytest.mark.parametrize("budget", [0.0, 0.3, 0.7, 1.0])
def test_the_mask_of_dropout_is_the_same_in_forward_and_backward(budget):
    """torch alone draws another one for every budget below 1. pytorch/pytorch#190717."""

    class Dropped(nn.Module):
        def forward(self, x):
            return F.dropout(x.sin(), 0.5).exp() * x

    block = Dropped()
    set_budget([block], budget)
    compile_forwards([block], backend="aot_eager")
    x = torch.ones(1000, requires_grad=True)
    output = block(x)
    torch.rand(17)
    output.sum().backward()
    # d(x exp(m sin x)) = exp(m sin x) (1 + m cos x), where m is 0 or 2
    dropped = output == 1.0
    assert 400 < dropped.sum() < 600
    assert torch.equal(dropped, x.grad == 1.0)
    expected = torch.exp(2 * torch.ones(1).sin()) * (1 + 2 * torch.ones(1).cos())
    assert torch.allclose(x.grad[~dropped], expected, rtol=1e-6)


def test_batch_norm_moves_its_statistics_once():
    torch.manual_seed(0)
    plain, model = (StackModel(nn.BatchNorm1d) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    set_budget(model.blocks, 0.2)
    compile_forwards(model.blocks, backend="aot_eager")
    for each in (plain, model):
        for _ in range(2):
            each(points()[0]).square().sum().backward()
    assert model.blocks[1].norm.num_batches_tracked.item() == 2
    assert largest_difference(dict(plain.named_buffers()), dict(model.named_buffers())) < 1e-6
    assert largest_difference(gradients(plain), gradients(model)) < 1e-3


def test_a_block_that_is_not_compiled_says_that_the_budget_does_nothing():
    class Breaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            x = self.linear(x)
            torch._dynamo.graph_break()
            return x.relu()

    block = Breaks()
    set_budget([block], 0.5)
    compile_forwards([block], backend="aot_eager")
    with pytest.warns(UserWarning, match=r"budget=0\.5 does not hold for a block that was not compiled in one piece"):
        block(points()[0]).sum().backward()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        block(points()[0])  # an evaluation keeps nothing anyway


def test_a_budget_of_zero_keeps_no_more_than_checkpointed_blocks():
    model = StackModel()
    checkpoint_blocks(model.blocks)
    compile_forwards(model.blocks, backend="aot_eager")
    assert counted(budgeted(0.0))[0] <= counted(model)[0]
