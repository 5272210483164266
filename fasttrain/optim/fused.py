"""torch's fused kernels: where they are, and what they need."""

from __future__ import annotations

from typing import Any

from fasttrain.errors import ConfigError
from fasttrain.lazy import torch

# Devices for which torch has fused SGD and AdamW kernels.
FUSED_ON = ("cpu", "cuda", "mps", "xpu")


def fused_here(asked: bool | None, model: Any, optimizer: str) -> bool:
    """Whether to take the fused kernel: as asked, or where every trained parameter has one.

    Raises:
        ConfigError: asked for, and not to be had.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    able = all(p.device.type in FUSED_ON and p.is_floating_point() for p in trained)
    if asked and not able:
        devices = sorted({parameter.device.type for parameter in trained})
        raise ConfigError(f"optimizer={optimizer} fused=true: no fused kernel for {', '.join(devices)}; leave it out.")
    return able if asked is None else asked


def give_momentum_buffers(optimizer: Any) -> None:
    """Give a fused SGD its momentum buffers, filled with zeros, before the first step.

    torch allocates them uninitialised at the first step and lets the kernel fill them; a first step that `found_inf`
    refuses leaves them as they are, so the second step would add garbage. With `dampening=0` a zero buffer gives the
    same first step, bit for bit. Checked with torch 2.14.1; may go once `_fused_sgd` fills them itself.
    """
    for group in optimizer.param_groups:
        if group.get("momentum") and not group.get("dampening"):
            for parameter in group["params"]:
                if parameter.requires_grad and optimizer.state[parameter].get("momentum_buffer") is None:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
