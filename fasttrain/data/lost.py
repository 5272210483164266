"""What became of a worker that died or hangs, and of a batch that found no room in shared memory."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from fasttrain.data.workers import Death, Duty, at_work, deaths, earlier_deaths
from fasttrain.errors import LostWorker


def lost(error: BaseException) -> LostWorker | None:
    """What became of a worker, where that is what an error is about: torch names a process id and the signal alone.

    torch raises wherever the trainer happens to be when a worker dies: in the middle of a step, and in here, too.
    """
    try:
        return _lost(error)
    except RuntimeError as told_meanwhile:
        return _lost(told_meanwhile)


def _lost(error: BaseException) -> LostWorker | None:
    text = str(error)
    if isinstance(error, OSError | EOFError):
        # A connection that broke may be known before the death of the process at its other end.
        workers = {worker.sentinel: worker for iterator, _ in at_work() for worker in iterator._workers}
        for sentinel in wait(list(workers), timeout=1.0):
            workers[sentinel].join(1.0)
        found = deaths()
    elif isinstance(error, RuntimeError) and "DataLoader timed out" in text:
        return next(filter(None, (_late(iterator, duty) for iterator, duty in at_work())), None)
    elif isinstance(error, RuntimeError) and "DataLoader worker" in text:
        found = [death for death in deaths() + earlier_deaths() if str(death.process) in text]
    else:
        return None
    return LostWorker(_how_it_died(found[0])) if found else None


def _late(iterator: Any, duty: Duty) -> LostWorker | None:
    if (awaited := iterator._task_info.get(iterator._rcvd_idx)) is None:
        return None
    number, workers = awaited[0], iterator._workers
    who = _named(number, len(workers), workers[number].pid, duty.what)
    return LostWorker(
        f"{who} gave nothing for {iterator._timeout:g} s{_while_reading(duty.sample_of(number))}; look at that sample, give "
        "it more time (Data(timeout_s=...), None: without end), or use num_workers=0 to see where it hangs."
    )


def _named(number: int, workers: int, process: int, what: str) -> str:
    return f"worker {number} of {workers} (process {process}), which reads the {what},"


def _while_reading(sample: str | None) -> str:
    return "" if sample is None else f" while it read {sample}"


# What torch raises, or a connection to a worker, where a batch is asked for.
OF_READING = (RuntimeError, OSError, EOFError)


@contextlib.contextmanager
def deaths_explained(kinds: tuple[type[Exception], ...] = (RuntimeError,)) -> Iterator[None]:
    """Where a worker dies inside, what torch raises becomes a `LostWorker`; of errors of these kinds."""
    try:
        yield
    except kinds as error:
        if (found := lost(error)) is None:
            raise
        raise found from error


def _how_it_died(death: Death) -> str:
    code, at = death.code, _while_reading(death.sample)
    who = _named(death.number, death.workers, death.process, death.what)
    settings = f"num_workers={death.workers}" + (f", batch_size={death.batch_size}" if death.batch_size else "")
    if code > 0:
        return f"{who} ended by itself with exit code {code}{at} ({settings}); use num_workers=0 to see where."
    name = signal.Signals(-code).name
    if name == "SIGBUS":
        return (
            f"{who} was killed by SIGBUS{at}: memory that it had asked for could not be had. Batches travel through shared "
            f"memory ({settings}), and {_shared_memory()}; {ROOM}."
        )
    if name == "SIGKILL":
        return (
            f"{who} was killed by SIGKILL{at}: mostly the system does so where memory runs out ({_memory()}; {settings}); "
            "use fewer workers (num_workers=0: none) or smaller batches, or ask for more memory."
        )
    return (
        f"{who} was killed by {name}{at} ({settings}); use num_workers=0 to see where, or python -X faulthandler, which "
        "prints the place."
    )


def full_shared_memory(error: BaseException, duty: Duty, num_workers: int) -> LostWorker:
    """The error of a worker that found no room in /dev/shm for a batch."""
    return LostWorker(
        f"a batch of the {duty.what} found no room in shared memory ({_first_line(error)}). Batches travel through it "
        f"(num_workers={num_workers}, batch_size={duty.batch_size}), and {_shared_memory()}; {ROOM}."
    )


ROOM = (
    "give it room (docker run --shm-size=8g, or --ipc=host), use fewer workers or smaller batches, or num_workers=0, which "
    "needs none"
)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _shared_memory() -> str:
    try:
        found = os.statvfs("/dev/shm")
    except OSError as error:
        return f"/dev/shm cannot be looked at ({error.strerror})"
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    return f"/dev/shm holds {_mib(size)} and {_mib(free)} of it are free"


def _memory() -> str:
    """What is free now: of the machine, and of the control group where it has a bound."""
    told = []
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        held = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
        told.append(f"{_mib(held['MemAvailable'])} of {_mib(held['MemTotal'])} are free now")
    with contextlib.suppress(OSError, ValueError):
        folder = Path("/sys/fs/cgroup")
        used, bound = (int((folder / name).read_text()) for name in ("memory.current", "memory.max"))
        told.append(f"{_mib(used)} of the {_mib(bound)} of this container are taken")
    return ", ".join(told) or "how much is free cannot be told here"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
