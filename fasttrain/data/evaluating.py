"""Evaluation data: every sample once over all ranks, in the order of the data."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from fasttrain.core.batch import leading
from fasttrain.data.by_batches import batched, given_batches
from fasttrain.data.by_order import ByOrder
from fasttrain.data.by_shards import ByShards
from fasttrain.data.data import Data, form, num_samples_of
from fasttrain.data.naming import rows_of
from fasttrain.data.order import Order, at_most
from fasttrain.data.reading import Portion, Position
from fasttrain.data.seeds import own_randomness
from fasttrain.data.shards import Shards
from fasttrain.data.workers import end_workers_of
from fasttrain.distributed.world import World
from fasttrain.errors import ConfigError
from fasttrain.lazy import pytree, torch


class Evaluating:
    """What this rank evaluates of `data.evaluation`: its share of each step, at most `limit` steps.

    `batch_size` counts over all ranks. `first` of a portion is the number of the step's first sample, or the number of
    the batch where the data cuts its own: then ranks may have different numbers of them. A `limit` below 1 is a share of
    the steps, at least one. Workers stay from one evaluation to the next, until `close`.
    """

    def __init__(self, data: Data, batch_size: int, seed: int, world: World, limit: float | None = None) -> None:
        rank, ranks = world.rank, world.size
        self.source: Any
        self.shards: ByShards | None = None
        self.reader: ByOrder | None = None
        if isinstance(data.evaluation, Shards):
            self.source = data.evaluation
            self.shards = ByShards(data, data.evaluation, batch_size, seed, world, limit, train=False)
            return
        self.source = batched_stream(data.evaluation, batch_size, ranks, data)
        self.limit, self._seeds = limit, (seed, "evaluation", rank)
        if (dealt := _dealt_data_set(data, self.source, world)) is not None:
            data, source, size, batch_size = dealt
        elif form(self.source) == "batches":
            return
        else:
            source, size = self.source, num_samples_of(self.source)
            assert size is not None
        limit = None if limit is None or not size else max(1, at_most(limit, -(-size // batch_size)))
        order = Order(size=size, batch_size=batch_size, seed=seed, shuffle=False, limit=limit)
        self.reader = ByOrder(data, source, order, rank, ranks, train=False)

    def portions(self) -> Iterator[Portion]:
        """The portions of one evaluation."""
        if self.shards is not None:
            yield from self.shards.once()
            return
        if self.reader is not None:
            yield from self.reader.epoch(0)
            return
        given = given_batches(self.source, None, *self._seeds, epoch=0)
        for number, batch in enumerate(itertools.islice(given, self._most())):
            yield Portion(batch, leading(batch), 0, 0, number, Position())

    def _most(self) -> int | None:
        if self.limit is None or self.limit >= 1:
            return None if self.limit is None else int(self.limit)
        try:
            return max(1, at_most(self.limit, len(self.source)))
        except TypeError:
            raise ConfigError(
                f"limit_batches={self.limit} is a share of the batches, and the evaluation data does not say how many it "
                "has; give a number of batches."
            ) from None

    def told(self, portion: Portion, rows: Sequence[int] | None = None) -> str:
        """What of the data a portion is, or some rows of it."""
        if self.reader is None:
            return f"{rows_of(rows)}batch {portion.first} of the evaluation data"
        return self.reader.told(portion, rows)

    def close(self) -> None:
        """End the workers."""
        if self.reader is not None:
            self.reader.close()
        end_workers_of(self.source)


def batched_stream(evaluation: Any, batch_size: int, ranks: int, data: Data) -> Any:
    """A stream of samples as batches; other evaluation data as it is: a loader may cut an evaluation as it likes."""
    if not isinstance(evaluation, torch.utils.data.IterableDataset):
        return evaluation
    return batched(evaluation, max(1, batch_size // ranks), data)


def _dealt_data_set(data: Data, source: Any, world: World) -> tuple[Data, Any, int, int] | None:
    """The data set below a loader that would count samples twice on several ranks: how to read it, and its two sizes.

    A DistributedSampler repeats the first samples so that every rank gets as many; a loader that knows of no ranks gives
    all samples to each of them. A loader of what this rank alone has is left as it is.
    """
    if world.size == 1 or type(source) is not torch.utils.data.DataLoader:
        return None
    loader: Any = source
    sampler, size, share = loader.sampler, _num_whole(loader), loader.batch_size
    if size is None or share is None:
        return None
    batch_size = share * world.size
    if type(sampler) is torch.utils.data.DistributedSampler:
        if sampler.num_replicas != world.size:
            return None
        if loader.drop_last:  # of each rank's batches the last one, unless it is whole
            size -= size % batch_size
        elif sampler.drop_last:
            size -= size % world.size
    else:
        if len(set(world.gather(_print(loader.dataset, size)))) > 1:
            return None
        if loader.drop_last:
            size -= size % share
    return replace(data, collate=loader.collate_fn, num_workers=loader.num_workers), loader.dataset, size, batch_size


def _num_whole(loader: Any) -> int | None:
    """Samples of a loader that goes through all of a map-style data set; None for other loaders."""
    sampler, kinds = loader.sampler, torch.utils.data
    through = type(sampler) in (kinds.SequentialSampler, kinds.DistributedSampler) or (
        type(sampler) is kinds.RandomSampler and not sampler.replacement and sampler.num_samples == len(loader.dataset)
    )
    return len(loader.dataset) if through and type(loader.batch_sampler) is kinds.BatchSampler else None


def _print(dataset: Any, size: int) -> str:
    """A fingerprint of a data set: its size, and the first, the middle and the last sample."""
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with own_randomness(0):
        for index in sorted({0, size // 2, size - 1}) if size else ():
            for leaf in pytree.tree_leaves(dataset[index]):
                held = leaf.detach().cpu().float().numpy() if isinstance(leaf, torch.Tensor) else leaf
                digest.update(held.tobytes() if hasattr(held, "tobytes") else repr(held).encode())
    return digest.hexdigest()
