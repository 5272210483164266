"""A worker that dies or hangs, and a full /dev/shm: a clear error in time, and everything ends."""

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fasttrain.data.lost import lost
from fasttrain.errors import LostWorker
from tests.commands import descendants, end, environment, start
from tests.data.reading_runs import Reads
from tests.helpers import QUIET


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "reads.yaml"
    path.write_text(
        "trainer: tests.data.reading_runs:Reads\nbatch_size: 8\nepochs: 3\nmodel: {}\nlog: {every: 1}\n"
        f"run: {{dir: {tmp_path}/runs, name: r, id: x}}\n"
    )
    return path


def failed(config, *words, fault="none", ranks=1, timeout=60):
    """The output of a run that fails in time, with none of its processes left."""
    process = start("--config", str(config), *words, ranks=ranks, FAULT=fault)
    below: set[int] = set()
    deadline = time.monotonic() + timeout
    while process.poll() is None:
        below.update(descendants(process.pid))
        if time.monotonic() > deadline:
            end(process, timeout=0)
        time.sleep(0.05)
    output, _ = process.communicate()
    assert process.returncode not in (0, 2, 75), output
    left = [pid for pid in below if Path(f"/proc/{pid}").exists()]
    wait = time.monotonic() + 10
    while left and time.monotonic() < wait:
        left = [pid for pid in left if Path(f"/proc/{pid}").exists()]
        time.sleep(0.05)
    assert left == []
    return output


def fit(fault, monkeypatch, cls=Reads, **settings):
    """The error of a run in this process, whose workers are asked for a fault."""
    monkeypatch.setenv("FAULT", fault)
    before = children()
    with pytest.raises(LostWorker) as told:
        cls(batch_size=8, epochs=3, **settings, **QUIET).fit()
    assert children() == before
    return str(told.value)


def children():
    return set(descendants(os.getpid()))


LOADERS = {"ours": {}, "the user's": {"own_loader": True}, "persistent": {"own_loader": True, "persistent": True}}


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(("fault", "signal"), [("kill", "SIGKILL"), ("bus", "SIGBUS")])
def test_a_worker_that_a_signal_ends_is_named_with_what_can_be_done(monkeypatch, fault, signal, loader):
    told = fit(fault, monkeypatch, workers=2, **LOADERS[loader])
    assert re.match(r"worker [01] of 2 \(process \d+\), which reads the (training )?data, was killed by ", told), told
    assert f"was killed by {signal}" in told
    assert "num_workers=2, batch_size=8" in told
    assert "num_workers=0" in told
    assert "MiB" in told
    if loader == "ours":
        assert "while it read sample 13 (row 13 of the table)" in told
    if fault == "bus":
        assert "/dev/shm holds" in told
        assert "--shm-size" in told


def test_a_worker_that_ends_by_itself_is_named_with_its_exit_code(monkeypatch):
    told = fit("exit", monkeypatch, workers=1)
    assert told.startswith("worker 0 of 1 ")
    assert "ended by itself with exit code 3 while it read sample 13 (row 13 of the table)" in told


def test_a_worker_that_hangs_is_named_after_the_time_it_was_given(monkeypatch):
    told = fit("hang", monkeypatch, workers=1, timeout_s=1.5)
    assert told.startswith("worker 0 of 1 ")
    assert "gave nothing for 1.5 s while it read sample 13 (row 13 of the table)" in told


def test_a_worker_that_dies_while_the_trainer_computes_is_told_as_such(monkeypatch):
    """torch raises wherever the trainer is, here in a step."""
    told = fit("kill", monkeypatch, workers=1, step_s=0.5)
    assert told.startswith("worker 0 of 1 ")
    assert "was killed by SIGKILL" in told


def test_a_worker_of_an_evaluation_is_told_as_one(monkeypatch):
    class InMemory(Reads):
        def build_data(self):
            data = super().build_data()
            return replace(data, train=(torch.zeros(16, 4), torch.zeros(16, dtype=torch.int64)))

    told = fit("kill", monkeypatch, InMemory, workers=1, evaluates=True)
    assert "which reads the evaluation data," in told


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "bus"])
def test_the_other_ranks_end_when_a_worker_of_one_dies(config, fault):
    output = failed(config, "workers=1", fault=fault, ranks=2, timeout=90)
    assert "LostWorker: worker 0 of 1 " in output, output


def can_mount():
    return (
        shutil.which("unshare") is not None
        and os.geteuid() == 0
        and subprocess.run(["unshare", "-m", "true"]).returncode == 0
    )


IN_A_SMALL_ONE = 'mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$@"'


@pytest.mark.skipif(not can_mount(), reason="mounting a small /dev/shm needs root and mount namespaces (unshare -m)")
@pytest.mark.parametrize("own_collate", [False, True])
def test_a_full_shared_memory_is_told_with_its_size_and_what_is_free(config, own_collate):
    """8 MiB hold less than the batches that two workers make ahead."""
    words = ["workers=2", "width=500000", f"own_collate={own_collate}"]
    command = [sys.executable, "-m", "fasttrain", "--config", str(config), *words]
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", IN_A_SMALL_ONE, "sh", *command],
        capture_output=True,
        text=True,
        timeout=90,
        env=environment(),
    )
    assert done.returncode == 1, done.stderr
    (told,) = [line for line in done.stderr.splitlines() if line.startswith("LostWorker: ")]
    assert "/dev/shm holds 8 MiB" in told
    assert "num_workers=2, batch_size=8" in told
    assert "--shm-size" in told
    assert "num_workers=0" in told


def test_other_errors_are_no_deaths_of_workers():
    assert lost(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert lost(ValueError("DataLoader worker (pid 1) is killed by signal: Killed.")) is None
