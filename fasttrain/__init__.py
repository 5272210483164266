"""fasttrain trains PyTorch models fast and in little memory, and proves that the mathematics did not change.

Names are imported when first used: `import fasttrain` alone loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Trainer": "fasttrain.trainer",
    "Data": "fasttrain.data",
    "Microbatches": "fasttrain.core.batch",
    "Plan": "fasttrain.core.plan",
    "Context": "fasttrain.core.strategy",
    "StepInfo": "fasttrain.core.task",
    "Strategy": "fasttrain.core.strategy",
    "Clash": "fasttrain.core.strategy",
    "Observer": "fasttrain.observe",
    "register": "fasttrain.registry",
    "ConfigError": "fasttrain.errors",
    "FasttrainError": "fasttrain.errors",
    "RunError": "fasttrain.errors",
}

if TYPE_CHECKING:
    from fasttrain.core.batch import Microbatches
    from fasttrain.core.plan import Plan
    from fasttrain.core.strategy import Clash, Context, Strategy
    from fasttrain.core.task import StepInfo
    from fasttrain.data import Data
    from fasttrain.errors import ConfigError, FasttrainError, RunError
    from fasttrain.observe import Observer
    from fasttrain.registry import register
    from fasttrain.trainer import Trainer


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fasttrain' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


__all__ = [
    "Clash",
    "ConfigError",
    "Context",
    "Data",
    "FasttrainError",
    "Microbatches",
    "Observer",
    "Plan",
    "RunError",
    "StepInfo",
    "Strategy",
    "Trainer",
    "register",
]
