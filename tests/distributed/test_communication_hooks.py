"""hook=powersgd: converges, resumes with equal bits, and takes odd parameters."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fasttrain.core.plan import Plan
from fasttrain.distributed.communication_hooks import make_hook
from fasttrain.errors import CheckpointError, ConfigError
from fasttrain.strategies.data_parallel import DdpConfig, PowerSgd
from tests.distributed.training import Counted, batch, equal, loss_of, plan_on_ranks, wide
from tests.ranks import run_ranks

LAST = 80
POWERSGD = DdpConfig(hook="powersgd", powersgd=PowerSgd(rank=2, start_step=2), bucket_mb=0.01)


def powersgd_training(low: int, high: int, model: nn.Module, plan: Plan) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(low, high):
        x = batch(step % 4, dist.get_rank())
        loss = loss_of(model(x), x)
        plan.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def powersgd() -> dict[str, Any]:
    seen: dict[str, Any] = {}
    plan, _ = plan_on_ranks(POWERSGD)
    model = plan.model(wide(64, 2))
    losses = powersgd_training(0, 8, model, plan)
    state, weights = plan.state_dict(), copy.deepcopy(model.state_dict())
    held = state["data_parallel"]
    seen["tensors"] = sorted(key for key, value in held.items() if isinstance(value, torch.Tensor))
    seen["plain"] = json.loads(json.dumps({key: value for key, value in held.items() if key not in seen["tensors"]}))
    with Counted() as counted:
        losses += powersgd_training(8, 9, model, plan)
    seen["sums"] = counted.sums
    losses += powersgd_training(9, LAST, model, plan)
    seen["losses"] = losses

    plan, _ = plan_on_ranks(POWERSGD)
    resumed = plan.model(wide(64, 2))
    resumed.load_state_dict(weights)
    plan.load_state_dict(state)
    seen["resumed"] = powersgd_training(8, LAST, resumed, plan) == losses[8:] and equal(
        list(resumed.state_dict().values()), list(model.state_dict().values())
    )
    plan, _ = plan_on_ranks(POWERSGD)
    forgetful = plan.model(wide(64, 2))
    forgetful.load_state_dict(weights)
    seen["without its memory"] = powersgd_training(8, LAST, forgetful, plan) == losses[8:]

    plan, _ = plan_on_ranks(DdpConfig(hook="powersgd", powersgd=PowerSgd(rank=2, start_step=2), bucket_mb=1e-6))
    plan.model(wide(64, 2))
    with pytest.raises(CheckpointError) as caught:
        plan.load_state_dict(state)
    seen["other buckets"] = str(caught.value)
    with pytest.raises(ConfigError) as refused:
        make_hook("bf61")
    seen["other hook"] = str(refused.value)

    plan, _ = plan_on_ranks()
    model = plan.model(wide(64, 2))
    seen["plain losses"] = powersgd_training(0, LAST, model, plan)

    # a layer that is never used, a scalar, channels last, and frozen parts that change
    plan, _ = plan_on_ranks(DdpConfig(hook="powersgd", powersgd=PowerSgd(start_step=2), static_graph=True))
    odd = nn.ModuleDict({"conv": nn.Conv2d(8, 8, 3), "unused": nn.Linear(16, 16)}).to(memory_format=torch.channels_last)
    odd.scale = nn.Parameter(torch.ones(()))
    plan.model(odd)
    for step in range(6):
        odd.scale.requires_grad_(step < 4)
        plan.backward((odd["conv"](batch(step, dist.get_rank()).view(8, 8, 8, 1).expand(8, 8, 8, 4)) * odd.scale).sum())
        seen["unused"] = [p.grad is None for p in odd["unused"].parameters()]
        seen["odd gradient"] = odd["conv"].weight.grad.clone()
        odd.zero_grad()
    return seen


@pytest.fixture(scope="module")
def compressed() -> list[dict[str, Any]]:
    return run_ranks(2, powersgd)


@pytest.mark.ranks
def test_powersgd_converges_nearly_as_full_gradients_do(compressed: list[dict[str, Any]]) -> None:
    for seen in compressed:
        plain, low_rank = seen["plain losses"], seen["losses"]
        assert low_rank[:2] == plain[:2]  # full sums before start_step, which change nothing
        assert plain[-1] < 0.7 * plain[0]
        assert low_rank[-1] - plain[-1] < 0.1 * (plain[0] - plain[-1])
        assert low_rank[3:] != plain[3:]


@pytest.mark.ranks
def test_powersgd_sends_factors_in_three_sums_a_bucket(compressed: list[dict[str, Any]]) -> None:
    for seen in compressed:
        assert seen["sums"] == 3 * 2


@pytest.mark.ranks
def test_powersgd_resumes_with_equal_bits(compressed: list[dict[str, Any]]) -> None:
    for rank, seen in enumerate(compressed):
        assert seen["resumed"]
        assert not seen["without its memory"]
        assert seen["tensors"] == [
            *(f"{name}.{i}" for name in (f"error.{rank}", "p", "q") for i in range(2)),
            "rng_keys",
        ]
        plain = {"iteration": 8, "layouts": ["1111"], "rng_has_gauss": 0, "rng_gauss": 0.0}
        assert {key: value for key, value in seen["plain"].items() if key != "rng_position"} == plain


@pytest.mark.ranks
def test_powersgd_refuses_a_memory_of_other_buckets(compressed: list[dict[str, Any]]) -> None:
    for seen in compressed:
        assert "resume with the same model and the same bucket_mb" in seen["other buckets"]
        assert seen["other hook"] == "there is no gradient hook 'bf61'; did you mean 'bf16'?"


@pytest.mark.ranks
def test_powersgd_takes_unused_layers_scalars_and_channels_last(compressed: list[dict[str, Any]]) -> None:
    for seen in compressed:
        assert seen["unused"] == [True, True]
        assert seen["odd gradient"].isfinite().all()
    assert torch.equal(compressed[0]["odd gradient"], compressed[1]["odd gradient"])
