"""What a device must never see, and the host must never ask, checked without one."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from fasttrain import Trainer
from fasttrain.core.strategy import Context
from fasttrain.core.task import Task, weights_of
from fasttrain.data.seeds import mix
from fasttrain.distributed import world
from fasttrain.distributed.reductions import read_together
from fasttrain.errors import ConfigError
from fasttrain.optim.averages import floating_buffers
from fasttrain.optim.guarded import obeys_found_inf
from tests.helpers import QUIET, Mlp, points


class Operations(TorchDispatchMode):
    """The names of all operations inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


def test_figures_on_the_host_are_read_without_a_transfer_and_the_others_in_one():
    with Operations() as seen:
        read = read_together({"a": torch.tensor(3), "b": torch.tensor([2.5], requires_grad=True), "c": 4})
    assert read == {"a": 3.0, "b": 2.5, "c": 4.0}
    assert "stack.default" not in seen.names
    assert "_local_scalar_dense.default" not in seen.names
    assert all(type(value) is float for value in read.values())


def test_figures_of_a_device_and_of_the_host_are_not_mixed():
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor") as caught:
        read_together({"rate": torch.tensor(0.1), "loss": torch.zeros((), device="meta")})
    # The transfer is that of the stack, and not of each figure to the host.
    assert any(entry.name == "read_together" for entry in caught.traceback)
    assert "stacked.cpu()" in str(caught.traceback[-1].statement)


@pytest.mark.parametrize(("device", "obeys"), [("cpu", True), ("meta", False)])
def test_a_fused_optimizer_obeys_where_its_kernel_is_known_to(device, obeys):
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.param_groups[0]["params"] = [torch.nn.Parameter(torch.zeros(2, device=device))]
    assert obeys_found_inf(optimizer) is obeys


class Counting(Mlp):
    """Counts on the batch, so evaluation weighs by a tensor; one metric is a plain number."""

    def count(self, batch):
        return (batch[1] >= 0).sum()

    def metrics(self, output, batch):
        return {"size": 0.1, "right": (output.argmax(1) == batch[1]).float().mean()}


def test_a_metric_may_be_a_plain_number_where_the_count_is_a_tensor():
    result = Counting(batch_size=8, steps=1, evaluate={"batch_size": 4}, **QUIET).evaluate()
    assert result["size"] == 0.1
    assert 0.0 <= result["right"] <= 1.0


class Half(Mlp):
    def metrics(self, output, batch):
        return {"third": torch.full((), 1 / 3, dtype=torch.bfloat16)}


def test_sums_of_an_evaluation_are_wider_than_its_metrics():
    result = Half(batch_size=8, steps=1, evaluate={"batch_size": 1}, **QUIET).evaluate()
    assert result["third"] == pytest.approx(torch.tensor(1 / 3, dtype=torch.bfloat16).item(), rel=1e-12)


def test_counts_of_a_device_and_of_the_host_are_weighed_on_the_device_without_a_copy():
    context = Context(device=torch.device("cpu"))
    task = Task(model=None, compute_loss=None, count=lambda microbatch: microbatch)
    counts = [torch.ones((), device="meta"), 2, torch.tensor(3)]
    with Operations() as seen:
        weights = weights_of(task, None, counts, context)
    assert [weight.device.type for weight in weights] == ["meta"] * 3
    assert not {"_to_copy.default", "_local_scalar_dense.default", "copy_.default"} & set(seen.names)


class Broken(Mlp):
    """After the second step the device answers nothing more, as CUDA does after an assert in a kernel."""

    def train_step(self, batch):
        if self.step == 2:

            def refused(optimizer):
                raise RuntimeError("CUDA error: device-side assert triggered")

            self.plan.refused = refused
            raise RuntimeError("CUDA error: device-side assert triggered")
        return super().train_step(batch)


