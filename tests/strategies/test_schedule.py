"""schedule: rates against formulas and torch's own schedulers, on the host and from a step that the device knows."""

from __future__ import annotations

import math

import pytest
import torch
from torch.optim import lr_scheduler

from fasttrain import ConfigError, Data
from fasttrain.core.plan import Plan
from fasttrain.core.strategy import Context
from fasttrain.registry import BUILT_IN, find
from fasttrain.strategies.schedule import (
    Decay,
    OneCycleConfig,
    Plateau,
    PlateauConfig,
    WarmUp,
    WsdConfig,
    constant,
    cosine,
    linear,
    one_cycle,
    wsd,
)
from tests.helpers import QUIET, Recorder
from tests.stack import Stack

CPU = torch.device("cpu")
LR = 0.3
EVERY = list(BUILT_IN["schedule"])


def optimizer_of(lr=LR):
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=lr)


def ours(name, total, settings=None, on_device=False, lr=LR):
    """The rate in each step, and after the last."""
    kind = find("schedule", name)
    context = Context(device=CPU, total_steps=total)
    plan = Plan([kind(kind.Config(**(settings or {})), context)], context)
    optimizer, rates = optimizer_of(lr), []
    plan.started(None, optimizer, torch.tensor(0.0) if on_device else 0)
    for step in range(1, total + 1):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        plan.updated(None, optimizer, step)
    return [*rates, float(optimizer.param_groups[0]["lr"])]


def torchs(make, total, lr=LR):
    optimizer = optimizer_of(lr)
    scheduler, rates = make(optimizer), []
    for step in range(total + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        if step < total:
            optimizer.step()
            scheduler.step()
    return rates


# torch computes a rate from the one before, ours from the step: they differ by what torch rounds on the way.
CLOSE = {"rel": 1e-12, "abs": 1e-15}


def test_every_schedule_is_compared_here():
    assert set(EVERY) >= {"constant", "linear", "cosine", "wsd", "one_cycle"}


@pytest.mark.parametrize("final", [0.0, 0.1, 0.5])
def test_linear_is_torchs_linear_lr(final):
    total = 37
    expected = torchs(lambda o: lr_scheduler.LinearLR(o, 1.0, final, total_iters=total), total)
    assert ours("linear", total, {"final": final}) == pytest.approx(expected, **CLOSE)


def test_linear_decay_of_three_steps_ends_at_nothing():
    assert ours("linear", 3, lr=1.0) == pytest.approx([1.0, 2 / 3, 1 / 3, 0.0], rel=1e-15)


@pytest.mark.parametrize("final", [0.0, 0.1])
def test_cosine_is_torchs_cosine_annealing_lr(final):
    total = 37
    expected = torchs(lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=total, eta_min=LR * final), total)
    assert ours("cosine", total, {"final": final}) == pytest.approx(expected, **CLOSE)


def test_constant_is_torchs_constant():
    expected = torchs(lambda o: lr_scheduler.ConstantLR(o, 1.0), 9)
    assert ours("constant", 9) == expected == [LR] * 10


def test_wsd_is_constant_and_then_torchs_linear_lr():
    total, decay = 40, 8
    expected = torchs(
        lambda o: lr_scheduler.SequentialLR(
            o,
            [lr_scheduler.ConstantLR(o, 1.0), lr_scheduler.LinearLR(o, 1.0, 0.1, total_iters=decay)],
            milestones=[total - decay],
        ),
        total,
    )
    for given in (8, 0.2):  # steps, or a share of all
        assert ours("wsd", total, {"decay": given, "final": 0.1}) == pytest.approx(expected, **CLOSE)


@pytest.mark.parametrize(("total", "warmup"), [(40, 0.3), (50, 0.2), (20, 0.5)])
def test_one_cycle_peaks_one_step_after_torchs_and_ends_as_it_does(total, warmup):
    """torch's peak lies at step `pct_start * total - 1`; ours at the end of the warm-up, `pct_start * total`.

    With one step more before the peak the two are the same curve.
    """
    peak = int(warmup * total)
    expected = torchs(
        lambda o: lr_scheduler.OneCycleLR(o, LR, total_steps=total, pct_start=(peak + 1) / total, cycle_momentum=False),
        total - 1,
    )
    rates = ours("one_cycle", total, {"warmup": warmup})
    assert rates[:total] == pytest.approx(expected, **CLOSE)
    assert rates[0] == pytest.approx(LR / 25)
    assert rates.index(max(rates)) == peak
    assert rates[total - 1] == pytest.approx(LR / 25 / 1e4)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
def test_the_first_step_of_a_warmup_learns_and_the_one_after_it_has_the_whole_rate(name):
    """torch's LinearLR starts at a share one chooses; ours at 1/(warmup + 1), so that no step is spent at 0."""
    warm = ours(name, 30, {"warmup": 4}, lr=1.0)
    assert warm[:4] == pytest.approx([1 / 5, 2 / 5, 3 / 5, 4 / 5], rel=1e-15)
    assert warm[4] == 1.0
    expected = torchs(lambda o: lr_scheduler.LinearLR(o, 1 / 5, 1.0, total_iters=4), 4, lr=1.0)
    assert warm[:5] == pytest.approx(expected, **CLOSE)


