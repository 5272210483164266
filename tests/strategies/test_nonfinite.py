"""nonfinite: which step was bad, that it changed nothing, and when a run ends."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fasttrain import ConfigError, Data
from fasttrain.core.plan import Plan
from fasttrain.core.strategy import Context
from fasttrain.errors import NonFinite
from fasttrain.strategies.nonfinite import Raise, Skip, SkipConfig, nonfinite_flag
from tests.helpers import Recorder, largest_difference, points, state
from tests.stack import Stack

CONTEXT = Context(device=torch.device("cpu"))
BAD = [float("nan"), float("inf"), float("-inf")]


class Bad(Stack):
    """Eight samples a step, in order; those of the steps in `bad` (from 1) give `value` as their loss."""

    bad: tuple[int, ...] = ()
    value, steps = float("nan"), 10

    def build_data(self):
        x, y = points(8 * self.steps)
        scale = torch.ones(8 * self.steps)
        for step in self.bad:
            scale[8 * (step - 1) : 8 * step] = self.value
        return Data(train=(x, y, scale), shuffle=False)

    def loss(self, output, batch):
        return super().loss(output, batch) * batch[2].mean()


def make(*bad, value=float("nan"), log=1, steps=10, kind=Bad, **settings):
    trainer = type("Bad", (kind,), {"bad": bad, "value": value, "steps": steps})
    return trainer(batch_size=8, steps=steps, run={"dir": None}, log={"every": log}, **settings)


# ---- the flag


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("where", [0, 1])
def test_one_bad_entry_anywhere_is_seen(value, where):
    parameters = [nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(1))]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    assert nonfinite_flag(optimizer).item() == 0.0  # no gradients at all
    for parameter in parameters[:2]:
        parameter.grad = torch.ones_like(parameter)
    assert nonfinite_flag(optimizer).item() == 0.0
    parameters[where].grad.view(-1)[-1] = value
    flag = nonfinite_flag(optimizer)
    assert (flag.item(), flag.dtype, flag.dim()) == (1.0, torch.float32, 0)


def test_a_norm_that_overflows_float32_counts_as_infinite():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), 3e38)
    assert nonfinite_flag(torch.optim.SGD([parameter], lr=0.1)).item() == 1.0


# ---- raise


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize(("log", "bad"), [(1, (3,)), (5, (3,)), (10, (3, 4, 9)), (2, (4,)), (5, (1,)), (4, (10,))])
def test_the_first_bad_step_is_named_whenever_the_log_is_read(log, bad, value):
    watcher = Recorder()
    trainer = make(*bad, value=value, log=log, nonfinite="raise", observers=[watcher])
    with pytest.raises(NonFinite) as caught:
        trainer.fit()
    assert str(caught.value) == (
        f"nonfinite=raise: a gradient of step {bad[0]} was infinite or not a number; that update was refused. Lower "
        "the learning rate, clip gradients (gradient_clipping=norm), or leave such steps out (nonfinite=skip)."
    )
    assert trainer.step == min(-(-bad[0] // log) * log, 10)  # told at the next log point
    assert watcher.error is caught.value


@pytest.mark.parametrize("optimizer", [{"name": "adamw"}, {"name": "sgd"}, {"name": "adamw", "fused": False}])
def test_the_bad_update_is_refused(optimizer):
    trainer = make(4, nonfinite="raise", optimizer=optimizer)
    with pytest.raises(NonFinite):
        trainer.fit()
    before = make(steps=10, optimizer=optimizer, nonfinite="raise")
    batches = before.feed.training(before.task, before.plan)
    for _ in range(3):
        before.train_step(next(batches))
    assert largest_difference(state(trainer), state(before)) == 0.0


def test_a_run_without_a_bad_step_is_the_run_without_the_strategy():
    guarded, plain = make(nonfinite="raise"), make()
    guarded.fit()
    plain.fit()
    assert largest_difference(state(guarded), state(plain)) == 0.0


def test_the_step_is_named_after_a_resume_too(tmp_path):
    run = {"dir": str(tmp_path), "name": "a", "id": "b"}
    kind = type("Bad", (Bad,), {"bad": (7,)})
    settings = {"batch_size": 8, "run": run, "log": {"every": 3}, "nonfinite": "raise"}
    kind(steps=4, **settings).fit()
    with pytest.raises(NonFinite, match="a gradient of step 7 was"):
        kind(steps=10, resume=str(tmp_path / "a" / "b"), **settings).fit()


def test_the_step_is_named_where_a_step_has_several_updates():
    """Two parts with an optimizer each: two verdicts a step."""

    class TwoParts(Bad):
        def parts(self):
            return {"head": self.model.head, "blocks": self.model.blocks}

        def train_step(self, batch):
            info = None
            for part in self.parts():
                loss = self.step_part(part, self.compute_loss, batch)
            self.step += 1
            from fasttrain.trainer import StepInfo

            info = StepInfo(self.step, loss)
            return info

    with pytest.raises(NonFinite, match="a gradient of step 6 was"):
        make(6, kind=TwoParts, log=4, nonfinite="raise").fit()


# ---- skip


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("optimizer", [{"name": "adamw"}, {"name": "sgd"}, {"name": "sgd", "fused": False}])
@pytest.mark.parametrize("bad", [(1,), (4,), (2, 3, 7)])
def test_a_skipped_step_is_as_if_its_batch_had_not_been_there(bad, optimizer, value):
    skipping = make(*bad, value=value, nonfinite="skip", optimizer=optimizer, schedule="constant")
    summary = skipping.fit()
    assert (summary["steps"], summary["refused_steps"]) == (10, len(bad))
    plain = make(optimizer=optimizer)
    batches = plain.feed.training(plain.task, plain.plan)
    for step in range(1, 11):
        batch = next(batches)
        if step not in bad:
            plain.train_step(batch)
    assert largest_difference(state(skipping), state(plain)) == 0.0


def test_refused_steps_are_in_the_log_apart_and_the_schedule_waits_for_accepted_ones():
    watcher = Recorder()
    settings = {"optimizer": {"name": "sgd", "lr": 1.0}, "schedule": "linear"}
    make(2, 3, steps=5, nonfinite="skip", observers=[watcher], **settings).fit()
    assert [record.get("refused_steps", 0) for record in watcher.steps] == [0, 1, 2, 2, 2]
    assert [record["refused_in_a_row"] for record in watcher.steps] == [0, 1, 2, 2, 2]
    assert [record["lr"] for record in watcher.steps] == pytest.approx([0.8, 0.8, 0.8, 0.6, 0.4])


def test_too_many_in_a_row_end_the_run_at_the_next_log_point():
    bad = (3, 4, 5)
    trainer = make(*bad, log=2, nonfinite={"name": "skip", "max_in_a_row": 3})
    with pytest.raises(NonFinite, match="nonfinite=skip: 3 steps in a row had infinite or undefined gradients"):
        trainer.fit()
    assert trainer.step == 6
    assert make(*bad, nonfinite={"name": "skip", "max_in_a_row": 4}).fit()["refused_steps"] == 3
    assert make(3, 5, 7, nonfinite={"name": "skip", "max_in_a_row": 2}).fit()["refused_steps"] == 3


def test_the_count_in_a_row_goes_on_after_a_resume(tmp_path):
    run = {"dir": str(tmp_path), "name": "a", "id": "b"}
    kind = type("Bad", (Bad,), {"bad": (4, 5, 6)})
    settings = {"batch_size": 8, "run": run, "log": {"every": 1}, "nonfinite": {"name": "skip", "max_in_a_row": 3}}
    assert kind(steps=5, **settings).fit()["refused_steps"] == 2
    with pytest.raises(NonFinite, match="3 steps in a row"):
        kind(steps=10, resume=str(tmp_path / "a" / "b"), **settings).fit()


def test_max_in_a_row_below_one_is_refused():
    with pytest.raises(ConfigError, match=r"nonfinite\.max_in_a_row=0 must be at least 1"):
        SkipConfig(max_in_a_row=0)


# ---- together with others


@pytest.mark.parametrize("nonfinite", ["skip", None])
def test_with_fp16_a_bad_step_halves_the_scale_once(nonfinite):
    watcher = Recorder()
    fp16 = {"name": "fp16", "init_scale": 256.0}
    summary = make(3, steps=4, precision=fp16, nonfinite=nonfinite, observers=[watcher]).fit()
    assert summary["refused_steps"] == 1
    assert [record["loss_scale"] for record in watcher.steps] == [256, 256, 128, 128]


def test_raise_is_refused_with_fp16_whose_overflows_are_no_faults():
    fp16 = {"name": "fp16", "init_scale": 2.0**24}
    with pytest.raises(ConfigError, match="overflows as a matter of course"):
        make(precision=fp16, nonfinite="raise")
    assert make(precision=fp16, nonfinite="skip").fit()["refused_steps"] >= 1


@pytest.mark.parametrize("num", [1, 4])
def test_one_bad_microbatch_refuses_the_whole_step(num):
    class OneSample(Bad):
        def build_data(self):
            x, y = points(80)
            scale = torch.ones(80)
            scale[17] = float("nan")
            return Data(train=(x, y, scale), shuffle=False)

    trainer = make(kind=OneSample, nonfinite="skip", accumulation={"name": "microbatches", "num": num})
    assert trainer.fit()["refused_steps"] == 1


def test_clipping_does_not_hide_what_was_bad():
    for value in BAD:
        summary = make(3, value=value, nonfinite="skip", gradient_clipping="norm").fit()
        assert summary["refused_steps"] == 1


def test_without_the_slot_nothing_is_checked_and_a_bad_step_spoils_the_weights():
    trainer = make(3, steps=4)
    trainer.fit()
    assert any(parameter.isnan().any() for parameter in trainer.model.parameters())
    assert trainer.plan.refused(trainer.optimizer) == 0


def test_the_strategies_can_be_used_without_a_trainer():
    for kind in (Raise, Skip):
        parameter = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
        plan = Plan([kind(None, CONTEXT)], CONTEXT)
        plan.started(None, optimizer, 0)
        for value in (1.0, float("nan"), 1.0):
            parameter.grad = torch.full((2,), value)
            plan.update(optimizer, plan.gradients(None, optimizer))
        assert parameter.tolist() == [-1.0, -1.0]
        assert plan.refused(optimizer).item() == 1
