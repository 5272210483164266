"""The settings of a run beside its strategies: what `Trainer.Config` holds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fasttrain.core.devices import kind_and_index
from fasttrain.errors import ConfigError, ConfigErrors, Problem


@dataclass(frozen=True, kw_only=True)
class Log:
    """When figures are read from the device and written."""

    every: int = 10

    def __post_init__(self) -> None:
        _refuse(_below_one(self, "every"))


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """When the evaluation set is gone through: every so many optimizer steps; null: after each epoch, and at the end."""

    every: int | None = None
    batch_size: int | None = None

    def __post_init__(self) -> None:
        _refuse(_below_one(self, "every", "batch_size"))


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When the state is saved (optimizer steps; null: at the end and on a stop), and how many are kept."""

    every: int | None = None
    keep: int | None = 2

    def __post_init__(self) -> None:
        _refuse(_below_one(self, "every", "keep"))


@dataclass(frozen=True, kw_only=True)
class Run:
    """Where the run folder is: `dir/name/id`. Without an id, one is made from the time.

    `dir=null`: nothing is written.
    """

    dir: str | None = "runs"
    name: str | None = None
    id: str | None = None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a run. `batch_size` is global: samples per optimizer step over all ranks and microbatches."""

    batch_size: int
    trainer: str | None = None
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    blocks: list[str] | None = None
    steps: int | None = None
    epochs: int | None = None
    seed: int = 0
    deterministic: Literal[True, False, "warn"] = False
    device: str | None = None
    affinity: Literal["auto", "numa"] | None = "auto"
    resume: str | None = None
    resume_skip: list[str] = field(default_factory=list)
    max_time: str | None = None
    limit_batches: int | float | None = None
    log: Log = field(default_factory=Log)
    evaluate: Evaluate = field(default_factory=Evaluate)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    run: Run = field(default_factory=Run)
    profile: bool = False
    debug: bool = False
    plugins: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        mistakes = _below_one(self, "batch_size", "steps", "epochs")
        if (limit := self.limit_batches) is not None and (limit <= 0 or (limit > 1 and limit != int(limit))):
            mistakes["limit_batches"] = (
                f"limit_batches={limit} is neither a number of steps nor a share of them; give 1 or more, or a share "
                "between 0 and 1"
            )
        if self.steps is not None and self.epochs is not None:
            mistakes["epochs"] = f"steps={self.steps} and epochs={self.epochs} are both given; give one of them"
        if self.max_time is not None and _seconds(self.max_time) is None:
            mistakes["max_time"] = f"max_time={self.max_time} is no duration; {_DURATIONS}"
        if self.resume is not None and self.resume.lower() in _NO_PATHS:
            mistakes["resume"] = f"resume={self.resume} is no run; write null, auto, or the path of a run"
        if self.device is not None:
            try:
                kind_and_index(self.device)
            except ConfigError as error:
                mistakes["device"] = str(error)
        if self.blocks == []:
            mistakes["blocks"] = "blocks=[] names no block; write null to have them found"
        _refuse(mistakes)
        if not -(2**63) <= self.seed < 2**63:
            _refuse({"seed": f"seed={self.seed} has more than 64 bits; give a smaller one"})


# Words that mean yes or no everywhere else, and would here be taken for the path of a run.
_NO_PATHS = frozenset({"true", "false", "yes", "no", "on", "off", "none", ""})
_DURATIONS = "write seconds, or for example 15m, 1h30m or 2d"


def _below_one(settings: Any, *names: str) -> dict[str, str]:
    values = {name: getattr(settings, name) for name in names}
    return {
        name: f"{name}={value} must be at least 1" for name, value in values.items() if value is not None and value < 1
    }


def _refuse(mistakes: Mapping[str, str]) -> None:
    problems = [
        Problem(key=key, message=text.partition("; ")[0], suggestion=text.partition("; ")[2])
        for key, text in mistakes.items()
    ]
    if problems:
        raise ConfigErrors(problems)


def seconds(text: str) -> float:
    """A duration in seconds: '90', '90s', '15m', '1h30m', '2d'.

    >>> seconds("1h30m")
    5400.0

    Raises:
        ConfigError: the text is no duration.
    """
    found = _seconds(text)
    if found is None:
        raise ConfigError(f"'{text}' is no duration; {_DURATIONS}.")
    return found


def _seconds(text: str) -> float | None:
    match = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?", text.strip())
    if not text.strip() or match is None:
        return None
    days, hours, minutes, rest = (float(part) if part else 0.0 for part in match.groups())
    return days * 86400 + hours * 3600 + minutes * 60 + rest
