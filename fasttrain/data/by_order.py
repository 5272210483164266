"""Samples that can be asked for by their number: in memory, or a map-style data set."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from fasttrain.core.batch import num_samples, pieces
from fasttrain.data.data import Data, form, taker
from fasttrain.data.fetching import Key, reason_of
from fasttrain.data.loader import Loader
from fasttrain.data.naming import listed
from fasttrain.data.order import Order, share
from fasttrain.data.reading import Portion, Position
from fasttrain.data.seeds import mix, own_randomness
from fasttrain.errors import BatchError, FasttrainError


class Step(NamedTuple):
    """Where a step stands: its epoch and samples over all ranks, and those of this rank."""

    epoch: int
    first: int
    end: int
    low: int
    high: int


class ByOrder:
    """This rank's share of each step of an order; the position counts samples over all ranks.

    A rank whose share of a short last step is empty gets an empty batch from tensors, and `None` from a data set.
    """

    ends_by_itself = False
    can_begin_anew = True

    def __init__(self, data: Data, source: Any, order: Order, rank: int, ranks: int, train: bool = True) -> None:
        self.data, self.source, self.order, self.rank, self.ranks, self.train = data, source, order, rank, ranks, train
        self.what = "training data" if train else "evaluation data"
        self.steps_per_epoch: int | None = order.steps_per_epoch
        self.epoch_end: int | None = order.end
        self._in_memory = form(source) == "tensors"
        self._transform, self._size_at = (data.transform, data.size_at) if train else (None, None)
        # With tensors in memory, each rank transforms the batch of all ranks, so that it draws what it draws on one.
        self._whole = self._in_memory and ranks > 1 and self._transform is not None and not data.transform_share
        self._kept: Loader | None = None

    def portions(self, position: Position) -> Generator[Portion, None, None]:
        """Portions from a position on, through one epoch after the other, without end. Workers end with the iterator."""
        loader = None if self._in_memory else self._loader()
        try:
            yield from self._portions(loader, position, epochs=None)
        finally:
            if loader is not None:
                loader.close()

    def epoch(self, epoch: int, seen: int = 0) -> Generator[Portion, None, None]:
        """Portions of one epoch, from the sample number `seen` on. Workers stay for the next one, until `close`."""
        if self._kept is None and not self._in_memory:
            self._kept = self._loader()
        return self._portions(self._kept, Position(epoch, seen), epochs=1)

    def close(self) -> None:
        """End the workers that stayed."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def _loader(self) -> Loader:
        return Loader(
            self.source,
            self.order.seed,
            batch_size=self.order.batch_size,
            # No rank starts workers for steps in which it has no sample.
            num_workers=self.data.workers if self.order.end else 0,
            timeout_s=self.data.timeout_s,
            collate=self.data.collate,
            what=self.what,
            repeats=self.order.repeats,
        )

    def _steps(self, position: Position, epochs: int | None) -> Iterator[Step]:
        epoch, seen = position.epoch, position.seen
        last = None if epochs is None else epoch + epochs
        while epoch != last:
            for first, end in self.order.spans(seen):
                yield Step(epoch, first, end, *share(first, end, self.rank, self.ranks))
            epoch, seen = epoch + 1, 0

    def _keys(self, position: Position, epochs: int | None) -> Iterator[Key]:
        for step, indices in self._with_indices(position, epochs):
            if step.low < step.high:
                size = None if self._size_at is None else self._size_at(step.epoch, step.first)
                yield Key(step.epoch, step.low, indices[step.low : step.high].tolist(), size)

    def _with_indices(self, position: Position, epochs: int | None) -> Iterator[tuple[Step, Any]]:
        epoch = indices = None
        for step in self._steps(position, epochs):
            if step.epoch != epoch:
                epoch, indices = step.epoch, self.order.epoch(step.epoch)
            yield step, indices

    def _batches(self, loader: Loader | None, position: Position, epochs: int | None) -> Iterator[tuple[Step, Any]]:
        if loader is None:
            take, whole = taker(self.source), self._whole
            for step, indices in self._with_indices(position, epochs):
                yield step, take(indices[step.first : step.end] if whole else indices[step.low : step.high])
            return
        reading = loader.batches(self._keys(position, epochs))
        for step in self._steps(position, epochs):
            yield step, next(reading) if step.low < step.high else None

    def _portions(
        self, loader: Loader | None, position: Position, epochs: int | None
    ) -> Generator[Portion, None, None]:
        end = self.order.end
        for step, batch in self._batches(loader, position, epochs):
            if self._transform is not None and (self._whole or step.low < step.high):
                batch = self._transformed(batch, step)
            if self._whole:
                num_samples(batch, expected=step.end - step.first)
                (batch,) = pieces(batch, [(step.low - step.first, step.high - step.first)])
            after = Position(step.epoch, step.end) if step.end < end else Position(step.epoch + 1, 0)
            everywhere = step.end - step.first
            yield Portion(
                batch, step.high - step.low, everywhere, step.epoch, step.first, after, alone=everywhere < self.ranks
            )

    def _transformed(self, batch: Any, step: Step) -> Any:
        assert self._transform is not None
        low, high = (step.first, step.end) if self._whole else (step.low, step.high)
        with own_randomness(mix(self.order.seed, "batch", step.epoch, low)):
            try:
                return self._transform(batch)
            except FasttrainError:
                raise
            except Exception as error:
                samples = listed(self.source, self.order.epoch(step.epoch)[low:high].tolist())
                raise BatchError(
                    f"the transform of the {self.what} failed for {samples}: {reason_of(error)}; look at these samples, or "
                    "at the function given as Data(transform=...)."
                ) from error

    def beside(self, position: Position) -> Generator[Portion, None, None]:
        """From the very first sample on."""
        return self.portions(Position())

    def given(self, portion: Portion) -> None:
        """The position says it all."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the position says it all."""
        return {}

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Nothing to take up."""

    def undisturbed(self) -> AbstractContextManager[None]:
        """Reading by number moves no generator but its own."""
        return nullcontext()

    def told(self, portion: Portion, rows: Sequence[int] | None = None) -> str:
        """The samples of this rank in a portion, or those of these rows, a few by name."""
        low, high = share(portion.first, portion.first + portion.everywhere, self.rank, self.ranks)
        indices = self.order.epoch(portion.epoch)[low:high].tolist()
        if rows is not None:
            indices = [indices[row] for row in rows]
        return f"{listed(self.source, indices)} of the {self.what}"

    def shares(self, total_steps: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Samples of each rank in a usual step, and in the last one of an epoch if a run of that length comes to it."""
        size, end, ranks = self.order.batch_size, self.order.end, self.ranks
        comes = total_steps >= self.order.steps_per_epoch
        last = (end % size or size) if comes else min(size, end)
        dealt = [[share(0, count, rank, ranks) for rank in range(ranks)] for count in (min(size, end), last)]
        usual, short = (tuple(high - low for low, high in spans) for spans in dealt)
        return usual, short
