"""Making a batch of a map-style data set, in the process that trains or in a worker."""

from __future__ import annotations

import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, NoReturn

from fasttrain.data.naming import described, listed
from fasttrain.data.seeds import mix, own_randomness, seed_host
from fasttrain.errors import BatchError, BrokenSample, FasttrainError
from fasttrain.lazy import pytree, torch


class Key(NamedTuple):
    """What a batch is made from: the epoch, its first place in the epoch's order, and the numbers of its samples.

    `size`: how large they are read, where a schedule says so: then they come from the data set's `at_size(index, size)`.
    """

    epoch: int
    first: int
    indices: list[int]
    size: int | None = None


class Fetcher:
    """Makes batches of a map-style data set. What a sample draws depends on nothing but seed, epoch and its number.

    A data set with `__getitems__(indices)` is asked once a batch; the seed of its draws is that of the batch: seed, epoch
    and the place of its first sample in the epoch. Copies of a sample (`repeats`) draw each their own. A data set with
    `set_epoch(epoch)` is told before the first sample of an epoch.

    In a worker (`num_workers > 0`) a batch is packed for the way to the trainer here and not in the queue's thread: what
    fails there (a full /dev/shm, an object that cannot be pickled) is printed by Python, and the trainer waits for ever.

    Raises:
        BrokenSample: the data set raised; the error is its cause.
        BatchError: the samples could not be put together.
    """

    def __init__(
        self,
        dataset: Any,
        seed: int,
        *,
        collate: Callable[[list[Any]], Any] | None = None,
        what: str = "data",
        num_workers: int = 0,
        repeats: int = 1,
    ) -> None:
        self.dataset, self.seed, self.collate, self.what, self.repeats = dataset, seed, collate, what, repeats
        self.whole = fetches_whole(dataset)
        self.draws = not draws_nothing(dataset)
        # What each worker reads now, in memory that all share: it is named when a worker dies or hangs.
        self.reading = multiprocessing.RawArray("q", [-1] * num_workers) if num_workers else None
        self._epoch: int | None = None
        self._worker = 0

    def __getitems__(self, key: Key) -> Any:
        """The batch (torch's DataLoader calls this); in a worker as bytes, or what went wrong."""
        if self.reading is None:
            if not self.draws and self.collate is None:
                return self._batch(key)
            # Kept and put back once a batch: for each sample that would take 80 µs, three times what all else takes.
            with own_randomness(0):
                return self._batch(key)
        worker = torch.utils.data.get_worker_info()
        assert worker is not None
        self._worker = worker.id
        try:
            batch = self._batch(key)
        except Exception as error:
            return Failed(error)
        try:
            return bytes(ForkingPickler.dumps(batch))
        except Exception as error:
            error.add_note(f"A batch of the {self.what} could not be handed over by its worker.")
            return Failed(error)
        finally:
            self.reading[self._worker] = -1

    def _batch(self, key: Key) -> Any:
        self._tell_epoch(key.epoch)
        samples = self._at_once(key) if self.whole and key.size is None else self._one_by_one(key)
        try:
            if self.collate is None:
                return torch.utils.data.default_collate(samples)
            seed_host(mix(self.seed, "collate", key.epoch, key.first))
            return self.collate(samples)
        except FasttrainError:
            raise
        except Exception as error:
            if shared_memory_is_full(error):
                raise
            raise BatchError(
                f"{listed(self.dataset, key.indices)} of the {self.what} cannot be put together: "
                f"{self._unlike(key.indices, samples) or reason_of(error)}; let the data set give samples of one form and "
                "shape, or give Data(collate=...)."
            ) from error

    def _one_by_one(self, key: Key) -> list[Any]:
        epoch, first, indices, size = key
        dataset, reading, repeats, draws = self.dataset, self.reading, self.repeats, self.draws
        sample_at = dataset.__getitem__ if size is None else partial(dataset.at_size, size=size)
        samples = []
        for place, index in enumerate(indices, start=first):
            if reading is not None:
                reading[self._worker] = index
            if draws:
                copy = place % repeats
                seed = (self.seed, "sample", epoch, index)
                seed_host(mix(*seed, copy) if copy else mix(*seed))
            try:
                samples.append(sample_at(index))
            except Exception as error:
                self._refuse(described(dataset, index), error)
        return samples

    def _at_once(self, key: Key) -> list[Any]:
        epoch, first, indices, _ = key
        if self.reading is not None:
            self.reading[self._worker] = indices[0]
        if self.draws:
            seed_host(mix(self.seed, "samples", epoch, first))
        try:
            samples = list(self.dataset.__getitems__(indices))
        except Exception as error:
            self._refuse(listed(self.dataset, indices), error)
        if len(samples) != len(indices):
            raise BatchError(
                f"{type(self.dataset).__name__}.__getitems__ gave {len(samples)} samples for the {len(indices)} numbers it "
                "was asked for; return one for each, in their order, or drop the method."
            )
        return samples

    def _unlike(self, indices: list[int], samples: list[Any]) -> str | None:
        """The first sample with other shapes than those before; in a worker, torch speaks of storage instead."""
        shapes = [[tuple(x.shape) for x in pytree.tree_leaves(s) if hasattr(x, "shape")] for s in samples]
        for index, found in zip(indices, shapes, strict=True):
            if found != shapes[0]:
                told = " and ".join(
                    f"{described(self.dataset, i)} has {', '.join(map(str, of)) or 'none'}"
                    for i, of in ((indices[0], shapes[0]), (index, found))
                )
                return f"of shapes, {told}"
        return None

    def _refuse(self, name: str, error: Exception) -> NoReturn:
        if isinstance(error, FasttrainError) and not isinstance(error, BrokenSample):
            error.add_note(f"Raised by {name} of the {self.what}.")
            raise error
        name = f"{name} of the {self.what}"
        raise BrokenSample(name, error.reason if isinstance(error, BrokenSample) else reason_of(error)) from error

    def _tell_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch = epoch
            if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
                set_epoch(epoch)


