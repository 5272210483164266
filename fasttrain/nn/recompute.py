"""Run a module's forward again in the backward pass, with the same result and without side effects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from fasttrain.nn.forwards import replace_forward


class StatisticsAside:
    """While entered, running statistics of norms move on copies: a second forward leaves the originals alone.

    Buffers are exchanged rather than written back, as their version counters guard tensors saved for backward.
    """

    def __init__(self, module: nn.Module) -> None:
        self.norms = [part for part in module.modules() if isinstance(part, _NormBase) and part.track_running_stats]
        self.kept: list[dict[str, Any]] = []

    def __enter__(self) -> None:
        for norm in self.norms:
            self.kept.append(dict(norm._buffers))
            for name, buffer in norm._buffers.items():
                if buffer is not None:
                    norm._buffers[name] = buffer.clone()

    def __exit__(self, *error: object) -> None:
        for norm in reversed(self.norms):
            norm._buffers.update(self.kept.pop())


def recomputed(forward: Callable[..., Any], has_statistics: bool) -> Callable[..., Any]:
    """`forward(module, ...)`, keeping its inputs alone and running it again in the backward pass.

    RNG state is replayed and statistics of norms move once.
    """

    def recomputing_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(module, *args, **kwargs)
        if has_statistics and not torch.compiler.is_compiling():

            def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
                return nullcontext(), StatisticsAside(module)

            return checkpoint(forward, module, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        # A compiled graph writes statistics once by itself: the recomputation is cut out of the same trace.
        return checkpoint(forward, module, *args, use_reentrant=False, **kwargs)

    return recomputing_forward


def checkpoint_blocks(blocks: Iterable[nn.Module], every: int = 1) -> int:
    """Run chosen blocks again in the backward pass instead of keeping their activations.

    Saves: the activations inside 1/`every` of the blocks; their inputs stay. Costs: their forward again.
    Needs: a forward that gives the same result twice; RNG state is replayed, BatchNorm statistics move once.
    In place; weight names stay. Returns the number of blocks changed.
    Source: Chen et al. 2016, arXiv:1604.06174.
    """
    chosen = list(blocks)[::every]
    for block in chosen:
        has_statistics = bool(StatisticsAside(block).norms)
        replace_forward(block, partial(recomputed, has_statistics=has_statistics))
    return len(chosen)
