"""Progress as plain lines, for log files, pipes and batch jobs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from fasttrain.observe import text
from fasttrain.observe.observer import Observer, RunInfo

FREE_LINES = 20
LATER_EVERY_S = 1.0


class PlainProgress(Observer):
    """A line at the start, one for each note and each remark, at most one a log point, and one at the end; flushed at once.

    No carriage return, no colour, ASCII. The last evaluation and the last save are told on the next line, so the number
    of lines is known beforehand. After 20 lines at most one a second is printed, and always that of the last step. A
    reader that goes away (a closed pipe) ends the printing, not the training.
    """

    def __init__(self, stream: TextIO, now: Callable[[], float] = time.monotonic) -> None:
        self._stream: TextIO | None = stream
        self._now = now
        self._left = text.TimeLeft(now)
        self._unit = "samples"
        self._notes: dict[str, str] = {}
        self._lines = 0
        self._printed_at = -LATER_EVERY_S

    def started(self, run: RunInfo) -> None:
        """Say what begins."""
        self._unit = run.unit
        ranks = "1 rank" if run.world_size == 1 else f"{run.world_size} ranks"
        if run.total_steps is None:
            steps = f"steps from {run.start_step + 1} on, to the end of the data"
        elif run.start_step >= run.total_steps:
            steps = f"all {run.total_steps} steps were made before"
        elif run.start_step:
            steps = f"steps {run.start_step + 1} to {run.total_steps} (resumed)"
        else:
            steps = f"{run.total_steps} steps"
        blocks = f", {found}," if (found := text.blocks(run.blocks)) else ""
        folder = f", in {text.near(run.dir)}" if run.dir is not None else ""
        size = text.parameters(run.parameters, run.trainable)
        self._print(
            f"start {run.name}/{run.id}: {run.model}, {size}{blocks} on {run.device}, {ranks}, batch {run.batch_size}, "
            f"{steps}{folder}"
        )
        for note in run.notes:
            self._print(note)

    def stepped(self, record: Mapping[str, Any]) -> None:
        """Print the line of a log point, unless there were many a second."""
        left = self._left.at(record)
        now = self._now()
        total = record["total_steps"]
        is_last = total is not None and record["step"] >= total
        if self._lines >= FREE_LINES and now - self._printed_at < LATER_EVERY_S and not is_last:
            return
        self._lines, self._printed_at = self._lines + 1, now
        parts = [
            f"step {record['step']}" + (f"/{total}" if total is not None else ""),
            f"loss {text.figure(record.get('loss'))}",
        ]
        if record.get("epoch") is not None:
            parts.insert(1, f"epoch {record['epoch']:.2f}")
        parts.append(f"lr {text.rate_of_learning(record.get('lr'))}")
        parts.append(text.speed(record, self._unit))
        if record.get("memory"):
            parts.append(text.size(record["memory"]))
        if record.get("refused_steps"):
            parts.append(f"refused {record['refused_steps']:g}")
        parts.append(f"left {text.span(left)}")
        self._print("  ".join([*parts, *self._notes.values()]))
        self._notes.clear()

    def evaluated(self, record: Mapping[str, Any]) -> None:
        """Keep the metrics for the next line."""
        metrics = " ".join(f"{name} {text.figure(value)}" for name, value in record["metrics"].items())
        self._note("evaluation", f"| evaluation at step {record['step']}: {metrics}")

    def remarked(self, record: Mapping[str, Any]) -> None:
        """Say it at once, on a line of its own."""
        self._print(f"step {record['step']}: {record['text']}")

    def saved(self, record: Mapping[str, Any]) -> None:
        """Keep the save for the next line."""
        self._note("saved", f"| saved step {record['step']}")

    def _note(self, kind: str, note: str) -> None:
        """Keep the last of each kind: a line stays a line where many fall between two log points."""
        self._notes.pop(kind, None)
        self._notes[kind] = note

    def failed(self, error: BaseException, summary: Mapping[str, Any]) -> None:
        """Say how far the run came."""
        lines = str(error).splitlines()
        self._end("failed", summary, f": {type(error).__name__}{': ' + lines[0] if lines else ''}")

    def finished(self, summary: Mapping[str, Any]) -> None:
        """Say what came of it."""
        why = f" ({summary['reason']})" if summary.get("reason") else ""
        self._end(str(summary.get("status") or "done"), summary, why)

    def _end(self, status: str, summary: Mapping[str, Any], more: str) -> None:
        parts = [f"step {summary.get('steps', text.UNKNOWN)}", f"loss {text.figure(summary.get('final_loss'))}"]
        metrics = [f"{name} {text.figure(value)}" for name, value in (summary.get("metrics") or {}).items()]
        if metrics:
            parts.append("evaluation " + " ".join(metrics))
        parts += [text.speed(summary, self._unit), f"in {text.span(summary.get('wall_s'))}"]
        # Metrics stand in the summary already; a save that no line told of yet is told here.
        parts += [note for kind, note in self._notes.items() if kind == "saved"]
        self._print(f"end {status}{more}: " + "  ".join(parts))

    def _print(self, line: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(line.encode("ascii", "backslashreplace").decode() + "\n")
            self._stream.flush()
        except (OSError, ValueError):  # the reader is gone, or the stream was closed
            self._stream = None
