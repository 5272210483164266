"""Find the repeated blocks of a model: what checkpointing, compiling and sharding take as a unit."""

from __future__ import annotations

from collections import Counter
from typing import Any

from fasttrain.errors import ConfigError
from fasttrain.lazy import nn


def find_blocks(model: Any) -> list[Any]:
    """Modules of a class that occurs at least twice in a `ModuleList`, `ModuleDict` or `Sequential`, or across several.

    The outermost such modules, in order of registration: residual blocks of a ResNet, layers of a transformer. Plain
    layers (convolutions, norms, activations: anything from torch.nn without repeated parts of its own) are no blocks.

    Raises:
        ConfigError: nothing repeats.
    """
    containers = [module for module in model.modules() if _is_container(module)]
    # Not children(): one block that is run several times (as in ALBERT) stands several times.
    children = (child for container in containers for child in container._modules.values())
    repeated = Counter(type(child) for child in children if _is_block(child))
    kinds = {kind for kind, times in repeated.items() if times > 1}
    found: list[Any] = []

    def walk(module: Any) -> None:
        for child in module.children():
            if type(child) in kinds and _is_container(module):
                if child not in found:
                    found.append(child)
            else:
                walk(child)

    walk(model)
    if not found:
        raise ConfigError(
            f"no repeated blocks were found in {type(model).__name__}; override blocks(model) in the Trainer and "
            "return the modules to take as units."
        )
    return found


def _is_container(module: Any) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)


def _is_block(module: Any) -> bool:
    if _is_container(module):
        return False
    is_layer = type(module).__module__.startswith("torch.nn.") and not type(module).__name__.startswith("Transformer")
    return not is_layer and any(True for _ in module.parameters()) and any(True for _ in module.children())