def test_after_a_warmup_the_decay_takes_what_is_left():
    total, warmup = 30, 6
    for name, factor in (
        ("linear", lambda p: 1 - p),
        ("cosine", lambda p: 0.5 * (1 + math.cos(math.pi * p))),
    ):
        for given in (6, 0.2):
            rates = ours(name, total, {"warmup": given}, lr=1.0)
            left = [factor((step - warmup) / (total - warmup)) for step in range(warmup, total + 1)]
            assert rates[warmup:] == pytest.approx(left, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("name", EVERY)
def test_a_step_that_the_device_knows_gives_the_hosts_rate_to_the_bit(name):
    total, settings = 23, {"warmup": 5}
    kind = find("schedule", name)
    context = Context(device=CPU, total_steps=total)
    schedule = kind(kind.Config(**settings), context)
    host, device = optimizer_of(), optimizer_of()
    schedule.started(None, host, 0)
    schedule.started(None, device, torch.tensor(0.0))
    rate = device.param_groups[0]["lr"]
    for step in range(total + 4):  # and beyond the planned end
        schedule.updated(None, host, min(step, total))
        schedule.updated(None, device, torch.tensor(float(step)))
        assert device.param_groups[0]["lr"] is rate  # written in place: a compiled or captured step keeps its tensor
        assert rate.dtype == torch.float64
        assert rate.item() == host.param_groups[0]["lr"]


def test_each_group_keeps_its_own_rate():
    optimizer = torch.optim.SGD(
        [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in (1.0, 0.1)], lr=9.0
    )
    context = Context(device=CPU, total_steps=4)
    plan = Plan([find("schedule", "linear")(None, context)], context)
    plan.started(None, optimizer, 0)
    plan.updated(None, optimizer, 3)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.025]
    assert [group["initial_lr"] for group in optimizer.param_groups] == [1.0, 0.1]


def test_the_functions_can_be_used_alone():
    assert constant(7, 10, WarmUp()) == 1.0
    assert linear(5, 10, Decay()) == 0.5
    assert cosine(5, 10, Decay()) == pytest.approx(0.5)
    assert wsd(9, 10, WsdConfig(decay=2)) == 0.5
    assert one_cycle(3, 10, OneCycleConfig()) == 1.0


def test_the_rate_in_the_log_is_that_of_the_coming_step_and_does_not_depend_on_microbatches():
    seen = []
    for num in (1, 4):
        watcher = Recorder()
        settings = {"optimizer": {"name": "sgd", "lr": 1.0}, "schedule": "linear"}
        accumulation = {"name": "microbatches", "num": num}
        Stack(batch_size=8, steps=3, accumulation=accumulation, observers=[watcher], **settings, **QUIET).fit()
        seen.append([record["lr"] for record in watcher.steps])
    assert seen[0] == seen[1] == pytest.approx([2 / 3, 1 / 3, 0.0])


def test_a_refused_step_does_not_move_the_rate():
    """A loss scale that overflows at first: three steps, two of them accepted."""
    watcher = Recorder()
    trainer = Stack(
        batch_size=24,
        steps=3,
        precision={"name": "fp16", "init_scale": 2.0**24, "backoff_factor": 2.0**-14},
        optimizer={"name": "sgd", "lr": 1.0},
        schedule="linear",
        observers=[watcher],
        **QUIET,
    )
    summary = trainer.fit()
    assert summary["refused_steps"] == 1
    assert [record["lr"] for record in watcher.steps] == pytest.approx([1.0, 2 / 3, 1 / 3])


@pytest.mark.parametrize("warmup", [-1, 2.5])
def test_a_warmup_that_is_no_number_of_steps_is_refused(warmup):
    with pytest.raises(ConfigError, match="give a number of steps or a fraction below 1"):
        WarmUp(warmup=warmup)


def test_a_schedule_without_a_known_end_says_what_to_set():
    context = Context(device=CPU)
    assert find("schedule", "constant")(None, context).total == 1
    with pytest.raises(ConfigError, match="schedule=cosine needs to know how many steps there are; set steps=N"):
        Plan([find("schedule", "cosine")(None, context)], context).started(None, optimizer_of(), 0)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("total", [1, 2, 3])
def test_the_shortest_runs_have_finite_rates(name, total):
    rates = ours(name, total)
    assert all(math.isfinite(rate) and 0 <= rate <= LR for rate in rates)
    assert rates[0] > 0


# ---- plateau


