"""schedule: the learning rate as a function of accepted optimizer steps, and of nothing else (`plateau`: of evaluations).

Each is a pure function `factor(step, total, config)`: what the optimizer's own rate is multiplied by in step number
`step` (from 0). A step that was refused does not count. With a refusable step the count lives on the device, and the
rate is read from a table there: no host read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, final

from fasttrain.core.strategy import Context, Strategy
from fasttrain.errors import ConfigError, did_you_mean
from fasttrain.lazy import torch


def _refuse_no_duration(key: str, value: float) -> None:
    if not 0 <= value < math.inf or (value >= 1 and value != int(value)):
        raise ConfigError(f"schedule.{key}={value}: give a number of steps or a fraction below 1.")


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """`warmup`: steps (1 or more) or the fraction of all steps (below 1) in which the rate rises linearly."""

    warmup: float = 0.0

    def __post_init__(self) -> None:
        _refuse_no_duration("warmup", self.warmup)

    def warmup_steps(self, total: int) -> int:
        """Steps of the warm-up."""
        return int(self.warmup) if self.warmup >= 1 else int(self.warmup * total)


@dataclass(frozen=True, kw_only=True)
class Decay(WarmUp):
    """`final`: the factor reached after the last step."""

    final: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.final < math.inf:
            raise ConfigError(f"schedule.final={self.final} is no factor of a rate; give 0 or more, usually 0 to 0.1.")


@dataclass(frozen=True, kw_only=True)
class WsdConfig(Decay):
    """`decay`: steps (1 or more) or the fraction of all steps (below 1) of the decay at the end."""

    decay: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        _refuse_no_duration("decay", self.decay)


@dataclass(frozen=True, kw_only=True)
class OneCycleConfig(WarmUp):
    """The rate starts at 1/`start_divisor`, peaks at 1 after the warm-up, and ends at 1/(start_divisor × end_divisor)."""

    warmup: float = 0.3
    start_divisor: float = 25.0
    end_divisor: float = 1e4

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("start_divisor", "end_divisor"):
            if not 0 < getattr(self, key) < math.inf:
                raise ConfigError(f"schedule.{key}={getattr(self, key)} divides the rate; give more than 0.")


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


@dataclass(frozen=True, kw_only=True)
class PlateauConfig(WarmUp):
    """Settings of torch's ReduceLROnPlateau, by its names.

    `metric`: a figure of the evaluation; `mode`: whether it should fall (`min`) or rise. After more than `patience`
    evaluations in a row that were not better than the best by `threshold` (a share of it, or, with `abs`, an amount), the
    rate is multiplied by `factor`, down to `min_factor` of the first; then `cooldown` evaluations do not count.
    """

    metric: str = "loss"
    mode: Literal["min", "max"] = "min"
    factor: float = 0.1
    patience: int = 10
    threshold: float = 1e-4
    threshold_mode: Literal["rel", "abs"] = "rel"
    cooldown: int = 0
    min_factor: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.factor < 1:
            raise ConfigError(f"schedule.factor={self.factor} must be between 0 and 1, usually 0.1.")
        for key in ("patience", "threshold", "cooldown", "min_factor"):
            if getattr(self, key) < 0:
                raise ConfigError(f"schedule.{key}={getattr(self, key)} must be 0 or more.")
        if self.min_factor > 1:
            raise ConfigError(f"schedule.min_factor={self.min_factor} is a share of the first rate; give 1 or less.")


@dataclass(slots=True)
class PlateauState:
    """What a plateau schedule remembers: the factor it came to, and the evaluations before."""

    factor: float = 1.0
    best: float | None = None
    bad: int = 0
    cooling: int = 0


def is_better(figure: float, best: float | None, config: PlateauConfig) -> bool:
    """Whether a figure beats the best so far by the threshold."""
    if best is None:
        return not math.isnan(figure)
    sign = 1.0 if config.mode == "max" else -1.0
    if config.threshold_mode == "rel":
        bound = best * (1.0 + sign * config.threshold)
    else:
        bound = best + sign * config.threshold
    return figure > bound if config.mode == "max" else figure < bound


def after_evaluation(state: PlateauState, figure: float, config: PlateauConfig) -> PlateauState:
    """The state after one more evaluation; the rule of torch.optim.lr_scheduler.ReduceLROnPlateau."""
    better = is_better(figure, state.best, config)
    best = figure if better else state.best
    bad = 0 if better else state.bad + 1
    cooling, factor = state.cooling, state.factor
    if cooling:
        cooling, bad = cooling - 1, 0
    if bad > config.patience:
        factor, cooling, bad = max(factor * config.factor, config.min_factor), config.cooldown, 0
    return PlateauState(factor, best, bad, cooling)


@final
class Plateau(Schedule):
    """The rate falls when evaluations no longer get better."""

    name = "plateau"
    Config = PlateauConfig
    needs_total = False

    def __init__(self, config: Any = None, context: Context | None = None) -> None:
        super().__init__(config, context)
        self.state = PlateauState()
        self._followed: dict[int, tuple[Any, Any]] = {}

    def factor(self, step: int, total: int) -> float:
        """The warm-up; what evaluations gave comes on top."""
        return constant(step, total, self.config)

    def started(self, model: Any, optimizer: Any, step: Any) -> None:
        """Refuse a run that is not evaluated while it trains."""
        if self.context.evaluates is False:
            raise ConfigError(
                f"schedule=plateau looks at '{self.config.metric}' of evaluations, and none comes while this run trains; "
                "give Data(evaluation=...) and, where an epoch has no known length, evaluate.every=N; or use schedule=wsd."
            )
        super().started(model, optimizer, step)

    def updated(self, model: Any, optimizer: Any, step: Any) -> None:
        """Set the rate of the coming step."""
        self._followed[id(optimizer)] = optimizer, step
        super().updated(model, optimizer, step)
        reached = self.state.factor
        if reached != 1.0:
            for group in optimizer.param_groups:
                group["lr"] *= reached  # in place where the rate is a tensor

    def evaluated(self, figures: Mapping[str, float]) -> None:
        """Look at the figure, and set the rate of the coming step anew if it is time."""
        metric = self.config.metric
        if metric not in figures:
            raise ConfigError(
                f"schedule.metric={metric}: the evaluation gave no such figure; {did_you_mean(metric, figures)}"
            )
        before = self.state.factor
        self.state = after_evaluation(self.state, figures[metric], self.config)
        if self.state.factor != before:
            for optimizer, step in list(self._followed.values()):
                self.updated(None, optimizer, step)

    def state_dict(self) -> dict[str, Any]:
        """Factor, best figure and counts."""
        return asdict(self.state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put them back; `started` then sets the rate."""
        self.state = PlateauState(**state)
