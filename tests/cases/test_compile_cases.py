"""Reported faults of compiled code under checkpointing, sharding and averaging, each by the name of its case."""

# The names of the cases are written in capitals.

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fasttrain import Data
from fasttrain.compiler.apply import compile_forwards
from fasttrain.core.strategy import Strategy
from fasttrain.nn.recompute import checkpoint_blocks
from fasttrain.registry import register
from tests.helpers import QUIET, Recorder, largest_difference, points
from tests.ranks import run_ranks
from tests.stack import Restless, Stack, StackModel, gradients

# dynamo looks at it and hides the warning by itself, but not where warnings are errors. torch 2.14.1.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
COMPILE = {name: {"name": name, "backend": "aot_eager", "reference_steps": 0} for name in ("blocks", "model")}


@pytest.fixture(autouse=True)
def afresh():
    torch.compiler.reset()


class Perceptron(nn.Module):
    """Two blocks of two layers."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.0), nn.Linear(16, 8)) for _ in range(2)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("compiled", ["inside", "outside", "whole"])
@pytest.mark.parametrize("model", [Perceptron, StackModel])
def test_AC_COMPILE_1_checkpointing_around_compiled_blocks_and_inside_of_them(model, compiled):
    torch.manual_seed(0)
    plain, checkpointed = model(), model()
    checkpointed.load_state_dict(plain.state_dict())
    if compiled == "inside":
        compile_forwards(checkpointed.blocks, backend="aot_eager")
    checkpoint_blocks(checkpointed.blocks)
    if compiled != "inside":
        compile_forwards([checkpointed] if compiled == "whole" else checkpointed.blocks, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    x = points()[0]
    for each in (plain, checkpointed):
        for _ in range(2):
            each(x).square().mean().backward()
    # The input of the perceptron wants no gradient, that of its second block does.
    graphs = 2 if model is Perceptron and compiled != "whole" else 1
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert largest_difference(gradients(plain), gradients(checkpointed)) < 1e-6


# ---- sharding, checkpointing and compiling


class Sharded(Strategy):
    """torch's fully_shard by hand: each block, then the rest."""

    slot, name = "data_parallel", "sharded_by_hand"

    def model(self, model):
        from torch.distributed.fsdp import fully_shard

        for block in self.context.blocks(model, self.name):
            fully_shard(block)
        fully_shard(model)
        return model


def trained(data_parallel, orders):
    """This rank's losses of three steps for each listing of the slots, and which of them are in force, in order."""
    torch.set_num_threads(1)
    if data_parallel == Sharded.name:
        register("data_parallel", Sharded.name)(Sharded)
    settings = {"data_parallel": data_parallel, "activation_checkpointing": "full", "compile": COMPILE["blocks"]}
    results = []
    for order in orders:
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        slots = {slot: settings[slot] for slot in order}
        trainer = Stack(batch_size=24, steps=3, optimizer="adamw", **slots, **QUIET)
        is_sharded = {isinstance(parameter, DTensor) for parameter in trainer.model.parameters()}
        assert is_sharded == {data_parallel == Sharded.name}
        batches = trainer.feed.training(trainer.task, trainer.plan)
        # Step by step: a log would read the norm of the gradients, which is sharded, too.
        losses = [trainer.train_step(next(batches)).loss.item() for _ in range(3)]
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        results.append((losses, list(trainer.plan.strategies), graphs))
    return results


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("data_parallel", [Sharded.name, "ddp"])
def test_AC_COMPILE_3_sharding_checkpointing_and_compiling_whatever_the_order_in_the_config(data_parallel):
    plain = Recorder()
    Stack(batch_size=24, steps=3, optimizer="adamw", **QUIET, observers=[plain]).fit()
    expected = [record["loss"] for record in plain.steps]
    orders = list(itertools.permutations(["data_parallel", "activation_checkpointing", "compile"]))
    ranks = run_ranks(2, trained, data_parallel, orders, timeout_s=240.0)
    assert [len(results) for results in ranks] == [6, 6]
    for (one, slots, graphs), (other, *same) in zip(*ranks, strict=True):
        assert same == [slots, graphs]
        assert [slot for slot in slots if slot != "optimizer"] == [
            "activation_checkpointing",
            "compile",
            "data_parallel",
        ]
        assert graphs == 1
        assert [sum(pair) / 2 for pair in zip(one, other, strict=True)] == pytest.approx(expected, abs=1e-5)


# ---- training and evaluation


@pytest.mark.parametrize("how", COMPILE)
def test_COMPILE_MODE_1_flags_of_training_follow_and_evaluations_are_deterministic(how):
    seen = []

    class Dropped(Restless):
        def build_data(self):
            return Data(train=points(), evaluation=points(16, seed=4))

        def loss(self, output, batch):
            seen.append((self.model.training, self.model.blocks[0].dropout.training, len(output)))
            return super().loss(output, batch)

        def evaluate(self):
            twice = [super(Dropped, self).evaluate() for _ in range(2)]
            assert twice[0] == twice[1]
            return twice[0]

    trainer = Dropped(batch_size=8, steps=6, compile=COMPILE[how], **QUIET)
    trainer.fit()
    assert [flags for *flags, _ in seen if any(flags)] == [[True, True]] * 6
    assert [flags for *flags, _ in seen if not any(flags)] == [[False, False]] * 8  # two evaluations, each twice
    assert trainer.model.training
    assert trainer.model.blocks[0].dropout.training
    torch.manual_seed(0)
    x = points()[0]
    assert (trainer.model(x) - trainer.model(x)).abs().max() > 1e-3


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", COMPILE)
def test_COMPILE_MODE_2_weights_changed_in_place_and_averages_swapped_in_and_out_are_what_is_evaluated(how, backend):
    settings = {"compile": COMPILE[how] | {"backend": backend}, "weight_averaging": {"name": "ema", "decay": 0.5}}
    trainer = Stack(batch_size=8, steps=4, optimizer={"name": "sgd", "lr": 0.5}, **settings, **QUIET)
    trainer.fit()
    model, compiled = trainer.model.eval(), trainer.plan.strategies["compile"].compiled
    x = points()[0]

    def evaluated():
        with torch.no_grad():
            found = model(x)
            with compiled.eager():
                assert (found - model(x)).abs().max() < 1e-6
        return found

    trained = evaluated()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    changed = evaluated()
    with trainer.evaluating():
        averaged = evaluated()
    back = evaluated()
    assert torch.equal(back, changed)
    assert all(
        (one - other).abs().max() > 1e-3 for one, other in itertools.combinations([trained, changed, averaged], 2)
    )
