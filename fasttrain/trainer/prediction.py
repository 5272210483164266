"""Outputs of the model for a whole data set, in its order, over all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fasttrain.core.batch import joined, map_tensors, num_samples, what_it_holds
from fasttrain.errors import BatchError, ConfigError
from fasttrain.trainer.evaluation import evaluating

if TYPE_CHECKING:
    from fasttrain.trainer.trainer import Trainer


def predict(trainer: Trainer, data: Any = None) -> Any:
    """What `trainer.prediction` keeps of each output, sample by sample in the order of the data; on all ranks.

    The weights are those that evaluations use (averages, where a strategy keeps some). `limit_batches` holds here too.
    Batches that an iterable cuts by itself come in its order, those of several ranks in turn.

    Raises:
        ConfigError: there is no data, or an output does not hold an entry a sample.
    """
    if data is None and trainer.data.evaluation is None:
        raise ConfigError(
            f"{type(trainer).__name__} has no evaluation data to predict; give predict(data), or return "
            "Data(train=..., evaluation=...)."
        )
    parts: list[tuple[int, Any]] = []
    with evaluating(trainer):
        for batch, portion in trainer.feed.evaluation(trainer.task, trainer.plan, data):
            microbatches = trainer.plan.split(trainer.task, batch)
            outputs = [_output(trainer, microbatch) for microbatch in microbatches]
            _check(outputs, portion.here, type(trainer).__name__)
            parts.extend((portion.first, output) for output in outputs)
    every = trainer.world.gather(parts)
    told = ((first, rank, output) for rank, given in enumerate(every) for first, output in given)
    in_order = sorted(told, key=lambda part: part[:2])  # keeps the order of microbatches
    if not in_order:
        raise ConfigError(f"{type(trainer).__name__} has nothing to predict: the data gave no sample.")
    return joined([output for _, _, output in in_order])


def _output(trainer: Trainer, batch: Any) -> Any:
    output = trainer.prediction(trainer.model(*trainer.inputs(batch)), batch)
    return map_tensors(lambda tensor: tensor.detach().cpu(), output)


def _check(outputs: list[Any], samples: int, trainer: str) -> None:
    """Refuse outputs that do not hold an entry for each sample of a batch, and no more."""
    try:
        held = sum(num_samples(output) for output in outputs)
    except BatchError:
        held = None
    if held != samples:
        raise ConfigError(
            f"{trainer}: the predictions of {samples} samples must have an entry for each along dim 0, but "
            f"{what_it_holds(outputs[0] if len(outputs) == 1 else outputs)}; override prediction(output, batch) to give "
            "what belongs to each sample."
        )
