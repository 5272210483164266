"""Reported faults of learning rates that count the wrong thing, each kind by the name of its case."""

# The names of the cases are written in capitals.

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fasttrain import Data
from fasttrain.registry import find
from tests.helpers import QUIET, Mlp, Recorder, largest_difference, points, state
from tests.ranks import run_ranks

THIRDS = [2 / 3, 1 / 3, 0.0]
SCHEDULES: dict[str, dict[str, Any]] = {
    "linear": {"warmup": 2, "final": 0.1},
    "cosine": {"warmup": 0.25},
    "constant": {"warmup": 3},
    "wsd": {"warmup": 2, "decay": 4},
    "one_cycle": {},
}


def rates(cls: type[Mlp] = Mlp, **settings: Any) -> list[float]:
    """The rate after each step."""
    watcher = Recorder()
    settings = {"batch_size": 8, "optimizer": {"name": "sgd", "lr": 1.0}, "schedule": "linear", **settings}
    cls(**settings, observers=[watcher], **QUIET).fit()
    return [record["lr"] for record in watcher.steps]


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "K=2": {"accumulation": {"name": "microbatches", "num": 2}},
    "K=4": {"accumulation": {"name": "microbatches", "num": 4}},
    "one sample at a time": {"accumulation": {"name": "microbatches", "size": 1}},
    "adamw": {"optimizer": {"name": "adamw", "lr": 1.0}},
    "unfused": {"optimizer": {"name": "sgd", "lr": 1.0, "fused": False}},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": {"name": "fp16", "init_scale": 1024}},
    "fp16 unfused": {
        "precision": {"name": "fp16", "init_scale": 1024},
        "optimizer": {"name": "adamw", "lr": 1.0, "fused": False},
    },
    "clipped, skipping": {"gradient_clipping": "norm", "nonfinite": "skip"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_LR_COUNT_1_a_rate_planned_over_three_steps_ends_after_three(variant):
    assert rates(steps=3, **VARIANTS[variant]) == pytest.approx(THIRDS, abs=1e-7)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_LR_COUNT_1_every_schedule_ends_at_its_last_step(name, precision):
    cls = find("schedule", name)
    strategy = cls(cls.Config(**SCHEDULES[name]))
    expected = [strategy.factor(step, 12) for step in range(1, 13)]
    precision = {"name": "fp16", "init_scale": 1024} if precision == "fp16" else precision
    found = rates(steps=12, schedule={"name": name, **SCHEDULES[name]}, precision=precision)
    assert found == pytest.approx(expected, rel=1e-12)
    assert len(set(found)) > 1


@pytest.mark.parametrize("plan", [{"epochs": 4}, {"steps": 12}, {"epochs": 12, "limit_batches": 1}])
@pytest.mark.parametrize("num", [1, 2, 3])
def test_LR_COUNT_1_epochs_and_limits_plan_the_same_rates(plan, num):
    expected = [1 - step / 12 for step in range(1, 13)]
    assert rates(accumulation={"name": "microbatches", "num": num}, **plan) == pytest.approx(expected)


def on_two_ranks() -> dict[str, list[float]]:
    found = {name: rates(steps=3, **settings) for name, settings in VARIANTS.items()}
    for name, settings in SCHEDULES.items():
        found[f"schedule {name}"] = rates(epochs=2, schedule={"name": name, **settings})
    found["rank"] = [dist.get_rank()]
    return found


@pytest.mark.ranks
def test_LR_COUNT_1_two_ranks_count_as_one_process_does():
    two = run_ranks(2, on_two_ranks, timeout_s=120)
    assert [found.pop("rank") for found in two] == [[0], [1]]
    for found in two:
        for name in VARIANTS:
            assert found.pop(name) == pytest.approx(THIRDS, abs=1e-7)
        for name, settings in SCHEDULES.items():
            expected = rates(epochs=2, schedule={"name": name, **settings})
            assert len(expected) == 6
            assert found.pop(f"schedule {name}") == expected
        assert found == {}


class Overflowing(Mlp):
    """The gradients of the named steps are infinite."""

    bad: tuple[int, ...] = (1,)
    factor = math.inf

    def train_step(self, batch):
        self.weights = [*getattr(self, "weights", [state(self)])]
        info = super().train_step(batch)
        self.weights.append(state(self))
        return info

    def loss(self, output, batch):
        loss = super().loss(output, batch)
        return loss * self.factor if self.step + 1 in self.bad and self.model.training else loss


OPTIMIZERS = [{"name": n, "lr": 0.1, "fused": fused} for n in ("sgd", "adamw") for fused in (True, False)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("more", [{}, {"nonfinite": "skip"}, {"gradient_clipping": "norm"}], ids=str)
@pytest.mark.parametrize("num", [1, 2])
def test_LR_COUNT_3_a_refused_step_moves_neither_weights_nor_rate_and_halves_the_scale(optimizer, more, num):
    watcher = Recorder()
    trainer = Overflowing(
        batch_size=8,
        steps=4,
        optimizer=optimizer,
        precision={"name": "fp16", "init_scale": 65536.0},
        schedule="linear",
        accumulation={"name": "microbatches", "num": num},
        observers=[watcher],
        **more,
        **QUIET,
    )
    summary = trainer.fit()
    moved = [largest_difference(a, b) > 0 for a, b in pairwise(trainer.weights)]
    assert moved == [False, True, True, True]
    assert [record["lr"] for record in watcher.steps] == pytest.approx([0.1, 0.075, 0.05, 0.025])
    assert [record["loss_scale"] for record in watcher.steps] == [32768.0] * 4
    assert [record["refused_steps"] for record in watcher.steps] == [1] * 4
    assert (summary["steps"], summary["refused_steps"]) == (4, 1)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("factor", [math.inf, math.nan])
def test_LR_COUNT_3_without_a_scaler_a_refused_step_leaves_the_rate_too(optimizer, precision, factor):
    class Bad(Overflowing):
        bad = (2, 3)

    Bad.factor = factor
    watcher = Recorder()
    settings = {"optimizer": optimizer, "precision": precision, "schedule": "linear", "nonfinite": "skip"}
    trainer = Bad(batch_size=8, steps=5, observers=[watcher], **settings, **QUIET)
    trainer.fit()
    moved = [largest_difference(a, b) > 0 for a, b in pairwise(trainer.weights)]
    assert moved == [True, False, False, True, True]
    assert [record["lr"] for record in watcher.steps] == pytest.approx([0.08, 0.08, 0.08, 0.06, 0.04])


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_LR_COUNT_3_steps_after_a_refused_one_are_those_of_torchs_own_scaler(optimizer):
    x, y = points()

    class Whole(Overflowing):
        def build_data(self):
            return Data(train=points(), shuffle=False)

    optimizer = {**optimizer, "decay_norms": True}
    trainer = Whole(batch_size=24, steps=4, optimizer=optimizer, precision="fp16", schedule="linear", **QUIET)
    trainer.fit()
    torch.manual_seed(0)
    model = Mlp.build_model(trainer)
    make = torch.optim.SGD if optimizer["name"] == "sgd" else torch.optim.AdamW
    more = {"momentum": 0.9} if optimizer["name"] == "sgd" else {}
    # Unfused: torch's fused SGD reads momentum that was never written after a refused first step.
    plain = make(model.parameters(), lr=0.1, fused=False, **more)
    scaler = torch.amp.GradScaler("cpu")
    accepted = 0
    for step in range(4):
        with torch.autocast("cpu", torch.float16):
            loss = torch.nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss * math.inf if step == 0 else loss).backward()
        plain.param_groups[0]["lr"] = 0.1 * (1 - accepted / 4)
        scaler.step(plain)
        scaler.update()
        plain.zero_grad()
        accepted += step > 0
    assert accepted == 3
    assert largest_difference(trainer.model.state_dict(), model.state_dict()) < 1e-6


class Nine(Mlp):
    n = 9


class Ten(Mlp):
    n = 10


@pytest.mark.parametrize("num", [1, 2, 3])
def test_LR_COUNT_4_a_limit_of_steps_is_the_plan_and_is_kept(num):
    trainer = Nine(batch_size=3, steps=7, schedule="linear", accumulation={"name": "microbatches", "num": num}, **QUIET)
    assert (trainer.feed.steps_per_epoch, trainer.feed.total_steps, trainer.plan.context.total_steps) == (3, 7, 7)
    summary = trainer.fit()
    assert (summary["steps"], summary["total_steps"], trainer.step) == (7, 7, 7)
    assert summary["epochs"] == pytest.approx(7 / 3)


@pytest.mark.parametrize("accumulation", [{"num": 2}, {"size": 3}, {"num": 6}], ids=str)
@pytest.mark.parametrize("epochs", [1, 3])
def test_LR_COUNT_4_ten_samples_in_windows_of_two_threes_are_two_steps(accumulation, epochs):
    found = rates(Ten, batch_size=6, epochs=epochs, accumulation={"name": "microbatches", **accumulation})
    assert found == pytest.approx([1 - step / (2 * epochs) for step in range(1, 2 * epochs + 1)])
    trainer = Ten(batch_size=6, epochs=epochs, accumulation={"name": "microbatches", **accumulation}, **QUIET)
    assert (trainer.feed.steps_per_epoch, trainer.feed.total_steps) == (2, 2 * epochs)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_LR_COUNT_4_a_resumed_run_keeps_plan_and_rate(tmp_path, precision):
    class Stop(Recorder):
        def stepped(self, record):
            super().stepped(record)
            if record["step"] == 3:
                self.run.request_stop("test")

    settings = {
        "batch_size": 3,
        "steps": 7,
        "schedule": "linear",
        "precision": {"name": "fp16", "init_scale": 1024} if precision == "fp16" else precision,
        "optimizer": {"name": "sgd", "lr": 0.7},
        "log": {"every": 1},
        "run": {"dir": str(tmp_path), "name": "a", "id": "b"},
    }
    first, second = Stop(), Recorder()
    Nine(**settings, observers=[first]).fit()
    summary = Nine(**settings, resume="auto", observers=[second]).fit()
    assert summary["steps"] == 7
    assert [r["lr"] for r in first.steps] == pytest.approx([0.6, 0.5, 0.4])
    assert [r["lr"] for r in second.steps] == pytest.approx([0.3, 0.2, 0.1, 0.0], abs=1e-7)
