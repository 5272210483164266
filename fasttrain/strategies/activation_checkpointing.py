"""activation_checkpointing: run parts of blocks again in the backward pass instead of keeping what they computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from fasttrain.core.strategy import Clash, Strategy
from fasttrain.errors import ConfigError, did_you_mean


def _check_every(every: int) -> None:
    if every < 1:
        raise ConfigError(f"activation_checkpointing.every={every} must be 1 or more.")


def _blocks(strategy: Strategy, model: Any) -> list[Any]:
    """The blocks to recompute.

    Raises:
        ConfigError: there are none, or the whole model is the only one.
    """
    asked = f"activation_checkpointing={strategy.name}"
    blocks = strategy.context.blocks(model, asked)
    if any(block is model for block in blocks):
        raise ConfigError(
            f"{asked} around the whole model saves nothing: everything is recomputed, and then kept, at once; return its "
            "repeated parts from blocks(model)."
        )
    return blocks


@dataclass(frozen=True, kw_only=True)
class FullConfig:
    """`every`: each so many-th block is recomputed; 1 means all."""

    every: int = 1

    def __post_init__(self) -> None:
        _check_every(self.every)


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

        checkpoint_blocks(_blocks(self, model), self.config.every)
        return model


PRESETS = ("attention", "convolutions", "matmuls")


@dataclass(frozen=True, kw_only=True)
class SelectiveConfig:
    """`every` as in `full`. What is kept: results of more than `flops_per_byte`, or of the operations named in `keep`.

    Names are `matmuls`, `convolutions`, `attention` and torch's own, such as `aten.mm` or `aten.convolution.default`.
    """

    every: int = 1
    flops_per_byte: float = 200.0
    keep: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _check_every(self.every)
        if not 0.0 <= self.flops_per_byte < float("inf"):
            raise ConfigError(
                f"activation_checkpointing.flops_per_byte={self.flops_per_byte} must be a number from 0 on; 0 keeps "
                "every product, and name=full keeps nothing."
            )
        if self.keep is not None and not self.names:
            raise ConfigError(
                "activation_checkpointing.keep=[] keeps nothing; use activation_checkpointing=full, which does that."
            )
        for word in self.names:
            if "." not in word and word not in PRESETS:
                raise ConfigError(
                    f"activation_checkpointing.keep: '{word}' is no group of operations; {did_you_mean(word, PRESETS)}"
                )

    @property
    def names(self) -> tuple[str, ...]:
        """What `keep` names, always as a tuple."""
        return () if self.keep is None else (self.keep,) if isinstance(self.keep, str) else tuple(self.keep)


@final
class Selective(Strategy):
    """Recompute what is cheap to recompute, and keep the rest: by FLOPs for each byte, or by name.

    Saves: the results of norms, activations, dropout and sums, and of products that make many bytes of few. Costs: these
    again. Source: Korthikanti et al. 2022, arXiv:2205.05198; the rule by cost is that of rooflines, Williams et al. 2009.
    """

    slot, name = "activation_checkpointing", "selective"
    Config = SelectiveConfig

    def model(self, model: Any) -> Any:
        """Wrap the forward of each chosen block."""
        from fasttrain.nn.recompute import checkpoint_blocks
        from fasttrain.nn.selective import keep_by_cost, keep_operations

        blocks = _blocks(self, model)
        try:
            keeps = (
                keep_operations(self.config.names) if self.config.names else keep_by_cost(self.config.flops_per_byte)
            )
        except ConfigError as error:
            raise ConfigError(f"activation_checkpointing.keep: {error}") from error
        checkpoint_blocks(blocks, self.config.every, keeps)
        return model


@dataclass(frozen=True, kw_only=True)
class BudgetConfig:
    """`budget`: the part of what compiled code would keep that may be kept. 1: all of it; 0: as little as `full`."""

    budget: float = 0.5

    def __post_init__(self) -> None:
        if not 0.0 <= self.budget <= 1.0:
            raise ConfigError(f"activation_checkpointing.budget={self.budget} must be from 0 to 1.")


@final
class Budget(Strategy):
    """Let the compiler choose what to recompute so that compiled graphs keep a part of what they otherwise would.

    Saves: 1 - `budget` of that. Costs: the least FLOPs that do it, found as a knapsack.
    Source: https://pytorch.org/blog/activation-checkpointing-techniques.
    """

    slot, name = "activation_checkpointing", "budget"
    Config = BudgetConfig
    clashes = (
        Clash(
            slot="compile",
            name="null",
            why="the compiler is what plans the recomputation",
            instead="use compile=blocks, or activation_checkpointing=selective, which works without",
        ),
    )

    def model(self, model: Any) -> Any:
        """Put the budget around what will be compiled: each block, or the model as a whole."""
        from fasttrain.nn.budget import set_budget

        blocks = self.context.strategies.get("compile") != "model"
        chosen = self.context.blocks(model, "activation_checkpointing=budget") if blocks else [model]
        set_budget(chosen, self.config.budget)
        return model
