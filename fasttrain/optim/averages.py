"""Averages of weights beside the model that trains, and exchanging the two."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fasttrain.lazy import torch
from fasttrain.optim.guarded import OBEYING

# Where a buffer stands: the module's own dictionary, and the name in it. Some modules put a new tensor there each time.
Place = tuple[dict[str, Any], str]


def move(averages: list[Any], weights: list[Any], by: Any, fused: bool = False) -> None:
    """`averages += by × (weights − averages)`, in place, with a number of calls that does not grow with the lists.

    `by`: a number, or a 0-dim tensor on the device, which the host does not read. Moving averages of zeros by 1 makes them
    the weights, bit for bit; moving by 0 leaves their bits. `weights` may be of a narrower dtype than the averages.
    `fused`: all are alike in dtype, device and strides, on a device that has torch's fused SGD.
    """
    if not isinstance(by, torch.Tensor):
        if weights[0].dtype == averages[0].dtype:
            torch._foreach_lerp_(averages, weights, by)
        else:
            torch._foreach_mul_(averages, 1.0 - by)
            torch._foreach_add_(averages, weights, alpha=by)
    elif fused:
        # One kernel over all tensors, with a step length that stays on the device: gradient ascent on `weights` with a
        # weight decay of 1 is averages + by × (weights − 1 × averages). torch's lerp over lists takes a scalar of the
        # host, or one kernel a tensor. May go once _foreach_lerp_ takes a 0-dim tensor. Checked with torch 2.14.1.
        torch._fused_sgd_(
            averages,
            weights,
            [],
            weight_decay=1.0,
            momentum=0.0,
            lr=by,
            dampening=0.0,
            nesterov=False,
            maximize=True,
            is_first_step=False,
        )
    else:
        by = by.to(device=averages[0].device, dtype=averages[0].dtype)
        if weights[0].dtype == averages[0].dtype:
            torch._foreach_lerp_(averages, weights, [by] * len(averages))
        else:
            torch._foreach_mul_(averages, 1.0 - by)
            torch._foreach_addcmul_(averages, weights, [by] * len(averages))


@dataclass(slots=True)
class _Alike:
    """Tensors that one call moves: of one device, dtype and layout."""

    fused: bool
    names: list[str] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    averages: list[Any] = field(default_factory=list)

    def live(self) -> list[Any]:
        """What is averaged, as it is now; in the order of the averages."""
        return [*self.weights, *[owner[key] for owner, key in self.places]] if self.places else self.weights


class Averages:
    """Averages of weights and buffers, in float32 where these are narrower.

        averages = Averages(dict(model.named_parameters()))
        for t, batch in enumerate(batches):
            step(batch)
            averages.update(ema_rate(t, decay=0.999))  # how far towards the weights; the first time 1
        with averages.shown():
            evaluate(model)  # with the averages; afterwards the weights are back, bit for bit

    Args:
        weights: parameters by name; each stands once.
        buffers: floating-point buffers by name, as the module's `_buffers` and the name in it.

    Costs: memory of the weights once more, and one pass over both at each update.
    """

    def __init__(self, weights: Mapping[str, Any], buffers: Mapping[str, Place] | None = None) -> None:
        self._kinds: dict[Any, _Alike] = {}
        self._raw: list[tuple[Any, Any, bool]] = []
        self._is_shown = False
        for name, weight in weights.items():
            self._add(name, weight).weights.append(weight)
        for name, (owner, key) in (buffers or {}).items():
            self._add(name, owner[key]).places.append((owner, key))

    def _add(self, name: str, tensor: Any) -> _Alike:
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        average = torch.zeros_like(tensor, dtype=dtype, requires_grad=False)
        plain = type(tensor.detach()) is torch.Tensor and tensor.numel() > 0 and dtype.is_floating_point
        fused = plain and tensor.dtype == dtype and tensor.device.type in OBEYING and _same_memory(tensor, average)
        kind = self._kinds.setdefault((tensor.device, tensor.dtype, fused), _Alike(fused))
        kind.names.append(name)
        kind.averages.append(average)
        return kind

    def update(self, by: Any) -> None:
        """Move all averages towards the weights as they are now. `by`: from 0 (stay) to 1 (take the weights); see `move`."""
        with torch.no_grad():
            for kind in self._kinds.values():
                move(kind.averages, kind.live(), by, kind.fused)

    def tensors(self) -> dict[str, Any]:
        """The averages by name; the very tensors, not copies."""
        return {n: a for kind in self._kinds.values() for n, a in zip(kind.names, kind.averages, strict=True)}

    def load(self, tensors: Mapping[str, Any]) -> None:
        """Take the values of `tensors`, in place; one of another shape is left, and that average begins with the weight.

        Raises:
            KeyError: one is missing.
        """
        with torch.no_grad():
            for kind in self._kinds.values():
                for name, average, live in zip(kind.names, kind.averages, kind.live(), strict=True):
                    average.copy_(tensors[name] if tensors[name].shape == average.shape else live)

    def show(self) -> None:
        """Put the averages into the model. Memory is exchanged, not copied, where dtypes are equal.

        Else weights are written where they lie, as they must be found there: of a weight at another place CUDA graphs are
        recorded anew, at each evaluation if that place is new each time.
        """
        self._is_shown = True
        with torch.no_grad():
            for kind in self._kinds.values():
                for tensor, average in zip(kind.live(), kind.averages, strict=True):
                    if average.dtype == tensor.dtype and _has_own_memory(tensor):
                        self._raw.append((tensor, tensor.data, True))
                        tensor.data = average
                    else:  # so must a part of larger memory, such as weights that cuDNN keeps in one piece
                        self._raw.append((tensor, tensor.detach().clone(), False))
                        tensor.copy_(average)

    def hide(self) -> None:
        """Put the weights back, bit for bit."""
        with torch.no_grad():
            while self._raw:
                tensor, raw, exchanged = self._raw.pop()
                if exchanged:
                    tensor.data = raw
                else:
                    tensor.copy_(raw)
        self._is_shown = False

    @contextmanager
    def shown(self) -> Any:
        """The averages in the model while entered; the weights are back afterwards, after an error too."""
        try:
            self.show()
            yield
        finally:
            self.hide()


def _same_memory(tensor: Any, other: Any) -> bool:
    dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return dense and tensor.stride() == other.stride()


def _has_own_memory(tensor: Any) -> bool:
    if type(tensor.detach()) is not torch.Tensor:
        return False
    return tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size()


def ema_rate(updates: Any, decay: float = 0.999, warmup: bool = False) -> Any:
    """How far the update after `updates` others moves an exponential average: 1 at first, then `1 − decay`.

    `warmup`: the decay is min(decay, (1 + t)/(10 + t)) in update t, so that early weights are soon forgotten. `updates`:
    a number, or a 0-dim tensor on the device.

    >>> ema_rate(0), ema_rate(1, 0.9), ema_rate(8, 0.9, warmup=True)
    (1.0, 0.09999999999999998, 0.5)
    """
    least = 1.0 - decay
    if isinstance(updates, torch.Tensor):
        first = 1.0 - updates
        return (torch.maximum(9.0 / (10.0 + updates), first) if warmup else first).clamp(min=least)
    if not updates:
        return 1.0
    return max(9.0 / (10.0 + updates), least) if warmup else least


def swa_rate(updates: Any) -> Any:
    """How far the update after `updates` others moves an average that weighs all alike: 1/(updates + 1).

    >>> [swa_rate(t) for t in range(4)]
    [1.0, 0.5, 0.3333333333333333, 0.25]
    """
    return 1.0 / (updates + 1.0)


def floating_buffers(model: Any) -> dict[str, Place]:
    """Floating-point buffers that a model saves, by name; one with two names stands once.

    Left out are those with an infinite entry or one that is no number: tables such as masks, of which an average is NaN.
    Scales of float8 layers have an average, their 8-bit values have none.
    """
    places: dict[int, tuple[str, Place]] = {}
    buffers: list[Any] = []
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is None or key in module._non_persistent_buffers_set or id(buffer) in places:
                continue
            if buffer.is_floating_point() and buffer.dtype.itemsize > 1:
                places[id(buffer)] = f"{prefix}.{key}" if prefix else key, (module._buffers, key)
                buffers.append(buffer)
    return dict(places[id(buffer)] for buffer, finite in zip(buffers, _are_finite(buffers), strict=True) if finite)


def _are_finite(tensors: list[Any]) -> list[bool]:
    """Which hold finite numbers alone, in one read of the device; those of `meta`, without numbers, count as such."""
    held = [tensor for tensor in tensors if not tensor.is_meta]
    flags = iter(torch.stack([t.isfinite().all().to(held[0].device) for t in held]).tolist() if held else [])
    return [tensor.is_meta or next(flags) for tensor in tensors]
