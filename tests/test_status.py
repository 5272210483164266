from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fasttrain.cli.status import inspect, resume_command, status
from fasttrain.observe import MetricsFile, Observer, SummaryFile
from tests.observe.helpers import record, run_info

ROOT = Path(__file__).parents[1]


def begun(folder: Path, *steps: int, **changes: Any) -> list[Observer]:
    """A run that has logged these steps and still runs."""
    observers: list[Observer] = [SummaryFile(), MetricsFile()]
    for observer in observers:
        observer.started(run_info(folder, name=folder.parent.name, id=folder.name, **changes))
        for step in steps:
            observer.stepped(record(step))
    return observers


def ended(folder: Path, state: str, *steps: int, **summary: Any) -> None:
    for observer in begun(folder, *steps):
        if state == "failed":
            observer.failed(RuntimeError("out of memory"), summary)
        else:
            observer.finished({"status": state, **summary})


def killed(folder: Path, *steps: int) -> None:
    """A run whose process was killed."""
    code = (
        "import os, sys; from pathlib import Path; from tests.test_status import begun;"
        "kept = begun(Path(sys.argv[1]), *map(int, sys.argv[2:]), world_size=2); os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", code, str(folder.resolve()), *map(str, steps)]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -9


def told(capsys: pytest.CaptureFixture[str], run: Path) -> tuple[int, dict[str, Any]]:
    code = status(run, as_json=True)
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


RUN = Path("runs/digits/one")


def test_a_run_under_way_is_running_with_its_newest_figures(capsys: pytest.CaptureFixture[str]) -> None:
    observers = begun(RUN, 10, 20)
    observers[1].evaluated({"step": 20, "epoch": 2.0, "metrics": {"accuracy": 0.5}, "seconds": 1.0})
    code, report = told(capsys, RUN)
    observers[1].finished({})
    assert code == 0
    assert (report["status"], report["step"], report["total_steps"], report["loss"]) == ("running", 20, 100, 0.05)
    assert (report["metrics"], report["samples_per_s"], report["alive"]) == ({"accuracy": 0.5}, 16.0, True)
    assert 0 <= report["last_line_age_s"] < 60
    assert report["resume"] is None


def test_a_run_whose_process_is_gone_died_and_says_how_to_resume(capsys: pytest.CaptureFixture[str]) -> None:
    killed(RUN, 10, 20)
    code, report = told(capsys, RUN)
    assert (code, report["status"], report["step"], report["alive"]) == (1, "died", 20, False)
    command = "torchrun --nproc-per-node 2 -m fasttrain --config runs/digits/one/config.yaml resume=auto run.id=one"
    assert report["resume"] == command
    status(RUN, as_json=False)
    out = capsys.readouterr().out
    assert f"resume       {command}\n" in out
    assert "is gone, without a word" in out


def test_a_run_of_another_host_is_taken_at_its_word(capsys: pytest.CaptureFixture[str]) -> None:
    killed(RUN, 10)
    summary = json.loads((RUN / "summary.json").read_text())
    (RUN / "summary.json").write_text(json.dumps({**summary, "host": "elsewhere"}))
    code, report = told(capsys, RUN)
    assert (code, report["status"], report["alive"]) == (0, "running", None)
    status(RUN, as_json=False)
    assert "another host" in capsys.readouterr().out


