"""What compiled code keeps for backward under each kind of checkpointing, and what it computes again: bytes and FLOPs."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fasttrain.compiler.apply import compile_forwards
from fasttrain.models.bert import BertForMaskedLM
from fasttrain.models.bert_config import BertConfig
from fasttrain.models.resnet import build_resnet
from fasttrain.nn.activations import kept_bytes
from fasttrain.nn.blocks import find_blocks
from fasttrain.nn.budget import set_budget
from fasttrain.nn.recompute import checkpoint_blocks
from fasttrain.nn.selective import keep_by_cost

# dynamo looks at it and hides the warning by itself, but not where warnings are errors. torch 2.14.1.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


class Flops(TorchDispatchMode):
    """FLOPs of matrix products and convolutions, in compiled code as well."""

    number = 0

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.number += count(*args, **(kwargs or {}), out_val=result)
        return result


def bert():
    sizes = {"vocabulary": 40, "width": 32, "layers": 4, "heads": 2, "feedforward": 128, "positions": 32}
    return BertForMaskedLM(BertConfig(**sizes, dropout=0.0)), torch.randint(3, 40, (4, 32))


def resnet():
    return build_resnet("resnet18", num_classes=5, stem="small", width=8), torch.randn(8, 3, 16, 16)


MODELS = {"BERT": bert, "ResNet": resnet}
RULES = {"full": None, "selective": keep_by_cost()}


@functools.cache
def counted(name, compile, how):
    """Bytes held at the end of a forward, and FLOPs of forward and backward. `compile`: blocks, model or None."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model, x = MODELS[name]()
    blocks = find_blocks(model)
    units = [model] if compile == "model" else blocks
    if how in RULES:
        checkpoint_blocks(blocks, keeps=RULES[how])
    elif how is not None:
        set_budget(units, how)
    if compile is not None:
        compile_forwards(units, backend="aot_eager")
    model(x).sum().backward()
    kept = kept_bytes(lambda: model(x))
    with Flops() as flops:
        model(x).sum().backward()
    return kept, flops.number


# KiB held, and FLOPs relative to no checkpointing, of: none, budget 0.5, full.
FIGURES = {
    ("BERT", "blocks"): [(1139, 1.0), (615, 1.053), (167, 1.318)],
    ("BERT", "model"): [(1139, 1.0), (564, 1.020), (103, 1.318)],
    ("ResNet", "blocks"): [(1155, 1.0), (842, 1.004), (362, 1.328)],
    ("ResNet", "model"): [(1156, 1.0), (568, 1.001), (362, 1.328)],
}


@pytest.mark.parametrize(("name", "compile"), FIGURES, ids=" ".join)
def test_half_a_budget_lies_between_nothing_recomputed_and_all_of_it_in_bytes_and_in_flops(name, compile):
    none, half, full = (counted(name, compile, how) for how in (None, 0.5, "full"))
    assert none[0] > half[0] > full[0]
    assert none[1] < half[1] < full[1]
    found = [(kept / 1024, flops / none[1]) for kept, flops in (none, half, full)]
    for (kib, factor), (kib_told, factor_told) in zip(found, FIGURES[name, compile], strict=True):
        assert kib == pytest.approx(kib_told, rel=0.02)
        assert factor == pytest.approx(factor_told, rel=0.01)


@pytest.mark.parametrize("how", RULES)
@pytest.mark.parametrize("name", MODELS)
def test_what_checkpoints_keep_in_compiled_blocks_is_what_they_keep_in_eager_ones(name, how):
    eager, compiled = counted(name, None, how), counted(name, "blocks", how)
    assert compiled == eager
    assert compiled[0] < 0.4 * counted(name, None, None)[0]
    if name == "ResNet" and how == "selective":
        assert compiled[0] > counted(name, "blocks", "full")[0]
        assert compiled[1] < counted(name, "blocks", "full")[1]


@pytest.mark.parametrize("how", RULES)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_compiled_as_a_whole_keeps_no_more_than_its_checkpoints_do_in_eager_code(name, how):
    eager, compiled = counted(name, None, how), counted(name, "model", how)
    assert compiled[0] <= eager[0] + 64  # a number beside each scale of the batch
    assert compiled[1] == eager[1]
