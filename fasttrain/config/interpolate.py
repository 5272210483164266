"""References: `${optimizer.lr}`, `${oc.env:HOME}`. OmegaConf resolves them; it is imported where one is written."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fasttrain.config.dump import escaped
from fasttrain.config.nodes import List, Map, Node, Scalar, Value, from_python, is_interpolation, is_null
from fasttrain.config.scalars import BAD, Path, key_of
from fasttrain.config.text import MANDATORY
from fasttrain.errors import Problem, did_you_mean


@dataclass(frozen=True)
class _Refused:
    message: str
    suggestion: str
    # The key that does not exist, where that is the reason.
    target: str = ""


def resolve(
    sketch: Mapping[str, Any],
    references: Mapping[Path, Scalar],
    problems: list[Problem],
    known: Callable[[], list[str]],
) -> dict[Path, Any]:
    """What each reference stands for, by its path.

    `sketch` is the whole config with defaults, missing values as '???'. What refers to something missing or wrong is
    `BAD` without a problem of its own: that one is told already.
    """
    from omegaconf import OmegaConf

    refused = {path: told for path, node in references.items() if (told := _unreadable(node.text)) is not None}
    tree = _replaced(sketch, (), set(refused))
    config = OmegaConf.create(tree, flags={"allow_objects": True})
    found: dict[Path, Any] = {}
    for path, node in references.items():
        value = refused.get(path) or _value(config, path)
        if isinstance(value, _Refused):
            # One that only leads to a wrong one is not told again.
            if not value.target or value.target in node.text:
                suggestion = value.suggestion or did_you_mean(value.target, known())
                problems.append(
                    Problem(
                        key=key_of(path),
                        message=value.message,
                        suggestion=suggestion if len(suggestion) < 200 else "refer to a key that exists",
                        file=node.place.file,
                        line=node.place.line,
                    )
                )
            value = BAD
        found[path] = value
    return found


def settle(sketch: Mapping[str, Any], references: Mapping[Path, Scalar], found: dict[Path, Any]) -> dict[Path, Any]:
    """What each reference stands for now that `sketch` holds the others as values of their fields' types.

    `${oc.env:LR}` gives text; one that refers to the number made from it is to give the number.
    """
    from omegaconf import OmegaConf

    config: Any = OmegaConf.create(_escaped(sketch), flags={"allow_objects": True})
    settled = dict(found)
    for path, node in references.items():
        if found[path] is BAD:
            continue
        section = config
        for part in path[:-1]:
            section = section[part]
        typed = section[path[-1]]
        section[path[-1]] = node.text
        value = _value(config, path)
        section[path[-1]] = escaped(typed) if isinstance(typed, str) else typed
        if not isinstance(value, _Refused) and value is not BAD:
            settled[path] = value
    return settled


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, Mapping):
        return {key: _escaped(item) for key, item in value.items()}
    return [_escaped(item) for item in value] if isinstance(value, list) else value


def _replaced(value: Any, path: Path, refused: set[Path]) -> Any:
    if path in refused:
        return MANDATORY
    if isinstance(value, Mapping):
        return {key: _replaced(item, (*path, key), refused) for key, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, (*path, i), refused) for i, item in enumerate(value)]
    return value


def _unreadable(text: str) -> _Refused | None:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        OmegaConf.create({"text": text})
    except OmegaConfBaseException as error:
        what = str(error).splitlines()[0]
        return _Refused(f"'{text}' is no reference: {what}", r"write ${section.key}, or \${ for the characters")
    return None


def _value(config: Any, path: Path) -> Any:
    from omegaconf import Container, OmegaConf, errors

    node = config
    try:
        for part in path:
            node = node[part]
        return (
            OmegaConf.to_container(node, resolve=True, throw_on_missing=True) if isinstance(node, Container) else node
        )
    except (errors.InterpolationToMissingValueError, errors.MissingMandatoryValue):
        return BAD
    except errors.InterpolationKeyError as error:
        match = re.search(r"key '(.*)' not found", str(error))
        target = match[1] if match else ""
        return _Refused(f"refers to '{target}', which does not exist", "", target)
    except errors.UnsupportedInterpolationType as error:
        name = str(error).splitlines()[0].removeprefix("Unsupported interpolation type ")
        return _Refused(
            f"there is no resolver '{name}'", "use oc.env, oc.select or oc.decode, or register one in a plugin"
        )
    except (errors.OmegaConfBaseException, RecursionError) as error:
        what = str(error).splitlines()[0]
        if "Recursive interpolation" in what or isinstance(error, RecursionError):
            return _Refused("refers to itself in a circle", "give one of these keys a value")
        match = re.search(r"Environment variable '(.*)' not found", what)
        if match:
            name = match[1]
            return _Refused(
                f"the environment variable '{name}' is not set",
                f"set it, or give a default: ${{oc.env:{name},DEFAULT}}",
            )
        match = re.search(r"Error trying to access (\S+): (.*)", what)
        if match:
            return _Refused(f"refers to '{match[1]}', which does not exist: {match[2]}", "", match[1])
        return _Refused(f"cannot be resolved: {what}", "check the reference")


def resolve_names(tree: Map, slots: Mapping[str, str], problems: list[Problem]) -> Map:
    """The same tree with the references in `trainer`, `plugins` and the slots' names resolved.

    These decide which classes are read; everything else is resolved when the types of all fields are known.
    """
    references: dict[Path, Scalar] = {}
    for key in ("trainer", "plugins"):
        node = tree.get(key)
        for path, item in [((key,), node)] if not isinstance(node, List) else _items(key, node):
            if is_interpolation(item):
                assert isinstance(item, Scalar)
                references[path] = item
    for slot in slots:
        section = tree.get(slot)
        name = section.get("name") if isinstance(section, Map) else None
        if is_interpolation(name):
            assert isinstance(name, Scalar)
            references[slot, "name"] = name
    if not references:
        return tree
    found = resolve(_raw(tree), references, problems, lambda: [])
    entries = dict(tree.entries)
    result = Map(entries, tree.place)
    for path, value in found.items():
        key = str(path[0])
        place = references[path].place
        if value is BAD:
            # The problem is told; without the key nothing more is said of it.
            entries.pop(key, None)
        elif key in slots and (value is None or value is False or str(value).lower() in {"null", "off", "no"}):
            result.put(key, Scalar("null", place))
        elif key in slots and isinstance(value, Mapping):
            result.put(key, from_python(value, place))
        elif key in slots:
            section = entries[key].node
            assert isinstance(section, Map)
            named = Map(dict(section.entries), section.place)
            named.put("name", Scalar(str(value), place, quoted=True, final=True))
            result.put(key, named)
        elif len(path) == 2:
            plugins = entries[key].node
            assert isinstance(plugins, List)
            items = list(plugins.items)
            items[int(path[1])] = from_python(value, place, final=True)
            result.put(key, List(items, plugins.place))
        else:
            result.put(key, from_python(value, place, final=True))
    return result


def _items(key: str, node: List) -> list[tuple[Path, Node]]:
    return [((key, i), item) for i, item in enumerate(node.items)]


def _raw(node: Node) -> Any:
    """A node as plain data, before types are known: text stays text."""
    if isinstance(node, Map):
        return {key: _raw(entry.node) for key, entry in node.entries.items()}
    if isinstance(node, List):
        return [_raw(item) for item in node.items]
    if isinstance(node, Value):
        return node.value
    if is_null(node):
        return None
    return MANDATORY if "${" in node.text and _unreadable(node.text) is not None else node.text
