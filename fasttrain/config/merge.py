"""Layers of a config, lowest first: defaults, the files of `extends`, the file, the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import is_dataclass
from pathlib import Path

from fasttrain.config.nodes import PYTHON, Entry, List, Map, Node, Place, Scalar, Value, from_dataclass, is_null
from fasttrain.config.reader import read_file
from fasttrain.config.text import FALSE
from fasttrain.core.slots import SLOTS
from fasttrain.errors import Problem

# Giving one of them takes the other back.
_EITHER = {"steps": "epochs", "epochs": "steps"}
_OFF_WORDS = FALSE - {"0"}


def empty_layer(place: Place = PYTHON) -> Map:
    """A layer that says nothing."""
    return Map({}, place)


def is_off(node: Node) -> bool:
    """Whether a slot's value turns it off: null, off, no, false."""
    if isinstance(node, Value):
        return node.value is None or node.value is False
    return is_null(node) or (isinstance(node, Scalar) and node.text.lower() in _OFF_WORDS | {"null"})


def expanded(layer: Map, problems: list[Problem]) -> Map:
    """`slot: name` written out as `slot: {name: name}`, and every word for off as null."""
    entries = dict(layer.entries)
    for slot in SLOTS:
        entry = entries.get(slot)
        if entry is None:
            continue
        node = entry.node
        name = node.get("name") if isinstance(node, Map) else None
        if is_off(node) or (name is not None and is_off(name)):
            node = Scalar("null", node.place)
        elif isinstance(node, List):
            del entries[slot]
            problems.append(
                Problem(
                    key=slot,
                    message="a slot holds one strategy, got a list",
                    suggestion=f"write '{slot}: NAME' or '{slot}: {{name: NAME, ...}}'",
                    file=node.place.file,
                    line=node.place.line,
                )
            )
            continue
        elif not isinstance(node, Map):
            node = Map({"name": Entry(Scalar("name", node.place), _as_name(node))}, node.place)
        entries[slot] = Entry(entry.key, node)
    return Map(entries, layer.place)


def _as_name(node: Scalar | Value) -> Node:
    return node if isinstance(node, Scalar) else Scalar(str(node.value), node.place, quoted=True)


def layered(low: Map, high: Map, problems: list[Problem], together: bool = False) -> Map:
    """One layer put on another.

    Mappings merge and lists replace. Naming another strategy drops the settings of the one below; so does `steps` with
    `epochs`. `together`: both belong to the same layer, where naming drops nothing.
    """
    base = Map(dict(low.entries), low.place)
    top = Map(dict(high.entries), high.place)
    if not together:
        for given, other in _EITHER.items():
            node = top.get(given)
            if node is not None and not is_null(node) and other not in top.entries:
                top.put(other, Scalar("null", node.place))
    for slot in SLOTS:
        below, above = base.get(slot), top.get(slot)
        if not isinstance(above, Map) or below is None:
            continue
        named = _name(above)
        if above.was_off:
            del base.entries[slot]
        elif not isinstance(below, Map):
            del base.entries[slot]
            unnamed = Map(above.entries, above.place, was_off=named is None)
            top.entries[slot] = Entry(top.entries[slot].key, unnamed)
        elif named is not None and _name(below) not in {None, named} and not together:
            del base.entries[slot]
        elif below.was_off and named is None:
            top.entries[slot] = Entry(top.entries[slot].key, Map(above.entries, above.place, was_off=True))
    merged = merged_node(base, top, problems)
    assert isinstance(merged, Map)
    return merged


def _name(section: Map) -> str | None:
    name = section.get("name")
    return name.text if isinstance(name, Scalar) else None


def merged_node(low: Node, high: Node, problems: list[Problem], key: str = "") -> Node:
    """One node put on another: mappings merge, items are set by index, everything else replaces."""
    if isinstance(low, List) and isinstance(high, Map) and high.indexed:
        return _patched(low, high, problems, key)
    if isinstance(low, Value) and isinstance(high, Map) and is_dataclass(low.value) and not isinstance(low.value, type):
        low = from_dataclass(low.value, high.place)
    if not (isinstance(low, Map) and isinstance(high, Map)):
        return high
    entries = dict(low.entries)
    for name, entry in high.entries.items():
        if name in entries:
            path = f"{key}.{name}" if key else name
            entry = Entry(entry.key, merged_node(entries[name].node, entry.node, problems, path))
        entries[name] = entry
    return Map(entries, high.place, low.indexed and high.indexed, high.was_off)


def _patched(low: List, high: Map, problems: list[Problem], key: str) -> List:
    items = list(low.items)
    for name, entry in high.entries.items():
        index = int(name)
        if not -len(items) <= index < len(items):
            held = f"items 0 to {len(items) - 1}" if items else "no items"
            problems.append(
                Problem(
                    key=f"{key}[{name}]",
                    message=f"there is no item {name}: the list has {held}",
                    suggestion=f"write the whole list: {key}=[...]",
                    file=entry.node.place.file,
                    line=entry.node.place.line,
                )
            )
            continue
        items[index] = merged_node(items[index], entry.node, problems, f"{key}[{name}]")
    return List(items, high.place)


def file_layer(
    path: Path, problems: list[Problem], above: Sequence[Path] = (), asked: Problem | None = None
) -> Map | None:
    """A file put on the files it extends, or None where one of them cannot be read.

    `above`: the files that lead here, to refuse circles; `asked`: the `extends` that named this one.
    """
    tree = read_file(path, problems, asked)
    return None if tree is None else extended(tree, path.parent, problems, [*above, path.resolve()])


def extended(tree: Map, folder: Path, problems: list[Problem], above: Sequence[Path] = ()) -> Map | None:
    """A layer put on the files that its `extends` names, relative to `folder`."""
    node = tree.get("extends")
    own = expanded(tree.without("extends"), problems)
    if node is None or is_null(node):
        return layered(empty_layer(tree.place), own, problems)
    place = node.place

    def refuse(message: str, suggestion: str) -> None:
        problems.append(
            Problem(key="extends", message=message, suggestion=suggestion, file=place.file, line=place.line)
        )

    base, whole = empty_layer(tree.place), True
    for item in node.items if isinstance(node, List) else [node]:
        name = item.text if isinstance(item, Scalar) else str(item.value) if isinstance(item, Value) else None
        if not name:
            refuse("expects a file or a list of files", "write 'extends: base.yaml'")
            whole = False
            continue
        path = folder / name
        if path.resolve() in above:
            circle = " -> ".join(p.name for p in [*above[above.index(path.resolve()) :], path])
            refuse(f"the files extend each other in a circle: {circle}", "leave one of these 'extends' out")
            whole = False
            continue
        asked = Problem(key="extends", message="", file=place.file, line=place.line)
        layer = file_layer(path, problems, above, asked)
        if layer is None:
            whole = False
        else:
            base = layered(base, layer, problems)
    return layered(base, own, problems) if whole else None
