"""The live display of a run in a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from fasttrain.observe.observer import Observer, RunInfo
from fasttrain.observe.text import TimeLeft

if TYPE_CHECKING:
    from rich.text import Text

REFRESH_S = 0.2


class TerminalProgress(Observer):
    """Two lines that are drawn anew in place: bar, step, epoch, time left; loss, learning rate, speed, memory.

    Evaluations and saves stay as lines above them, and so does whatever the program prints. Drawn at log points alone,
    at most five times a second, by no thread of its own; a drawing takes about 0.3 ms. Narrow windows leave
    out the less important figures. A terminal that goes away ends the display, not the training.
    """

    def __init__(self, stream: TextIO, now: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._now = now
        self._left = TimeLeft(now)
        self._drawn_at = float("-inf")
        self._record: Mapping[str, Any] | None = None
        self._seconds_left: float | None = None
        self._run: RunInfo | None = None
        self._live: Any = None

    def started(self, run: RunInfo) -> None:
        """Print what begins, and open the display."""
        # rich is imported here: plain runs and `validate` do without it.
        from rich.console import Console

        from fasttrain.observe import screen
        from fasttrain.observe.live import LiveLines, terminal_width

        self._run, self._screen, self._width = run, screen, terminal_width
        self._widths = screen.Widths()
        self._console = Console(file=self._stream, highlight=False)
        self._live = LiveLines(self._console, self._draw)
        self._show(lambda: self._console.print(screen.header(run, terminal_width(self._console))))
        self._show(lambda: self._live.open())

    def stepped(self, record: Mapping[str, Any]) -> None:
        """Draw the figures of a log point."""
        self._record, self._seconds_left = record, self._left.at(record)
        now = self._now()
        total = record["total_steps"]
        if now - self._drawn_at >= REFRESH_S or (total is not None and record["step"] >= total):
            self._drawn_at = now
            self._show(lambda: self._live.refresh())

    def evaluated(self, record: Mapping[str, Any]) -> None:
        """Print the metrics of an evaluation."""
        self._event(self._screen.evaluation, record)

    def remarked(self, record: Mapping[str, Any]) -> None:
        """Print a remark."""
        self._event(self._screen.remark, record)

    def saved(self, record: Mapping[str, Any]) -> None:
        """Print a save."""
        self._event(self._screen.save, record)

    def _event(self, text_of: Callable[..., Text], record: Mapping[str, Any]) -> None:
        def show() -> None:
            assert self._run is not None
            width = self._width(self._console)
            self._console.print(text_of(record, self._run.total_steps, width))

        self._show(show)

    def failed(self, error: BaseException, summary: Mapping[str, Any]) -> None:
        """Print how far the run came; the error itself is told by whoever catches it."""
        self._end("failed", summary, error)

    def finished(self, summary: Mapping[str, Any]) -> None:
        """Print what came of the run."""
        self._end(str(summary.get("status") or "done"), summary, None)

    def _end(self, status: str, summary: Mapping[str, Any], error: BaseException | None) -> None:
        self._show(lambda: self._live.close())
        self._show(
            lambda: self._console.print(
                self._screen.ending(status, summary, self._run, self._width(self._console), error)
            )
        )
        self._live = None

    def _draw(self, width: int) -> list[Text]:
        if self._record is None or self._run is None:
            return self._screen.waiting_lines("first steps under way", width)
        return self._screen.progress_lines(
            self._record, self._seconds_left, self._run.unit, width, self._widths, self._console.options.ascii_only
        )

    def _show(self, show: Callable[[], None]) -> None:
        if self._live is None:
            return
        try:
            show()
        except (OSError, ValueError):  # the terminal is gone
            self._live.abandon()
            self._live = None
