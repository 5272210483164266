from __future__ import annotations

import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what tensorboard itself imports
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fasttrain.observe import LoggedHistogram, LoggedImage, TensorBoard
from fasttrain.observe.tensorboard import wait_for_a_later_name
from tests.observe.helpers import record, run_info


def events(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "histograms": 0}).Reload()


def points(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events(folder).Scalars(tag)]


def steps(folder: Path, *numbers: int, start: int = 0, finish: bool = True) -> None:
    """A process that logs these steps, evaluates at each even one, and ends or is killed."""
    observer = TensorBoard()
    observer.started(run_info(folder, start_step=start))
    for number in numbers:
        observer.stepped(record(number))
        if number % 2 == 0:
            observer.evaluated({"step": number, "epoch": 1.0, "metrics": {"accuracy": number / 100}, "seconds": 1.0})
    if finish:
        observer.finished({})
    else:
        observer._writer.flush()


def test_tb_axis_1_a_step_of_four_microbatches_is_one_point(tmp_path: Path) -> None:
    losses, k = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], 4
    observer = TensorBoard()
    observer.started(run_info(tmp_path))
    for step in range(1, len(losses) // k + 1):
        of_step = losses[k * (step - 1) : k * step]
        observer.stepped(record(step, loss=sum(of_step) / k))
    observer.finished({})
    assert points(tmp_path, "train/loss") == [(1, 2.5), (2, 6.5)]


def test_tb_axis_2_training_and_evaluation_share_the_axis_of_optimizer_steps(tmp_path: Path) -> None:
    steps(tmp_path, 1, 2, 3, 4)
    assert [step for step, _ in points(tmp_path, "evaluation/accuracy")] == [2, 4]
    assert [step for step, _ in points(tmp_path, "train/loss")] == [1, 2, 3, 4]


def test_each_kind_of_figure_has_its_group(tmp_path: Path) -> None:
    observer = TensorBoard()
    observer.started(run_info(tmp_path))
    figures = {
        "tokens_per_s": 5.0,
        "loss_scale": 1024.0,
        "gan/realism": 0.5,
        "lr": [0.1, 0.2],
        "measured": {"steps": 9},
    }
    observer.stepped(record(1, **figures))
    observer.finished({})
    assert set(events(tmp_path).Tags()["scalars"]) == {
        "train/epoch",
        "train/loss",
        "train/lr/0",
        "train/lr/1",
        "train/grad_norm",
        "train/loss_scale",
        "speed/step_time_s",
        "speed/data_wait_s",
        "speed/samples_per_s",
        "speed/tokens_per_s",
        "memory/bytes",
        "gan/realism",
    }


def test_a_figure_that_nobody_can_tell_is_left_out(tmp_path: Path) -> None:
    observer = TensorBoard()
    observer.started(run_info(tmp_path))
    observer.stepped(record(1, loss=None, step_time_s=None))
    observer.stepped(record(2))
    observer.finished({})
    assert points(tmp_path, "train/loss") == [(2, 0.5)]
    assert points(tmp_path, "speed/step_time_s") == [(2, 0.5)]


def test_tb_resume_1_after_a_resume_no_step_occurs_twice(tmp_path: Path) -> None:
    steps(tmp_path, 1, 2, 3, 4, 5, 6, finish=False)
    steps(tmp_path, 4, 5, 6, start=3)
    assert [step for step, _ in points(tmp_path, "train/loss")] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in points(tmp_path, "evaluation/accuracy")] == [2, 4, 6]


def test_a_run_begun_anew_in_its_folder_leaves_nothing_of_the_first_try(tmp_path: Path) -> None:
    steps(tmp_path, 1, 2, 3, finish=False)
    steps(tmp_path, 1, 2)
    assert [step for step, _ in points(tmp_path, "train/loss")] == [1, 2]


