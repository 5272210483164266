"""What a reader of training data gives, and what the feed may ask of it.

A reader knows one form of data: samples in an order of their own (`ByOrder`), or batches as they come (`ByBatches`). It
reads on the host and knows nothing of devices and models.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


@dataclass(slots=True)
class Position:
    """Where a run stands in its data: the epoch, and the samples (or batches, where data gives those) seen in it."""

    epoch: int = 0
    seen: int = 0


class Portion(NamedTuple):
    """What one rank gets for one step: its batch, the samples in it and over all ranks, and where it stands.

    `epoch` and `first` are where the step begins; `after` is where a run goes on that has taken it.
    """

    batch: Any
    here: int
    everywhere: int
    epoch: int
    first: int
    after: Position


class Reader(Protocol):
    """Training data of one rank, read on the host."""

    steps_per_epoch: int | None
    # The position at which an epoch is over, in what the position counts; None: only going through it tells.
    epoch_end: int | None
    # Whether the samples over all ranks are known, and not guessed from those of this rank.
    exact: bool

    def portions(self, position: Position) -> Generator[Portion, None, None]:
        """Portions from a position on, through one epoch after the other, without end."""
        ...

    def beginning(self, position: Position) -> Position:
        """Where going through the data beside a run that stands at `position` begins."""
        ...

    @property
    def can_begin_anew(self) -> bool:
        """Whether the data can be gone through beside the training, which is in the middle of it."""
        ...

    def told(self, portion: Portion) -> str:
        """What of the data a portion is, for a message: its samples by name, or the number of the batch."""
        ...

    def undisturbed(self) -> AbstractContextManager[None]:
        """Afterwards the data's own generators stand where they stood."""
        ...
