"""Norms over gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fasttrain.lazy import nn, torch


def total_norm(parameters: Iterable[Any], norm_type: float = 2.0) -> Any:
    """Norm of all gradients together: a 0-dim tensor on their device; 0 where there are none."""
    parameters = list(parameters)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not grads:
        return torch.zeros((), device=parameters[0].device if parameters else None)
    return nn.utils.get_total_norm(grads, norm_type)
