"""Which checkpoints a run folder holds. Complete ones alone: a half-written one has another name and no manifest."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True, order=True)
class Checkpoint:
    """A complete checkpoint: its step and its folder."""

    step: int
    path: Path

    @property
    def bytes(self) -> int:
        """Bytes of all its files."""
        return sum(file.stat().st_size for file in self.path.iterdir())

    @property
    def missing(self) -> list[str]:
        """Files of the manifest that are absent or of another size."""
        try:
            manifest = json.loads((self.path / MANIFEST).read_text())
        except (OSError, ValueError):
            return [MANIFEST]
        files = {name: self.path / name for name in manifest["files"]}
        return [n for n, f in files.items() if not f.is_file() or f.stat().st_size != manifest["files"][n]["bytes"]]


def checkpoints_in(run: Path) -> list[Checkpoint]:
    """The checkpoints of a run folder by step, those with a manifest."""
    found = []
    for path in (run / "checkpoints").glob("step-*"):
        match = _NAME.fullmatch(path.name)
        if match and (path / MANIFEST).is_file():
            found.append(Checkpoint(int(match[1]), path))
    return sorted(found)


def newest(run: Path) -> Checkpoint | None:
    """The whole checkpoint of the highest step. Where none is whole, the damaged one: reading it says what it lacks."""
    found = checkpoints_in(run)
    return next((checkpoint for checkpoint in reversed(found) if not checkpoint.missing), found[-1] if found else None)


def prune(run: Path, keep: int | None) -> list[Checkpoint]:
    """Remove all but the newest `keep` whole checkpoints; returns those removed."""
    gone = [checkpoint for checkpoint in checkpoints_in(run) if not checkpoint.missing][:-keep] if keep else []
    for checkpoint in gone:
        # First out of sight, so that a removal that is cut short leaves no checkpoint that looks complete.
        hidden = checkpoint.path.with_name(checkpoint.path.name + ".gone")
        checkpoint.path.rename(hidden)
        shutil.rmtree(hidden)
    return gone