def test_the_config_is_there_as_text_once_a_start(tmp_path: Path) -> None:
    steps(tmp_path, 1, 2, 3, finish=False)
    steps(tmp_path, 3, start=2, finish=False)
    steps(tmp_path, 3, start=2)
    texts = events(tmp_path).Tensors("config/text_summary")
    assert [event.step for event in texts] == [0, 1, 2]
    assert b"batch_size: 8" in texts[0].tensor_proto.string_val[0]


@pytest.mark.parametrize("shape", [(6, 5), (3, 6, 5), (6, 5, 3), (1, 6, 5)])
def test_images_keep_their_size_in_any_layout(tmp_path: Path, shape: tuple[int, ...]) -> None:
    observer = TensorBoard()
    observer.started(run_info(tmp_path))
    observer.stepped(record(7, drawn=LoggedImage(array=np.zeros(shape, np.uint8))))
    observer.finished({})
    (image,) = events(tmp_path).Images("train/drawn")
    assert (image.step, image.height, image.width) == (7, 6, 5)


def test_histograms_count_their_finite_values(tmp_path: Path) -> None:
    observer = TensorBoard()
    observer.started(run_info(tmp_path))
    values = np.array([[1.0, 2.0], [np.nan, np.inf]], np.float32)
    observer.stepped(record(7, weights=LoggedHistogram(array=values), empty=LoggedHistogram(array=np.zeros(0))))
    observer.finished({})
    (histogram,) = events(tmp_path).Histograms("train/weights")
    assert (histogram.step, histogram.histogram_value.num) == (7, 2)
    assert events(tmp_path).Tags()["histograms"] == ["train/weights"]


def test_remarks_are_there_as_text_at_their_step(tmp_path: Path) -> None:
    board = TensorBoard()
    board.started(run_info(tmp_path))
    board.remarked({"step": 3, "text": "two graph breaks"})
    board.finished({})
    (event,) = events(tmp_path).Tensors("remarks/text_summary")
    assert (event.step, event.tensor_proto.string_val[0]) == (3, b"two graph breaks")


def test_a_failed_run_closes_its_file(tmp_path: Path) -> None:
    observer = TensorBoard()
    observer.started(run_info(tmp_path))
    observer.stepped(record(1))
    observer.failed(RuntimeError("x"), {})
    assert points(tmp_path, "train/loss") == [(1, 1.0)]
    observer.finished({})
    observer.stepped(record(2))
    assert points(tmp_path, "train/loss") == [(1, 1.0)]


def test_without_a_folder_nothing_is_written_and_nothing_imported() -> None:
    script = (
        "import sys; from fasttrain.observe import TensorBoard; from tests.observe.helpers import *;"
        "o = TensorBoard(); o.started(run_info(None)); o.stepped(record(1)); o.finished({});"
        "print([m for m in ('torch', 'tensorboard', 'rich', 'numpy') if hasattr(sys.modules.get(m), '__file__')])"
    )
    root = Path(__file__).parents[2]
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=root).stdout
    assert told.strip() == "[]"


def test_a_new_event_file_sorts_behind_those_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    now = [1000.25]
    monkeypatch.setattr(time, "time", lambda: now[0])

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    wait_for_a_later_name(tmp_path)
    assert waits == []
    (tmp_path / "events.out.tfevents.1000.host.99.0").touch()
    wait_for_a_later_name(tmp_path)
    assert waits == [0.75]
    # A clock that was set far back is not waited for.
    (tmp_path / "events.out.tfevents.5000.host.99.0").touch()
    wait_for_a_later_name(tmp_path)
    assert waits == [0.75]


def test_a_disk_that_fills_up_costs_curves_and_not_the_training(tmp_path: Path) -> None:
    observer = TensorBoard()
    observer.started(run_info(tmp_path))

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    writer = observer._writer
    writer.file_writer.add_summary = full
    with pytest.warns(RuntimeWarning, match="No space left on device.*training goes on"):
        observer.stepped(record(1))
    observer.stepped(record(2))
    observer.finished({})
