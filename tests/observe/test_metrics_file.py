from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fasttrain.errors import RunError
from fasttrain.observe import LoggedImage, MetricsFile
from fasttrain.observe.metrics_file import read_metrics
from tests.observe.helpers import record, run_info


def strict(path: Path) -> list[dict[str, Any]]:
    """Each line, by a reader that takes valid JSON alone."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def steps(folder: Path, *numbers: int, start: int = 0) -> MetricsFile:
    observer = MetricsFile()
    observer.started(run_info(folder, start_step=start))
    for number in numbers:
        observer.stepped(record(number))
        if number % 2 == 0:
            observer.evaluated({"step": number, "epoch": 1.0, "metrics": {"accuracy": 0.5}, "seconds": 1.0})
    return observer


def killed(observer: MetricsFile) -> None:
    """The process is gone without a word; the system closes its files."""
    observer._file.close()


def test_each_logged_step_and_each_evaluation_is_a_line_that_is_there_at_once(tmp_path: Path) -> None:
    observer = steps(tmp_path, 1, 2)
    lines = strict(tmp_path / "metrics.jsonl")
    assert lines[0] == record(1)
    assert lines[2] == {"step": 2, "epoch": 1.0, "seconds": 1.0, "evaluation": {"accuracy": 0.5}}
    assert len(lines) == 3
    observer.finished({})


def test_what_is_not_finite_is_null_and_named(tmp_path: Path) -> None:
    observer = steps(tmp_path)
    observer.stepped(record(1, loss=math.nan, lr=[0.1, math.inf], grad_norm=np.float32(-math.inf)))
    observer.evaluated({"step": 1, "epoch": 1.0, "metrics": {"loss": math.nan}, "seconds": 1.0})
    observer.finished({})
    step, evaluation = strict(tmp_path / "metrics.jsonl")
    assert (step["loss"], step["lr"], step["grad_norm"]) == (None, [0.1, None], None)
    assert step["nonfinite"] == {"loss": "nan", "lr.1": "inf", "grad_norm": "-inf"}
    assert evaluation["evaluation"] == {"loss": None}
    assert evaluation["nonfinite"] == {"evaluation.loss": "nan"}


def test_images_are_no_part_of_a_line(tmp_path: Path) -> None:
    observer = steps(tmp_path)
    observer.stepped(record(1, drawn=LoggedImage(array=np.zeros((2, 2)))))
    assert "drawn" not in strict(tmp_path / "metrics.jsonl")[0]
    observer.finished({})


def test_after_a_resume_each_step_stands_once(tmp_path: Path) -> None:
    killed(steps(tmp_path, 1, 2, 3, 4, 5, 6))
    steps(tmp_path, 4, 5, 6, start=3).finished({})
    lines = strict(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "evaluation" in line] == [2, 4, 6]


def test_a_run_begun_anew_starts_a_new_file(tmp_path: Path) -> None:
    killed(steps(tmp_path, 1, 2, 3))
    steps(tmp_path, 1).finished({})
    assert [line["step"] for line in strict(tmp_path / "metrics.jsonl")] == [1]


def test_a_line_torn_by_a_kill_is_dropped_and_what_follows_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    steps(tmp_path, 1, 2).finished({})
    whole = path.read_bytes()
    for length in range(1, 60, 7):
        path.write_bytes(whole + b'{"step": 3, "loss": 0.123, "lr": 0.1, "grad_norm": 0.4}'[:length])
        assert [line["step"] for line in read_metrics(path)] == [1, 2, 2]
        steps(tmp_path, 3, start=2).finished({})
        assert [line["step"] for line in strict(path)] == [1, 2, 2, 3]


def test_a_kill_in_the_middle_of_a_run_leaves_whole_lines(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from tests.observe.test_metrics_file import steps;"
        "steps(Path(sys.argv[1]), 1, 3, 5); os.kill(os.getpid(), 9)"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=root, check=False).returncode == -9
    assert [line["step"] for line in strict(tmp_path / "metrics.jsonl")] == [1, 3, 5]


def test_a_failure_while_dropping_lines_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps(tmp_path, 1, 3, 5).finished({})
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(RunError, match=r"metrics\.jsonl, which cannot be written \(No space left.*run\.dir=PATH"):
        steps(tmp_path, start=3)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


class FullDisk:
    """A file on a disk that takes half a line and then is full, until there is room again."""

    def __init__(self, file: Any) -> None:
        self.file, self.full = file, True

    def write(self, line: bytes) -> int:
        if not self.full:
            return self.file.write(line)
        self.file.write(line[: len(line) // 2])
        raise OSError(28, "No space left on device")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def test_a_full_disk_costs_lines_and_neither_the_training_nor_the_file(tmp_path: Path) -> None:
    observer = steps(tmp_path, 1)
    observer._file = disk = FullDisk(observer._file)
    with pytest.warns(RuntimeWarning, match=r"metrics\.jsonl cannot be written.*the training goes on"):
        observer.stepped(record(3))
    observer.stepped(record(5))  # told once
    disk.full = False
    observer.stepped(record(7))
    observer.finished({})
    assert [line["step"] for line in strict(tmp_path / "metrics.jsonl")] == [1, 7]


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    observer = MetricsFile()
    observer.started(run_info(None))
    observer.stepped(record(1))
    observer.finished({})
    assert list(tmp_path.iterdir()) == []