def losses_of(n=60, seed=0):
    """Figures that fall, stall, are no number once, and rise."""
    g = torch.Generator().manual_seed(seed)
    falling = [3.0 * 0.9**i for i in range(n // 3)]
    noise = torch.rand(n - len(falling), generator=g).tolist()
    return [*falling[:8], float("nan"), *falling[8:], *[falling[-1] * (0.9 + 0.4 * v) for v in noise]]


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("threshold_mode", ["rel", "abs"])
@pytest.mark.parametrize(("patience", "cooldown"), [(0, 0), (2, 0), (3, 2), (10, 1)])
@pytest.mark.parametrize("threshold", [0.0, 1e-4, 0.05])
@pytest.mark.parametrize("on_device", [False, True])
def test_plateau_is_torchs_number_for_number(on_device, threshold, patience, cooldown, threshold_mode, mode):
    rules = {"mode": mode, "patience": patience, "cooldown": cooldown, "threshold": threshold, "factor": 0.5}
    rules["threshold_mode"] = threshold_mode
    theirs, ours = optimizer_of(), optimizer_of()
    scheduler = lr_scheduler.ReduceLROnPlateau(theirs, min_lr=LR / 64, eps=0.0, **rules)
    plateau = Plateau(PlateauConfig(min_factor=1 / 64, **rules), Context(device=CPU, total_steps=100))
    plateau.started(None, ours, 0)
    rates = []
    for step, figure in enumerate(losses_of(), start=1):
        figure = figure if mode == "min" else 3.0 - figure
        plateau.updated(None, ours, torch.tensor(float(step)) if on_device else step)
        plateau.evaluated({"loss": figure})
        scheduler.step(figure)
        rates.append(theirs.param_groups[0]["lr"])
        assert float(ours.param_groups[0]["lr"]) == rates[-1]
        best = float("inf") if mode == "min" else float("-inf")
        state = plateau.state
        assert (best if state.best is None else state.best, state.bad, state.cooling) == (
            scheduler.best,
            scheduler.num_bad_epochs,
            scheduler.cooldown_counter,
        )
    assert len(set(rates)) >= 2


def test_plateau_lowers_the_rate_of_the_very_next_step_and_keeps_it():
    optimizer = optimizer_of(1.0)
    plateau = Plateau(PlateauConfig(patience=0, factor=0.5), Context(device=CPU))
    plateau.started(None, optimizer, 0)
    rates = []
    for step, figure in enumerate([2.0, 1.0, 1.0, 0.5, 0.6], start=1):
        plateau.updated(None, optimizer, step)
        plateau.evaluated({"loss": figure})
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [1.0, 1.0, 0.5, 0.5, 0.25]


class Judged(Stack):
    """Evaluated each step, by a figure of its own that stops falling after the third."""

    def build_data(self):
        data = super().build_data()
        return Data(train=data.train, evaluation=data.train)

    def metrics(self, output, batch):
        return {"error": float(max(1, 4 - self.step))}


def judged(steps=8, **settings):
    watcher = Recorder()
    plateau = {"name": "plateau", "metric": "error", "patience": 1, "factor": 0.5, **settings.pop("plateau", {})}
    settings = {"optimizer": {"name": "sgd", "lr": 1.0}, "evaluate": {"every": 1}, **QUIET, **settings}
    trainer = Judged(batch_size=8, steps=steps, schedule=plateau, observers=[watcher], **settings)
    trainer.fit()
    return [record["lr"] for record in watcher.steps]


@pytest.mark.parametrize(
    "more", [{}, {"nonfinite": "skip"}, {"precision": {"name": "fp16", "init_scale": 256.0}}], ids=str
)
def test_a_run_lowers_its_rate_by_its_evaluations(more):
    # A rate is logged before the evaluation after its step. Figures are 3, 2, 1, 1, 1, ...: bad from step 4 on.
    assert judged(**more) == [1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25]
    warm = judged(plateau={"warmup": 3}, **more)
    assert warm == pytest.approx([0.5, 0.75, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25])


@pytest.mark.parametrize("precision", [None, {"name": "fp16", "init_scale": 256.0}])
@pytest.mark.parametrize("cut", [4, 5, 6])
def test_a_resumed_plateau_goes_on_where_it_was(tmp_path, cut, precision):
    run = {"dir": str(tmp_path), "name": "a", "id": "b"}
    first = judged(steps=cut, run=run, precision=precision)
    second = judged(run=run, resume=str(tmp_path / "a" / "b"), precision=precision)
    assert first + second == judged(precision=precision)


def test_plateau_without_evaluations_is_refused_before_the_first_step():
    class Unjudged(Stack):
        def build_data(self):
            return Data(train=super().build_data().train)

    with pytest.raises(ConfigError, match="looks at 'loss' of evaluations, and none comes while this run trains"):
        Unjudged(batch_size=8, steps=2, schedule="plateau", **QUIET)


def test_an_unknown_metric_is_refused_at_the_first_evaluation_with_the_names_there_are():
    with pytest.raises(ConfigError, match=r"metric=eror: the evaluation gave no such figure; did you mean 'error'"):
        judged(plateau={"metric": "eror"})
    with pytest.raises(ConfigError, match="known here: error, loss"):
        judged(plateau={"metric": "accuracy"})


@pytest.mark.parametrize(
    ("setting", "message"),
    [({"factor": 1.0}, "factor=1.0"), ({"patience": -1}, "patience=-1"), ({"min_factor": 2.0}, "min_factor=2.0")],
)
def test_plateau_settings_that_mean_nothing_are_refused(setting, message):
    with pytest.raises(ConfigError, match=rf"schedule\.{message}"):
        PlateauConfig(**setting)
