"""Which reader a form of training data takes, and that all ranks read the same data."""

from __future__ import annotations

from fasttrain.config.settings import Settings
from fasttrain.data import Data
from fasttrain.data.amounts import refuse_what_needs_numbers
from fasttrain.data.by_batches import ByBatches
from fasttrain.data.by_order import ByOrder
from fasttrain.data.by_shards import ByShards
from fasttrain.data.data import num_samples_of
from fasttrain.data.grouping import digest, lengths_of
from fasttrain.data.order import Order
from fasttrain.data.reading import Reader
from fasttrain.data.shards import Shards
from fasttrain.distributed.world import World
from fasttrain.errors import ConfigError


def reader_of(data: Data, settings: Settings, world: World, size: int | None) -> Reader:
    """The reader for a form of training data; `size`: its samples, where they can be asked for by number."""
    lengths = lengths_of(data.lengths, size, data.shuffle)
    if size is None:
        refuse_what_needs_numbers(data)
    if isinstance(data.train, Shards):
        return ByShards(data, data.train, settings.batch_size, settings.seed, world, settings.limit_batches)
    if size is None:
        share = settings.batch_size // world.size
        return ByBatches(data, share, settings.seed, world, settings.limit_batches)
    order = Order(
        size=size,
        batch_size=settings.batch_size,
        seed=settings.seed,
        shuffle=data.shuffle,
        limit=settings.limit_batches,
        lengths=lengths,
        drop_last=data.drop_last,
        repeats=data.repeats,
    )
    return ByOrder(data, data.train, order, world.rank, world.size)


def refuse_other_ranks(world: World, settings: Settings, data: Data, size: int | None) -> None:
    """Refuse ranks that would draw other orders of the data, or do what all do together at other steps.

    Raises:
        ConfigError: on every rank, naming the first difference.
    """
    evaluation = data.evaluation
    mine = {
        "seed": settings.seed,
        "batch_size": settings.batch_size,
        "data": None if (told := getattr(data.train, "fingerprint", None)) is None else told(),
        "samples": size,
        "shuffle": data.shuffle,
        "lengths (their hash)": None if data.lengths is None else digest(data.lengths),
        "drop_last": data.drop_last,
        "repeats": data.repeats,
        "limit_batches": settings.limit_batches,
        "steps": settings.steps,
        "epochs": settings.epochs,
        "evaluation samples": None if evaluation is None else num_samples_of(evaluation) or "as they come",
        "log.every": settings.log.every,
        "evaluate.every": settings.evaluate.every,
        "checkpoint.every": settings.checkpoint.every,
    }
    first, *others = world.gather(mine)
    for rank, other in enumerate(others, start=1):
        for key, value in first.items():
            if other[key] != value:
                raise ConfigError(
                    f"{key}={value} on rank 0 and {key}={other[key]} on rank {rank}, but ranks share one order of the "
                    "data and take every step together; give all ranks the same settings and data, without asking "
                    "for the rank (each takes its share by itself)."
                )
