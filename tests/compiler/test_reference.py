"""Eager code against compiled code: how it is timed, and what is said. Times are those of a clock of the test's own."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from fasttrain.compiler.reference import (
    CannotCompareError,
    Comparison,
    Reference,
    compare,
    forward_backward,
    milliseconds,
    verdict,
)
from tests.helpers import points
from tests.stack import StackModel


class Machine:
    """A clock, and code whose calls take what a script says: eager or not, call by call."""

    def __init__(self, eager, compiled):
        self.scripts = {True: list(eager), False: list(compiled)}
        self.now_s, self.is_eager, self.calls, self.waits = 100.0, False, [], 0

    @contextmanager
    def eager(self):
        self.is_eager = True
        try:
            yield
        finally:
            self.is_eager = False

    def run(self):
        self.calls.append("eager" if self.is_eager else "compiled")
        took = self.scripts[self.is_eager].pop(0)
        if took is None:
            raise torch.OutOfMemoryError("planted")
        self.now_s += took

    def wait(self):
        self.waits += 1

    def compare(self, **settings):
        return compare(self.run, self.eager, now=lambda: self.now_s, synchronize=self.wait, **settings)


def test_eager_calls_come_first_and_the_calls_that_warm_up_or_compile_are_not_counted():
    machine = Machine(eager=[9.0, 2.5, 3.0, 4.0], compiled=[50.0, 1.0, 2.0, 1.5])
    found = machine.compare(steps=3)
    assert machine.calls == ["eager"] * 4 + ["compiled"] * 4
    assert machine.waits == 16  # before and after each
    assert found == Comparison(eager_s=3.0, compiled_s=1.5, compile_s=48.5)
    assert found.ratio == 0.5
    assert found.gains
    assert not found.loses


def test_cuda_graphs_take_three_calls_to_come_about():
    machine = Machine(eager=[1.0, 1.0], compiled=[20.0, 2.0, 2.0, 0.5])
    found = machine.compare(steps=1, compiling_calls=3)
    assert (found.compiled_s, found.compile_s) == (0.5, 22.5)


def test_what_seems_to_lose_is_measured_once_more_and_the_better_round_counts():
    machine = Machine(eager=[1.0, 1.0, 1.0, 2.0], compiled=[9.0, 1.5, 1.0, 1.6])
    found = machine.compare(steps=1)
    assert machine.calls == ["eager"] * 2 + ["compiled"] * 2 + ["eager"] * 2 + ["compiled"] * 2
    assert (found.eager_s, found.compiled_s) == pytest.approx((2.0, 1.6))
    assert not found.loses
    machine = Machine(eager=[1.0, 1.0, 1.0, 1.0], compiled=[9.0, 1.5, 1.0, 1.4])
    found = machine.compare(steps=1)
    assert found.loses
    assert found.ratio == pytest.approx(1.4)


def test_calls_that_overlap_are_no_difference_whatever_their_medians():
    machine = Machine(eager=[9.0, 2.0, 3.0, 4.0], compiled=[50.0, 1.0, 2.1, 1.5])
    found = machine.compare(steps=3)
    assert (found.eager_s, found.compiled_s, found.apart) == (3.0, 1.5, False)
    assert not found.gains
    assert "no difference to eager code that could be told from noise" in verdict(found, off="compile=null")


def test_code_that_is_compiled_again_in_each_call_is_not_timed():
    machine = Machine(eager=[1.0] * 3, compiled=[9.0] * 3)
    with pytest.raises(CannotCompareError, match="compiled again from call to call"):
        machine.compare(steps=2, compiled_anew=lambda: True)
    reference = Reference(steps=2, off="compile=null")
    machine = Machine(eager=[1.0] * 3, compiled=[9.0] * 3)
    reference.measure(machine.run, machine.eager, torch.device("cpu"), now=lambda: 0.0, compiled_anew=lambda: True)
    assert reference.remarks() == ["not compared with eager code (it is compiled again from call to call)"]
    assert reference.remarks() == []
    assert reference.summary() == {}


def test_what_is_compiled_beside_the_measured_call_counts_and_breaks_are_to_be_mended_first():
    machine = Machine(eager=[9.0] + [2.0] * 3, compiled=[11.0] + [1.0] * 3)
    reference = Reference(steps=3, off="compile=null", total_steps=20)
    reference.measure(machine.run, machine.eager, torch.device("cpu"), now=lambda: machine.now_s)
    (told,) = reference.remarks(compile_s=30.0, broken=True)
    assert "compiling took 30.0 s, which pays after 30 steps, and the run has 20" in told
    assert told.endswith("mend the graph breaks first, or compile=null")
    assert reference.summary()["pays_after_steps"] == 30


def test_three_percent_are_no_difference():
    for took, loses, gains in (
        (1.029, False, False),
        (1.031, True, False),
        (0.971, False, False),
        (0.969, False, True),
    ):
        found = Comparison(eager_s=1.0, compiled_s=took, compile_s=0.0)
        assert (found.loses, found.gains) == (loses, gains)


def test_eager_code_that_runs_out_of_memory_is_a_finding_and_the_compiled_code_is_timed_all_the_same():
    machine = Machine(eager=[1.0, None], compiled=[5.0, 2.0, 2.0])
    found = machine.compare(steps=2)
    assert machine.calls == ["eager"] * 2 + ["compiled"] * 3
    assert not machine.is_eager
    assert found == Comparison(eager_s=None, compiled_s=2.0, compile_s=3.0)
    assert (found.ratio, found.loses, found.gains, found.pays_after()) == (None, False, False, None)
    assert verdict(found, off="compile=null") == (
        "without it this batch does not fit into memory; with it forward and backward take 2.00 s"
    )


def test_other_errors_of_eager_code_are_raised():
    def fails():
        raise RuntimeError("a fault of the model")

    with pytest.raises(RuntimeError, match="a fault of the model"):
        compare(fails, Machine([], []).eager)


def test_compiling_pays_after_the_steps_that_win_its_time_back():
    found = Comparison(eager_s=0.010, compiled_s=0.006, compile_s=2.0)
    assert found.pays_after() == 500
    assert found.pays_after(calls=4) == 125  # four microbatches a step
    assert found.figures(4) == {
        "eager_step_s": 0.010,
        "compiled_step_s": 0.006,
        "ratio": pytest.approx(0.6),
        "pays_after_steps": 125,
    }
    assert Comparison(eager_s=0.010, compiled_s=0.013, compile_s=2.0).pays_after() is None


@pytest.mark.parametrize(
    ("eager_s", "compiled_s", "steps_left", "told"),
    [
        (
            0.0094,
            0.0123,
            900,
            "a step takes 1.31 x eager's time (12.3 ms against 9.4 ms for forward and backward); drop it: compile=null",
        ),
        (
            0.0100,
            0.0101,
            900,
            "no difference to eager code that could be told from noise (10.1 ms against 10 ms for forward and backward); "
            "without it a run starts sooner: compile=null",
        ),
        (
            0.0100,
            0.0060,
            499,
            "a step takes 0.60 x eager's time (6 ms against 10 ms for forward and backward); compiling took 2.0 s, which "
            "pays after 500 steps, and the run has 499; drop it: compile=null",
        ),
        (
            0.0100,
            0.0060,
            500,
            "a step takes 0.60 x eager's time (6 ms against 10 ms for forward and backward); compiling took 2.0 s, which "
            "pays after 500 steps",
        ),
    ],
)
def test_the_verdict_has_the_figures_and_the_flag_to_drop(eager_s, compiled_s, steps_left, told):
    found = Comparison(eager_s=eager_s, compiled_s=compiled_s, compile_s=2.0)
    assert verdict(found, off="compile=null", steps_left=steps_left) == told


def test_times_are_told_in_three_digits():
    assert [milliseconds(s) for s in (0.0123, 0.00041, 0.9991, 0.9996, 1.2)] == [
        "12.3 ms",
        "0.41 ms",
        "999 ms",
        "1.00 s",
        "1.20 s",
    ]


def test_a_forward_and_backward_leaves_no_gradient_and_calls_no_hook_that_follows_one():
    model = StackModel()
    model.embed.weight.requires_grad_(False)
    model.unused = nn.Linear(2, 2)
    called = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(called.append)
    reached = []
    model.head.register_full_backward_hook(lambda *_: reached.append(1))
    run = forward_backward(model, lambda: model(points()[0]).square().mean())
    run()
    run()
    assert len(reached) == 2  # backward did run
    assert called == []
    assert all(parameter.grad is None for parameter in model.parameters())
