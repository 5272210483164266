"""Batches on their way from the host to the device: pinned, and copied ahead of their step on a stream of their own."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from fasttrain.core.batch import Microbatches
from fasttrain.lazy import pytree, torch

# Devices that copy on a stream of their own from pinned memory. MPS has neither.
STREAMED = ("cuda", "xpu")


# A batch on its way with the event at the end of its copy, or one that waits on the host until its step, with None. Plain
# tuples here and in the feed: a named one costs a call of Python, several times in each step.
Sent = tuple[Any, Any]


class Carrier:
    """Brings batches to a device.

    `send` pins a batch and starts its copy on a side stream; `receive` lets the step's stream wait for that copy, not
    the host. Memory of the copy belongs to the side stream, so its tensors are marked as used by the step's
    (`record_stream`): freed, they are not written over before the step has read them. Pinned memory is torch's, which
    keeps it for the next batch once the copy from it is done: the driver is asked for new memory in the first steps
    only.

    Objects of the user's own with a method `to` are moved by it. One that has `pin_memory` and `record_stream` too is
    copied ahead like a tensor; any other, and sparse tensors, when the step comes, from pageable memory where the object
    cannot be pinned, which is told once a type.
    """

    def __init__(self, device: Any) -> None:
        self.device = device
        self.moves = device.type != "cpu"
        self.streams = device.type in STREAMED
        self._side: Any = None
        self._told: set[type] = set()

    def send(self, batch: Any) -> Sent:
        """Start the copy of a batch, where it can be made beside a step."""
        if not self.streams or batch is None:
            return batch, None
        leaves, build = _flattened(batch)
        if not all(map(_goes_ahead, leaves)):
            return batch, None
        if not any(map(_moves, leaves)):
            return batch, None
        of_device = torch.get_device_module(self.device)
        if self._side is None:
            self._side = of_device.Stream(self.device)
        pinned = [self._pinned(leaf) for leaf in leaves]
        with of_device.stream(self._side):
            moved = [self._moved(leaf) for leaf in pinned]
        return build(moved), self._side.record_event()

    def receive(self, sent: Sent) -> Any:
        """The batch on the device, for the stream that is current now."""
        batch, event = sent
        if event is None:
            return self.move(batch) if self.moves else batch
        step = torch.get_device_module(self.device).current_stream(self.device)
        step.wait_event(event)
        for leaf in _flattened(batch)[0]:
            if _moves(leaf):
                leaf.record_stream(step)
        return batch

    def move(self, batch: Any) -> Any:
        """The batch on the device, copied on the stream that is current now."""
        leaves, build = _flattened(batch)
        return build([self._moved(self._pinned(leaf)) for leaf in leaves])

    def _pinned(self, leaf: Any) -> Any:
        if not self.streams or not _moves(leaf):
            return leaf
        if isinstance(leaf, torch.Tensor):
            return leaf.pin_memory() if leaf.device.type == "cpu" else leaf
        if callable(getattr(leaf, "pin_memory", None)):
            return leaf.pin_memory()
        if type(leaf) not in self._told:
            self._told.add(type(leaf))
            warnings.warn(
                f"batches hold a {type(leaf).__name__}, which has no pin_memory(): its copy to {self.device} waits for "
                "the device; give it pin_memory() and record_stream(stream) beside to(device), or use a tuple, dict or "
                "namedtuple of tensors.",
                stacklevel=2,
            )
        return leaf

    def _moved(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(self.device, non_blocking=self.streams)
        if not _moves(leaf):
            return leaf
        pinned = self.streams and callable(getattr(leaf, "pin_memory", None))
        return leaf.to(self.device, non_blocking=True) if pinned else leaf.to(self.device)


def _flattened(batch: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The leaves of a batch, and what puts such leaves together again."""
    if isinstance(batch, Microbatches):
        leaves, spec = pytree.tree_flatten(list(batch))
        return leaves, lambda moved: Microbatches(pytree.tree_unflatten(moved, spec))
    leaves, spec = pytree.tree_flatten(batch)
    return leaves, lambda moved: pytree.tree_unflatten(moved, spec)


def _moves(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) or callable(getattr(leaf, "to", None))


def _goes_ahead(leaf: Any) -> bool:
    """Whether a leaf can be copied beside a step: the allocator must be told whose memory it is afterwards."""
    if isinstance(leaf, torch.Tensor):
        return leaf.layout in (torch.strided, torch.jagged)
    return not _moves(leaf) or all(callable(getattr(leaf, name, None)) for name in ("pin_memory", "record_stream"))


class Ahead:
    """Items made before they are asked for: up to `depth` of them, and none beyond the first `most`.

    What making one raises is raised when that one is asked for: the steps before it are not lost.
    """

    def __init__(self, items: Iterator[Any], depth: int, most: int | None = None) -> None:
        self._items, self._depth = items, depth
        self._left = most
        self._held: deque[tuple[Any, BaseException | None]] = deque()
        self._failed = False

    def fill(self) -> None:
        """Make what is missing; call it when the device has work to do meanwhile."""
        while len(self._held) < self._depth and not self._failed and self._left != 0:
            self._held.append(self._made())

    def _made(self) -> tuple[Any, BaseException | None]:
        if self._left:
            self._left -= 1
        try:
            return next(self._items), None
        except Exception as error:
            self._failed = True
            return None, error

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next item; StopIteration after the last one."""
        item, error = self._held.popleft() if self._held else self._made()
        if error is not None:
            raise error
        return item
