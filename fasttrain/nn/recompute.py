"""Run a module's forward again in the backward pass, with the same result and without side effects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint, noop_context_fn

from fasttrain.nn.arguments import with_arguments_kept
from fasttrain.nn.forwards import replace_forward
from fasttrain.nn.selective import Keeps, selective_contexts, traced_contexts

NOTHING = nullcontext()


class StatisticsAside:
    """While entered, running statistics of norms move on copies: a second forward leaves the originals alone.

    `inner`: a context entered inside.

    Buffers are exchanged rather than written back, as their version counters guard tensors saved for backward.
    """

    def __init__(self, module: nn.Module, inner: AbstractContextManager[Any] = NOTHING) -> None:
        self.inner = inner
        self.norms = [part for part in module.modules() if isinstance(part, _NormBase) and part.track_running_stats]
        self.kept: list[dict[str, Any]] = []

    def __enter__(self) -> None:
        for norm in self.norms:
            self.kept.append(dict(norm._buffers))
            for name, buffer in norm._buffers.items():
                if buffer is not None:
                    norm._buffers[name] = buffer.clone()
        self.inner.__enter__()  # last: it must not see the clones being made

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)
        for norm in reversed(self.norms):
            norm._buffers.update(self.kept.pop())


def recomputed(forward: Callable[..., Any], has_statistics: bool, keeps: Keeps | None = None) -> Callable[..., Any]:
    """`forward(module, ...)`, keeping its inputs alone and running it again in the backward pass.

    RNG state is replayed and statistics of norms move once. `keeps`: which results are kept, too.
    """
    # Its length is read where it is traced, so that graphs are guarded on it: torch does not guard on contexts, and blocks
    # of one class under two rules in one process would share their graphs.
    rule = "" if keeps is None else repr(keeps)
    contexts_of_trace = noop_context_fn if keeps is None else traced_contexts(keeps)
    traced = _statistics_once(forward) if has_statistics else forward

    def recomputing_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(module, *args, **kwargs)
        if torch.compiler.is_compiling():
            if len(rule) == 0:
                return checkpoint(traced, module, *args, use_reentrant=False, **kwargs)
            return checkpoint(traced, module, *args, use_reentrant=False, context_fn=contexts_of_trace, **kwargs)
        if keeps is None and not has_statistics:
            return checkpoint(forward, module, *args, use_reentrant=False, **kwargs)

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            first, second = nullcontext(), nullcontext()
            if keeps is not None:
                first, second = selective_contexts(keeps)
            return first, StatisticsAside(module, second) if has_statistics else second

        return checkpoint(forward, module, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return recomputing_forward


def _statistics_once(forward: Callable[..., Any]) -> Callable[..., Any]:
    """For code that dynamo traces. A compiled graph writes statistics once by itself: the recomputation is cut out of the
    same trace. But a checkpoint that could not be traced in one piece is run as it is, twice.
    """

    def forward_once(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            return forward(module, *args, **kwargs)
        with StatisticsAside(module):  # within a backward pass
            return forward(module, *args, **kwargs)

    return forward_once


def checkpoint_blocks(blocks: Iterable[nn.Module], every: int = 1, keeps: Keeps | None = None) -> int:
    """Run chosen blocks again in the backward pass instead of keeping their activations.

    Saves: the activations inside 1/`every` of the blocks; their inputs stay, and of their operations those results that
    `keeps` chooses (`fasttrain.nn.selective`). Costs: the forward of the rest again.
    Needs: a forward that gives the same result twice; RNG state is replayed, BatchNorm statistics move once.
    In place; weight names stay. Returns the number of blocks changed.
    Source: Chen et al. 2016, arXiv:1604.06174.
    """
    chosen = list(blocks)[::every]
    for block in chosen:
        has_statistics = bool(StatisticsAside(block).norms)
        change = partial(recomputed, has_statistics=has_statistics, keeps=keeps)
        replace_forward(block, with_arguments_kept(change))
    return len(chosen)
