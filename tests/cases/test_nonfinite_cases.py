"""Reported faults of steps that are not finite, each kind by the name of its case."""

# The names of the cases are written in capitals.

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from fasttrain import Data, Trainer
from fasttrain.errors import NonFinite
from tests.helpers import QUIET, Mlp, Recorder, largest_difference, points, state
from tests.ranks import run_ranks

SGD = {"name": "sgd", "lr": 1.0, "momentum": 0.0}
OPTIMIZERS = [{"name": n, "lr": 0.1, "fused": fused} for n in ("sgd", "adamw") for fused in (True, False)]


class Poisoned(Mlp):
    """On the last rank, the loss of the bad step is not finite."""

    bad = 2
    value = math.nan

    def loss(self, output, batch):
        loss = super().loss(output, batch)
        ours = self.world.rank == self.world.size - 1
        return loss * self.value if ours and self.model.training and self.step + 1 == self.bad else loss


class Infinite(Poisoned):
    value = math.inf


# What an infinite gradient meets: the policy alone, or loss scaling, which refuses such steps by itself.
POLICIES: dict[str, dict[str, Any]] = {
    "skip": {"nonfinite": "skip"},
    "skip, clipped": {"nonfinite": "skip", "gradient_clipping": "norm", "schedule": "linear"},
    "skip, bf16": {"nonfinite": "skip", "precision": "bf16"},
    "skip, K=2": {"nonfinite": "skip", "accumulation": {"name": "microbatches", "num": 2}},
    "fp16": {"precision": {"name": "fp16", "init_scale": 1024.0}},
    "fp16, skip": {"precision": {"name": "fp16", "init_scale": 1024.0}, "nonfinite": "skip", "schedule": "linear"},
    "fp16, skip, clipped": {
        "precision": {"name": "fp16", "init_scale": 1024.0},
        "nonfinite": "skip",
        "gradient_clipping": "norm",
        "accumulation": {"name": "microbatches", "num": 3},
    },
}


def outcome(cls: type[Poisoned], **settings: Any) -> dict[str, Any]:
    watcher = Recorder()
    trainer = cls(batch_size=8, steps=5, observers=[watcher], **settings, **QUIET)
    summary = trainer.fit()
    found = {"weights": state(trainer), "summary": (summary["steps"], summary["refused_steps"])}
    found["scale"] = [record.get("loss_scale") for record in watcher.steps]
    found["refused"] = [record["refused_steps"] for record in watcher.steps]
    return found


def refusal(cls: type[Poisoned], **settings: Any) -> tuple[str, dict[str, Any]]:
    trainer = cls(batch_size=8, steps=5, nonfinite="raise", **settings, **QUIET)
    try:
        trainer.fit()
    except NonFinite as error:
        return str(error), state(trainer)
    return "nothing was said", state(trainer)


def on_two_ranks() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for policy, settings in POLICIES.items():
        for cls in (Poisoned, Infinite):
            for optimizer in OPTIMIZERS:
                key = f"{policy} {cls.__name__} {optimizer}"
                found[key] = outcome(cls, **settings, optimizer=optimizer)
    found["raise"] = refusal(Poisoned)
    found["masked"] = masked_on_one_rank()
    found["rank"] = dist.get_rank()
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(2, on_two_ranks, timeout_s=60)


def check(found: dict[str, Any], policy: str) -> None:
    assert found["summary"] == (5, 1)
    refused = [0, 1, 1, 1, 1]
    assert found["refused"] == refused
    assert found["scale"] == ([1024.0, 512.0, 512.0, 512.0, 512.0] if "fp16" in policy else [None] * 5)


@pytest.mark.ranks
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("cls", [Poisoned, Infinite])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_NONFINITE_1_a_bad_loss_on_one_rank_is_skipped_by_both(ranks, policy, cls, optimizer):
    """NONFINITE-3 as far as replicas go: the infinity is on one rank, both scales halve, neither steps."""
    zero, one = (found[f"{policy} {cls.__name__} {optimizer}"] for found in ranks)
    for found in (zero, one):
        check(found, policy)
    assert all(torch.equal(zero["weights"][name], one["weights"][name]) for name in zero["weights"])
    assert all(value.isfinite().all() for value in zero["weights"].values())
    # Four steps were taken: those of one process that skips the same step.
    alone = outcome(cls, **POLICIES[policy], optimizer=optimizer)
    check(alone, policy)
    tolerance = 1e-6 if "16" not in policy else 2e-3
    if optimizer["name"] == "sgd":  # Adam blows rounding up where gradients are near 0
        assert largest_difference(zero["weights"], alone["weights"]) < tolerance


