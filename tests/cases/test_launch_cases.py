"""Reported faults of run folders, ports and processes that stay behind, each kind by the name of its case."""

# The names of the cases are written in capitals.

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fasttrain.cli import main
from tests.commands import alive, descendants, end, last_step, start, wait_for_step, weights

TRAINER = """
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from fasttrain import Data, Trainer


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=g), torch.randint(4, (), generator=g)


class Tiny(Trainer):
    @dataclass(frozen=True, kw_only=True)
    class Config(Trainer.Config):
        workers: int = 0
        own_loader: bool = False
        step_s: float = 0.0
        late_s: float = 0.0
        fails_on: int | None = None
        fails_at: int = 2

    def build_data(self):
        if self.world.rank:
            time.sleep(self.config.late_s)
        if self.config.own_loader:
            loader = torch.utils.data.DataLoader(
                Samples(), batch_size=8 // self.world.size, num_workers=self.config.workers
            )
            return Data(train=loader)
        return Data(train=Samples(), num_workers=self.config.workers)

    def build_model(self):
        return nn.Linear(8, 4)

    def loss(self, output, batch):
        return F.cross_entropy(output, batch[1])

    def train_step(self, batch):
        time.sleep(self.config.step_s)
        if self.world.rank == self.config.fails_on and self.step + 1 == self.config.fails_at:
            raise ValueError("planted by the user")
        return super().train_step(batch)

    def fit(self):
        summary = super().fit()
        (Path(summary["dir"]) / f"rank-{self.world.rank}").write_text(summary["dir"])
        return summary
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trainer and a config, from where runs are started."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "tiny.py").write_text(TRAINER)
    (folder / "tiny.yaml").write_text(
        "trainer: tiny:Tiny\nbatch_size: 8\nsteps: 6\noptimizer: {name: sgd, lr: 0.1}\nlog: {every: 1}\n"
    )
    return folder


CONFIG = ("--config", "tiny.yaml")


def runs(home: Path, name: str) -> list[Path]:
    return sorted((home / "runs" / name).iterdir())


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


# ---- one process: what a run folder holds


def called(home: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The command line, in this process."""
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["fasttrain", *words])
    return main()


SWAPS = ["precision=bf16", "optimizer.lr=0.05", "accumulation={name: microbatches, num: 2}"]


def test_RUN_DIR_3_each_folder_reproduces_its_run(home, monkeypatch):
    for number, swap in enumerate(SWAPS):
        assert called(home, monkeypatch, *CONFIG, swap, "run.name=compare", f"run.id={number}", "seed=7") == 0
    assert [folder.name for folder in runs(home, "compare")] == ["0", "1", "2"]
    resolved = []
    for number, (folder, swap) in enumerate(zip(runs(home, "compare"), SWAPS, strict=True)):
        config = yaml.safe_load((folder / "config.yaml").read_text())
        resolved.append(config)
        assert (config["batch_size"], config["steps"], config["seed"]) == (8, 6, 7)
        environment = json.loads((folder / "environment.json").read_text())
        assert environment["command"][1:] == [*CONFIG, swap, "run.name=compare", f"run.id={number}", "seed=7"]
        assert (
            environment["versions"]["torch"] == torch.__version__.partition("+")[0] or environment["versions"]["torch"]
        )
        assert {"fasttrain", "torch", "numpy", "omegaconf"} <= set(environment["versions"])
        again = ("--config", str(folder / "config.yaml"), "run.name=again", f"run.id={number}")
        assert called(home, monkeypatch, *again) == 0
        rerun = home / "runs" / "again" / str(number)
        assert summary(rerun)["final_loss"] == summary(folder)["final_loss"]
        one, other = weights(folder), weights(rerun)
        assert set(one) == set(other)
        assert [key for key in one if not torch.equal(one[key], other[key])] == []
    assert resolved[0]["precision"]["name"] == "bf16"
    assert resolved[1]["optimizer"]["lr"] == 0.05
    assert resolved[2]["accumulation"]["num"] == 2
    assert len({summary(folder)["config_hash"] for folder in runs(home, "compare")}) == 3
    assert len({summary(folder)["final_loss"] for folder in runs(home, "compare")}) >= 2


