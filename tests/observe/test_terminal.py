from __future__ import annotations

import fcntl
import logging
import os
import re
import struct
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

from fasttrain.observe import PlainProgress, TerminalProgress, default_observers, screen, terminal
from tests.observe.helpers import Clock, record, run_info

_TOKEN = re.compile(r"\x1b\[([0-9;]*)([A-Za-z])|([\r\n])|([^\x1b\r\n])")


class Screen:
    """A terminal: a pseudo terminal for the program, and what a person would see on it.

    As in most terminals, rows that are too long after a resize are wrapped.
    """

    patch: pytest.MonkeyPatch

    def __init__(self, width: int) -> None:
        self.reading, writing = os.openpty()
        os.set_blocking(self.reading, False)
        self.stream: TextIO = open(writing, "w", encoding="utf-8")  # noqa: SIM115
        self.rows, self.row, self.column, self.drawings = [""], 0, 0, 0
        self.resize(width)

    def be_standard_output(self) -> None:
        """To be called in the test itself: pytest puts its own stream there after the fixtures."""
        self.patch.setattr(sys, "stdout", self.stream)

    def resize(self, width: int) -> None:
        self.width = width
        fcntl.ioctl(self.stream.fileno(), termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
        rows: list[str] = []
        for i, row in enumerate(self.rows):
            pieces = [row[at : at + width] for at in range(0, max(len(row), 1), width)]
            rows += pieces
            if i == self.row:
                row_of_cursor = len(rows) - 1
                self.column = len(pieces[-1])
        self.rows, self.row = rows, row_of_cursor

    def text(self) -> str:
        """What stands on the screen."""
        while True:
            try:
                data = os.read(self.reading, 1 << 16)
            except BlockingIOError:
                break
            self.drawings += 1
            for match in _TOKEN.finditer(data.decode()):
                self._take(*match.groups())
        return "\n".join(row.rstrip() for row in self.rows)

    def _take(self, number: str | None, command: str | None, motion: str | None, letter: str | None) -> None:
        if command == "A":
            self.row -= int(number or 1)
            assert self.row >= 0
        elif command == "K":
            assert number == "2"
            self.rows[self.row] = ""
        elif command is not None:
            assert command == "m", f"an unknown command: {command}"
        elif motion == "\r":
            self.column = 0
        elif motion == "\n":
            self._next_row()
        elif letter is not None:
            if self.column == self.width:
                self.column = 0
                self._next_row()
            row = self.rows[self.row].ljust(self.column)
            self.rows[self.row] = row[: self.column] + letter + row[self.column + 1 :]
            self.column += 1

    def _next_row(self) -> None:
        self.row += 1
        if self.row == len(self.rows):
            self.rows.append("")


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    made = Screen(100)
    made.patch = monkeypatch
    yield made
    monkeypatch.undo()
    os.close(made.reading)
    made.stream.close()


def started(shown: Screen, clock: Clock, **changes: Any) -> TerminalProgress:
    shown.be_standard_output()
    observer = TerminalProgress(shown.stream, clock)
    observer.started(run_info(Path("runs/digits/one"), **changes))
    return observer


def step(observer: TerminalProgress, clock: Clock, *steps: int) -> None:
    for number in steps:
        clock.wait(1)
        observer.stepped(record(number))


def test_the_display_is_two_lines_in_place_below_a_header(shown: Screen) -> None:
    clock = Clock()
    observer = started(shown, clock)
    assert "first steps under way" in shown.text()
    step(observer, clock, 10, 20, 30)
    rows = shown.text().splitlines()
    observer.finished({})
    assert rows[1:7] == [
        "  digits  one",
        "  model   ResNet   11.2 M parameters   8 BasicBlock",
        "  device  cpu   1 rank",
        "  batch   8 samples a step",
        "  length  100 steps   an epoch 10",
        "  folder  runs/digits/one",
    ]
    bar, figures = rows[-2:]
    assert "30%   step  30/100   epoch 3.00   left 0:07" in bar
    assert " ".join(figures.split()) == "loss 0.0333 lr 1.00e-01 grad norm 1.5000 16.0 samples/s memory 1.00 GiB"
    assert sum("step" in row for row in rows[8:]) == 1
    assert "first steps" not in "".join(rows)


def test_evaluations_and_saves_stay_above_the_display(shown: Screen) -> None:
    clock = Clock()
    observer = started(shown, clock)
    step(observer, clock, 10)
    observer.evaluated({"step": 10, "epoch": 1.0, "metrics": {"accuracy": 0.5, "loss": 2.0}, "seconds": 1.5})
    step(observer, clock, 20)
    observer.saved({"step": 20, "path": "checkpoints/step-20", "bytes": 3 << 20, "seconds": 0.25})
    step(observer, clock, 30)
    rows = shown.text().splitlines()
    observer.finished({})
    assert rows[8] == "  evaluated   step  10   accuracy 0.5000   loss 2.0000   in 1.5 s"
    assert rows[9] == "  saved       step  20   3.00 MiB   in 250 ms"
    assert len(rows) == 13
    assert "step  30/100" in rows[-2]


def test_a_remark_stays_above_the_display_broken_between_words(shown: Screen) -> None:
    clock = Clock()
    observer = started(shown, clock)
    step(observer, clock, 10)
    text = "compile=blocks: a step takes 1.31 x the time of eager code, 12.3 ms against 9.4 ms; drop it: compile=null"
    observer.remarked({"step": 10, "text": text})
    step(observer, clock, 20)
    rows = shown.text().splitlines()
    observer.finished({})
    assert rows[8].startswith("  note        step  10   compile=blocks: a step takes ")
    assert " ".join(" ".join(rows[8:10]).split()).endswith(text)
    assert "step  20/100" in rows[-2]


def test_what_the_program_prints_and_logs_stands_whole_above_the_display(shown: Screen) -> None:
    clock = Clock()
    shown.be_standard_output()
    handler = logging.StreamHandler(sys.stdout)
    logging.root.addHandler(handler)
    try:
        observer = started(shown, clock)
        step(observer, clock, 10)
        print("a line of the user's")
        logging.getLogger("user").warning("a line of a handler made before")
        step(observer, clock, 20)
        rows = shown.text().splitlines()
        observer.finished({"status": "done"})
        assert handler.stream is sys.stdout
    finally:
        logging.root.removeHandler(handler)
    assert rows[8:10] == ["a line of the user's", "a line of a handler made before"]
    assert "step  20/100" in rows[-2]
    assert sys.stdout is shown.stream


@pytest.mark.parametrize("width", [60, 44, 27])
def test_a_window_made_narrower_or_wider_keeps_no_pieces(shown: Screen, width: int) -> None:
    clock = Clock()
    observer = started(shown, clock)
    step(observer, clock, 10, 20)
    shown.text()
    for new, number in ((width, 30), (100, 40), (width, 50)):
        shown.resize(new)
        step(observer, clock, number)
        rows = shown.text().splitlines()
        assert sum(bool(re.search(r"step +\d+/100", row)) for row in rows) == 1
        assert sum(row.startswith("  loss ") for row in rows) == 1
        assert f"step  {number}/100" in "".join(rows)
        assert len(rows[-2]) < new
    observer.finished({})
    assert "/100" not in shown.text()


@pytest.mark.parametrize("width", range(12, 140))
def test_no_line_of_the_display_reaches_the_edge(width: int) -> None:
    figures = record(73, total_steps=2_000_000, loss=1.234e-9, refused_steps=12, samples_per_s=1_234_567.0)
    for line in screen.progress_lines(figures, 987_654, "samples", width, screen.Widths()):
        assert line.cell_len < width
    assert all(line.cell_len < width for line in screen.waiting_lines("first steps under way", width))


def test_a_narrow_window_keeps_what_matters_most() -> None:
    bar, figures = (line.plain for line in screen.progress_lines(record(30), 7, "samples", 50, screen.Widths())[1:])
    assert "step  30/100" in bar
    assert "left 0:07" in bar
    assert " ".join(figures.split()) == "loss 0.0333 lr 1.00e-01 16.0 samples/s"


def test_a_value_that_grows_shorter_does_not_move_its_neighbours() -> None:
    widths = screen.Widths()
    places = []
    for speed in (9.5, 12_345.0, 99.0):
        line = screen.progress_lines(record(30, samples_per_s=speed), 7, "samples", 110, widths)[2].plain
        places.append(line.index("memory"))
    assert places[1] == places[2]


def test_the_bar_is_full_at_the_end_and_never_before() -> None:
    for done in range(100):
        assert set(screen.bar(done / 100, 40).plain) != {"━"}
        assert len(screen.bar(done / 100, 40).plain) == 40
    assert set(screen.bar(1.0, 40).plain) == {"━"}


def test_it_draws_at_most_five_times_a_second_but_always_the_last_step(shown: Screen) -> None:
    clock = Clock()
    observer = started(shown, clock, total_steps=100)
    drawn = []
    observer._live.refresh = lambda: drawn.append(observer._record["step"])
    for number in range(1, 101):
        clock.wait(0.01)
        observer.stepped(record(number))
    assert drawn == [1, 21, 41, 61, 81, 100] or drawn == [1, 22, 43, 64, 85, 100]
    observer.finished({})


def test_the_summary_takes_the_place_of_the_display(shown: Screen) -> None:
    clock = Clock()
    observer = started(shown, clock)
    step(observer, clock, 100)
    observer.finished(
        {
            "status": "done",
            "steps": 100,
            "final_loss": 0.25,
            "metrics": {"accuracy": 0.75},
            "wall_s": 100.0,
            "startup_s": 2.5,
            "compile_s": 0.0,
            "samples_per_s": 1234.0,
            "step_time_s": {"p50": 0.0125, "p95": 0.25},
            "data_wait_fraction": 0.021,
            "peak_memory_bytes": {"allocated": None, "reserved": None, "rss": 3 << 30},
        }
    )
    rows = shown.text().splitlines()
    assert rows[rows.index("  done  100 steps in 1:40") :] == [
        "  done  100 steps in 1:40",
        "  loss        0.2500",
        "  evaluation  accuracy 0.7500",
        "  speed       1,234 samples/s   step p50 12.5 ms   step p95 250 ms",
        "  data wait   2.1% of the step time",
        "  peak        host 3.00 GiB",
        "  start-up    2.5 s",
        "  folder      runs/digits/one",
        "  curves      tensorboard --logdir runs/digits",
        "",
    ]
    assert not any("100/100" in row for row in rows)


def test_a_failed_run_says_why_and_gives_the_streams_back(shown: Screen) -> None:
    observer = started(shown, Clock())
    assert sys.stdout is not shown.stream
    observer.failed(RuntimeError("out of memory"), {"steps": 7})
    assert "  failed  7 steps\n  error   RuntimeError: out of memory\n" in shown.text()
    assert sys.stdout is shown.stream


def test_a_terminal_that_goes_away_ends_the_display_and_not_the_training(shown: Screen) -> None:
    clock = Clock()
    observer = started(shown, clock)

    def gone(text: str) -> int:
        raise OSError(5, "Input/output error")

    shown.stream.write = gone  # type: ignore[method-assign]
    step(observer, clock, 10, 20)
    observer.evaluated({"step": 20, "epoch": 1.0, "metrics": {"accuracy": 0.5}, "seconds": 1.5})
    observer.finished({"status": "done"})
    assert sys.stdout is shown.stream


def test_a_terminal_gets_the_live_display_and_anything_else_plain_lines(
    shown: Screen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def kinds(**arguments: Any) -> list[str]:
        return [type(observer).__name__ for observer in default_observers(**arguments)]

    shown.be_standard_output()
    files = ["SummaryFile", "MetricsFile", "TensorBoard"]
    assert kinds(is_main=True, run_dir=tmp_path) == [*files, "TerminalProgress"]
    assert kinds(is_main=True, run_dir=None) == ["TerminalProgress"]
    assert kinds(is_main=False, run_dir=tmp_path) == []
    with open(tmp_path / "out", "w") as file:
        assert kinds(is_main=True, run_dir=None, stream=file) == [PlainProgress.__name__]
    monkeypatch.setenv("TERM", "dumb")
    assert kinds(is_main=True, run_dir=None) == ["PlainProgress"]


def test_no_thread_draws(shown: Screen) -> None:
    import threading

    before = threading.active_count()
    observer = started(shown, Clock())
    shown.text()
    drawings = shown.drawings
    time.sleep(0.5)
    shown.text()
    assert shown.drawings == drawings
    assert threading.active_count() == before
    observer.finished({})
    assert terminal.REFRESH_S > 0
