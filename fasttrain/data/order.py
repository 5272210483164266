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
    """

    size: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True

    limit: int | None = None
    lengths: Any = field(default=None, compare=False, repr=False)

    @property
    def end(self) -> int:
        """Samples of an epoch that are seen: all, or those of the first `limit` steps."""
        return self.size if self.limit is None else min(self.size, self.limit * self.batch_size)

    @property
    def steps_per_epoch(self) -> int:
        """Steps an epoch takes, a last one with fewer samples included."""
        return -(-self.end // self.batch_size)

    def epoch(self, epoch: int) -> Any:
        """Indices of all samples in the order of this epoch: int64, `[size]`."""
        if not self.shuffle:
            return torch.arange(self.size)
        generator = torch.Generator().manual_seed(mix(self.seed, "order", epoch))
        shuffled = torch.randperm(self.size, generator=generator)
        if self.lengths is None:
            return shuffled
        return group_by_length(shuffled, self.lengths, self.batch_size, generator)

    def spans(self, position: int = 0) -> list[tuple[int, int]]:
        """First position and end of each step of an epoch from `position` on, over all ranks."""
        return [(a, min(a + self.batch_size, self.end)) for a in range(position, self.end, self.batch_size)]


def share(first: int, end: int, rank: int, ranks: int) -> tuple[int, int]:
    """The part of `[first, end)` that a rank takes: contiguous, sizes differ by at most one, none twice.

    >>> [share(0, 7, rank, 3) for rank in range(3)]
    [(0, 2), (2, 4), (4, 7)]
    """
    count = end - first
    return first + count * rank // ranks, first + count * (rank + 1) // ranks
