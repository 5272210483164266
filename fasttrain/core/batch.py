"""What a batch is, how many samples it holds, and how it is cut.

A batch is a tree. Tuples, dicts and lists of tensors (or of trees) are structure; a list of anything else holds one
entry a sample and is cut; scalars and other objects are shared by all pieces. Every tensor must hold the same number of
samples along dim 0, and that number must be the expected one: otherwise eight images of three channels would be cut
into slices of channels without a word.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from fasttrain.errors import BatchError
from fasttrain.lazy import pytree, torch


class Microbatches(list):
    """A batch that the loader has cut already, one entry a microbatch. It is taken as it is."""


def _is_samples(node: Any) -> bool:
    return isinstance(node, list) and not any(isinstance(item, torch.Tensor | dict | tuple | list) for item in node)


def _samples(leaf: Any) -> int | None:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape[0] if leaf.dim() else None
    return len(leaf) if _is_samples(leaf) else None


def _sizes(batch: Any) -> dict[str, int]:
    leaves, _ = pytree.tree_flatten_with_path(batch, is_leaf=_is_samples)
    sizes = {pytree.keystr(path) or "batch": _samples(leaf) for path, leaf in leaves}
    return {path: size for path, size in sizes.items() if size is not None}


WAYS_OUT = (
    "override split(batch, n) in the Trainer, let the loader yield Microbatches([...]), "
    "or set whole_batch_loss = True if the loss needs the whole batch"
)


def num_samples(batch: Any, expected: int | None = None) -> int:
    """The samples in a batch: the size that all its tensors share along dim 0.

    Raises:
        BatchError: the tensors disagree, hold none, or do not hold `expected` samples.
    """
    sizes = _sizes(batch)
    found = set(sizes.values())
    if len(found) != 1 or (expected is not None and found != {expected}):
        held = what_it_holds(batch)
        share = f", while this rank's share is {expected} samples" if expected is not None else ""
        raise BatchError(f"the batch cannot be cut along dim 0: {held}{share}; {WAYS_OUT}.")
    return found.pop()


def leading(batch: Any) -> int:
    """Entries along dim 0 of the first tensor of a batch; 1 where there is none."""
    first = batch
    while isinstance(first, (tuple, list)) and first:  # not a union, which would be built anew in each step
        first = first[0]
    if not isinstance(first, torch.Tensor):
        first = next((leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)), None)
    return first.shape[0] if first is not None and first.dim() else 1


def what_it_holds(batch: Any) -> str:
    """The entries of a batch with what they hold along dim 0, in words."""
    held = ", ".join(f"{path} holds {size}" for path, size in _sizes(batch).items())
    return held or "it has no tensor with a dim 0"


def holds_samples(batch: Any) -> bool:
    """Whether there is anything in a microbatch: a rank may have none, or an empty piece of a small batch."""
    return batch is not None and 0 not in _sizes(batch).values()


def cut(batch: Any, n: int, expected: int | None = None) -> list[Any]:
    """Cut a batch into `n` pieces whose sizes differ by at most one sample; views, nothing is copied.

    Fewer samples than pieces leave some pieces empty, so that every rank makes the same number of them.

    Raises:
        BatchError: as for `num_samples`.
    """
    size = num_samples(batch, expected)
    bounds = [size * i // n for i in range(n + 1)]
    return pieces(batch, list(itertools.pairwise(bounds)))


def pieces(batch: Any, spans: list[tuple[int, int]]) -> list[Any]:
    """The samples of a batch from a first to before an end, for each span; views."""
    leaves, spec = pytree.tree_flatten(batch, is_leaf=_is_samples)
    is_cut = [_samples(leaf) is not None for leaf in leaves]
    return [
        pytree.tree_unflatten(
            [_piece(leaf, low, high) if cuts else leaf for leaf, cuts in zip(leaves, is_cut, strict=True)], spec
        )
        for low, high in spans
    ]


def _piece(leaf: Any, low: int, high: int) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.is_nested and low < high:  # slicing jagged tensors is not to be had
        return torch.nested.as_nested_tensor(list(leaf.unbind()[low:high]), layout=leaf.layout)
    return leaf[low:high]


def joined(batches: list[Any]) -> Any:
    """Batches one after the other: the inverse of `pieces`. Tensors whose samples differ in shape become lists of samples.

    Raises:
        BatchError: they are of different structure, or something in them that is no sample is not the same in all.
    """
    flat = [pytree.tree_flatten(batch, is_leaf=_is_samples) for batch in batches]
    spec = flat[0][1]
    if any(other != spec for _, other in flat):
        raise BatchError(f"batches of different structure cannot be joined: {spec} and others.")
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return pytree.tree_unflatten([_joined(list(column)) for column in columns], spec)


def _joined(leaves: list[Any]) -> Any:
    first = leaves[0]
    if all(isinstance(leaf, torch.Tensor) and leaf.dim() for leaf in leaves):
        alike = len({(leaf.shape[1:], leaf.dtype) for leaf in leaves}) == 1
        return torch.cat(leaves) if alike else [sample for leaf in leaves for sample in leaf]
    if all(_is_samples(leaf) for leaf in leaves):
        return [sample for leaf in leaves for sample in leaf]
    if isinstance(first, torch.Tensor) or any(leaf != first for leaf in leaves):
        raise BatchError(f"a {type(first).__name__} of each batch that holds no entry a sample cannot be joined.")
    return first


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """The same tree with `function` applied to each tensor. Objects of other kinds pass through."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, Microbatches):
        return Microbatches(map_tensors(function, item) for item in batch)
    return pytree.tree_map(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, batch)
