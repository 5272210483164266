"""nonfinite: what to do when a gradient is infinite or not a number. The verdict is taken on the device.

Averaged gradients are the same on every rank, so every rank comes to the same verdict without asking.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from fasttrain.core.strategy import Clash, Context, NoConfig, Strategy
from fasttrain.errors import ConfigError, NonFinite
from fasttrain.lazy import torch
from fasttrain.optim.norms import total_norm


def nonfinite_flag(optimizer: Any) -> Any:
    """1.0 where any gradient is infinite or not a number, else 0.0; 0-dim float32 on the device.

    Costs: one pass over the gradients. A norm that overflows float32 counts as infinite.
    """
    norm = total_norm(p for group in optimizer.param_groups for p in group["params"])
    return torch.isfinite(norm).logical_not().to(torch.float32)


@final
class Raise(Strategy):
    """End the run, naming the first bad step. The bad update is refused, so the weights are those of the step before.

    Nothing is read between log points: the error comes at the next one and names the step it is about.
    """

    slot, name = "nonfinite", "raise"
    clashes = (
        Clash(
            slot="precision",
            name="fp16",
            why="fp16 overflows as a matter of course while its loss scale settles, and refuses those steps by itself",
            instead="nonfinite=skip, which ends the run after max_in_a_row of them, or precision=bf16",
        ),
    )
    Config = NoConfig

    def __init__(self, config: Any = None, context: Context | None = None) -> None:
        super().__init__(config, context)
        self._bad: Any = None
        self._good_before: Any = None
        self._calls = 0
        self._logged_step = 0

    def started(self, model: Any, optimizer: Any, step: Any) -> None:
        """Remember where the run stands."""
        self._logged_step = int(step)

    def gradients(self, model: Any, optimizer: Any) -> Any:
        """The flag; verdicts are counted on the device up to the first bad one."""
        flag = nonfinite_flag(optimizer)
        if self._bad is None:
            self._bad, self._good_before = torch.zeros_like(flag), torch.zeros_like(flag)
        self._calls += 1
        self._bad += flag
        self._good_before += (self._bad == 0).to(flag.dtype)
        return flag

    def report(self) -> dict[str, Any]:
        """Bad verdicts since the last log point, and good ones before the first of them."""
        return {} if self._bad is None else {"nonfinite_steps": self._bad, "finite_steps_before": self._good_before}

    def logged(self, figures: Mapping[str, float]) -> None:
        """Raise if a verdict since the last log point was bad."""
        if self._bad is None:
            return
        if figures["nonfinite_steps"]:
            steps = int(figures["step"]) - self._logged_step
            first = self._logged_step + math.ceil((figures["finite_steps_before"] + 1) * steps / self._calls)
            raise NonFinite(
                f"nonfinite=raise: a gradient of step {first} was infinite or not a number; that update was refused. "
                "Lower the learning rate, clip gradients (gradient_clipping=norm), or leave such steps out "
                "(nonfinite=skip)."
            )
        self._good_before.zero_()
        self._calls, self._logged_step = 0, int(figures["step"])


@dataclass(frozen=True, kw_only=True)
class SkipConfig:
    """`max_in_a_row`: so many refused steps after one another end the run (told at the next log point)."""

    max_in_a_row: int = 50

    def __post_init__(self) -> None:
        if self.max_in_a_row < 1:
            raise ConfigError(f"nonfinite.max_in_a_row={self.max_in_a_row} must be at least 1.")


@final
class Skip(Strategy):
    """Refuse the update, on every rank, and go on. Refused steps are counted and logged apart.

    Learning rate and averages do not move in a refused step. Costs: one pass over the gradients.
    """

    slot, name = "nonfinite", "skip"
    Config = SkipConfig

    def __init__(self, config: Any = None, context: Context | None = None) -> None:
        super().__init__(config, context)
        self._in_a_row: Any = None
        self._longest: Any = None

    def gradients(self, model: Any, optimizer: Any) -> Any:
        """The flag."""
        flag = nonfinite_flag(optimizer)
        if self._in_a_row is None:
            self._in_a_row, self._longest = torch.zeros_like(flag), torch.zeros_like(flag)
        self._in_a_row.add_(1.0).mul_(flag)
        torch.maximum(self._longest, self._in_a_row, out=self._longest)
        return flag

    def report(self) -> dict[str, Any]:
        """The longest run of refused steps."""
        return {} if self._longest is None else {"refused_in_a_row": self._longest}

    def logged(self, figures: Mapping[str, float]) -> None:
        """Raise if too many steps after one another were refused."""
        if figures.get("refused_in_a_row", 0) >= self.config.max_in_a_row:
            raise NonFinite(
                f"nonfinite=skip: {int(figures['refused_in_a_row'])} steps in a row had infinite or undefined gradients; "
                "lower the learning rate, or look at the data of these steps with nonfinite=raise."
            )

    def state_dict(self) -> dict[str, Any]:
        """The counts."""
        return {} if self._in_a_row is None else {"in_a_row": self._in_a_row, "longest": self._longest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put the counts back."""
        device = self.context.device
        self._in_a_row, self._longest = state["in_a_row"].to(device).clone(), state["longest"].to(device).clone()
