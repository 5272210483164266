"""Streams of several ranks, step by step: whose data is at its end, and how many samples a step has over all.

Ranks whose data ends by itself may have different numbers of batches. What each holds for a step is added up over the
ranks while the steps before it are computed, so that nobody waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from fasttrain.errors import RunError
from fasttrain.lazy import dist, torch


class Piece(NamedTuple):
    """What one rank read for one step. `exact=False`: nobody can say how many samples it holds, `samples` is believed."""

    batch: Any
    samples: int
    exact: bool = True
    mark: Any = None


@dataclass(slots=True)
class Joined:
    """A step of all ranks: this rank's piece (`None`: its data is at its end), and what is known over all of them.

    `left`: how many ranks still have data after the last step.
    """

    piece: Piece | None
    everywhere: int
    exact: bool
    alone: bool
    is_last: bool
    left: int = 0


def alone(pieces: Iterable[Piece]) -> Iterator[Joined]:
    """The steps of one rank that asks no other. One piece is read ahead, so that the last one is known as such."""
    reading = iter(pieces)
    held = next(reading, None)
    while held is not None:
        following = next(reading, None)
        yield Joined(held, held.samples, held.exact, False, following is None)
        held = following


class Together:
    """Steps of all ranks, until every rank's data is at its end (or the first one's: `shortest`).

    Made on every rank at once. Two pieces are read ahead: one, so that the last step is known as such, and one more, so
    that the sum over ranks is there when it is asked for.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.shortest = False
        # A group of its own: sums are under way while steps and evaluations talk over others.
        self.group: Any = dist.new_group(backend="gloo")

    def steps(self, pieces: Iterable[Piece]) -> Iterator[Joined]:
        """The steps of an epoch; every rank asks for each of them.

        Raises:
            RunError: reading failed on another rank. The rank itself raises what was raised there.
        """
        reading = _Reading(iter(pieces))
        window = deque(self._ask(reading) for _ in range(2))
        head = window.popleft()
        head.wait()
        while not self._over(head):
            self._raise_failure(head)
            window.append(self._ask(reading))
            following = window.popleft()
            following.wait()
            is_last = self._over(following)
            left = following.alive if is_last else 0
            step = Joined(head.piece, head.samples, not head.inexact, head.alive < self.ranks, is_last, left)
            head = following
            yield step
        for asked in window:
            asked.wait()

    def _ask(self, reading: _Reading) -> _Asked:
        piece = reading.next()
        failed = reading.failure is not None
        mine = [piece.samples, 1, not piece.exact] if piece is not None else [0, 0, 0]
        sums = torch.tensor([*mine, failed, failed * self.rank], dtype=torch.int64)
        work: Any = dist.all_reduce(sums, group=self.group, async_op=True)
        return _Asked(piece, reading.failure, sums, work)

    def _over(self, asked: _Asked) -> bool:
        return not asked.failed and asked.alive < (self.ranks if self.shortest else 1)

    def _raise_failure(self, asked: _Asked) -> None:
        if asked.failure is not None:
            raise asked.failure
        if asked.failed:
            where = f"rank {asked.failed_rank}" if asked.failed == 1 else f"{asked.failed} other ranks"
            raise RunError(f"reading the training data failed on {where}, which says why; all ranks end.")


class _Reading:
    """Pieces until the end or an error; both stay."""

    def __init__(self, pieces: Iterator[Piece]) -> None:
        self.pieces = pieces
        self.failure: Exception | None = None

    def next(self) -> Piece | None:
        """The next piece; `None` at the end and after an error."""
        if self.failure is not None:
            return None
        try:
            return next(self.pieces, None)
        except Exception as error:
            self.failure = error
            return None


class _Asked:
    """A piece, and what all ranks hold for its step once `wait` is through."""

    def __init__(self, piece: Piece | None, failure: Exception | None, sums: Any, work: Any) -> None:
        self.piece, self.failure, self._sums, self._work = piece, failure, sums, work

    def wait(self) -> None:
        """Until the numbers of all ranks are here."""
        self._work.wait()
        self.samples, self.alive, self.inexact, self.failed, self.failed_rank = self._sums.tolist()
