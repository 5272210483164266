"""`num_workers=auto`: as many loader workers as let reading keep up with the steps, found in the first steps."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

# Reading that takes less of a step than this is left to the process that trains.
SMALL = 0.05
# A step must get faster by this much for more workers to be kept: they cost memory, and cores of others.
GAIN = 0.02
# Measured at each number of workers: so many groups of steps, a group as long as there are workers, since their batches
# come in bursts.
GROUPS = 7
# A step longer than so many without workers holds an evaluation or a save, and is left out.
LONGEST = 4
# Numbers that are tried at most, the first among them.
TRIES = 3


class Workers:
    """Looks at the first steps, begins with no worker, tries one number or two, and keeps the best.

    The time of a step counts, with all that it waits for: where the CPU is the device, workers take cores from the
    training, and a number that makes steps slower is taken back. On an accelerator a step without workers seems shorter
    than it is, since the host goes on while the device computes; then fewer are tried the second time. Every rank looks
    for itself.

    Args:
        cores: this rank may use; never more workers than that.
        now: a clock in seconds.
    """

    def __init__(self, cores: int, now: Callable[[], float] = time.perf_counter) -> None:
        self.cores, self.num, self.settled = cores, 0, False
        # By number of workers: seconds a step, and seconds of it that reading took of the process that trains.
        self.tried: dict[int, tuple[float, float]] = {}
        self._now = now
        self._remark: str | None = None
        self._begin()

    def _begin(self) -> None:
        # Left out: what the first step compiles and allocates, and what workers hold in store when they have begun.
        self._skip = 2 * self.num + 2
        self._steps: list[float] = []
        self._reads: list[float] = []
        self._last: float | None = None

    def read(self, seconds: float) -> bool:
        """A batch was read, in so many seconds of this process. Whether `num` is another one from now on."""
        now = self._now()
        if self.settled:
            return False
        if self._last is not None and self._skip <= 0:
            step, alone = now - self._last, self.tried.get(0)
            if alone is None or step <= LONGEST * alone[0]:
                self._steps.append(step)
                self._reads.append(seconds)
        self._last, self._skip = now, self._skip - 1
        group = max(1, self.num)
        if len(self._steps) < GROUPS * group:
            return False
        self.tried[self.num] = _typical(self._steps, group), _typical(self._reads, group)
        before, wanted = self.num, self._next()
        if wanted is None or wanted in self.tried:
            self._settle()
        else:
            self.num = wanted
        self._begin()
        return self.num != before

    def _next(self) -> int | None:
        """The number to try next; None: what was tried is enough."""
        step, waits = self.tried[self.num]
        alone, reads = self.tried[0]
        if self.num == 0:
            return None if reads <= SMALL * step else self._for(reads / max(step - reads, 1e-9))
        if len(self.tried) == TRIES or step > (1 - GAIN) * alone:
            return None
        if waits > SMALL * step:
            return min(self.cores, 2 * self.num)
        return fewer if (fewer := self._for(1.2 * reads / step)) <= self.num / 2 else None

    def _for(self, ratio: float) -> int:
        return min(self.cores, max(1, math.ceil(ratio)))

    def _settle(self) -> None:
        best = min(step for step, _ in self.tried.values())
        self.num = min(num for num, (step, _) in self.tried.items() if step <= best * (1 + GAIN))
        self.settled = True
        seen = ", ".join(f"{step * 1000:.3g} ms a step with {num}" for num, (step, _) in sorted(self.tried.items()))
        self._remark = (
            f"num_workers=auto: {self.num} of at most {self.cores} (the cores of this rank); reading a batch takes "
            f"{self.tried[0][1] * 1000:.3g} ms; {seen}"
        )

    def remark(self) -> str | None:
        """What was chosen and why; once."""
        told, self._remark = self._remark, None
        return told

    def summary(self) -> dict[str, Any]:
        """What was measured, by number of workers."""
        return {
            "cores": self.cores,
            "settled": self.settled,
            "measured": {
                str(num): {"step_s": step, "read_s": reads} for num, (step, reads) in sorted(self.tried.items())
            },
        }


def _typical(seconds: list[float], group: int) -> float:
    return statistics.median(sum(seconds[i : i + group]) / group for i in range(0, len(seconds), group))
