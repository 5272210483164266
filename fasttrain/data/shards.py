"""Shards: files (or anything) that each give a stream of samples, dealt to ranks and workers so that none is read twice.

The order of an epoch is a function of the seed, and so is the order within a shard: blocks of samples are read whole and
permuted. Where a reader stands in a shard is therefore one number, the samples given from it.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fasttrain.data.seeds import mix, seed_host
from fasttrain.errors import ConfigError, FasttrainError, RunError
from fasttrain.lazy import torch

# In the place of the number of samples given from a shard: all of them.
DONE = -1


@dataclass(frozen=True)
class Shards:
    """Samples in shards, for `Data(train=...)` or `Data(evaluation=...)`.

    `read(shard)` gives the samples of one shard in an order that is always the same. With a parameter `skip` it is asked to
    leave out so many at the start itself (`read(shard, skip=n)`), which costs less than reading them; else they are read and
    dropped. `decode(sample)` makes what is trained on of what was read; a run that is taken up decodes nothing twice.
    `shuffle_buffer`: samples read ahead and permuted among each other (undecoded); the order of shards is drawn anew each
    epoch too. `length`: samples of an epoch over all shards, where it is known: schedules and progress are planned by it, an
    epoch ends with the data whatever it says.

    What `read` and `decode` draw from torch's, numpy's and Python's global generators follows from (seed, epoch, shard,
    number of the sample). Every rank must be given the same shards in the same order.
    """

    shards: Sequence[Any]
    read: Callable[..., Iterable[Any]]
    decode: Callable[[Any], Any] | None = None
    shuffle_buffer: int = 1000
    length: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.shards, str) or not len(self.shards):
            raise ConfigError(f"shards={self.shards!r} names no list of shards; give the list of their paths.")
        if self.shuffle_buffer < 0:
            raise ConfigError(
                f"shuffle_buffer={self.shuffle_buffer}: give a number of samples, 0 to leave their order."
            )


class Taken(NamedTuple):
    """A sample, and where it stands: its shard, and the samples given from the shard once it is."""

    sample: Any
    shard: int
    given: int


def epoch_order(shards: int, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """The shards of an epoch, by number, in the order in which they are begun."""
    if not shuffle:
        return list(range(shards))
    generator = torch.Generator().manual_seed(mix(seed, "shards", epoch))
    return torch.randperm(shards, generator=generator).tolist()


def dealt(order: Sequence[int], given: Mapping[int, int], stream: int, streams: int) -> list[int]:
    """The shards that one of `streams` readers goes through: every so many of those not yet done.

    >>> dealt([4, 2, 0, 1, 3], {2: DONE, 4: 17}, stream=0, streams=2)
    [4, 1]
    """
    return [shard for shard in order if given.get(shard) != DONE][stream::streams]


def samples_of(shards: Shards, shard: int, seed: int, epoch: int, shuffle: bool, given: int = 0) -> Iterator[Taken]:
    """The samples of a shard in their order of this epoch, from number `given` on.

    Raises:
        RunError: reading failed; it names shard and sample.
    """
    block = max(1, shards.shuffle_buffer) if shuffle else 1
    skip = given - given % block
    reading = _read(shards, shard, skip, (seed, "read", epoch, shard))
    for number in itertools.count(skip // block):
        held = list(itertools.islice(reading, block))
        order: Iterable[int] = range(len(held))
        if block > 1:
            generator = torch.Generator().manual_seed(mix(seed, "block", epoch, shard, number))
            order = torch.randperm(len(held), generator=generator).tolist()
        for place, index in enumerate(order):
            position = number * block + place
            if position >= given:
                yield Taken(
                    _decoded(shards, held[index], shard, number * block + index, seed, epoch), shard, position + 1
                )
        if len(held) < block:
            return


def _read(shards: Shards, shard: int, skip: int, seeds: tuple[object, ...]) -> Iterator[Any]:
    name = shards.shards[shard]
    number = skip
    try:
        seed_host(mix(*seeds, "begin"))
        if skip and "skip" in inspect.signature(shards.read).parameters:
            reading = iter(shards.read(name, skip=skip))
        else:
            reading = itertools.islice(shards.read(name), skip, None)
        while True:
            seed_host(mix(*seeds, number))
            try:
                sample = next(reading)
            except StopIteration:
                return
            yield sample
            number += 1
    except FasttrainError:
        raise
    except Exception as error:
        raise RunError(f"shard {name}, sample {number}: reading failed ({type(error).__name__}: {error}).") from error


def _decoded(shards: Shards, sample: Any, shard: int, number: int, seed: int, epoch: int) -> Any:
    if shards.decode is None:
        return sample
    seed_host(mix(seed, "decode", epoch, shard, number))
    try:
        return shards.decode(sample)
    except FasttrainError:
        raise
    except Exception as error:
        key = f" ({sample['__key__']})" if isinstance(sample, dict) and "__key__" in sample else ""
        raise RunError(
            f"shard {shards.shards[shard]}, sample {number}{key}: decoding failed ({type(error).__name__}: {error}); mend "
            "or remove it, or let decode deal with it."
        ) from error
