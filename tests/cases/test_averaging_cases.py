"""Reported faults of averaged weights, each by the name of its case."""

# The names of the cases are written in capitals.

from __future__ import annotations

import pytest
import torch
from torch import nn

from fasttrain import Data
from fasttrain.checkpoint import load_tensors, stored_tensors
from fasttrain.core.plan import Plan
from fasttrain.core.strategy import Context
from fasttrain.strategies.weight_averaging import Ema, EmaConfig
from fasttrain.trainer.state import save_state
from tests.helpers import QUIET, Recorder, largest_difference, points, state
from tests.stack import Restless

CONTEXT = Context(device=torch.device("cpu"))


@pytest.mark.parametrize(("buffers", "expected"), [("copy", 1.7615), ("average", 0.8138)])
def test_EMA_STATE_1_running_statistics_are_averaged_or_copied_never_left_at_their_initial_values(buffers, expected):
    norm = nn.BatchNorm1d(1)
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.0)
    plan = Plan([Ema(EmaConfig(decay=0.9, buffers=buffers), CONTEXT)], CONTEXT)
    plan.started(norm, optimizer, 0)
    for step in (1, 2, 3):
        norm(torch.tensor([[5.0], [8.0]]))
        plan.updated(norm, optimizer, step)
    with plan.evaluating(norm):
        assert norm.running_mean.item() == pytest.approx(expected, abs=5e-5)
        assert norm.num_batches_tracked.dtype == torch.int64
        assert norm.num_batches_tracked.item() == 3
    assert norm.running_mean.item() == pytest.approx(1.7615, abs=5e-5)


class Averaged(Restless):
    def build_data(self):
        return Data(train=points(), evaluation=points(16, seed=4))


def averaged(kind=Averaged, **settings):
    ema = {"name": "ema", "decay": 0.99, "warmup": True}
    return kind(
        **{"batch_size": 8, "steps": 10, "weight_averaging": ema, "evaluate": {"every": 100}, **QUIET, **settings}
    )


def averages(trainer):
    return trainer.plan.strategies["weight_averaging"].state_dict()


@pytest.mark.parametrize("precision", [None, {"name": "fp16", "init_scale": 1024.0}])
def test_EMA_STATE_3_the_counter_of_the_warm_up_survives_a_resume(tmp_path, precision):
    run = {"dir": str(tmp_path), "name": "a", "id": "b"}
    straight = averaged(precision=precision)
    straight.fit()
    averaged(precision=precision, steps=5, run=run).fit()
    resumed = averaged(precision=precision, run=run, resume=str(tmp_path / "a" / "b"))
    resumed.fit()
    ours, theirs = averages(resumed), averages(straight)
    assert ours.pop(".updates") == theirs.pop(".updates") == [10]
    assert ours.pop(".name") == theirs.pop(".name") == "ema"
    assert len(ours) == 20
    assert largest_difference(ours, theirs) == 0.0


def test_EMA_STATE_4_a_checkpoint_written_during_an_evaluation_holds_raw_weights(tmp_path):
    class Saving(Averaged):
        written = None

        def metrics(self, output, batch):
            if Saving.written is None:
                Saving.written = tmp_path / "step-3"
                plain = {"metrics": {}, "observers": [], "config": ""}
                save_state(self, Saving.written, plain)
                Saving.seen = state(self)
            return {}

    trainer = averaged(Saving)
    batches = trainer.feed.training(trainer.task, trainer.plan)
    for _ in range(3):
        trainer.train_step(next(batches))
    raw = state(trainer)
    trainer.evaluate()
    assert largest_difference(state(trainer), raw) == 0.0
    kept = averages(trainer)
    assert largest_difference(Saving.seen, raw) > 0.0  # the evaluation went on with the averages
    held = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in stored_tensors(Saving.written).items()}
    load_tensors(Saving.written, held)
    assert (
        largest_difference({n.removeprefix("model."): t for n, t in held.items() if n.startswith("model.")}, raw) == 0.0
    )
    prefix = "strategy.weight_averaging."
    stored = {name.removeprefix(prefix): tensor for name, tensor in held.items() if name.startswith(prefix)}
    assert len(stored) == 20
    assert largest_difference(stored, {name: t for name, t in kept.items() if not name.startswith(".")}) == 0.0
    trainer.train_step(next(batches))
    again = averaged(Saving)
    again.restore(Saving.written)
    again.train_step(next(again.feed.training(again.task, again.plan)))
    assert largest_difference(state(trainer), state(again)) == 0.0


def test_EMA_STATE_4_an_error_during_an_evaluation_leaves_raw_weights():
    class Failing(Averaged):
        def metrics(self, output, batch):
            raise ZeroDivisionError

    trainer = averaged(Failing, evaluate={"every": 6}, observers=[watcher := Recorder()])
    with pytest.raises(ZeroDivisionError):
        trainer.fit()
    assert isinstance(watcher.error, ZeroDivisionError)
    plain = averaged(steps=6, weight_averaging=None)
    plain.fit()
    assert largest_difference(state(trainer), state(plain)) == 0.0
