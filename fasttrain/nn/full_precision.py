"""Parts of a model that run in float32, whatever the rest of it runs in."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fasttrain.lazy import pytree, torch
from fasttrain.nn.forwards import replace_forward

# Set on a module that runs in float32: who changes modules later can ask for it.
_MARK = "runs_in_float32"


def run_in_float32(modules: Iterable[Any], device_type: str) -> int:
    """Let modules run in float32, outside of autocast; inputs of 16 bits are cast to it, and so are their weights.

    In place; weight names stay. What they give is float32. Returns the number of modules.
    """
    modules = list(modules)
    for module in modules:
        for parameter in module.parameters():
            if parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.data = parameter.data.float()
        own = "forward" not in vars(module)
        replace_forward(module, lambda forward, own=own: _in_float32(_of_class if own else forward, device_type))
        setattr(module, _MARK, True)
    return len(modules)


def in_float32(model: Any) -> set[Any]:
    """The modules of a model that `run_in_float32` was asked for, with all that stands under them."""
    return {part for module in model.modules() if getattr(module, _MARK, False) for part in module.modules()}


def _of_class(module: Any, *args: Any, **kwargs: Any) -> Any:
    # Looked up when called: a class that is exchanged later (batch_norm=sync) is not lost.
    return type(module).forward(module, *args, **kwargs)


def _in_float32(forward: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    def float32_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, enabled=False):
            return forward(module, *widened(args), **widened(kwargs))

    return float32_forward


def widened(tree: Any) -> Any:
    """A tree in which tensors of 16 bits are float32; all else is as it was. Fields of dataclasses are branches, too."""
    if dataclasses.is_dataclass(tree) and not isinstance(tree, (type, Mapping)):
        made = copy.copy(tree)
        for part in dataclasses.fields(tree):
            object.__setattr__(made, part.name, widened(getattr(tree, part.name)))  # a frozen one, too
        return made
    return pytree.tree_map(_wide, tree)


def _wide(leaf: Any) -> Any:
    is_half = isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.bfloat16, torch.float16)
    return leaf.float() if is_half else leaf
