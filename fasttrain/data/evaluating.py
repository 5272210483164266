"""Evaluation data: every sample once over all ranks, in the order of the data."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fasttrain.core.batch import leading
from fasttrain.data.by_batches import batched, given_batches
from fasttrain.data.by_order import ByOrder
from fasttrain.data.data import Data, form, num_samples_of
from fasttrain.data.order import Order
from fasttrain.data.reading import Portion, Position
from fasttrain.data.seeds import own_randomness
from fasttrain.distributed.world import World
from fasttrain.lazy import pytree, torch


def evaluation_portions(
    data: Data, batch_size: int, seed: int, world: World, limit: int | None = None
) -> Iterator[Portion]:
    """What this rank evaluates of `data.evaluation`: its share of each step, at most `limit` steps. All ranks call it.

    `batch_size` counts over all ranks. `first` of a portion is the number of the step's first sample, or the number of
    the batch where the data cuts its own: then ranks may have different numbers of them.
    """
    rank, ranks = world.rank, world.size
    source = batched_stream(data.evaluation, batch_size, ranks, data)
    if (dealt := _dealt_data_set(data, source, world)) is not None:
        data, source, size, batch_size = dealt
    elif form(source) == "batches":
        given = given_batches(source, None, seed, "evaluation", rank, epoch=0)
        for number, batch in enumerate(itertools.islice(given, limit)):
            yield Portion(batch, leading(batch), 0, 0, number, Position())
        return
    else:
        size = num_samples_of(source)
        assert size is not None
    order = Order(size=size, batch_size=batch_size, seed=seed, shuffle=False, limit=limit)
    yield from ByOrder(data, source, order, rank, ranks, train=False).epoch(0)


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
