"""Buckets of gradients: what is sent, when, in how many bytes, and that it is what torch's DDP computes."""

from __future__ import annotations

import copy
import gc
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from fasttrain.distributed.communication_hooks import make_hook
from fasttrain.distributed.gradient_buckets import average_gradients
from tests.distributed.training import Counted, batch, equal, loss_of, nothing, plan_on_ranks, steps, wide
from tests.ranks import run_ranks

BUCKET_MBS = [25.0, 0.01, 1e-6]


def against_ddp() -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for bucket_mb in BUCKET_MBS:
        torchs = steps(DistributedDataParallel(wide(), bucket_cap_mb=bucket_mb), nothing)
        for bucket_view in (True, False):
            model = wide()
            averager = average_gradients(model, bucket_mb=bucket_mb, bucket_view=bucket_view)
            seen[f"{bucket_mb} {bucket_view}"] = equal(steps(model, averager.last), torchs)
            seen[f"{bucket_mb} buckets"] = averager.traffic.reductions // 4
    for name, torch_hook in (("bf16", default_hooks.bf16_compress_hook), ("fp16", default_hooks.fp16_compress_hook)):
        wrapped = DistributedDataParallel(wide())
        wrapped.register_comm_hook(None, torch_hook)
        model = wide()
        averager = average_gradients(model, hook=make_hook(name), bucket_mb=0.01)
        ours = steps(model, averager.last)
        seen[f"{name} equals torch's"] = equal(ours, steps(wrapped, nothing))
        seen[f"{name} gradients of the first step"] = ours[:8]
    return seen


@pytest.fixture(scope="module")
def compared() -> list[dict[str, Any]]:
    return run_ranks(2, against_ddp)


@pytest.mark.ranks
@pytest.mark.parametrize("bucket_view", [True, False])
@pytest.mark.parametrize("bucket_mb", BUCKET_MBS)
def test_gradients_have_the_bits_of_torchs_ddp(
    compared: list[dict[str, Any]], bucket_mb: float, bucket_view: bool
) -> None:
    for seen in compared:
        assert seen[f"{bucket_mb} {bucket_view}"]


@pytest.mark.ranks
def test_bucket_mb_sets_the_number_of_buckets(compared: list[dict[str, Any]]) -> None:
    # 4 layers of 64 x 64 weights (16 KiB) and 64 biases: all together; by 10 KiB, a weight and the biases before it,
    # so that the first bias is left over; one by one.
    for seen in compared:
        assert [seen[f"{bucket_mb} buckets"] for bucket_mb in BUCKET_MBS] == [1, 4, 8]


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "rounding"), [("bf16", 2.0**-8), ("fp16", 2.0**-11)])
def test_half_precision_hooks_are_torchs_and_round_once(
    compared: list[dict[str, Any]], name: str, rounding: float
) -> None:
    model, x = wide(), batch(0)
    loss_of(model(x), x).backward()
    for seen in compared:
        assert seen[f"{name} equals torch's"]
        for ours, parameter in zip(seen[f"{name} gradients of the first step"], model.parameters(), strict=True):
            assert parameter.grad is not None
            assert not torch.equal(ours, parameter.grad)
            # Each share is rounded, and so is their sum.
            assert (ours - parameter.grad).abs().max() <= 2 * rounding * parameter.grad.abs().max()


