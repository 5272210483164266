"""Batch normalisation with the statistics of all ranks, on any device and backend.

torch's own SyncBatchNorm refuses tensors on the CPU, and reads the device in every forward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from fasttrain.errors import ConfigError


class GroupHandle:
    """Holds a process group; copies of a model share it, as a group itself cannot be copied or pickled."""

    __slots__ = ("group",)

    def __init__(self, group: Any = None) -> None:
        self.group = group

    def __deepcopy__(self, memo: Any) -> GroupHandle:
        return self

    def __reduce__(self) -> tuple[type[GroupHandle], tuple[()]]:
        return GroupHandle, ()


def global_statistics(x: Tensor, group: Any = None) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance by channel (dim 1) over all ranks, and how many values a channel has (0-dim float64).

    Each rank weighs by its count; one with no samples takes part and counts nothing. One all-reduce of 2 C + 1 float64.
    """
    wide = _wide(x)
    channels = x.shape[1]
    # Sums of squares cancel where the mean is large; in float64 that costs nothing that float32 could show.
    sums = torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
    if x.numel():
        variance, mean = torch.var_mean(x.to(wide), dim=[d for d in range(x.dim()) if d != 1], correction=0)
        mean, variance = mean.double(), variance.double()
        sums[:channels] = mean
        sums[channels:-1] = variance + mean * mean
        sums[-1] = 1
        sums *= x.numel() // channels
    dist.all_reduce(sums, group=group)
    count = sums[-1]
    mean, square = (sums[:-1] / count.clamp(min=1)).view(2, channels)
    return mean.to(wide), (square - mean * mean).clamp_(min=0).to(wide), count


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class _Normalise(torch.autograd.Function):
    """`(x - mean) / sqrt(variance + eps) * weight + bias`, where mean and variance depend on x on all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        count: Tensor,
        eps: float,
        group: Any,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, variance, count)
        ctx.eps, ctx.group, ctx.has_bias = eps, group, bias is not None
        scale = None if weight is None else weight.to(mean.dtype)
        shift = None if bias is None else bias.to(mean.dtype)
        return F.batch_norm(x, mean, variance, scale, shift, training=False, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, mean, variance, count = ctx.saved_tensors
        dy = grad_outputs[0]
        scale = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        d_weight, d_bias = torch.zeros_like(mean), torch.zeros_like(mean)
        if x.numel():
            dy = dy.contiguous(memory_format=_format(x))
            # As if mean and variance were constants, and without dx: sum(dy * xhat) and sum(dy) in one pass.
            _, d_weight, d_bias = torch.ops.aten.native_batch_norm_backward(
                dy, x, scale, mean, variance, None, None, False, ctx.eps, [False, True, True]
            )
        dx = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack([d_weight, d_bias]).double()
            dist.all_reduce(sums, group=ctx.group)
            d_xhat, d_shift = sums / count.clamp(min=1)
            # dx = scale / std * (dy - mean(dy) - xhat * mean(dy * xhat)), where xhat = (x - mean) / std
            inverse = (variance.double() + ctx.eps).rsqrt()
            factor = scale * inverse
            slope = -factor * inverse * d_xhat
            offset = -factor * d_shift - slope * mean
            along = [1, -1] + [1] * (x.dim() - 2)
            factor, slope, offset = (t.to(mean.dtype).view(along) for t in (factor, slope, offset))
            dx = torch.addcmul(torch.addcmul(offset, x, slope), dy, factor).to(x.dtype)
        return (
            dx,
            None if weight is None else d_weight.to(weight.dtype),
            d_bias.to(mean.dtype if weight is None else weight.dtype) if ctx.has_bias else None,
            *[None] * 5,
        )


def _format(x: Tensor) -> torch.memory_format:
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    if x.dim() == 5 and x.is_contiguous(memory_format=torch.channels_last_3d):
        return torch.channels_last_3d
    return torch.contiguous_format


class SyncBatchNorm(_BatchNorm):
    """Mixed into a batch norm, makes it take its training statistics over the ranks of `sync_handle`.

    Evaluation, parameters, buffers and their names are those of the class it is mixed into. Samples are counted, so
    ranks may hold unequal shares or none; running statistics move as on one process that sees the whole batch.
    Costs: one all-reduce of 2 C + 1 numbers in forward and of 2 C in backward; inputs of half precision are widened in
    passing. Needs: every rank runs the forward, also with no samples. It can be differentiated once.
    """

    sync_handle: GroupHandle

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input`, (N, C) or (N, C, ...)."""
        if not self.training or not dist.is_initialized():
            return super().forward(input)
        self._check_input_dim(input)
        group = self.sync_handle.group
        with torch.no_grad():
            mean, variance, count = global_statistics(input, group)
            if self.track_running_stats:
                self._track(mean, variance, count)
        return _Normalise.apply(input, self.weight, self.bias, mean, variance, count, self.eps, group)

    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        self.num_batches_tracked.add_(1)
        factor: Any = self.momentum if self.momentum is not None else self.num_batches_tracked.double().reciprocal()
        factor = (count > 0).to(count.dtype) * factor  # on the device: no sample anywhere moves nothing
        unbiased = variance * (count / (count - 1).clamp(min=1))
        for running, value in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.lerp_(value.to(running.dtype), factor.to(running.dtype))


