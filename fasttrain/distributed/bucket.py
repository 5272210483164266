"""One bucket: the gradients of a few parameters in one flat buffer, which travels as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fasttrain.errors import SyncError
from fasttrain.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class Bucket:
    """Gradients that travel together: one flat buffer, which holds a flag a parameter (1: has a gradient) at its end.

    A buffer lives for one round; with `as_views` the gradients are views of it afterwards and keep it alive.
    """

    def __init__(self, index: int, members: list[int], parameters: list[Any], dtype: Any, as_views: bool) -> None:
        self.index, self.members, self.parameters = index, members, parameters
        self.dtype, self.as_views = dtype, as_views
        self.places, offset = [], 0
        for parameter in parameters:
            # The strides a gradient of this parameter has: dense, in the parameter's memory format.
            strides = torch.empty_like(parameter, device="meta").stride()
            self.places.append((parameter.shape, strides, offset))
            offset += parameter.numel()
        self.numel = offset
        self.waiting = 0
        self.clear()

    def clear(self) -> None:
        """Forget the round."""
        self.buffer: Any = None
        self.work: Any = None
        self.views: list[Tensor] = []
        self.missing: list[int] = []

    def flags(self) -> Tensor:
        """The end of the buffer: after averaging, the share of ranks that have a gradient for each parameter."""
        return self.buffer[self.numel :]

    def fill(self) -> None:
        """Copy the gradients into a new buffer. A missing one counts as zeros."""
        device = self.parameters[0].device
        self.missing = [i for i, parameter in enumerate(self.parameters) if parameter.grad is None]
        there = [i for i, parameter in enumerate(self.parameters) if parameter.grad is not None]
        grads = [self.parameters[i].grad for i in there]
        for i, grad in zip(there, grads, strict=True):
            if grad.layout is not torch.strided:
                raise SyncError(
                    f"the gradient of a parameter of shape {tuple(self.parameters[i].shape)} is sparse, and "
                    "data_parallel=ddp averages dense ones; use nn.Embedding(..., sparse=False)."
                )
        make = torch.empty if there else torch.zeros
        self.buffer = make(self.numel + len(self.parameters), dtype=self.dtype, device=device)
        self.views = [self.buffer.as_strided(*place) for place in self.places]
        if not there:
            return
        flags = self.flags().fill_(1)
        for i in self.missing:
            self.views[i].zero_()
            flags[i].zero_()
        views = [self.views[i] for i in there] if self.missing else self.views
        torch._foreach_copy_(views, grads)  # pyright: ignore[reportPrivateImportUsage]
        if self.as_views:
            for i, view in zip(there, views, strict=True):
                self.parameters[i].grad = view

    def used(self, ranks: int) -> list[bool]:
        """Which parameters have a gradient on some rank. Reads the device."""
        return (self.flags().abs() > 0.5 / ranks).tolist()

    def spread(self, give: list[int]) -> None:
        """Put the average into `.grad`: of those that had one, and of the missing ones named in `give`."""
        if not self.as_views:
            missing = set(self.missing)
            there = [i for i in range(len(self.parameters)) if i not in missing]
            if there:
                grads = [self.parameters[i].grad for i in there]
                torch._foreach_copy_(grads, [self.views[i] for i in there])  # pyright: ignore[reportPrivateImportUsage]
        for i in give:
            view, dtype = self.views[i], self.parameters[i].dtype
            self.parameters[i].grad = view if self.as_views else view.to(dtype, copy=True)