@pytest.mark.ranks
def test_NONFINITE_1_raising_ends_both_ranks_and_names_the_step(ranks):
    (first, weights), (second, others) = (found["raise"] for found in ranks)
    for text in (first, second):
        assert text.startswith("nonfinite=raise: a gradient of step 2 was infinite or not a number; that update was")
    assert largest_difference(weights, others) == 0.0
    one_step = Mlp(batch_size=8, steps=1, **QUIET)
    one_step.fit()
    assert largest_difference(weights, state(one_step)) < 1e-5


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("policy", ["skip", "fp16"])
def test_NONFINITE_3_a_skipped_step_is_as_if_its_batch_had_not_been(policy, optimizer):
    """Optimizer state included: what follows is bit for bit a training without that batch."""

    class Without(Mlp):
        def train_step(self, batch):
            if self.step + 1 == 2 and not getattr(self, "left_out", False):
                self.left_out = True
                from fasttrain.trainer import StepInfo

                self.step += 1
                return StepInfo(self.step, torch.zeros(()))
            return super().train_step(batch)

    settings = {**POLICIES[policy], "optimizer": optimizer, "batch_size": 8, "steps": 5}
    skipped, without = Poisoned(**settings, **QUIET), Without(**settings, **QUIET)
    skipped.fit()
    without.fit()
    if policy == "skip":
        assert largest_difference(state(skipped), state(without)) == 0.0
    else:  # with another scale after the overflow: a power of two, and float16 products see it by underflow alone
        assert largest_difference(state(skipped), state(without)) < 1e-4
    for a, b in zip(skipped.model.parameters(), without.model.parameters(), strict=True):
        theirs = without.optimizer.state[b]
        for key, value in skipped.optimizer.state[a].items():
            if isinstance(value, torch.Tensor) and key == "step":
                assert torch.equal(value, theirs[key])


# ---- masked labels


class Masked(Trainer):
    """Four samples: two without a label, two with; then two without any. Labels of -100 do not count."""

    labels: tuple[int, ...] = (-100, -100, 1, 3, -100, -100, -100, -100)

    def build_data(self):
        x, _ = points(8)
        return Data(train=(x, torch.tensor(self.labels)), shuffle=False)

    def build_model(self):
        return torch.nn.Linear(8, 4)

    def count(self, batch):
        return (batch[1] != -100).sum()

    def loss(self, output, batch):
        return F.cross_entropy(output, batch[1], ignore_index=-100)


class MaskedCountedOnHost(Masked):
    def count(self, batch):
        return int((batch[1] != -100).sum())


class MaskedByStep(Masked):
    """The same loss, but nothing else: two samples with labels."""

    labels = (1, 3)

    def build_data(self):
        x, _ = points(8)
        return Data(train=(x[2:4], torch.tensor(self.labels)), shuffle=False)


MASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"gradient_clipping": {"name": "norm", "max_norm": 0.5}},
    "skip": {"nonfinite": "skip"},
    "raise": {"nonfinite": "raise"},
    "fp16": {"precision": {"name": "fp16", "init_scale": 1024.0}},
    "bf16, clipped": {"precision": "bf16", "gradient_clipping": {"name": "norm", "max_norm": 0.5}},
    "fp16, clipped, skip": {
        "precision": {"name": "fp16", "init_scale": 1024.0},
        "gradient_clipping": {"name": "norm", "max_norm": 0.5},
        "nonfinite": "skip",
    },
}


