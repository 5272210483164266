"""Reported faults of recomputation: dropout, batch statistics, several ranks and frozen layers, each by its case."""

# The names of the cases are written in capitals.

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from fasttrain import Data, Trainer
from fasttrain.compiler.apply import compile_forwards
from fasttrain.nn.budget import set_budget
from fasttrain.nn.recompute import checkpoint_blocks
from fasttrain.nn.selective import keep_by_cost, keep_operations
from tests.helpers import QUIET, Recorder, largest_difference, points, state
from tests.ranks import run_ranks
from tests.stack import Stack, StackModel, gradients

RULES = {"full": None, "by cost": keep_by_cost(), "draws kept": keep_operations(["aten.bernoulli", "matmuls"])}
CHECKPOINTING: list[Any] = [None, "full", "selective", {"name": "selective", "keep": "matmuls"}]


class Dropped(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.5) * x


@pytest.mark.parametrize("rule", RULES)
def test_AC_RNG_1_the_mask_of_the_gradient_is_that_of_the_output(rule):
    block = Dropped()
    checkpoint_blocks([block], keeps=RULES[rule])
    x = torch.ones(1000, requires_grad=True)
    output = block(x)
    torch.rand(100)
    F.dropout(torch.ones(50), 0.5)
    output.sum().backward()
    assert 400 < (output == 0).sum() < 600
    assert ((output == 0) != (x.grad == 0)).float().mean().item() == 0.0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("how", [*RULES, "budget 0", "budget 0.5"])
def test_AC_RNG_3_compiled_recomputation_has_the_mask_and_values_of_eager_checkpointing(how):
    def block():
        torch.compiler.reset()
        torch.manual_seed(0)
        return StackModel(dropout=0.5).blocks[0]

    results = []
    for compiled in (False, True):
        each = block()
        if compiled and how.startswith("budget"):
            set_budget([each], float(how.split()[1]))
        else:
            checkpoint_blocks([each], keeps=RULES.get(how))
        if compiled:
            compile_forwards([each], backend="aot_eager")
        x = points()[0].requires_grad_()
        torch.manual_seed(7)
        each(x).square().sum().backward()
        results.append({"x": x.grad, **gradients(each)})
    eager, compiled = results
    assert all(torch.equal(eager[name] == 0, compiled[name] == 0) for name in eager)
    assert (eager["contract.weight"] != 0).any()
    assert max(((eager[n] - compiled[n]).abs() / (1 + eager[n].abs())).max().item() for n in eager) < 1e-6


@pytest.mark.parametrize("rule", RULES)
def test_BN_STATS_1_running_statistics_move_once(rule):
    """0.1 x 2.5; two forwards would give 0.475."""

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(1, momentum=0.1), nn.Linear(1, 1)

        def forward(self, x):
            return self.linear(self.norm(x))

    block = Normed()
    checkpoint_blocks([block], keeps=RULES[rule])
    block(torch.tensor([[1.0], [2.0], [3.0], [4.0]])).sum().backward()
    assert block.norm.running_mean.item() == 0.25
    assert block.norm.num_batches_tracked.item() == 1


@pytest.mark.parametrize("checkpointing", CHECKPOINTING, ids=str)
def test_FROZEN_1_a_frozen_first_layer_leaves_the_gradients_of_the_rest(checkpointing):
    class Frozen(Stack):
        def build_model(self):
            model = super().build_model()
            model.embed.requires_grad_(False)
            model.blocks[0].requires_grad_(False)
            return model

    trainer = Frozen(batch_size=24, steps=1, activation_checkpointing=checkpointing, **QUIET)
    x, y = points()
    loss = trainer.compute_loss((x, y))
    assert loss.requires_grad
    loss.backward()
    plain = Frozen(batch_size=24, steps=1, **QUIET)
    plain.compute_loss((x, y)).backward()
    assert len(gradients(trainer.model)) == 8  # one block and the head
    assert largest_difference(gradients(trainer.model), gradients(plain.model)) == 0.0


# ---- two ranks


