"""Keep what autograd saves for backward in the memory of the host, and bring it back ahead of its use."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# A view is moved with all of its storage, so that what shares it is moved once; but not if it spans less than 1/8 of it.
SMALLEST_PART = 8


class Copies:
    """Copies between a device and the host. This one waits for each; what it gives to wait for is `None`."""

    pin = False

    def to_host(self, source: Tensor) -> tuple[Tensor, Any]:
        """A copy on the host, and what must be waited for before the source is given up."""
        return torch.empty_like(source, device="cpu", pin_memory=self.pin).copy_(source, non_blocking=self.pin), None

    def to_device(self, host: Tensor, device: torch.device) -> tuple[Tensor, Any]:
        """A copy on the device, and what must be waited for before it is used. On the host itself there is no need."""
        if device.type == "cpu":
            return host, None
        return torch.empty_like(host, device=device).copy_(host, non_blocking=self.pin), None

    def wait(self, event: Any) -> None:
        """Let what is computed from now on come after a copy."""


class StreamedCopies(Copies):
    """Copies on a stream of their own, beside the computation.

    All tensors are made and freed on the stream that computes: a copy begins when that stream has got to where it was
    asked for, and that stream goes on past `wait` when the copy is done, so that no memory changes hands in between.
    """

    def __init__(self, device: torch.device, pin: bool) -> None:
        self.pin, self.stream = pin, torch.Stream(device=device)

    def _beside(self, target: Tensor, source: Tensor) -> Any:
        self.stream.wait_stream(torch.accelerator.current_stream(self.stream.device))
        with self.stream:
            target.copy_(source, non_blocking=True)
        return self.stream.record_event()

    def to_host(self, source: Tensor) -> tuple[Tensor, Any]:
        """See `Copies`."""
        host = torch.empty_like(source, device="cpu", pin_memory=self.pin)
        return host, self._beside(host, source)

    def to_device(self, host: Tensor, device: torch.device) -> tuple[Tensor, Any]:
        """See `Copies`."""
        target = torch.empty_like(host, device=device)
        return target, self._beside(target, host)

    def wait(self, event: Any) -> None:
        """See `Copies`."""
        torch.accelerator.current_stream(self.stream.device).wait_event(event)


class Moved:
    """A storage, or the part of it that a tensor spans, on the host. `uses`: how often autograd saved it."""

    __slots__ = (
        "__weakref__",
        "copies",
        "device",
        "event",
        "host",
        "left",
        "number",
        "source",
        "there",
        "uses",
        "version",
    )

    def __init__(self, number: int, source: Tensor, copies: Copies) -> None:
        self.number, self.version, self.device, self.copies = number, source._version, source.device, copies
        # On the device still, until the copy is done.
        self.source: Tensor | None = source
        self.host: Any = None
        self.event: Any = None
        # On the device again, in backward, for so many more uses.
        self.there: Tensor | None = None
        self.uses = self.left = 0

    def __del__(self) -> None:
        # On its way and never used, as the graph was dropped: its memory must not be taken before it has arrived.
        if self.there is not None and self.event is not None:
            self.copies.wait(self.event)


class Offloader:
    """Moves saved tensors to the host during forward and back during backward: `with offloader.hooks: loss = ...`.

    `in_flight`: so many are on their way at once, in either direction; more overlap with computation, and take memory
    meanwhile. Left on the device: parameters, buffers, their views and casts by autocast, what spans less than `min_bytes`,
    what is not strided, tensors made of several (DTensor, quantised ones), and what checkpointing runs again.
    A tensor that several operations save is moved once. In backward tensors come in the reverse order of forward.

    Saves: what autograd keeps, but for what is on its way. Costs: each byte goes over the bus twice.
    Source: Rhu et al. 2016 (vDNN), arXiv:1602.08124; `OffloadActivations` of torchtune.
    """

    def __init__(self, device: torch.device, *, min_bytes: int = 2**20, in_flight: int = 4, pin: bool = True) -> None:
        self.device, self.min_bytes, self.in_flight = device, min_bytes, in_flight
        streams = device.type != "cpu" and torch.accelerator.is_available()
        self.copies: Copies = StreamedCopies(device, pin) if streams else Copies()
        self.hooks = saved_tensors_hooks(self.pack, self.unpack)
        # Bytes that went to the host, and that came back.
        self.sent = self.fetched = 0
        self._last = 0
        self._leaving: deque[weakref.ref[Moved]] = deque()
        self._by_number: dict[int, weakref.ref[Moved]] = {}
        self._by_storage: dict[tuple[Any, ...], tuple[StorageWeakRef, weakref.ref[Moved]]] = {}
        self._stay: set[int] = set()

    def leave(self, tensors: Iterable[Tensor]) -> None:
        """Never move these: parameters and buffers."""
        plain = (tensor for tensor in tensors if not is_traceable_wrapper_subclass(tensor))
        self._stay.update(tensor.untyped_storage()._cdata for tensor in plain)

    # ---- forward

    def pack(self, tensor: Tensor) -> Any:
        """What autograd keeps in the place of a tensor: the tensor itself where it stays on the device."""
        if tensor.device.type != self.device.type or not self._is_movable(tensor):
            return tensor
        storage, size, offset = tensor.untyped_storage(), tensor.element_size(), tensor.storage_offset()
        span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        if span * size < self.min_bytes:  # of an expanded tensor there are fewer bytes than it seems
            return tensor
        start = offset
        if span * size * SMALLEST_PART >= storage.nbytes() and storage.nbytes() % size == 0:
            start, span = 0, storage.nbytes() // size
        key = (storage._cdata, tensor._version, tensor.dtype, start, span)
        moved = self._known(key)
        if moved is None:
            with torch.no_grad():
                moved = self._send(tensor.detach().as_strided((span,), (1,), start), key, storage)
        moved.uses += 1
        moved.left += 1
        return moved, tensor.shape, tensor.stride(), offset - start

    def _is_movable(self, tensor: Tensor) -> bool:
        return (
            tensor.layout is torch.strided
            and tensor.nbytes >= max(self.min_bytes, 1)
            and not is_traceable_wrapper_subclass(tensor)
            and not (tensor.is_conj() or tensor.is_neg())
            and not _is_weight(tensor if tensor._base is None else tensor._base)
            and tensor.untyped_storage()._cdata not in self._stay
        )

    def _known(self, key: tuple[Any, ...]) -> Moved | None:
        """The copy of a storage, if that is still the storage that was copied."""
        storage, moved = self._by_storage.get(key, (None, None))
        return None if storage is None or moved is None or storage.expired() else moved()

    def _send(self, source: Tensor, key: tuple[Any, ...], storage: Any) -> Moved:
        while len(self._leaving) >= self.in_flight:
            self._arrived(self._leaving.popleft()())
        self._last += 1
        moved = Moved(self._last, source, self.copies)
        moved.host, moved.event = self.copies.to_host(source)
        self.sent += source.nbytes

        def forget(reference: weakref.ref[Moved], number: int = self._last) -> None:
            self._by_number.pop(number, None)
            if self._by_storage.get(key, (None, None))[1] is reference:
                del self._by_storage[key]

        reference = weakref.ref(moved, forget)
        self._leaving.append(reference)
        self._by_number[moved.number] = reference
        self._by_storage[key] = StorageWeakRef(storage), reference
        return moved

    def _arrived(self, moved: Moved | None) -> None:
        """The copy is on the host: give up the tensor on the device."""
        if moved is None or moved.source is None:
            return
        if moved.event is not None:
            self.copies.wait(moved.event)
            if moved.source._version != moved.version:
                raise RuntimeError(
                    "a tensor that is saved for backward was changed in place while it went to the host; change a clone."
                )
        moved.source = moved.event = None

    # ---- backward

    def unpack(self, packed: Any) -> Tensor:
        """The tensor on the device, and the next ones on their way there."""
        if isinstance(packed, Tensor):
            return packed
        moved, shape, stride, offset = packed
        flat = moved.source
        if flat is None:
            self._fetch(moved)
            flat = moved.there
            assert flat is not None
            if moved.event is not None:
                self.copies.wait(moved.event)
                moved.event = None
        moved.left -= 1
        if moved.left == 0:  # and again so often, where the graph is retained
            moved.left = moved.uses
            self._arrived(moved)
            moved.there = None
        self._fetch_before(moved.number)
        return flat.as_strided(shape, stride, offset)

    def _fetch(self, moved: Moved) -> None:
        if moved.there is None:
            moved.there, moved.event = self.copies.to_device(moved.host, moved.device)
            self.fetched += moved.host.nbytes

    def _fetch_before(self, number: int) -> None:
        """Have the next ones in the order of backward on the device, or on their way."""
        coming = 0
        # Some are gone already, where backward took them out of order; how far to look is bounded.
        for earlier in range(number - 1, number - 1 - 4 * self.in_flight, -1):
            reference = self._by_number.get(earlier)
            moved = None if reference is None else reference()
            if moved is None or coming == self.in_flight:
                continue
            coming += 1
            if moved.source is None:
                self._fetch(moved)


def _is_weight(tensor: Tensor) -> bool:
    """A parameter, or what autocast made of one, which it holds for itself until forward is done."""
    if isinstance(tensor, nn.Parameter):
        return True
    cast = tensor.grad_fn
    if cast is None or cast.name() != "ToCopyBackward0":
        return False
    origin = cast.next_functions[0][0]
    return origin is not None and isinstance(getattr(origin, "variable", None), nn.Parameter)
