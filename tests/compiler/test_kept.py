"""A run keeps what it compiles beside its project, and leaves the process as it was."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from fasttrain.compiler.cache import cache_key, own_cache
from fasttrain.strategies.compile import Blocks
from tests.helpers import QUIET
from tests.stack import Stack, StackModel

CPU = torch.device("cpu")
INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
# torch writes its own place into the environment when it first looks there.
TORCHS = (None, default_cache_dir())


@pytest.fixture(autouse=True)
def torchs_own_place(monkeypatch):
    own_cache()
    monkeypatch.setenv(INDUCTOR, "removed below, put back afterwards")
    monkeypatch.delenv(INDUCTOR)
    yield
    own_cache()


class Idle(Stack):
    """A run in which nothing that was to be compiled is ever called: inductor takes no time."""

    def build_model(self):
        model = StackModel()
        model.unused = nn.Linear(1, 1)
        return model

    def blocks(self, model):
        return [model.unused]


class Looks(Idle):
    """The same, writing down where torch looks for compiled code in each step."""

    def compute_loss(self, batch):
        self.seen = os.environ.get(INDUCTOR)
        return super().compute_loss(batch)


def looking(tmp_path, **settings):
    return Looks(batch_size=8, steps=1, run={"dir": str(tmp_path / "runs")}, compile={"name": "blocks", **settings})


def test_a_run_keeps_it_beside_the_runs_of_its_project_and_puts_torchs_place_back(tmp_path):
    trainer = looking(tmp_path)
    kept = tmp_path / "runs" / ".compile" / cache_key(CPU)
    assert trainer.plan.notes() == [f"compile=blocks: compiled code is kept in {kept} (empty)"]
    trainer.fit()
    assert trainer.seen == str(kept)
    assert INDUCTOR not in os.environ
    (kept / "aotautograd" / "agraph").mkdir(parents=True)
    again = looking(tmp_path)
    assert again.plan.notes() == [f"compile=blocks: compiled code is kept in {kept} (1 graphs)"]
    again.fit()
    assert again.seen == trainer.seen


def test_a_run_that_fails_puts_it_back_too(tmp_path):
    class Fails(Looks):
        def compute_loss(self, batch):
            seen.append(os.environ[INDUCTOR])
            raise RuntimeError("as planned")

    seen = []
    trainer = Fails(batch_size=8, steps=1, compile={"name": "blocks", "cache": str(tmp_path)}, **QUIET)
    with pytest.raises(RuntimeError, match="as planned"):
        trainer.fit()
    assert seen == [str(tmp_path / cache_key(CPU))]
    assert INDUCTOR not in os.environ


def test_of_two_trainers_the_last_one_that_was_built_has_its_place(tmp_path):
    first = looking(tmp_path / "a")
    second = looking(tmp_path / "b")
    second.fit()
    assert Path(second.seen).is_relative_to(tmp_path / "b")
    assert INDUCTOR not in os.environ
    first.fit()
    assert first.seen in TORCHS


@pytest.mark.parametrize("settings", [{"cache": None}, {"cache": None, "artifacts": "none.bin"}, {"backend": "eager"}])
def test_torchs_place_stays_on_wish_and_with_backends_that_keep_nothing(tmp_path, settings, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where the file of artifacts is written
    trainer = looking(tmp_path, **settings)
    assert trainer.plan.notes() == []
    trainer.fit()
    assert trainer.seen in TORCHS
    assert not (tmp_path / "runs" / ".compile").exists()


def test_without_a_run_folder_torchs_place_stays():
    trainer = Looks(batch_size=8, steps=1, compile="blocks", **QUIET)
    trainer.fit()
    assert trainer.seen in TORCHS


def test_a_cache_that_cannot_be_used_is_told_and_the_run_trains(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "graphs.bin").write_text("no artifacts")
    trainer = looking(tmp_path, cache=str(tmp_path / "file"), artifacts=str(tmp_path / "graphs.bin"))
    told = trainer.plan.notes()
    assert len(told) == 2
    assert "file is no folder" in told[0]
    assert "graphs.bin is no file of compile artifacts" in told[1]
    assert trainer.fit()["status"] == "done"
    assert trainer.seen in TORCHS


def test_caches_that_are_turned_off_are_told(tmp_path):
    with torch.compiler.config.patch(force_disable_caches=True):
        assert looking(tmp_path).plan.notes() == [
            "compile=blocks: nothing that is compiled is kept (TORCHINDUCTOR_FORCE_DISABLE_CACHES)"
        ]


def test_only_rank_0_writes_artifacts(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr("fasttrain.compiler.kept.save_artifacts", lambda path, device, known: written.append(path))
    trainer = looking(tmp_path, artifacts=str(tmp_path / "graphs.bin"))
    trainer.fit()
    assert written == [tmp_path / "graphs.bin"]
    trainer.plan.ended()
    assert len(written) == 1
    strategy = trainer.plan.strategies["compile"]
    assert isinstance(strategy, Blocks)
    strategy.kept._ended, strategy.kept._writes = False, False
    trainer.plan.ended()
    assert len(written) == 1
