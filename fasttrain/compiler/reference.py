"""Eager code against compiled code on the machine at hand: what a step takes either way, and what to do about it."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from fasttrain.lazy import torch

# Times of one machine differ by so much from minute to minute; less than that is no difference.
NOISE = 0.03


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Seconds of one call either way (medians), and of the calls that compiled.

    `eager_s=None`: eager code ran out of memory. `apart`: each call of the faster code was faster than any of the other;
    else the difference of the medians may well be chance.
    """

    eager_s: float | None
    compiled_s: float
    compile_s: float
    apart: bool = True

    @property
    def ratio(self) -> float | None:
        """Compiled against eager: below 1 it is faster. `None`: there is no eager time."""
        return None if self.eager_s is None else self.compiled_s / self.eager_s

    @property
    def loses(self) -> bool:
        """Slower than eager code by more than noise."""
        return self.apart and self.ratio is not None and self.ratio > 1 + NOISE

    @property
    def gains(self) -> bool:
        """Faster than eager code by more than noise."""
        return self.apart and self.ratio is not None and self.ratio < 1 - NOISE

    def pays_after(self, calls: int = 1) -> int | None:
        """Steps of so many calls each after which the time to compile is won back; `None`: never, or not known."""
        if self.eager_s is None or not self.gains:
            return None
        return -int(-self.compile_s // (calls * (self.eager_s - self.compiled_s)))

    def figures(self, calls: int = 1) -> dict[str, float | int | None]:
        """For a summary: seconds, the ratio, and the steps after which compiling pays."""
        return {
            "eager_step_s": self.eager_s,
            "compiled_step_s": self.compiled_s,
            "ratio": self.ratio,
            "pays_after_steps": self.pays_after(calls),
        }


def compare(
    run: Callable[[], object],
    eager: Callable[[], AbstractContextManager[Any]],
    *,
    steps: int = 3,
    compiling_calls: int = 1,
    now: Callable[[], float] = time.perf_counter,
    synchronize: Callable[[], object] = lambda: None,
    compiled_anew: Callable[[], bool] = lambda: False,
) -> Comparison:
    """Time `steps` calls of `run` inside `eager()`, compile, and time as many calls of compiled code.

    The device is waited for around each call. Where compiled code seems to lose, both are measured once more, and the
    better round counts: the machine may have been busy with something else. The first call inside `eager()` warms up and
    is not counted; the first `compiling_calls` outside are those that compile.

    An out-of-memory error inside `eager()` is a finding (`eager_s=None`). One outside is raised.

    `compiled_anew` says whether anything was compiled since it was last asked.

    Raises:
        CannotCompareError: code is compiled again in the calls that were to be timed.
    """

    def timed() -> float:
        synchronize()
        began = now()
        run()
        synchronize()
        return now() - began

    def timed_eagerly() -> list[float]:
        with eager():
            return [timed() for _ in range(1 + steps)][1:]

    def timed_compiled(warm_up: int) -> list[float]:
        for _ in range(warm_up):
            timed()
        compiled_anew()
        times = [timed() for _ in range(steps)]
        if compiled_anew():
            raise CannotCompareError("it is compiled again from call to call")
        return times

    eager_times: list[float] | None = None
    # What the forward left is gone only once the error is, so memory is given back after this block and not in it.
    with contextlib.suppress(torch.OutOfMemoryError):
        eager_times = timed_eagerly()
    if eager_times is None:
        free_memory()
    compiling_s = sum(timed() for _ in range(compiling_calls))
    times = timed_compiled(0)
    compile_s = max(0.0, compiling_s - compiling_calls * statistics.median(times))
    if eager_times is None:
        return Comparison(eager_s=None, compiled_s=statistics.median(times), compile_s=compile_s)
    found = _of_times(eager_times, times, compile_s)
    if found.loses:
        again = _of_times(timed_eagerly(), timed_compiled(1), compile_s)
        found = again if again.compiled_s / again.eager_s < found.compiled_s / found.eager_s else found
    return found


def _of_times(eager: list[float], compiled: list[float], compile_s: float) -> Any:
    apart = max(eager) < min(compiled) or max(compiled) < min(eager)
    eager_s, compiled_s = statistics.median(eager), statistics.median(compiled)
    return Comparison(eager_s=eager_s, compiled_s=compiled_s, compile_s=compile_s, apart=apart)


class CannotCompareError(Exception):
    """Gradients of a loss cannot be had beside the training."""


def forward_backward(model: Any, loss_of: Callable[[], Any]) -> Callable[[], None]:
    """A forward and backward that leaves no gradient: `.grad` stays, and no hook that follows gradients is called.

    `loss_of` gives a loss (0-dim). The gradients are those of the parameters of `model` that train.

    Raises:
        CannotCompareError: when called; `torch.autograd.grad` does not handle the loss (checkpointing with
            use_reentrant=True, for one).
    """

    def run() -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        loss = loss_of()
        if not trained or not loss.requires_grad:
            raise CannotCompareError("nothing trains in the first step")
        try:
            torch.autograd.grad(loss, trained, allow_unused=True)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # a fault of the model comes up again in the step itself
            raise CannotCompareError(f"torch.autograd.grad: {str(error).partition(chr(10))[0]}") from error

    return run


class Reference:
    """Compares once, before the first step of a run, and says what came of it.

    `off` is what to write where compiling does not pay, such as compile=null. `calls`: forwards and backwards of a step.
    """

    def __init__(self, *, steps: int, off: str, total_steps: int | None = None) -> None:
        self.steps, self.off, self.total_steps = steps, off, total_steps
        self.found: Comparison | None = None
        self.calls = 1
        self.step = 0
        self._untold = False
        self._failed: str | None = None

    def measure(
        self,
        run: Callable[[], object],
        eager: Callable[[], AbstractContextManager[Any]],
        device: Any,
        *,
        compiling_calls: int = 1,
        now: Callable[[], float] | None = None,
        compiled_anew: Callable[[], bool] = lambda: False,
    ) -> None:
        """Compare; what cannot be compared is told and stops nothing."""
        failed = None
        try:
            self.found = compare(
                run,
                eager,
                steps=self.steps,
                compiling_calls=compiling_calls,
                now=now or time.perf_counter,
                synchronize=lambda: synchronize(device),
                compiled_anew=compiled_anew,
            )
        except (CannotCompareError, torch.OutOfMemoryError) as error:
            failed = "out of memory" if isinstance(error, torch.OutOfMemoryError) else str(error)
        self._failed = failed
        self._untold = True
        forget_peak(device)

    def remarks(self, compile_s: float = 0.0, broken: bool = False) -> list[str]:
        """The verdict, the first time. `compile_s`: what compiling took by now, of all that is compiled in the run.

        `broken`: there are graph breaks, which are to be mended first.
        """
        if not self._untold:
            return []
        self._untold = False
        if self.found is None:
            return [f"not compared with eager code ({self._failed})"]
        self.found = replace(self.found, compile_s=max(compile_s, self.found.compile_s))
        left = None if self.total_steps is None else self.total_steps - self.step
        off = f"mend the graph breaks first, or {self.off}" if broken else self.off
        return [verdict(self.found, off=off, calls=self.calls, steps_left=left)]

    def summary(self) -> dict[str, float | int | None]:
        """The figures; empty before there are any."""
        return {} if self.found is None else self.found.figures(self.calls)


def synchronize(device: Any) -> None:
    """Wait for a device. The host itself is never ahead."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def free_memory() -> None:
    """Give back what the caching allocator of the accelerator holds and nobody uses."""
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def forget_peak(device: Any) -> None:
    """Let an accelerator's peak of memory start again from what is in use now: that of eager code is not the run's."""
    if device.type != "cpu" and torch.accelerator.is_available():
        free_memory()
        torch.accelerator.reset_peak_memory_stats(device)


def verdict(found: Comparison, *, off: str, calls: int = 1, steps_left: int | None = None) -> str:
    """What was found, as one sentence, with what to write (`off`: such as compile=null) where compiling does not pay.

    `calls`: forwards and backwards of a step. `steps_left`: steps that the run has before it.
    """
    took = milliseconds(found.compiled_s)
    if found.ratio is None or found.eager_s is None:
        return f"without it this batch does not fit into memory; with it forward and backward take {took}"
    against = f"({took} against {milliseconds(found.eager_s)} for forward and backward)"
    if found.loses:
        return f"a step takes {found.ratio:.2f} x eager's time {against}; drop it: {off}"
    if not found.gains:
        return f"no difference to eager code that could be told from noise {against}; without it a run starts sooner: {off}"
    told = f"a step takes {found.ratio:.2f} x eager's time {against}; compiling took {found.compile_s:.1f} s"
    pays = found.pays_after(calls)
    assert pays is not None
    if steps_left is not None and pays > steps_left:
        return f"{told}, which pays after {pays:,} steps, and the run has {steps_left:,}; drop it: {off}"
    return f"{told}, which pays after {pays:,} steps"


def milliseconds(seconds: float) -> str:
    """A time in words: 12.3 ms, 0.41 ms, 1.20 s."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.2f} s"
