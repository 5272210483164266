import json
import random
import signal

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fasttrain import ConfigError, Data
from fasttrain.checkpoint import checkpoints_in, newest
from fasttrain.errors import CheckpointError
from tests.commands import DIGITS, end, run, start, wait_for_step, weights
from tests.helpers import Mlp, Recorder, by_dimension, largest_difference, points, state
from tests.stack import Stack

EVERYTHING = {
    "optimizer": {"name": "adamw", "lr": 0.01},
    "schedule": {"name": "cosine", "warmup": 3},
    "gradient_clipping": {"name": "norm", "max_norm": 0.5},
    "accumulation": {"name": "microbatches", "num": 2},
    "log": {"every": 1},
}


class Noisy(Mlp):
    """Draws from every generator: dropout, and data that draws by itself."""

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.GELU(), nn.Linear(16, 4))

    def build_data(self):
        return Data(train=NoisyPoints(), evaluation=points(10, seed=4), transform=add_noise)


class NoisyPoints(torch.utils.data.Dataset):
    def __init__(self):
        self.x, self.y = points(21)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        noise = random.random() + np.random.rand() + torch.rand(())
        return self.x[index] + noise.float(), self.y[index]


def add_noise(batch):
    return batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_stopped_run_goes_on_as_if_it_had_not_been(tmp_path, precision, optimizer):
    class Stop(Recorder):
        def stepped(self, record):
            super().stepped(record)
            if record["step"] == 5:
                self.run.request_stop("test")

    settings = {
        **EVERYTHING,
        "precision": precision,
        "optimizer": {"name": optimizer, "lr": 0.01},
        "batch_size": 8,
        "epochs": 4,
    }
    watcher, first, second = Recorder(), Stop(), Recorder()
    straight = Noisy(**settings, run={"dir": str(tmp_path), "name": "straight"}, observers=[watcher])
    straight.fit()
    halved = {"dir": str(tmp_path), "name": "halved", "id": "x"}
    assert Noisy(**settings, run=halved, observers=[first]).fit()["status"] == "stopped"
    resumed = Noisy(**settings, run=halved, resume="auto", observers=[second])
    summary = resumed.fit()
    assert summary["status"] == "done"
    assert (summary["steps"], summary["samples"], summary["epochs"]) == (12, 84, 4.0)
    assert told(first.steps + second.steps) == told(watcher.steps)
    assert largest_difference(state(straight), state(resumed)) == 0.0
    one, other = weights(tmp_path / "straight" / straight_id(tmp_path)), weights(tmp_path / "halved" / "x")
    assert set(one) == set(other)
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lamb", "muon", "adafactor"])
def test_a_rate_that_the_device_looks_up_is_the_same_number_after_a_resume(tmp_path, optimizer):
    settings = {
        "batch_size": 8,
        "steps": 9,
        "seed": 3,
        "optimizer": optimizer,
        "precision": {"name": "fp16", "init_scale": 2.0**20},
        "schedule": {"name": "cosine", "warmup": 2},
        "weight_averaging": {"name": "ema", "decay": 0.9},
    }
    straight = Stack(**settings, run={"dir": str(tmp_path), "name": "a", "id": "x"}, checkpoint={"every": 5})
    straight.fit()
    resumed = Stack(**settings, run={"dir": None})
    resumed.restore(tmp_path / "a" / "x" / "checkpoints" / "step-5")
    assert isinstance(resumed.optimizer.param_groups[0]["lr"], torch.Tensor)
    resumed.fit()
    assert largest_difference(state(straight), state(resumed)) == 0.0
    with straight.evaluating(), resumed.evaluating():
        assert largest_difference(state(straight), state(resumed)) == 0.0


def told(records):
    # As text: the norm of a step that fp16 refused is not a number, and no number equals that.
    return [str((r["step"], r["loss"], r["lr"], r["grad_norm"], r.get("loss_scale"))) for r in records]


def straight_id(tmp_path):
    (only,) = (tmp_path / "straight").iterdir()
    return only.name


def test_a_finished_run_is_left_untouched(tmp_path, capsys):
    settings = {"batch_size": 8, "steps": 3, "run": {"dir": str(tmp_path), "name": "a"}, "resume": "auto"}
    first = Mlp(**settings).fit()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert Mlp(**settings).fit()["id"] == first["id"]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert "done already" in capsys.readouterr().out


