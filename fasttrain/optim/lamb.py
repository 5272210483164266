"""LAMB: Adam whose update of each tensor is scaled to the tensor's own size, for large batches."""

from __future__ import annotations

import math
from typing import Any

import torch

from fasttrain.optim.guarded import loss_of


class Lamb(torch.optim.Optimizer):
    """Layer-wise adaptive moments. With m and v as in Adam, both bias-corrected, of each parameter x:

        u = m / (sqrt(v) + eps) + weight_decay · x
        x = x - lr · |x| / |u| · u

    The ratio is 1 where |x| or |u| is 0, and, unless `always_adapt`, for what does not decay (norms, biases), as in the
    authors' own code. Clip gradients by their norm before, as they do.

    Keeps two states a parameter. By groups of tensors (foreach), nothing is read on the host, and a refused step
    (`found_inf`) changes nothing on the device.
    Source: You et al. 2020, arXiv:1904.00962, algorithm 2.
    """

    obeys_found_inf = True

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        always_adapt: bool = False,
    ) -> None:
        # capturable is torch's word for counts of steps that are on the device.
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "always_adapt": always_adapt}
        super().__init__(params, {**defaults, "capturable": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step."""
        loss = loss_of(closure)
        bad = getattr(self, "found_inf", None)
        for group in self.param_groups:
            params = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in params:
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
            if params:
                self._step_group(group, params, bad)
        return loss

    def _step_group(self, group: dict[str, Any], params: list[Any], bad: Any) -> None:
        states = [self.state[parameter] for parameter in params]
        steps, moments, squares = ([state[key] for state in states] for key in ("step", "exp_avg", "exp_avg_sq"))
        grads: list[Any] = [parameter.grad for parameter in params]
        beta1, beta2 = group["betas"]
        lr: Any = group["lr"]
        new1: Any = 1 - beta1
        new2: Any = 1 - beta2
        old1, old2 = beta1, beta2
        if bad is None:
            torch._foreach_add_(steps, 1.0)
        else:
            # A refused step keeps all of the old and adds nothing new: multiplications by 1, additions of 0.
            refused, taken = bad.bool(), 1.0 - bad
            torch._foreach_add_(steps, taken)
            nothing = torch.zeros((), dtype=grads[0].dtype, device=bad.device)
            grads = [torch.where(refused, nothing, grad) for grad in grads]
            old1, old2 = torch.where(refused, 1.0, old1), torch.where(refused, 1.0, old2)
            lr = taken * lr
        torch._foreach_mul_(moments, old1)
        torch._foreach_add_(moments, torch._foreach_mul(grads, new1))
        torch._foreach_mul_(squares, old2)
        torch._foreach_add_(squares, torch._foreach_mul(torch._foreach_mul(grads, grads), new2))
        # At least 1: a first step that is refused has no moments, and nothing of what follows is used.
        counts = torch.stack(steps).clamp(min=1.0)
        # 1 - beta^count loses half of its digits in float32 if written so.
        corrections1, corrections2 = (
            -torch.expm1(counts * math.log(beta)) if beta else torch.ones_like(counts) for beta in (beta1, beta2)
        )
        sizes = torch._foreach_div(squares, list(corrections2.unbind()))
        torch._foreach_sqrt_(sizes)
        torch._foreach_add_(sizes, group["eps"])
        updates = torch._foreach_div(moments, list(corrections1.unbind()))
        torch._foreach_div_(updates, sizes)
        if group["weight_decay"]:
            torch._foreach_add_(updates, torch._foreach_mul(params, group["weight_decay"]))
        if group["weight_decay"] or group["always_adapt"]:
            of_x, of_u = torch.stack(torch._foreach_norm(params)), torch.stack(torch._foreach_norm(updates))
            ratios = torch.where((of_x > 0) & (of_u > 0), of_x / of_u, 1.0)
            torch._foreach_mul_(updates, list((ratios * lr).unbind()))
        else:
            torch._foreach_mul_(updates, lr)
        torch._foreach_sub_(params, updates)
