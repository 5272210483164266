"""Slots given as Python values: names, dicts, `Config` instances, strategies."""

from __future__ import annotations

import dataclasses
from typing import Any

from fasttrain.config.nodes import PYTHON, Map, Node, Scalar, from_dataclass, from_python
from fasttrain.config.suggest import config_of
from fasttrain.core.strategy import Strategy
from fasttrain.errors import Problem
from fasttrain.registry import names


def slot_node(slot: str, value: Any, problems: list[Problem]) -> Node:
    """The node of a slot's value. A `Config` instance is looked up among the strategies of the slot."""
    if isinstance(value, Strategy):
        return _named(value.name, value.config)
    if isinstance(value, type) and issubclass(value, Strategy):
        return _named(value.name, None)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return from_python(value)
    owners = [name for name in names(slot) if config_of(slot, name) is type(value)]
    if len(owners) == 1:
        return _named(owners[0], value)
    shown = f"{type(value).__qualname__}(...)"
    if owners:
        message = f"{shown} may mean {' or '.join(f'{slot}={name}' for name in owners)}"
        suggestion = f"name it: {slot}={{'name': {owners[0]!r}, ...}}"
    else:
        message = f"{shown} is the Config of no strategy of this slot"
        suggestion = f"give a name or the Config of one of: {', '.join(names(slot)) or 'none is known'}"
    problems.append(Problem(key=slot, message=message, suggestion=suggestion))
    # The mistake is told; off says nothing more.
    return Scalar("null", PYTHON)


def _named(name: str, config: Any) -> Map:
    section = from_dataclass(config) if config is not None else Map({}, PYTHON)
    section.put("name", Scalar(name, PYTHON, quoted=True))
    return section
