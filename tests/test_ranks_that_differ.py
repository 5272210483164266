"""Ranks with different settings or data would wait for each other, or train on other samples: they are told."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fasttrain import ConfigError, Data
from tests.helpers import QUIET, Mlp, points
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks


class OtherSize(Mlp):
    def build_data(self):
        return Data(train=points(24 + 8 * self.world.rank))


class OnlyOneEvaluates(Mlp):
    def build_data(self):
        return Data(train=points(24), evaluation=None if self.world.rank else points(8))


class Photos(torch.utils.data.Dataset):
    """A folder in which one host lacks a class, and has as many images."""

    def __init__(self, classes):
        self.classes = classes

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.zeros(8), 0

    def fingerprint(self):
        return f"24 images of {self.classes} classes"


class LacksAClass(Mlp):
    def build_data(self):
        return Data(train=Photos(27 - self.world.rank))


CASES = {
    "data=24 images of 27 classes on rank 0 and data=24 images of 26 classes on rank 1": (LacksAClass, {}),
    "samples=24 on rank 0 and samples=32 on rank 1": (OtherSize, {}),
    "evaluation samples=8 on rank 0 and evaluation samples=None on rank 1": (OnlyOneEvaluates, {}),
    "seed=0 on rank 0 and seed=1 on rank 1": (Mlp, {"seed": (0, 1)}),
    "log.every=1 on rank 0 and log.every=2 on rank 1": (Mlp, {"log": ({"every": 1}, {"every": 2})}),
}


def all_told():
    """What each case says on this rank."""
    found = []
    for cls, by_rank in CASES.values():
        settings = {name: value[dist.get_rank()] for name, value in by_rank.items()}
        with pytest.raises(ConfigError) as told:
            cls(batch_size=8, **{**QUIET, **settings})
        found.append(str(told.value))
    return found


def test_what_differs_is_named_on_every_rank():
    for found in run_ranks(2, all_told):
        assert len(found) == len(CASES) == 5
        for expected, message in zip(CASES, found, strict=True):
            assert expected in message
            assert "without asking for the rank" in message


TRAINER = """
from fasttrain.errors import ConfigError
from tests.helpers import Mlp


class Choosy(Mlp):
    def build_data(self):
        if self.world.rank == 1:
            raise ConfigError("rank 1 alone found this.")
        return super().build_data()


class Agreeing(Mlp):
    def build_data(self):
        raise ConfigError("every rank found this.")
"""


@pytest.mark.parametrize(
    ("name", "said"), [("Choosy", "rank 1 alone found this."), ("Agreeing", "every rank found this.")]
)
def test_a_wrong_request_that_any_rank_finds_is_told_once(tmp_path, name, said):
    (tmp_path / "choosy.py").write_text(TRAINER)
    (tmp_path / "config.yaml").write_text(f"trainer: choosy:{name}\nbatch_size: 8\nsteps: 1\nrun: {{dir: null}}\n")
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fasttrain"]
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, *words, "--config", "config.yaml"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{tmp_path}:{root}"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.count(said) == 1
