from __future__ import annotations

import io
import os
import subprocess
import sys
import textwrap
from pathlib import Path

from fasttrain.observe import Observer, PlainProgress
from tests.observe.helpers import Clock, record, run_info

ROOT = Path(__file__).parents[2]


def run(observer: Observer, clock: Clock, every: int = 10, seconds_a_step: float = 0.1) -> None:
    """A run of 100 steps, with an evaluation and a save at step 50 and at the end."""
    observer.started(run_info(Path("runs/digits/one")))
    for step in range(1, 101):
        clock.wait(seconds_a_step)
        if step % every == 0:
            observer.stepped(record(step))
        if step in (50, 100):
            observer.evaluated({"step": step, "epoch": step / 10, "metrics": {"accuracy": 0.5}, "seconds": 1.0})
            observer.saved({"step": step, "path": f"step-{step}", "bytes": 10, "seconds": 1.0})
    observer.finished(
        {"status": "done", "steps": 100, "final_loss": 0.01, "metrics": {"accuracy": 0.75}, "wall_s": 10.0}
    )


def lines_of(every: int = 10, seconds_a_step: float = 0.1) -> list[str]:
    stream, clock = io.StringIO(), Clock()
    run(PlainProgress(stream, clock), clock, every, seconds_a_step)
    assert stream.getvalue().endswith("\n")
    return stream.getvalue().splitlines()


def test_progress_1_a_file_holds_a_line_a_log_point_and_a_start_and_an_end(tmp_path: Path) -> None:
    script = """
        from tests.observe.helpers import Clock
        from tests.observe.test_plain import run
        from fasttrain.observe import default_observers
        import time

        (observer,) = default_observers(is_main=True, run_dir=None)
        run(observer, Clock())
    """
    out = tmp_path / "out"
    with open(out, "w") as file:
        subprocess.run([sys.executable, "-c", textwrap.dedent(script)], stdout=file, stderr=file, check=True, cwd=ROOT)
    content = out.read_bytes()
    assert content.count(b"\r") == 0
    assert content.count(b"\x1b") == 0
    lines = content.decode("ascii").splitlines()
    assert len(lines) == 12
    assert lines[0].startswith(
        "start digits/one: ResNet, 11.2 M parameters, 8 BasicBlock, on cpu, 1 rank, batch 8, 100 steps"
    )
    assert [line.split()[1] for line in lines[1:-1]] == [f"{step}/100" for step in range(10, 101, 10)]
    assert lines[-1].startswith("end done: step 100  loss 0.0100  evaluation accuracy 0.7500  ")


