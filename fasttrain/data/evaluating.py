"""Evaluation data: every sample once over all ranks, in the order of the data."""

from __future__ import annotations

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
from fasttrain.lazy import torch


def evaluation_portions(
    data: Data, batch_size: int, seed: int, rank: int, ranks: int, limit: int | None = None
) -> Iterator[Portion]:
    """What this rank evaluates of `data.evaluation`: its share of each step, at most `limit` steps.

    `batch_size` counts over all ranks. `first` of a portion is the number of the step's first sample, or the number of
    the batch where the data cuts its own: then ranks may have different numbers of them.
    """
    source = batched_stream(data.evaluation, batch_size, ranks, data)
    if (dealt := _dealt_data_set(data, source, ranks)) is not None:
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


def _dealt_data_set(data: Data, source: Any, ranks: int) -> tuple[Data, Any, int, int] | None:
    """The data set below a loader whose DistributedSampler deals it to these ranks: how to read it, and its two sizes.

    The sampler gives every rank as many samples, and repeats the first ones for that: they would be counted twice.
    """
    if ranks == 1 or type(source) is not torch.utils.data.DataLoader:
        return None
    loader: Any = source
    sampler = loader.sampler
    if type(sampler) is not torch.utils.data.DistributedSampler or sampler.num_replicas != ranks:
        return None
    if loader.batch_size is None:
        return None
    size, batch_size = len(loader.dataset), loader.batch_size * ranks
    if loader.drop_last:  # of each rank's batches the last one, unless it is whole
        size -= size % batch_size
    elif sampler.drop_last:
        size -= size % ranks
    return replace(data, collate=loader.collate_fn, num_workers=loader.num_workers), loader.dataset, size, batch_size
