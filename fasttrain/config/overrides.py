"""Overrides: `key=value`, `section.key=value`, `dims.0=9`, `dims[0]=9`, as one layer above the files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from fasttrain.config.merge import empty_layer, expanded, layered
from fasttrain.config.nodes import COMMAND_LINE, Entry, Map, Node, Scalar, from_python
from fasttrain.config.reader import read_text
from fasttrain.errors import Problem

_PATH = re.compile(r"[^.\[\]=\s]+(?:\.[^.\[\]=\s]+|\[[^\[\]=]+\])*")
_SEGMENT = re.compile(r"\[([^\[\]]+)\]|([^.\[\]]+)")
_INDEX = re.compile(r"-?[0-9]+")


def override_layer(overrides: Iterable[str | Mapping[str, Any]] | Mapping[str, Any], problems: list[Problem]) -> Map:
    """All overrides together. Their order decides between two values of one key, and nothing else.

    An item may also be a mapping, for example an OmegaConf DictConfig.
    """
    layer = empty_layer(COMMAND_LINE)
    for override in [overrides] if isinstance(overrides, Mapping) else overrides:
        if isinstance(override, Mapping):
            tree = from_python(override, COMMAND_LINE)
            assert isinstance(tree, Map)
        else:
            tree = parse(override, problems)
        if tree is not None:
            layer = layered(layer, expanded(tree, problems), problems, together=True)
    return layer


def parse(override: str, problems: list[Problem]) -> Map | None:
    """One override as a mapping, or None and a problem."""

    def refuse(message: str, suggestion: str, at: str = "") -> None:
        problems.append(Problem(key=at, message=message, suggestion=suggestion, file=COMMAND_LINE.file))

    if not isinstance(override, str):
        refuse(f"{override!r} is no override", "write key=value, or give a mapping")
        return None
    key, equals, text = override.partition("=")
    key, text = key.strip(), text.strip()
    if not equals:
        refuse(f"'{override}' is no override", f"write {key.lstrip('-') or 'key'}=value, or {key}=null for nothing")
        return None
    if key.startswith(("-", "+", "~")):
        refuse(f"'{override}' begins with '{key[0]}'", f"write {key.lstrip('-+~')}={text}")
        return None
    if not _PATH.fullmatch(key):
        refuse(f"'{key}' is no key", "write section.key=value, and list[0]=value for a list item")
        return None
    segments = [(inside or word).strip("'\"") for inside, word in _SEGMENT.findall(key)]
    node = read_value(text, key, problems)
    if node is None:
        return None
    for segment in reversed(segments):
        is_index = _INDEX.fullmatch(segment) is not None
        node = Map({segment: Entry(Scalar(segment, COMMAND_LINE), node)}, COMMAND_LINE, indexed=is_index)
    assert isinstance(node, Map)
    return node


def read_value(text: str, key: str, problems: list[Problem]) -> Node | None:
    """The value of an override: a list, a mapping or quoted text as in YAML; anything else is raw text.

    So `run.name=a: b`, `#1` and `*.txt` need no quotes of YAML within those of the shell.
    """
    if not text.startswith(("[", "{", '"', "'")):
        return Scalar(text, COMMAND_LINE)
    found: list[Problem] = []
    node = read_text(text, "", found, COMMAND_LINE)
    for problem in found:
        inner = f"{key}.{problem.key}" if problem.key and not problem.key.startswith("[") else f"{key}{problem.key}"
        problems.append(
            Problem(key=inner, message=problem.message, suggestion=problem.suggestion, file=COMMAND_LINE.file)
        )
    return node
