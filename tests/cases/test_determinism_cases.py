"""Reported faults of determinism flags, each kind by the name of its case."""

# The names of the cases are written in capitals.

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from fasttrain.config import load, peek
from tests.commands import ROOT, environment
from tests.helpers import QUIET, Mlp

MODULE = """
import os, sys
where = os.path.join(os.path.dirname(__file__), "seen." + os.environ.get("RANK", "0"))
with open(where, "w") as file:
    file.write(f"{os.environ.get('CUBLAS_WORKSPACE_CONFIG')} {'torch' in sys.modules}")
from tests.helpers import Mlp
class Net(Mlp):
    pass
"""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("asked", "own", "seen"),
    [("true", None, ":4096:8"), ("warn", None, ":4096:8"), ("true", ":16:8", ":16:8"), ("false", None, "None")],
)
def test_DETERM_1_the_workspace_is_fixed_before_torch_is_imported_in_each_rank_and_a_users_value_stays(
    tmp_path, asked, own, seen
):
    (tmp_path / "net.py").write_text(MODULE)
    (tmp_path / "config.yaml").write_text(
        f"trainer: net:Net\nbatch_size: 8\nsteps: 1\nrun: {{dir: null}}\ndeterministic: {asked}\n"
    )
    env = {key: value for key, value in environment(PYTHONPATH=str(ROOT)).items() if key != "CUBLAS_WORKSPACE_CONFIG"}
    if own is not None:
        env["CUBLAS_WORKSPACE_CONFIG"] = own
    command = [sys.executable, "-m", "fasttrain", "--config", str(tmp_path / "config.yaml")]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "seen.0").read_text() == f"{seen} False"


@pytest.mark.ranks
def test_DETERM_1_under_torchrun_each_rank_has_it(tmp_path):
    (tmp_path / "net.py").write_text(MODULE)
    (tmp_path / "config.yaml").write_text("trainer: net:Net\nbatch_size: 8\nsteps: 1\nrun: {dir: null}\n")
    env = {key: value for key, value in environment(PYTHONPATH=str(ROOT)).items() if key != "CUBLAS_WORKSPACE_CONFIG"}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
        "-m",
        "fasttrain",
    ]
    command += ["--config", str(tmp_path / "config.yaml"), "deterministic=true", "device=cpu"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"seen.{rank}").read_text() for rank in (0, 1)] == [":4096:8 False"] * 2


def flags():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
        torch.is_anomaly_enabled(),
    )


class Scatters(Mlp):
    """Uses an operation that torch has no deterministic kernel for."""

    during = ()

    def compute_loss(self, batch):
        type(self).during = flags()
        torch.zeros(4).put_(torch.tensor([1]), torch.ones(1))
        return super().compute_loss(batch)


class Notes(Mlp):
    during = ()

    def compute_loss(self, batch):
        type(self).during = flags()
        return super().compute_loss(batch)


@pytest.mark.parametrize(
    ("settings", "during"),
    [
        ({"deterministic": False}, (False, False, True, False)),
        ({"deterministic": True}, (True, False, False, False)),
        ({"deterministic": "warn"}, (True, True, False, False)),
        ({"debug": True}, (False, False, True, True)),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_DETERM_2_flags_are_set_for_a_run_and_as_before_after_it(monkeypatch, settings, during):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    before = flags()
    trainer = Notes(batch_size=8, steps=1, **settings, **QUIET)
    for steps in (1, 2):  # also where one trainer is fitted twice
        trainer.feed.total_steps = steps
        trainer.fit()
        assert Notes.during == during
        assert flags() == before
    Notes(batch_size=8, steps=1, **settings, **QUIET)  # never fitted
    Notes(batch_size=8, steps=1, **QUIET)
    assert flags() == before


def test_DETERM_2_what_the_user_set_stays_where_nothing_is_asked_for():
    torch.use_deterministic_algorithms(True)
    try:
        Notes(batch_size=8, steps=1, **QUIET).fit()
        assert Notes.during[0] is True
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_DETERM_2_an_operation_without_a_deterministic_kernel_raises_with_its_name_or_warns():
    before = flags()
    with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
        Scatters(batch_size=8, steps=1, deterministic=True, **QUIET).fit()
    assert flags() == before
    with pytest.warns(UserWarning, match="put_ does not have a deterministic implementation"):
        assert Scatters(batch_size=8, steps=1, deterministic="warn", **QUIET).fit()["steps"] == 1
    assert flags() == before


def test_a_setting_is_looked_up_before_anything_is_imported(tmp_path):
    (tmp_path / "base.yaml").write_text("batch_size: 8\ndeterministic: yes\ntrainer: no.such:Module\n")
    (tmp_path / "config.yaml").write_text("extends: base.yaml\nsteps: 3\n")
    path = tmp_path / "config.yaml"
    assert peek(path, [], "deterministic") == "yes"
    assert peek(path, ["deterministic=warn"], "deterministic") == "warn"
    assert peek(path, [], "seed") is None
    assert peek(tmp_path / "none.yaml", [], "seed") is None


@pytest.mark.parametrize(("text", "value"), [("true", True), ("no", False), ("warn", "warn")])
def test_the_setting_takes_yes_no_and_warn(tmp_path, text, value):
    (tmp_path / "config.yaml").write_text(f"trainer: tests.helpers:Mlp\nbatch_size: 8\ndeterministic: {text}\n")
    assert load(tmp_path / "config.yaml").settings.deterministic == value
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") in (None, ":4096:8", ":16:8")
