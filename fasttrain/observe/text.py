"""Numbers as people read them, and how much time is left."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

UNKNOWN = "-"


def figure(value: Any) -> str:
    """A loss or metric in steady width.

    >>> figure(0.42131), figure(1234.5), figure(3e-7), figure(float("nan")), figure(None)
    ('0.4213', '1234.5', '3.00e-07', 'nan', '-')
    """
    if value is None:
        return UNKNOWN
    if isinstance(value, str | bool):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return " ".join(rate_of_learning(item) for item in value)
    size = abs(value)
    if not math.isfinite(size):
        return str(value)
    if size >= 1e6 or 0 < size < 1e-3:
        return f"{value:.2e}"
    return f"{value:.4f}" if size < 100 else f"{value:.1f}"


def rate_of_learning(value: Any) -> str:
    """A learning rate; several parameter groups show one when they agree, and of more than two the range.

    >>> rate_of_learning(0.0003), rate_of_learning([0.1, 0.1]), rate_of_learning([0.1, 0.01])
    ('3.00e-04', '1.00e-01', '1.00e-01 1.00e-02')
    >>> rate_of_learning([0.02, 0.0001, 0.015])
    '1.00e-04..2.00e-02'
    """
    if isinstance(value, list | tuple):
        different = list(dict.fromkeys(rate_of_learning(item) for item in sorted(value, reverse=True)))
        return " ".join(different) or UNKNOWN if len(different) < 3 else f"{different[-1]}..{different[0]}"
    return UNKNOWN if value is None else f"{value:.2e}"


def count(value: float | None) -> str:
    """A large number in short: 11.2 M.

    >>> count(950), count(11_200_000), count(7e9)
    ('950', '11.2 M', '7.00 B')
    """
    if value is None:
        return UNKNOWN
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            scaled = value / (1e3 if letter == "k" else size)
            return f"{scaled:.3g} {letter}" if scaled >= 10 else f"{scaled:.2f} {letter}"
    return f"{value:,.0f}"


def parameters(all_of_them: int, trainable: int) -> str:
    """How large a model is; and how much of it trains, if not all does.

    >>> parameters(11_200_000, 11_200_000), parameters(5_640_000, 149_000)
    ('11.2 M parameters', '5.64 M parameters (149 k train)')
    """
    told = f"{count(all_of_them)} parameters"
    return told if trainable == all_of_them else f"{told} ({count(trainable)} train)"


def blocks(found: Mapping[str, int]) -> str:
    """The blocks of a model; of more than two classes the most frequent ones.

    >>> blocks({"Bottleneck": 16}), blocks({"A": 2, "B": 3, "C": 5}), blocks({})
    ('16 Bottleneck', '5 C + 3 B + 2 others', '')
    """
    told = sorted(found.items(), key=lambda item: -item[1])
    named = [f"{number} {kind}" for kind, number in told[:2]]
    others = sum(number for _, number in told[2:])
    return " + ".join([*named, f"{others} others"] if others else named)


def rate(value: float | None) -> str:
    """Something a second, in three or more digits.

    >>> rate(12345.6), rate(45.67), rate(0.5234)
    ('12,346', '45.7', '0.52')
    """
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def size(value: int | None) -> str:
    """Bytes.

    >>> size(2_254_857_830), size(512)
    ('2.10 GiB', '512 B')
    """
    if value is None:
        return UNKNOWN
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if value >= 1 << power:
            scaled = value / (1 << power)
            return (
                f"{scaled:.0f} {unit}"
                if scaled >= 100
                else f"{scaled:.3g} {unit}"
                if scaled >= 10
                else f"{scaled:.2f} {unit}"
            )
    return f"{value} B"


def span(seconds: float | None) -> str:
    """A length of time as a clock shows it.

    >>> span(45), span(200), span(3800), span(180_000)
    ('0:45', '3:20', '1:03:20', '2d 02:00:00')
    """
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    whole = max(0, round(seconds))
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    if days:
        return f"{days}d {hours:02}:{minutes:02}:{rest:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def short_time(seconds: float | None) -> str:
    """A step's or a save's time.

    >>> short_time(0.0123), short_time(2.5), short_time(200), short_time(0.00004)
    ('12.3 ms', '2.5 s', '3:20', '40.0 µs')
    """
    if seconds is None:
        return UNKNOWN
    if seconds >= 100:
        return span(seconds)
    if seconds >= 1:
        return f"{seconds:.1f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.1f} µs"


def near(path: Path | str) -> str:
    """A path as one would type it from here."""
    full = os.path.abspath(path)
    relative = os.path.relpath(full) if os.path.splitdrive(full)[0] == os.path.splitdrive(os.getcwd())[0] else full
    return full if relative.startswith("..") else relative


def speed(record: Mapping[str, Any], unit: str) -> str:
    """What a run gets done a second, in the unit it counts in: '1,234 tokens/s'."""
    key = f"{unit}_per_s"
    if record.get(key) is None:
        unit, key = "samples", "samples_per_s"
    return f"{rate(record.get(key))} {unit}/s"


class TimeLeft:
    """Seconds a run will still take, evaluations and saves among them: the rate since the first log point."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._first: tuple[int, float] | None = None

    def at(self, record: Mapping[str, Any]) -> float | None:
        """Seconds left at a log point; `None` while nobody can tell."""
        step, now = record["step"], self._now()
        if self._first is None:
            self._first = (step, now)
        if record["total_steps"] is None:
            return None
        left = record["total_steps"] - step
        steps = step - self._first[0]
        if steps > 0:
            return left * (now - self._first[1]) / steps
        step_time = record.get("step_time_s")
        return None if step_time is None and left else left * (step_time or 0.0)
