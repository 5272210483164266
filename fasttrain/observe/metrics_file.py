"""metrics.jsonl: a line for each logged step and each evaluation."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from fasttrain.observe.files import Forgiving, json_line, unwritable
from fasttrain.observe.observer import LoggedHistogram, LoggedImage, Observer, RunInfo

NAME = "metrics.jsonl"


class MetricsFile(Observer):
    """Writes `metrics.jsonl`: one valid JSON object a line, in the file as soon as it is known.

    A logged step gives its record; an evaluation gives `step`, `epoch`, `seconds` and its metrics under `evaluation`.
    NaN and infinity are null, named under `nonfinite`. Images and histograms are left to TensorBoard.

    After a resume at step S the lines beyond S are dropped before anything is added, so each step stands once; the file
    is replaced in one go. A last line torn by a kill is dropped too. A run that starts at step 0 starts a new file.
    """

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._end = 0  # bytes that hold whole lines

    def started(self, run: RunInfo) -> None:
        """Open the file, without the lines that this run will write again."""
        if run.dir is None:
            return
        path = run.dir / NAME
        try:
            run.dir.mkdir(parents=True, exist_ok=True)
            self._end = keep_until(path, run.start_step)
            # Unbuffered: each line is in the file when `write` returns, also if the process is killed then.
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise unwritable(path, error) from error
        self._write = Forgiving(path)

    def stepped(self, record: Mapping[str, Any]) -> None:
        """Add the line of a logged step."""
        self._add({k: v for k, v in record.items() if not isinstance(v, LoggedImage | LoggedHistogram)})

    def evaluated(self, record: Mapping[str, Any]) -> None:
        """Add the line of an evaluation."""
        line = {key: value for key, value in record.items() if key != "metrics"}
        self._add({**line, "evaluation": dict(record["metrics"])})

    def failed(self, error: BaseException, summary: Mapping[str, Any]) -> None:
        """Close the file."""
        self._close()

    def finished(self, summary: Mapping[str, Any]) -> None:
        """Close the file."""
        self._close()

    def _add(self, record: dict[str, Any]) -> None:
        file = self._file
        if file is None:
            return
        line = (json_line(record) + "\n").encode()

        def write() -> None:
            # A disk that filled up half way through a line leaves a piece of it: the next line starts where the last
            # whole one ended.
            file.truncate(self._end)
            if file.write(line) != len(line):
                raise OSError(28, "no space for a whole line")
            self._end += len(line)

        self._write(write)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def keep_until(path: Path, step: int) -> int:
    """Drop the lines beyond `step`, and what is no whole line; returns the bytes kept. `step=0` drops everything.

    The file is rewritten beside the old one and put in its place at once, so a kill leaves the one or the other.
    """
    if not path.exists():
        return 0
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as kept:
            for line, record in _lines(path) if step else ():
                if record["step"] <= step:
                    kept.write(line)
            size = kept.tell()
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return size


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; a torn line is left out."""
    return [record for _, record in _lines(path)]


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    with open(path, "rb") as file:
        for line in file:
            record = parse(line)
            if record is not None:
                yield line, record


def parse(line: bytes) -> dict[str, Any] | None:
    """The record of a whole line (it ends with a line feed), else `None`."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None
