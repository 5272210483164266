"""Files of a run folder: written whole or not at all, and always valid JSON."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fasttrain.errors import RunError

NONFINITE = "nonfinite"


def write_atomic(path: Path, text: str, *, durable: bool = False) -> None:
    """Write a text file so that a reader sees the old or the new content, never a part of it.

    A failed write leaves the old file and no temporary one. `durable=True` also waits for the disk (fsync), which
    takes milliseconds and makes the file survive a crash of the machine.

    Raises:
        OSError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def json_line(record: Mapping[str, Any]) -> str:
    """One line of valid JSON. NaN and infinity become null, and the key "nonfinite" says which was what.

    >>> json_line({"step": 3, "loss": float("nan")})
    '{"step": 3, "loss": null, "nonfinite": {"loss": "nan"}}'
    """
    return json.dumps(with_nonfinite(record), ensure_ascii=False, allow_nan=False)


def json_text(record: Mapping[str, Any]) -> str:
    """The same over several lines, for files that people open."""
    return json.dumps(with_nonfinite(record), ensure_ascii=False, allow_nan=False, indent=2) + "\n"


def with_nonfinite(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record as plain JSON values, with the key "nonfinite" naming what was NaN or infinite."""
    odd: dict[str, str] = {}
    content = {str(key): _plain(value, str(key), odd) for key, value in record.items()}
    if odd:
        content[NONFINITE] = odd
    return content


def _plain(value: Any, path: str, odd: dict[str, str]) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        odd[path] = "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{path}.{key}", odd) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}.{i}", odd) for i, item in enumerate(value)]
    # NumPy scalars have `item`; so do tensors, and reading one would wait for the device. The class tells them apart.
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        return _plain(value.item(), path, odd)
    return str(value)


def unwritable(path: Path, error: OSError) -> RunError:
    """The error to raise when a run folder cannot be written at the start."""
    return RunError(
        f"the run folder needs {path}, which cannot be written ({error.strerror or error}); make room or give the "
        "right to write there, or choose another folder with run.dir=PATH."
    )


class Forgiving:
    """Runs writes of a run that is under way: a failing disk costs a line of the log, not the training.

    The first failure is told as a warning; writing goes on being tried.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failures = 0

    def __call__(self, write: Callable[[], None]) -> bool:
        """Whether the write went well."""
        try:
            write()
        except OSError as error:
            self.failures += 1
            if self.failures == 1:
                warnings.warn(
                    f"{self.path} cannot be written ({error.strerror or error}): the training goes on, its log has a "
                    "gap until there is room again.",
                    RuntimeWarning,
                    stacklevel=3,
                )
            return False
        return True
