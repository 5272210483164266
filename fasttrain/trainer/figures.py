"""Figures logged by user code: kept on the device, averaged by count, read at log points only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fasttrain.errors import ConfigError
from fasttrain.lazy import torch
from fasttrain.observe.observer import LoggedHistogram, LoggedImage

# Names that the record of a log point has itself.
TAKEN = frozenset(
    {"step", "total_steps", "samples", "epoch", "loss", "lr", "grad_norm", "memory", "step_time_s", "data_wait_s"}
)


class Figures:
    """What was logged since the last log point. Nothing is kept while nobody is `watching`."""

    def __init__(self) -> None:
        self.watching = False
        self._sums: dict[str, list[Any]] = {}
        self._media: dict[str, tuple[str, Any]] = {}

    def add(self, name: str, value: Any, weight: Any, kind: str) -> None:
        """Take a figure of one microbatch that weighs `weight` (`None`: 1).

        Raises:
            ConfigError: the name is taken, or there is no such kind.
        """
        if name in TAKEN:
            raise ConfigError(
                f"log({name!r}): the run logs a figure of its own under that name; use another, for example 'my/{name}'."
            )
        if kind in ("image", "histogram"):
            self._media[name] = (kind, value.detach().clone())
            return
        if kind != "scalar":
            raise ConfigError(f"log({name!r}, kind={kind!r}): kinds are scalar, image and histogram.")
        if isinstance(weight, Mapping):
            weight = next((part for part in weight.values() if part is not None), 1.0)
        weight = 1.0 if weight is None else weight
        value = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(float(value))
        # A mean over nothing is not a number, and would stay that when multiplied by a weight of 0.
        if isinstance(weight, torch.Tensor):
            value = torch.where(weight > 0, value, torch.zeros_like(value))
        elif not weight:
            value = torch.zeros_like(value)
        total, weights = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = [total + value.to(torch.float32) * weight, weights + weight]

    def take(self) -> tuple[dict[str, list[Any]], dict[str, Any]]:
        """Sums with their weights, and media as numpy arrays; afterwards nothing is held."""
        media = self._media
        kinds = {"image": LoggedImage, "histogram": LoggedHistogram}
        read = {name: kinds[kind](array=value.float().cpu().numpy()) for name, (kind, value) in media.items()}
        return self.take_sums(), read

    def take_sums(self) -> dict[str, list[Any]]:
        """Sums with their weights; media are dropped without being read. Afterwards nothing is held."""
        sums, self._sums, self._media = self._sums, {}, {}
        return sums
