"""Samples that can be asked for by their number: in memory, or a map-style data set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from fasttrain.data.data import Data
from fasttrain.data.loader import epoch_batches
from fasttrain.data.order import Order, share
from fasttrain.data.reading import Portion, Position


class ByOrder:
    """This rank's share of each step of an order; the position counts samples over all ranks."""

    exact = True
    can_begin_anew = True

    def __init__(self, data: Data, source: Any, order: Order, rank: int, ranks: int, train: bool = True) -> None:
        self.data, self.source, self.order, self.rank, self.ranks, self.train = data, source, order, rank, ranks, train
        self.steps_per_epoch: int | None = order.steps_per_epoch
        self.epoch_end: int | None = order.end

    def portions(self, position: Position) -> Iterator[Portion]:
        """Portions from a position on, through one epoch after the other, without end."""
        epoch, seen = position.epoch, position.seen
        while True:
            yield from self.epoch(epoch, seen)
            epoch, seen = epoch + 1, 0

    def epoch(self, epoch: int, seen: int = 0) -> Iterator[Portion]:
        """Portions of one epoch, from the sample number `seen` on."""
        end = self.order.end
        given = epoch_batches(self.data, self.source, self.order, epoch, seen, self.rank, self.ranks, self.train)
        for batch, here, everywhere in given:
            first, seen = seen, seen + everywhere
            after = Position(epoch, seen) if seen < end else Position(epoch + 1, 0)
            yield Portion(batch, here, everywhere, epoch, first, after)

    def beginning(self, position: Position) -> Position:
        """The very first sample."""
        return Position()

    def undisturbed(self) -> AbstractContextManager[None]:
        """Reading by number moves no generator but its own."""
        return nullcontext()

    def shares(self, total_steps: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Samples of each rank in a usual step, and in the last one of an epoch if a run of that length comes to it."""
        size, end, ranks = self.order.batch_size, self.order.end, self.ranks
        comes = total_steps >= self.order.steps_per_epoch
        last = (end % size or size) if comes else min(size, end)
        dealt = [[share(0, count, rank, ranks) for rank in range(ranks)] for count in (min(size, end), last)]
        usual, short = (tuple(high - low for low, high in spans) for spans in dealt)
        return usual, short
