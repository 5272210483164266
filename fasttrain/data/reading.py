"""What a reader of training data gives, and what the feed may ask of it.

A reader knows one form of data: samples in an order of their own (`ByOrder`), or batches as they come (`ByBatches`). It
reads on the host and knows nothing of devices and models.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
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

    `epoch` and `first` are where the step begins; `after` is where a run goes on that has taken it. `exact=False`:
    `everywhere` is a guess from what this rank holds. `alone`: another rank may hold no sample of this step. `mark` is what
    the reader wants to know of it once it was given.
    """

    batch: Any
    here: int
    everywhere: int
    epoch: int
    first: int
    after: Position
    exact: bool = True
    alone: bool = False
    mark: Any = None


class Reader(Protocol):
    """Training data of one rank, read on the host."""

    # Whether epochs end with the data, whatever their length was said to be.
    ends_by_itself: bool

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of an epoch; `None`: nobody knows."""
        ...

    @property
    def epoch_end(self) -> int | None:
        """Where an epoch is over, in what the position counts; `None`: only going through it tells."""
        ...

    def portions(self, position: Position) -> Generator[Portion, None, None]:
        """Portions from a position on, through one epoch after the other, without end."""
        ...

    def beside(self, position: Position) -> Generator[Portion, None, None]:
        """The first portions of this rank once more, beside a run that stands at `position`; no other rank is asked."""
        ...

    def given(self, portion: Portion) -> None:
        """A portion was given to a step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs besides the position to go on after the portions that were given; plain values."""
        ...

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Go on where a run stood whose ranks gave these states, one each."""
        ...

    @property
    def can_begin_anew(self) -> bool:
        """Whether the data can be gone through beside the training, which is in the middle of it."""
        ...

    def told(self, portion: Portion, rows: Sequence[int] | None = None) -> str:
        """What of the data a portion is, for a message: its samples by name (those of `rows`), or its batch by number."""
        ...

    def undisturbed(self) -> AbstractContextManager[None]:
        """Afterwards the data's own generators stand where they stood."""
        ...
