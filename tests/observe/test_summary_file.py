from __future__ import annotations

import json
import math
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from fasttrain.errors import RunError
from fasttrain.observe import SummaryFile, summary_file
from fasttrain.observe.process import has_died, identity
from tests.observe.helpers import Clock, record, run_info

WANTED = {
    "status", "steps", "epochs", "samples", "final_loss", "metrics", "wall_s", "startup_s", "compile_s", "step_time_s",
    "samples_per_s", "data_wait_fraction", "peak_memory_bytes", "world_size", "device", "torch", "config_hash",
}  # fmt: skip


def read(folder: Path) -> dict[str, Any]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads((folder / "summary.json").read_text(), parse_constant=refuse)


def begun(folder: Path, clock: Clock) -> SummaryFile:
    observer = SummaryFile(clock)
    observer.started(run_info(folder))
    return observer


def test_the_folder_says_from_the_start_what_the_run_is_and_who_runs_it(tmp_path: Path) -> None:
    begun(tmp_path / "digits" / "one", Clock())
    folder = tmp_path / "digits" / "one"
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.yaml",
        "environment.json",
        "explain.txt",
        "summary.json",
    ]
    assert (folder / "config.yaml").read_text() == "batch_size: 8\n"
    assert (folder / "explain.txt").read_text() == "forward: precision=bf16\n"
    assert json.loads((folder / "environment.json").read_text()) == {"versions": {"torch": "2.14"}}
    summary = read(folder)
    assert summary["status"] == "running"
    assert (summary["pid"], summary["host"], summary["started_at"]) == (os.getpid(), socket.gethostname(), 100.0)
    assert set(summary) >= WANTED


def test_it_is_refreshed_at_log_points_every_few_seconds_at_most(tmp_path: Path) -> None:
    clock = Clock()
    observer = begun(tmp_path, clock)
    seen = []
    for step in range(1, 13):
        clock.wait(1)
        observer.stepped(record(step))
        seen.append(read(tmp_path)["steps"])
    assert seen == [0, 0, 3, 3, 3, 6, 6, 6, 9, 9, 9, 12]
    assert read(tmp_path)["wall_s"] == 12


def test_the_final_summary_holds_what_the_trainer_gave_and_every_key(tmp_path: Path) -> None:
    observer = begun(tmp_path, Clock())
    observer.finished({"status": "stopped", "steps": 40, "final_loss": 0.5, "metrics": {"accuracy": 0.75}})
    summary = read(tmp_path)
    assert summary["status"] == "stopped"
    assert (summary["steps"], summary["final_loss"], summary["metrics"]) == (40, 0.5, {"accuracy": 0.75})
    assert set(summary) >= WANTED
    assert set(summary_file.KEYS) == WANTED


def test_remarks_are_kept_at_once_and_stay_to_the_end(tmp_path: Path) -> None:
    summary = SummaryFile()
    summary.started(run_info(tmp_path))
    assert read(tmp_path)["remarks"] == []
    remarks = [{"step": 3, "text": "two graph breaks"}, {"step": 9, "text": "slower than eager"}]
    for remark in remarks:
        summary.remarked(remark)
    assert read(tmp_path)["remarks"] == remarks
    summary.finished({"status": "done"})
    assert read(tmp_path)["remarks"] == remarks


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    observer = begun(tmp_path, Clock())
    try:
        raise RuntimeError("out of memory")
    except RuntimeError as error:
        observer.failed(error, {"steps": 7, "status": "running"})
    summary = read(tmp_path)
    assert (summary["status"], summary["steps"]) == ("failed", 7)
    assert summary["error"] == "RuntimeError: out of memory"
    assert "test_summary_file.py" in summary["traceback"]


def test_it_is_valid_json_whatever_the_figures(tmp_path: Path) -> None:
    observer = begun(tmp_path, Clock())
    observer.finished({"status": "done", "final_loss": math.nan, "metrics": {"loss": math.inf}, "path": Path("a/b")})
    summary = read(tmp_path)
    assert (summary["final_loss"], summary["metrics"], summary["path"]) == (None, {"loss": None}, "a/b")
    assert summary["nonfinite"] == {"final_loss": "nan", "metrics.loss": "inf"}


def test_a_write_that_fails_leaves_the_old_summary_and_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    observer = begun(tmp_path, clock)
    files = sorted(path.name for path in tmp_path.iterdir())

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    clock.wait(10)
    with pytest.warns(RuntimeWarning, match=r"summary\.json cannot be written.*the training goes on"):
        observer.stepped(record(10))
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    assert read(tmp_path)["steps"] == 0


def test_a_folder_that_cannot_be_written_is_told_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"config\.yaml|file.*run\.dir=PATH"):
        SummaryFile().started(run_info(tmp_path / "file" / "one"))


def test_a_process_is_known_by_its_number_and_its_start() -> None:
    me = identity()
    assert has_died(me) is False
    assert has_died({**me, "host": "elsewhere"}) is None
    assert has_died({**me, "pid_started": (me["pid_started"] or 0) + 1}) is True
    process = os.posix_spawn("/bin/true", ["true"], {})
    theirs = {**me, "pid": process, "pid_started": None}
    os.waitpid(process, 0)
    assert has_died(theirs) is True
