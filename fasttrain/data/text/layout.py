"""How sequences of various lengths lie in a batch: padded, packed into rows, or one after another.

A batch comes from the loader padded, a sequence a row, so that it is cut over microbatches like any other. Each microbatch
is then laid out anew on the host (`Layout.lay_out`, for `Data(lay_out=...)`). The sequences of a microbatch are the same in
every layout, and so are loss and gradient.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fasttrain.data.text.config import LayoutConfig
from fasttrain.lazy import np, torch
from fasttrain.nn.boundaries import boundaries

LENGTH, MASK, FIRST, BOUNDARIES = "length", "mask", "first", "boundaries"


@dataclass(frozen=True)
class Layout:
    """How the sequences of a data set are batched.

    `fill`: the entries of a sample with one number a token, by name, and what they are filled up with where a row has no
    token (`{"tokens": pad_id, "labels": -100}`). The first of them tells the length of a sample. Other entries of a sample
    are numbers.
    """

    config: LayoutConfig
    fill: Mapping[str, int]

    def collate(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """A batch of samples: `[B, longest]` for what has a number a token, `[B]` for the rest and for `length`."""
        first = next(iter(self.fill))
        lengths = [len(sample[first]) for sample in samples]
        width = self._width(max(lengths), self.config.sequence_length)
        batch: dict[str, Any] = {}
        for name, filling in self.fill.items():
            rows = torch.full((len(samples), width), filling, dtype=samples[0][name].dtype)
            for row, sample, length in zip(rows, samples, lengths, strict=True):
                row[:length] = sample[name]
            batch[name] = rows
        rest = [name for name in samples[0] if name not in self.fill]
        batch.update({name: torch.stack([torch.as_tensor(sample[name]) for sample in samples]) for name in rest})
        return batch | {LENGTH: torch.tensor(lengths)}

    def lay_out(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A microbatch as the model gets it.

        `padded`: cut to its own longest sequence; `mask` `[B, S]`, true for tokens, unless all rows are full. `packed` and
        `unpadded`: rows `[R, S]` of sequences; `boundaries` between them; `first` `[B]`, where each of the samples begins
        among all tokens of the rows. Without samples it stays as it is.
        """
        lengths = batch[LENGTH].tolist()
        if not lengths:
            return batch
        if self.config.layout == "padded":
            return self._trimmed(batch, lengths)
        if self.config.layout == "unpadded":
            return self._in_rows(batch, lengths, [list(range(len(lengths)))], sum(lengths) + self.config.multiple)
        limit = max(self.config.row_length or self.config.sequence_length, max(lengths))
        return self._in_rows(batch, lengths, pack(lengths, limit), limit)

    def _width(self, longest: int, limit: int) -> int:
        return max(longest, min(rounded_up(longest, self.config.multiple), limit))

    def _trimmed(self, batch: dict[str, Any], lengths: list[int]) -> dict[str, Any]:
        width = self._width(max(lengths), self.config.sequence_length)
        trimmed = {name: entry[:, :width] if name in self.fill else entry for name, entry in batch.items()}
        held = trimmed.pop(LENGTH)
        return trimmed if min(lengths) == width else trimmed | {MASK: torch.arange(width) < held[:, None]}

    def _in_rows(self, batch: dict[str, Any], lengths: list[int], rows: list[list[int]], limit: int) -> dict[str, Any]:
        width = self._width(max(sum(lengths[i] for i in row) for row in rows), limit)
        first, stretches = np.zeros(len(lengths), dtype=np.int64), []
        for number, row in enumerate(rows):
            place = number * width
            for i in row:
                first[i] = place
                place += lengths[i]
            stretches += [lengths[i] for i in row] + _fillings((number + 1) * width - place, max(lengths))
        held = np.asarray(lengths)
        # Tokens go from a place among the samples' own to one in the rows.
        where = torch.from_numpy(np.repeat(first - (np.cumsum(held) - held), held) + np.arange(held.sum()))
        is_token = torch.arange(next(batch[name].shape[1] for name in self.fill)) < batch[LENGTH][:, None]
        laid = {name: entry for name, entry in batch.items() if name not in self.fill and name != LENGTH}
        for name, filling in self.fill.items():
            flat = torch.full((len(rows) * width,), filling, dtype=batch[name].dtype)
            flat[where] = batch[name][is_token]
            laid[name] = flat.view(len(rows), width)
        return laid | {FIRST: torch.from_numpy(first), BOUNDARIES: boundaries(stretches)}


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """As few rows of at most `capacity` tokens as first-fit decreasing finds, evened out where that makes them shorter.

    Returns the indices of each row's sequences. Rows are as wide as the fullest of them: a last one that is nearly empty
    would be filled up with nothing.

    >>> first_fit_decreasing([6, 5, 4, 3, 2, 2], 15), pack([6, 5, 4, 3, 2, 2], 15)
    ([[0, 1, 2], [3, 4, 5]], [[0, 3, 4], [1, 2, 5]])
    """
    rows = first_fit_decreasing(lengths, capacity)
    even = evened_out(lengths, len(rows))
    return min(rows, even, key=lambda rows: max((sum(lengths[i] for i in row) for row in rows), default=0))


def evened_out(lengths: Sequence[int], rows: int) -> list[list[int]]:
    """Sequences dealt out over a number of rows: the longest first, each to the row with the fewest tokens so far.

    Source: Graham 1969 (longest processing time first).
    """
    dealt: list[list[int]] = [[] for _ in range(rows)]
    fullness = [(0, row) for row in range(rows)]
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        tokens, row = fullness[0]
        dealt[row].append(i)
        heapq.heapreplace(fullness, (tokens + lengths[i], row))
    return dealt


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Sequences put into rows of at most `capacity` tokens: the longest first, each into the first row that has room.

    Returns the indices of each row's sequences; the same lengths give the same rows. At most 11/9 of the fewest rows
    possible, and 6/9 of one more.
    Source: Johnson 1973; Dósa 2007 for the bound.

    >>> first_fit_decreasing([3, 5, 2, 4, 2], 8)
    [[1, 0], [3, 2, 4]]
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = next((row for row, left in enumerate(room) if left >= lengths[i]), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(capacity)
        rows[row].append(i)
        room[row] -= lengths[i]
    return rows


def rounded_up(length: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `length`.

    >>> rounded_up(17, 8), rounded_up(16, 8)
    (24, 16)
    """
    return -(-length // multiple) * multiple


def _fillings(room: int, longest: int) -> list[int]:
    """The end of a row that holds no sequence, in stretches no longer than a sequence: a model has no places beyond."""
    whole, rest = divmod(room, longest)
    return [longest] * whole + [rest] * (rest > 0)
