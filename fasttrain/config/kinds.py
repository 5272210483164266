"""The types of a dataclass's fields, and words for them."""

from __future__ import annotations

import enum
import functools
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path, PurePath
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from fasttrain.config.text import MANDATORY
from fasttrain.errors import ConfigError

LISTS = (list, tuple, set, frozenset, Sequence, AbstractSet)
NO_DEFAULT = MISSING


@functools.cache
def settable(cls: type) -> dict[str, Field[Any]]:
    """The fields of a dataclass that a config may give."""
    return {f.name: f for f in fields(cls) if f.init}


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """The types of a dataclass's fields, those written as text evaluated.

    Raises:
        ConfigError: a type cannot be found.
    """
    try:
        return typing.get_type_hints(cls, localns=_around(cls), include_extras=True)
    except (NameError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"the types of {cls.__module__}.{cls.__qualname__} cannot be read: {error}; "
            "define and import the types of its fields at the top of the module."
        ) from error


def _around(cls: type) -> dict[str, Any]:
    """The names that the class and those it is nested in define."""
    names: dict[str, Any] = {}
    scope: Any = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split(".")[:-1]:
        scope = getattr(scope, part, None)
        if scope is None:
            break
        names |= vars(scope)
    return names


def default_of(field: Field[Any]) -> Any:
    """A field's default, made anew, or `NO_DEFAULT`."""
    value = field.default if field.default_factory is MISSING else field.default_factory()
    return NO_DEFAULT if isinstance(value, str) and value == MANDATORY else value


def unwrapped(kind: Any) -> Any:
    """A type without Annotated, Final, NewType and alias around it."""
    while True:
        if get_origin(kind) in {Annotated, Final}:
            kind = get_args(kind)[0]
        elif isinstance(kind, typing.NewType):
            kind = kind.__supertype__
        elif hasattr(kind, "__value__") and type(kind).__name__ == "TypeAliasType":
            kind = kind.__value__
        elif isinstance(kind, typing.TypeVar):
            return Any
        else:
            return kind


def is_union(kind: Any) -> bool:
    """Whether a type is `A | B` or Optional."""
    return get_origin(kind) in {Union, types.UnionType}


def section_of(kind: Any) -> type | None:
    """The dataclass a field holds, looked for through Optional."""
    kind = unwrapped(kind)
    if is_union(kind):
        found = [section for arm in get_args(kind) if (section := section_of(arm)) is not None]
        return found[0] if len(found) == 1 else None
    return kind if isinstance(kind, type) and is_dataclass(kind) else None


def words(kind: Any) -> str:
    """What a field of this type expects, for messages."""
    kind = unwrapped(kind)
    origin = get_origin(kind)
    if is_union(kind):
        arms = [words(arm) for arm in get_args(kind) if arm is not type(None)]
        return " or ".join([*arms, "null"] if type(None) in get_args(kind) else arms)
    if origin is Literal:
        return "one of " + ", ".join("null" if choice is None else str(choice) for choice in get_args(kind))
    simple = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    if isinstance(kind, type) and kind in simple:
        return simple[kind]
    base = origin or kind
    if base in LISTS:
        return "a list"
    if isinstance(base, type):
        if issubclass(base, enum.Enum):
            return "one of " + ", ".join(member.name for member in base)
        if issubclass(base, PurePath):
            return "a path"
        if issubclass(base, Mapping) or is_dataclass(base):
            return "a mapping"
        return f"a {base.__name__}"
    return str(kind)


def example(kind: Any) -> str:
    """A word that stands for a value of this type in a suggestion."""
    return {int: "8", float: "0.1", bool: "true", str: "TEXT", Path: "PATH"}.get(unwrapped(kind), "...")