def test_RUN_DIR_1_runs_of_one_second_have_a_folder_each(home, monkeypatch):
    for _ in range(3):
        assert called(home, monkeypatch, *CONFIG, "steps=1", "run.name=same") == 0
    assert len(runs(home, "same")) == 3
    assert all(summary(folder)["status"] == "done" for folder in runs(home, "same"))


# ---- two ranks


def occupied() -> socket.socket | None:
    """Takes the port that torchrun once had for everyone; it may be taken already."""
    taken = socket.socket()
    try:
        taken.bind(("", 29500))
        taken.listen()
    except OSError:
        taken.close()
        return None
    return taken


@pytest.fixture(scope="module")
def two_at_once(home: Path) -> dict[str, tuple[int, str]]:
    """Two launches at the same moment, of one name, while the usual port is taken; rank 1 comes two seconds late."""
    port = occupied()
    try:
        launches = {
            seed: start(*CONFIG, "run.name=twins", f"seed={seed}", "late_s=2", ranks=2, cwd=home) for seed in ("1", "2")
        }
        return {seed: end(process, timeout=150) for seed, process in launches.items()}
    finally:
        if port is not None:
            port.close()


@pytest.mark.ranks
@pytest.mark.slow
def test_PORT_1_and_2_two_launches_finish_while_the_usual_port_is_taken(home, two_at_once, monkeypatch):
    for code, output in two_at_once.values():
        assert code == 0, output
    losses = {}
    for folder in runs(home, "twins"):
        seed = yaml.safe_load((folder / "config.yaml").read_text())["seed"]
        losses[seed] = summary(folder)["final_loss"]
        assert (summary(folder)["status"], summary(folder)["world_size"]) == ("done", 2)
    assert set(losses) == {1, 2}
    assert losses[1] != losses[2]
    for seed, loss in losses.items():
        assert called(home, monkeypatch, *CONFIG, f"run.name=alone-{seed}", f"seed={seed}") == 0
        (alone,) = runs(home, f"alone-{seed}")
        assert summary(alone)["final_loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.ranks
@pytest.mark.slow
def test_RUN_DIR_1_all_ranks_of_a_run_have_one_folder(home, two_at_once):
    assert len(two_at_once) == len(runs(home, "twins")) == 2
    for folder in runs(home, "twins"):
        said = {(folder / f"rank-{rank}").read_text() for rank in (0, 1)}
        assert said == {str(folder.relative_to(home))}


@pytest.mark.ranks
@pytest.mark.slow
def test_PROGRESS_1_one_rank_alone_prints(two_at_once):
    for code, output in two_at_once.values():
        assert code == 0
        steps = [line.split()[1] for line in output.splitlines() if line.startswith("step ")]
        assert steps == [f"{step}/6" for step in range(1, 7)]
        assert output.count("start twins/") == output.count("end done") == 1
        assert "\r" not in output


def launched(home: Path, name: str, *words: str, ranks: int) -> tuple[subprocess.Popen, list[int]]:
    """A run with loader workers that has done three steps, and the processes below it."""
    process = start(
        *CONFIG, f"run.name={name}", "run.id=x", "workers=2", "step_s=0.1", "steps=2000", *words, ranks=ranks, cwd=home
    )
    wait_for_step(process, home / "runs" / name / "x", 3)
    below = descendants(process.pid)
    # The ranks under a launcher, and two workers each.
    assert len(below) >= (ranks * 3 if ranks > 1 else 2)
    return process, below


def remaining(pids: list[int], seconds: float) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ZOMBIE_1_nothing_is_left_ten_seconds_after_the_launcher_was_interrupted(home, number):
    name = f"launcher-{number.name}"
    process, below = launched(home, name, ranks=2)
    began = time.monotonic()
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert remaining([process.pid, *below], began + 10 - time.monotonic()) == []
    assert process.returncode != 0, output
    if number != signal.SIGKILL:
        assert "Traceback" not in output.partition("end stopped")[0], output
        stopped = summary(home / "runs" / name / "x")
        assert (stopped["status"], stopped["reason"]) == ("stopped", signal.Signals(number).name)
        assert 3 <= stopped["steps"] < 200


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "to", "loader"),
    [
        (signal.SIGINT, "the process", "ours"),
        (signal.SIGINT, "its group", "ours"),
        (signal.SIGTERM, "its group", "ours"),
        (signal.SIGTERM, "its group", "the user's"),
        (signal.SIGUSR1, "its group", "ours"),
    ],
)
def test_ZOMBIE_1_one_process_saves_and_leaves_no_worker(home, number, to, loader):
    """A terminal sends Ctrl-C to the whole group, schedulers send their signals to every process."""
    name = f"{number.name}-{to}-{loader}".replace(" ", "-").replace("'", "")
    process, below = launched(home, name, f"own_loader={loader != 'ours'}", ranks=1)
    began = time.monotonic()
    (process.send_signal if to == "the process" else lambda signal: os.killpg(process.pid, signal))(number)
    code, output = end(process)
    assert code == 75, output
    assert remaining(below, began + 10 - time.monotonic()) == []
    assert "Traceback" not in output
    assert output.count("end stopped") == 1
    stopped = summary(home / "runs" / name / "x")
    assert (stopped["status"], stopped["reason"]) == ("stopped", number.name)
    assert (home / "runs" / name / "x" / "checkpoints" / f"step-{stopped['steps']}").is_dir()