def test_resume_takes_a_path_to_a_run_or_to_one_of_its_checkpoints(tmp_path):
    settings = {
        "batch_size": 8,
        "steps": 4,
        "checkpoint": {"every": 1, "keep": 3},
        "run": {"dir": str(tmp_path), "name": "a", "id": "b"},
    }
    Mlp(**settings).fit()
    run_dir = tmp_path / "a" / "b"
    assert [checkpoint.step for checkpoint in checkpoints_in(run_dir)] == [2, 3, 4]
    again = Mlp(**{**settings, "steps": 6}, resume=str(run_dir / "checkpoints" / "step-3"))
    assert again.fit()["steps"] == 6
    # The folder of a name stands for its newest unfinished run, or its newest: this one, which is done.
    assert Mlp(**{**settings, "steps": 7}, resume=str(run_dir.parent)).fit()["steps"] == 7
    with pytest.raises(ConfigError, match="there is no checkpoint"):
        Mlp(**settings, resume=str(tmp_path / "nowhere")).fit()


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    Mlp(batch_size=8, steps=1, run={"dir": str(tmp_path), "name": "a", "id": "b"}).fit()
    checkpoint = newest(tmp_path / "a" / "b").path

    class Wider(Mlp):
        def build_model(self):
            return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))

    with pytest.raises(CheckpointError, match="another model"):
        Wider(batch_size=8, run={"dir": None}).restore(checkpoint)

    class Deeper(Mlp):
        def build_model(self):
            return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4), nn.Linear(4, 4))

    with pytest.raises(CheckpointError, match="lacks"):
        Deeper(batch_size=8, run={"dir": None}).restore(checkpoint)


def test_checkpoints_hold_no_pickle(tmp_path):
    Mlp(batch_size=8, steps=1, run={"dir": str(tmp_path), "name": "a", "id": "b"}).fit()
    files = sorted(path.name for path in newest(tmp_path / "a" / "b").path.iterdir())
    assert [name.rpartition(".")[2] for name in files] == ["json", "safetensors", "json"]


def test_tied_weights_stand_once_and_stay_tied(tmp_path):
    class Tied(Mlp):
        def build_model(self):
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
            model[1].weight = model[0].weight
            return model

    Tied(batch_size=8, steps=2, run={"dir": str(tmp_path), "name": "a", "id": "b"}).fit()
    tensors = weights(tmp_path / "a" / "b")
    assert "model.0.weight" in tensors
    assert "model.1.weight" not in tensors
    again = Tied(batch_size=8, seed=5, run={"dir": None})
    again.restore(newest(tmp_path / "a" / "b").path)
    assert again.model[1].weight is again.model[0].weight
    assert torch.equal(again.model[0].weight, tensors["model.0.weight"])


@pytest.mark.slow
def test_a_run_killed_by_sigterm_in_mid_epoch_ends_with_the_same_weights(tmp_path):
    settings = ["--config", DIGITS, "epochs=3", f"run.dir={tmp_path}", "log.every=1", "evaluate.every=1000"]
    straight = run(*settings, "run.name=straight", "run.id=a")
    assert straight.returncode == 0, straight.stderr
    process = start(*settings, "run.name=killed", "run.id=a", "resume=auto")
    wait_for_step(process, tmp_path / "killed" / "a", 5)
    code, output = end(process, signal.SIGTERM)
    assert code == 75, output
    summary = json.loads((tmp_path / "killed" / "a" / "summary.json").read_text())
    assert summary["status"] == "stopped"
    assert 5 <= summary["steps"] < 69
    assert summary["steps"] % 23 != 0
    again = run(*settings, "run.name=killed", "run.id=a", "resume=auto")
    assert again.returncode == 0, again.stderr
    one, other = weights(tmp_path / "straight" / "a"), weights(tmp_path / "killed" / "a")
    assert set(one) == set(other)
    assert len(one) > 50
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    lines = (tmp_path / "killed" / "a" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines if "loss" in json.loads(line)]
    assert steps == list(range(1, 70))


def test_the_loss_of_a_resumed_run_is_that_of_plain_pytorch(tmp_path):
    """The scaler, the schedule and the optimizer are compared with torch's own through a save and a load."""
    x, y = points()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(by_dimension(model), lr=0.01, fused=True)
    for _ in range(6):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    class Ordered(Mlp):
        def build_data(self):
            return Data(train=points(), shuffle=False)

    settings = {"batch_size": 24, "optimizer": {"name": "adamw", "lr": 0.01}}
    Ordered(**settings, steps=3, run={"dir": str(tmp_path), "name": "a", "id": "b"}).fit()
    trainer = Ordered(**settings, steps=6, resume=str(tmp_path / "a" / "b"))
    trainer.fit()
    assert largest_difference(state(trainer), model.state_dict()) == 0.0


