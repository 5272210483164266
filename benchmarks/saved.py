"""Figures of a benchmark, appended to its table with what they were measured on."""

from __future__ import annotations

import csv
import datetime
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent


def commit() -> str:
    """The commit that was measured."""
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()


def append(path: Path, rows: Sequence[Mapping[str, Any]], **about: Any) -> None:
    """Append rows to a CSV file, each after the date, the commit, torch's version, and what else there is to say about them.

    Raises:
        ValueError: the file has other columns.
    """
    common = {"date": datetime.date.today().isoformat(), "commit": commit(), "torch": torch.__version__, **about}
    columns = [*common, *rows[0]]
    new = not path.exists()
    if not new and (held := path.read_text().partition("\n")[0].strip().split(",")) != columns:
        raise ValueError(f"{path} has the columns {held}, and these rows {columns}; name another file.")
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns)
        if new:
            writer.writeheader()
        writer.writerows({**common, **row} for row in rows)
