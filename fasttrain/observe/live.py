"""A few lines at the bottom of a terminal that are drawn anew in place, without a thread.

`rich.live.Live` refreshes from a thread of its own or counts rows by the width at the last drawing, which leaves pieces
behind when the window was made narrower meanwhile. Here rows are counted by the width the terminal has now.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.control import Control
from rich.file_proxy import FileProxy
from rich.segment import ControlType, Segment
from rich.text import Text


class LiveLines(RenderHook):
    """Lines drawn by `draw(width)` below everything that is printed while they are open.

    What the program prints meanwhile (print, logging, warnings) appears above them.
    """

    def __init__(self, console: Console, draw: Callable[[int], list[Text]]) -> None:
        self._console = console
        self._draw = draw
        self._lengths: list[int] = []  # cells of each line on the screen
        self._lock = threading.RLock()
        self._streams: tuple[TextIO, TextIO] | None = None
        self._handlers: list[tuple[Any, Any]] = []

    def open(self) -> None:
        """Begin to draw, and take in what is printed."""
        self._console.push_render_hook(self)
        self._streams = (sys.stdout, sys.stderr)
        for name in ("stdout", "stderr"):
            if is_same_terminal(getattr(sys, name), self._console.file):
                setattr(sys, name, FileProxy(self._console, getattr(sys, name)))
        # Handlers made before now hold the streams themselves.
        for handler in logging.root.handlers:
            stream = getattr(handler, "stream", None)
            for old, new in zip(self._streams, (sys.stdout, sys.stderr), strict=True):
                if stream is old and new is not old and isinstance(handler, logging.StreamHandler):
                    self._handlers.append((handler, handler.setStream(new)))
        self.refresh()

    def refresh(self) -> None:
        """Draw the lines as they are now."""
        with self._console:
            self._console.print(Control())

    def close(self) -> None:
        """Take the lines away and give the streams back."""
        if self._streams is None:
            return
        try:
            for stream in (sys.stdout, sys.stderr):
                if isinstance(stream, FileProxy):
                    stream.flush()  # a line begun without its end
            self._draw = lambda width: []
            self.refresh()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Give the streams back and draw no more: what is left to do when the terminal is gone."""
        if self._streams is None:
            return
        for handler, stream in self._handlers:
            handler.setStream(stream)
        # Whoever replaced a stream meanwhile keeps what it put there.
        for name, stream in zip(("stdout", "stderr"), self._streams, strict=True):
            if isinstance(getattr(sys, name), FileProxy):
                setattr(sys, name, stream)
        self._handlers, self._streams = [], None
        self._console.pop_render_hook()

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Take the lines away, let rich print what it has, and draw them again (rich calls this)."""
        with self._lock:
            width = terminal_width(self._console)
            self._console.width = width
            erase = self._erase(width)
            lines = self._draw(width)
            self._lengths = [line.cell_len for line in lines]
            return [erase, *renderables, _Lines(lines)]

    def _erase(self, width: int) -> Control:
        if not self._lengths:
            return Control()
        rows = sum(max(1, -(-length // width)) for length in self._lengths)
        up: list[Any] = [(ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)] * (rows - 1)
        return Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2), *up)


class _Lines:
    """Lines without a line feed after the last, so the screen does not scroll."""

    def __init__(self, lines: list[Text]) -> None:
        self._lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for i, line in enumerate(self._lines):
            if i:
                yield Segment.line()
            yield from line.render(console)


def terminal_width(console: Console) -> int:
    """Columns of the terminal at this moment; `COLUMNS`, which a resize does not change, only where it is silent."""
    try:
        return os.get_terminal_size(console.file.fileno()).columns or console.width
    except (OSError, ValueError, AttributeError):
        return console.width


def is_same_terminal(one: Any, other: Any) -> bool:
    """Whether two streams are the same device."""
    try:
        return one.isatty() and os.fstat(one.fileno()).st_rdev == os.fstat(other.fileno()).st_rdev
    except (OSError, ValueError, AttributeError):
        return False