def test_a_run_whose_device_failed_still_says_so_in_its_summary(tmp_path, monkeypatch):
    monkeypatch.setattr(world, "_abandoned", False)
    run = {"dir": str(tmp_path), "name": "a", "id": "b"}
    with pytest.raises(RuntimeError, match="device-side assert") as caught:
        Broken(batch_size=8, steps=4, run=run).fit()
    assert caught.value.__context__ is None
    summary = json.loads((tmp_path / "a" / "b" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["refused_steps"]) == ("failed", 2, None)
    assert summary["reason"] == "RuntimeError: CUDA error: device-side assert triggered"


@pytest.mark.parametrize(
    ("backends", "failed", "destroyed"),
    [
        ("cpu:gloo,cuda:nccl", False, 1),
        ("cpu:gloo,cuda:nccl", True, 0),
        ("cpu:gloo,xpu:xccl", True, 0),
        ("cpu:gloo,cuda:gloo", True, 1),
    ],
)
def test_a_rank_that_failed_does_not_wait_for_collectives_of_the_others(monkeypatch, backends, failed, destroyed):
    calls = []
    monkeypatch.setattr(world, "_abandoned", False)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append(1))
    for name in ("is_initialized", "get_backend_config", "destroy_process_group"):
        world.dist.__dict__.pop(name, None)  # what the lazy module looked up earlier
    if failed:
        world.abandon()
    try:
        world.leave()
    finally:
        for name in ("is_initialized", "get_backend_config", "destroy_process_group"):
            world.dist.__dict__.pop(name, None)
    assert len(calls) == destroyed


@pytest.fixture
def two_ranks_on():
    """A process group of two ranks, of which this is one, that sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def begin(backend):
        dist.init_process_group(backend, store=FakeStore(), rank=0, world_size=2)

    yield begin
    dist.destroy_process_group()


def test_a_group_that_cannot_carry_both_host_and_device_is_refused(two_ranks_on):
    two_ranks_on("cuda:fake")
    with pytest.raises(ConfigError) as caught:
        world.join("cpu")
    assert "carries tensors of cuda, and a run on cpu needs cpu; use init_process_group(" in str(caught.value)
    with pytest.raises(ConfigError, match='use init_process_group\\("cpu:gloo,cuda:nccl"\\)'):
        world._check_carriers(torch.device("cuda", 0))


def test_a_group_that_carries_both_is_taken_and_its_device_made_the_current_one(two_ranks_on, monkeypatch):
    two_ranks_on("cpu:fake,cuda:fake")
    chosen = []
    monkeypatch.setattr(world, "pick_device", lambda asked, local_rank: torch.device("cuda", local_rank))
    monkeypatch.setattr(world, "torch", SimpleNamespace(accelerator=SimpleNamespace(set_device_index=chosen.append)))
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert world.join().device == torch.device("cuda", 3)
    assert chosen == [3]


def test_several_ranks_do_not_share_a_device_that_was_named(monkeypatch):
    monkeypatch.setattr(world, "pick_device", lambda asked, local_rank: torch.device("cuda", 0))
    monkeypatch.setattr(
        world, "torch", SimpleNamespace(accelerator=SimpleNamespace(set_device_index=lambda index: None))
    )
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="all would take the same one; use device=cuda"):
        world.join("cuda:0")


def test_a_loss_that_holds_tensors_goes_where_the_model_goes():
    class OnMeta(Trainer):
        def place(self, model):
            return model.to("meta")

    loss = torch.nn.CrossEntropyLoss(weight=torch.ones(4))
    trainer = OnMeta.from_parts(torch.nn.Linear(8, 4), points(), loss, batch_size=8, steps=1, **QUIET)
    assert loss.weight.device.type == "meta"
    assert {parameter.device.type for parameter in trainer.model.parameters()} == {"meta"}


def test_a_device_whose_generator_was_not_saved_draws_what_a_resumed_run_draws(tmp_path, monkeypatch):
    run = {"dir": str(tmp_path), "name": "a", "id": "b"}
    Mlp(batch_size=8, steps=3, run=run, checkpoint={"every": 2}).fit()
    seeds = []
    monkeypatch.setattr("fasttrain.trainer.state.seed_everything", seeds.append)
    Mlp(batch_size=8, steps=3, **QUIET).restore(tmp_path / "a" / "b" / "checkpoints" / "step-2")
    assert seeds == [mix(0, "resumed", 2, 0)]


def test_buffers_that_can_be_averaged_are_told_in_one_read_however_many_there_are():
    model = torch.nn.Sequential(*(torch.nn.BatchNorm1d(4) for _ in range(5)))
    model[1].running_var[2] = float("inf")
    with Operations() as seen:
        found = floating_buffers(model)
    expected = [f"{i}.{name}" for i in range(5) for name in ("running_mean", "running_var")]
    assert list(found) == [name for name in expected if name != "1.running_var"]
    assert seen.names.count("stack.default") == 1
    # `tolist` reads what lies on the host; a device would be asked once.
    assert seen.names.count("_to_copy.default") == 0
    assert list(floating_buffers(model.to("meta"))) == expected
