"""A trainer from a model, data and a loss, without a subclass of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fasttrain.data import Data
from fasttrain.errors import ConfigError
from fasttrain.lazy import nn, torch

TARGETS = ("label", "labels", "target", "targets")
OVERRIDES = ("inputs", "count", "metrics", "build_metrics", "update_metrics", "prediction")


def subclass_from_parts(base: type, model: Any, data: Any, loss: Callable[[Any, Any], Any], settings: dict) -> type:
    """The subclass of a trainer that holds these parts. Takes the overrides out of `settings`."""
    from_torch = (getattr(loss, "__module__", "") or "").startswith("torch.")
    methods: dict[str, Any] = {
        "build_model": lambda self: model,
        "build_data": lambda self: data if isinstance(data, Data) else Data(train=data),
        "loss": lambda self, output, batch: loss(output, target_of(batch) if from_torch else batch),
        "place": lambda self, model: _place(base, self, model, loss),
        "inputs": lambda self, batch: _inputs(batch),
    }
    for name in OVERRIDES:
        if name in settings:
            methods[name] = _as_method(settings.pop(name))
    return type(type(model).__name__, (base,), methods)


def _place(base: type, trainer: Any, model: Any, loss: Any) -> Any:
    """Bring model and loss to the device: a loss may hold tensors of its own, such as weights of classes."""
    if isinstance(loss, nn.Module):
        base.place(trainer, loss)  # pyright: ignore[reportAttributeAccessIssue]
    return base.place(trainer, model)  # pyright: ignore[reportAttributeAccessIssue]


def _as_method(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: function(*args)


def _inputs(batch: Any) -> tuple[Any, ...]:
    if isinstance(batch, dict):
        return tuple(value for name, value in batch.items() if name not in TARGETS)
    return (batch[0],) if isinstance(batch, tuple | list) else (batch,)


def target_of(batch: Any) -> Any:
    """The second entry of a tuple batch, or the label of a dict batch.

    Raises:
        ConfigError: it has none.
    """
    if isinstance(batch, dict):
        for name in TARGETS:
            if name in batch:
                return batch[name]
        held = f"the batch has {', '.join(map(repr, batch))} and none of {', '.join(map(repr, TARGETS))}"
    elif isinstance(batch, tuple | list) and len(batch) > 1:
        return batch[1]
    else:
        held = f"the batch is {'one tensor' if isinstance(batch, torch.Tensor) else 'a tuple of one'}"
    raise ConfigError(
        f"a loss of torch's or a metric takes an output and a target, but {held}; give data of (input, target), or a "
        "function of your own: loss(output, batch), update_metrics(metrics, output, batch)."
    )
