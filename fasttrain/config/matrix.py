"""Which strategies go together: each is asked for its limits, so that the page of it is never out of date.

python -m fasttrain.config.matrix > docs/strategies/matrix.md
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import Any

from fasttrain.core.slots import SLOTS, position
from fasttrain.core.strategy import Clash, Strategy, conflicts
from fasttrain.errors import ConfigError
from fasttrain.registry import BUILT_IN, find

Pair = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """What cannot be used together, or alone (`other` is then `null`). `setting`: holds under this setting only."""

    slot: str
    name: str
    setting: str | None
    other_slot: str
    other: str
    why: str
    instead: str


def every_strategy() -> list[Pair]:
    """Slot and name of each built-in strategy, in the order of composition."""
    return sorted(((slot, name) for slot, table in BUILT_IN.items() for name in table), key=lambda p: position(p[0]))


def every_pair() -> list[tuple[Pair, Pair]]:
    """Two strategies of different slots, each pair once."""
    known = every_strategy()
    return [(one, other) for i, one in enumerate(known) for other in known[i + 1 :] if one[0] != other[0]]


def clash_of(one: Pair, other: Pair) -> Clash | None:
    """Why two strategies with their default settings cannot live together, even with everything else they need."""
    pair = {slot: (cls := find(slot, name), _default(cls)) for slot, name in (one, other)}
    return next((clash for _, clash in conflicts(pair) if clash.slot in pair), None)


def _default(cls: type[Strategy]) -> Any:
    """The default settings; None where there are none, as something has to be given."""
    try:
        return cls.Config()
    except (ConfigError, TypeError):
        return None


def _variants(cls: type[Strategy]) -> list[tuple[str | None, Any]]:
    """The default settings, and each that turns one yes-or-no setting over."""
    default = _default(cls)
    turned: list[tuple[str | None, Any]] = [(None, default)]
    if default is None:
        return turned
    for field in dataclasses.fields(default):
        value = getattr(default, field.name)
        if isinstance(value, bool):
            setting = f"{field.name}: {'false' if value else 'true'}"
            turned.append((setting, dataclasses.replace(default, **{field.name: not value})))
    return turned


def refusals() -> list[Refusal]:
    """Every declared limit between built-in strategies, those of special settings after those that always hold."""
    found: list[Refusal] = []
    for slot, name in every_strategy():
        cls = find(slot, name)
        always: set[tuple[str, str]] = set()
        for setting, config in _variants(cls):
            for clash in cls.clashes if config is None else cls.limits(config):
                others = [clash.name] if clash.name is not None else list(BUILT_IN.get(clash.slot, {}))
                for other in others:
                    if (clash.slot, other) in always:
                        continue
                    if setting is None:
                        always.add((clash.slot, other))
                    found.append(
                        Refusal(
                            slot=slot,
                            name=name,
                            setting=setting,
                            other_slot=clash.slot,
                            other=other,
                            why=clash.why.rstrip("."),
                            instead=clash.instead.rstrip("."),
                        )
                    )
    return found


def _table(rows: list[Refusal], heads: tuple[str, str]) -> list[str]:
    """A line a reason: those with the same reason against the same others stand together."""
    others: dict[tuple[str, str, str, str, str, str], list[str]] = {}
    for row in rows:
        setting = f" with `{row.setting}`" if row.setting else ""
        key = (row.slot, row.name, setting, row.other_slot, row.why, row.instead)
        others.setdefault(key, []).append(row.other)
    these: dict[tuple[str, str, str], dict[tuple[str, str], list[str]]] = {}
    for (slot, name, setting, other_slot, why, instead), named in others.items():
        same = these.setdefault((f"`{other_slot}`: {', '.join(named)}", why, instead), {})
        same.setdefault((slot, setting), []).append(name)
    lines = [f"| {heads[0]} | {heads[1]} | why | instead |", "|---|---|---|---|"]
    for (other, why, instead), same in these.items():
        who = "; ".join(f"`{slot}`: {', '.join(named)}{setting}" for (slot, setting), named in same.items())
        lines.append(f"| {who} | {other} | {why} | {instead} |")
    return lines


def to_markdown() -> str:
    """The page `docs/strategies/matrix.md`."""
    pairs = every_pair()
    refused = [pair for pair in pairs if clash_of(*pair) is not None]
    slots = [slot for slot in SLOTS if slot in BUILT_IN]
    told = refusals()
    lines = [
        "# Which strategies go together",
        "",
        f"{len(every_strategy())} strategies make {len(pairs)} pairs of different slots: {len(pairs) - len(refused)} train,",
        f"{len(refused)} are refused before the first step, with the reason and what to write instead. Made by",
        "`scripts/matrix` from what each strategy declares; `tests/test_laws.py` trains or refuses every pair.",
        "What a device lacks (TensorFloat-32, float8) is told on the device. What each saves and costs stands on the page",
        "of its slot; where a model does not fit, begin with [memory](../memory.md).",
        "",
        "## Refused",
        "",
        *_table([row for row in told if row.other != "null"], ("this", "not with")),
    ]
    needed = [row for row in told if row.other == "null"]
    if needed:
        lines += ["", "## Needed", "", *_table(needed, ("this", "not without (null is off)"))]
    lines += [
        "",
        "## Pairs that train, of all pairs, by slot",
        "",
        "| |" + "".join(f" {i + 1} |" for i in range(len(slots))),
        "|---|" + "---|" * len(slots),
    ]
    for i, slot in enumerate(slots):
        cells = []
        for j, other in enumerate(slots):
            between = [pair for pair in pairs if {pair[0][0], pair[1][0]} == {slot, other}]
            good = sum(pair not in refused for pair in between)
            cells.append("" if j <= i else str(good) if good == len(between) else f"**{good} of {len(between)}**")
        lines.append(f"| {i + 1} `{slot}` |" + "".join(f" {cell} |" for cell in cells))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(to_markdown())