@pytest.mark.parametrize(("state", "code"), [("done", 0), ("stopped", 75), ("failed", 1)])
def test_the_exit_code_tells_how_a_run_ended(state: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    ended(RUN, state, 10, steps=40, final_loss=0.25, metrics={"accuracy": 0.75})
    got, report = told(capsys, RUN)
    assert (got, report["status"], report["step"], report["loss"]) == (code, state, 40, 0.25)
    assert report["metrics"] == {"accuracy": 0.75}
    assert (report["resume"] is None) == (state == "done")


def test_a_person_reads_the_same_as_lines(capsys: pytest.CaptureFixture[str]) -> None:
    ended(
        RUN, "stopped", 10, steps=40, final_loss=0.25, metrics={"accuracy": 0.75}, samples_per_s=1234.0,
        step_time_s={"p50": 0.0125, "p95": 0.02}, reason="signal SIGTERM",
    )  # fmt: skip
    checkpoint = RUN / "checkpoints" / "step-40"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    (RUN / "checkpoints" / "step-50.partial").mkdir()
    assert status(RUN, as_json=False) == 75
    lines = capsys.readouterr().out.splitlines()
    assert lines.pop(6).startswith("last line    0:0")
    assert lines == [
        "run          runs/digits/one",
        "status       stopped",
        "progress     step 40/100 (40%)",
        "loss         0.2500",
        "metrics      accuracy 0.7500",
        "speed        1,234 samples/s, 12.5 ms a step",
        "checkpoints  1, newest step-40",
        "reason       signal SIGTERM",
        "resume       python -m fasttrain --config runs/digits/one/config.yaml resume=auto run.id=one",
    ]


def test_a_failed_run_shows_the_first_line_of_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    ended(RUN, "failed", 10, steps=10)
    status(RUN, as_json=False)
    assert "error        RuntimeError: out of memory\n" in capsys.readouterr().out


def test_the_folder_of_a_name_means_its_newest_run(capsys: pytest.CaptureFixture[str]) -> None:
    for name, started in (("b", 200.0), ("a", 300.0), ("c", 100.0)):
        folder = Path("runs/digits") / name
        ended(folder, "done", 10)
        summary = json.loads((folder / "summary.json").read_text())
        (folder / "summary.json").write_text(json.dumps({**summary, "started_at": started}))
    assert told(capsys, Path("runs/digits"))[1]["run"] == "runs/digits/a"
    assert told(capsys, Path("digits"))[1]["run"] == "runs/digits/a"


def test_a_config_means_the_newest_run_of_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    ended(Path("out/mine/one"), "done", 10)
    config = Path("mine.yaml")
    config.write_text("batch_size: 8\nsteps: 100\nrun: {dir: out, name: mine}\n")
    assert told(capsys, config)[1]["run"] == "out/mine/one"
    assert told(capsys, Path("out/mine/one/config.yaml"))[1]["run"] == "out/mine/one"
    unnamed = Path("mine.yaml")
    unnamed.write_text("trainer: tests.helpers:Mlp\nbatch_size: 8\nrun: {dir: out}\n")
    assert told(capsys, unnamed)[1]["run"] == "out/mine/one"


def test_no_such_run_is_a_wrong_request_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    ended(RUN, "done", 10)
    for wrong, right in (
        ("runs/digts", "runs/digits"),
        ("runs/digits/on", "runs/digits/one"),
        ("digit", "runs/digits"),
    ):
        assert status(Path(wrong), as_json=False) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert f"status of {wrong}: there is no run in it; did you mean '{right}'?" in captured.err
    code, report = told(capsys, Path("runs/digts"))
    assert (code, report["status"]) == (2, None)
    assert "did you mean 'runs/digits'" in report["error"]


def test_no_run_anywhere_says_where_runs_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(Path("runs/digits"), as_json=False) == 2
    assert "a run writes runs/<name>/<id> when it starts" in capsys.readouterr().err


def test_a_log_torn_at_its_end_is_read_up_to_there() -> None:
    ended(RUN, "stopped", 10, 20)
    summary = json.loads((RUN / "summary.json").read_text())
    (RUN / "summary.json").write_text(json.dumps({**summary, "status": "running"}))
    with open(RUN / "metrics.jsonl", "a") as file:
        file.write('{"step": 30, "lo')
    report = inspect(RUN, now=os.stat(RUN / "metrics.jsonl").st_mtime + 90)
    assert (report["step"], report["loss"], report["last_line_age_s"]) == (20, 0.05, 90)


def test_the_resume_command_can_be_pasted_into_a_shell() -> None:
    command = resume_command(Path("my runs/digits/one"), {"world_size": 1})
    assert command == "python -m fasttrain --config 'my runs/digits/one/config.yaml' resume=auto run.id=one"
