"""Going through a data set once: what its samples look like, which classes they have, and which cannot be read."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fasttrain.core.batch import leading
from fasttrain.data.data import Data, form, num_samples_of, taker
from fasttrain.data.evaluating import batched_stream
from fasttrain.data.naming import name_of
from fasttrain.data.seeds import own_randomness
from fasttrain.data.workers import read
from fasttrain.lazy import pytree, torch

# Samples of tensors in memory that are looked at together.
CHUNK = 4096
# Of a stream that does not say its length no more is looked at, unless a limit says so.
MOST_OF_A_STREAM = 100_000


@dataclass
class Entry:
    """One entry of the samples, over all of them: shapes with how often they come, and the range of its values."""

    dtype: str
    shapes: Counter[tuple[int, ...]] = field(default_factory=Counter)
    low: float = float("inf")
    high: float = float("-inf")
    nonfinite: int = 0


@dataclass
class Survey:
    """What was found in a data set. `samples`: all it has, where known; `seen`: those that were looked at.

    `labels` counts classes; `names` has where the first sample of each label is; `broken` gives index, name and reason.
    `prints`: a digest of each sample, with the index of one that has it.
    """

    samples: int | None
    seen: int = 0
    entries: dict[str, Entry] = field(default_factory=dict)
    labels: Counter[int] = field(default_factory=Counter)
    names: dict[int, str] = field(default_factory=dict)
    broken: list[tuple[int, str, str]] = field(default_factory=list)
    prints: dict[bytes, int] = field(default_factory=dict)
    repeated: int = 0


@dataclass(slots=True)
class _Look:
    """What a sample or some samples in memory show."""

    first: int
    count: int
    entries: dict[str, tuple[str, tuple[int, ...], float, float, int]] = field(default_factory=dict)
    labels: list[int] | None = None
    digests: list[bytes] = field(default_factory=list)
    broken: str | None = None


def survey(data: Data, source: Any, label_of: Callable[[Any], Any], workers: int, limit: int | None) -> Survey:
    """Look at each sample of a source, or at the first `limit`; of batches at what one epoch gives.

    What cannot be read is counted and named, and reading goes on.
    """
    kind, size = form(source), num_samples_of(source)
    found = Survey(size)
    end = size if limit is None or size is None else min(size, limit)
    if kind == "tensors":
        assert end is not None
        looks: Iterable[_Look] = _in_memory(source, end, label_of)
    elif kind == "dataset":
        assert end is not None
        looks = _read(_Looked(source, data.collate, label_of, end), workers)
    else:
        stream = batched_stream(source, 64, 1, data)
        endless = limit is None and not hasattr(source, "__len__")
        looks = _batches(stream, label_of, MOST_OF_A_STREAM if endless else limit)
    for look in looks:
        _add(found, source, look)
    return found


def _in_memory(source: Any, end: int, label_of: Callable[[Any], Any]) -> Iterator[_Look]:
    for first in range(0, end, CHUNK):
        batch = taker(source)(torch.arange(first, min(first + CHUNK, end)))
        look = _look(batch, first, label_of)
        rows = [leaf.reshape(leaf.shape[0], -1).numpy() for leaf in _tensors(batch).values() if leaf.dim() > 1]
        if rows:
            look.digests = [_digest(*(row[i].tobytes() for row in rows)) for i in range(look.count)]
        yield look


def _batches(source: Any, label_of: Callable[[Any], Any], limit: int | None) -> Iterator[_Look]:
    first = 0
    with own_randomness(0):
        for batch in source:
            yield _look(batch, first, label_of)
            first += leading(batch)
            if limit is not None and first >= limit:
                return


class _Looked:
    """A map-style data set whose samples are what they show; one that cannot be read shows why."""

    def __init__(self, source: Any, collate: Any, label_of: Callable[[Any], Any], end: int) -> None:
        self.source, self.label_of, self.end = source, label_of, end
        self.collate = torch.utils.data.default_collate if collate is None else collate

    def __len__(self) -> int:
        return self.end

    def __getitem__(self, index: int) -> _Look:
        try:
            batch = self.collate([self.source[index]])
            look = _look(batch, index, self.label_of)
        except Exception as error:  # whatever it is, it is this sample's, and the next ones are looked at
            reason = getattr(error, "reason", None) or f"{type(error).__name__}: {error}"
            return _Look(index, 1, broken=str(reason).strip().splitlines()[0])
        look.digests = [self._digest_of(index, batch)]
        return look

    def _digest_of(self, index: int, batch: Any) -> bytes:
        path = name_of(self.source, index)
        if os.path.isfile(path):  # what is drawn for a sample does not make it another
            with open(path, "rb") as file:
                return _digest(file.read())
        return _digest(*(leaf.contiguous().numpy().tobytes() for leaf in _tensors(batch).values() if leaf.dim() > 1))


def _read(looked: _Looked, workers: int) -> Iterator[_Look]:
    # The looking code holds the trainer, which a new interpreter could not be given.
    context = "fork" if workers and sys.platform != "win32" else None
    loader = torch.utils.data.DataLoader(
        looked,  # pyright: ignore[reportArgumentType]
        batch_size=None,
        num_workers=workers,
        multiprocessing_context=context,
        generator=torch.Generator().manual_seed(0),
    )
    with contextlib.nullcontext() if workers else own_randomness(0):
        yield from read(loader)


def _look(batch: Any, first: int, label_of: Callable[[Any], Any]) -> _Look:
    look = _Look(first, leading(batch))
    for name, leaf in _tensors(batch).items():
        values = leaf.detach()
        finite = values[values.isfinite()] if values.is_floating_point() else values
        bounds = (float(finite.min()), float(finite.max())) if finite.numel() else (float("inf"), float("-inf"))
        dtype = str(leaf.dtype).removeprefix("torch.")
        look.entries[name] = (dtype, tuple(leaf.shape[1:]), *bounds, values.numel() - finite.numel())
    labels = label_of(batch)
    look.labels = None if labels is None else labels.tolist()
    return look


def _add(found: Survey, source: Any, look: _Look) -> None:
    if look.broken is not None:
        found.broken.append((look.first, name_of(source, look.first), look.broken))
        found.seen += 1
        return
    found.seen += look.count
    for name, (dtype, shape, low, high, nonfinite) in look.entries.items():
        entry = found.entries.setdefault(name, Entry(dtype))
        entry.shapes[shape] += look.count
        entry.low, entry.high = min(entry.low, low), max(entry.high, high)
        entry.nonfinite += nonfinite
    for i, label in enumerate(look.labels or ()):
        found.labels[label] += 1
        if label not in found.names:
            found.names[label] = name_of(source, look.first + i)
    for i, digest in enumerate(look.digests):
        found.repeated += digest in found.prints
        found.prints.setdefault(digest, look.first + i)


def _tensors(batch: Any) -> dict[str, Any]:
    leaves, _ = pytree.tree_flatten_with_path(batch)
    return {
        pytree.keystr(path) or "sample": leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()
    }


def _digest(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.digest()
