"""A run that waits for its data says so, with the figure, on what, and what to change for this data."""

import time

import pytest
import torch

from fasttrain import Data
from fasttrain.trainer.waiting import Spent, Timed, Waiting
from tests.helpers import QUIET, Mlp, Recorder, points
from tests.test_workers_found import Slow


def waiting(data=None, rank=0, ranks=1, cores=4, **parts):
    spent = Spent(batches=10)
    data = Data(train=points()) if data is None else data
    spent.timed(data)
    for name, seconds in parts.items():
        if name in ("reading", "copying"):
            setattr(spent, name, seconds)
        else:
            spent._timed[name].seconds = seconds
    return Waiting(data, spent, rank, ranks, cores)


def test_a_wait_is_told_once_with_its_figure_and_from_five_percent_on():
    waits = waiting(reading=1.0)
    assert waits.remark(0.9, 20.0, 100, 0) is None
    assert waits.remark(4.0, 9.0, 100, 0) is None
    assert waits.remark(4.0, 20.0, 19, 0) is None
    assert waits.remark(4.0, 20.0, 100, 0) == (
        "the run waits for data 20% of the time (40 ms of 200 ms a step; most of the host's time goes to the samples, 100 "
        "ms a batch); keep smaller types in memory (uint8, converted in Trainer.augment), or take a larger batch_size"
    )
    assert waits.remark(4.0, 20.0, 200, 0) is None


def test_other_ranks_say_one_thing_for_all_of_them():
    texts = {waiting(rank=rank, ranks=4, reading=1.0 * rank).remark(1.0 + rank, 20.0, 100, 0) for rank in (1, 2, 3)}
    assert texts == {"the run waits for data more than 5% of the time; its rank 0 does not have to"}


def transform(batch):
    return batch


def loader(num_workers):
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*points()), num_workers=num_workers)


ADVICE = {
    "no workers": (
        Data(train=Slow(0)),
        0,
        {"reading": 1.0},
        "set num_workers=auto, or a larger number (num_workers is 0, ",
    ),
    "few workers": (Data(train=Slow(0)), 2, {"reading": 1.0}, "num_workers is 2, and this rank has 4 cores)"),
    "all cores": (
        Data(train=Slow(0)),
        4,
        {"reading": 1.0},
        "keep decoded samples in memory, or decode at a smaller size",
    ),
    "transform of a data set": (
        Data(train=Slow(0), transform=transform),
        2,
        {"reading": 1.0, "transform": 0.9},
        "the transform, 90 ms a batch); do what transform does in the data set's __getitem__, where workers can do it, or",
    ),
    "transform in memory": (
        Data(train=points(), transform=transform),
        0,
        {"reading": 1.0, "transform": 0.9},
        "do what transform does on the device, in Trainer.augment",
    ),
    "collate": (
        Data(train=Slow(0), collate=transform),
        0,
        {"reading": 1.0, "collate": 0.9},
        "goes to the collate, 90 ms",
    ),
    "copies": (Data(train=points()), 0, {"reading": 1.0, "copying": 2.0}, "let batches be smaller on the bus: uint8"),
    "a loader": (
        Data(train=loader(1)),
        1,
        {"reading": 1.0},
        "give the DataLoader more num_workers (it has 1, and this rank",
    ),
    "an iterable": (Data(train=iter([])), 0, {"reading": 1.0}, "read ahead in the iterable, by processes of its own"),
}


@pytest.mark.parametrize("name", ADVICE)
def test_the_advice_is_for_this_part_of_this_data(name):
    data, num_workers, parts, expected = ADVICE[name]
    assert expected in waiting(data, **parts).remark(10.0, 20.0, 100, num_workers)


def test_ranks_that_all_transform_the_whole_batch_are_told_of_transform_share():
    data = Data(train=points(), transform=transform)
    told = waiting(data, ranks=3, reading=1.0, transform=0.9).remark(10.0, 20.0, 100, 0)
    assert "set transform_share=True: each of the 3 ranks transforms the batch of all of them now" in told
    one_core = waiting(Data(train=Slow(0)), cores=1, reading=1.0).remark(10.0, 20.0, 100, 0)
    assert "keep decoded samples in memory" in one_core
    assert "this rank has 1 core)" in one_core


def test_functions_are_timed_also_when_they_raise():
    timed = Timed(lambda: time.sleep(0.01) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        timed()
    assert timed.seconds >= 0.01


class Starved(Mlp):
    """Reads for 4 ms, then transforms for 30 ms, in front of a step of a fraction of that."""

    def build_data(self):
        def slow(batch):
            time.sleep(0.03)
            return batch

        return Data(train=Slow(0.001), transform=slow)


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr("fasttrain.trainer.waiting.ENOUGH_S", 0.1)


@pytest.mark.usefixtures("soon")
def test_a_run_is_told_at_a_log_point_and_its_summary_says_where_the_time_went():
    watcher = Recorder()
    summary = Starved(batch_size=4, steps=30, observers=[watcher], **QUIET | {"log": {"every": 25}}).fit()
    (told,) = watcher.remarks
    assert told["step"] == 25
    assert told["text"].startswith("data: the run waits for data ")
    assert "goes to the transform" in told["text"]
    assert summary["remarks"] == [told]
    spent = summary["data"]["seconds_a_batch"]
    assert spent.keys() == {"samples", "transform", "copy"}
    assert spent["transform"] >= 0.03
    assert spent["samples"] >= 0.004
    assert spent["copy"] == 0.0
    assert summary["data_wait_fraction"] > 0.05


@pytest.mark.usefixtures("soon")
def test_a_run_whose_data_is_in_memory_says_so_only_if_it_waited_for_it_all_the_same():
    class Fed(Mlp):
        def train_step(self, batch):
            time.sleep(0.01)
            return super().train_step(batch)

    watcher = Recorder()
    summary = Fed(batch_size=4, steps=30, observers=[watcher], **QUIET | {"log": {"every": 30}}).fit()
    # On a busy machine any line may take its time.
    assert bool(watcher.remarks) == (summary["data_wait_fraction"] > 0.05)
    assert summary["data"]["num_workers"] == 0
