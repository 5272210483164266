"""What a device must never see, and the host must never ask, checked without one."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fasttrain.core.strategy import Context
from fasttrain.core.task import Task, weights_of
from fasttrain.distributed.reductions import read_together
from fasttrain.optim.guarded import obeys_found_inf
from tests.helpers import QUIET, Mlp


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
