"""Models that were built on the meta device, where weights have shapes and no memory."""

from __future__ import annotations

from typing import Any

from fasttrain.errors import ConfigError
from fasttrain.lazy import nn, torch


def is_on_meta(model: Any) -> bool:
    """Whether some parameter or buffer of a model has no memory."""
    return any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


def _named(model: Any) -> list[tuple[str, Any]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _is_unfilled(tensor: Any, made: Any, version: int) -> bool:
    """Whether a tensor holds what it was made with: NaN, or, of integers, whatever was in memory."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.numel() > 0 and bool(tensor.isnan().all())
    return tensor is made and tensor._version == version


def materialise(model: Any, device: Any) -> Any:
    """Give a model built on the meta device weights on a device, in place; tied weights stay one object.

    Each module fills its own by `reset_parameters`, in the order of registration, so plain modules of torch get what they
    would have got on the device under the same seed; a weight with two owners is the first one's. A method `init_weights`
    of the model itself is called after that. What a constructor does to weights beyond their modules' own initialisation has
    no effect on the meta device: put that into `init_weights`.
    Saves: the weights on the host. `nn.Module.to_empty` gives each name of a tied weight memory of its own.

    Raises:
        ConfigError: something would stay unfilled.
    """
    made: dict[int, tuple[Any, Any]] = {}  # with the tensor on meta, so that its identity is not given away
    filled: set[int] = set()
    unfilled: list[str] = []
    for prefix, module in model.named_modules():
        own = []
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is None or not (old.is_meta or id(old) in filled):
                    continue
                if old.is_meta and id(old) not in made:
                    new = torch.empty_like(old, device=device)
                    if new.is_floating_point() or new.is_complex():
                        new.fill_(float("nan"))  # so that what nobody fills is seen
                    made[id(old)] = (
                        old,
                        nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new,
                    )
                tensors[name] = made[id(old)][1]
                own.append((f"{prefix}.{name}".removeprefix("."), tensors[name]))
        reset = getattr(module, "reset_parameters", None)
        if not own:
            continue
        if reset is None:
            unfilled += [name for name, tensor in own if id(tensor) not in filled]
            continue
        before = [(tensor, tensor.detach().clone()) for _, tensor in own if id(tensor) in filled]
        reset()
        with torch.no_grad():
            for tensor, kept in before:
                tensor.copy_(kept)
        filled |= {id(tensor) for _, tensor in own}
    versions = {name: (tensor, tensor._version) for name, tensor in _named(model) if name in unfilled}
    if hasattr(model, "init_weights"):
        model.init_weights()
    unfilled = [name for name, tensor in _named(model) if _is_unfilled(tensor, *versions.get(name, (None, 0)))]
    if unfilled:
        raise ConfigError(
            f"{type(model).__name__} was built on the meta device, and nothing fills {', '.join(unfilled[:3])}; give its "
            "module a method reset_parameters, or the model a method init_weights."
        )
    return model.to(device)
