"""Loader workers and signals: whether a run stops is for the process that trains to decide."""

from __future__ import annotations

import atexit
import signal
import weakref
from collections.abc import Callable, Hashable, Iterator
from types import FrameType
from typing import Any, NamedTuple


class LeaveSignalsToTrainer:
    """The first thing a worker does: it leaves signals to the process that trains. Then what the user gave, if anything.

    Launchers, schedulers and terminals signal whole groups of processes. A worker that dies of it makes torch raise in
    the middle of a step, and the run fails where it would have stopped and saved.
    """

    def __init__(self, then: Callable[[int], None] | None = None) -> None:
        self.then = then

    def __call__(self, worker: int) -> None:
        """Take the handlers of this worker."""
        for name in ("SIGINT", "SIGUSR1"):
            if hasattr(signal, name):
                # Not SIG_IGN, which programs started by a data set would inherit.
                signal.signal(getattr(signal, name), _leave)
        signal.signal(signal.SIGTERM, _leave_once)
        if self.then is not None:
            self.then(worker)


def _leave(number: int, frame: FrameType | None) -> None:
    pass


def _leave_once(number: int, frame: FrameType | None) -> None:
    # A worker that hangs is ended by SIGTERM too: torch sends it, and Python once more when the trainer exits.
    signal.signal(number, signal.SIG_DFL)


class Duty(NamedTuple):
    """What the workers of a loader read, and how to find the sample that one of them reads now."""

    what: str = "data"
    batch_size: int | None = None
    sample_of: Callable[[int], str | None] = lambda worker: None


class Death(NamedTuple):
    """A worker that ended before its time: its number, of how many, its process, exit code (negative: a signal), duty."""

    number: int
    workers: int
    process: int
    code: int
    what: str
    batch_size: int | None
    sample: str | None


_reading: weakref.WeakKeyDictionary[Any, Duty] = weakref.WeakKeyDictionary()


def read(loader: Any, duty: Duty | None = None) -> Iterator[Any]:
    """An iterator over a torch DataLoader whose workers leave signals to this process, and end with it."""
    if loader.num_workers == 0:
        return iter(loader)
    if not isinstance(loader.worker_init_fn, LeaveSignalsToTrainer):
        loader.worker_init_fn = LeaveSignalsToTrainer(loader.worker_init_fn)
    iterator = iter(loader)
    if not _reading:
        atexit.unregister(_end_workers)
        atexit.register(_end_workers)
    _reading[iterator] = duty or Duty(batch_size=loader.batch_size)
    return iterator


# Deaths among the workers that were ended last. torch raises what it has to say of one at any moment, also afterwards.
_found_dead: list[Death] = []


def _dead(iterator: Any, duty: Duty) -> list[Death]:
    workers = iterator._workers
    return [
        Death(number, len(workers), worker.pid, worker.exitcode, duty.what, duty.batch_size, duty.sample_of(number))
        for number, worker in enumerate(workers)
        if worker.exitcode
    ]


def deaths() -> list[Death]:
    """Workers that ended before their time, of those that read now."""
    return [death for iterator, duty in at_work() for death in _dead(iterator, duty)]


def earlier_deaths() -> list[Death]:
    """Workers that had ended before their time when the last of them were ended."""
    return list(_found_dead)


def end(iterator: Any) -> None:
    """End the workers of an iterator, also those that hang."""
    if not (isinstance(iterator, Hashable) and iterator in _reading):  # of another kind, or begun by someone else
        return
    begun: Any = iterator
    _found_dead[:] = _dead(begun, _reading.pop(iterator)) or _found_dead
    begun._shutdown_workers()
    for worker in begun._workers:
        if worker.is_alive():  # it took two SIGTERM for a wish of the scheduler, or does not come back from the kernel
            worker.kill()
            worker.join()


def at_work() -> list[tuple[Any, Duty]]:
    """The iterators that have workers now, and what these read."""
    return list(_reading.items())


def end_pass(iterator: Any) -> None:
    """End the workers of an iterator that was left, unless its loader keeps them for the next pass."""
    if not getattr(iterator, "_persistent_workers", False):
        end(iterator)


def end_workers_of(loader: Any) -> None:
    """End the workers that a loader with `persistent_workers` kept; it starts new ones where it is read again."""
    iterator = getattr(loader, "_iterator", None)
    if iterator is not None and iterator in _reading:
        end(iterator)
        loader._iterator = None


def _end_workers() -> None:
    # An iterator that something still holds has workers that wait for work; Python would wait for them without end.
    for iterator in list(_reading):
        end(iterator)
