"""Text to numbers, booleans and null. Each function gives `None` (or `UNTYPED`) where the text is no such thing."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

# What OmegaConf calls a value that must be given.
MANDATORY = "???"
NULLS = frozenset({"", "~", "null", "Null", "NULL"})
TRUE = frozenset({"true", "yes", "on", "1"})
FALSE = frozenset({"false", "no", "off", "0"})
# A word that people write for null, and that YAML takes for text. It is refused wherever that could be meant.
NONE = "None"

_WHOLE = re.compile(r"[-+]?[0-9]+(?:_[0-9]+)*")
_BASED = re.compile(r"[-+]?0(?:[xX][0-9a-fA-F]+|[oO][0-7]+|[bB][01]+)")
_DECIMAL = re.compile(r"[-+]?(?:[0-9]+(?:_[0-9]+)*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"([-+]?)\.?(inf|infinity|nan)", re.IGNORECASE)
# YAML 1.2's core schema, and thousands set apart by underscores. Leading zeros make an identifier, not a number.
_PLAIN_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*|[1-9][0-9]{0,2}(?:_[0-9]{3})+)|0x[0-9a-fA-F]+|0o[0-7]+")
_PLAIN_FLOAT = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)?\.[0-9]+|(?:0|[1-9][0-9]*)\.?)(?:[eE][-+]?[0-9]+)?")
_PLAIN_SPECIAL = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_MOST_DIGITS = 40


def to_int(text: str) -> int | None:
    """A whole number: `1000`, `1_000`, `1e3`, `10.0`, `0x1f`; never `2.5`.

    >>> to_int("1e3"), to_int("10.0"), to_int("2.5")
    (1000, 10, None)
    """
    if _WHOLE.fullmatch(text):
        return int(text)
    if _BASED.fullmatch(text):
        return int(text, 0)
    if _DECIMAL.fullmatch(text):
        try:
            number = Decimal(text)
        except InvalidOperation:
            return None
        # 1e999999999 would fill the memory with digits.
        if number.adjusted() < _MOST_DIGITS and number == number.to_integral_value():
            return int(number)
    return None


def to_float(text: str) -> float | None:
    """A number: `1e-3`, `0.001`, `1_000`, `inf`, `.inf`, `nan`.

    >>> to_float("1e-3"), to_float("1/3")
    (0.001, None)
    """
    if _DECIMAL.fullmatch(text):
        return float(text)
    special = _SPECIAL.fullmatch(text)
    return float(special[1] + special[2]) if special else None


def to_bool(text: str) -> bool | None:
    """true, yes, on, 1, or false, no, off, 0, in any case of letters.

    >>> to_bool("no"), to_bool("On"), to_bool("maybe")
    (False, True, None)
    """
    word = text.lower()
    return True if word in TRUE else False if word in FALSE else None


def to_plain(text: str) -> Any:
    """The value of unquoted text where the field has no type, by the rules of YAML 1.2: `no` and `12:30` are text.

    >>> to_plain("1e-3"), to_plain("no"), to_plain("007"), to_plain("true"), to_plain("~")
    (0.001, 'no', '007', True, None)
    """
    if text in NULLS:
        return None
    if text in {"true", "True", "TRUE"}:
        return True
    if text in {"false", "False", "FALSE"}:
        return False
    if _PLAIN_INT.fullmatch(text):
        return int(text, 0)
    if _PLAIN_FLOAT.fullmatch(text) or _PLAIN_SPECIAL.fullmatch(text):
        return to_float(text)
    return text
