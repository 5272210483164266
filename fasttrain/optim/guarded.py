"""Step an optimizer unless its gradients are bad, without asking the device where the optimizer can obey by itself."""

from __future__ import annotations

from typing import Any

from fasttrain.lazy import torch

# Fused kernels that read the flag. Those of MPS did not before pytorch/pytorch#186360, and changed the weights all the
# same. Revisit when the oldest torch that is supported has it.
OBEYING = ("cpu", "cuda", "xpu")


def obeys_found_inf(optimizer: Any) -> bool:
    """Whether every step of this optimizer reads a `found_inf` flag on the device: fused SGD, Adam, AdamW, Adagrad.

    Adagrad does from some torch after 2.11 on; none does on MPS. One of ours says so itself, by `obeys_found_inf`, as does
    what stands in the place of its step.
    """
    says = getattr(optimizer.step, "obeys_found_inf", None)
    if says is not None:
        return says
    says = getattr(optimizer, "obeys_found_inf", None)
    if says is not None:
        return says
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and all(
        group.get("fused") and group["params"][0].device.type in OBEYING
        for group in optimizer.param_groups
        if group["params"]
    )


def step_unless(optimizer: Any, bad: Any) -> None:
    """Step the optimizer, or change nothing at all where `bad` (a 0-dim float on the device, 1 = not finite) says so.

    Fused optimizers obey on the device. For others the flag is read on the host, which waits for the device once a step.
    """
    if bad is None:
        optimizer.step()
    elif obeys_found_inf(optimizer):
        optimizer.found_inf, optimizer.grad_scale = bad, None
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf, optimizer.grad_scale
    elif not bad.item():
        optimizer.step()


def loss_of(closure: Any) -> Any:
    """The loss that a step's closure computes, with gradients; `None` without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
