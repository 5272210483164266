"""Rounding to bfloat16 that is right on average."""

from __future__ import annotations

from typing import Any

from fasttrain.lazy import torch


def shared_generator(device: Any) -> Any:
    """What rounds stochastically on a device: the same numbers on every rank, or replicas would drift apart.

    Call it where optimizers are made: under the seed of the run, which ranks share.
    """
    generator = torch.Generator(device)
    generator.manual_seed(torch.initial_seed())
    return generator


def round_stochastically(x: Any, generator: Any = None) -> Any:
    """float32 to bfloat16, up or down with the probability that makes the mean right; same shape.

    Rounding to the nearest loses an update smaller than 1/512 of its weight, every time; this keeps it on average. A
    value that bfloat16 holds stays as it is, infinities and NaN too. `generator`: on the device of `x`.
    Costs: one random integer an element.
    Source: the arithmetic of torchao.optim (`_fp32_to_bf16_sr`); Gupta et al. 2015, arXiv:1502.02551.
    """
    if hasattr(x, "to_local"):
        from torch.distributed.tensor import DTensor

        rounded = round_stochastically(x.to_local(), generator)
        return DTensor.from_local(
            rounded, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
        )
    bits = x.view(torch.int32)
    noise = torch.randint(1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    # Below bit 16 is what bfloat16 drops: a carry out of it is the step up (away from zero), of just that probability.
    rounded = noise.add_(bits).bitwise_and_(-(1 << 16)).view(torch.float32)
    # The payload of a NaN (0x7fffffff on CUDA) would carry into the sign and come out as a number.
    return torch.where(x.isnan(), x, rounded).to(torch.bfloat16)
