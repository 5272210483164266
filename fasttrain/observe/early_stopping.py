"""Stop a run that has ceased to improve."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from fasttrain.errors import ConfigError, did_you_mean
from fasttrain.observe.observer import Observer, RunInfo


class EarlyStopping(Observer):
    """Ask for a stop after `patience` evaluations in a row without a better `metric`.

    Better means lower (`mode="min"`) or higher (`mode="max"`) than the best so far by more than `min_delta`. A metric
    that is NaN or infinite is never better. Best value and count are kept in checkpoints, so a resumed run goes on
    counting where it was.

    Saves: the steps after the best one. Costs: nothing a step.

    Raises:
        ConfigError: a setting is out of range, or an evaluation does not give the metric.

    Source: Prechelt 1998, "Early stopping, but when?".
    """

    def __init__(self, metric: str, patience: int, mode: Literal["min", "max"] = "min", min_delta: float = 0.0) -> None:
        if mode not in ("min", "max"):
            raise ConfigError(f"mode='{mode}' says neither lower nor higher is better; use mode='min' or mode='max'.")
        if patience < 1:
            raise ConfigError(f"patience={patience} would stop before the first evaluation; use 1 or more.")
        if not (math.isfinite(min_delta) and min_delta >= 0):
            raise ConfigError(f"min_delta={min_delta} is no amount to improve by; use 0 or a positive number.")
        self.metric, self.patience, self.mode, self.min_delta = metric, patience, mode, float(min_delta)
        self.best: float | None = None
        self.best_step: int | None = None
        self.worse = 0  # evaluations in a row that were not better
        self._run: RunInfo | None = None

    def started(self, run: RunInfo) -> None:
        """Remember whom to ask for a stop."""
        self._run = run

    def evaluated(self, record: Mapping[str, Any]) -> None:
        """Compare with the best so far."""
        metrics = record["metrics"]
        if self.metric not in metrics:
            raise ConfigError(
                f"EarlyStopping watches '{self.metric}', which the evaluation does not give; "
                f"{did_you_mean(self.metric, metrics)}"
            )
        value = metrics[self.metric]
        if self._is_better(value):
            self.best, self.best_step, self.worse = float(value), record["step"], 0
            return
        self.worse += 1
        if self.worse >= self.patience and self._run is not None:
            best = "never a finite number" if self.best is None else f"best {self.best:.6g} at step {self.best_step}"
            self._run.request_stop(
                f"early stopping: {self.metric} was not better in {self.worse} evaluations in a row ({best})"
            )

    def _is_better(self, value: float | None) -> bool:
        if value is None or not math.isfinite(value):
            return False
        if self.best is None:
            return True
        gain = self.best - value if self.mode == "min" else value - self.best
        return gain > self.min_delta

    def state_dict(self) -> dict[str, Any]:
        """Best value, its step, and the evaluations since."""
        return {"best": self.best, "best_step": self.best_step, "worse": self.worse}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting where the checkpoint was."""
        self.best, self.best_step, self.worse = state["best"], state["best_step"], state["worse"]