HOLDS = """
import builtins, sys, time
import torch
from fasttrain.data.workers import read


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index > 9 and sys.argv[1] == "hangs":
            time.sleep(1000)
        return index


builtins.kept = read(torch.utils.data.DataLoader(Samples(), num_workers=1))
print(next(builtins.kept).item(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("worker", ["waits", "hangs"])
def test_ZOMBIE_1_workers_of_an_iterator_that_is_still_held_end_with_the_process(worker):
    """They leave SIGTERM to the trainer once, which must not keep Python from ending them."""
    done = subprocess.run([sys.executable, "-c", HOLDS, worker], capture_output=True, text=True, timeout=40)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_ZOMBIE_2_an_error_of_one_rank_ends_both_and_is_told_once(home, rank):
    name = f"fails-{rank}"
    process = start(
        *CONFIG, f"run.name={name}", "run.id=x", f"fails_on={rank}", "workers=1", "steps=2000", ranks=2, cwd=home
    )
    below: set[int] = set()
    began = None
    while process.poll() is None:
        below.update(descendants(process.pid))
        if began is None and (home / "runs" / name / "x" / "summary.json").exists():
            began = time.monotonic()
        assert began is None or time.monotonic() < began + 30
        time.sleep(0.05)
    output, _ = process.communicate()
    assert remaining(list(below), 5) == []
    assert len(below) >= 2
    assert process.returncode != 0
    assert output.count("ValueError: planted by the user") == (1 if rank else 2), output  # rank 0 has an end line too
    assert output.count('raise ValueError("planted by the user")') == 1, output
    assert summary(home / "runs" / name / "x")["status"] == "failed"


@pytest.mark.slow
def test_PROGRESS_3_lines_of_a_pipe_can_be_read_while_the_run_goes_on(home):
    process = start(*CONFIG, "run.name=piped", "run.id=x", "step_s=0.05", "steps=40", "log.every=5", cwd=home)
    assert process.stdout is not None
    seen = []
    while line := process.stdout.readline():
        seen.append((line.split(), process.poll(), last_step(home / "runs" / "piped" / "x")))
    assert process.wait() == 0
    process.stdout.close()
    steps = [(words, code, at) for words, code, at in seen if words[0] == "step"]
    assert [words[1] for words, _, _ in steps] == [f"{step}/40" for step in range(5, 41, 5)]
    for words, code, at in steps[:-1]:
        step = int(words[1].partition("/")[0])
        assert code is None
        assert at <= step + 5, "told at once"
        assert float(words[words.index("loss") + 1]) > 0
        assert words[words.index("left") + 1].startswith("0:0")
