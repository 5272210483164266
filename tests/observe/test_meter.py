from __future__ import annotations

import random
import statistics
import sys
import tracemalloc

import pytest

from fasttrain.observe.meter import PENDING, StepClock
from fasttrain.observe.quantiles import RELATIVE_ERROR, Quantiles
from tests.observe.helpers import Clock
from tests.ranks import run_ranks


class Device:
    """Work is queued and done one after the other; submitting returns at once, `wait` blocks."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.free_at, self.waits = clock, clock(), 0

    def submit(self, seconds: float) -> None:
        self.free_at = max(self.free_at, self.clock()) + seconds
        self.clock.wait(0.0001)  # what a launch costs the host

    def wait(self) -> None:
        self.waits += 1
        self.clock.time = max(self.clock.time, self.free_at)


class Event:
    """A mark in the queue of a device: like a CUDA event, its time can be read once it is reached."""

    def __init__(self, device: Device) -> None:
        self.device, self.at = device, -1.0

    def record(self) -> None:
        self.at = max(self.device.free_at, self.device.clock())

    def synchronize(self) -> None:
        self.device.clock.time = max(self.device.clock.time, self.at)

    def elapsed_time(self, end: Event) -> float:
        assert end.at <= self.device.clock(), "an event was read before the device reached it"
        return (end.at - self.at) * 1000


def queued_clock(kind: str) -> tuple[Device, StepClock]:
    now = Clock()
    device = Device(now)
    if kind == "events":
        return device, StepClock("cuda", now, new_event=lambda: Event(device))
    return device, StepClock("queued", now, synchronize=device.wait)


@pytest.mark.parametrize("kind", ["events", "windows"])
def test_timer_sync_1_a_step_on_a_queueing_device_takes_what_the_work_takes(kind: str) -> None:
    device, clock = queued_clock(kind)
    means = []
    for step in range(1, 21):
        device.submit(0.010)
        clock.step(8)
        if step % 10 == 0:
            device.wait()  # the caller reads the loss
            means.append(clock.window()["step_time_s"])
    assert means == pytest.approx([0.010, 0.010], rel=0.1)
    assert clock.totals()["step_time_s"]["p50"] == pytest.approx(0.010, rel=0.1)


def test_a_queueing_device_is_waited_for_at_the_first_step_and_at_log_points_only() -> None:
    device, clock = queued_clock("windows")
    for _ in range(10):
        device.submit(0.010)
        clock.step(8)
    assert device.waits == 1
    clock.window()
    assert device.waits == 2


def test_timer_sync_3_the_first_step_is_shown_apart_and_in_no_average() -> None:
    now = Clock()
    clock = StepClock("cpu", now)
    now.wait(0.500)
    clock.step(8)
    for _ in range(9):
        now.wait(0.010)
        clock.step(8)
    first = clock.window()
    for _ in range(90):
        now.wait(0.010)
        clock.step(8)
    clock.window()
    totals = clock.totals()
    assert first["samples_per_s"] == pytest.approx(800)
    assert totals["samples_per_s"] == pytest.approx(800)
    assert first["warmup_s"] == pytest.approx(0.5)
    assert totals["warmup"]["seconds"] == pytest.approx(0.5)
    assert totals["warmup"]["samples"] == 8
    assert totals["measured"]["steps"] == 99


@pytest.mark.parametrize("kind", ["events", "windows"])
def test_timer_sync_3_the_first_step_is_apart_on_a_queueing_device_too(kind: str) -> None:
    device, clock = queued_clock(kind)
    for step in range(100):
        device.submit(0.5 if step == 0 else 0.010)
        clock.step(8)
    device.wait()
    assert clock.window()["samples_per_s"] == pytest.approx(800, rel=0.05)
    assert clock.totals()["warmup"]["seconds"] == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_tput_count_1_accumulation_does_not_change_the_samples_counted(microbatches: int) -> None:
    now = Clock()
    clock = StepClock("cpu", now)
    for _ in range(5):
        for _ in range(microbatches):
            now.wait(1 / microbatches)
        clock.step(16)
    assert clock.window()["samples_per_s"] == 16


# One epoch of two ranks: tokens that count, a row a microbatch; the last batch is short.
EPOCH = [[[5, 3], [7, 1]], [[2, 2], [9, 4]], [[6, 6], [1, 8]], [[3, 0], [2, 0]]]


def _epoch(rank_time: float) -> dict[str, object]:
    import torch
    import torch.distributed as dist

    rank, now = dist.get_rank(), Clock()
    clock = StepClock("cpu", now)
    windows = []
    for step, batch in enumerate(EPOCH, start=1):
        mask = [torch.arange(10) < count for count in batch[rank]]
        tokens = torch.tensor(float(sum(int(m.sum()) for m in mask)))
        dist.all_reduce(tokens)
        now.wait(rank_time)
        clock.step(4 if step < 4 else 2, {"tokens": int(tokens)})
        if step == 2:
            with clock.paused("evaluation"):
                now.wait(30)
        if step == 3:
            with clock.paused("saving"):
                now.wait(7)
        windows.append(clock.window())
    return {"windows": windows, "totals": clock.totals()}


@pytest.mark.ranks
def test_tput_count_3_token_speed_times_time_is_the_tokens_of_all_ranks_exactly() -> None:
    sums = [sum(sum(rank) for rank in batch) for batch in EPOCH]
    for told in run_ranks(2, _epoch, 1.0):
        windows, totals = told["windows"], told["totals"]
        for window, tokens in list(zip(windows, sums, strict=True))[1:]:
            assert window["tokens_per_s"] * window["measured"]["seconds"] == tokens
        measured = totals["measured"]
        assert totals["tokens_per_s"] * measured["seconds"] == sum(sums[1:])
        assert totals["warmup"]["counts"]["tokens"] + measured["counts"]["tokens"] == sum(sums)
        assert totals["warmup"]["samples"] + measured["samples"] == 14
        assert totals["apart_s"] == {"evaluation": 30, "saving": 7}
        assert measured["seconds"] == 3


@pytest.mark.parametrize("kind", ["events", "windows"])
def test_evaluation_is_no_step_time_on_a_queueing_device(kind: str) -> None:
    device, clock = queued_clock(kind)
    for step in range(20):
        device.submit(0.010)
        clock.step(8)
        if step == 10:
            with clock.paused("evaluation"):
                device.submit(3.0)
                device.wait()
    device.wait()
    window = clock.window()
    assert window["step_time_s"] == pytest.approx(0.010, rel=0.1)
    assert clock.totals()["apart_s"]["evaluation"] == pytest.approx(3.0, rel=0.1)


@pytest.mark.parametrize("kind", ["host", "events", "windows"])
def test_a_step_that_compiles_is_counted_apart_and_in_no_average(kind: str) -> None:
    device, clock = queued_clock(kind) if kind != "host" else (Device(now := Clock()), StepClock("cpu", now))
    for step in range(1, 41):
        compiles = step in (10, 11, 25)
        device.submit(0.500 if compiles else 0.010)
        if kind == "host":
            device.wait()
        clock.step(8, apart="compilation" if compiles else None)
        if step % 20 == 0:
            device.wait()
            assert clock.window()["samples_per_s"] == pytest.approx(800, rel=0.05)
    totals = clock.totals()
    # The first step is the warm-up; of a window that is timed as a whole, what was before a step apart goes with it.
    assert totals["measured"]["steps"] == (24 if kind == "windows" else 36)
    assert totals["measured"]["samples"] == 8 * totals["measured"]["steps"]
    assert totals["step_time_s"]["p95"] == pytest.approx(0.010, rel=0.1)
    assert totals["apart_s"]["compilation"] == pytest.approx(1.5 + (0.12 if kind == "windows" else 0), rel=0.03)


def test_a_pause_that_is_never_ended_or_begun_is_refused() -> None:
    clock = StepClock("cpu", Clock())
    with pytest.raises(RuntimeError, match=r"call pause\(\) before"):
        clock.resume()
    clock.pause("saving")
    with pytest.raises(RuntimeError, match="for 'saving'; call resume"):
        clock.pause()


def test_the_wait_for_data_is_a_share_of_the_step_time_without_the_first_step() -> None:
    now = Clock()
    clock = StepClock("cpu", now)
    for step in range(11):
        wait = 5.0 if step == 0 else 0.25
        clock.asks()
        now.wait(wait)
        clock.given()
        now.wait(0.75)
        clock.step(8)
    assert clock.window()["data_wait_s"] == pytest.approx(0.25)
    assert clock.waited() == (pytest.approx(2.5), pytest.approx(10.0), 10)
    assert clock.totals()["data_wait_fraction"] == pytest.approx(0.25)
    assert clock.totals()["warmup"]["data_wait_s"] == 5.0


def test_a_window_of_the_first_step_alone_tells_nothing_but_the_warm_up() -> None:
    now = Clock()
    clock = StepClock("cpu", now)
    now.wait(2)
    clock.step(8)
    window = clock.window()
    assert window["step_time_s"] is None
    assert window["samples_per_s"] is None
    assert window["warmup_s"] == 2
    now.wait(1)
    clock.step(8)
    assert "warmup_s" not in clock.window()


def test_start_leaves_out_what_came_before_the_first_batch() -> None:
    now = Clock()
    clock = StepClock("cpu", now)
    now.wait(60)
    clock.start()
    now.wait(1)
    clock.step(8)
    assert clock.totals()["warmup"]["seconds"] == 1


def test_quantiles_of_step_times_agree_with_sorting_them_to_a_thousandth() -> None:
    draw = random.Random(0)
    times = [draw.lognormvariate(-4, 0.7) for _ in range(20_000)]
    now = Clock()
    now.time = 0.0
    clock = StepClock("cpu", now)
    clock.step(1)
    for seconds in times:
        now.wait(seconds)
        clock.step(1)
    told = clock.totals()["step_time_s"]
    times.sort()
    # A clock at some 500 s resolves 1e-13 s: no matter here.
    assert told["p50"] == pytest.approx(times[9_999], rel=RELATIVE_ERROR * 1.01)
    assert told["p95"] == pytest.approx(times[18_999], rel=RELATIVE_ERROR * 1.01)
    assert told["mean"] == pytest.approx(statistics.fmean(times), rel=1e-6)


def test_a_quantile_is_within_its_stated_error_for_any_single_value() -> None:
    for value in (1e-7, 3.3e-4, 0.0123, 1.0, 77.0, 1e5):
        quantiles = Quantiles()
        quantiles.add(value, 3)
        assert quantiles.at(0.5) == pytest.approx(value, rel=RELATIVE_ERROR * 1.000001)
    assert Quantiles().at(0.5) is None


@pytest.mark.parametrize("kind", ["cpu", "events"])
def test_memory_stays_bounded_over_many_steps_without_a_log_point(kind: str) -> None:
    now = Clock()
    device = Device(now)
    made: list[Event] = []

    def new_event() -> Event:
        made.append(Event(device))
        return made[-1]

    clock = StepClock("cpu", now) if kind == "cpu" else StepClock("cuda", now, new_event=new_event)

    def steps(number: int) -> int:
        for _ in range(number):
            device.submit(0.010)
            now.wait(0.010)
            clock.step(8, {"tokens": 64})
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = steps(5 * PENDING)
        after = steps(20 * PENDING)
    finally:
        tracemalloc.stop()
    assert after - before < PENDING * sys.getsizeof(1.0)
    assert len(made) <= PENDING + 2
    measured = clock.totals()["measured"]
    assert measured["steps"] == 25 * PENDING - 1
    assert measured["counts"]["tokens"] == 64 * measured["steps"]


def test_counts_of_samples_do_not_replace_the_samples_themselves() -> None:
    now = Clock()
    clock = StepClock("cpu", now)
    for _ in range(3):
        now.wait(1)
        clock.step(16, {"samples": 4})
    assert clock.window()["samples_per_s"] == 16


def test_the_clock_of_real_time_measures_a_real_sleep() -> None:
    import time

    clock = StepClock("cpu")
    began = time.perf_counter()
    clock.step(8)
    for _ in range(4):
        time.sleep(0.01)
        clock.step(8)
    took = time.perf_counter() - began
    assert 0.01 * 4 <= clock.window()["measured"]["seconds"] <= took


@pytest.mark.parametrize(
    ("reading", "copying", "waits"), [(0.004, 0.0, 0.0), (0.015, 0.0, 0.005), (0.004, 0.003, 0.003)]
)
def test_data_wait_on_a_queueing_device_is_the_time_in_which_the_device_had_nothing_to_do(
    reading: float, copying: float, waits: float
) -> None:
    device, clock = queued_clock("events")
    for step in range(31):
        clock.asks()
        device.clock.wait(reading)
        if copying:  # the step's stream waits for a copy that another stream makes
            device.free_at = max(device.free_at, device.clock()) + copying
        clock.given()
        device.submit(0.010)
        clock.step(8)
        if step == 0:
            assert clock.warmup["data_wait_s"] == pytest.approx(reading)
    device.wait()
    window = clock.window()
    # The launch of a step costs the host 0.1 ms, in which the device may have nothing to do either.
    assert window["data_wait_s"] == pytest.approx(waits, abs=0.0005)
    assert clock.totals()["data_wait_fraction"] == pytest.approx(waits / window["step_time_s"], abs=0.04)


def test_what_is_read_after_a_launch_is_waited_for_only_when_the_device_has_done_the_step() -> None:
    device, clock = queued_clock("events")
    for _ in range(21):
        device.submit(0.010)
        clock.asks()
        device.clock.wait(0.012)
        clock.given()
        clock.step(8)
    assert clock.window()["data_wait_s"] == pytest.approx(0.002, abs=0.0002)


def test_events_around_waits_are_used_again() -> None:
    made = []
    device = Device(Clock())
    clock = StepClock("cuda", device.clock, new_event=lambda: made.append(Event(device)) or made[-1])
    for _ in range(5):
        for _ in range(10):
            clock.asks()
            clock.given()
            device.submit(0.010)
            clock.step(8)
        device.wait()
        clock.window()
    assert len(made) == 1 + 3 * 10


@pytest.mark.parametrize("kind", ["cpu", "windows"])
def test_data_wait_elsewhere_is_the_time_of_the_host(kind: str) -> None:
    device, clock = queued_clock("windows") if kind == "windows" else (Device(now := Clock()), StepClock("cpu", now))
    for _ in range(11):
        clock.asks()
        device.clock.wait(0.003)
        clock.given()
        device.clock.wait(0.010)
        clock.step(8)
    assert clock.window()["data_wait_s"] == pytest.approx(0.003)