class InWorker(Exception):
    """The traceback of an error, as the worker saw it."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Failed:
    """What went wrong in a worker, on its way to the trainer."""

    def __init__(self, error: Exception) -> None:
        self.told = (error.name, error.reason) if isinstance(error, BrokenSample) else None
        own = error.__cause__ if isinstance(error, BrokenSample) and isinstance(error.__cause__, Exception) else error
        self.error = _packed(own)
        self.traceback = "".join(traceback.format_exception(error))
        self.shared_memory_is_full = shared_memory_is_full(error)

    def raised(self) -> Exception:
        """The error, with what the worker knew of its origin as its cause."""
        error: Exception = pickle.loads(self.error)
        error.__cause__ = InWorker(self.traceback)
        if self.told is None:
            return error
        broken = BrokenSample(*self.told)
        broken.__cause__ = error
        return broken


def _packed(error: Exception) -> bytes:
    try:
        packed = pickle.dumps(error)
        if type(pickle.loads(packed)) is type(error):
            return packed
    except Exception:  # errors with arguments of their own are often like this; their text and traceback are kept
        pass
    return pickle.dumps(RuntimeError(reason_of(error)))


def reason_of(error: BaseException) -> str:
    """Kind and text of an error: `ValueError: not a number`."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def shared_memory_is_full(error: BaseException) -> bool:
    """Whether torch could not get shared memory for a tensor."""
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "shared memory" in text or "unable to mmap" in text or "/torch_" in text
    )


def fetches_whole(dataset: Any) -> bool:
    """Whether a data set gives the samples of a batch at once.

    torch's `Subset` always has the method, and asks for sample after sample where the data set within has it not.
    """
    if isinstance(dataset, torch.utils.data.Subset):
        return fetches_whole(dataset.dataset)
    return callable(getattr(dataset, "__getitems__", None))


def draws_nothing(dataset: Any) -> bool:
    """Whether a data set is known to draw nothing: then its samples need no seed, which takes 8 µs each."""
    if type(dataset) is torch.utils.data.Subset:
        return draws_nothing(dataset.dataset)
    if type(dataset) is torch.utils.data.ConcatDataset:
        return all(map(draws_nothing, dataset.datasets))
    return type(dataset) in (list, torch.utils.data.TensorDataset)
