"""Sums over ranks of what is logged, and reading the device once."""

from __future__ import annotations

from typing import Any

from fasttrain.lazy import dist, torch

# A sum with its weight: the mean is their quotient.
Pair = tuple[float, float]


def add_over_ranks(sums: dict[str, Pair], ranks: int) -> dict[str, Pair]:
    """Add sums and weights of all ranks by name; ranks may know different names. All get the same numbers."""
    if ranks == 1:
        return sums
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, sums)
    together: dict[str, Pair] = {}
    for one in every:  # in rank order, so that every rank adds the same numbers in the same order
        for name, (total, weight) in one.items():
            held = together.get(name, (0.0, 0.0))
            together[name] = (held[0] + total, held[1] + weight)
    return together


def read_pairs(sums: dict[str, Any]) -> dict[str, Pair]:
    """Read sums and weights from the device in one transfer."""
    flat = {f"{name}|{i}": pair[i] for name, pair in sums.items() for i in (0, 1)}
    read = read_together(flat)
    return {name: (read[f"{name}|0"], read[f"{name}|1"]) for name in sums}


def read_together(figures: dict[str, Any]) -> dict[str, float]:
    """Read many 0-dim tensors from the device in one transfer; plain numbers and tensors on the host pass through."""
    figures = {name: _as_number(value) for name, value in figures.items()}
    tensors = {name: value for name, value in figures.items() if isinstance(value, torch.Tensor)}
    values: dict[str, float] = {n: float(v) for n, v in figures.items() if not isinstance(v, torch.Tensor)}
    if tensors:
        device = next(iter(tensors.values())).device
        wide = torch.float32 if device.type == "mps" else torch.float64
        stacked = torch.stack([value.detach().to(device, wide).reshape(()) for value in tensors.values()])
        values.update(zip(tensors, stacked.cpu().numpy().tolist(), strict=True))
    return {name: values[name] for name in figures}


def _as_number(value: Any) -> Any:
    # .numpy() and not .item(): nothing is read from a device.
    on_host = isinstance(value, torch.Tensor) and value.device.type == "cpu"
    return float(value.detach().double().reshape(()).numpy()) if on_host else value
