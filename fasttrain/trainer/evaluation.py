"""Evaluation: every sample once over all ranks, means by count."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fasttrain.core.batch import holds_samples
from fasttrain.distributed.reductions import Pair, add_over_ranks, read_pairs
from fasttrain.errors import ConfigError
from fasttrain.lazy import torch

if TYPE_CHECKING:
    from fasttrain.trainer.trainer import Trainer

Sums = dict[str, list[Any]]
# Before the names of what is summed: a figure that user code logs must not be added to a loss or metric of its name.
LOSS, METRIC, LOGGED = "loss ", "metric ", "logged "


def evaluate(trainer: Trainer) -> dict[str, float]:
    """Loss and metrics over the evaluation data: means over everything counted, on all ranks alike.

    Raises:
        ConfigError: there is no evaluation data.
    """
    if trainer.data.evaluation is None:
        raise ConfigError(f"{type(trainer).__name__} has no evaluation data; return Data(train=..., evaluation=...).")
    plan, task, measures = trainer.plan, trainer.task, trainer.measures
    sums: Sums = {}
    if measures is not None:
        measures.reset()
    with evaluating(trainer):
        for batch, portion in trainer.feed.evaluation(task, plan):
            for microbatch in plan.split(task, batch):
                _add(sums, trainer, microbatch, portion.here)
    means = _means(add_over_ranks(read_pairs(sums), trainer.world.size))
    if measures is None:
        return means
    measured = measures.compute()
    if twice := sorted(measured.keys() & means.keys()):
        raise ConfigError(f"'{twice[0]}' is measured twice: by build_metrics and as a mean; give one another name.")
    return measured | means


@contextlib.contextmanager
def evaluating(trainer: Trainer) -> Iterator[None]:
    """Around forwards without gradients: modules and figures are as they were afterwards."""
    model, plan, task, figures = trainer.model, trainer.plan, trainer.task, trainer.figures
    was_training, was_watching = model.training, figures.watching
    frozen = [module for module in model.modules() if not module.training]
    weight_before = plan.weight
    figures.take_sums()
    figures.watching = True
    model.eval()
    try:
        with torch.no_grad(), plan.evaluating(model):
            yield
    except Exception as error:
        trainer.feed.name_batch(error)
        raise
    finally:
        model.train(was_training)
        for module in frozen:
            module.training = False
        figures.take_sums()
        figures.watching, plan.weight, task.fed = was_watching, weight_before, None


def figures_of(given: Any, trainer: str) -> dict[str, float]:
    """What an evaluation gave, as plain numbers: an `evaluate` of the user's may give tensors of one element.

    Raises:
        ConfigError: it is no mapping of names to numbers.
    """
    if isinstance(given, Mapping):
        try:
            return {str(name): float(value) for name, value in given.items()}
        except (TypeError, ValueError, RuntimeError):
            told = ", ".join(f"{name}: {type(value).__name__}" for name, value in given.items())
    else:
        told = "None" if given is None else f"a {type(given).__name__}"
    raise ConfigError(f"{trainer}.evaluate returned {told}; return a dict of numbers by name, such as the loss.")


def _add(sums: Sums, trainer: Trainer, batch: Any, samples: int) -> None:
    """Add what one microbatch gives, each value with its count."""
    by_samples = trainer.task.count is None and trainer.task.known(batch) is not None
    count = samples if by_samples else trainer.count(batch)
    parts = dict(count) if isinstance(count, Mapping) else {"": count}
    weight = sum(parts.values())
    trainer.plan.weight = weight
    own_loss = type(trainer).loss is not _base().loss
    if own_loss:
        output = trainer.model(*trainer.inputs(batch))
        loss = trainer.loss(output, batch)
        values = dict(trainer.metrics(output, batch))
        if trainer.measures is not None and holds_samples(batch):
            trainer.update_metrics(trainer.measures.given, output, batch)
    else:
        loss, values = trainer.compute_loss(batch), {}
    named = loss if isinstance(loss, Mapping) else {"": loss}
    for name, value in named.items():
        _accumulate(sums, LOSS + name, value, parts.get(name, weight))
    for name, value in values.items():
        _accumulate(sums, METRIC + name, value, weight)
    for name, (total, by) in trainer.figures.take_sums().items():
        held = sums.setdefault(LOGGED + name, [0.0, 0.0])
        held[0], held[1] = held[0] + total, held[1] + by


def _base() -> type[Trainer]:
    from fasttrain.trainer.trainer import Trainer

    return Trainer


def _accumulate(sums: Sums, name: str, value: Any, count: Any) -> None:
    held = sums.setdefault(name, [0.0, 0.0])
    if isinstance(value, torch.Tensor):
        value = value.detach().to(torch.float32 if value.device.type == "mps" else torch.float64)
    if isinstance(count, torch.Tensor):
        if isinstance(value, torch.Tensor):
            count = count.to(value.device)
        else:
            value = torch.full_like(count, value, dtype=torch.float32 if count.device.type == "mps" else torch.float64)
        value = torch.where(count > 0, value, torch.zeros_like(value))  # a mean over nothing is not a number
    elif not count:
        return
    held[0], held[1] = held[0] + value * count, held[1] + count


def _means(sums: dict[str, Pair]) -> dict[str, float]:
    kinds: dict[str, dict[str, float]] = {LOSS: {}, METRIC: {}, LOGGED: {}}
    for key, (total, count) in sums.items():
        kind, _, name = key.partition(" ")
        kinds[kind + " "][name] = total / count if count else float("nan")
    losses = kinds[LOSS]
    told = {f"loss/{name}": mean for name, mean in losses.items() if name}
    if losses:
        told["loss"] = sum(losses.values())
    return kinds[LOGGED] | kinds[METRIC] | told
