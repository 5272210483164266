"""Running statistics of batch norms, taken anew for other weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fasttrain.lazy import nn, torch
from fasttrain.nn.frozen import is_held


def norms_with_statistics(model: Any) -> list[Any]:
    """Batch norms that keep running statistics and train, or are held in evaluation and may be released.

    Those that were put into evaluation mode by hand are frozen.
    """
    kind = nn.modules.batchnorm._BatchNorm
    norms = [module for module in model.modules() if isinstance(module, kind) and module.running_mean is not None]
    return [norm for norm in norms if norm.training or not model.training or is_held(norm)]


def running_statistics(norms: Sequence[Any]) -> list[Any]:
    """Means, then variances, one tensor a norm: the buffers themselves."""
    return [norm.running_mean for norm in norms] + [norm.running_var for norm in norms]


@contextmanager
def kept_statistics(norms: Sequence[Any]) -> Iterator[None]:
    """Afterwards running statistics and counters of the norms are what they were, bit for bit."""
    held = [*running_statistics(norms), *[n.num_batches_tracked for n in norms if n.num_batches_tracked is not None]]
    before = [tensor.clone() for tensor in held]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, values in zip(held, before, strict=True):
                tensor.copy_(values)


def batch_statistics(model: Any, norms: Sequence[Any], forwards: Iterator[Any]) -> tuple[list[Any], int]:
    """Sums of the statistics of the norms over forwards of a model, and how many there were.

    `forwards` runs the model once at each `next`. The model is in evaluation mode then, but for the norms: no dropout.
    Running statistics are used up (see `kept_statistics`). The sums divided by the number are what
    `torch.optim.swa_utils.update_bn` gives without dropout, up to rounding. A norm that a forward uses several times counts
    once, with its last use.
    """
    flags = [(module, module.training) for module in model.modules()]
    momenta = [norm.momentum for norm in norms]
    for module, _ in flags:
        module.training = False
    for norm in norms:
        # With a momentum of 1 the running statistics are those of the last batch. torch's cumulative mode
        # (momentum=None) reads its counter on the host, and compiled code anew for each of its values.
        norm.training, norm.momentum = True, 1.0
    statistics = running_statistics(norms)
    sums = [torch.zeros_like(tensor) for tensor in statistics]
    number = 0
    try:
        for _ in forwards:
            torch._foreach_add_(sums, statistics)
            number += 1
    finally:
        for module, training in flags:
            module.training = training
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
    return sums, number
