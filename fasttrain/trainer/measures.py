"""torchmetrics in an evaluation: reset before it, fed with every batch, put together over ranks, computed once.

torchmetrics is imported by the user's own code alone. Its own synchronisation is not used: it gathers each state apart,
and a rank without a sample then gathers other states than the rest (an empty list has no type), or counts as if it had
seen a batch. Here the states of all ranks travel at once, and only those that saw something are put together.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fasttrain.distributed.world import World
from fasttrain.errors import ConfigError
from fasttrain.lazy import torch

if TYPE_CHECKING:
    from fasttrain.trainer.trainer import Trainer

# A value of more entries is no row of figures: it stays in `trainer.measures.values` alone.
MOST_FIGURES = 100


class Measures:
    """The torchmetrics of a trainer. `given`: what its `build_metrics` returned.

    `values`: what the last evaluation computed, as the metrics gave it (matrices and curves too).
    """

    def __init__(self, given: Any, world: World) -> None:
        metrics = given if isinstance(given, Mapping) else {"": given}
        self.given, self.world, self.metrics = given, world, metrics
        self.values: dict[str, Any] = {}
        for name, metric in metrics.items():
            if not (isinstance(metric, torch.nn.Module) and callable(getattr(metric, "update", None))):
                raise ConfigError(
                    f"build_metrics gives a {type(metric).__name__} for '{name}'; give metrics of torchmetrics by name, or "
                    "a MetricCollection."
                )
            metric.to(world.device)
            parts: Any = metric.modules()
            for part in parts:
                if getattr(part, "_enable_compute_groups", None) is True:
                    # Metrics whose states are equal after the first batch would share one from then on, also if they
                    # differ in what they count: two thresholds may well agree on a few samples. Groups given by hand stay.
                    part._enable_compute_groups = False
        for state in self._states():
            state.sync_on_compute = state._to_sync = False

    def reset(self) -> None:
        """Forget everything seen."""
        for metric in self.metrics.values():
            metric.reset()

    def compute(self) -> dict[str, float]:
        """Put the ranks together, and give what was measured as figures by name; on all ranks alike."""
        for metric in self.metrics.values():
            _share_groups(metric)
        states = list(self._states())
        seen_here = any(state.update_count for state in states)
        every = self.world.gather([_held(state) for state in states] if self.world.size > 1 else None)
        if self.world.size > 1:
            for state, held in zip(states, zip(*every, strict=True), strict=True):
                _put_together(state, [one for one in held if one is not None])
        # Where nothing was seen, a metric may not know yet what it measures (the number of classes, for example).
        mine = {name: _on_host(m.compute()) for name, m in self.metrics.items()} if seen_here else None
        self.reset()
        self.values = next((values for values in self.world.gather(mine) if values is not None), {})
        return dict(itertools.chain.from_iterable(_figures(name, value) for name, value in self.values.items()))

    def _states(self) -> Iterator[Any]:
        """Whatever keeps a state: metrics, and metrics within them."""
        modules = itertools.chain.from_iterable(metric.modules() for metric in self.metrics.values())
        return (module for module in modules if hasattr(module, "_reductions") and hasattr(module, "_to_sync"))


def build_measures(trainer: Trainer) -> Measures | None:
    """The metrics of a trainer, where it gives any and there is data for them."""
    given = trainer.build_metrics()
    if trainer.data.evaluation is None or (isinstance(given, Mapping) and not given):
        return None
    return Measures(given, trainer.world)


def update_all(metrics: Any, output: Any, target: Any) -> None:
    """Update metrics that all take the same two arguments: a mapping of them, or a collection."""
    for metric in metrics.values() if isinstance(metrics, Mapping) else (metrics,):
        metric.update(output, target)


def _share_groups(metric: Any) -> None:
    """Let all members of a collection's groups see the state that the first of them alone was updated with."""
    for part in metric.modules():
        if hasattr(part, "_groups_checked"):
            part.items(copy_state=True)


def _held(state: Any) -> dict[str, Any] | None:
    """What a metric holds, on the host; `None` where it saw nothing."""
    if not state.update_count:
        return None
    return {"": state.update_count, **{name: _on_host(getattr(state, name)) for name in state._reductions}}


def _put_together(state: Any, held: list[dict[str, Any]]) -> None:
    """Give a metric what all ranks hold that saw something."""
    if not held:
        return
    for name, reduction in state._reductions.items():
        values = [one[name] for one in held]
        if isinstance(values[0], list):
            # As one process would have appended them: the batches of a step in the order of the ranks.
            together = [v for row in itertools.zip_longest(*values) for v in row if v is not None]
            setattr(state, name, [_on(state.device, value) for value in together])
        elif len(values) == 1:
            setattr(state, name, _on(state.device, values[0]))
        else:
            stacked = torch.stack([_on(state.device, value) for value in values])
            setattr(state, name, stacked if reduction is None else reduction(stacked))
    state._update_count = sum(one[""] for one in held)
    state._computed = None


def _on(device: Any, value: Any) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _on_host(value: Any) -> Any:
    from fasttrain.core.batch import map_tensors

    return map_tensors(lambda tensor: tensor.detach().cpu(), value)


def _figures(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """A computed value as figures: numbers as they are, rows and dicts with an entry each; nothing of the rest."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _figures(f"{name}/{key}" if name else str(key), inner)
    elif isinstance(value, torch.Tensor):
        if value.numel() == 1:
            yield name, float(value)
        elif value.dim() == 1 and value.numel() <= MOST_FIGURES:
            yield from ((f"{name}/{i}", float(entry)) for i, entry in enumerate(value.tolist()))
    elif isinstance(value, int | float):
        yield name, float(value)
