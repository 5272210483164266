"""Batches that data cuts by itself: a DataLoader of the user's, a stream of samples, any iterable."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence, Sized
from typing import Any

from fasttrain.core.batch import Microbatches, leading, num_samples
from fasttrain.data.data import Data
from fasttrain.data.lost import lost
from fasttrain.data.naming import rows_of
from fasttrain.data.once import read_once_each
from fasttrain.data.order import at_most
from fasttrain.data.plain import from_plain, to_plain
from fasttrain.data.reading import Portion, Position
from fasttrain.data.seeds import mix, own_randomness
from fasttrain.data.stateful import keeps_state, stateful_loader
from fasttrain.data.streamed import Streamed
from fasttrain.data.together import Piece
from fasttrain.data.workers import end_pass, end_workers_of
from fasttrain.distributed.world import World
from fasttrain.errors import BatchError, CheckpointError, ConfigError
from fasttrain.lazy import torch


class ByBatches(Streamed):
    """The batches of this rank as they come; the position counts steps.

    A source with `state_dict` and `load_state_dict` is taken up by these; others are gone through again up to the position.

    Raises:
        ConfigError: the data is a loader whose batches are not this rank's share.
    """

    def __init__(self, data: Data, share: int, seed: int, world: World, limit: float | None = None) -> None:
        self.source = batched(data.train, share, data) if share else data.train
        self.transform = data.transform
        self._share, self._seeds = share, (seed, "given", world.rank)
        self._saw_whole_batch = False
        self._state = self._taken_up = None
        declared = _length(self.source, limit)
        steps = None if limit is None else declared if limit < 1 else int(limit)
        super().__init__(world, declared, steps)

    def portions(self, position: Position) -> Generator[Portion, None, None]:
        """Portions from a position on, through one epoch after the other, without end."""
        try:
            yield from super().portions(position)
        finally:
            end_workers_of(self.source)

    def told(self, portion: Portion, rows: Sequence[int] | None = None) -> str:
        """Which batch of the data a portion is, or which of its samples."""
        return f"{rows_of(rows)}batch {portion.first} of epoch {portion.epoch} of the training data"

    def _pieces(self, position: Position) -> Generator[Piece, None, None]:
        skip = position.seen
        if self._taken_up is not None:
            self.source.load_state_dict(self._taken_up)
            self._taken_up, skipped = None, skip
        else:
            skipped = 0
        rest = None if self.limit is None else self.limit - skipped
        with contextlib.closing(
            given_batches(self.source, self.transform, *self._seeds, epoch=position.epoch, first=skipped)
        ) as given:
            reading = _Peekable(itertools.islice(given, rest))
            for number in itertools.count(skipped):
                if (batch := reading.next()) is END:
                    return
                state = self.source.state_dict() if keeps_state(self.source) and number >= skip else None
                here, exact = self._samples_in(batch, number, reading)
                if number >= skip:
                    yield Piece(batch, here, exact, state)

    def _samples_in(self, batch: Any, number: int, reading: _Peekable) -> tuple[int, bool]:
        """Samples in a batch that the data cut, and whether every count of it would say so.

        Other sizes than the share are left to the check of whoever cuts it.
        """
        several = self.world.size > 1
        if isinstance(batch, Microbatches):
            here = sum(leading(microbatch) for microbatch in batch)
            return here, several and here == sum(_num_samples(microbatch) for microbatch in batch)
        share, held = self._share, leading(batch)
        # Once a whole batch came, dim 0 is known to be the samples, and a shorter one is a short last one.
        self._saw_whole_batch |= held == share
        believed = (
            held == share or self._saw_whole_batch or _says_its_size(self.source, number, held) or reading.is_over()
        )
        here = min(share, held) if believed else share
        return here, several and here == _num_samples(batch)

    def given(self, portion: Portion) -> None:
        """Keep the state of the source after a batch that was given."""
        if portion.mark is not None:
            self._state = portion.mark

    def state_dict(self) -> dict[str, Any]:
        """The state of the source, where it has one; and how it is read, where its order hangs on that."""
        state: dict[str, Any] = {}
        if (workers := _workers(self.source)) is not None:
            state["num_workers"] = workers
        if self._state is not None:
            state["source"] = to_plain(self._state, "the state of the training data")
        return state

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Take up the state of this rank's source.

        Raises:
            CheckpointError: it was read by other ranks or workers, and means nothing to these.
        """
        streams = any(states) or _workers(self.source) is not None
        if streams and len(states) != self.world.size:
            raise CheckpointError(
                f"the checkpoint is in the middle of an epoch of a stream that {len(states)} ranks read, and this run has "
                f"{self.world.size}: what each had read says nothing of another cut; start {len(states)} ranks until the "
                "epoch is over, or give the data as fasttrain.data.Shards, which any ranks take up."
            )
        state = states[self.world.rank] if streams else {}
        before, now = state.get("num_workers"), _workers(self.source)
        if before != now and "source" not in state and before is not None:
            raise CheckpointError(
                f"the checkpoint is in the middle of an epoch of a stream that {before} workers read, and {now} read it "
                f"here, in another order; set num_workers={before} until the epoch is over, or give the data as "
                "fasttrain.data.Shards, which any number of workers takes up."
            )
        if "source" in state and keeps_state(self.source):
            self._taken_up = self._state = from_plain(state["source"])

    @property
    def can_begin_anew(self) -> bool:
        """Whether the data can be gone through beside the training, which is in the middle of it."""
        source = self.source
        if keeps_state(source):  # its place is that of the training
            return False
        held = (source, getattr(source, "dataset", None))
        persistent = getattr(source, "persistent_workers", False)
        return not (persistent or any(isinstance(part, Iterator) for part in held))

    def undisturbed(self) -> contextlib.AbstractContextManager[None]:
        """Afterwards the loader's generators stand where they stood."""
        return kept_generators(self.source)


