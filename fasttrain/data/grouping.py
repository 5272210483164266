"""Grouping by length: batches of samples that are about as long, so that little is padded."""

from __future__ import annotations

import hashlib
from typing import Any

from fasttrain.errors import ConfigError
from fasttrain.lazy import np, torch

# Batches that are sorted together. More leave less padding, and tie the batches of an epoch closer to one another.
WINDOW = 50


def group_by_length(indices: Any, lengths: Any, batch_size: int, generator: Any, window: int = WINDOW) -> Any:
    """A shuffled order of samples, changed so that the samples of each batch are about as long. int64, `[n]`.

    The order is cut into windows of `window` batches; within each, samples are sorted by length; then whole batches are
    shuffled over the epoch. Every sample stays in once. What fills no batch stays at the end, as it was. The batches are
    those of all ranks together, so nothing depends on how many ranks there are.

    `indices` int64 `[n]`: the shuffled samples. `lengths` int64 `[size of the data]`. `generator`: for the order of batches.
    Costs: a batch is no longer a sample of the whole set at random; its members were drawn at random, but not together.
    Source: batches of like lengths as in fairseq, Ott et al. 2019, arXiv:1904.01038.

    >>> order = group_by_length(torch.arange(7), torch.tensor([5, 1, 4, 2, 9, 9, 3]), 2, torch.Generator().manual_seed(0))
    >>> sorted(sorted(pair) for pair in order[:6].reshape(3, 2).tolist()), order[6:].tolist()
    ([[0, 2], [1, 3], [4, 5]], [6])
    """
    whole = len(indices) // batch_size * batch_size
    batches = []
    for first in range(0, whole, window * batch_size):
        part = indices[first : min(first + window * batch_size, whole)]
        batches.append(part[torch.argsort(lengths[part], stable=True)].reshape(-1, batch_size))
    if not batches:
        return indices
    grouped = torch.cat(batches)
    grouped = grouped[torch.randperm(len(grouped), generator=generator)]
    return torch.cat([grouped.flatten(), indices[whole:]])


def lengths_of(given: Any, size: int | None, shuffle: bool) -> Any:
    """The lengths of a data set's samples as int64, `[size]`; None where none are given.

    Raises:
        ConfigError: they are not one for each sample, or the data gives no order to group in.
    """
    if given is None:
        return None
    if size is None or not shuffle:
        why = "gives its own batches" if size is None else "is read in its own order (shuffle=False)"
        raise ConfigError(
            f"Data(lengths=...) groups shuffled samples by length, and this data {why}; leave lengths out, or give a "
            "map-style data set to be shuffled."
        )
    lengths = torch.as_tensor(np.asarray(given, dtype=np.int64))
    if lengths.shape != (size,):
        raise ConfigError(
            f"Data(lengths=...) holds {tuple(lengths.shape)} entries for {size} samples; give the length of each sample, in "
            "the order of the data set."
        )
    return lengths


def digest(lengths: Any) -> str:
    """A hash of lengths, by which ranks see whether they group alike."""
    return hashlib.blake2b(np.asarray(lengths, dtype=np.int64).tobytes(), digest_size=8).hexdigest()
