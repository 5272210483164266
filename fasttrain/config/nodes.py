"""What a config file holds before types are known: raw text, whether it was quoted, and where it stands.

YAML 1.1 turns `no` into False, `007` into 7 and `12:30` into 750. Here a scalar stays the text that was typed until the
type of its field is known.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeAlias

from fasttrain.config.text import MANDATORY, NULLS


@dataclass(frozen=True, slots=True)
class Place:
    """Where something was written: a file and a line, the command line, or a keyword in Python."""

    file: str = ""
    line: int | None = None


COMMAND_LINE = Place("command line")
PYTHON = Place()


@dataclass(slots=True)
class Scalar:
    """Text as it was typed. `final`: it is the value itself, to be read neither as null nor as an interpolation."""

    text: str
    place: Place = PYTHON
    quoted: bool = False
    final: bool = False


@dataclass(slots=True)
class Value:
    """A Python value other than text, given by keyword or found by an interpolation."""

    value: Any
    place: Place = PYTHON


@dataclass(slots=True)
class List:
    """A list of nodes."""

    items: list[Node]
    place: Place = PYTHON


@dataclass(slots=True)
class Entry:
    """A key (as it was typed) and what it holds. The node's place is the line of the key."""

    key: Scalar | Value
    node: Node


@dataclass(slots=True)
class Map:
    """Keys by their text. `indexed`: made by an override that may mean list items. `was_off`: put over a slot that is
    off, without a name."""

    entries: dict[str, Entry] = field(default_factory=dict)
    place: Place = PYTHON
    indexed: bool = False
    was_off: bool = False

    def get(self, key: str) -> Node | None:
        """What a key holds; None where it is not given."""
        entry = self.entries.get(key)
        return None if entry is None else entry.node

    def put(self, key: str, node: Node) -> None:
        """Set a key."""
        self.entries[key] = Entry(Scalar(key, node.place), node)

    def without(self, *keys: str) -> Map:
        """The same mapping without some keys."""
        kept = {key: entry for key, entry in self.entries.items() if key not in keys}
        return Map(kept, self.place, self.indexed, self.was_off)


Node: TypeAlias = Scalar | Value | List | Map


def is_null(node: Node) -> bool:
    """Whether nothing was given: null, ~ or empty, without quotes."""
    if isinstance(node, Value):
        return node.value is None
    return isinstance(node, Scalar) and not node.quoted and not node.final and node.text in NULLS


def is_interpolation(node: Node | None) -> bool:
    """Whether the text refers to something else: `${...}`."""
    return isinstance(node, Scalar) and not node.final and "${" in node.text


def describe(node: Node) -> str:
    """A few words on what was given, for messages."""
    if isinstance(node, Map):
        return "a mapping"
    if isinstance(node, List):
        return "a list"
    if is_null(node):
        return "null" if isinstance(node, Value) or node.text else "nothing"
    return repr(node.text) if isinstance(node, Scalar) else shortened(repr(node.value))


def shortened(text: str, length: int = 60) -> str:
    """Text of at most `length` characters."""
    return text if len(text) <= length else text[: length - 3] + "..."


def from_python(value: Any, place: Place = PYTHON, final: bool = False) -> Node:
    """A Python value as a node. Text keeps being text: `"no"` is never False. OmegaConf's containers are opened."""
    if isinstance(value, str) and not isinstance(value, enum.Enum):
        # OmegaConf's word for what must be given is no text; in YAML, quotes make it one.
        return Scalar(str(value), place, quoted=final or value != MANDATORY, final=final)
    if _is_omegaconf(value):
        value = _opened(value)
    if isinstance(value, Mapping):
        entries = {}
        for key, item in value.items():
            name = key if isinstance(key, str) else str(key)
            typed = Scalar(key, place, quoted=True) if isinstance(key, str) else Value(key, place)
            entries[name] = Entry(typed, from_python(item, place, final))
        return Map(entries, place)
    # Named tuples and sets lose their type here and find it again by the type of the field.
    if isinstance(value, list | tuple) or (isinstance(value, AbstractSet) and not isinstance(value, type)):
        items: Sequence[Any] = sorted(value, key=str) if isinstance(value, AbstractSet) else value
        return List([from_python(item, place, final) for item in items], place)
    return Value(value, place)


def from_dataclass(value: Any, place: Place = PYTHON) -> Map:
    """The fields of a dataclass instance as a mapping."""
    assert is_dataclass(value)
    return Map(
        {
            f.name: Entry(Scalar(f.name, place), from_python(getattr(value, f.name), place))
            for f in fields(value)
            if f.init
        },
        place,
    )


def _is_omegaconf(value: Any) -> bool:
    omegaconf = sys.modules.get("omegaconf")
    return omegaconf is not None and isinstance(value, omegaconf.Container)


def _opened(config: Any) -> Any:
    """An OmegaConf container as plain dicts and lists.

    Its own references are resolved; those that point outside stay text, to be resolved against the whole config.
    """
    import omegaconf

    def open_(container: Any, key: Any) -> Any:
        raw = container._get_node(key)
        if raw._is_missing() and not raw._is_interpolation():
            return "???"
        try:
            value = container[key]
        except omegaconf.errors.OmegaConfBaseException:
            return raw._value()
        return _opened(value) if isinstance(value, omegaconf.Container) else value

    if isinstance(config, omegaconf.DictConfig):
        return {key: open_(config, key) for key in config}
    return [open_(config, i) for i in range(len(config))]


def walk(node: Node) -> Iterator[Node]:
    """A node and all below it."""
    yield node
    if isinstance(node, Map):
        for entry in node.entries.values():
            yield from walk(entry.node)
    elif isinstance(node, List):
        for item in node.items:
            yield from walk(item)


def near_file(path: Path) -> list[str]:
    """The YAML files beside a path and in `configs` there, for a suggestion; not the hidden ones, which are of tools."""
    found = (other for folder in (path.parent, path.parent / "configs") for other in folder.glob("[!.]*.y*ml"))
    return sorted(str(other.relative_to(path.parent)) for other in found if other.suffix in {".yaml", ".yml"})
