"""Batches that data cuts by itself: a DataLoader of the user's, a stream of samples, any iterable."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterator, Sized
from typing import Any

from fasttrain.core.batch import Microbatches, leading
from fasttrain.data.data import Data
from fasttrain.data.lost import lost
from fasttrain.data.order import at_most
from fasttrain.data.reading import Portion, Position
from fasttrain.data.seeds import mix, own_randomness
from fasttrain.data.workers import end_pass, end_workers_of, read
from fasttrain.errors import ConfigError
from fasttrain.lazy import torch


class ByBatches:
    """The batches of this rank as they come; the position counts batches.

    Raises:
        ConfigError: the data is a loader whose batches are not this rank's share.
    """

    exact = False

    def __init__(self, data: Data, share: int, seed: int, rank: int, ranks: int, limit: float | None = None) -> None:
        self.source = batched(data.train, share, data) if share else data.train
        self.transform, self.rank, self.ranks = data.transform, rank, ranks
        self._share, self._seeds = share, (seed, "given", rank)
        self._saw_whole_batch = False
        self.steps_per_epoch = self.epoch_end = self._length(limit)

    def _length(self, limit: float | None) -> int | None:
        try:
            steps = len(self.source)
        except TypeError:
            if limit is not None and limit < 1:
                raise ConfigError(
                    f"limit_batches={limit} is a share of the steps, and the training data does not say how many it has; "
                    "give a number of steps."
                ) from None
            return None if limit is None else int(limit)
        return steps if limit is None else at_most(limit, steps)

    def portions(self, position: Position) -> Generator[Portion, None, None]:
        """Portions from a position on, through one epoch after the other, without end."""
        try:
            yield from self._portions(position)
        finally:
            end_workers_of(self.source)

    def _portions(self, position: Position) -> Iterator[Portion]:
        epoch, seen, end = position.epoch, position.seen, self.epoch_end
        while True:
            with contextlib.closing(self._epoch(epoch, seen)) as batches:
                for batch, here in batches:
                    first, seen = seen, seen + 1
                    over = end is not None and seen >= end
                    after = Position(epoch + 1, 0) if over else Position(epoch, seen)
                    yield Portion(batch, here, here * self.ranks, epoch, first, after)
                    if over:
                        break
            epoch, seen = epoch + 1, 0

    def told(self, portion: Portion) -> str:
        """Which batch of the data a portion is."""
        return f"batch {portion.first} of epoch {portion.epoch} of the training data"

    def _epoch(self, epoch: int, skip: int) -> Generator[tuple[Any, int], None, None]:
        number = -1
        with contextlib.closing(given_batches(self.source, self.transform, *self._seeds, epoch=epoch)) as given:
            for number, batch in enumerate(given):
                here = self._samples_in(batch, number)
                if number >= skip:
                    yield batch, here
        if number < 0 and epoch:
            raise ConfigError(
                f"the training data gave no batch in epoch {epoch + 1}; an iterator can be gone through once: give what can "
                "be begun anew, such as a DataLoader or an object with __iter__, or fewer steps."
            )
        if number < 0:
            raise ConfigError("the training data gave no batch; look at the path, the filter or the batch size.")

    def _samples_in(self, batch: Any, number: int) -> int:
        """Samples in a batch that the data cut. Other sizes than the share are left to the check of whoever cuts it."""
        if isinstance(batch, Microbatches):
            return sum(leading(microbatch) for microbatch in batch)
        share, held = self._share, leading(batch)
        # Once a whole batch came, dim 0 is known to be the samples, and a shorter one is a short last one.
        self._saw_whole_batch |= held == share
        if held == share:
            return share
        believed = self._saw_whole_batch or _says_its_size(self.source, number, held)
        return min(share, held) if believed else share

    def beginning(self, position: Position) -> Position:
        """The first batch of this epoch, which samplers were told already."""
        return Position(position.epoch, 0)

    @property
    def can_begin_anew(self) -> bool:
        """Whether the data can be gone through beside the training, which is in the middle of it."""
        source = self.source
        held = (source, getattr(source, "dataset", None))
        persistent = getattr(source, "persistent_workers", False)
        return not (persistent or any(isinstance(part, Iterator) for part in held))

    def undisturbed(self) -> contextlib.AbstractContextManager[None]:
        """Afterwards the loader's generators stand where they stood."""
        return kept_generators(self.source)


