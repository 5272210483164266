"""In which order samples are seen: a global position, split over ranks by arithmetic.

Position is counted in samples of the whole run. Nothing of it depends on the number of ranks, workers or microbatches,
so a run can be taken up in the middle of an epoch by arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fasttrain.data.grouping import group_by_length
from fasttrain.data.seeds import mix
from fasttrain.lazy import torch


@dataclass(frozen=True, kw_only=True)
class Order:
    """The samples of each step: `size` an epoch, `batch_size` a step over all ranks, at most `limit` steps an epoch.

    `lengths` (int64, `[size]`): shuffled samples are then grouped by length.
    `limit` below 1 is a share of the epoch's steps, rounded down. `drop_last` leaves out the samples that fill no batch.
    With `repeats`, each sample that is drawn stands in its batch that many times, one copy beside the other: an epoch of
    `size` samples then holds `size / repeats` of them, others in each epoch.
    Source: Hoffer et al. 2019, arXiv:1901.09335.
    """

    size: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    limit: float | None = None
    drop_last: bool = False
    repeats: int = 1
    lengths: Any = field(default=None, compare=False, repr=False)

    @property
    def end(self) -> int:
        """Samples of an epoch that are seen: all, or those of the first `limit` steps, or those of whole batches."""
        whole = self.size // self.batch_size * self.batch_size
        size = whole if self.drop_last else self.size
        steps = -(-size // self.batch_size)
        return size if self.limit is None else min(size, at_most(self.limit, steps) * self.batch_size)

    @property
    def steps_per_epoch(self) -> int:
        """Steps an epoch takes, a last one with fewer samples included."""
        return -(-self.end // self.batch_size)

    def epoch(self, epoch: int) -> Any:
        """Indices of all samples in the order of this epoch: int64, `[size]`."""
        if not self.shuffle:
            drawn = torch.arange(self.size)
        else:
            generator = torch.Generator().manual_seed(mix(self.seed, "order", epoch))
            drawn = torch.randperm(self.size, generator=generator)
            if self.lengths is not None:
                drawn = group_by_length(drawn, self.lengths, self.batch_size, generator)
        if self.repeats == 1:
            return drawn
        return drawn[: -(-self.size // self.repeats)].repeat_interleave(self.repeats)[: self.size]

    def spans(self, position: int = 0) -> list[tuple[int, int]]:
        """First position and end of each step of an epoch from `position` on, over all ranks."""
        step, end = self.batch_size, self.end
        return [(first, min(first + step, end)) for first in range(position, end, step)]


def at_most(limit: float, steps: int) -> int:
    """The steps that a limit leaves: so many, or that share of them, rounded down.

    >>> at_most(3, 9), at_most(0.5, 9), at_most(0.1, 9), at_most(20, 9)
    (3, 4, 0, 9)
    """
    # Rounded first: 0.29 * 100 is 28.999999999999996.
    return min(steps, int(round(limit * steps, 9)) if limit < 1 else int(limit))


def share(first: int, end: int, rank: int, ranks: int) -> tuple[int, int]:
    """The part of `[first, end)` that a rank takes: contiguous, sizes differ by at most one, none twice.

    >>> [share(0, 7, rank, 3) for rank in range(3)]
    [(0, 2), (2, 4), (4, 7)]
    """
    count = end - first
    return first + count * rank // ranks, first + count * (rank + 1) // ranks
