"""How often sizes that change are compiled again: counted sequences, for blocks and for the whole model.

What torch does by itself is enough, so nothing is marked here: a dim that changes becomes a symbol when it first does, and
later sizes take the same graph. A mark beforehand would save one graph of two and slow all full batches down with it, and it
would not reach the blocks of a model, whose inputs are computed.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.nn import functional as F

from fasttrain.compiler.apply import compile_forwards
from fasttrain.models.bert import Bert
from fasttrain.models.bert_config import BertConfig
from fasttrain.models.resnet import build_resnet
from fasttrain.nn.blocks import find_blocks
from fasttrain.nn.recompute import checkpoint_blocks
from tests.compiler.counting import GRAPHS, fresh_compiler  # noqa: F401
from tests.stack import StackModel

# dynamo looks at it and hides the warning by itself, but not where warnings are errors. torch 2.14.1.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


def compiled(model, how, dynamic=None):
    modules = find_blocks(model) if how == "blocks" else [model]
    compile_forwards(modules, backend="counting", dynamic=dynamic)
    return model


def counted(model, make, sizes):
    """Graphs so far after a training step of each size; sizes in a list `[size]` are evaluated."""
    made = []
    for size in sizes:
        evaluates = isinstance(size, list)
        model.train(not evaluates)
        inputs = make(size[0] if evaluates else size)
        if evaluates:
            with torch.no_grad():
                model(*inputs)
        else:
            model(*inputs).sum().backward()
        made.append(len(GRAPHS))
    return made


def stack(norm=nn.LayerNorm, checkpointed=False):
    model = StackModel(norm, dropout=0.1)
    if checkpointed:
        checkpoint_blocks(model.blocks)
    return model


def rows(size):
    return (torch.randn(size, 8),)


def bert():
    config = BertConfig(vocabulary=50, width=16, layers=2, heads=2, feedforward=32, dropout=0.1, positions=64)
    return Bert(config, pooler=False)


def words(size):
    return (torch.randint(50, size),)


HOW = pytest.mark.parametrize("how", ["blocks", "model"])
STACKS = {
    "plain": {},
    "batch norm": {"norm": nn.BatchNorm1d},
    "checkpointed": {"checkpointed": True},
}


@HOW
@pytest.mark.parametrize("kind", STACKS.values(), ids=STACKS)
def test_a_short_last_batch_takes_one_graph_more_in_all_epochs_together(how, kind):
    assert counted(compiled(stack(**kind), how), rows, [8, 8, 8, 5] * 2) == [1, 1, 1, 2, 2, 2, 2, 2]


@HOW
def test_a_batch_of_one_is_a_graph_of_its_own_and_the_last(how):
    assert counted(compiled(stack(), how), rows, [8, 5, 1, 7, 2, 1]) == [1, 2, 3, 3, 3, 3]


@HOW
def test_an_evaluation_at_another_size_is_one_graph_and_its_short_batch_none(how):
    sizes = [8, 8, [16], 8, [16], [10], 8, 5]
    assert counted(compiled(stack(), how), rows, sizes) == [1, 1, 2, 2, 2, 2, 2, 3]


@HOW
def test_shares_of_ranks_that_differ_by_one_are_two_graphs(how):
    assert counted(compiled(stack(), how), rows, [5, 4, 5, 4, 3]) == [1, 2, 2, 2, 2]


@HOW
def test_lengths_that_grow_one_by_one_are_two_graphs(how):
    assert counted(compiled(bert(), how), words, [(4, length) for length in range(1, 13)]) == [1] + [2] * 11


@HOW
def test_lengths_in_buckets_are_two_graphs(how):
    lengths = [16, 32, 64, 16, 48, 64]
    assert counted(compiled(bert(), how), words, [(4, length) for length in lengths]) == [1, 2, 2, 2, 2, 2]


@HOW
def test_batch_and_length_are_a_graph_each_when_they_change_one_after_the_other(how):
    sizes = [(8, 16), (8, 24), (5, 24), (5, 16), (7, 40), (3, 8), (8, 16)]
    assert counted(compiled(bert(), how), words, sizes) == [1, 2, 3, 3, 3, 3, 3]


@HOW
def test_batch_and_length_that_change_together_are_one_graph_more_also_where_they_are_equal(how):
    assert counted(compiled(bert(), how), words, [(8, 8), (5, 5), (5, 7), (8, 12), (16, 16), (7, 5)]) == [
        1,
        2,
        2,
        2,
        2,
        2,
    ]


@HOW
def test_a_long_run_with_everything_that_varies_stays_below_the_limit_of_torch(how):
    """Two dims, a batch of one, evaluation at other sizes: six graphs, whatever comes after."""
    sizes = [(8, 16), (8, 24), (5, 24), (1, 20), [(16, 24)], [(9, 30)], [(1, 18)]]
    model = compiled(bert(), how)
    assert counted(model, words, sizes) == [1, 2, 3, 4, 5, 5, 6]
    again = [(samples, length) for samples in (8, 7, 1) for length in (12, 33, 47)]
    assert set(counted(model, words, [*again, *([size] for size in again)])) == {6}


def test_pictures_of_other_sizes_are_two_graphs_and_another_batch_size_one_more():
    def pictures(size):
        return (torch.randn(size[0], 3, *size[1:]),)

    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
    sizes = [(4, 16, 16), (4, 24, 24), (4, 16, 32), (3, 16, 32), (2, 33, 17), (4, 16, 16)]
    # torch 2.11 takes the two dims of the last picture but one for another graph.
    assert counted(compiled(model, "model"), pictures, sizes) in ([1, 2, 2, 3, 3, 3], [1, 2, 2, 3, 4, 4])


@HOW
def test_a_resnet_compiles_each_kind_of_block_once_more_for_a_short_batch(how):
    model = compiled(build_resnet("resnet8", num_classes=3, stem="small", width=8), how)
    kinds = 3 if how == "blocks" else 1
    made = counted(model, lambda size: (torch.randn(size, 3, 8, 8),), [8, 8, 8, 5] * 2)
    assert made == [kinds] * 3 + [2 * kinds] * 5


class Attention(nn.Module):
    """Attention with a mask or without."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x, mask=None):
        samples, length, _ = x.shape
        q, k, v = self.project(x).view(samples, length, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def test_attention_with_padding_masks_takes_a_graph_for_each_dim():
    def masked(size):
        return torch.randn(*size, 8), torch.ones(size[0], 1, 1, size[1], dtype=torch.bool)

    sizes = [(4, 8), (4, 9), (3, 10), (8, 8), (5, 5), (4, 8)]
    assert counted(compiled(Attention(), "model"), masked, sizes) == [1, 2, 3, 3, 3, 3]


def test_a_mask_that_is_there_or_not_is_two_graphs():
    def perhaps(masked):
        return torch.randn(4, 8, 8), torch.ones(4, 1, 1, 8, dtype=torch.bool) if masked else None

    assert counted(compiled(Attention(), "model"), perhaps, [True, False, True, False]) == [1, 2, 2, 2]


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.by = nn.Linear(8, 8), 1.0

    def forward(self, x, by=None):
        return self.linear(x) * (self.by if by is None else by)


@pytest.mark.parametrize("values", [[3, 4, 5, 6, 7, 1, 0], [0.3, 0.4, 0.5, 1.0, 2.0, 0.0, 0.7]])
def test_numbers_as_arguments_become_symbols(values):
    model = compiled(Scaled(), "model")
    assert counted(model, lambda by: (*rows(4), by), values) == [1] + [2] * (len(values) - 1)


# ---- what does not end, and is told by the run


def test_whole_numbers_that_a_module_keeps_are_compiled_one_by_one():
    class Counts(Scaled):
        def forward(self, x):
            self.by = int(self.by) + 1
            return self.linear(x) * self.by

    assert counted(compiled(Counts(), "model"), rows, [4] * 12) == [1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8, 8]


def test_so_are_lists_of_another_length():
    class Listed(Scaled):
        def forward(self, pictures):
            return self.linear(torch.stack(pictures)).sum(0)

    model = compiled(Listed(), "model")
    assert counted(model, lambda n: ([torch.randn(4, 8) for _ in range(n)],), range(1, 12)) == [*range(1, 9), 8, 8, 8]


def test_with_dynamic_false_so_is_every_size():
    model = compiled(nn.Linear(8, 8), "model", dynamic=False)
    assert counted(model, rows, range(2, 14)) == [1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8, 8]


def test_with_dynamic_true_one_graph_takes_every_size_but_one():
    assert counted(compiled(nn.Linear(8, 8), "model", dynamic=True), rows, [9, 5, 7, 12, 1]) == [1, 1, 1, 1, 2]


@pytest.mark.slow
def test_inductor_compiles_as_often():
    def inductor(graph, inputs):
        GRAPHS.append(graph)
        return lookup_backend("inductor")(graph, inputs)

    torch._dynamo.register_backend(inductor, name="counting_inductor")
    model = bert()
    compile_forwards(find_blocks(model), backend="counting_inductor")
    sizes = [(8, 16), (8, 24), (5, 24), (5, 16), (7, 40), (3, 8), (8, 16)]
    assert counted(model, words, sizes) == [1, 2, 3, 3, 3, 3, 3]
