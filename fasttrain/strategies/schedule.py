"""schedule: the learning rate as a function of accepted optimizer steps, and of nothing else.

Each is a pure function `factor(step, total, config)`: what the optimizer's own rate is multiplied by in step number
`step` (from 0). A step that was refused does not count. With a refusable step the count lives on the device, and the
rate is read from a table there: no host read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

from fasttrain.core.strategy import Context, Strategy
from fasttrain.errors import ConfigError
from fasttrain.lazy import torch


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """`warmup`: steps (1 or more) or the fraction of all steps (below 1) in which the rate rises linearly."""

    warmup: float = 0.0

    def __post_init__(self) -> None:
        if self.warmup < 0 or (self.warmup >= 1 and self.warmup != int(self.warmup)):
            raise ConfigError(f"schedule.warmup={self.warmup}: give a number of steps or a fraction below 1.")

    def warmup_steps(self, total: int) -> int:
        """Steps of the warm-up."""
        return int(self.warmup) if self.warmup >= 1 else int(self.warmup * total)


@dataclass(frozen=True, kw_only=True)
class Decay(WarmUp):
    """`final`: the factor reached after the last step."""

    final: float = 0.0


@dataclass(frozen=True, kw_only=True)
class WsdConfig(Decay):
    """`decay`: steps (1 or more) or the fraction of all steps (below 1) of the decay at the end."""

    decay: float = 0.2


@dataclass(frozen=True, kw_only=True)
class OneCycleConfig(WarmUp):
    """The rate starts at 1/`start_divisor`, peaks at 1 after the warm-up, and ends at 1/(start_divisor × end_divisor)."""

    warmup: float = 0.3
    start_divisor: float = 25.0
    end_divisor: float = 1e4


def _rising(step: int, warmup: int) -> float:
    # The first step already learns: rates are 1/(warmup+1), 2/(warmup+1), ...
    return (step + 1) / (warmup + 1)


def _progress(step: int, start: int, end: int) -> float:
    return min(1.0, max(0.0, (step - start) / max(1, end - start)))


def constant(step: int, total: int, config: WarmUp) -> float:
    """1, after the warm-up."""
    warmup = config.warmup_steps(total)
    return _rising(step, warmup) if step < warmup else 1.0


def linear(step: int, total: int, config: Decay) -> float:
    """From 1 down to `final` on a straight line."""
    warmup = config.warmup_steps(total)
    if step < warmup:
        return _rising(step, warmup)
    if config.final == 0.0:
        return max(0, total - step) / max(1, total - warmup)
    return 1.0 + (config.final - 1.0) * _progress(step, warmup, total)


def cosine(step: int, total: int, config: Decay) -> float:
    """From 1 down to `final` on half a cosine. Source: Loshchilov and Hutter 2017, arXiv:1608.03983."""
    warmup = config.warmup_steps(total)
    if step < warmup:
        return _rising(step, warmup)
    return config.final + (1.0 - config.final) * 0.5 * (1.0 + math.cos(math.pi * _progress(step, warmup, total)))


def wsd(step: int, total: int, config: WsdConfig) -> float:
    """Warm-up, then 1, then linear decay over the last steps. Source: Hu et al. 2024, arXiv:2404.06395."""
    warmup = config.warmup_steps(total)
    if step < warmup:
        return _rising(step, warmup)
    decay = int(config.decay) if config.decay >= 1 else int(config.decay * total)
    return 1.0 + (config.final - 1.0) * _progress(step, total - decay, total)


def one_cycle(step: int, total: int, config: OneCycleConfig) -> float:
    """Up and down on half cosines. Source: Smith and Topin 2018, arXiv:1708.07120."""
    warmup = config.warmup_steps(total)
    low, last = 1.0 / config.start_divisor, 1.0 / (config.start_divisor * config.end_divisor)
    if step < warmup:
        return low + (1.0 - low) * 0.5 * (1.0 - math.cos(math.pi * step / warmup))
    return last + (1.0 - last) * 0.5 * (1.0 + math.cos(math.pi * _progress(step, warmup, total - 1)))


class Schedule(Strategy):
    """What all schedules do: set the rate of the coming step from the number of accepted ones."""

    slot = "schedule"
    needs_total: ClassVar[bool] = True

    def __init__(self, config: Any = None, context: Context | None = None) -> None:
        super().__init__(config, context)
        self._table: Any = None

    def factor(self, step: int, total: int) -> float:
        """The factor in step number `step` (from 0) of `total`."""
        raise NotImplementedError

    @property
    def total(self) -> int:
        """Planned optimizer steps."""
        total = self.context.total_steps
        if total is None:
            if self.needs_total:
                raise ConfigError(f"schedule={self.name} needs to know how many steps there are; set steps=N.")
            return 1
        return total

    def started(self, model: Any, optimizer: Any, step: Any) -> None:
        """Remember the optimizer's own rates (`initial_lr`, torch's own name for them), and set the first."""
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", float(group["lr"]))
        self.updated(model, optimizer, step)

    def updated(self, model: Any, optimizer: Any, step: Any) -> None:
        """Set the rate of the coming step."""
        if isinstance(step, torch.Tensor):
            factor = self._look_up(step)
            for group in optimizer.param_groups:
                if not isinstance(group["lr"], torch.Tensor):
                    group["lr"] = torch.zeros((), dtype=factor.dtype, device=factor.device)
                torch.mul(factor, group["initial_lr"], out=group["lr"])
            return
        factor = self.factor(step, self.total)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor

    def _look_up(self, step: Any) -> Any:
        """The factor at a step that only the device knows."""
        if self._table is None:
            total = self.total
            # CUDA's fused kernels read a float32 rate; the CPU's take float64, so that the rate is the host's own.
            dtype = torch.float64 if step.device.type == "cpu" else torch.float32
            factors = [self.factor(i, total) for i in range(total + 1)]
            table = torch.tensor(factors, dtype=dtype)
            # Once a run, and from pinned memory, so that the host need not wait even then.
            pinned = table.pin_memory() if step.device.type in ("cuda", "xpu") else table
            self._table = pinned.to(step.device, non_blocking=pinned is not table)
        index = step.to(torch.int64).clamp(max=len(self._table) - 1)
        return self._table.gather(0, index.reshape(1)).reshape(())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing is kept: the rate follows from the step."""


@final
class Constant(Schedule):
    """The optimizer's rate, after an optional warm-up."""

    name = "constant"
    Config = WarmUp
    needs_total = False

    def factor(self, step: int, total: int) -> float:
        """See `constant`."""
        return constant(step, total, self.config)


@final
class Linear(Schedule):
    """Linear decay after an optional warm-up."""

    name = "linear"
    Config = Decay

    def factor(self, step: int, total: int) -> float:
        """See `linear`."""
        return linear(step, total, self.config)


@final
class Cosine(Schedule):
    """Cosine decay after an optional warm-up."""

    name = "cosine"
    Config = Decay

    def factor(self, step: int, total: int) -> float:
        """See `cosine`."""
        return cosine(step, total, self.config)


@final
class Wsd(Schedule):
    """Warm-up, stable, decay."""

    name = "wsd"
    Config = WsdConfig

    def factor(self, step: int, total: int) -> float:
        """See `wsd`."""
        return wsd(step, total, self.config)


@final
class OneCycle(Schedule):
    """One cycle up and down."""

    name = "one_cycle"
    Config = OneCycleConfig

    def factor(self, step: int, total: int) -> float:
        """See `one_cycle`."""
        return one_cycle(step, total, self.config)
