"""Text, numbers, booleans, choices, paths and enums by their types, and how a mistake is noted."""

from __future__ import annotations

import enum
import numbers
import operator
import os
from collections.abc import Callable
from pathlib import PurePath
from typing import Any, get_args

from fasttrain.config.dump import plain
from fasttrain.config.kinds import words
from fasttrain.config.nodes import List, Map, Node, Place, Scalar, Value, describe, is_null
from fasttrain.config.text import to_bool, to_float, to_int
from fasttrain.errors import Problem, did_you_mean

Path = tuple[str | int, ...]


class _Bad:
    def __repr__(self) -> str:
        return "BAD"


BAD: Any = _Bad()
"""A value that could not be made; the problem is told already."""


def key_of(path: Path) -> str:
    """A path as people write it: `model.dims[0]`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


class Scalars:
    """Converts what is neither list nor mapping, and collects problems. `sketch`: see `Converter`."""

    def __init__(self, sketch: bool) -> None:
        self.sketch = sketch
        self.problems: list[Problem] = []

    def refuse(self, path: Path, place: Place, message: str, suggestion: str = "") -> Any:
        """Note a problem; gives `BAD`."""
        self.problems.append(
            Problem(key=key_of(path), message=message, suggestion=suggestion, file=place.file, line=place.line)
        )
        return BAD

    def expects(self, kind: Any, node: Node, path: Path, suggestion: str = "") -> Any:
        """Note that a value is of another type; gives `BAD`."""
        return self.refuse(path, node.place, f"expects {words(kind)}, got {describe(node)}", suggestion)

    def choice(self, node: Node, kind: Any, path: Path) -> Any:
        """One of the choices of a Literal."""
        choices = get_args(kind)
        if is_null(node) and None in choices:
            return None
        for choice in choices:
            if isinstance(node, Value) and type(node.value) is type(choice) and node.value == choice:
                return choice
            if not isinstance(node, Scalar):
                continue
            reader = {str: str, bool: to_bool, int: to_int}.get(type(choice), lambda text: None)
            if reader(node.text) == choice:
                return choice
        near = ""
        if isinstance(node, Scalar):
            near = did_you_mean(node.text, [str(choice) for choice in choices])
        return self.expects(kind, node, path, near if near.startswith("did") else "")

    def scalar(self, node: Node, kind: Any, path: Path) -> Any:
        """Text, numbers, booleans, paths, enums."""
        if isinstance(node, Map | List):
            return self.expects(kind, node, path)
        if kind is str:
            return self.text(node, path)
        if is_null(node):
            return self.expects(kind, node, path)
        given = node.value if isinstance(node, Value) else node.text
        if kind in {int, float, bool}:
            value = _number(given, kind)
            return self.expects(kind, node, path, _hint(kind, node)) if value is None else value
        if isinstance(kind, type):
            if isinstance(given, kind) and not isinstance(node, Scalar):
                return given if not self.sketch else plain(given)
            if issubclass(kind, PurePath):
                return (kind(given) if not self.sketch else str(given)) if isinstance(given, str) else BAD
            if issubclass(kind, enum.Enum):
                return self.member(node, kind, path)
        return self.expects(kind, node, path, "such a value can only be given in Python")

    def text(self, node: Scalar | Value, path: Path) -> Any:
        """Text, as it was typed."""
        if isinstance(node, Scalar):
            if not is_null(node):
                return node.text
            hint = f"write '{node.text}' in quotes for the text"
            return self.expects(str, node, path, hint)
        value = node.value
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        # A torch.device or dtype is asked by its name, so that torch is not loaded to find out.
        if (isinstance(value, int | float) and not isinstance(value, bool)) or type(value).__module__ == "torch":
            return str(value)
        return self.expects(str, node, path)

    def member(self, node: Scalar | Value, kind: type[enum.Enum], path: Path) -> Any:
        """A member of an enum, by name or value."""
        given = node.value if isinstance(node, Value) else node.text
        for member in kind:
            if given == member.name or given == member.value or str(given) == str(member.value):
                return member.name if self.sketch else member
        near = did_you_mean(str(given), [member.name for member in kind])
        return self.expects(kind, node, path, near if near.startswith("did") else "")


def _number(given: Any, kind: type) -> Any:
    if isinstance(given, str):
        readers: dict[type, Callable[[str], Any]] = {int: to_int, float: to_float, bool: to_bool}
        return readers[kind](given.strip())
    if kind is bool:
        is_flag = isinstance(given, bool) or (isinstance(given, int) and given in {0, 1})
        return bool(given) if is_flag else None
    if isinstance(given, bool):
        return None
    if kind is float:
        return float(given) if isinstance(given, numbers.Real) else None
    if isinstance(given, float):
        return int(given) if given.is_integer() else None
    return operator.index(given) if hasattr(given, "__index__") else None


def _hint(kind: type, node: Scalar | Value) -> str:
    text = node.text if isinstance(node, Scalar) else str(node.value)
    if kind is int and (number := to_float(text)) is not None and abs(number) < 1e15:
        return f"write a whole number, for example {int(number)}"
    bare = text.replace(",", "").replace(" ", "")
    if kind is not bool and bare != text and to_float(bare) is not None:
        return f"write {bare}"
    return ""
