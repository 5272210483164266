"""What readers of data that ends by itself share: ranks that end apart, and epochs of another length than was said."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

from fasttrain.data.reading import Portion, Position
from fasttrain.data.together import Joined, Piece, Together, alone
from fasttrain.distributed.world import World
from fasttrain.errors import ConfigError


class Streamed:
    """A reader whose epochs end with the data of all ranks. A subclass gives the pieces of this rank.

    A rank whose data is at its end gets no batch (`None`) until that of the others is, too; with `shortest` an epoch ends
    with the first rank's. A length that the data declares plans the run and is no limit.
    """

    ends_by_itself = True
    # What a position counts, as messages call it.
    counts = "batches"

    def __init__(self, world: World, declared: int | None, limit: int | None) -> None:
        self.world, self.limit = world, limit
        self.shortest: str | None = None
        self.declared = declared
        self._together: Together | None = None
        self._told = False

    def join(self, shortest: str | None) -> None:
        """Prepare what ranks do together; every rank calls it. `shortest`: what cannot do with a rank that has no batch."""
        self.shortest = shortest
        if self.world.size > 1:
            self._together = Together(self.world.rank, self.world.size)
            self._together.shortest = shortest is not None
        every = [length for length in self.world.gather(self.declared) if length is not None]
        known = len(every) == self.world.size
        self.declared = (max(every) if shortest is None else min(every)) if known else None

    # ---- what a subclass gives

    def _pieces(self, position: Position) -> Iterator[Piece]:
        """What this rank reads of an epoch from a position on."""
        raise NotImplementedError

    def _length(self) -> int | None:
        """Where an epoch is over by what was declared, in what the position counts."""
        return self.declared

    def _counted(self, step: Joined) -> int:
        """By how much a step moves the position."""
        return 1

    def _finished(self, batch: Any, epoch: int, first: int) -> Any:
        """A batch as it is given, once it is known where its step begins."""
        return batch

    # ---- reading

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of an epoch, as far as the data says."""
        return self.declared

    @property
    def epoch_end(self) -> int | None:
        """The position at which an epoch should be over."""
        return self._length()

    def portions(self, position: Position) -> Generator[Portion, None, None]:
        """Portions from a position on, through one epoch after the other, without end."""
        return self._portions(position, alone if self._together is None else self._together.steps)

    def beside(self, position: Position) -> Generator[Portion, None, None]:
        """From the first batch of this epoch on, of this rank alone."""
        return self._portions(Position(position.epoch, 0), alone, beside=True)

    def _portions(
        self, position: Position, steps: Callable[[Iterable[Piece]], Iterator[Joined]], beside: bool = False
    ) -> Generator[Portion, None, None]:
        epoch, seen, ranks = position.epoch, position.seen, self.world.size
        while True:
            begun = seen
            for step in steps(self._pieces(Position(epoch, seen))):
                first, seen = seen, seen + self._counted(step)
                piece = step.piece
                after = Position(epoch + 1, 0) if step.is_last else Position(epoch, seen)
                if not beside:
                    self._look_at_length(seen, step)
                batch = None if piece is None else self._finished(piece.batch, epoch, first)
                here, mark = (0, None) if piece is None else (piece.samples, piece.mark)
                everywhere = here * ranks if beside else step.everywhere
                exact = step.exact and not beside
                yield Portion(batch, here, everywhere, epoch, first, after, exact, step.alone, mark)
            if seen == begun:
                self._refuse_empty(epoch, seen)
            epoch, seen = epoch + 1, 0

    def _refuse_empty(self, epoch: int, seen: int) -> None:
        if seen:  # a run was taken up at the very end of an epoch that should have gone on
            return
        if epoch:
            raise ConfigError(
                f"the training data gave no batch in epoch {epoch + 1}; an iterator can be gone through once: give what can "
                "be begun anew, such as a DataLoader or an object with __iter__, or fewer steps."
            )
        if self.shortest is not None and self.world.size > 1:
            raise ConfigError(
                f"a rank got no batch of the training data, and with {self.shortest} every rank needs one in each step; "
                "give every rank some of the data, or turn that off."
            )
        raise ConfigError("the training data gave no batch; look at the path, the filter or the batch size.")

    def _look_at_length(self, seen: int, step: Joined) -> None:
        """Warn once of an epoch of another length than was declared: at its end, or when it is twice as long."""
        if step.left:
            self._tell(
                f"the data of {self.world.size - step.left} ranks is at its end and {step.left} ranks have more, which is "
                f"left out of this epoch: with {self.shortest} every rank needs a batch in each step; give all as many."
            )
        declared = self._length()
        if (
            declared is None
            or self.limit is not None
            or (seen < 2 * declared and (not step.is_last or seen == declared))
        ):
            return
        came = f"{seen} came" if step.is_last else f"{seen} have come so far"
        self._tell(
            f"the training data declares {declared} {self.counts} an epoch, and {came}; epochs end with the data, while "
            "schedules were planned for the declared length: correct it (__len__, length=), or set steps=N."
        )

    def _tell(self, text: str) -> None:
        if not self._told and self.world.is_main:
            warnings.warn(text, stacklevel=2)
        self._told = True