class Twice(nn.Module):
    """A checkpointed layer that is run twice, and two heads of which one reaches the loss."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(StackModel().blocks[0] for _ in range(2))
        self.head, self.other = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        for block in (self.blocks[0], self.blocks[1], self.blocks[0]):
            x = block(x)
        return self.head(x), self.other(x)


class TwoHeads(Trainer):
    def build_data(self):
        return Data(train=points())

    def build_model(self):
        return Twice()

    def loss(self, output, batch):
        return F.cross_entropy(output[0], batch[1])


class Means(Trainer):
    """Two samples, of mean 2.5 and 3.5, one for each rank; the metric is the running mean."""

    def build_data(self):
        rows = (torch.tensor([[1.0], [4.0], [2.0], [5.0]]), torch.zeros(4))
        return Data(train=rows, evaluation=rows, shuffle=False)

    def build_model(self):
        return nn.Sequential(nn.BatchNorm1d(1, momentum=0.1), nn.Linear(1, 1))

    def loss(self, output, batch):
        return output.mean()

    def metrics(self, output, batch):
        return {"running_mean": self.model[0].running_mean.expand(output.shape[0]).mean()}


class TwoForwards(Stack):
    norm = nn.BatchNorm1d

    def compute_loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.model(x), y) + F.cross_entropy(self.model(-x), y)


def ddp(**settings: Any) -> dict[str, Any]:
    return {"name": "ddp", **settings}


def on_two_ranks(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for checkpointing in CHECKPOINTING:
        for static in (False, True):
            trainer = TwoHeads(
                batch_size=8,
                steps=3,
                optimizer="sgd",
                activation_checkpointing=checkpointing,
                data_parallel=ddp(static_graph=static),
                **QUIET,
            )
            trainer.fit()
            found[f"two heads {checkpointing} {static}"] = state(trainer)
        trainer = TwoForwards(batch_size=8, steps=2, optimizer="sgd", activation_checkpointing=checkpointing, **QUIET)
        trainer.fit()
        found[f"two forwards {checkpointing}"] = state(trainer)
    settings = {"batch_size": 4, "log": {"every": 1}, "evaluate": {"every": 1}}
    means = Means(**settings, steps=1, run={"dir": folder, "name": "means", "id": "a"}, observers=[seen := Recorder()])
    means.fit()
    found["logged"] = seen.evaluations[-1]["metrics"]["running_mean"]
    found["after"] = means.model[0].running_mean.item()
    found["rank"] = dist.get_rank()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> tuple[list[dict[str, Any]], str]:
    folder = str(tmp_path_factory.mktemp("runs"))
    return run_ranks(2, on_two_ranks, folder, timeout_s=120), folder


@pytest.mark.ranks
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING, ids=str)
def test_AC_DDP_1_and_2_layers_checkpointed_twice_and_an_unused_head_train_as_on_one_process(
    ranks, checkpointing, static
):
    one = TwoHeads(batch_size=8, steps=3, optimizer="sgd", **QUIET)
    before = state(one)
    one.fit()
    for found in ranks[0]:
        # float32 sums in another order.
        assert largest_difference(found[f"two heads {checkpointing} {static}"], state(one)) < 1e-6
    assert largest_difference(before, state(one)) > 1e-3
    assert torch.equal(before["other.weight"], state(one)["other.weight"])


@pytest.mark.ranks
@pytest.mark.parametrize("checkpointing", CHECKPOINTING[1:], ids=str)
def test_BN_STATS_3_two_forwards_before_one_backward_train_as_without_checkpointing(ranks, checkpointing):
    for found in ranks[0]:
        plain = found["two forwards None"]
        assert largest_difference(found[f"two forwards {checkpointing}"], plain) == 0.0
        assert plain["blocks.0.norm.num_batches_tracked"].item() == 4


@pytest.mark.ranks
def test_BN_STATS_2_all_ranks_evaluate_and_save_the_same_statistics(ranks):
    found, folder = ranks
    assert [each["after"] for each in found] == [0.25, 0.25]  # by themselves 0.25 and 0.35
    assert [each["logged"] for each in found] == [0.25, 0.25]
    again = Means(batch_size=4, steps=1, **QUIET)
    again.restore(Path(folder, "means", "a", "checkpoints", "step-1"))
    assert again.model[0].running_mean.item() == 0.25
    assert again.evaluate()["running_mean"] == 0.25
