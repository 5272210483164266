"""Forwards that were compiled, and the way back to eager code."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend

from fasttrain.compiler import apply
from fasttrain.compiler.apply import compile_forwards
from fasttrain.models.resnet import build_resnet
from fasttrain.nn.blocks import find_blocks
from fasttrain.nn.recompute import checkpoint_blocks
from tests.helpers import largest_difference, points
from tests.stack import StackModel, gradients

# dynamo looks at it and hides the warning by itself, but not where warnings are errors. torch 2.14.1.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


class Counting:
    """aot_eager, counting the graphs it is given and how often they run."""

    def __init__(self):
        self.graphs = self.calls = 0
        self.symbols = []

    def __call__(self, graph, inputs):
        self.graphs += 1
        self.symbols.append(sum(not isinstance(value, torch.Tensor) for value in inputs))
        compiled = lookup_backend("aot_eager")(graph, inputs)

        def run(*args):
            self.calls += 1
            return compiled(*args)

        return run


@pytest.fixture(autouse=True)
def counting():
    config = torch._dynamo.config
    limits = config.recompile_limit, config.accumulated_recompile_limit
    config.recompile_limit, config.accumulated_recompile_limit = 8, 256  # torch's own, whatever ran before
    apply._NUMBERS.clear()
    torch.compiler.reset()
    yield Counting()
    config.recompile_limit, config.accumulated_recompile_limit = limits


@pytest.mark.parametrize("recomputed", [False, True])
def test_in_eager_the_forwards_are_those_from_before_and_the_graphs_stay(counting, recomputed):
    torch.manual_seed(0)
    model = StackModel()
    if recomputed:
        checkpoint_blocks(model.blocks)
    before = [vars(block).get("forward") for block in model.blocks]
    compiled = compile_forwards(model.blocks, backend=counting)
    x = points()[0]
    expected = model(x)
    assert (counting.graphs, counting.calls) == (1, 2)
    for _ in range(2):
        with compiled.eager():
            assert [vars(block).get("forward") for block in model.blocks] == before
            with compiled.eager():
                eager = model(x)
            assert largest_difference({"y": model(x)}, {"y": eager}) == 0.0
    assert (counting.graphs, counting.calls) == (1, 2)
    assert largest_difference({"y": eager}, {"y": expected}) < 1e-6
    model(x)
    assert (counting.graphs, counting.calls) == (1, 4)


def test_an_error_inside_puts_the_compiled_forwards_back(counting):
    model = StackModel()
    compiled = compile_forwards(model.blocks, backend=counting)
    forwards = [block.forward for block in model.blocks]
    with pytest.raises(ZeroDivisionError), compiled.eager():
        raise ZeroDivisionError
    assert [block.forward for block in model.blocks] == forwards


def test_a_forward_that_was_replaced_since_is_not_lost(counting):
    model = StackModel()
    compiled = compile_forwards(model.blocks, backend=counting)
    checkpoint_blocks(model.blocks)
    forwards = [block.forward for block in model.blocks]
    with pytest.raises(RuntimeError, match="the forward of a Block was replaced after it was compiled"):
        compiled.eager().__enter__()
    assert [block.forward for block in model.blocks] == forwards


@pytest.mark.parametrize("whole", [False, True])
def test_a_copy_of_a_compiled_model_computes_with_its_own_weights(counting, whole):
    torch.manual_seed(0)
    plain, model = StackModel(), StackModel()
    compile_forwards([model] if whole else model.blocks, backend=counting)
    x = points()[0]
    model(x)
    copied = copy.deepcopy(model)
    copied.load_state_dict(plain.state_dict())
    for each in (plain, copied):
        each(x).square().sum().backward()
    assert largest_difference(gradients(plain), gradients(copied)) < 1e-4
    assert counting.calls == (2 if whole else 4)
    assert gradients(model) == {}


def test_a_module_that_is_named_twice_is_compiled_once(counting):
    model = StackModel()
    block = model.blocks[0]
    assert compile_forwards([block, block], backend=counting).modules == [block]


def test_a_whole_model_keeps_its_class_its_names_and_is_one_graph(counting):
    torch.manual_seed(0)
    plain, model = StackModel(), StackModel()
    model.load_state_dict(plain.state_dict())
    compile_forwards([model], backend=counting)
    x = points()[0]
    for each in (plain, model):
        each(x).square().sum().backward()
    assert type(model) is StackModel
    assert list(model.state_dict()) == list(plain.state_dict())
    assert counting.graphs == 1
    assert largest_difference(gradients(plain), gradients(model)) < 1e-4


# ---- how many graphs there may be


def limit():
    return torch._dynamo.config.recompile_limit


def test_a_kind_has_torchs_own_limit_whatever_the_depth_and_the_other_kinds(counting):
    compile_forwards(StackModel(blocks=48).blocks, backend=counting)
    compile_forwards(find_blocks(build_resnet("resnet50", num_classes=3)), backend=counting)
    assert (limit(), torch._dynamo.config.accumulated_recompile_limit) == (8, 256)


def test_the_limit_is_never_lowered(counting):
    torch._dynamo.config.recompile_limit = 100
    compile_forwards(StackModel().blocks, backend=counting)
    assert limit() == 100


def code_of(block):
    return block.forward.__func__._torchdynamo_orig_callable.__code__


@pytest.mark.parametrize("recomputed", [False, True])
def test_each_kind_has_code_of_its_own_and_a_second_model_has_graphs_of_its_own(counting, recomputed):
    def blocks():
        found = find_blocks(build_resnet("resnet8", num_classes=3, stem="small", width=8))
        found += list(StackModel(nn.BatchNorm1d).blocks)
        if recomputed:  # which gives all blocks one code
            checkpoint_blocks(found)
        compile_forwards(found, backend=counting)
        return found

    first, second = blocks(), blocks()
    assert len({id(code_of(block)) for block in first}) == 4
    assert not {id(code_of(block)) for block in first} & {id(code_of(block)) for block in second}
    assert len({code_of(block).co_name for block in first + second}) == (8 if recomputed else 6)
    for found in (first, second):
        found[3](points()[0]).sum().backward()
        found[0](torch.randn(2, 8, 4, 4)).sum().backward()
    assert counting.graphs == 4


def test_sizes_that_differ_between_stages_are_no_symbols(counting):
    torch.manual_seed(0)
    model = build_resnet("resnet8", num_classes=3, stem="small", width=8)
    compile_forwards(find_blocks(model), backend=counting)
    for size in (4, 3):
        model(torch.randn(size, 3, 16, 16)).sum().backward()
    assert counting.symbols == [0, 0, 0, 1, 1, 1]  # the size of the batch, once it was seen to change


def test_a_forward_with_defaults_keywords_and_super_is_the_same_function(counting):
    class Keeps(nn.Linear):
        def forward(self, x, by=2.0, *, plus=1.0):
            return super().forward(x) * by + plus

    x = points()[0]
    for width in (3, 4, 5):
        block = Keeps(8, width)
        expected = block(x), block(x, 3.0, plus=0.0)
        compile_forwards([block], backend=counting)
        assert (block(x) - expected[0]).abs().max() < 1e-6
        assert (block(x, 3.0, plus=0.0) - expected[1]).abs().max() < 1e-6
    assert counting.graphs == 6


def test_weights_that_do_not_train_another_dtype_and_another_setting_are_other_kinds(counting):
    def changed(change):
        block = StackModel(blocks=1).blocks[0]
        change(block)
        return apply._kind(block)

    def negated(block):
        block.norm.elementwise_affine = False

    kinds = {
        changed(change)[0] for change in (lambda b: b, lambda b: b.requires_grad_(False), nn.Module.double, negated)
    }
    assert len(kinds) == 4
    assert changed(nn.Module.eval) == changed(nn.Module.train)


def test_a_storm_of_recompilations_in_a_deep_model_ends_at_the_limit_of_its_kind(counting, caplog):
    model = StackModel(blocks=48)
    compile_forwards(model.blocks, backend=counting, dynamic=False)
    made = []
    with torch.no_grad(), caplog.at_level(logging.WARNING, logger="torch._dynamo"):
        for size in range(2, 14):
            model(points()[0][:size])
            made.append(counting.graphs)
    assert made == [1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8, 8]
    assert caplog.text.count("torch._dynamo hit config.recompile_limit (8)") == 1


class Numbered(nn.Module):
    """A block that reads its place, as those of decoders with a cache do."""

    def __init__(self, place):
        super().__init__()
        self.place, self.first, self.second = place, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.second(self.first(x)) * self.place


def test_blocks_that_read_their_place_are_all_compiled_in_training_and_evaluation(counting, caplog):
    blocks = nn.Sequential(*(Numbered(place) for place in range(12)))
    compile_forwards(blocks, backend=counting)
    assert limit() == 8 + 4 * 11
    with caplog.at_level(logging.WARNING, logger="torch._dynamo"):
        for size in (24, 20, 16):
            blocks.train()(points()[0][:size]).sum().backward()
            with torch.no_grad():
                blocks.eval()(points()[0][:size])
    assert counting.graphs == 48  # training and evaluation, each for one size and then for any
    assert "recompile_limit" not in caplog.text
