"""Streams read by several workers: each sample once.

torch gives every worker a copy of the whole stream. A data set is meant to look at `get_worker_info()` and to give its
part alone; one that does not would repeat everything once a worker. Whether it looks is noted in the worker.
"""

from __future__ import annotations

import importlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from fasttrain.data.seeds import mix, seed_host
from fasttrain.data.workers import LeaveSignalsToTrainer, read
from fasttrain.errors import RunError
from fasttrain.lazy import torch


def read_once_each(loader: Any) -> Iterator[Any]:
    """An iterator over a torch DataLoader; workers that would repeat a stream give its samples in turn, which is told."""
    streams = isinstance(loader.dataset, torch.utils.data.IterableDataset)
    if loader.num_workers < 2 or not streams or isinstance(loader.dataset, torch.utils.data.IterDataPipe):
        return read(loader)
    if not isinstance(loader.worker_init_fn, LeaveSignalsToTrainer):
        loader.worker_init_fn = LeaveSignalsToTrainer(OnceEach(loader.worker_init_fn))
    once = loader.worker_init_fn.then
    return _telling(read(loader), once, loader) if isinstance(once, OnceEach) else read(loader)


def _telling(batches: Iterator[Any], once: OnceEach, loader: Any) -> Iterator[Any]:
    for batch in batches:
        if once.repeats[0] and not once.told:
            once.told = True
            warnings.warn(
                f"{type(loader.dataset).__name__} does not look at torch.utils.data.get_worker_info(), so each of the "
                f"{loader.num_workers} workers reads all of it and keeps one sample in {loader.num_workers}; let its "
                "__iter__ read the part of its worker alone (id, num_workers), or use one worker.",
                stacklevel=2,
            )
        yield batch


END = object()


class OnceEach:
    """What a worker begins with, before what the user gave: it notes whether the data set looks at which worker it is."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self.then, self.told = then, False
        # Shared with the process that trains, which tells.
        self.repeats = torch.zeros(1, dtype=torch.uint8).share_memory_()

    def __call__(self, worker: int) -> None:
        """Let the data set of this worker give each sample once over all workers."""
        held: Any = importlib.import_module("torch.utils.data._utils.worker")
        info = _Noting(held._worker_info)
        held._worker_info = info
        if self.then is not None:
            self.then(worker)
        dataset = info.torch_info.dataset
        kind = type(dataset)
        # Of this copy alone: the loader's own loop holds it already.
        dataset.__class__ = type(kind.__name__, (kind,), {"__iter__": _once_each(kind.__iter__, info, self.repeats)})


class _Noting:
    """torch's WorkerInfo; it notes that somebody asked for the number of the worker, or for the data set to change it."""

    def __init__(self, info: Any) -> None:
        self.torch_info, self.asked = info, False

    def __getattr__(self, name: str) -> Any:
        if name in ("id", "num_workers", "dataset"):
            self.asked = True
        return getattr(self.torch_info, name)


def _once_each(begin: Callable[[Any], Iterator[Any]], info: _Noting, repeats: Any) -> Callable[[Any], Iterator[Any]]:
    worker, workers = info.torch_info.id, info.torch_info.num_workers
    base, epochs = info.torch_info.seed - worker, 0

    def once_each(dataset: Any) -> Iterator[Any]:
        nonlocal epochs
        epochs += 1
        stream = begin(dataset)
        # By hand: a loop would ask a stream that is its own iterator for another.
        sample = next(stream, END)
        if info.asked or sample is END:
            while sample is not END:
                yield sample
                sample = next(stream, END)
            return
        # From the start once more, with the draws of every other worker: the same order and the same samples in all.
        seed_host(mix(base, "every worker", epochs))
        again = begin(dataset)
        if again is stream:
            raise RunError(
                f"{type(dataset).__name__} is its own iterator and does not look at get_worker_info(), so {workers} workers "
                "would repeat it; let __iter__ begin anew and read the part of its worker, or use one worker."
            )
        repeats[0] = 1
        for number in itertools.count():
            if (sample := next(again, END)) is END:
                return
            if number % workers == worker:
                yield sample
            if info.asked:
                raise RunError(
                    f"{type(dataset).__name__} looked at get_worker_info() after its first sample, when each worker was "
                    "taken to read all of it; let it look before it gives the first one."
                )

    return once_each