def test_progress_3_a_pipe_has_each_line_at_once_with_step_total_loss_and_time_left() -> None:
    script = """
        import sys
        from tests.observe.helpers import Clock, record, run_info
        from fasttrain.observe import default_observers

        (observer,) = default_observers(is_main=True, run_dir=None)
        observer.started(run_info())
        for step in (10, 20, 30):
            sys.stdin.readline()
            observer.stepped(record(step))
        sys.stdin.readline()
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        assert process.stdout.readline().startswith("start ")
        for step in (10, 20, 30):
            process.stdin.write("go\n")
            process.stdin.flush()
            # The process waits for the next word meanwhile: only a line that was flushed at once arrives.
            line = process.stdout.readline()
            assert line.startswith(f"step {step}/100  ")
            assert f"loss {1 / step:.4f}" in line
            assert "  left " in line
        process.stdin.close()
        assert process.stdout.read() == ""
    assert process.returncode == 0


def test_the_time_left_is_that_of_the_steps_still_to_come() -> None:
    lines = lines_of(every=10, seconds_a_step=6.0)
    # The first log point knows the step time alone (0.5 s); later ones the pace of the run, 6 s a step.
    assert "left 0:45" in lines[1]
    assert "left 8:00" in lines[2]
    assert "left 0:00" in lines[10]


def test_evaluations_and_saves_are_told_on_the_next_line() -> None:
    lines = lines_of()
    assert "evaluation at step 50: accuracy 0.5000 | saved step 50" in lines[6].replace("  |", " |")
    assert "saved step 100" in lines[-1]
    assert not any("evaluation" in line for line in lines[1:6])


def test_a_remark_is_a_line_of_its_own_at_once() -> None:
    stream = io.StringIO()
    progress = PlainProgress(stream)
    progress.started(run_info())
    progress.remarked({"step": 3, "text": "compile=blocks: 2 graph breaks."})
    assert stream.getvalue().splitlines()[1:] == ["step 3: compile=blocks: 2 graph breaks."]


def test_frequent_log_points_give_twenty_lines_and_then_one_a_second_and_the_last() -> None:
    lines = lines_of(every=1, seconds_a_step=0.25)[1:-1]
    steps = [int(line.split()[1].split("/")[0]) for line in lines]
    assert steps == [*range(1, 21), *range(24, 101, 4)]
    fast = lines_of(every=1, seconds_a_step=0.001)[1:-1]
    assert [line.split()[1] for line in fast[20:]] == ["100/100"]


def test_a_reader_that_goes_away_ends_the_printing_and_not_the_training() -> None:
    reading, writing = os.pipe()
    clock = Clock()
    with open(writing, "w") as stream:
        observer = PlainProgress(stream, clock)
        observer.started(run_info())
        os.close(reading)
        for step in (10, 20):
            observer.stepped(record(step))
        observer.finished({"status": "done"})
        # What could not be written is thrown away before the stream is closed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def test_a_failed_run_says_how_far_it_came_and_why() -> None:
    stream = io.StringIO()
    observer = PlainProgress(stream, Clock())
    observer.started(run_info())
    observer.failed(RuntimeError("out of memory\nmore"), {"status": "failed", "steps": 7, "final_loss": float("nan")})
    assert stream.getvalue().splitlines()[-1].startswith("end failed: RuntimeError: out of memory: step 7  loss nan")


def test_a_name_that_the_stream_cannot_write_is_escaped() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    PlainProgress(stream, Clock()).started(run_info(name="größe"))
    assert raw.getvalue().startswith(rb"start gr\xf6\xdfe/one")


def test_a_resumed_run_says_where_it_goes_on() -> None:
    stream = io.StringIO()
    PlainProgress(stream, Clock()).started(run_info(start_step=40))
    assert "steps 41 to 100 (resumed)" in stream.getvalue()


def test_a_run_that_has_no_step_left_does_not_count_backwards() -> None:
    stream = io.StringIO()
    PlainProgress(stream, Clock()).started(run_info(start_step=100))
    assert "all 100 steps were made before" in stream.getvalue()


def test_of_many_evaluations_between_two_log_points_the_last_is_told() -> None:
    stream = io.StringIO()
    observer = PlainProgress(stream, Clock())
    observer.started(run_info())
    for step in (3, 6, 9):
        observer.evaluated({"step": step, "metrics": {"accuracy": step / 10}})
        observer.saved({"step": step})
    observer.stepped(record(10))
    line = stream.getvalue().splitlines()[-1]
    assert line.endswith("| evaluation at step 9: accuracy 0.9000  | saved step 9")
    assert line.count("|") == 2


def test_the_head_says_how_much_of_a_model_trains_and_the_end_why_a_run_stopped() -> None:
    stream = io.StringIO()
    observer = PlainProgress(stream, Clock())
    observer.started(run_info(trainable=149_000))
    observer.stepped(record(10, lr=[0.02, 1e-4, 0.015, 0.01]))
    observer.finished({"status": "stopped", "reason": "SIGTERM", "steps": 10, "final_loss": 0.1})
    head, step, end = stream.getvalue().splitlines()
    assert head.startswith("start digits/one: ResNet, 11.2 M parameters (149 k train), 8 BasicBlock, on cpu")
    assert "  lr 1.00e-04..2.00e-02  " in step
    assert end.startswith("end stopped (SIGTERM): step 10  loss 0.1000")
