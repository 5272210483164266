"""What the step needs to know of the user's code, and how much each microbatch weighs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fasttrain.core.batch import Microbatches, cut, num_samples
from fasttrain.core.strategy import Context
from fasttrain.errors import BatchError, ConfigError
from fasttrain.lazy import dist, pytree, torch


@dataclass(slots=True)
class Fed:
    """What the feed knows of the batch it just gave: found before the batch went to the device.

    `exact=False`: the data cut its own batches, so `global_samples` is a guess from what this rank holds. `alone`: another
    rank may hold nothing of this step.
    """

    batch: Any
    samples: int
    global_samples: int
    counts: list[Any] | None = None
    exact: bool = True
    alone: bool = False


@dataclass(slots=True)
class Task:
    """The user's side of a step. Strategies see this, never the trainer.

    `count` weighs a batch (`None`: by samples). `inputs` and `loss` are there where the loss is made of them. `augment`
    changes a training batch on the device, from a seed of the step.
    `counted` is what the last step counted over all ranks, where the host knows.
    """

    model: Any
    compute_loss: Callable[[Any], Any]
    count: Callable[[Any], Any] | None = None
    inputs: Callable[[Any], tuple[Any, ...]] | None = None
    loss: Callable[[Any, Any], Any] | None = None
    cut: Callable[[Any, int], list[Any]] | None = None
    augment: Callable[[Any, Any], Any] | None = None
    whole_batch_loss: bool = False
    fed: Fed | None = None
    counted: float | None = None

    def known(self, batch: Any) -> Fed | None:
        """What the feed said of this very batch."""
        fed = self.fed
        return fed if fed is not None and fed.batch is batch else None

    def samples(self, batch: Any) -> int:
        """Samples this rank holds of the batch."""
        fed = self.known(batch)
        return fed.samples if fed is not None else num_samples(batch)

    def nothing(self, batch: Any) -> Any:
        """A zero that hangs on the whole graph of a forward; its gradients are zeros even where no mean exists."""
        if self.inputs is None:
            return sum_of(self.compute_loss(batch)) * 0.0
        return sum_of(self.model(*self.inputs(batch))) * 0.0

    def split(self, batch: Any, n: int) -> list[Any]:
        """Cut a batch into `n` microbatches, as the user does it or along dim 0.

        Raises:
            BatchError: the batch cannot be cut, or the user's `split` gave another number.
        """
        if isinstance(batch, Microbatches):
            return list(batch)
        if batch is None:
            return [None] * n
        if n == 1:
            return [batch]
        if self.whole_batch_loss:
            raise BatchError(
                f"whole_batch_loss = True: the loss needs the whole batch, so it cannot be cut into {n} microbatches; "
                "use accumulation=null."
            )
        if self.cut is None:
            return cut(batch, n, fed.samples if (fed := self.known(batch)) is not None else None)
        pieces = list(self.cut(batch, n))
        if len(pieces) != n:
            raise BatchError(f"split(batch, {n}) gave {len(pieces)} microbatches; return {n}, empty ones if need be.")
        return pieces


@dataclass(slots=True)
class StepInfo:
    """What a step says of itself: its number, and this rank's weighted loss on the device (`None`: nothing counted)."""

    step: int
    loss: Any


# A weight multiplies the loss of a microbatch; None means it counts nothing and is left out.
Weight = Any


def weights_of(task: Task, batch: Any, microbatches: list[Any], context: Context) -> list[Weight] | None:
    """How much each microbatch weighs: `count × data ranks / total count of the step`, over all ranks.

    Applied to the loss before backward, while every reducer averages over ranks, this makes loss and gradient the exact
    mean over everything counted. Returns `None` where nothing needs a weight (one microbatch on one rank, counted by
    samples). Nothing is read from the device: counts are plain numbers when taken on the host (as the feed does), and
    stay tensors otherwise. A count of 0 gives the weight `None`; a step that counts nothing at all gives `[]`.
    """
    ranks = context.data_ranks
    if task.whole_batch_loss:
        return None
    if len(microbatches) == 1 and ranks == 1 and task.count is None:
        return None
    fed = task.known(batch)
    total = None
    if fed is not None and fed.counts is not None and len(fed.counts) == len(microbatches):
        counts = fed.counts
    elif task.count is not None:
        counts = [_count(task.count, microbatch) for microbatch in microbatches]
    elif fed is not None and len(microbatches) == 1:
        counts = [fed.samples if fed.exact else _samples_of_given(fed)]
    else:
        counts = [_count(num_samples, microbatch) for microbatch in microbatches]
    if task.count is None and fed is not None and fed.exact:
        total = float(fed.global_samples)
    names = next((list(count) for count in counts if isinstance(count, Mapping)), [""])
    if task.count is not None and fed is not None and fed.alone and ranks > 1:
        names = _names_of_all(names, context)
    table = [[count[n] for n in names] if isinstance(count, Mapping) else [count] * len(names) for count in counts]
    if any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for row in table for value in row):
        task.counted = None
        rows = _device_weights(table, context)
    else:
        sums = _host_sums(table := [[_number(value) for value in row] for row in table], total, context)
        task.counted = sums[0]
        if not any(sums):
            return []
        rows = [[value * ranks / sums[i] if value else None for i, value in enumerate(row)] for row in table]
    if names == [""]:
        return [row[0] for row in rows]
    return [None if all(w is None for w in row) else dict(zip(names, row, strict=True)) for row in rows]


