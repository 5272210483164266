"""Files and folders that are there whole or not at all."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def made_beside(target: Path) -> Iterator[Path]:
    """A path beside `target` at which to make a file or folder, which then comes to its place by a rename.

    After an error nothing is left. Processes that make the same at once do not disturb each other: one of them is kept.

    Raises:
        OSError: it cannot be made there, or was not made.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as beside:
        made = Path(beside) / target.name
        yield made
        try:
            made.rename(target)
        except OSError:
            if not target.exists():  # otherwise another process was first
                raise
