"""The observers a run has unless told otherwise."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TextIO

from fasttrain.observe.metrics_file import MetricsFile
from fasttrain.observe.observer import Observer
from fasttrain.observe.plain import PlainProgress
from fasttrain.observe.summary_file import SummaryFile
from fasttrain.observe.tensorboard import TensorBoard
from fasttrain.observe.terminal import TerminalProgress


def default_observers(*, is_main: bool, run_dir: Path | None, stream: TextIO | None = None) -> list[Observer]:
    """The files of the run folder, and progress on `stream` (standard output); ranks other than 0 have none.

    A terminal gets the live display, anything else plain lines. Without a run folder nothing is written. Progress comes
    last: a folder that cannot be written is told before a display is open, and the end once all files are complete.
    """
    if not is_main:
        return []
    out = sys.stdout if stream is None else stream
    progress: Observer = TerminalProgress(out) if is_terminal(out) else PlainProgress(out)
    return [progress] if run_dir is None else [SummaryFile(), MetricsFile(), TensorBoard(), progress]


def is_terminal(stream: TextIO) -> bool:
    """Whether lines on this stream can be drawn anew."""
    try:
        return stream.isatty() and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):  # no stream at all, or a closed one
        return False
