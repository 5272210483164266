"""compile: let torch.compile generate the code of the repeated blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, final

from fasttrain.core.strategy import Strategy
from fasttrain.errors import ConfigError, did_you_mean
from fasttrain.lazy import torch
from fasttrain.nn.forwards import replace_forward


@dataclass(frozen=True, kw_only=True)
class BlocksConfig:
    """Passed to torch.compile. `dynamic=None`: sizes that were seen to change become symbols."""

    backend: str = "inductor"
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None
    fullgraph: bool = False
    dynamic: bool | None = None


def compile_blocks(blocks: Iterable[Any], config: BlocksConfig) -> int:
    """Compile the forward of each block, in place; blocks of one class share their graphs.

    Saves: time, by fusing what is between matrix products. Costs: compilation at the first steps.
    Weight names stay. Returns the number of blocks.

    Raises:
        ConfigError: torch has no such backend.
    Source: https://docs.pytorch.org/docs/stable/generated/torch.compile.html
    """
    from torch._dynamo.exc import InvalidBackend

    try:
        torch._dynamo.lookup_backend(config.backend)
    except InvalidBackend:
        known = torch._dynamo.list_backends()
        raise ConfigError(
            f"compile.backend={config.backend}: torch knows no backend of that name; {did_you_mean(config.backend, known)}"
        ) from None
    settings = {"backend": config.backend, "fullgraph": config.fullgraph, "dynamic": config.dynamic}
    if config.mode is not None:
        settings["mode"] = config.mode
    blocks = list(blocks)
    allow_graphs(GRAPHS_PER_BLOCK * len(blocks))
    for block in blocks:
        # Not block.compile(): with a forward that checkpointing replaced, that compiles nothing and does not say so.
        replace_forward(block, lambda forward: torch.compile(forward, **settings))
    return len(blocks)


# torch's own limit for a function. Shapes of training, evaluation and short last batches take some each.
GRAPHS_PER_BLOCK = 8


def allow_graphs(number: int) -> None:
    """Let torch.compile keep so many graphs of a function, at least, in this process.

    torch counts them by code object, which all blocks of a class share (with checkpointing, all blocks): the 16 blocks
    of a ResNet-50 need 8 for training alone, and what comes after torch's limit of 8 runs uncompiled.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, number)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, number)


@final
class Blocks(Strategy):
    """Compile each repeated block, after checkpointing and before ranks are joined: one graph a kind of block."""

    slot, name = "compile", "blocks"
    Config = BlocksConfig

    def model(self, model: Any) -> Any:
        """Compile the blocks."""
        compile_blocks(self.context.blocks(model, "compile=blocks"), self.config)
        return model
