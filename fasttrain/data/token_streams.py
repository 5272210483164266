"""Token ids in flat files that are mapped into memory, as windows of fixed length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fasttrain.errors import ConfigError, RunError
from fasttrain.lazy import np, torch


class TokenStream:
    """Windows of `length` tokens and the tokens that follow each of them, from files of nothing but token ids.

    A sample is a dict of int64 tensors `[length]`: `inputs`, `targets` (the same one token later), and, with `document_end`,
    `positions` (which begin at 0 anew after each such token) and `documents` (the number of the document within the window;
    attention must stay within one).

    `paths`: one or several files, `.npy` or raw (`.bin`) of `dtype` as nanoGPT and others write them: no header, native byte
    order. `stride`: tokens from the begin of one window to the next, `length` if not given, so that each token is a target
    once; what fills no last window is left out. No window spans two files. Nothing is loaded: the system keeps in memory
    what it has room for, for all ranks and workers of a machine together.

    Raises:
        ConfigError: a file is missing, no whole number of ids long, too short, or no list of whole numbers.
        RunError: an id is not below `vocabulary`.
    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        length: int,
        *,
        dtype: str = "uint16",
        stride: int | None = None,
        vocabulary: int | None = None,
        document_end: int | None = None,
    ) -> None:
        self.paths = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
        self.length, self.stride, self.dtype = length, length if stride is None else stride, dtype
        self.vocabulary, self.document_end = vocabulary, document_end
        if length < 1 or self.stride < 1:
            raise ConfigError(
                f"length={length}, stride={self.stride}: windows need at least one token; give 1 or more."
            )
        self._maps: list[Any] | None = None
        counts = [max(0, (len(tokens) - length - 1) // self.stride + 1) for tokens in self._files()]
        self._ends = np.cumsum([0, *counts])
        if not self._ends[-1]:
            held = ", ".join(
                f"{path} holds {len(tokens)}" for path, tokens in zip(self.paths, self._files(), strict=True)
            )
            raise ConfigError(
                f"a window takes {length + 1} tokens and {held or 'there is no file'}; give a shorter length."
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = range(len(self))[index]  # negative ones, and an IndexError for those beyond
        file = int(np.searchsorted(self._ends, index, side="right")) - 1
        first = (index - int(self._ends[file])) * self.stride
        tokens = torch.from_numpy(self._files()[file][first : first + self.length + 1].astype("int64"))
        if self.vocabulary is not None and int(tokens.max()) >= self.vocabulary:
            place = first + int(tokens.argmax())
            raise RunError(
                f"{self.paths[file]}: token {place} is {int(tokens.max())}, and the vocabulary has {self.vocabulary}; give "
                f"the dtype that the file was written with (here {self.dtype}), or the vocabulary that made it."
            )
        sample = {"inputs": tokens[:-1], "targets": tokens[1:]}
        if self.document_end is not None:
            sample["positions"], sample["documents"] = _within_documents(tokens[:-1], self.document_end)
        return sample

    def windows(self) -> Any:
        """All windows and the token after each, `[n, length + 1]`, as one tensor over the mapped file: nothing is copied.

        For `Data(train=(stream.windows(),))`, which takes a batch at a time; ids are not checked then.

        Raises:
            ConfigError: there are several files.
        """
        if len(self.paths) != 1:
            raise ConfigError(f"{len(self.paths)} files cannot be one tensor; give one, or the TokenStream itself.")
        tokens = torch.from_numpy(self._files()[0])
        return tokens.as_strided((len(self), self.length + 1), (self.stride, 1))

    def name_of(self, index: int) -> str:
        """The file of a window and its first token."""
        file = int(np.searchsorted(self._ends, index, side="right")) - 1
        return f"{self.paths[file]}, from token {(index - int(self._ends[file])) * self.stride}"

    def _files(self) -> list[Any]:
        if self._maps is None:
            self._maps = [_mapped(path, self.dtype) for path in self.paths]
        return self._maps

    def __getstate__(self) -> dict[str, Any]:
        # A process that is started anew maps the files itself: pickled, a map would be all of its content.
        return {**self.__dict__, "_maps": None}


def _mapped(path: Path, dtype: str) -> Any:
    # Copy on write: torch wants memory that may be written to; the file itself stays as it is.
    if not path.is_file():
        raise ConfigError(f"{path} is no file; give the path of a file of token ids.")
    if path.suffix == ".npy":
        tokens = np.load(path, mmap_mode="c")
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ConfigError(
                f"{path} holds {tokens.dtype} of shape {tokens.shape}; give one dim of whole numbers, id after id."
            )
        return tokens
    size, width = path.stat().st_size, np.dtype(dtype).itemsize
    if size % width:
        raise ConfigError(
            f"{path} has {size} bytes, no whole number of {dtype}; give the dtype that it was written with."
        )
    return np.memmap(path, dtype=dtype, mode="c") if size else np.zeros(0, dtype=dtype)


def _within_documents(tokens: Any, document_end: int) -> tuple[Any, Any]:
    """Place of each token in its document, and which document of the window that is; both `[length]`.

    >>> [part.tolist() for part in _within_documents(torch.tensor([5, 6, 0, 7, 0, 8]), 0)]
    [[0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 1, 2]]
    """
    places = torch.arange(len(tokens))
    begins = torch.zeros(len(tokens), dtype=torch.bool)
    begins[1:] = tokens[:-1] == document_end
    first = torch.where(begins, places, torch.zeros_like(places)).cummax(0).values
    return places - first, begins.cumsum(0)
