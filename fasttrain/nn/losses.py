"""Cross-entropy with label smoothing and z-loss, and the same out of hidden states, without all scores at once.

Shapes: ... any leading dims, N rows (their product), W width, C classes or words of a vocabulary.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fasttrain.errors import ConfigError

HALF = (torch.float16, torch.bfloat16)
REDUCTIONS = ("mean", "sum", "none")
# Each chunk adds a gradient of the size of the weight to the sum. That costs as many bytes whatever the rows, while the
# products grow with them: below about a thousand rows a GPU would be busier adding than multiplying.
ROWS = 1024


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Cross-entropy of scores `[..., C]` and classes `[...]` (int64) or probabilities `[..., C]`.

    `label_smoothing` takes that share of the target away from the true class and spreads it over all classes.
    `z_loss` adds z_loss × log² Z a row, Z the sum of the exponentials of its scores: it draws log Z to 0, which the
    cross-entropy leaves free, so that scores do not drift to where few bits are left for their differences.
    Rows of `ignore_index` count nowhere: neither in the two losses nor in the mean, which is over the other rows.
    Half precision is computed in float32, under autocast and without; the result then is float32.

    Returns 0-dim, or `[...]` with `reduction="none"`.
    Raises:
        ConfigError: another `reduction`.
    Source: Szegedy et al. 2015, arXiv:1512.00567 (label smoothing); Chowdhery et al. 2022, arXiv:2204.02311, section 5
    (z-loss, 1e-4 there).
    """
    if reduction not in REDUCTIONS:
        raise ConfigError(f"reduction={reduction!r} is none of them; use one of {', '.join(REDUCTIONS)}.")
    if logits.dtype in HALF:
        logits = logits.float()
    probabilities = target.is_floating_point()
    flat = target.reshape(-1, logits.shape[-1]) if probabilities else target.reshape(-1)
    loss = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        flat,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )
    if z_loss:
        log_z = logits.logsumexp(-1).reshape(-1)
        if not probabilities:
            log_z = log_z.masked_fill(flat == ignore_index, 0.0)
        drift = z_loss * log_z.square()
        if reduction == "mean":
            counted = flat.shape[0] if probabilities else (flat != ignore_index).sum()
            drift = drift.sum() / counted
        loss = loss + (drift.sum() if reduction == "sum" else drift)
    return loss.reshape(logits.shape[:-1]) if reduction == "none" else loss


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    rows: int = ROWS,
) -> Tensor:
    """`cross_entropy(F.linear(hidden, weight, bias), target, ...)`, `rows` rows at a time.

    `hidden` `[..., W]`, `weight` `[C, W]`, `target` `[...]` (int64), `bias` `[C]`.

    Saves: the scores `[N, C]`, their logarithms and their gradient; of each only `rows × C` are there at a time. Up to
    `rows` rows there is nothing to cut, and it is the plain form.
    Costs: with `mean` and `sum` no further product: the gradients are made along with the value, and those are kept:
    `[N, W]`, `[C, W]` and `[C]`; so one backward pass, not two through the same graph. With `none`, and with fp16
    products (whose gradients would vanish before the loss scale is known), the products of the scores are done again in
    the backward pass, and hidden states alone are kept.
    Needs: gradients of the first order; to stand outside of compiled graphs (of `compile=blocks` it does), as inside one it
    is the plain form: gradients made in the forward cannot be traced by all versions of torch.

    It is not `torch.nn.functional.linear_cross_entropy` (which torch 2.11 lacks): that one makes all scores after all where
    labels are smoothed, has no z-loss, and does all products in float32 under autocast.

    Raises:
        ConfigError: another `reduction`, or shapes that do not fit.
    Source: Wijmans et al. 2024, arXiv:2411.09009; Hsu et al. 2024, arXiv:2410.10989 (gradients along with the value).
    """
    if reduction not in REDUCTIONS:
        raise ConfigError(f"reduction={reduction!r} is none of them; use one of {', '.join(REDUCTIONS)}.")
    if target.shape != hidden.shape[:-1] or target.is_floating_point():
        raise ConfigError(
            f"hidden {tuple(hidden.shape)} and target {tuple(target.shape)} ({target.dtype}) do not fit; give hidden [..., "
            "width] and target [...] of int64, or cross_entropy(logits, target) for probabilities."
        )
    if rows < 1:
        raise ConfigError(f"rows={rows} leaves nothing in a chunk; use 1 or more.")
    if target.numel() <= rows or torch.compiler.is_compiling():
        logits = F.linear(hidden, weight, bias)
        return cross_entropy(logits, target, ignore_index, label_smoothing, z_loss, reduction)
    chunks = Chunks(ignore_index, label_smoothing, z_loss, reduction, rows)
    arguments = hidden.reshape(-1, hidden.shape[-1]), weight, bias, target.reshape(-1)
    if torch.is_grad_enabled():
        loss: Any = _LinearCrossEntropy.apply(*arguments, chunks)
    else:
        loss = chunks.mean(chunks.run(*arguments)[0], target)
    return loss.reshape(target.shape) if reduction == "none" else loss


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
NONE_WANTED = (False, False, False)


