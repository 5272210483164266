"""Ranks that compile: outside of collectives, and the same graphs on each.

torch.compile runs when a function is first called, and takes minutes. A rank that is done sooner goes on into the next
collective and waits there; after the process group's time-out the run dies. torch itself only adds the time that a cache
saved to NCCL's time-out. So ranks compile before the first step, where nothing is sent, and wait for each other in the
launcher's store, for as long as it takes.
"""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from fasttrain.compiler.reference import CannotCompareError, forward_backward
from fasttrain.core.batch import Microbatches, holds_samples, map_tensors, pieces
from fasttrain.core.strategy import Context
from fasttrain.core.task import Task, weighted
from fasttrain.distributed.stopping import next_round, own_store
from fasttrain.errors import RunError
from fasttrain.lazy import dist, pytree, torch

LIMIT_S = 4 * 3600.0
TELL_EVERY_S = 60.0
# A call into the store is never longer, so that signals are seen.
LOOK_EVERY_S = 1.0


def wait_for_compilers(
    rank: int,
    ranks: int,
    *,
    limit_s: float = LIMIT_S,
    tell_every_s: float = TELL_EVERY_S,
    tell: Callable[[str], object] = sys.stderr.write,
    store: Any = None,
) -> float:
    """Wait until every rank has called this; returns the seconds waited. No collective is sent.

    Every rank must call it equally often. Rank 0 says from time to time which ranks still compile. Costs a few calls to
    the launcher's store, and one a second while waiting.

    Raises:
        RunError: after `limit_s`, naming the ranks that still compile.
    """
    if ranks == 1:
        return 0.0
    store = dist.PrefixStore(next_round("compilers"), store or own_store())
    began = told = time.monotonic()
    store.set(f"rank/{rank}", "done")
    if store.add("done", 1) == ranks:
        store.set("all", "done")
    while not _arrived(store):
        now = time.monotonic()
        if now - began > limit_s:
            raise RunError(
                f"{_compiling(store, ranks)} still compiling after {limit_s:.0f} s, and this rank waits; look at what it "
                "does (py-spy dump --pid PID), or go without: compile=null."
            )
        if rank == 0 and now - told >= tell_every_s:
            told = now
            tell(f"{_compiling(store, ranks)} still compiling, {now - began:.0f} s after rank 0 was done.\n")
    return time.monotonic() - began


def _arrived(store: Any) -> bool:
    try:
        store.wait(["all"], datetime.timedelta(seconds=LOOK_EVERY_S))
    except dist.DistNetworkError:  # the store is gone
        raise
    except RuntimeError:  # not yet; every kind of store says so in its own way
        return store.check(["all"])
    return True


def _compiling(store: Any, ranks: int) -> str:
    late = [rank for rank in range(ranks) if not store.check([f"rank/{rank}"])]
    if len(late) == 1:
        return f"rank {late[0]} is"
    shown = ", ".join(map(str, late[:8])) + (f" and {len(late) - 8} more" if len(late) > 8 else "")
    return f"ranks {shown} are"


def sizes_to_rehearse(mine: int, usual: Iterable[int], last: Iterable[int]) -> list[int]:
    """Sizes of batches that a rank tries before its first step, so that no rank compiles in a later one.

    `mine`: samples that this rank gets now. `usual` and `last`: what each rank gets in a usual step and in the short last
    one of an epoch. Where no rank's share changes, its own alone. Else every rank also tries the smaller sizes that any rank
    meets in the last step: those that it does not meet itself, too, so that ranks have the same graphs.

    >>> sizes_to_rehearse(4, usual=[4, 4], last=[4, 4])
    [4]
    >>> sizes_to_rehearse(4, usual=[4, 4], last=[3, 4])  # batches of 8, the last one of 7
    [4, 3]
    >>> sizes_to_rehearse(4, usual=[4, 4, 4], last=[0, 1, 1])
    [4, 1]
    """
    usual, last = list(usual), list(last)
    others = set() if usual == last else {size for size in last if 0 < size < mine}
    return [mine, *sorted(others, reverse=True)]


def compile_together(task: Task, lines: Any, context: Context, batch: Any) -> None:
    """Before the first step: let every rank compile what its steps need, and wait for the last one.

    One rank alone compiles in its steps, unless a short batch comes: sizes have fixed code then, so that a run that is
    resumed after that batch has the same code, and computes the same bits. Does nothing where forwards of ranks wait for
    each other: those compile in the step itself. `lines` is the plan. Every rank must call it.
    """
    together = any(strategy.forwards_together for strategy in lines.strategies.values())
    if context.undisturbed is None or (together and context.data_ranks > 1):
        return
    usual, last = context.shares or ((), ())
    if context.data_ranks > 1 or usual != last:
        rehearse(task, lines, context, batch)
    wait_for_compilers(context.data_rank, context.data_ranks)


class FirstEvaluation:
    """Around the first evaluation of a run, which compiles, too: at its end, before figures are added up, wait for all."""

    def __init__(self, context: Context, inner: AbstractContextManager[Any]) -> None:
        self.context, self.inner = context, inner

    def __enter__(self) -> None:
        self.inner.__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.inner.__exit__(kind, error, trace)
        if error is None:
            wait_for_compilers(self.context.data_rank, self.context.data_ranks)


def rehearse(task: Task, lines: Any, context: Context, batch: Any) -> bool:
    """Forward and backward of what this rank will meet, so that it compiles here and in no step; whether that was done.

    Nothing is sent and nothing of the run moves: `torch.autograd.grad` calls no hook that follows gradients. Each size has
    fixed code: a symbol would serve all of them, and from then on the usual size as well, which is slower.

    Not done where this rank has no sample now. `lines` is the plan.
    """
    if context.undisturbed is None or not holds_samples(batch):
        return False
    tried: set[Any] = set()
    with context.undisturbed(), torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        for piece in _pieces(task, context, batch):
            for microbatch in lines.split(task, piece):
                shapes = _shapes(microbatch)
                if shapes in tried or not holds_samples(microbatch):
                    continue
                tried.add(shapes)
                try:
                    trial(task, lines, microbatch)()
                except (CannotCompareError, torch.OutOfMemoryError):  # the step itself will say so, or do without
                    return False
    return True


def trial(task: Task, lines: Any, microbatch: Any) -> Callable[[], None]:
    """Forward and backward of a microbatch beside the training, as the step does them; no gradient is left.

    Each time on a copy, as user code may change a batch in place, or take entries out of it.
    """

    def loss() -> Any:
        copy = map_tensors(torch.clone, microbatch)
        with lines.forward():
            loss = weighted(task.compute_loss(copy), None)
        return lines.scale(loss)

    forwards = forward_backward(task.model, loss)

    def run() -> None:
        with lines.microbatch(False):
            forwards()

    return run


def _pieces(task: Task, context: Context, batch: Any) -> list[Any]:
    """The batch, and what it is when it has as many samples as one that comes later."""
    fed = task.known(batch)
    if context.shares is None or fed is None or task.whole_batch_loss or isinstance(batch, Microbatches):
        return [batch]
    _, *others = sizes_to_rehearse(fed.samples, *context.shares)
    return [batch, *pieces(batch, [(0, size) for size in others])]


def _shapes(batch: Any) -> Any:
    leaves, spec = pytree.tree_flatten(batch)
    return str(spec), tuple(tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None for leaf in leaves)
