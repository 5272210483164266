"""What modules keep beside parameters and buffers, by torch's `get_extra_state` and `set_extra_state`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from fasttrain.errors import CheckpointError
from fasttrain.lazy import nn, torch

KEY = "_extra_state"


def keepers(model: Any) -> Iterator[tuple[str, Any]]:
    """Modules that keep an extra state, each with the name of that state as `state_dict` has it."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield f"{name}.{KEY}" if name else KEY, module


def extra_states(model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """All extra states by name: those that are tensors, and those that JSON gives back equal.

    Raises:
        CheckpointError: one is neither.
    """
    tensors: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    for name, module in keepers(model):
        state = module.get_extra_state()
        if isinstance(state, torch.Tensor):
            tensors[name] = state.detach()
        elif _survives(state):
            plain[name] = state
        else:
            raise CheckpointError(
                f"{name} is a {type(state).__name__}, and checkpoints hold tensors and what JSON gives back equal; let "
                f"get_extra_state of {type(module).__name__} return one of these, or keep it as a buffer."
            )
    return tensors, plain


def _survives(state: Any) -> bool:
    try:
        return json.loads(json.dumps(state)) == state
    except (TypeError, ValueError):
        return False


def give_extra_states(model: Any, tensors: Mapping[str, Any], plain: Mapping[str, Any]) -> None:
    """Give each module its extra state back.

    Raises:
        CheckpointError: there is none for it.
    """
    for name, module in keepers(model):
        if name in tensors:
            found = module.get_extra_state()
            module.set_extra_state(tensors[name].to(found.device) if isinstance(found, torch.Tensor) else tensors[name])
        elif name in plain:
            module.set_extra_state(plain[name])
        else:
            raise CheckpointError(
                f"the checkpoint lacks {name}; it is of another model, resume from one of this model."
            )
