"""Values back to plain data and to YAML that any reader takes the same way."""

from __future__ import annotations

import enum
import json
import math
import os
import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from decimal import Decimal
from typing import Any

import yaml

from fasttrain.config.text import MANDATORY, NONE, to_bool, to_plain

# Settings that name and report a run and do not change what is trained.
_UNHASHED = ("run", "resume", "log")


def plain(value: Any) -> Any:
    """A value as dicts, lists, text, numbers, booleans and None. Other objects become their text."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value) if f.init}
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {key if isinstance(key, str | int) else str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, AbstractSet):
        return [plain(item) for item in sorted(value, key=str)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return str(value)


class _Dumper(yaml.SafeDumper):
    """Block mappings, lists of scalars on one line, no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _float(dumper: _Dumper, value: float) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:float", float_text(value))


def float_text(value: float) -> str:
    """A float that YAML 1.1, YAML 1.2 and people read alike: `0.001`, `1.0e-08`.

    >>> float_text(1e-3), float_text(1e-8), float_text(1e20)
    ('0.001', '1.0e-08', '1.0e+20')
    """
    if math.isnan(value):
        return ".nan"
    if math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    text = repr(value)
    if "e" not in text:
        return text
    if 1e-6 <= abs(value) < 1e16:
        return format(Decimal(text), "f")
    # Without the point, YAML 1.1 takes 1e-08 for text.
    return text if "." in text else text.replace("e", ".0e")


def escaped(text: str) -> str:
    """Text in which `${` is the characters themselves and no reference."""
    return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", text)


def _text(dumper: _Dumper, value: str) -> yaml.Node:
    value = escaped(value)
    is_other = not isinstance(to_plain(value), str) or to_bool(value) is not None or value == NONE
    is_number_like = value[:1].isdigit() or value[:1] in set("+-.")
    # In single quotes PyYAML folds the rarer line breaks into blanks; double quotes escape them.
    style = '"' if not value.isprintable() else "'" if is_other or is_number_like or value == MANDATORY else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


def _list(dumper: _Dumper, value: list[Any]) -> yaml.Node:
    is_flat = not any(isinstance(item, dict | list) for item in value)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=is_flat)


_Dumper.add_representer(float, _float)
_Dumper.add_representer(str, _text)
_Dumper.add_representer(list, _list)


def to_yaml(data: Mapping[str, Any]) -> str:
    """Plain data as YAML. Text that could be taken for something else is quoted; `${` is escaped."""
    return yaml.dump(
        dict(data), Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=math.inf
    )


def digest(data: Mapping[str, Any]) -> str:
    """Twelve hexadecimal digits of what decides a training: the resolved config without names, logging and resume.

    A slot that is off counts like one left out, but for `data_parallel`, where leaving it out asks for a default.
    """
    kept = {
        key: value
        for key, value in data.items()
        if key not in _UNHASHED and (value is not None or key == "data_parallel")
    }
    # Imported here: OpenSSL takes a tenth of the time of a check, which needs no digest.
    import hashlib

    text = json.dumps(_with_text_keys(kept), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _with_text_keys(value: Any) -> Any:
    """Keys of several types cannot be sorted; and 1 and "1" must stay two keys."""
    if isinstance(value, dict):
        return {json.dumps(key): _with_text_keys(item) for key, item in value.items()}
    return [_with_text_keys(item) for item in value] if isinstance(value, list) else value
