"""How long steps take and how much they get done, measured so that an asynchronous device cannot fool the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from fasttrain.lazy import torch
from fasttrain.observe.quantiles import Quantiles

Sums = dict[str, float]

# Steps whose times may wait to be read; more are folded before the next log point, so memory stays bounded.
PENDING = 512


class StepClock:
    """Step time, throughput and data wait; per window between two log points, and for the run.

    How time is taken depends on the device, for a launch that returns at once says nothing of the work:

    - CPU: the host's clock at the end of each step.
    - CUDA: an event is recorded at the end of each step and read at log points, so each step has its own time. The
      device is waited for once, at the end of the first step.
    - Any other (or where `synchronize` is given): the device is waited for at the end of the first step and of each
      window, and the window is timed as a whole. Quantiles are then those of window means.

    The first step (warm-up: compilation, allocation, the first batch) is kept apart. So is what happens between `pause`
    and `resume`: evaluation, saving. Samples and counts are what the caller gives, once an optimizer step: give the sum
    over all microbatches and ranks. No tensor is read.

    Costs: about 1 µs a step (measured on a CPU). Memory: bounded, however long the run (`Quantiles`: exact to 0.1 %).

    Args:
        device_type: "cpu", "cuda", "mps", ...
        now: a clock in seconds.
        synchronize: waits until the device has done all its work.
        new_event: makes a timing event with `record`, `synchronize` and `elapsed_time` (ms); CUDA's by default.
    """

    def __init__(
        self,
        device_type: str,
        now: Callable[[], float] = time.perf_counter,
        synchronize: Callable[[], None] | None = None,
        *,
        new_event: Callable[[], Any] | None = None,
    ) -> None:
        self._now = now
        self._events = new_event is not None or (device_type == "cuda" and synchronize is None)
        self._new_event = new_event or _cuda_event
        self._whole_windows = not self._events and (synchronize is not None or device_type != "cpu")
        self._synchronize: Callable[[], Any] = synchronize or _wait_for_accelerator

        self._samples: float = 0
        self._counts: Sums = {}
        self._waited = 0.0

        self.warmup: dict[str, Any] = {"seconds": None, "samples": 0, "counts": {}, "data_wait_s": 0.0}
        self._window = _Tally()
        self._run = _Tally()
        self._quantiles = Quantiles()

        self._host: list[float] = []  # host times at step ends, not folded yet
        self._marks: list[tuple[Any, Any, list[Any]]] = []  # events around a step and its waits, not folded yet
        self._waits: list[Any] = []  # pairs of events around what the device may have waited for in this step
        self._asked: Any = 0.0
        self._spare: list[Any] = []
        self._unfolded = 0  # whole windows: steps since the device was last waited for
        self._timed: tuple[float, Sums] = (0, {})  # whole windows: what was taken in until then
        self._apart: Sums = {}
        self._paused_at: float | None = None
        self._paused_for = ""
        self._warm = False
        self._warmup_told = False
        self._mark: Any = None  # the event at the end of the last step
        self._last = now()

    def start(self) -> None:
        """Begin the first step now: call it right before the first batch is asked for."""
        self._last = self._now()
        if self._mark is not None:
            self._mark = self._record()

    # ---- once a step

    def asks(self) -> None:
        """The host begins to get data. Ended by `given`."""
        self._asked = self._record() if self._events and self._warm else self._now()

    def given(self) -> None:
        """The host has the data that it asked for.

        With events, the device waited from when it had nothing else to do until the data was there, and no longer: what
        the host read while the device was busy is no wait. Elsewhere the host's time is counted.
        """
        if self._events and self._warm:
            self._waits += (self._asked, self._record())
        else:
            self._waited += self._now() - self._asked

    def step(self, samples: float, counts: Mapping[str, float] | None = None, apart: str | None = None) -> None:
        """An optimizer step has been launched; it took `samples`, and `counts` of other units, over all ranks.

        `apart` says what made it unlike the others (`compilation`): its time and samples are left out of all figures but
        `totals()["apart_s"]`.
        """
        if apart is not None and self._warm:
            self._leave_out(apart)
            return
        if self._warm:
            self._samples += samples
            if counts:
                sums = self._counts
                for unit, count in counts.items():
                    sums[unit] = sums.get(unit, 0) + count
        if self._events:
            mark = self._record()
            if self._mark is not None:
                self._marks.append((self._mark, mark, self._waits))
                self._waits = []
            self._mark = mark
            if len(self._marks) > PENDING:
                self._fold_events(len(self._marks) // 2)
        elif self._whole_windows:
            self._unfolded += 1
        else:
            now = self._now()
            self._host.append(now - self._last)
            self._last = now
            if len(self._host) > PENDING:
                self._fold_host()
        if not self._warm:
            self._end_warmup(samples, counts)

    def _end_warmup(self, samples: float, counts: Mapping[str, float] | None) -> None:
        self._warm = True
        self.warmup.update(samples=samples, counts=dict(counts or {}), data_wait_s=self._waited)
        self._waited = 0.0
        if not self._events and not self._whole_windows:
            self.warmup["seconds"] = self._host.pop()
            return
        # Once a run: an asynchronous device has done its first step when it says so.
        self._mark.synchronize() if self._events else self._synchronize()
        now = self._now()
        self.warmup["seconds"], self._last, self._unfolded = now - self._last, now, 0

    # ---- apart

    def _leave_out(self, why: str) -> None:
        """The step that just ended does not count. It is waited for: there is no other way to time it by itself."""
        if self._events:
            self._fold_events(len(self._marks))
            mark = self._record()
            mark.synchronize()
            seconds = self._mark.elapsed_time(mark) / 1000
            self._spare += (self._mark, *self._waits)
            self._mark, self._waits = mark, []
        else:
            if self._whole_windows:  # the steps before it in the window were not timed, and are left out with it
                self._synchronize()
                self._unfolded, self._samples, self._counts = 0, self._timed[0], dict(self._timed[1])
            now = self._now()
            seconds, self._last = now - self._last, now
        self._waited = 0.0
        self._apart[why] = self._apart.get(why, 0.0) + seconds

    def pause(self, what: str = "other") -> None:
        """Stop counting time: an evaluation or a save begins. `what` names it in `totals()["apart_s"]`."""
        if self._paused_at is not None:
            raise RuntimeError(f"the clock is paused already, for '{self._paused_for}'; call resume() first.")
        if self._whole_windows and self._warm:
            self._fold_whole()
        self._paused_at, self._paused_for = self._now(), what

    def resume(self) -> None:
        """Count time again."""
        if self._paused_at is None:
            raise RuntimeError("the clock is not paused; call pause() before resume().")
        if self._whole_windows:
            self._synchronize()
        now = self._now()
        away = now - self._paused_at
        self._apart[self._paused_for] = self._apart.get(self._paused_for, 0.0) + away
        self._last += away
        self._paused_at = None
        if self._mark is not None:
            self._mark = self._record()

    def paused(self, what: str = "other") -> _Paused:
        """`with clock.paused("evaluation"): ...`."""
        return _Paused(self, what)

    # ---- at log points

    def window(self) -> dict[str, Any]:
        """Figures since the last call, for the log: call it after the loss was read.

        `step_time_s` and `data_wait_s` are means a step, `samples_per_s` and `<unit>_per_s` rates; `measured` holds the
        sums they come from: `steps`, `seconds`, `samples`, `counts`. All leave the warm-up step out, and are `None`
        where it was the only one. The first window also has `warmup_s`.
        """
        self._fold()
        tally, self._window = self._window, _Tally()
        figures = tally.figures()
        if self._warm and not self._warmup_told:
            figures["warmup_s"] = self.warmup["seconds"]
            self._warmup_told = True
        self._run.add(tally)
        return figures

    def waited(self) -> tuple[float, float, int]:
        """Seconds of waiting for data, out of how many seconds, in how many steps: until the last log point."""
        both = _Tally()
        both.add(self._run)
        both.add(self._window)
        return both.waited, both.seconds, both.steps

    def totals(self) -> dict[str, Any]:
        """Figures of the run so far; may be called at any time after the first step.

        As `window`, and `step_time_s` with `p50` and `p95`, `data_wait_fraction`, `warmup` (seconds, samples, counts,
        data_wait_s of the first step) and `apart_s` (seconds of evaluation, saving and so on, by name).
        """
        self._fold()
        whole = _Tally()
        whole.add(self._run)
        whole.add(self._window)
        figures = whole.figures()
        figures["step_time_s"] = {
            "mean": figures["step_time_s"],
            "p50": self._quantiles.at(0.5),
            "p95": self._quantiles.at(0.95),
        }
        figures["data_wait_fraction"] = whole.waited / whole.seconds if whole.seconds else None
        figures["warmup"] = self.warmup
        figures["apart_s"] = dict(self._apart)
        return figures

    # ---- folding times into the tally

    def _fold(self) -> None:
        if self._events:
            self._fold_events(len(self._marks))
        elif self._whole_windows:
            if self._paused_at is None:
                self._fold_whole()
        else:
            self._fold_host()
        tally = self._window
        tally.samples += self._samples
        tally.waited += self._waited if self._warm else 0.0
        for unit, count in self._counts.items():
            tally.counts[unit] = tally.counts.get(unit, 0) + count
        self._samples, self._counts, self._timed = 0, {}, (0, {})
        if self._warm:
            self._waited = 0.0

    def _took(self, seconds: float, steps: int = 1) -> None:
        self._window.steps += steps
        self._window.seconds += seconds
        self._quantiles.add(seconds / steps, steps)

    def _fold_host(self) -> None:
        self._window.steps += len(self._host)
        self._window.seconds += sum(self._host)
        self._quantiles.add_each(self._host)
        self._host.clear()

    def _fold_whole(self) -> None:
        if self._unfolded:
            self._synchronize()
            now = self._now()
            self._took(now - self._last, self._unfolded)
            self._last, self._unfolded = now, 0
            self._timed = self._samples, dict(self._counts)

    def _fold_events(self, number: int) -> None:
        if not number:
            return
        done, self._marks = self._marks[:number], self._marks[number:]
        # At a log point only the update of the last step may still run. Between log points the event is hundreds of
        # steps old, which is more than a device queues: there is nothing to wait for.
        done[-1][1].synchronize()
        for start, end, waits in done:
            self._took(start.elapsed_time(end) / 1000)
            for asked, given in zip(waits[::2], waits[1::2], strict=True):
                self._window.waited += asked.elapsed_time(given) / 1000
            # Starts are free again; the last end may be the start of a pair that is still to come.
            self._spare += (start, *waits)

    def _record(self) -> Any:
        event = self._spare.pop() if self._spare else self._new_event()
        event.record()
        return event


class _Tally:
    """Sums over steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.seconds = 0.0
        self.samples: float = 0
        self.waited = 0.0
        self.counts: Sums = {}

    def add(self, other: _Tally) -> None:
        self.steps += other.steps
        self.seconds += other.seconds
        self.samples += other.samples
        self.waited += other.waited
        for unit, count in other.counts.items():
            self.counts[unit] = self.counts.get(unit, 0) + count

    def figures(self) -> dict[str, Any]:
        steps, seconds = self.steps, self.seconds
        figures: dict[str, Any] = {
            "step_time_s": seconds / steps if steps else None,
            "data_wait_s": self.waited / steps if steps else None,
            "samples_per_s": self.samples / seconds if seconds else None,
        }
        for unit, count in self.counts.items():
            figures.setdefault(f"{unit}_per_s", count / seconds if seconds else None)
        counts = dict(self.counts)
        figures["measured"] = {"steps": steps, "seconds": seconds, "samples": self.samples, "counts": counts}
        return figures


class _Paused:
    """The time inside is counted apart."""

    def __init__(self, clock: StepClock, what: str) -> None:
        self.clock, self.what = clock, what

    def __enter__(self) -> None:
        self.clock.pause(self.what)

    def __exit__(self, *error: object) -> None:
        self.clock.resume()


def _wait_for_accelerator() -> None:
    torch.accelerator.synchronize()


def _cuda_event() -> Any:
    return torch.cuda.Event(enable_timing=True)
