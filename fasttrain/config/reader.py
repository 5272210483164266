"""Read YAML into nodes: raw text with the file and line of each key. Every fault of the writing is a `Problem`."""

from __future__ import annotations

from pathlib import Path

import yaml

from fasttrain.config.nodes import Entry, List, Map, Node, Place, Scalar, near_file, shortened
from fasttrain.errors import Problem, did_you_mean

_CORE = "tag:yaml.org,2002:"
_TEXT = f"{_CORE}str"
_MERGE = f"{_CORE}merge"
_KNOWN_TAGS = {
    _CORE + kind for kind in ("str", "int", "float", "bool", "null", "map", "seq", "timestamp", "merge", "value")
}
_implicit = yaml.SafeLoader("")


def read_file(path: Path, problems: list[Problem], asked_at: Problem | None = None) -> Map | None:
    """The mapping a file holds, or None and a problem. An empty file is an empty mapping.

    `asked_at`: the key and place that named the file, where another file did.
    """

    def refuse(message: str, suggestion: str, file: str = "", line: int | None = None) -> None:
        key = asked_at.key if asked_at else ""
        if not file and asked_at:
            file, line = asked_at.file, asked_at.line
        problems.append(Problem(key=key, message=message, suggestion=suggestion, file=file or str(path), line=line))

    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        others = near_file(path)
        hint = did_you_mean(path.name, others) if others else f"there is no YAML file in '{path.parent}'"
        refuse(f"there is no file '{path}'", hint)
        return None
    except OSError as error:
        refuse(f"'{path}' cannot be read: {error.strerror or error}", "name a YAML file")
        return None
    except UnicodeDecodeError as error:
        refuse(f"'{path}' is not UTF-8 text (byte {error.start})", "save it as UTF-8", str(path))
        return None
    node = read_text(text, str(path), problems)
    if node is None:
        return None
    if isinstance(node, Map):
        return node
    if isinstance(node, Scalar) and not node.text and not node.quoted:
        return Map({}, Place(str(path), 1))
    what = "a list" if isinstance(node, List) else "one text"
    problems.append(
        Problem(
            key="",
            message=f"the file holds {what} and no mapping",
            suggestion="write 'key: value' lines, with a blank after the colon",
            file=str(path),
            line=node.place.line,
        )
    )
    return None


def read_text(text: str, file: str, problems: list[Problem], place: Place | None = None) -> Node | None:
    """YAML text as nodes. `place`: where everything stands, if not at lines of `file`. None: it is no YAML."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        problems.append(_fault(error, text, file, place))
        return None
    if root is None:
        return Scalar("", place or Place(file, 1))
    before = len(problems)
    node = _Builder(file, problems, place).build(root, place or Place(file, root.start_mark.line + 1), "")
    return None if len(problems) > before and place is not None else node


def _fault(error: yaml.YAMLError, text: str, file: str, place: Place | None) -> Problem:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    what = str(getattr(error, "problem", None) or error).strip()
    line = mark.line if mark is not None else None
    lines = text.splitlines()
    written = lines[line] if line is not None and line < len(lines) else ""
    message, suggestion = f"this is no YAML: {what}", "check brackets, quotes and indentation near here"
    if "\\t" in what:
        message, suggestion = "a tab stands where only blanks may", "indent with blanks"
    elif "another document" in what:
        message, suggestion = "the file holds several documents", "keep one, without '---' in between"
    elif "could not find expected ':'" in what:
        message, suggestion = "a key without ': ' stands near here", "write 'key: value', with a blank after the colon"
    elif "undefined alias" in what:
        suggestion = "text that begins with * needs quotes"
    elif "${" in written and ("," in what or "flow" in str(error)):
        message, suggestion = "${...} cannot stand bare inside brackets", "quote it: '${...}'"
    elif "mapping values are not allowed" in what:
        suggestion = "text that holds ': ' needs quotes, and keys of one section the same indentation"
    elif "cannot start any token" in what:
        suggestion = "quote text that begins with a special character"
    if place is not None:
        return Problem(key="", message=message, suggestion=suggestion, file=place.file, line=place.line)
    return Problem(key="", message=message, suggestion=suggestion, file=file, line=None if line is None else line + 1)


class _Builder:
    """Turns PyYAML's nodes into ours, collecting problems."""

    def __init__(self, file: str, problems: list[Problem], place: Place | None) -> None:
        self.file, self.problems, self.fixed = file, problems, place
        self.open: set[int] = set()

    def build(self, node: yaml.Node, place: Place, key: str) -> Node:
        if node.tag not in _KNOWN_TAGS:
            self.refuse(key, place, f"the tag '{node.tag}' is not read here", "leave the tag out")
            return Scalar("", place)
        if isinstance(node, yaml.ScalarNode):
            # `!!str 7` asks for text as quotes do.
            quoted = node.style is not None or (
                node.tag == _TEXT and _implicit.resolve(yaml.ScalarNode, node.value, (True, False)) != _TEXT
            )
            return Scalar(node.value, place, quoted)
        if id(node) in self.open:
            self.refuse(key, place, "it contains itself by an alias", "write it out")
            return Scalar("", place)
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                items = enumerate(node.value)
                return List([self.build(item, self.place(item), f"{key}[{i}]") for i, item in items], place)
            assert isinstance(node, yaml.MappingNode)
            return self.mapping(node, place, key)
        finally:
            self.open.discard(id(node))

    def mapping(self, node: yaml.MappingNode, place: Place, key: str) -> Map:
        entries: dict[str, Entry] = {}
        merged: dict[str, Entry] = {}
        for key_node, value_node in node.value:
            at = self.place(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                self.refuse(key, at, "a list or mapping cannot be a key", "write one word before the colon")
                continue
            name = key_node.value
            path = f"{key}.{name}" if key else name
            if key_node.tag == _MERGE:
                for source in value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]:
                    base = self.build(source, at, path)
                    if isinstance(base, Map):
                        merged = {**base.entries, **merged}
                    else:
                        self.refuse(path, at, "only a mapping can be merged in", "write '<<: *name' of a mapping")
                continue
            if node.flow_style and self.is_unspaced(key_node, value_node):
                left, _, right = name.partition(":")
                written = shortened(f"{left}: {right}")
                self.refuse(key, at, f"'{{{name}}}' has no blank after the colon", f"write {{{written}}}")
                continue
            if name in entries:
                first = entries[name].key.place.line
                where = f", first in line {first}" if first else ""
                self.refuse(path, at, f"the key is given twice{where}", "keep one of them")
                continue
            typed = Scalar(name, at, quoted=key_node.style is not None)
            entries[name] = Entry(typed, self.build(value_node, at, path))
        return Map({**merged, **entries}, place)

    @staticmethod
    def is_unspaced(key: yaml.ScalarNode, value: yaml.Node) -> bool:
        """`{a:1}`, which YAML reads as the key 'a:1' with nothing in it."""
        is_empty = isinstance(value, yaml.ScalarNode) and value.style is None and not value.value
        return is_empty and key.style is None and ":" in key.value

    def place(self, node: yaml.Node) -> Place:
        return self.fixed or Place(self.file, node.start_mark.line + 1)

    def refuse(self, key: str, place: Place, message: str, suggestion: str) -> None:
        self.problems.append(Problem(key=key, message=message, suggestion=suggestion, file=place.file, line=place.line))
