"""Loader workers and signals: whether a run stops is for the process that trains to decide."""

from __future__ import annotations

import atexit
import signal
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


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


_reading: weakref.WeakSet[Any] = weakref.WeakSet()


def read(loader: Any) -> Iterator[Any]:
    """An iterator over a torch DataLoader whose workers leave signals to this process, and end with it."""
    if loader.num_workers == 0:
        return iter(loader)
    if not isinstance(loader.worker_init_fn, LeaveSignalsToTrainer):
        loader.worker_init_fn = LeaveSignalsToTrainer(loader.worker_init_fn)
    iterator = iter(loader)
    if not _reading:
        atexit.unregister(_end_workers)
        atexit.register(_end_workers)
    _reading.add(iterator)
    return iterator


def _end_workers() -> None:
    # An iterator that something still holds has workers that wait for work; Python would wait for them without end.
    for iterator in list(_reading):
        iterator._shutdown_workers()
