"""Weights that checkpoints leave out, as whoever builds the model has them, and what trains by now.

A checkpoint keeps a digest of each weight it leaves out, so that it is never taken up over other weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from fasttrain.errors import CheckpointError
from fasttrain.lazy import torch

CHUNK_BYTES = 64 * 2**20
# Of each model: by name, where a weight lay and how often it had been written, and its digest then.
_TAKEN: WeakKeyDictionary[Any, dict[str, tuple[tuple[int, int], str]]] = WeakKeyDictionary()


def digest(tensor: Any) -> str:
    """32 hexadecimal digits that depend on dtype, shape and every bit of a tensor, wherever it lies.

    Costs: a copy to the host and a hash, about a second a GB.
    """
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    flat = whole.detach().contiguous().view(-1).view(torch.uint8)
    made = hashlib.sha256(f"{whole.dtype} {tuple(whole.shape)}".encode())
    for piece in flat.split(CHUNK_BYTES):
        made.update(piece.cpu().numpy())
    return made.hexdigest()[:32]


def digests(model: Any, tensors: Mapping[str, Any]) -> dict[str, str]:
    """The digest of each tensor of a model by name; those that were not written since are known already."""
    taken = _TAKEN.setdefault(model, {})
    for name, tensor in tensors.items():
        own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        state = (own.data_ptr(), own._version)
        if taken.get(name, ("", ""))[0] != state:
            taken[name] = (state, digest(tensor))
    return {name: taken[name][1] for name in tensors}


def left_out_names(names: Iterable[str], left_out: set[str]) -> set[str]:
    """Those of `names` that are left out: also what a left-out weight keeps beside it, as `fc.weight.absmax`."""
    return {name for name in names if name in left_out or any(part in left_out for part in _before(name))}


def _before(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def check_left_out(path: Path, model: Any, tensors: Mapping[str, Any], saved: Mapping[str, str]) -> None:
    """Refuse a checkpoint whose left-out weights are not those of this run.

    Raises:
        CheckpointError: with the first weight that differs.
    """
    absent = next((name for name in saved if name not in tensors), None)
    if absent is not None:
        raise CheckpointError(
            f"the checkpoint {path} was trained over a frozen '{absent}', which this run has not; it is of another model, "
            "resume from one of this model."
        )
    here = digests(model, {name: tensors[name] for name in saved})
    other = next((name for name in saved if here[name] != saved[name]), None)
    if other is not None:
        raise CheckpointError(
            f"the checkpoint {path} leaves frozen weights out, and '{other}' of this run is not the one it was trained "
            "over; build the model with the same weights (the same seed or the same pretrained file)."
        )


def trains(model: Any) -> dict[str, bool]:
    """By name, whether each parameter takes a gradient."""
    return {name: parameter.requires_grad for name, parameter in model.named_parameters()}


def changed(before: Mapping[str, bool], now: Mapping[str, bool]) -> dict[str, bool]:
    """What trains otherwise than before."""
    return {name: on for name, on in now.items() if before.get(name) != on}


def set_trains(model: Any, saved: Mapping[str, bool]) -> None:
    """Let parameters take a gradient, or none, as they did when a run was saved."""
    parameters = dict(model.named_parameters())
    for name, on in saved.items():
        if name in parameters and parameters[name].requires_grad != on:
            parameters[name].requires_grad_(on)
