"""Nodes to values, each by the type of its field; every mistake is collected, none stops the others."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any, Literal, get_args, get_origin

from fasttrain.config import kinds
from fasttrain.config.dump import plain
from fasttrain.config.kinds import NO_DEFAULT, unwrapped, words
from fasttrain.config.merge import merged_node
from fasttrain.config.nodes import (
    List,
    Map,
    Node,
    Place,
    Scalar,
    Value,
    from_dataclass,
    from_python,
    is_interpolation,
    is_null,
)
from fasttrain.config.scalars import BAD, Path, Scalars, key_of
from fasttrain.config.text import MANDATORY, NONE, to_plain
from fasttrain.errors import ConfigError, ConfigErrors, Problem

# Taking the word for null would guess, and taking it for text is hardly ever meant.
_NONE_TEXT = ("'None' is text in YAML", "write null for nothing, or 'None' in quotes for the text")


class Converter(Scalars):
    """Converts nodes by types.

    `sketch`: give plain dicts and lists, in which references stay text (listed in `references`) and what is missing or
    wrong is '???'. Interpolations are resolved on that sketch; a further conversion takes them from `found`.
    """

    def __init__(
        self,
        *,
        sketch: bool = False,
        found: Mapping[Path, Any] | None = None,
        unknown: Callable[[str, Path, type], tuple[str, str] | None] | None = None,
        main: str = "",
    ) -> None:
        super().__init__(sketch)
        self.found, self.unknown, self.main = found or {}, unknown, main
        self.references: dict[Path, Scalar] = {}

    def convert(self, node: Node, kind: Any, path: Path, default: Any = NO_DEFAULT) -> Any:
        """The value of a node by a type, or `BAD`. Mappings go on from `default` where there is one."""
        kind = unwrapped(kind)
        if is_interpolation(node):
            return self.reference(node, kind, path)  # pyright: ignore[reportArgumentType]
        if isinstance(node, Scalar) and node.text == MANDATORY and not node.quoted:
            return self.missing(kind, path)
        if kinds.is_union(kind):
            return self.union(node, kind, path, default)
        if kind is Any or kind is object:
            return self.untyped(node, path, default)
        origin = get_origin(kind)
        if origin is Literal:
            return self.choice(node, kind, path)
        base = origin or kind
        if kind is None or kind is type(None):
            return None if is_null(node) else self.expects(kind, node, path)
        if isinstance(base, type) and is_dataclass(base):
            return self.section(node, base, path, default)
        if base in kinds.LISTS:
            return self.sequence(node, kind, base, path, default)
        if isinstance(base, type) and issubclass(base, dict | Mapping):
            return self.mapping(node, kind, path, default)
        return self.scalar(node, kind, path)

    def reference(self, node: Scalar, kind: Any, path: Path) -> Any:
        """What a reference stands for; in a sketch its text."""
        if self.sketch:
            self.references[path] = node
            if path not in self.found:
                return node.text
        value = self.found.get(path, BAD)
        return BAD if value is BAD else self.convert(from_python(value, node.place, final=True), kind, path)

    def missing(self, kind: Any, path: Path) -> Any:
        """Note that a field must be given."""
        key = key_of(path)
        self.problems.append(
            Problem(
                key=key,
                message=f"must be given: {words(kind)}",
                suggestion=f"write {key}={kinds.example(kind)}, or the same in the file",
                file=self.main,
            )
        )
        return BAD

    def union(self, node: Node, kind: Any, path: Path, default: Any) -> Any:
        """The first arm that takes the value; null where one is None."""
        arms = [unwrapped(arm) for arm in get_args(kind)]
        takes_null = type(None) in arms
        arms = [arm for arm in arms if arm is not type(None)]
        if takes_null and is_null(node):
            return None
        if takes_null and isinstance(node, Scalar) and not isinstance(kind, str):
            if node.text == NONE and not node.quoted:
                return self.refuse(
                    path,
                    node.place,
                    "'None' is text in YAML",
                    "write null for nothing, or 'None' in quotes for the text",
                )
            if node.text in {"null", "~", ""} and str not in arms:
                return None
        if len(arms) == 1:
            before = len(self.problems)
            value = self.convert(node, arms[0], path, default)
            if takes_null and value is BAD and [p.key for p in self.problems[before:]] == [key_of(path)]:
                self.problems[-1] = _or_null(self.problems[-1])
            return value
        arms = self.ordered(node, arms)
        before = len(self.problems)
        told: list[list[Problem]] = []
        for arm in arms:
            value = self.convert(node, arm, path, default)
            if value is not BAD and len(self.problems) == before:
                return value
            told.append(self.problems[before:])
            del self.problems[before:]
        # A mapping was most likely meant for the one section, a list for the one list: its own problems say more.
        for shape, fits in ((Map, kinds.section_of), (List, _is_list)):
            near = [problems for arm, problems in zip(arms, told, strict=True) if isinstance(node, shape) and fits(arm)]
            if len(near) == 1:
                self.problems += near[0]
                return BAD
        return self.expects(kind, node, path)

    @staticmethod
    def ordered(node: Node, arms: list[Any]) -> list[Any]:
        """The arms with the likeliest first: the exact type of what was written, and text last."""
        value = node.value if isinstance(node, Value) else to_plain(node.text) if isinstance(node, Scalar) else None
        exact = str if isinstance(node, Scalar) and node.quoted and not node.final else type(value)
        return sorted(arms, key=lambda arm: (arm is not exact, arm is str))

    def untyped(self, node: Node, path: Path, default: Any = NO_DEFAULT) -> Any:
        """A value where the field says nothing of its type: YAML 1.2."""
        if isinstance(node, Map):
            node = self.upon(node, default, path)
        if isinstance(node, Map):
            keyed = {self.untyped_key(entry.key): entry.node for entry in node.entries.values()}
            items = {key: self.child(item, Any, (*path, _part(key))) for key, item in keyed.items()}
            return BAD if any(value is BAD for value in items.values()) else items
        if isinstance(node, List):
            values = [self.child(item, Any, (*path, i)) for i, item in enumerate(node.items)]
            return BAD if any(value is BAD for value in values) else values
        if isinstance(node, Value):
            return node.value
        if node.quoted or node.final:
            return node.text
        if node.text == NONE:
            return self.refuse(path, node.place, *_NONE_TEXT)
        return to_plain(node.text)

    @staticmethod
    def untyped_key(key: Scalar | Value) -> Any:
        """A key where nothing says its type: an integer or text."""
        if isinstance(key, Value):
            return key.value
        value = to_plain(key.text) if not key.quoted else key.text
        return value if type(value) is int else key.text

    def child(self, node: Node, kind: Any, path: Path, default: Any = NO_DEFAULT) -> Any:
        """Convert a part of something; in a sketch a bad part is '???'."""
        value = self.convert(node, kind, path, default)
        return MANDATORY if value is BAD and self.sketch else value

    def upon(self, node: Map, default: Any, path: Path) -> Node:
        """A mapping put on the default of its field, as on a lower layer."""
        if isinstance(default, dict | list | tuple):
            return merged_node(from_python(default, node.place), node, self.problems, key_of(path))
        return node

    def sequence(self, node: Node, kind: Any, base: Any, path: Path, default: Any) -> Any:
        """A list, tuple or set of one type."""
        if isinstance(node, Map) and node.indexed:
            node = self.upon(node, default, path)
            if isinstance(node, Map):
                return self.refuse(path, node.place, "has no items yet to set one of", f"write {key_of(path)}=[...]")
        if not isinstance(node, List):
            text = node.text if isinstance(node, Scalar) and not is_null(node) else "..."
            return self.expects(kind, node, path, f"write [{text}]" if not is_null(node) else "write [] for none")
        arguments = get_args(kind)
        count = len(node.items)
        if base is tuple and arguments and arguments[-1] is not Ellipsis:
            arguments = () if arguments == ((),) else arguments
            if len(arguments) != count:
                return self.refuse(path, node.place, f"expects {len(arguments)} items, got {count}")
            item_kinds = list(arguments)
        else:
            item_kinds = [arguments[0] if arguments else Any] * count
        pairs = zip(node.items, item_kinds, strict=True)
        values = [self.child(item, item_kind, (*path, i)) for i, (item, item_kind) in enumerate(pairs)]
        if any(value is BAD for value in values):
            return BAD
        make = base if base in {list, tuple, set, frozenset} and not self.sketch else list
        return make(values)

    def mapping(self, node: Node, kind: Any, path: Path, default: Any) -> Any:
        """A dict of one type."""
        if not isinstance(node, Map):
            return self.expects(kind, node, path, "write {key: value}")
        merged = self.upon(node, default, path)
        assert isinstance(merged, Map)
        key_kind, item_kind = get_args(kind) or (Any, Any)
        values = {}
        for name, entry in merged.entries.items():
            inner = (*path, name)
            key = self.untyped_key(entry.key) if unwrapped(key_kind) is Any else self.key(entry.key, key_kind, inner)
            value = BAD if key is BAD else self.child(entry.node, item_kind, (*path, _part(key)))
            values[name if key is BAD else key] = value
        return BAD if any(value is BAD for value in values.values()) else values

    def key(self, key: Scalar | Value, kind: Any, path: Path) -> Any:
        """A key of a dict by its type."""
        if unwrapped(kind) is str:
            return key.text if isinstance(key, Scalar) else str(key.value)
        return self.convert(key, kind, path)

    def section(self, node: Node, cls: type, path: Path, default: Any = NO_DEFAULT) -> Any:
        """A dataclass from its fields."""
        if isinstance(node, Value) and isinstance(node.value, cls):
            return plain(node.value) if self.sketch else node.value
        if isinstance(node, Value) and is_dataclass(node.value) and not isinstance(node.value, type):
            node = from_dataclass(node.value, node.place)
        known = kinds.settable(cls)
        if not isinstance(node, Map):
            hint = f"its keys are {', '.join(known)}" if known else "it has no keys"
            return self.expects(cls, node, path, hint)
        if isinstance(default, cls):
            cls = type(default)
            known = kinds.settable(cls)
        try:
            types = kinds.field_types(cls)
        except ConfigError as error:
            return self.refuse(path, node.place, str(error))
        for name, entry in node.entries.items():
            if name not in known and self.unknown is not None:
                told = self.unknown(name, path, cls)
                if told is not None:
                    self.refuse((*path, name), entry.node.place, *told)
        values = {}
        for name, field in known.items():
            start = getattr(default, name) if isinstance(default, cls) else kinds.default_of(field)
            given = node.get(name)
            inner = (*path, name)
            if given is not None:
                values[name] = self.child(given, types[name], inner, start)
            else:
                values[name] = self.left_out(types[name], inner, start, node.place)
        return values if self.sketch else self.build(cls, values, node, path)

    def left_out(self, kind: Any, path: Path, start: Any, place: Place) -> Any:
        """The default of a field that was not given. It may itself hold references and missing values."""
        if start is NO_DEFAULT or (isinstance(start, str) and start == MANDATORY):
            section = unwrapped(kind)
            if isinstance(section, type) and is_dataclass(section):
                return self.child(Map({}, place), section, path)
            value = self.missing(kind, path)
            return MANDATORY if self.sketch else value
        if is_dataclass(start) and not isinstance(start, type) and kinds.section_of(kind) is not None:
            return self.child(Map({}, place), type(start), path, start)
        if isinstance(start, str | dict | list | tuple) and "${" in str(start):
            return self.child(from_python(start, place), kind, path)
        return plain(start) if self.sketch else start

    def build(self, cls: type, values: dict[str, Any], node: Map, path: Path) -> Any:
        """The instance, which checks itself."""
        bad = {name for name, value in values.items() if value is BAD}
        try:
            made = cls(**{name: None if value is BAD else value for name, value in values.items()})
        except (ValueError, TypeError, AssertionError, AttributeError) as error:
            for key, message, suggestion in _parts(error):
                named = _named(key or message, values)
                # With a part missing only complaints about other, given parts are surely true.
                if bad and (not isinstance(error, ValueError) or not named or set(named) & bad):
                    continue
                at = node.get(named[0]) if named else None
                where = (*path, named[0]) if at is not None else path
                self.refuse(where, at.place if at is not None else node.place, message, suggestion)
            return BAD
        return BAD if bad else made


def _part(key: Any) -> str | int:
    return key if isinstance(key, str | int) else str(key)


def _is_list(kind: Any) -> bool:
    return (get_origin(kind) or kind) in kinds.LISTS


def _or_null(problem: Problem) -> Problem:
    message = re.sub(r"^(expects .*), got ", r"\1 or null, got ", problem.message)
    return Problem(
        key=problem.key, message=message, suggestion=problem.suggestion, file=problem.file, line=problem.line
    )


def _parts(error: Exception) -> list[tuple[str, str, str]]:
    """Key, message and suggestion of each mistake that an error tells."""
    if isinstance(error, ConfigErrors):
        return [(problem.key, problem.message, problem.suggestion) for problem in error.problems]
    text = str(error) or type(error).__name__
    if not isinstance(error, ValueError):
        text = f"{type(error).__name__}: {text}"
    message, _, suggestion = text.rstrip(".").partition("; ")
    return [("", message, suggestion)]


def _named(message: str, values: Mapping[str, Any]) -> list[str]:
    """The fields that a message names, in the order in which it does."""
    return [word for word in dict.fromkeys(re.findall(r"\w+", message)) if word in values]
