"""torch's Adafactor without its reads of the device."""

from __future__ import annotations

from typing import Any

import torch

from fasttrain.optim.guarded import loss_of


class Adafactor(torch.optim.Adafactor):
    """torch.optim.Adafactor, whose step reads two norms of each parameter on the host: here they stay on the device.

    Same states and formula, so checkpoints fit both. Equal to torch's up to the last bits, since its scalars are
    float64 on the host and float32 here. A refused step (`found_inf`) changes nothing on the device.
    Source: Shazeer and Stern 2018, arXiv:1804.04235.
    """

    obeys_found_inf = True

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        for group in self.param_groups:
            group["capturable"] = True  # torch's word for counts of steps that are on the device

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step."""
        loss = loss_of(closure)
        bad = getattr(self, "found_inf", None)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(group, parameter, bad)
        return loss

    def _step_one(self, group: dict[str, Any], parameter: Any, bad: Any) -> None:
        grad, state = parameter.grad, self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            if parameter.dim() > 1:
                state["row_var"] = grad.new_zeros((*grad.shape[:-1], 1))
                state["col_var"] = grad.new_zeros((*grad.shape[:-2], 1, grad.shape[-1]))
            else:
                state["variance"] = torch.zeros_like(grad)
        (eps1, eps2), d, lr = group["eps"], group["d"], group["lr"]
        eps1 = torch.finfo(parameter.dtype).eps if eps1 is None else eps1
        taken: Any = 1.0
        if bad is not None:
            taken = 1.0 - bad
            grad = torch.where(bad.bool(), torch.zeros((), dtype=grad.dtype, device=grad.device), grad)
        state["step"] += taken
        step = state["step"].clamp(min=1.0)
        # What is new weighs so much; nothing where the step is refused.
        new = step ** group["beta2_decay"] * taken
        rho = torch.minimum(step.rsqrt(), lr) if isinstance(lr, torch.Tensor) else step.rsqrt().clamp(max=lr)
        alpha = (parameter.norm(2) / parameter.numel() ** 0.5).clamp(min=eps2) * rho
        if parameter.dim() > 1:
            row, column = state["row_var"], state["col_var"]
            row.lerp_(grad.norm(dim=-1, keepdim=True).square_().div_(grad.size(-1)), new)
            column.lerp_(grad.norm(dim=-2, keepdim=True).square_().div_(grad.size(-2)), new)
            update = row @ column
            update.div_(row.mean(dim=-2, keepdim=True).clamp_(min=eps1))
        else:
            state["variance"].lerp_(grad.square(), new)
            update = state["variance"].clone()
        update.clamp_(min=eps1 * eps1).rsqrt_().mul_(grad)
        denominator = (update.norm(2) / (update.numel() ** 0.5 * d)).clamp(min=1.0)
        if group["weight_decay"]:
            parameter.mul_(1 - lr * group["weight_decay"] * taken)
        parameter.sub_(update.mul_(alpha / denominator * taken))
