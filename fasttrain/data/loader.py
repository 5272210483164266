"""Reading the samples at given positions: in memory, or by worker processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, cast

from fasttrain.core.batch import num_samples, pieces
from fasttrain.data.data import Data, form, take
from fasttrain.data.order import Order, share
from fasttrain.data.seeds import mix, own_randomness, seed_host
from fasttrain.data.workers import read
from fasttrain.lazy import torch

# Epoch and index of a sample, and how large it is read where a schedule says so.
Key = tuple[int, int, int | None]


class SeededSamples:
    """A map-style data set read at (epoch, position, index): what a sample draws depends on nothing else."""

    def __init__(self, dataset: Any, seed: int, in_worker: bool) -> None:
        self.dataset, self.seed, self.in_worker = dataset, seed, in_worker

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, keys: list[Key]) -> list[Any]:
        """The samples of a batch (torch's DataLoader calls this)."""
        # Kept and put back once a batch: for each sample that would take 80 µs, three times what all else takes.
        with contextlib.nullcontext() if self.in_worker else own_randomness(0):
            return [self._sample(*key) for key in keys]

    def _sample(self, epoch: int, index: int, size: int | None) -> Any:
        seed_host(mix(self.seed, "sample", epoch, index))
        return self.dataset[index] if size is None else self.dataset.at_size(index, size)


def epoch_batches(
    data: Data, source: Any, order: Order, epoch: int, position: int, rank: int, ranks: int, train: bool
) -> Iterator[tuple[Any, int, int]]:
    """This rank's batches of an epoch from `position` (samples over all ranks) on.

    Gives `(batch, samples here, samples over all ranks)`. A rank whose share of a short last step is empty gets an empty
    batch from tensors, and `None` from a data set.
    """
    spans = order.spans(position)
    shares = [share(first, end, rank, ranks) for first, end in spans]
    indices = order.epoch(epoch)
    in_memory = form(source) == "tensors"
    transform = data.transform if train else None
    whole = in_memory and ranks > 1 and transform is not None and not data.transform_share
    if in_memory:
        batches: Iterable[Any] = (take(source, indices[a:b]) for a, b in (spans if whole else shares))
    else:
        size_at = data.size_at if train else None
        keys = [
            (a, b, None if size_at is None else size_at(epoch, first))
            for (first, _), (a, b) in zip(spans, shares, strict=True)
            if a < b
        ]
        batches = _read(data, source, Keys(epoch, indices.numpy(), keys), order.seed)
    reading = iter(batches)
    for (first, end), (low, high) in zip(spans, shares, strict=True):
        if low == high and not in_memory:
            yield None, 0, end - first
            continue
        batch = next(reading)
        if transform is not None and (whole or low < high):
            with own_randomness(mix(order.seed, "batch", epoch, first if whole else low)):
                batch = transform(batch)
        if whole:
            num_samples(batch, expected=end - first)
            (batch,) = pieces(batch, [(low - first, high - first)])
        yield batch, high - low, end - first


class Keys:
    """The keys of each batch of an epoch, made as they are asked for."""

    def __init__(self, epoch: int, indices: Any, shares: list[tuple[int, int, int | None]]) -> None:
        self.epoch, self.indices, self.shares = epoch, indices, shares

    def __len__(self) -> int:
        return len(self.shares)

    def __iter__(self) -> Iterator[list[Key]]:
        for low, high, size in self.shares:
            yield [(self.epoch, index, size) for index in self.indices[low:high].tolist()]


def _read(data: Data, source: Any, keys: Keys, seed: int) -> Iterable[Any]:
    workers = data.num_workers if len(keys) else 0
    loader = torch.utils.data.DataLoader(
        cast(Any, SeededSamples(source, seed, in_worker=workers > 0)),
        batch_sampler=keys,
        num_workers=workers,
        collate_fn=data.collate,
        # Given, so that making an iterator draws nothing from the global generator.
        generator=torch.Generator().manual_seed(mix(seed, "workers")),
    )
    return read(loader)