def test_a_run_that_another_process_writes_is_not_taken_up(tmp_path):
    settings = ["--config", DIGITS, "log.every=1", "epochs=500", f"run.dir={tmp_path}"]
    process = start(*settings, "run.id=a")
    try:
        wait_for_step(process, tmp_path / "resnet-digits" / "a", 1)
        named = run(*settings, "run.id=a", "resume=auto")
        assert named.returncode == 2
        assert f"is being written by process {process.pid} now" in named.stderr
        # Without a name, it is no run to take up: a new one begins.
        other = run(*settings, "resume=auto", "epochs=null", "steps=1")
        assert other.returncode == 0, other.stderr
        assert len(list((tmp_path / "resnet-digits").iterdir())) == 2
    finally:
        end(process, signal.SIGKILL)
    # Killed, it is one.
    again = run(*settings, "run.id=a", "resume=auto", "epochs=null", "steps=1")
    assert again.returncode == 0, again.stderr


def test_another_batch_size_with_epochs_says_how_many_steps_are_meant(tmp_path):
    settings = {"run": {"dir": str(tmp_path), "name": "a", "id": "b"}, "checkpoint": {"every": 1, "keep": None}}
    Mlp(**settings, batch_size=8, steps=4).fit()  # 3 steps an epoch of 24: one epoch and a third
    checkpoint = str(tmp_path / "a" / "b" / "checkpoints" / "step-4")
    with pytest.raises(ConfigError, match=r"is at step 4 with batches of 8.* steps=8 ends after the same epochs"):
        Mlp(**settings, batch_size=4, epochs=2, resume=checkpoint).fit()
    # 16 samples are left of the second epoch: 4 steps; and 6 a further epoch.
    done = Mlp(**settings, batch_size=4, steps=8, resume=checkpoint).fit()
    assert (done["status"], done["epochs"]) == ("done", 2.0)


def test_a_checkpoint_beyond_the_planned_end_is_refused(tmp_path):
    settings = {"batch_size": 8, "run": {"dir": str(tmp_path), "name": "a", "id": "b"}}
    Mlp(**settings, steps=4).fit()
    with pytest.raises(ConfigError, match="is at step 4, beyond the 2 steps planned here; give more"):
        Mlp(**settings, steps=2, resume=str(tmp_path / "a" / "b")).fit()


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_it(tmp_path, capsys):
    settings = {
        "batch_size": 8,
        "checkpoint": {"every": 2, "keep": 2},
        "run": {"dir": str(tmp_path), "name": "a", "id": "b"},
    }
    run_dir = tmp_path / "a" / "b"
    with pytest.raises(RuntimeError, match="stopped here"):
        Mlp(**settings, steps=6, observers=[Breaks(at=5)]).fit()
    assert [checkpoint.step for checkpoint in checkpoints_in(run_dir)] == [2, 4]
    for file in (run_dir / "checkpoints" / "step-4").glob("*.safetensors"):
        file.unlink()
    recorder = Recorder()
    Mlp(**settings, steps=3, resume="auto", log={"every": 1}, observers=[recorder]).fit()
    assert [record["step"] for record in recorder.steps] == [3]
    said = capsys.readouterr().err
    assert "step-4 is damaged (shard-00001-model-00001-of-00001.safetensors is not there" in said
    assert [checkpoint.step for checkpoint in checkpoints_in(run_dir)] == [2, 3, 4]  # the damaged one is not counted


def test_where_no_checkpoint_is_whole_the_missing_file_is_named(tmp_path):
    settings = {"batch_size": 8, "run": {"dir": str(tmp_path), "name": "a", "id": "b"}}
    Mlp(**settings, steps=1).fit()
    checkpoint = newest(tmp_path / "a" / "b")
    next(checkpoint.path.glob("*.safetensors")).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"is damaged: shard-.*safetensors is not there or was cut short"):
        Mlp(**settings, steps=2, resume=str(checkpoint.path)).fit()


class Breaks(Recorder):
    """Fails at a step, as a crash would."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def saved(self, record):
        if record["step"] == self.at - 1:
            raise RuntimeError("stopped here")