END = object()


class _Peekable:
    """An iterator that can be asked whether it is over; only then it reads ahead."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items, self._ahead = items, []

    def next(self) -> Any:
        """The next item, or `END`."""
        return self._ahead.pop() if self._ahead else next(self._items, END)

    def is_over(self) -> bool:
        """Whether there is no further item."""
        self._ahead = self._ahead or [next(self._items, END)]
        return self._ahead[0] is END


def batched(source: Any, share: int, data: Data) -> Any:
    """A stream of samples as batches of `share`; a loader that cuts by itself is looked at; other sources as they are.

    Raises:
        ConfigError: a loader gives batches of another size than this rank's share.
    """
    if isinstance(source, torch.utils.data.IterableDataset):
        settings: dict[str, Any] = {"batch_size": share, "num_workers": data.workers, "collate_fn": data.collate}
        settings["timeout"] = (data.timeout_s or 0) if data.workers else 0
        stateful = stateful_loader(source, **settings)
        return torch.utils.data.DataLoader(source, **settings) if stateful is None else stateful
    given = source.batch_size if isinstance(source, torch.utils.data.DataLoader) else None
    if given not in (None, share):
        raise ConfigError(
            f"the training data is a DataLoader with batch_size={given}, while this rank's share of the run's batch_size is "
            f"{share}; make the two agree, or give the data set itself, which is then cut as the run says."
        )
    return source


def given_batches(
    source: Any, transform: Callable[[Any], Any] | None, *seeds: object, epoch: int, first: int = 0
) -> Generator[Any, None, None]:
    """The batches that an iterable gives by itself; `first`: the number of the first one.

    What it draws for them from the host's global generators follows from `seeds`, the epoch and the number of the batch:
    neither training nor evaluation is moved by the other, and a restart finds the same order.
    """
    _tell_epoch(source, epoch)
    with own_randomness(mix(*seeds, epoch)):
        reading = read_once_each(source) if isinstance(source, torch.utils.data.DataLoader) else iter(source)
    draws = transform is not None or not _draws_nothing_here(source)
    try:
        for number in itertools.count(first):
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


def _num_samples(batch: Any) -> int:
    try:
        return num_samples(batch)
    except BatchError:
        return -1


def _length(source: Any, limit: float | None) -> int | None:
    try:
        steps = len(source)
    except TypeError:
        if limit is not None and limit < 1:
            raise ConfigError(
                f"limit_batches={limit} is a share of the steps, and the training data does not say how many it has; "
                "give a number of steps."
            ) from None
        return None if limit is None else int(limit)
    if isinstance(source, torch.utils.data.DataLoader):
        source._IterableDataset_len_called = None  # or torch would warn of each batch beyond, beside our one warning
    return steps if limit is None else at_most(limit, steps)


def _workers(source: Any) -> int | None:
    """The workers that read a stream, where its order hangs on their number."""
    is_loader = isinstance(source, torch.utils.data.DataLoader)
    return source.num_workers if is_loader and isinstance(source.dataset, torch.utils.data.IterableDataset) else None


def _says_its_size(source: Any, number: int, held: int) -> bool:
    """Whether a batch smaller than its share is known to be the loader's short last one."""
    dataset, step = getattr(source, "dataset", None), getattr(source, "batch_size", None)
    if step is None or not isinstance(dataset, Sized):
        return False
    return held == min(step, len(dataset) - number * step)
