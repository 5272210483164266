"""TensorBoard: curves by optimizer step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fasttrain.lazy import np
from fasttrain.observe.files import Forgiving, unwritable
from fasttrain.observe.observer import LoggedHistogram, LoggedImage, Observer, RunInfo

# What a record holds besides figures of training: its axis, and what has its own group of curves.
_AXIS = ("step", "total_steps", "samples", "measured")
EVENTS = "events.out.tfevents.*"
_SPEED = ("step_time_s", "data_wait_s", "warmup_s")


def curve(key: str) -> str | None:
    """The tag of a figure: `train/loss`, `speed/samples_per_s`, `memory/bytes`; a name with a slash stays.

    >>> curve("loss"), curve("tokens_per_s"), curve("gan/realism")
    ('train/loss', 'speed/tokens_per_s', 'gan/realism')
    """
    if key in _AXIS:
        return None
    if "/" in key:
        return key
    if key == "memory":
        return "memory/bytes"
    return f"speed/{key}" if key in _SPEED or key.endswith("_per_s") else f"train/{key}"


class TensorBoard(Observer):
    """Writes event files into the run folder: `tensorboard --logdir runs` shows all runs side by side.

    The axis is the optimizer step, for training and evaluation alike. Scalars: `train/...`, `speed/...`, `memory/...`,
    `evaluation/<metric>`, and whatever was logged; images and histograms; the config of each start as text. After a
    resume at step S what an earlier process wrote beyond S is purged, so no step occurs twice.
    """

    def __init__(self) -> None:
        self._writer: Any = None

    def started(self, run: RunInfo) -> None:
        """Open an event file and write the config."""
        if run.dir is None:
            return
        # Imported here: it costs as much as the rest of a start, and a run without a folder needs none of it.
        from torch.utils.tensorboard import SummaryWriter

        begin = run.start_step + 1 if run.start_step else 0
        starts = len(list(run.dir.glob(EVENTS)))
        wait_for_a_later_name(run.dir)
        try:
            self._writer = SummaryWriter(str(run.dir), purge_step=begin, flush_secs=5)
        except OSError as error:
            raise unwritable(run.dir, error) from error
        self._write = Forgiving(run.dir)
        # TensorBoard purges no text: it is numbered by the starts of the run, so that no number occurs twice.
        self._writer.add_text("config", _code(run.config_yaml), starts)
        self._writer.add_text("explain", _code(run.explain), starts)

    def stepped(self, record: Mapping[str, Any]) -> None:
        """Write the figures of a log point as one event."""
        if self._writer is not None:
            self._write(lambda: self._step(record["step"], record))

    def _step(self, step: int, record: Mapping[str, Any]) -> None:
        scalars: dict[str, float] = {}
        for key, value in record.items():
            tag = curve(key)
            if tag is None or value is None:
                continue
            if isinstance(value, LoggedImage):
                self._writer.add_image(tag, value.array, step, dataformats=value.layout)
            elif isinstance(value, LoggedHistogram):
                self._histogram(tag, value.array, step)
            else:
                scalars.update(_scalars(tag, value))
        self._scalars(scalars, step)

    def evaluated(self, record: Mapping[str, Any]) -> None:
        """Write the metrics of an evaluation."""
        if self._writer is not None:
            scalars: dict[str, float] = {}
            for name, value in record["metrics"].items():
                scalars.update(_scalars(f"evaluation/{name}", value))
            self._write(lambda: self._scalars(scalars, record["step"]))

    def remarked(self, record: Mapping[str, Any]) -> None:
        """Write a remark as text."""
        if self._writer is not None:
            self._write(lambda: self._writer.add_text("remarks", record["text"], record["step"]))

    def failed(self, error: BaseException, summary: Mapping[str, Any]) -> None:
        """Close the event file."""
        self._close()

    def finished(self, summary: Mapping[str, Any]) -> None:
        """Close the event file."""
        self._close()

    def _scalars(self, scalars: dict[str, float], step: int) -> None:
        if scalars:
            from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

            # One event for all figures of a step: a tenth of the time of an `add_scalar` each.
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
            self._writer.file_writer.add_summary(Summary(value=values), step)

    def _histogram(self, tag: str, array: Any, step: int) -> None:
        finite = np.asarray(array, dtype=np.float64).ravel()
        finite = finite[np.isfinite(finite)]
        if finite.size:  # TensorBoard raises on an empty histogram, and on values that no bin holds
            self._writer.add_histogram(tag, finite, step)

    def _close(self) -> None:
        if self._writer is not None:
            self._write(self._writer.close)
            self._writer = None


def _scalars(tag: str, value: Any) -> dict[str, float]:
    if isinstance(value, Mapping):
        return {k: v for key, item in value.items() for k, v in _scalars(f"{tag}/{key}", item).items()}
    if isinstance(value, list | tuple):
        return {k: v for i, item in enumerate(value) for k, v in _scalars(f"{tag}/{i}", item).items()}
    return {} if value is None or isinstance(value, str) else {tag: float(value)}


def _code(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def wait_for_a_later_name(folder: Path) -> None:
    """Wait until a new event file sorts behind the ones that are there (at most a second, after a quick restart).

    TensorBoard reads event files by name, and the name begins with the second. Two processes within one second are put
    in the order of their pids, as text: the purge of the second could then come first, and purge nothing.
    """
    newest = max((_second(path) for path in folder.glob(EVENTS)), default=0)
    while newest - 2 < (now := time.time()) < newest + 1:
        time.sleep(newest + 1 - now)


def _second(path: Path) -> int:
    part = path.name.split(".")[3]
    return int(part) if part.isdigit() else 0