@dataclass(frozen=True, slots=True)
class Chunks:
    """What is computed, and how many rows at a time."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    reduction: str
    rows: int

    def run(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        wanted: tuple[bool, ...] = NONE_WANTED,
        upstream: Tensor | None = None,
    ) -> tuple[Tensor, Gradients]:
        """Sum (or values, with `none`) over all rows, and the gradients that are wanted for an upstream gradient of it.

        Each chunk is the plain form, differentiated by autograd: torch's own kernels, in the dtypes of autocast.
        """
        part_reduction = "none" if self.reduction == "none" else "sum"
        values: list[Tensor] = []
        made = _Made(wanted, hidden)
        # Leaves of their own, cast by autocast once for all chunks.
        weight, bias = _leaf(weight, wanted[1]), None if bias is None else _leaf(bias, wanted[2])
        for first in range(0, hidden.shape[0], self.rows):
            span = slice(first, first + self.rows)
            with torch.set_grad_enabled(any(wanted)):
                part = _leaf(hidden[span], wanted[0])
                value = cross_entropy(
                    F.linear(part, weight, bias),
                    target[span],
                    self.ignore_index,
                    self.label_smoothing,
                    self.z_loss,
                    part_reduction,
                )
            if any(wanted):
                leaves: list[Any] = [leaf for leaf, wants in zip((part, weight, bias), wanted, strict=True) if wants]
                above = upstream[span] if upstream is not None and upstream.dim() else upstream
                made.add(span, torch.autograd.grad(value, leaves, None if above is None else [above]))
            values.append(value.detach())
        value = torch.cat(values) if part_reduction == "none" else sum(values[1:], values[0])
        return value, made.gradients()

    def mean(self, value: Tensor, target: Tensor) -> Tensor:
        """The mean out of a sum over all rows; what other reductions want stays."""
        return value / self.counted(target) if self.reduction == "mean" else value

    def counted(self, target: Tensor) -> Tensor:
        """How many rows count; on the device."""
        return (target != self.ignore_index).sum()


class _Made:
    """Gradients of hidden states, weight and bias, as the chunks give them."""

    def __init__(self, wanted: tuple[bool, ...], hidden: Tensor) -> None:
        self.wanted = wanted
        self.hidden = torch.empty_like(hidden) if wanted[0] else None
        self.sums: list[Tensor | None] = [None, None]
        self.dtypes: list[Any] = [None, None]

    def add(self, span: slice, gradients: tuple[Tensor, ...]) -> None:
        coming = iter(gradients)
        if self.hidden is not None:
            self.hidden[span] = next(coming)
        for i, wants in enumerate(self.wanted[1:]):
            if wants:
                self._sum(i, next(coming))

    def _sum(self, i: int, gradient: Tensor) -> None:
        so_far = self.sums[i]
        if so_far is not None:
            so_far.add_(gradient)
            return
        self.dtypes[i] = gradient.dtype
        # Eight bits would lose what later chunks add.
        self.sums[i] = gradient.float() if gradient.dtype in HALF else gradient

    def gradients(self) -> Gradients:
        weight, bias = (
            None if held is None else held.to(dtype) for held, dtype in zip(self.sums, self.dtypes, strict=True)
        )
        return self.hidden, weight, bias


def _leaf(tensor: Tensor, wants_gradient: bool) -> Tensor:
    return tensor.detach().requires_grad_(wants_gradient)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, chunks: Chunks
    ) -> Tensor:
        device = hidden.device.type
        can_cast = torch.amp.is_autocast_available(device)
        casts = can_cast and torch.is_autocast_enabled(device)
        products = torch.get_autocast_dtype(device) if casts else hidden.dtype
        ctx.chunks, ctx.wanted, ctx.gradients = chunks, tuple(ctx.needs_input_grad[:3]), None
        dtype = torch.float64 if hidden.dtype is torch.float64 else torch.float32
        scale = chunks.counted(target).to(dtype).reciprocal() if chunks.reduction == "mean" else None
        ctx.again = chunks.reduction == "none" or products is torch.float16
        if ctx.again:
            ctx.save_for_backward(hidden, weight, bias, target, scale)
            ctx.casting = partial(torch.autocast, device, products, casts) if can_cast else nullcontext
            value, _ = chunks.run(hidden, weight, bias, target)
        else:
            value, ctx.gradients = chunks.run(hidden, weight, bias, target, ctx.wanted, scale)
        return chunks.mean(value, target)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (above,) = upstream
        if ctx.again:
            hidden, weight, bias, target, scale = ctx.saved_tensors
            with ctx.casting():
                above = above if scale is None else above * scale
                _, gradients = ctx.chunks.run(hidden, weight, bias, target, ctx.wanted, above)
            return (*gradients, None, None)
        # In place, as a second copy of the weight's gradient is what would be saved elsewhere.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError(
                "linear_cross_entropy gives its gradients once, and this is the second backward pass through it; use "
                'reduction="none" and take the mean outside, or compute the loss anew.'
            )
        return (*(None if g is None else g.mul_(above) for g in gradients), None, None)
