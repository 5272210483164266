"""activation_checkpointing: keep the inputs of blocks instead of everything inside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from fasttrain.core.strategy import Strategy
from fasttrain.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class FullConfig:
    """`every`: each so many-th block is recomputed; 1 means all."""

    every: int = 1

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"activation_checkpointing.every={self.every} must be 1 or more.")


@final
class Full(Strategy):
    """Recompute whole blocks in the backward pass.

    Saves: what blocks keep inside. Costs: one more forward of them, about a third of the step.
    Source: Chen et al. 2016, arXiv:1604.06174.
    """

    slot, name = "activation_checkpointing", "full"
    Config = FullConfig

    def model(self, model: Any) -> Any:
        """Wrap the forward of each chosen block."""
        from fasttrain.nn.recompute import checkpoint_blocks

        blocks = self.context.blocks(model, "activation_checkpointing=full")
        if any(block is model for block in blocks):
            raise ConfigError(
                "activation_checkpointing=full around the whole model saves nothing: everything is recomputed, and then "
                "kept, at once; return its repeated parts from blocks(model)."
            )
        checkpoint_blocks(blocks, self.config.every)
        return model
