"""A limit on what compiled code keeps for backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._guards import TracingContext
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fasttrain.errors import ConfigError
from fasttrain.nn.forwards import replace_forward


def set_budget(modules: Iterable[nn.Module], budget: float) -> None:
    """Let the compiled forward of modules keep a part of the bytes that it would keep otherwise.

    `budget`: 1 keeps what compiled code keeps by itself, 0 what checkpointing the whole module would. Each module must
    become a graph of its own, as torch plans a budget for whole graphs. In place; weight names stay.

    The budget is noted on the traced operations and not in torch's settings for the process
    (`torch._functorch.config.activation_memory_budget`), so that another model with another budget neither changes it nor
    takes its graphs. torch's own `region_activation_memory_budget` does the same, but refuses BatchNorm, and forgets the
    state of random draws. torch 2.14.1.
    Source: https://pytorch.org/blog/activation-checkpointing-techniques

    Raises:
        ConfigError: this version of torch would not look at the budget.
    """
    if not hasattr(torch.autograd.graph, "region_activation_memory_budget"):
        raise ConfigError(
            f"activation_checkpointing=budget: torch {torch.__version__} takes no budget for single graphs (2.14 does); use "
            "activation_checkpointing=selective."
        )
    for module in modules:
        replace_forward(module, partial(_within, budget=float(budget)))


def _within(forward: Callable[..., Any], budget: float) -> Callable[..., Any]:
    # As text: of numbers that differ between two models dynamo makes symbols. Read where it is traced, so that graphs are
    # guarded on it.
    text = str(budget)
    contexts = partial(_contexts, text)
    contexts.__dict__["cache_hash"] = f"budget {text}"  # torch then takes graphs from its cache on disk

    def budgeted_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and float(text) <= 1.0:
            return checkpoint(forward, module, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        if torch.is_grad_enabled():
            _warn(text)
        return forward(module, *args, **kwargs)

    return budgeted_forward


def _contexts(text: str) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    if TracingContext.try_get() is None:  # dynamo gave this call up
        if torch.is_grad_enabled():
            _warn(text)
        return nullcontext(), nullcontext()
    return create_selective_checkpoint_contexts(partial(_planned, float(text)))


def _warn(text: str) -> None:
    warnings.warn(
        f"activation_checkpointing.budget={text} does not hold for a block that was not compiled in one piece; "
        "compile.fullgraph=true says why it was not.",
        stacklevel=2,
    )


def _planned(budget: float, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy | None:
    """Leave an operation to the budget, which is noted on it where torch's partitioner looks for it.

    Random draws are run again, and for those torch hands on the state of the generator. Without this a budget below 1
    draws other masks of dropout in backward than in forward, without a word. pytorch/pytorch#190717, torch 2.14.1.
    """
    tracing = get_proxy_mode()
    if tracing is not None:
        node = next(iter(reversed(tracing.tracer.graph.nodes)))
        node.meta["memory_budget"] = budget
    return CheckpointPolicy.PREFER_RECOMPUTE if torch.Tag.nondeterministic_seeded in operation.tags else None
