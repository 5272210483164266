"""Text in two arrays, and a look for data sets that hold it in Python lists.

Workers share the memory of the process that made them until somebody writes to a page. Looking at a Python object writes
its reference count: a list of a million paths is copied page by page into each worker in the course of an epoch
(pytorch/pytorch#13246). An array is one object.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from fasttrain.lazy import np

# Entries from which a list is told: below, all workers together lose some 10 MB each.
MANY = 100_000


class PackedStrings:
    """A sequence of strings in one array of UTF-8 and one of places: 8 bytes a string besides its text, not 57.

    >>> texts = PackedStrings(["one", "", "zwölf"])
    >>> len(texts), texts[0], texts[-1], list(texts)
    (3, 'one', 'zwölf', ['one', '', 'zwölf'])
    """

    def __init__(self, texts: Iterable[str]) -> None:
        encoded = [text.encode() for text in texts]
        self._ends = np.cumsum([0, *map(len, encoded)], dtype="int64")
        self._bytes = np.frombuffer(b"".join(encoded), dtype="uint8")

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> str:
        index = range(len(self))[index]  # negative ones, and an IndexError for those beyond
        return self._bytes[self._ends[index] : self._ends[index + 1]].tobytes().decode()

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))


class PackedSamples:
    """`(path, class)` of each sample, as torchvision's image folders hold them, in arrays.

    >>> samples = PackedSamples([("a.png", 0), ("b.png", 7)])
    >>> len(samples), samples[1]
    (2, ('b.png', 7))
    """

    def __init__(self, samples: Iterable[tuple[str, int]]) -> None:
        samples = list(samples)
        self.paths = PackedStrings(path for path, _ in samples)
        self.classes = np.array([label for _, label in samples], dtype="int64")

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[str, int]:
        return self.paths[index], int(self.classes[index])


def huge_lists(dataset: Any) -> list[tuple[str, int]]:
    """Python collections of 100,000 entries or more that a data set holds, itself or in data sets within it.

    Gives a name and the number of entries of each. Looks at attributes, not into collections.
    """
    found: list[tuple[str, int]] = []
    seen: set[int] = set()

    def look(name: str, value: Any, depth: int) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, list | tuple | dict | set):
            if len(value) >= MANY:
                found.append((name, len(value)))
            elif depth < 4 and isinstance(value, list | tuple):  # such as the parts of a ConcatDataset
                for i, part in enumerate(value[:100]):
                    look(f"{name}[{i}]", part, depth + 1)
        elif depth < 4 and hasattr(value, "__getitem__") and hasattr(value, "__dict__"):
            for key, held in vars(value).items():
                look(f"{name}.{key}", held, depth + 1)

    look(type(dataset).__name__, dataset, 0)
    return found


def warn_of_huge_lists(dataset: Any, num_workers: int) -> None:
    """Warn where workers would copy a huge list of a data set. Does nothing without workers."""
    found = huge_lists(dataset) if num_workers else []
    if found:
        told = ", ".join(f"{name} ({entries:,} entries)" for name, entries in found)
        warnings.warn(
            f"{told}: each of the {num_workers} workers comes to hold a copy of it in the course of an epoch, since looking "
            "at a Python object writes to its memory; keep numbers in an array or tensor and strings in "
            "fasttrain.data.PackedStrings.",
            stacklevel=2,
        )
