"""Packages that are imported when first used, so that reading a config never waits for torch.

Strategy, data and recipe files write `from fasttrain.lazy import torch, F` where others write `import torch`. Only
`nn.Module` subclasses need the real thing at import time; they live in `fasttrain.nn` and `fasttrain.models`.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fasttrain.errors import MissingPackage


class LazyModule(ModuleType):
    """A module that is imported at the first access to one of its names; later accesses cost nothing extra."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        value = getattr(importlib.import_module(self.__name__), name)
        self.__dict__[name] = value
        return value

    def __repr__(self) -> str:
        return f"<lazy module {self.__name__!r}>"


def require(package: str, *, needed_by: str, install: str) -> ModuleType:
    """Import an optional package, or say who needs it and how to get it.

    Raises:
        MissingPackage: the package is not installed.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] != package.split(".")[0]:
            raise
        raise MissingPackage(f"{needed_by} needs the package '{package}', which is not installed; {install}") from error


if TYPE_CHECKING:
    import numpy as np
    import torch
    import torch.distributed as dist
    import torch.nn as nn
    import torch.nn.functional as F
    import torch.utils._pytree as pytree
else:
    np = LazyModule("numpy")
    torch = LazyModule("torch")
    dist = LazyModule("torch.distributed")
    nn = LazyModule("torch.nn")
    F = LazyModule("torch.nn.functional")
    pytree = LazyModule("torch.utils._pytree")

__all__ = ["F", "LazyModule", "dist", "nn", "np", "pytree", "require", "torch"]
