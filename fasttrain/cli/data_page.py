"""What `data` prints: plain lines, with a table of classes as bars on a terminal."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from fasttrain.observe import text

BAR = 24


def page(report: Mapping[str, Any], is_terminal: bool, listed: int) -> str:
    """The report as text; tables are drawn where it goes to a terminal."""
    lines: list[str] = []
    for name, part in report["parts"].items():
        lines += _part(name, part)
    if (both := report["in_both"]) is not None:
        part = any(part["looked_at"] != part["samples"] for part in report["parts"].values())
        lines.append(f"in training and evaluation: {both['count']:,} samples{' of those looked at' if part else ''}")
        lines += [f"  {train} = {held_out}" for train, held_out in both["first"]]
    told = "\n".join(lines) + "\n"
    if report["classes"]:
        told += _classes(report, is_terminal, listed)
    if report["loader"]:
        told += _rows(
            "samples/s of the loader",
            ["workers", "samples/s"],
            [[str(row["workers"]), text.rate(row["samples_per_s"])] for row in report["loader"]],
            is_terminal,
        )
    for sample in report["text"] or ():
        told += f"sample: {sample}\n"
    if report["sheet"]:
        told += f"sheet: {report['sheet']}\n"
    problems = report["problems"]
    told += f"{len(problems):,} problem{'s' if len(problems) > 1 else ''}\n" if problems else "nothing is wrong\n"
    return told + "".join(f"  {problem}\n" for problem in problems)


def _part(name: str, part: Mapping[str, Any]) -> list[str]:
    samples, seen = part["samples"], part["looked_at"]
    of = f"{seen:,} samples" if samples in (None, seen) else f"{samples:,} samples, the first {seen:,} looked at"
    lines = [f"{name}: {of}"]
    for entry, told in part["entries"].items():
        shape, _ = told["shapes"][0]
        others = told["different_shapes"] - 1
        shapes = f"[{', '.join(map(str, shape))}]" + (f" and {others:,} other shapes" if others else "")
        low, high = (text.figure(value) if "float" in told["dtype"] else f"{value:.0f}" for value in told["range"])
        lines.append(f"  {entry}: {told['dtype']} {shapes}, {low} to {high}")
        for start, end, count in (row for row in told["lengths"] or () if row[2]):
            lines.append(f"    length {start} to {end}: {count:,}")
    if part["repeated"]:
        lines.append(f"  {part['repeated']:,} samples are there more than once")
    return lines


def _classes(report: Mapping[str, Any], is_terminal: bool, listed: int) -> str:
    parts, names = report["parts"], report["class_names"]
    counts = {name: part["labels"] or {} for name, part in parts.items()}
    labels = sorted({int(label) for of_part in counts.values() for label in of_part} | set(range(report["classes"])))
    most = max((count for of_part in counts.values() for count in of_part.values()), default=1)
    shown = labels if len(labels) <= 2 * listed else labels[:listed]
    rows = []
    for label in shown:
        called = str(names[label]) if names is not None and 0 <= label < len(names) else ""
        held = [counts[name].get(str(label), 0) for name in parts]
        bar = "█" * round(BAR * held[0] / most) if is_terminal else ""
        rows.append([str(label), *([] if names is None else [called]), *(f"{count:,}" for count in held), bar])
    told = _rows(
        f"{report['classes']:,} classes", ["class", *([] if names is None else ["name"]), *parts, ""], rows, is_terminal
    )
    if len(shown) < len(labels):
        each = sorted(counts["train"].get(str(label), 0) for label in labels)
        told += f"and {len(labels) - len(shown):,} more; in training {each[0]:,} to {each[-1]:,} samples each\n"
    return told


def _rows(title: str, head: list[str], rows: list[list[str]], is_terminal: bool) -> str:
    """A table: drawn by rich on a terminal, words apart by two spaces elsewhere."""
    if not is_terminal:
        lines = [" ".join(cell for cell in row if cell) for row in rows]
        return f"{title} ({', '.join(name for name in head if name)}):\n" + "".join(f"  {line}\n" for line in lines)
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in head:
        table.add_column(name, justify="left" if name in ("name", "") else "right")
    for row in rows:
        table.add_row(*row)
    console = Console(file=(out := io.StringIO()), force_terminal=True)
    console.print(table)
    return out.getvalue()
