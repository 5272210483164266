"""The numbers that optimizers can work with, so that a wrong one is told before any work is done."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from fasttrain.errors import ConfigError

_FROM_0 = "0 or more", lambda x: 0 <= x < math.inf
_BELOW_1 = "at least 0 and below 1", lambda x: 0 <= x < 1
RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "lr": _FROM_0,
    "eps": _FROM_0,
    "weight_decay": _FROM_0,
    "betas": _BELOW_1,
    "momentum": _BELOW_1,
    "ns_steps": ("1 or more, usually 5", lambda x: x >= 1),
    "d": ("1 or more", lambda x: 1 <= x < math.inf),
    "beta2_decay": ("0 or less, usually -0.8", lambda x: -math.inf < x <= 0),
}


def check_ranges(config: Any, within: str = "") -> None:
    """Refuse numbers of an update rule that are out of their range; `within`: what stands before their names.

    Raises:
        ConfigError: with the first of them.
    """
    for name in (field.name for field in fields(config)):
        if name not in RANGES:
            continue
        told, is_right = RANGES[name]
        value = getattr(config, name)
        for number in value if isinstance(value, (tuple, list)) else (value,):
            if number is not None and not is_right(number):
                raise ConfigError(f"optimizer.{within}{name}={value} is out of its range; give {told}.")
