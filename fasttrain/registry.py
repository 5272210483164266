"""Which strategies exist: the built-in table, entry points of other packages, and `@register`.

Nothing is imported before it is asked for by name.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from fasttrain.core.slots import SLOTS
from fasttrain.core.strategy import Strategy
from fasttrain.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from importlib import metadata

ENTRY_POINTS = "fasttrain.strategies"
_HERE = "fasttrain.strategies"

# The first of a slot is the one its documentation recommends first.
BUILT_IN: dict[str, dict[str, str]] = {
    "precision": {
        "fp32": f"{_HERE}.precision:Fp32",
        "tf32": f"{_HERE}.precision:Tf32",
        "bf16": f"{_HERE}.precision:Bf16",
        "fp16": f"{_HERE}.precision:Fp16",
        "bf16_true": f"{_HERE}.precision:Bf16True",
        "auto": f"{_HERE}.precision:Auto",
    },
    "memory_format": {"channels_last": f"{_HERE}.memory_format:ChannelsLast"},
    "adapters": {
        "lora": f"{_HERE}.adapters:Lora",
        "qlora": f"{_HERE}.adapters:Qlora",
        "freeze": f"{_HERE}.adapters:Freeze",
    },
    "batch_norm": {"sync": f"{_HERE}.batch_norm:Sync", "frozen": f"{_HERE}.batch_norm:Frozen"},
    "float8": {"tensorwise": f"{_HERE}.float8:Tensorwise", "rowwise": f"{_HERE}.float8:Rowwise"},
    "activation_checkpointing": {
        "full": f"{_HERE}.activation_checkpointing:Full",
        "selective": f"{_HERE}.activation_checkpointing:Selective",
        "budget": f"{_HERE}.activation_checkpointing:Budget",
    },
    "activation_offload": {"cpu": f"{_HERE}.activation_offload:Cpu"},
    "compile": {"blocks": f"{_HERE}.compile:Blocks", "model": f"{_HERE}.compile:Model"},
    "data_parallel": {"ddp": f"{_HERE}.data_parallel:Ddp"},
    "accumulation": {"microbatches": f"{_HERE}.accumulation:Microbatches"},
    "optimizer": {
        "sgd": f"{_HERE}.optimizer:Sgd",
        "adamw": f"{_HERE}.optimizer:AdamW",
        "lamb": f"{_HERE}.optimizer:Lamb",
        "muon": f"{_HERE}.optimizer:Muon",
        "adamw_8bit": f"{_HERE}.optimizer:AdamW8bit",
        "adafactor": f"{_HERE}.optimizer:Adafactor",
    },
    "schedule": {
        "constant": f"{_HERE}.schedule:Constant",
        "linear": f"{_HERE}.schedule:Linear",
        "cosine": f"{_HERE}.schedule:Cosine",
        "wsd": f"{_HERE}.schedule:Wsd",
        "one_cycle": f"{_HERE}.schedule:OneCycle",
        "plateau": f"{_HERE}.schedule:Plateau",
    },
    "gradient_clipping": {
        "norm": f"{_HERE}.gradient_clipping:Norm",
        "value": f"{_HERE}.gradient_clipping:Value",
        "adaptive": f"{_HERE}.gradient_clipping:Adaptive",
    },
    "nonfinite": {"raise": f"{_HERE}.nonfinite:Raise", "skip": f"{_HERE}.nonfinite:Skip"},
    "weight_averaging": {"ema": f"{_HERE}.weight_averaging:Ema", "swa": f"{_HERE}.weight_averaging:Swa"},
}

_registered: dict[tuple[str, str], type[Strategy]] = {}
S = TypeVar("S", bound=type[Strategy])


def register(slot: str, name: str) -> Callable[[S], S]:
    """Make a strategy known under `slot: name`. The module must be imported: name it under `plugins:`.

    Raises:
        ConfigError: there is no such slot, or the name is taken by another class.
    """

    def add(strategy: S) -> S:
        check_slot(slot)
        known = _registered.get((slot, name))
        if name in BUILT_IN.get(slot, {}) or (known is not None and known.__qualname__ != strategy.__qualname__):
            raise ConfigError(f"{slot}={name} exists already; register {strategy.__name__} under another name.")
        strategy.slot, strategy.name = slot, name
        _registered[slot, name] = strategy
        return strategy

    return add


def check_slot(slot: str) -> None:
    """Refuse a slot that does not exist."""
    if slot not in SLOTS:
        raise ConfigError(f"there is no slot '{slot}'; {did_you_mean(slot, SLOTS)}")


@functools.cache
def _entry_points() -> dict[tuple[str, str], metadata.EntryPoint]:
    from importlib import metadata  # a quarter of the time that reading a config takes, and rarely needed

    found = {}
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        slot, _, name = entry.name.partition(".")
        found[slot, name] = entry
    return found


def names(slot: str) -> list[str]:
    """The strategies of a slot, built-in ones first."""
    others = {name for s, name in [*_entry_points(), *_registered] if s == slot}
    return [*BUILT_IN.get(slot, {}), *sorted(others)]


def find(slot: str, name: str) -> type[Strategy]:
    """The class of a strategy, imported now.

    Raises:
        ConfigError: there is no such slot or strategy.
    """
    check_slot(slot)
    if (slot, name) in _registered:
        return _registered[slot, name]
    where = BUILT_IN.get(slot, {}).get(name)
    if where is not None:
        module, _, attribute = where.partition(":")
        return getattr(importlib.import_module(module), attribute)
    if (slot, name) in _entry_points():
        strategy = _entry_points()[slot, name].load()
        strategy.slot, strategy.name = slot, name
        return strategy
    suggestion = did_you_mean(name, names(slot)) if names(slot) else "this slot has no strategy yet"
    raise ConfigError(f"{slot} has no strategy '{name}'; {suggestion}")
