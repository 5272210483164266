"""Reported faults of data order, draws, workers and small data sets, each kind by the name of its case."""

# The names of the cases are written in capitals.

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from fasttrain import ConfigError, Data, Trainer
from fasttrain.data.by_order import ByOrder
from fasttrain.data.order import Order
from fasttrain.data.reading import Position
from fasttrain.observe import EarlyStopping
from tests.commands import descendants, end, start, wait_for_step
from tests.helpers import QUIET, Recorder, StopAt
from tests.ranks import run_ranks


class Rows(Dataset):
    """Sample i: its number, then one draw of torch, numpy and Python where it `draws`."""

    def __init__(self, n, draws=False):
        self.n, self.draws = n, draws

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        drawn = [torch.randn(()).item(), np.random.rand(), random.random()] if self.draws else [0.0] * 3
        return torch.tensor([index, *drawn], dtype=torch.float64)


class Keeps(Trainer):
    """Keeps the rows of each step."""

    n, draws, form, workers, shuffle = 10, False, "data set", 0, True

    def build_data(self):
        self.rows = []
        rows = Rows(self.n, self.draws)
        if self.form == "tensors":
            return Data(train=(torch.stack([rows[i] for i in range(self.n)]),), shuffle=self.shuffle)
        if self.form == "loader":
            share = self.config.batch_size // self.world.size
            return Data(train=DataLoader(rows, batch_size=share, shuffle=self.shuffle, num_workers=self.workers))
        return Data(train=rows, num_workers=self.workers, shuffle=self.shuffle)

    def build_model(self):
        return nn.Linear(4, 1).double()

    def compute_loss(self, batch):
        x = batch[0] if isinstance(batch, tuple | list) else batch
        return self.model(x).square().mean()

    def train_step(self, batch):
        x = batch[0] if isinstance(batch, tuple | list) else batch
        self.rows.append(x.clone())
        return super().train_step(batch)


FORMS = {
    "tensors": {"form": "tensors"},
    "a data set": {},
    "a data set and two workers": {"workers": 2},
    "a loader": {"form": "loader"},
    "a loader and two workers": {"form": "loader", "workers": 2},
}


def in_parts(cls, tmp_path, stops, **settings):
    """All rows of a run that is stopped after these steps and taken up each time."""
    run = {"dir": str(tmp_path), "id": "one"}
    rows = []
    for _ in range(len(stops) + 1):
        trainer = cls(**settings, run=run, resume="auto", log={"every": 1}, observers=[StopAt(*stops)])
        before = len(rows)
        summary = trainer.fit()
        rows += trainer.rows
        assert len(rows) > before
    assert summary["status"] == "done"
    return rows


def equal(rows, others):
    return len(rows) == len(others) and all(map(torch.equal, rows, others))


@pytest.mark.parametrize("form", FORMS)
def test_RESUME_DATA_1_a_run_that_stopped_in_the_second_epoch_goes_on_in_its_order(tmp_path, form):
    cls = type("Keeps", (Keeps,), FORMS[form])
    settings = {"batch_size": 2, "epochs": 3, "seed": 1}
    whole = cls(**settings, **QUIET)
    whole.fit()
    assert len(whole.rows) == 15
    first, second, third = (torch.cat(whole.rows[a : a + 5])[:, 0].int().tolist() for a in (0, 5, 10))
    assert sorted(first) == sorted(second) == sorted(third) == list(range(10))
    assert len({tuple(first), tuple(second), tuple(third)}) == 3
    assert equal(in_parts(cls, tmp_path, [7], **settings), whole.rows)


@pytest.mark.parametrize("form", FORMS)
def test_RESUME_DATA_3_three_stops_in_one_epoch_leave_the_order(tmp_path, form):
    cls = type("Keeps", (Keeps,), {**FORMS[form], "n": 20})
    settings = {"batch_size": 2, "epochs": 1}
    whole = cls(**settings, **QUIET)
    whole.fit()
    assert equal(in_parts(cls, tmp_path, [3, 5, 6], **settings), whole.rows)


