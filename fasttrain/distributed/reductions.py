"""Sums over ranks of what is logged."""

from __future__ import annotations

from typing import Any

from fasttrain.lazy import dist, torch


def sum_over_ranks(values: Any, ranks: int, group: Any = None) -> Any:
    """Sum a tensor over ranks, in place; nothing is sent for one rank."""
    if ranks > 1:
        dist.all_reduce(values, group=group)
    return values


def read_together(figures: dict[str, Any]) -> dict[str, float]:
    """Read many 0-dim tensors from the device in one transfer; plain numbers pass through."""
    tensors = {name: value for name, value in figures.items() if isinstance(value, torch.Tensor)}
    values: dict[str, float] = {n: float(v) for n, v in figures.items() if not isinstance(v, torch.Tensor)}
    if tensors:
        device = next(iter(tensors.values())).device
        wide = torch.float32 if device.type == "mps" else torch.float64
        stacked = torch.stack([value.detach().to(device, wide).reshape(()) for value in tensors.values()])
        values.update(zip(tensors, stacked.cpu().numpy().tolist(), strict=True))
    return {name: values[name] for name in figures}