def sum_of(tree: Any) -> Any:
    """The sum of everything in a tree of tensors that a gradient can flow to."""
    leaves = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return sum(leaf.sum() for leaf in leaves[1:]) + leaves[0].sum()


def _names_of_all(names: list[str], context: Context) -> list[str]:
    """The names of what is counted, where a rank may hold nothing that would tell them."""
    every: list[Any] = [None] * context.data_ranks
    dist.all_gather_object(every, names, group=context.host_group)
    return next((found for found in every if found != [""]), names)


def _count(count: Callable[[Any], Any], microbatch: Any) -> Any:
    return 0 if microbatch is None else count(microbatch)


def _samples_of_given(fed: Fed) -> int:
    """Samples in a batch that the data cut: what lies along dim 0; its share where that cannot be told."""
    try:
        return num_samples(fed.batch)
    except BatchError:
        return fed.samples


def _number(value: Any) -> float:
    # .numpy() and not .item(): a count on the host is no device read and must not look like one.
    return float(value.numpy()) if isinstance(value, torch.Tensor) else float(value)


def _host_sums(table: list[list[float]], total: float | None, context: Context) -> list[float]:
    if total is not None:
        return [total]
    sums = [math.fsum(column) for column in zip(*table, strict=True)]
    if context.data_ranks == 1:
        return sums
    together = torch.tensor(sums, dtype=torch.float64)
    dist.all_reduce(together, group=context.host_group)
    return together.numpy().tolist()


def _device_weights(table: list[list[Any]], context: Context) -> list[list[Any]]:
    # Filled on the device where the host knows a count: a copy from the host would wait for the device.
    device = next(v.device for row in table for v in row if isinstance(v, torch.Tensor) and v.device.type != "cpu")
    rows = [
        [
            v.to(torch.float32)
            if isinstance(v, torch.Tensor) and v.device == device
            else torch.full((), _number(v), device=device)
            for v in row
        ]
        for row in table
    ]
    counts = torch.stack([torch.stack(row) for row in rows])
    total = counts.sum(0)
    if context.data_ranks > 1:
        dist.all_reduce(total, group=context.data_group)
    weights = counts * (context.data_ranks / total)
    return [list(row.unbind()) for row in weights.unbind()]


def weighted(loss: Any, weight: Weight) -> Any:
    """One number to differentiate: the loss (or the losses, by name) times what it weighs.

    Raises:
        ConfigError: `loss` and `count` do not name the same parts, or the loss is neither tensor nor dict.
    """
    if isinstance(loss, torch.Tensor):
        if weight is None:
            return loss
        if isinstance(weight, Mapping):
            raise ConfigError(
                f"count gives {sorted(weight)} but the loss is one number; return dicts of the same keys."
            )
        return loss * weight
    if not isinstance(loss, Mapping) or not loss:
        kind = "None" if loss is None else "an empty dict" if isinstance(loss, Mapping) else f"a {type(loss).__name__}"
        raise ConfigError(
            f"the loss is {kind}; return a 0-dim tensor, or a dict of such tensors, from loss or compute_loss."
        )
    if isinstance(weight, Mapping):
        if set(weight) != set(loss):
            raise ConfigError(f"the loss has the parts {sorted(loss)} and count {sorted(weight)}; use the same keys.")
        parts = [loss[name] * weight[name] for name in loss if weight[name] is not None]
    else:
        parts = [part if weight is None else part * weight for part in loss.values()]
    return sum(parts[1:], parts[0])
