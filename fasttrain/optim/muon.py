"""Muon for the matrices of hidden layers, AdamW for everything else, in one optimizer."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

from fasttrain.optim.guarded import loss_of, step_unless

# The coefficients of Keller Jordan's quintic: their slope at 0 is as steep as it can be.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(x: Any, steps: int, eps: float = 1e-7) -> Any:
    """Nearly the orthogonal factor U V^T of a matrix U S V^T: singular values end up between about 0.5 and 1.5.

    Newton-Schulz iterations in bfloat16; `[rows, columns]` to the same shape.
    Source: https://kellerjordan.github.io/posts/muon/; the order of operations is that of torch.optim.Muon.
    """
    a, b, c = COEFFICIENTS
    y = x.bfloat16()
    is_tall = x.size(0) > x.size(1)
    if is_tall:
        y = y.T
    y = y.div(y.norm().clamp(min=eps))
    for _ in range(steps):
        gram = y @ y.T
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.T if is_tall else y


def rate_factor(shape: Any, adjust: str) -> float:
    """What the rate of a matrix is multiplied by, so that wide and tall ones learn alike."""
    rows, columns = shape
    if adjust == "match_rms_adamw":  # updates as large as AdamW's, so that its rates serve: arXiv:2502.16982
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


class Muon(torch.optim.Optimizer):
    """Groups with `muon=True` hold matrices and step by orthogonalised momentum, the others step by torch's AdamW.

    A weight of more than two dims (a convolution) is taken as a matrix `[first, all others]`. For matrices the update
    is torch.optim.Muon's. Keeps one state for a matrix, two for other parameters. Nothing is read on the host, and a
    refused step (`found_inf`) changes nothing on the device.
    Source: https://kellerjordan.github.io/posts/muon/; Liu et al. 2025, arXiv:2502.16982.
    """

    def __init__(self, params: Any, **of_muon: Any) -> None:
        groups = [{**group} for group in params]
        defaults = {"lr": 0.02, "momentum": 0.95, "nesterov": True, "ns_steps": 5, "adjust": "original", **of_muon}
        rest = [group for group in groups if not group["muon"]]
        # Only a part of the groups is presented at times, so the inner one is made of all and shown what is there.
        self._adamw = torch.optim.AdamW([{**group} for group in rest], fused=rest[0].get("fused")) if rest else None
        super().__init__(groups, defaults)
        if self._adamw is not None:
            for own, inner in zip(
                [g for g in self.param_groups if not g["muon"]], self._adamw.param_groups, strict=True
            ):
                for key, value in inner.items():
                    own.setdefault(key, value)
            self._adamw.state = self.state

    @property
    def obeys_found_inf(self) -> bool:
        """Whether AdamW's part is fused: the other one always obeys."""
        return all(group["muon"] or group["fused"] for group in self.param_groups)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step."""
        loss = loss_of(closure)
        bad = getattr(self, "found_inf", None)
        self._step_matrices(bad)
        inner = self._inner()
        if inner is not None:
            step_unless(inner, bad)
        return loss

    def parts(self) -> list[tuple[Any, Callable[[Any], None]]]:
        """What a step consists of, for who traces it: optimizers, and what each of them does."""
        inner = self._inner()
        rest = [] if inner is None else [(inner, inspect.unwrap(type(inner).step))]
        # AdamW first: torch looks for a group in the optimizer that it is traced in first.
        return [*rest, (self, Muon._step_matrices)]

    def _inner(self) -> Any:
        """The AdamW of what is no matrix, as things stand; `None` where everything is one."""
        inner: Any = self._adamw
        others = [group for group in self.param_groups if not group["muon"]]
        if inner is None or not others:
            return None
        # Taken anew: load_state_dict gives this optimizer another dictionary.
        inner.param_groups, inner.state = others, self.state
        return inner

    def _step_matrices(self, bad: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"] if group["muon"] else ():
                if parameter.grad is not None:
                    self._step_matrix(group, parameter, bad)

    def _step_matrix(self, group: dict[str, Any], parameter: Any, bad: Any) -> None:
        state, grad, momentum, lr = self.state[parameter], parameter.grad, group["momentum"], group["lr"]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        buffer = state["momentum_buffer"]
        if bad is None:
            buffer.lerp_(grad, 1 - momentum)
        else:
            grad = torch.where(bad.bool(), buffer, grad)  # nothing of a refused gradient gets in
            buffer.copy_(torch.where(bad.bool(), buffer, buffer.lerp(grad, 1 - momentum)))
        update = (grad.lerp(buffer, momentum) if group["nesterov"] else buffer).flatten(1)
        update = orthogonalize(update, group["ns_steps"])
        factor = rate_factor(update.shape, group["adjust"])
        update = update.view_as(parameter)
        before = parameter if bad is None else parameter.clone()
        parameter.mul_(1 - lr * group["weight_decay"])
        if isinstance(lr, torch.Tensor):
            # The product of bfloat16 and a number is bfloat16, whatever the number is.
            parameter.sub_(update.to(parameter.dtype) * (lr * factor).to(parameter.dtype))
        else:
            parameter.add_(update, alpha=-(lr * factor))
        if bad is not None:
            parameter.copy_(torch.where(bad.bool(), before, parameter))