def storages(tensors: list[Tensor]) -> int:
    """Bytes behind tensors, each storage once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def counting() -> dict[str, Any]:
    rank = dist.get_rank()
    seen: dict[str, Any] = {}

    # NO-SYNC-1: gradients 8 and 2 over a window of four, forward outside and inside of the context
    for where in ("outside", "inside"):
        plan, strategy = plan_on_ranks()
        model = nn.Linear(1, 1, bias=False)
        plan.model(model)
        part = torch.full((1, 1), (2.0, 0.5)[rank])
        with Counted() as counted:
            for i in range(4):
                if where == "outside":
                    loss = model(part).sum()
                    with plan.microbatch(i == 3):
                        loss.backward()
                else:
                    with plan.microbatch(i == 3):
                        model(part).sum().backward()
        seen[f"NO-SYNC-1 {where}"] = (model.weight.grad.item(), counted.sums, strategy.averager.traffic.rounds)

    # NO-SYNC-3: two modules and one without parameters between them, a window of two
    plan, strategy = plan_on_ranks()
    parts = [plan.model(part) for part in (nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))]
    x = torch.randn(4, 2, generator=torch.Generator().manual_seed(rank))
    with Counted() as counted:
        for i in range(2):
            with plan.microbatch(i == 1):
                nn.Sequential(*parts)(x).sum().backward()
    seen["NO-SYNC-3"] = (counted.sums, counted.reads, strategy.averager.traffic.bytes)
    seen["NO-SYNC-3 gradients"] = [p.grad for part in parts for p in part.parameters()]

    # memory: bytes behind gradients and buckets when backward has ended, and after the step
    for bucket_view in (True, False):
        model = wide(128)
        averager = average_gradients(model, bucket_mb=0.05, bucket_view=bucket_view)
        with averager.last():
            x = batch(0, rank, 128)
            loss_of(model(x), x).backward()
            flying = [bucket.buffer for bucket in averager._layout.buckets if bucket.buffer is not None]
            seen[f"during {bucket_view}"] = storages([p.grad for p in model.parameters()] + flying)
            del flying
        gc.collect()
        seen[f"after {bucket_view}"] = storages([p.grad for p in model.parameters()])
        seen[f"flags {bucket_view}"] = averager.traffic.bytes - 4 * sum(p.numel() for p in model.parameters())

    # overlap: what has left when the gradient of the first layer, the last one, is there
    model = wide()
    averager = average_gradients(model, bucket_mb=0.01)
    left = []
    model[0].weight.register_post_accumulate_grad_hook(lambda p: left.append(averager.traffic.reductions))
    with Counted() as counted:
        steps(model, averager.last, 0, 1)
    seen["overlap"] = (left, averager.traffic.early, averager.traffic.reductions, counted.reads)

    # an unused parameter: read once by the rank that misses it; static_graph reads in the first step only
    for static in (False, True):
        model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        averager = average_gradients(model, bucket_mb=1e-6, static_graph=static)
        numbers = []
        for _ in range(3):
            with Counted() as counted, averager.last():
                model[0](torch.ones(1, 2)).sum().backward()
            numbers.append((counted.sums, counted.reads > 0, averager.traffic.early))
            model.zero_grad()
        seen[f"unused {static}"] = numbers

    # what else must not be disturbed
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    averager = average_gradients(model)
    with averager.last():
        model(torch.randn(2, 3, 5, 5)).sum().backward()
    seen["strides"] = (model[0].weight.grad.stride(), model[0].weight.stride())
    twin, before = copy.deepcopy(model), averager.traffic.reductions
    with averager.last():
        pass
    twin(torch.randn(2, 3, 5, 5)).sum().backward()
    seen["a copy sends nothing"] = averager.traffic.reductions - before
    torch.save(model, stored := io.BytesIO())
    seen["is stored"] = len(stored.getvalue()) > 0
    averager.remove()
    seen["hooks left"] = sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())

    # several dtypes, complex numbers, and the dtype that precision asks for
    model = nn.ParameterList([torch.ones(2), torch.ones(3, dtype=torch.float64), torch.ones(1, dtype=torch.complex64)])
    averager = average_gradients(model)
    with averager.last():
        (model[0].sum() + model[1].sum() + model[2].abs().sum()).mul(1.0 + rank).backward()
    seen["dtypes"] = [p.grad for p in model]
    plan, strategy = plan_on_ranks(reduce=torch.float32)
    model = plan.model(nn.ParameterList([torch.ones(2, dtype=torch.bfloat16)]))
    plan.backward((model[0] * (1.0, 2.0**-7)[rank]).sum())
    seen["reduced in float32"] = (model[0].grad, strategy.averager.traffic.bytes)

    # values and buffers become those of rank 0
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_buffer("mask", torch.tensor([rank == 0, True]))
    model.register_buffer("counts", torch.arange(3) + rank)
    average_gradients(model)
    seen["start"] = list(model.state_dict().values())

    # BN-STATS-2: batch means 2.5 and 3.5
    plan, _ = plan_on_ranks()
    norm = plan.model(nn.Sequential(nn.BatchNorm1d(1)))
    norm(torch.tensor([[2.0], [3.0]]) + rank)
    seen["before evaluation"] = norm[0].running_mean.item()
    with plan.evaluating(norm):
        seen["in evaluation"] = norm[0].running_mean.item()
    return seen


@pytest.fixture(scope="module")
def counts() -> list[dict[str, Any]]:
    return run_ranks(2, counting)


@pytest.mark.ranks
def test_no_sync_1_a_window_of_four_microbatches_is_one_round(counts: list[dict[str, Any]]) -> None:
    for seen in counts:
        assert seen["NO-SYNC-1 outside"] == (5.0, 1, 1)
        assert seen["NO-SYNC-1 inside"] == (5.0, 1, 1)


@pytest.mark.ranks
def test_no_sync_3_each_of_several_modules_is_reduced_once_a_window(counts: list[dict[str, Any]]) -> None:
    for seen in counts:
        # One sum, no read by the host; 2 * 3 + 3 + 3 + 1 numbers and 4 flags of 4 bytes.
        assert seen["NO-SYNC-3"] == (1, 0, 4 * (13 + 4))
    for mine, other in zip(*(seen["NO-SYNC-3 gradients"] for seen in counts), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.ranks
def test_gradients_that_are_views_are_in_memory_once(counts: list[dict[str, Any]]) -> None:
    numbers = 4 * 4 * (128 * 128 + 128)
    for seen in counts:
        flags = 4 * 8
        assert seen["flags True"] == seen["flags False"] == flags
        assert seen["during True"] == seen["after True"] == numbers + flags
        assert seen["during False"] == 2 * numbers + flags
        assert seen["after False"] == numbers


@pytest.mark.ranks
def test_buckets_leave_before_backward_has_ended_and_the_host_reads_nothing(counts: list[dict[str, Any]]) -> None:
    for seen in counts:
        left, early, reductions, reads = seen["overlap"]
        assert left == [3]  # of 4: the buckets of the three later layers
        assert early == reductions == 4
        assert reads == 0


@pytest.mark.ranks
def test_an_unused_parameter_costs_a_read_and_static_graph_saves_it(counts: list[dict[str, Any]]) -> None:
    for seen in counts:
        # The unused layer is registered last, so its buckets would leave first and hold back all: none is early.
        assert seen["unused False"] == [(4, True, 0)] * 3
        assert seen["unused True"] == [(4, True, 0), (2, False, 2), (2, False, 4)]


@pytest.mark.ranks
def test_gradients_keep_the_memory_format_of_parameters(counts: list[dict[str, Any]]) -> None:
    for seen in counts:
        grad, parameter = seen["strides"]
        assert grad == parameter == (27, 1, 9, 3)


@pytest.mark.ranks
def test_a_copy_of_the_model_sends_nothing_and_hooks_can_be_removed(counts: list[dict[str, Any]]) -> None:
    for seen in counts:
        assert seen["a copy sends nothing"] == 1  # the empty round of the model itself
        assert seen["is stored"]
        assert seen["hooks left"] == 0


@pytest.mark.ranks
def test_each_dtype_is_averaged_in_its_own(counts: list[dict[str, Any]]) -> None:
    for seen in counts:
        for grad, dtype in zip(seen["dtypes"], (torch.float32, torch.float64, torch.complex64), strict=True):
            assert torch.equal(grad, torch.full_like(grad, 1.5))
            assert grad.dtype == dtype


@pytest.mark.ranks
def test_precision_decides_what_gradients_are_reduced_in(counts: list[dict[str, Any]]) -> None:
    for seen in counts:
        grad, sent = seen["reduced in float32"]
        # 0.5 + 2^-8, which bfloat16 holds, while a float32 buffer of 2 numbers and a flag travelled.
        assert grad.tolist() == [0.5 + 2.0**-8] * 2
        assert grad.dtype == torch.bfloat16
        assert sent == 4 * 3


@pytest.mark.ranks
def test_all_ranks_start_with_the_values_and_buffers_of_rank_0(counts: list[dict[str, Any]]) -> None:
    first, second = (seen["start"] for seen in counts)
    assert len(first) == 9
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert first[0].tolist() == [True, True]
    assert first[1].tolist() == [0, 1, 2]


@pytest.mark.ranks
def test_bn_stats_2_ranks_evaluate_with_the_same_statistics(counts: list[dict[str, Any]]) -> None:
    assert [round(seen["before evaluation"], 6) for seen in counts] == [0.25, 0.35]
    assert [round(seen["in evaluation"], 6) for seen in counts] == [0.25, 0.25]


def test_an_averager_needs_a_process_group() -> None:
    with pytest.raises(ValueError, match="process group"):
        average_gradients(nn.Linear(1, 1))


class Weighed(nn.Parameter):
    """Counts how often anyone asks for its size."""

    asked = 0

    @property
    def nbytes(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        Weighed.asked += 1
        return self.numel() * self.element_size()


def sizes_asked_for(parameters: int) -> int:
    Weighed.asked = 0
    averager = average_gradients(nn.ParameterList([Weighed(torch.zeros(3)) for _ in range(parameters)]))
    averager.add(nn.ParameterList([Weighed(torch.zeros(3)) for _ in range(parameters)]))
    averager._plan((True,) * parameters)
    return Weighed.asked


@pytest.mark.ranks
def test_the_work_of_set_up_grows_with_the_number_of_parameters_and_not_with_its_square() -> None:
    ((few, many),) = run_ranks(1, few_and_many)
    assert 0 < few <= 4 * 50
    assert many == 10 * few


def few_and_many() -> tuple[int, int]:
    return sizes_asked_for(50), sizes_asked_for(500)