def two_windows(
    cls: type[Masked], **settings: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Records, weights after each step, and the summary."""
    watcher, weights = Recorder(), []

    class Watched(cls):
        def train_step(self, batch):
            info = super().train_step(batch)
            weights.append(state(self))
            return info

    settings = {"batch_size": 4, "steps": 2, "schedule": "linear", "optimizer": SGD, **settings}
    summary = Watched(observers=[watcher], **settings, **QUIET).fit()
    return watcher.steps, weights, summary


@pytest.mark.parametrize("cls", [Masked, MaskedCountedOnHost])
@pytest.mark.parametrize("variant", MASKED)
@pytest.mark.parametrize("num", [1, 2, 4])
@pytest.mark.parametrize(
    "optimizer", [SGD, {"name": "adamw", "lr": 0.1}, {"name": "adamw", "lr": 0.1, "fused": False}], ids=str
)
def test_NONFINITE_4_masked_microbatches_count_nothing_and_a_masked_window_is_no_step(cls, variant, num, optimizer):
    settings = {**MASKED[variant], "optimizer": optimizer}
    steps, weights, summary = two_windows(cls, accumulation={"name": "microbatches", "num": num}, **settings)
    only, only_weights, _ = two_windows(MaskedByStep, batch_size=2, **settings)
    assert steps[0]["loss"] == pytest.approx(only[0]["loss"], rel=1e-6)
    # Microbatches round to float16 each by itself.
    rounding = 1e-3 if "16" in variant else 1e-6
    assert steps[0]["grad_norm"] == pytest.approx(only[0]["grad_norm"], rel=rounding)
    assert largest_difference(weights[0], only_weights[0]) < rounding
    assert largest_difference(weights[0], weights[1]) == 0.0
    assert (summary["steps"], summary["refused_steps"]) == (2, 1)
    assert [record["lr"] for record in steps] == pytest.approx([steps[0]["lr"]] * 2)
    assert steps[1]["loss"] is None
    assert steps[1]["grad_norm"] is None
    assert summary["final_loss"] is None


def test_NONFINITE_4_no_nan_stands_in_any_log(tmp_path, capsys):
    settings = {"batch_size": 4, "steps": 2, "accumulation": {"name": "microbatches", "num": 2}, "log": {"every": 1}}
    run = {"dir": str(tmp_path), "name": "a", "id": "b"}
    Masked(**settings, gradient_clipping="norm", run=run).fit()
    steps = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("step", "end"))]
    assert len(steps) == 3
    assert not any("nan" in line for line in steps)
    for name in ("metrics.jsonl", "summary.json"):
        text = (tmp_path / "a" / "b" / name).read_text().replace(str(tmp_path), "")
        assert "step" in text
        assert "nan" not in text.lower()
    lines = [json.loads(line) for line in (tmp_path / "a" / "b" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"] is None) for line in lines if "loss" in line] == [(1, False), (2, True)]


def test_NONFINITE_4_evaluation_leaves_masked_batches_out():
    class Evaluated(Masked):
        def build_data(self):
            return Data(train=points(8), evaluation=Masked.build_data(self).train)

        def metrics(self, output, batch):
            known = batch[1] != -100
            return {"accuracy": (output.argmax(1) == batch[1])[known].float().mean()}

    trainer = Evaluated(batch_size=2, steps=1, **QUIET)
    found = trainer.evaluate()
    x, y = trainer.data.evaluation
    output = trainer.model(x[2:4])
    assert found["loss"] == pytest.approx(F.cross_entropy(output, y[2:4]).item(), rel=1e-6)
    assert found["accuracy"] == pytest.approx((output.argmax(1) == y[2:4]).float().mean().item())


class MaskedOnOneRank(Masked):
    """Rank 0 holds the masked samples of both windows' first halves; the second window has none at all."""

    def build_data(self):
        x, _ = points(8)
        return Data(train=(x, torch.tensor(self.labels)), shuffle=False)


def masked_on_one_rank() -> dict[str, Any]:
    found = {}
    for variant, settings in MASKED.items():
        for num in (1, 2):
            accumulation = {"name": "microbatches", "num": num}
            steps, weights, summary = two_windows(MaskedOnOneRank, accumulation=accumulation, **settings)
            found[variant, num] = (steps, weights, summary["refused_steps"])
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("variant", MASKED)
@pytest.mark.parametrize("num", [1, 2])
def test_NONFINITE_4_a_rank_with_nothing_but_masked_labels_takes_part(ranks, variant, num):
    only, only_weights, _ = two_windows(MaskedByStep, batch_size=2, **MASKED[variant])
    tolerance = 1e-6 if "16" not in variant else 1e-3
    for found in ranks:
        steps, weights, refused = found["masked"][variant, num]
        assert refused == 1
        assert steps[0]["loss"] == pytest.approx(only[0]["loss"], rel=1e-3 if "16" in variant else 1e-6)
        assert largest_difference(weights[0], only_weights[0]) < tolerance
        assert largest_difference(weights[0], weights[1]) == 0.0
        assert steps[1]["loss"] is None