def batched(source: Any, share: int, data: Data) -> Any:
    """A stream of samples as batches of `share`; a loader that cuts by itself is looked at; other sources as they are.

    Raises:
        ConfigError: a loader gives batches of another size than this rank's share.
    """
    if isinstance(source, torch.utils.data.IterableDataset):
        return torch.utils.data.DataLoader(source, batch_size=share, num_workers=data.workers, collate_fn=data.collate)
    given = source.batch_size if isinstance(source, torch.utils.data.DataLoader) else None
    if given not in (None, share):
        raise ConfigError(
            f"the training data is a DataLoader with batch_size={given}, while this rank's share of the run's batch_size is "
            f"{share}; make the two agree, or give the data set itself, which is then cut as the run says."
        )
    return source


def given_batches(
    source: Any, transform: Callable[[Any], Any] | None, *seeds: object, epoch: int
) -> Generator[Any, None, None]:
    """The batches that an iterable gives by itself.

    What it draws for them from the host's global generators follows from `seeds`, the epoch and the number of the batch:
    neither training nor evaluation is moved by the other, and a restart finds the same order.
    """
    _tell_epoch(source, epoch)
    with own_randomness(mix(*seeds, epoch)):
        reading = read(source) if isinstance(source, torch.utils.data.DataLoader) else iter(source)
    number, draws = 0, transform is not None or not _draws_nothing_here(source)
    try:
        for number in itertools.count():
            with own_randomness(mix(*seeds, epoch, number)) if draws else contextlib.nullcontext():
                try:
                    batch = next(reading)
                except StopIteration:
                    return
                if transform is not None:
                    batch = transform(batch)
            yield batch
    except (RuntimeError, OSError, EOFError) as error:
        if (found := lost(error)) is None:
            raise
        raise found from error
    finally:
        end_pass(reading)


@contextlib.contextmanager
def kept_generators(source: Any) -> Iterator[None]:
    """Afterwards the generators that a DataLoader and its samplers were given stand where they stood."""
    samplers = [getattr(source, "sampler", None), getattr(source, "batch_sampler", None)]
    samplers.append(getattr(samplers[1], "sampler", None))
    generators = [getattr(part, "generator", None) for part in (source, *samplers)]
    states = [(g, g.get_state()) for g in generators if isinstance(g, torch.Generator)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def _draws_nothing_here(source: Any) -> bool:
    """Whether a loader is known to draw nothing in this process once it is begun; keeping generators takes 130 µs."""
    if not isinstance(source, torch.utils.data.DataLoader):
        return False
    in_workers = source.num_workers > 0
    plain = type(source.dataset) is torch.utils.data.TensorDataset
    return in_workers or (plain and source.collate_fn is torch.utils.data.default_collate)


def _tell_epoch(source: Any, epoch: int) -> None:
    """Samplers and data sets that shuffle by an epoch (DistributedSampler, streaming sets) repeat one order unless told."""
    loader = isinstance(source, torch.utils.data.DataLoader)
    sampler = getattr(source, "sampler", None) if loader else None
    inner = getattr(getattr(source, "batch_sampler", None), "sampler", None) if loader else None
    for part in {id(part): part for part in (source, getattr(source, "dataset", None), sampler, inner)}.values():
        if callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(epoch)


def _says_its_size(source: Any, number: int, held: int) -> bool:
    """Whether a batch smaller than its share is known to be the loader's short last one."""
    dataset, step = getattr(source, "dataset", None), getattr(source, "batch_size", None)
    if step is None or not isinstance(dataset, Sized):
        return False
    return held == min(step, len(dataset) - number * step)
