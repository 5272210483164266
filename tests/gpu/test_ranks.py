"""Ranks over NCCL: one process that sends to itself, and as many as there are GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from fasttrain.distributed import world
from fasttrain.distributed.communication_hooks import make_hook
from fasttrain.distributed.gradient_buckets import GradientAverager
from fasttrain.distributed.reductions import add_over_ranks
from tests.commands import ROOT
from tests.stack import StackModel, batches_of, gradients


@pytest.fixture
def nccl(tmp_path):
    torch.cuda.set_device(0)
    store = (tmp_path / "store").as_uri()
    backends = world.BACKENDS["cuda"]
    dist.init_process_group(backends, init_method=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("hook", [None, "bf16", "powersgd"])
@pytest.mark.usefixtures("nccl")
def test_buckets_over_nccl_leave_the_gradients_of_one_process_as_they_are(hook):
    torch.manual_seed(0)
    model = StackModel().cuda()
    x, y = (tensor.cuda() for tensor in batches_of()[0])
    F.cross_entropy(model(x), y).backward()
    expected = gradients(model)
    averager = GradientAverager(hook=None if hook is None else make_hook(hook))
    averager.add(model)
    for _ in range(3):
        model.zero_grad()
        with averager._last:  # `last()` would do nothing on one rank
            F.cross_entropy(model(x), y).backward()
        found = gradients(model)
        assert set(found) == set(expected)
        for name, grad in found.items():
            assert torch.allclose(grad, expected[name], rtol=1e-2 if hook == "bf16" else 0.0, atol=1e-7), name
    assert averager.traffic.rounds == 3
    assert averager.traffic.early == averager.traffic.reductions > 0


@pytest.mark.usefixtures("nccl")
def test_what_the_host_says_to_other_ranks_goes_over_gloo():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    every = [None]
    dist.all_gather_object(every, {"loss": (1.0, 2.0)})
    numbers = torch.ones(2, dtype=torch.float64)
    dist.all_reduce(numbers)
    assert every == [{"loss": (1.0, 2.0)}]
    assert add_over_ranks({"a": (1.0, 1.0)}, 1) == {"a": (1.0, 1.0)}
    torch.cuda.set_sync_debug_mode("default")
    dist.barrier()


def losses(run_dir, ranks, *settings):
    """The loss of each step of the quickstart, on so many GPUs."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    config = str(ROOT / "configs" / "resnet_digits.yaml")
    shown = ["log.every=1", "steps=20", "model.norm=group", f"run.dir={run_dir}", "run.name=a", "run.id=b"]
    command = [sys.executable, *launcher, "-m", "fasttrain", "--config", config, *shown, "device=cuda", *settings]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    lines = (run_dir / "a" / "b" / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


@pytest.mark.ranks
def test_all_gpus_train_as_one_does(tmp_path):
    ranks = torch.cuda.device_count()
    if ranks < 2:
        pytest.skip("there is one GPU; this needs two or more")
    one, many = losses(tmp_path / "one", 1), losses(tmp_path / "many", ranks)
    assert len(one) == len(many) == 20
    assert many == pytest.approx(one, rel=1e-2)
    assert many[:3] == pytest.approx(one[:3], rel=1e-5)
