"""The settings of a run beside its strategies: what `Trainer.Config` holds."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from fasttrain.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Log:
    """When figures are read from the device and written."""

    every: int = 10


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """When the evaluation set is gone through: every so many optimizer steps; null: after each epoch."""

    every: int | None = None
    batch_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When the state is saved (optimizer steps; null: at the end and on a stop), and how many are kept."""

    every: int | None = None
    keep: int | None = 2


@dataclass(frozen=True, kw_only=True)
class Run:
    """Where the run folder is: `dir/name/id`. Without an id, one is made from the time."""

    dir: str = "runs"
    name: str | None = None
    id: str | None = None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a run. `batch_size` is global: samples per optimizer step over all ranks and microbatches."""

    batch_size: int
    trainer: str | None = None
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    steps: int | None = None
    epochs: int | None = None
    seed: int = 0
    deterministic: bool = False
    device: str | None = None
    resume: str | None = None
    max_time: str | None = None
    limit_batches: int | None = None
    log: Log = field(default_factory=Log)
    evaluate: Evaluate = field(default_factory=Evaluate)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    run: Run = field(default_factory=Run)
    profile: bool = False
    debug: bool = False
    plugins: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("batch_size", "steps", "epochs", "limit_batches"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1.")
        for name, value in (("log.every", self.log.every), ("evaluate.every", self.evaluate.every)):
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1.")
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(f"steps={self.steps} and epochs={self.epochs} are both given; give one of them.")
        if self.max_time is not None:
            seconds(self.max_time)


def seconds(text: str) -> float:
    """A duration in seconds: '90', '90s', '15m', '1h30m', '2d'.

    >>> seconds("1h30m")
    5400.0

    Raises:
        ConfigError: the text is no duration.
    """
    match = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?", text.strip())
    if not text.strip() or match is None:
        raise ConfigError(f"'{text}' is no duration; write seconds, or for example 15m, 1h30m or 2d.")
    days, hours, minutes, rest = (float(part) if part else 0.0 for part in match.groups())
    return days * 86400 + hours * 3600 + minutes * 60 + rest