def on_two_ranks(folder, workers, resumes):
    """Indices of this rank in each of three epochs, whole or from epoch 2 on."""
    cls = type("Keeps", (Keeps,), {"n": 8, "workers": workers})
    settings = {"batch_size": 4, "epochs": 3, "log": {"every": 1}, "device": "cpu"}
    if not resumes:
        trainer = cls(**settings, run={"dir": None})
        trainer.fit()
        return [rows[:, 0].int().tolist() for rows in trainer.rows]
    run = {"dir": folder, "id": "one"}
    cls(**settings, run=run, checkpoint={"every": 4, "keep": None}).fit()
    resumed = cls(**settings, run={"dir": None})
    resumed.restore(f"{folder}/keeps/one/checkpoints/step-4")
    resumed.fit()
    return [rows[:, 0].int().tolist() for rows in resumed.rows]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_RESUME_DATA_4_two_ranks_have_another_order_each_epoch_and_find_it_again(tmp_path, workers):
    whole = run_ranks(2, on_two_ranks, str(tmp_path), workers, False)
    epochs = [[i for step in (2 * e, 2 * e + 1) for rank in whole for i in rank[step]] for e in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(8))] * 3
    assert len(set(map(tuple, epochs))) == 3
    resumed = run_ranks(2, on_two_ranks, str(tmp_path), workers, True)
    assert resumed == [rank[-2:] for rank in whole]


@pytest.mark.parametrize("form", [form for form in FORMS if form != "tensors"])
def test_RNG_WORKERS_1_and_2_what_samples_draw_is_the_same_after_a_resume(tmp_path, form):
    """Without workers (1) and with two of them (2): torch, numpy and Python."""
    cls = type("Keeps", (Keeps,), {**FORMS[form], "n": 24, "draws": True})
    settings = {"batch_size": 4, "steps": 6}
    whole = cls(**settings, **QUIET)
    whole.fit()
    drawn = torch.cat(whole.rows)[:, 1:]
    assert drawn.unique().numel() == drawn.numel() == 72
    assert equal(in_parts(cls, tmp_path, [3], **settings), whole.rows)


@pytest.mark.parametrize("form", ["a data set and two workers", "a loader and two workers"])
def test_WORKER_SEED_1_no_two_samples_draw_the_same_over_workers_and_epochs_and_a_second_run_does(form):
    cls = type("Keeps", (Keeps,), {**FORMS[form], "n": 8, "draws": True})

    def drawn():
        trainer = cls(batch_size=2, epochs=2, **QUIET)
        trainer.fit()
        return torch.cat(trainer.rows)[:, 1:]

    first = drawn()
    assert first.unique().numel() == first.numel() == 48
    assert torch.equal(first, drawn())


def first_draws(form):
    cls = type("Keeps", (Keeps,), {**FORMS[form], "n": 32, "draws": True, "shuffle": False})
    trainer = cls(batch_size=8, steps=4, device="cpu", **QUIET)
    weights = [p.tolist() for p in trainer.model.parameters()]
    of_rank = torch.rand(()).item()
    trainer.fit()
    return weights, of_rank, torch.cat(trainer.rows)[:, 1:].tolist()


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("form", ["a data set and two workers", "a loader and two workers"])
def test_WORKER_SEED_3_workers_of_two_ranks_draw_apart_and_weights_begin_alike(form):
    (weights, mine, drawn), (others, theirs, also_drawn) = run_ranks(2, first_draws, form)
    assert weights == others
    assert mine != theirs
    values = [value for row in drawn + also_drawn for value in row]
    assert len(set(values)) == len(values) == 2 * 16 * 3


# ---- workers that stay


def pids(folder):
    return {int(path.name) for path in Path(folder).iterdir()}


class Signs(Rows):
    """Each process that reads leaves its id; samples say in which epoch they believe to be."""

    def __init__(self, n, folder):
        super().__init__(n)
        self.folder, self.epochs = folder, []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __getitem__(self, index):
        (Path(self.folder) / str(os.getpid())).touch()
        return torch.tensor([index, *(self.epochs[-1:] or [-1]), len(self.epochs), 0], dtype=torch.float64)


