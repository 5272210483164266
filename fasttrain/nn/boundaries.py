"""Where sequences begin and end that stand one after another; needs no torch until it is used."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from fasttrain.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class Boundaries(NamedTuple):
    """The stretches that the tokens of a batch `[R, S]`, taken row after row, consist of.

    Each is a sequence or filling, and attends to itself alone. `cu_seqlens` int32 `[N + 1]`: where each begins, and the
    number of all tokens; on the device of the batch. `lengths` and `longest` say the same to the host, which never waits
    for the device to know them.
    """

    cu_seqlens: Tensor
    lengths: tuple[int, ...]
    longest: int

    def stretches(self) -> Tensor:
        """Which stretch each token belongs to: int64 `[R * S]`, from 0."""
        tokens = torch.arange(sum(self.lengths), device=self.cu_seqlens.device, dtype=torch.int32)
        return torch.bucketize(tokens, self.cu_seqlens[1:], right=True)

    def places(self) -> Tensor:
        """The place of each token in its own sequence, from 0: position ids, int64 `[R * S]`."""
        tokens = torch.arange(sum(self.lengths), device=self.cu_seqlens.device)
        return tokens - self.cu_seqlens.long()[self.stretches()]


def boundaries(lengths: Sequence[int]) -> Boundaries:
    """The boundaries of stretches of these lengths.

    >>> found = boundaries([2, 3])
    >>> found.cu_seqlens.tolist(), found.stretches().tolist(), found.places().tolist()
    ([0, 2, 5], [0, 0, 1, 1, 1], [0, 1, 0, 1, 2])
    """
    starts = list(itertools.accumulate(lengths, initial=0))
    return Boundaries(torch.tensor(starts, dtype=torch.int32), tuple(lengths), max(lengths, default=0))