class SyncBatchNorm1d(SyncBatchNorm, nn.BatchNorm1d):
    """`nn.BatchNorm1d` over all ranks."""


class SyncBatchNorm2d(SyncBatchNorm, nn.BatchNorm2d):
    """`nn.BatchNorm2d` over all ranks."""


class SyncBatchNorm3d(SyncBatchNorm, nn.BatchNorm3d):
    """`nn.BatchNorm3d` over all ranks."""


class SyncBatchNormAct(SyncBatchNorm):
    """The batch norm of timm, which drops and activates what it normalised."""

    act: nn.Module
    drop: nn.Module

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input`, (N, C, H, W), and activate it."""
        if not self.training or not dist.is_initialized():
            return super().forward(input)
        return self.act(self.drop(super().forward(input)))


_KINDS: dict[type, type] = {
    nn.BatchNorm1d: SyncBatchNorm1d,
    nn.BatchNorm2d: SyncBatchNorm2d,
    nn.BatchNorm3d: SyncBatchNorm3d,
}


def synchronise_batch_norm(model: nn.Module, group: Any = None) -> int:
    """Make each batch norm of a model take its training statistics over the ranks of `group` (`None`: all).

    In place: module objects, their hooks, parameters, buffers and names stay; only their class changes, to a subclass.
    Modules of `torch.nn.SyncBatchNorm` are left as they are. `group` should be used by nothing else, see
    `fasttrain.strategies.batch_norm`. Returns the number of modules changed.

    Raises:
        ConfigError: a batch norm has no shape yet, or computes its forward in its own way.
    Source: Ioffe and Szegedy 2015, arXiv:1502.03167; torch.nn.SyncBatchNorm.
    """
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm | SyncBatchNorm)
    ]
    for name, module in found:
        if isinstance(module, LazyModuleMixin):
            raise ConfigError(f"'{name}' has no shape yet, so its statistics cannot be shared; run one forward first.")
        if type(module).forward is not _BatchNorm.forward and not _activates(module):
            raise ConfigError(
                f"'{name}' is a {type(module).__name__} with a forward of its own, which cannot be synchronised; "
                "derive it from fasttrain.nn.sync_batch_norm.SyncBatchNorm, or use batch_norm=null."
            )
    handle = GroupHandle(group)
    for _, module in found:
        kind = type(module)
        if kind not in _KINDS:
            mixin = SyncBatchNormAct if _activates(module) else SyncBatchNorm
            _KINDS[kind] = type(f"Sync{kind.__name__}", (mixin, kind), {"__doc__": kind.__doc__})
        module.__class__ = _KINDS[kind]
        vars(module)["sync_handle"] = handle
    return len(found)


def _activates(module: nn.Module) -> bool:
    """Whether the forward is that of timm's BatchNormAct2d: a batch norm, then `drop`, then `act`."""
    forward = type(module).forward
    return (forward.__module__, forward.__qualname__) == ("timm.layers.norm_act", "BatchNormAct2d.forward")