def reader_of(source, workers, size=16, batch_size=4):
    data = Data(train=source, num_workers=workers)
    return ByOrder(data, source, Order(size=size, batch_size=batch_size), 0, 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_PERSIST_1_a_reading_that_was_left_can_be_begun_again_and_epochs_are_whole(tmp_path, workers):
    reader = reader_of(Signs(16, tmp_path), workers)
    next(reader.epoch(0))
    counts = [[portion.first for portion in reader.epoch(epoch)] for epoch in range(3)]
    assert counts == [[0, 4, 8, 12]] * 3
    seen = pids(tmp_path)
    assert len(seen) == max(1, workers)
    assert workers == 0 or len([pid for pid in seen if Path(f"/proc/{pid}").exists()]) == 2
    reader.close()
    assert workers == 0 or [pid for pid in seen if Path(f"/proc/{pid}").exists()] == []


@pytest.mark.parametrize("workers", [0, 2])
def test_PERSIST_1_workers_stay_over_epoch_ends_and_are_told_each_epoch_once(tmp_path, workers):
    reader = reader_of(Signs(16, tmp_path), workers)
    portions = reader.portions(Position(3, 8))
    given = [next(portions) for _ in range(2 + 4 + 4)]
    for portion in given:
        assert portion.batch[:, 1].tolist() == [portion.epoch] * 4
        assert portion.batch[:, 2].max() <= portion.epoch - 3 + 1
    assert [portion.epoch for portion in given] == [3] * 2 + [4] * 4 + [5] * 4
    seen = pids(tmp_path)
    assert len(seen) == max(1, workers)
    portions.close()
    assert workers == 0 or [pid for pid in seen if Path(f"/proc/{pid}").exists()] == []


class Evaluated(Keeps):
    """Trains on tensors and evaluates a data set by two workers."""

    form, folder = "tensors", ""

    def build_data(self):
        return Data(train=super().build_data().train, evaluation=Signs(8, self.folder), num_workers=2)

    def evaluate(self):
        given = super().evaluate()
        self.after = getattr(self, "after", []) + [frozenset(descendants(os.getpid()))]
        return given


def test_PERSIST_1_evaluations_of_a_run_share_their_workers_and_a_second_run_works(tmp_path):
    cls = type("Evaluated", (Evaluated,), {"folder": tmp_path})
    for _ in range(2):
        trainer = cls(batch_size=5, epochs=3, **QUIET)
        before = frozenset(descendants(os.getpid()))
        trainer.fit()
        ours = {pids - before for pids in trainer.after}
        assert len(trainer.after) == 3
        assert len(ours) == 1
        assert len(ours.pop()) == 2
        assert frozenset(descendants(os.getpid())) == before
        trainer.evaluate()
        assert frozenset(descendants(os.getpid())) == before, "outside a run they end with the evaluation"


@pytest.mark.parametrize("own", [False, True])
def test_PERSIST_1_workers_end_with_a_run_that_fails_while_its_error_is_looked_at(own):
    class Fails(Keeps):
        workers, n = 2, 40

        def build_data(self):
            data = super().build_data()
            loader = DataLoader(data.train, batch_size=4, num_workers=2, persistent_workers=True)
            return Data(train=loader) if own else data

        def train_step(self, batch):
            if self.step == 2:
                raise ArithmeticError("planted")
            return super().train_step(batch)

    before = descendants(os.getpid())
    trainer = Fails(batch_size=4, epochs=2, **QUIET)
    with pytest.raises(ArithmeticError) as told:
        trainer.fit()
    assert told.value.__traceback__ is not None  # its frames hold all there was
    assert descendants(os.getpid()) == before


# ---- shared memory


@pytest.fixture
def reads(tmp_path):
    """A config whose trainer's data set does what FAULT says, and writes what it read."""
    path = tmp_path / "reads.yaml"
    path.write_text(
        "trainer: tests.data.reading_runs:Reads\nbatch_size: 8\nepochs: 3\nlog: {every: 1}\n"
        f"run: {{dir: {tmp_path}/runs, name: r, id: x}}\n"
    )
    return str(path)


def segments():
    return {entry.name for entry in Path("/dev/shm").iterdir()}


@pytest.mark.slow
def test_SHM_1_a_bus_error_in_a_worker_ends_the_run_with_the_size_of_the_shared_memory(reads):
    code, output = end(start("--config", reads, "workers=2", FAULT="bus"), timeout=60)
    assert code == 1, output
    (told,) = [line for line in output.splitlines() if line.startswith("LostWorker: ")]
    size = os.statvfs("/dev/shm")
    assert f"/dev/shm holds {size.f_blocks * size.f_frsize / 2**20:,.0f} MiB" in told
    assert "num_workers=2, batch_size=8" in told


@pytest.mark.slow
@pytest.mark.parametrize("loader", ["own_loader=false", "own_loader=true"])
def test_SHM_3_no_segment_stays_after_epochs_an_interrupt_or_a_kill(reads, tmp_path, loader):
    before = segments()
    code, output = end(start("--config", reads, "workers=2", "width=200000", loader), timeout=90)
    assert code == 0, output
    assert segments() == before
    for number, expected in ((signal.SIGINT, 75), (signal.SIGKILL, -signal.SIGKILL)):
        words = ("workers=2", "width=200000", "steps=5000", "epochs=null", loader, f"run.id={number}")
        process = start("--config", reads, *words)
        wait_for_step(process, tmp_path / "runs" / "r" / str(int(number)), 3)
        below = descendants(process.pid)
        code, output = end(process, number)
        assert code == expected, output
        deadline = time.monotonic() + 15
        while any(Path(f"/proc/{pid}").exists() for pid in below) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert segments() == before


# ---- small data


@pytest.mark.parametrize("own", [False, True])
def test_EMPTY_1_fewer_samples_than_a_batch_with_drop_last_are_refused_before_the_first_step(own):
    class Small(Keeps):
        def build_data(self):
            if own:
                return Data(train=DataLoader(Rows(3), batch_size=4, drop_last=True))
            return Data(train=Rows(3), drop_last=True)

    with pytest.raises(ConfigError, match=r"holds 3 samples, which fill no batch of 4, and drop_last .* batch_size=3"):
        Small(batch_size=4, epochs=2, **QUIET)


def test_EMPTY_1_without_drop_last_a_batch_larger_than_the_data_takes_all_of_it_and_is_told_once():
    cls = type("Small", (Keeps,), {"n": 3})
    recorder = Recorder()
    trainer = cls(batch_size=4, epochs=2, observers=[recorder], **QUIET)
    assert trainer.fit()["samples"] == 6
    assert [sorted(rows[:, 0].tolist()) for rows in trainer.rows] == [[0.0, 1.0, 2.0]] * 2
    told = [record["text"] for record in recorder.remarks]
    assert told == ["batch_size=4, and the training data holds 3 samples: each step takes all of them"]


def test_EMPTY_1_drop_last_leaves_out_what_fills_no_batch_of_each_epoch():
    class Dropped(Keeps):
        def build_data(self):
            self.rows = []
            return Data(train=Rows(11), drop_last=True, evaluation=Rows(3))

    trainer = Dropped(batch_size=4, epochs=2, **QUIET)
    assert trainer.fit()["samples"] == 16
    assert [len(rows) for rows in trainer.rows] == [4] * 4
    assert trainer.evaluate()["loss"] > 0  # drop_last is no matter of evaluations


class Nothing(IterableDataset):
    def __iter__(self):
        return iter(())


EMPTY = {
    "a loader": lambda: DataLoader(TensorDataset(torch.zeros(3, 4)), batch_size=4, drop_last=True),
    "a stream": lambda: DataLoader(Nothing(), batch_size=4),
    "a data set": lambda: Rows(0),
    "tensors": lambda: (torch.zeros(0, 4),),
}


@pytest.mark.parametrize("empty", EMPTY)
def test_EMPTY_2_an_evaluation_without_a_batch_gives_no_figure_and_leaves_the_best_alone(empty):
    class Watched(Keeps):
        def build_data(self):
            data = super().build_data()
            return Data(train=data.train, evaluation=EMPTY[empty]())

    stopping, recorder = EarlyStopping(metric="loss", patience=1), Recorder()
    summary = Watched(batch_size=5, epochs=3, observers=[stopping, recorder], **QUIET).fit()
    assert (summary["status"], summary["steps"], summary["metrics"]) == ("done", 6, {})
    assert (stopping.best, stopping.best_step, stopping.worse) == (None, None, 0)
    assert recorder.evaluations == []
    assert [r["text"] for r in recorder.remarks if "no figure" in r["text"]] == [
        "the evaluation gave no figure, for want of a batch; look at Data(evaluation=...)"
    ]


@pytest.mark.parametrize("form", ["tensors", "a data set", "a loader"])
def test_EMPTY_2_a_share_of_an_epoch_that_is_less_than_a_step_is_refused(form):
    cls = type("Nine", (Keeps,), {**FORMS[form], "n": 18})
    with pytest.raises(ConfigError, match=r"limit_batches=0.1 of 9 steps an epoch is less than one step; .*1/9"):
        cls(batch_size=2, epochs=1, limit_batches=0.1, **QUIET)
    assert cls(batch_size=2, epochs=2, limit_batches=0.5, **QUIET).total_steps == 8
    assert cls(batch_size=2, epochs=1, limit_batches=3, **QUIET).fit()["steps"] == 3
