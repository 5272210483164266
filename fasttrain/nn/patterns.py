"""Modules and weights of a model by patterns on their names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from fasttrain.errors import ConfigError


def modules_matching(model: Any, patterns: Iterable[str], setting: str) -> dict[str, Any]:
    """The modules whose names match one of some patterns (`head`, `layers.*.norm`; `*` spans points), by name.

    Containers that compute nothing (`ModuleList`, `ModuleDict`) stand for what they hold.

    Raises:
        ConfigError: a pattern matches no module; it names close ones.
    """
    named = {name: module for name, module in model.named_modules() if name}
    found: dict[str, Any] = {}
    for pattern in patterns:
        names = [name for name in named if fnmatchcase(name, pattern)]
        if not names:
            raise ConfigError(
                f"{setting}={pattern} matches no module of {type(model).__name__}; {_close(pattern, named)}"
            )
        for name in names:
            found.update(_computing(name, named[name]))
    return {name: module for name, module in named.items() if name in found}


def _computing(name: str, module: Any) -> dict[str, Any]:
    if type(module).__name__ not in ("ModuleList", "ModuleDict"):
        return {name: module}
    return {n: m for child, part in module.named_children() for n, m in _computing(f"{name}.{child}", part).items()}


def _close(pattern: str, names: Iterable[str]) -> str:
    names = list(names)
    wanted = pattern.replace("*", "").replace("..", ".").strip(".")
    last = {name.rpartition(".")[2]: name for name in reversed(names)}
    close = difflib.get_close_matches(wanted, names, n=3, cutoff=0.5)
    close += [last[n] for n in difflib.get_close_matches(wanted.rpartition(".")[2], last, n=3, cutoff=0.6)]
    shown = list(dict.fromkeys(close))[:3]
    if shown:
        return f"did you mean {' or '.join(repr(name) for name in shown)}?"
    return f"there are {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}; use names or patterns of these."


def ancestors(name: str) -> Iterator[str]:
    """A name and those of all that holds it, the name first.

    >>> list(ancestors("layer1.0.weight"))
    ['layer1.0.weight', 'layer1.0', 'layer1']
    """
    while name:
        yield name
        name = name.rpartition(".")[0]


def matches(name: str, pattern: str, anywhere: bool = False) -> bool:
    """Whether a pattern means a name, or a part of the model that holds it. `anywhere`: it may begin after any dot.

    >>> matches("layer1.0.weight", "layer1"), matches("layer1.0.weight", "layer1.*"), matches("layer1.0.weight", "weight")
    (True, True, False)
    >>> matches("blocks.0.q_proj", "q_proj", anywhere=True)
    True
    """
    given = (pattern, f"*.{pattern}") if anywhere else (pattern,)
    return any(fnmatchcase(part, one) for part in ancestors(name) for one in given)


def select(
    names: Iterable[str], patterns: Iterable[str], setting: str, anywhere: bool = False, what: str = "nothing"
) -> list[str]:
    """The names that at least one pattern means, in their order.

    Patterns are those of a shell (`*`, `?`, `[ab]`; `*` crosses dots), and the name of a part means all in it.

    Raises:
        ConfigError: a pattern means nothing; the message begins with `setting`, says that `what` is called so, and gives
            near names.
    """
    known, asked = list(names), list(patterns)
    for pattern in asked:
        if not any(matches(name, pattern, anywhere) for name in known):
            raise ConfigError(f"{setting}: {what} is called '{pattern}'; {_near(pattern, known, anywhere)}")
    return [name for name in known if any(matches(name, pattern, anywhere) for pattern in asked)]


def _near(pattern: str, known: list[str], anywhere: bool) -> str:
    if not known:
        return "there is nothing to choose from; leave it out."
    parts = dict.fromkeys(part for name in known for part in ancestors(name))
    if anywhere:
        parts = dict.fromkeys([*parts, *(part.rpartition(".")[2] for part in parts)])
    return _close(pattern, parts)
