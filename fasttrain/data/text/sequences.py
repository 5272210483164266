"""Token sequences: documents joined into full ones, or each document on its own, in flat arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fasttrain.lazy import np, torch


def full_sequences(documents: Iterable[Sequence[int]], sequence_length: int, *, start: int, separator: int) -> Any:
    """Cut documents into full sequences: `[CLS] tokens [SEP]`, documents within one apart by `[SEP]`; no padding.

    Returns an array `[sequences, sequence_length]` of int16 where the ids allow it, else int32. What does not fill a
    last sequence is left out.
    Source: FULL-SENTENCES of Liu et al. 2019, arXiv:1907.11692.

    >>> full_sequences([[11, 12, 13], [14, 15, 16, 17]], 5, start=1, separator=2).tolist()
    [[1, 11, 12, 13, 2], [1, 2, 14, 15, 2]]
    """
    pieces = [np.asarray([*document, separator], dtype=np.int32) for document in documents]
    stream = np.concatenate(pieces)[:-1] if pieces else np.zeros(0, dtype=np.int32)
    inner = sequence_length - 2
    body = stream[: len(stream) // inner * inner].reshape(-1, inner)
    body = _narrow(body)
    sequences = np.empty((len(body), sequence_length), dtype=body.dtype)
    sequences[:, 0], sequences[:, 1:-1], sequences[:, -1] = start, body, separator
    return sequences


def separate_sequences(documents: Iterable[Sequence[int]], longest: int, *, start: int, separator: int) -> Any:
    """Each document as `[CLS] tokens [SEP]`, cut into several where it has more than `longest` tokens with these two.

    Returns all tokens one after another (`[tokens]`, int16 where the ids allow it, else int32) and where each sequence
    ends (`[sequences]`, int64). Every token of every document stays in once; an empty document is a
    sequence without any.

    >>> tokens, ends = separate_sequences([[11, 12, 13], [14]], 4, start=1, separator=2)
    >>> tokens.tolist(), ends.tolist()
    ([1, 11, 12, 2, 1, 13, 2, 1, 14, 2], [4, 7, 10])
    """
    inner = longest - 2
    pieces = [
        [start, *document[first : first + inner], separator]
        for document in documents
        for first in range(0, max(1, len(document)), inner)
    ]
    ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
    tokens = np.fromiter((token for piece in pieces for token in piece), np.int32, count=int(ends[-1]) if pieces else 0)
    return _narrow(tokens), ends


def _narrow(ids: Any) -> Any:
    return ids.astype(np.int16) if not len(ids) or ids.max() < 2**15 else ids


class Sequences:
    """A data set of sequences of various lengths, held in flat arrays: workers share them, and none is copied.

    `ends` int64 `[n]`: where each ends. `of_tokens`: arrays with an entry a token, by name. `of_sequences`: arrays with an
    entry a sequence. A sample is a dict of these for one sequence (int64 tensors), as `transform` changes it.
    """

    def __init__(
        self,
        ends: Any,
        of_tokens: Mapping[str, Any],
        of_sequences: Mapping[str, Any] | None = None,
        transform: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> None:
        self.ends, self.of_tokens, self.of_sequences = np.asarray(ends), of_tokens, of_sequences or {}
        self.transform = transform

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> Any:
        """Tokens of each sequence: int64, `[n]`."""
        return np.diff(self.ends, prepend=0)

    def __getitem__(self, index: int) -> dict[str, Any]:
        first = int(self.ends[index - 1]) if index else 0
        end = int(self.ends[index])
        sample = {name: torch.from_numpy(flat[first:end].astype(np.int64)) for name, flat in self.of_tokens.items()}
        sample.update({name: torch.tensor(int(each[index])) for name, each in self.of_sequences.items()})
        return sample if self.transform is None else self.transform(sample)

    def sorted_by_length(self) -> Sequences:
        """The same sequences, the shortest first: for evaluations, where no order matters and padding costs."""
        order = np.argsort(self.lengths, kind="stable")
        starts, lengths = (self.ends - self.lengths)[order], self.lengths[order]
        ends = np.cumsum(lengths)
        index = np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)
        return Sequences(
            ends,
            {name: flat[index] for name, flat in self.of_tokens.items()},
            {name: np.asarray(each)[order] for name, each in self.of_sequences.items()},
            self.transform,
        )
