"""accumulation: cut a rank's share of a batch into microbatches, one after another.

Saves: activations, in proportion. Costs: less parallel work at a time. The global batch, the loss and the gradient stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from fasttrain.core.strategy import Strategy
from fasttrain.core.task import Task
from fasttrain.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class MicrobatchesConfig:
    """Either `num` microbatches a step, or microbatches of at most `size` samples on each rank."""

    num: int | None = None
    size: int | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.num, self.size) if value is not None]
        if len(given) != 1 or given[0] < 1:
            raise ConfigError(
                f"accumulation=microbatches with num={self.num} and size={self.size}: give one of them, 1 or more, for "
                "example accumulation.size=8 (samples on a rank at a time) or accumulation.num=4."
            )


def num_microbatches(config: MicrobatchesConfig, largest_share: int) -> int:
    """Microbatches of a step in which no rank holds more than `largest_share` samples; the same on every rank."""
    if config.num is not None:
        return config.num
    assert config.size is not None
    return max(1, -(-largest_share // config.size))


@final
class Microbatches(Strategy):
    """A fixed number or size of microbatches.

    With BatchNorm the statistics are those of a microbatch: other mathematics by nature. Dropout draws other masks.
    """

    slot, name = "accumulation", "microbatches"
    Config = MicrobatchesConfig

    def split(self, task: Task, batch: Any) -> list[Any]:
        """Cut along dim 0, or as the user's `split` does."""
        fed = task.known(batch)
        if fed is not None:
            largest = -(-fed.global_samples // self.context.data_ranks)
        elif self.config.num is None:
            largest = task.samples(batch)
        else:
            largest = 0
        return task.split(batch, num_microbatches(self.config, largest))
