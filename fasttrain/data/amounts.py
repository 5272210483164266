"""What is said of data that gives no step, or fewer samples than one asks for."""

from __future__ import annotations

from collections.abc import Sized

from fasttrain.data.data import Data, form, num_samples_of
from fasttrain.data.order import Order
from fasttrain.errors import ConfigError
from fasttrain.lazy import torch


def refuse_repeats(data: Data, batch_size: int) -> None:
    """Refuse copies of an image that would stand in two batches.

    Raises:
        ConfigError: `repeats` does not divide the batch, or the data cuts its own batches.
    """
    if data.repeats == 1:
        return
    if num_samples_of(data.train) is None:
        raise ConfigError(
            f"Data(repeats={data.repeats}) with a {type(data.train).__name__}, which cuts its own batches; give a data set "
            "with __getitem__ and __len__, or repeat the samples in it."
        )
    if data.lengths is not None:
        raise ConfigError(
            f"Data(repeats={data.repeats}, lengths=...): a batch grouped by length would hold the copies of few samples; "
            "use one of the two."
        )
    if batch_size % data.repeats:
        raise ConfigError(
            f"Data(repeats={data.repeats}) with batch_size={batch_size}: copies of an image would stand in two batches; use "
            f"a multiple of {data.repeats}."
        )


def refuse_what_needs_numbers(data: Data) -> None:
    """Refuse settings that data whose samples have no number, and come as they come, would not follow.

    Raises:
        ConfigError: `drop_last`, or a `timeout_s` for workers that are not ours.
    """
    kind = type(data.train).__name__
    loader, stream = (
        isinstance(data.train, one) for one in (torch.utils.data.DataLoader, torch.utils.data.IterableDataset)
    )
    if data.drop_last:
        instead = (
            "set it in the DataLoader"
            if loader
            else "leave it out, since a short batch weighs what it holds, or end epochs before it with limit_batches=N"
        )
        raise ConfigError(
            f"Data(drop_last=True) with a {kind}: which samples fill no batch is known only when every rank is at its end; "
            f"{instead}."
        )
    if data.timeout_s is not None and form(data.train) == "batches" and not stream:
        instead = "set timeout in the DataLoader" if loader else "leave it out, or give Shards or a map-style data set"
        raise ConfigError(
            f"Data(timeout_s={data.timeout_s}) with a {kind}, which is asked for batches as it gives them; {instead}."
        )


def no_steps(data: Data, batch_size: int, limit: float | None) -> ConfigError:
    """The error for an epoch without a step: which of drop_last and limit_batches leaves none."""
    size, dropping = num_samples_of(data.train), data.drop_last
    if size is None:
        inner = getattr(data.train, "dataset", None)
        size = len(inner) if isinstance(inner, Sized) else None
        dropping, batch_size = getattr(data.train, "drop_last", False), getattr(data.train, "batch_size", batch_size)
    held = "the training data" if size is None else f"the training data holds {size} samples, which"
    if dropping and size is not None and batch_size is not None and size < batch_size:
        return ConfigError(
            f"{held} fill no batch of {batch_size}, and drop_last leaves out what fills none: no step would be left; use "
            f"batch_size={size} or less, or drop_last=False."
        )
    if limit is not None and limit < 1:
        steps = _steps(data, batch_size)
        return ConfigError(
            f"limit_batches={limit} of {steps} steps an epoch is less than one step; give a larger share (1/{steps} is one "
            "step), or a number of steps (limit_batches=1)."
        )
    return ConfigError(f"{held} gives no batch; look at the path, the filter or the batch size.")


def _steps(data: Data, batch_size: int) -> int:
    size = num_samples_of(data.train)
    if size is None:
        return len(data.train)
    return Order(size=size, batch_size=batch_size, drop_last=data.drop_last).steps_per_epoch
