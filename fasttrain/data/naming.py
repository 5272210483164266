"""What a sample is called in messages."""

from __future__ import annotations

import bisect
import os
from collections.abc import Sequence
from typing import Any

from fasttrain.lazy import torch


def name_of(source: Any, index: int) -> str:
    """The name of a sample: what the data set says (`name_of(index)`), the path of torchvision's folders, its number.

    Looks through torch's `Subset` and `ConcatDataset`.

    >>> class Photos:
    ...     samples = [("a/1.jpg", 0), ("a/2.jpg", 0)]
    >>> name_of(Photos(), 1), name_of([3, 4], 1)
    ('a/2.jpg', 'sample 1')
    """
    return _own_name(source, index) or f"sample {index}"


def described(source: Any, index: int) -> str:
    """The number of a sample and its name, where it has one: `sample 7 (photos/a/7.jpg)`."""
    name = _own_name(source, index)
    return f"sample {index} ({name})" if name and name != f"sample {index}" else f"sample {index}"


def listed(source: Any, indices: Sequence[int], most: int = 4) -> str:
    """The samples of a batch, the first few by name.

    >>> listed([0] * 9, [5, 3, 8, 1, 0, 2])
    'sample 5, sample 3, sample 8, sample 1 and 2 more'
    """
    told = ", ".join(described(source, index) for index in indices[:most])
    return f"{told} and {len(indices) - most} more" if len(indices) > most else told


def rows_of(rows: Sequence[int] | None) -> str:
    """Some samples of a batch by their place in it, for what stands before the batch.

    >>> rows_of([3, 5]), rows_of(None)
    ('samples 3, 5 of ', '')
    """
    return "" if rows is None else f"sample{'s' * (len(rows) > 1)} {', '.join(map(str, rows[:4]))} of "


def _own_name(source: Any, index: int) -> str | None:
    try:
        if callable(own := getattr(source, "name_of", None)):
            return str(own(index))
        if isinstance(source, torch.utils.data.Subset):
            return _own_name(source.dataset, source.indices[index])
        if isinstance(source, torch.utils.data.ConcatDataset):
            part = bisect.bisect_right(source.cumulative_sizes, index)
            return _own_name(source.datasets[part], index - (source.cumulative_sizes[part - 1] if part else 0))
        first = source.samples[index][0]
    except Exception:  # a name is told in the message of another error, which must not be lost for one of ours
        return None
    return os.fspath(first) if isinstance(first, str | os.PathLike) else None
