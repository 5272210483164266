"""Reading a map-style data set batch by batch, in this process or by workers that stay."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from fasttrain.data.fetching import Failed, Fetcher, Key
from fasttrain.data.lost import full_shared_memory, lost
from fasttrain.data.naming import described
from fasttrain.data.seeds import mix
from fasttrain.data.workers import Duty, end, read
from fasttrain.lazy import torch


class Loader:
    """Batches of a map-style data set by their keys. Workers stay from the first batch to `close`, over all readings.

    `timeout_s`: how long to wait for a batch of the workers; None: without end.

    Raises:
        BrokenSample, BatchError: see `Fetcher`.
        LostWorker: a worker died, or gave nothing for `timeout_s`.
    """

    def __init__(
        self,
        dataset: Any,
        seed: int,
        *,
        batch_size: int,
        num_workers: int = 0,
        timeout_s: float | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        what: str = "data",
        repeats: int = 1,
    ) -> None:
        self.fetcher = Fetcher(dataset, seed, collate=collate, what=what, num_workers=num_workers, repeats=repeats)
        self.batch_size, self.num_workers, self.timeout_s = batch_size, num_workers, timeout_s
        self._seed = seed
        self._keys: Iterable[Key] = ()
        self._loader: Any = None
        self._iterator: Any = None

    def batches(self, keys: Iterable[Key]) -> Iterator[Any]:
        """The batch of each key, in their order. One reading at a time."""
        if not self.num_workers:
            for key in keys:
                yield self.fetcher.__getitems__(key)
            return
        reading = self._begin(keys)
        while True:
            try:
                packed = next(reading, None)
                batch = packed if packed is None or isinstance(packed, Failed) else pickle.loads(packed)
            except (RuntimeError, OSError, EOFError) as error:
                if (found := lost(error)) is None:
                    raise
                raise found from error
            if batch is None and packed is None:
                return
            if isinstance(batch, Failed):
                error = batch.raised()
                if batch.shared_memory_is_full:
                    raise full_shared_memory(error, self._duty(), self.num_workers) from error
                raise error
            yield batch

    def _begin(self, keys: Iterable[Key]) -> Iterator[Any]:
        self._keys = keys
        if self._loader is None:
            self._loader = torch.utils.data.DataLoader(
                cast(Any, self.fetcher),
                batch_sampler=cast(Any, _Given(self)),
                num_workers=self.num_workers,
                collate_fn=_as_it_is,
                persistent_workers=True,
                timeout=self.timeout_s or 0,
                # Given, so that making an iterator draws nothing from the global generator.
                generator=torch.Generator().manual_seed(mix(self._seed, "workers")),
            )
        self._iterator = read(self._loader, self._duty())
        return self._iterator

    def close(self) -> None:
        """End the workers."""
        if self._iterator is not None:
            end(self._iterator)
        self._loader = self._iterator = None

    def _duty(self) -> Duty:
        return Duty(self.fetcher.what, self.batch_size, self._sample_of)

    def _sample_of(self, worker: int) -> str | None:
        """The sample that a worker reads now; None between batches."""
        index = -1 if self.fetcher.reading is None else self.fetcher.reading[worker]
        return described(self.fetcher.dataset, index) if index >= 0 else None


class _Given:
    """The keys of the reading that is going on."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Key]:
        return iter(self.loader._keys)


def _as_it_is(batch: Any) -> Any:
    return batch
