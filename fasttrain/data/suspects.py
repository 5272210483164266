"""Which samples of a batch an error of a step speaks of."""

from __future__ import annotations

import re
from typing import Any

from fasttrain.lazy import pytree, torch

# torch's cross-entropy on a CPU names the label; a kernel on a GPU names nothing.
_LABEL = re.compile(r"Target (-?\d+) is out of bounds")
_ON_DEVICE = "device-side assert"


def bad_label(error: BaseException, batch: Any) -> tuple[int, list[int]] | None:
    """A label that is no class, and the rows of the batch that have it; None where the error speaks of none.

    >>> bad_label(IndexError("Target 7 is out of bounds."), (torch.rand(3, 2), torch.tensor([0, 7, 1])))
    (7, [1])
    """
    found = _LABEL.search(str(error))
    if found is None:
        return None
    label = int(found[1])
    rows = {
        row for leaf in _whole_numbers(batch) for row in (leaf == label).flatten(1).any(1).nonzero().flatten().tolist()
    }
    return (label, sorted(rows)) if rows else None


def ranges(error: BaseException, batch: Any) -> str | None:
    """From where to where the whole numbers of a batch go, where a device refused one of them without naming it."""
    if _ON_DEVICE not in str(error):
        return None
    told = [f"{leaf.min().item()} to {leaf.max().item()}" for leaf in _whole_numbers(batch) if leaf.numel()]
    return ", ".join(told) or None


def _whole_numbers(batch: Any) -> list[torch.Tensor]:
    leaves = (
        leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu"
    )
    whole = (leaf for leaf in leaves if leaf.dim() and not leaf.is_floating_point() and not leaf.is_complex())
    return [leaf.unsqueeze(1) if leaf.dim() == 1 else leaf for leaf in whole]
