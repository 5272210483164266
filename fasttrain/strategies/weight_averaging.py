"""weight_averaging: averages of the weights beside those that train; evaluations use the averages.

| name | average | what it gives |
|---|---|---|
| ema | exponential: each update keeps `decay` of the old | steadier, often better evaluations through all of a training |
| swa | equal, of the last part of the training | a flatter minimum, better generalisation |

Only accepted steps count. Where a step can be refused, the device decides whether the averages move: no host read.
Source: Polyak and Juditsky 1992; Izmailov et al. 2018, arXiv:1803.05407.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, final

from fasttrain.core.strategy import NO_CONTEXT, Context, Strategy
from fasttrain.distributed.replicas import broadcast_tensors
from fasttrain.errors import CheckpointError, ConfigError
from fasttrain.lazy import dist, torch
from fasttrain.nn.batch_statistics import (
    batch_statistics,
    kept_statistics,
    norms_with_statistics,
    running_statistics,
)
from fasttrain.nn.frozen import is_held
from fasttrain.nn.names import plain_name
from fasttrain.optim.averages import Averages, Place, ema_rate, floating_buffers, swa_rate

# Keys of the saved state that no weight can have: names of modules and weights hold no empty part.
UPDATES, KIND = ".updates", ".name"


@dataclass(frozen=True, kw_only=True)
class When:
    """`every`: accepted steps between updates; `start`: the first step that counts (below 1: share of all steps)."""

    every: int = 1
    start: float = 0

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"weight_averaging.every={self.every} must be at least 1.")
        if not 0 <= self.start < float("inf") or (self.start >= 1 and self.start != int(self.start)):
            raise ConfigError(f"weight_averaging.start={self.start}: give a number of steps or a fraction below 1.")


@dataclass(frozen=True, kw_only=True)
class EmaConfig(When):
    """`decay`: the share of the old average that an update keeps; `warmup`: less at first, min(decay, (1+t)/(10+t)).

    `buffers`: floating-point buffers such as running statistics are averaged too, or (`copy`) taken from the model.
    """

    decay: float = 0.999
    warmup: bool = False
    buffers: Literal["average", "copy"] = "average"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.decay < 1:
            raise ConfigError(f"weight_averaging.decay={self.decay} must be between 0 and 1, usually 0.999.")


@dataclass(frozen=True, kw_only=True)
class SwaConfig(When):
    """`statistics_batches`: training batches that batch norms take their statistics from at an evaluation.

    `None`: they keep those of the weights that train.
    """

    start: float = 0.75
    statistics_batches: int | None = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.statistics_batches is not None and self.statistics_batches < 1:
            raise ConfigError(
                f"weight_averaging.statistics_batches={self.statistics_batches} must be at least 1; to keep the statistics "
                "of the weights that train use null."
            )


@dataclass(slots=True)
class _Part:
    """The averages of what one optimizer trains. `updates`, `step`: device tensors where a step can be refused."""

    averages: Averages
    buffers: list[str]
    updates: Any = 0
    step: Any = 0


class _Shown:
    """Around an evaluation: the averages in the model."""

    __slots__ = ("model", "strategy")

    def __init__(self, strategy: WeightAveraging, model: Any) -> None:
        self.strategy, self.model = strategy, model

    def __enter__(self) -> None:
        self.strategy.show(self.model)

    def __exit__(self, *error: object) -> None:
        self.strategy.hide()


class _Hidden:
    """Around a save within an evaluation: the weights that train in the model."""

    __slots__ = ("model", "strategy")

    def __init__(self, strategy: WeightAveraging, model: Any) -> None:
        self.strategy, self.model = strategy, model

    def __enter__(self) -> None:
        self.strategy.hide()

    def __exit__(self, *error: object) -> None:
        self.strategy.show(self.model)


class WeightAveraging(Strategy):
    """What both averages share: when they move, what is averaged, evaluations and checkpoints."""

    slot = "weight_averaging"

    def __init__(self, config: Any = None, context: Context | None = None) -> None:
        super().__init__(config, context)
        self._parts: dict[int, _Part] = {}
        self._saved: Mapping[str, Any] | None = None
        self._is_shown = False
        self._start = 0

    def rate(self, updates: Any) -> Any:
        """How far the update after `updates` others moves the averages towards the weights; 1 at first."""
        raise NotImplementedError

    def buffers(self, model: Any) -> dict[str, Place]:
        """The buffers that are averaged; others stay the model's own."""
        return {}

    # ---- training

    def started(self, model: Any, optimizer: Any, step: Any) -> None:
        """Make room for the averages of what this optimizer trains, or take up the saved ones."""
        part = self._parts.get(id(optimizer))
        if part is None:
            part = self._parts[id(optimizer)] = self._made(model, optimizer)
            self._start = self._first_step()
        part.step, part.updates = step, 0
        if self._saved is not None:
            self._take_up(part, list(self._parts.values()).index(part))

    def updated(self, model: Any, optimizer: Any, step: Any) -> None:
        """Move the averages, if the step was accepted and its turn has come."""
        part, every, start = self._parts[id(optimizer)], self.config.every, self._start
        if not isinstance(step, torch.Tensor):
            if step != part.step and step >= start and (step - start) % every == 0:
                part.averages.update(self.rate(part.updates))
                part.updates += 1
            part.step = step
            return
        if not isinstance(part.updates, torch.Tensor):  # the first step that can be refused
            part.step = part.step if isinstance(part.step, torch.Tensor) else torch.full_like(step, part.step)
            part.updates = torch.full_like(step, part.updates)
        moves = step != part.step
        if start > 1:
            moves &= step >= start
        if every > 1:
            moves &= (step - start).remainder(every) == 0
        moves = moves.to(step.dtype)
        part.averages.update(self.rate(part.updates) * moves)
        part.updates += moves
        part.step = step

    def _first_step(self) -> int:
        start, total = self.config.start, self.context.total_steps
        if 0 < start < 1:
            if total is None:
                raise ConfigError(
                    f"weight_averaging={self.name}: start={start} is a share of all steps, and how many there are is not "
                    "known; set steps=N, or give start as a step."
                )
            start = int(start * total)
        first = start or self.config.every
        if total is not None and first > total:
            raise ConfigError(
                f"weight_averaging={self.name}: the first update would come at step {int(first)}, and the run has {total}; "
                "use a lower start or every, or weight_averaging=null."
            )
        return int(start)

    def _made(self, model: Any, optimizer: Any) -> _Part:
        # Also what takes no gradient yet: it is in an optimizer because it will (adapters=freeze with unfreeze).
        trained = {id(p) for group in optimizer.param_groups for p in group["params"] if _has_average(p)}
        weights = {plain_name(name): p for name, p in model.named_parameters() if id(p) in trained}
        owned = _owned(model, trained, self.buffers(model))
        return _Part(Averages(weights, owned), list(owned))

    # ---- evaluation

    def evaluating(self, model: Any) -> AbstractContextManager[Any]:
        """The averages in the model; the weights are back afterwards, bit for bit, after an error too."""
        return NO_CONTEXT if self._is_shown else _Shown(self, model)

    def saving(self, model: Any) -> AbstractContextManager[Any]:
        """The weights that train in the model."""
        return _Hidden(self, model) if self._is_shown else NO_CONTEXT

    def show(self, model: Any) -> None:
        """Put the averages into the model, those that were updated at least once."""
        self._is_shown = True
        try:
            for part in self._parts.values():
                if int(part.updates):
                    self._agree(part)
                    part.averages.show()
        except BaseException:
            self.hide()
            raise

    def hide(self) -> None:
        """Put the weights back."""
        for part in self._parts.values():
            part.averages.hide()
        self._is_shown = False

    def _agree(self, part: _Part) -> None:
        """Averages of buffers are rank 0's on every rank, as the buffers themselves are in evaluations."""
        if self.context.data_ranks > 1 and part.buffers:
            averages = part.averages.tensors()
            buffers = [averages[name] for name in part.buffers]
            broadcast_tensors(buffers, self.context.data_group, self.context.host_group)

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The averages by the names of the weights, and how many updates are in them."""
        updates = [int(part.updates) for part in self._parts.values()]
        state: dict[str, Any] = {KIND: self.name, UPDATES: updates}
        for part, number in zip(self._parts.values(), updates, strict=True):
            if number:
                self._agree(part)
                state |= part.averages.tensors()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep it for `started`. The state of another kind of average is left alone: this one begins anew."""
        self._saved = state if state.get(KIND) == self.name else None

    def _take_up(self, part: _Part, position: int) -> None:
        saved = self._saved
        assert saved is not None
        if position == len(saved[UPDATES]) - 1:
            self._saved = None
        part.updates = saved[UPDATES][position] if position < len(saved[UPDATES]) else 0
        if not part.updates:
            return
        try:
            part.averages.load(saved)
        except KeyError as missing:
            raise CheckpointError(
                f"weight_averaging={self.name}: the checkpoint holds no average of {missing.args[0]}, which trains here and "
                "did not train there; resume with the same trained weights, or with weight_averaging=null."
            ) from None


def _has_average(parameter: Any) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()


def _owned(model: Any, trained: set[int], buffers: dict[str, Place]) -> dict[str, Place]:
    """Buffers that go with an optimizer: whose nearest module that trains anything has its first weight trained by it."""
    mine: dict[str, Place] = {}
    for name, place in buffers.items():
        path = name.split(".")[:-1]
        while True:
            trains = [
                p for p in model.get_submodule(".".join(path)).parameters() if p.requires_grad or id(p) in trained
            ]
            if trains or not path:
                break
            path.pop()
        if trains and id(trains[0]) in trained:
            mine[plain_name(name)] = place
    return mine


@final
class Ema(WeightAveraging):
    """An exponential average in float32; the first update takes the weights as they are.

    Saves: nothing; evaluations vary less. Costs: memory of the trained weights once more, one pass an update.
    Source: Polyak and Juditsky 1992; warm-up as in tf.train.ExponentialMovingAverage.
    """

    name = "ema"
    Config = EmaConfig

    def rate(self, updates: Any) -> Any:
        """See `ema_rate`."""
        return ema_rate(updates, self.config.decay, self.config.warmup)

    def buffers(self, model: Any) -> dict[str, Place]:
        """All floating-point ones that are saved, or none."""
        return floating_buffers(model) if self.config.buffers == "average" else {}


@final
class Swa(WeightAveraging):
    """The equal average of the weights in the last part of a training; batch statistics are taken anew for it.

    Saves: nothing; often generalises better. Costs: memory of the trained weights once more, one pass an update; with
    batch norms, `statistics_batches` forwards at an evaluation after new updates.
    Source: Izmailov et al. 2018, arXiv:1803.05407.
    """

    name = "swa"
    Config = SwaConfig

    def __init__(self, config: Any = None, context: Context | None = None) -> None:
        super().__init__(config, context)
        self._norms: list[Any] = []
        self._statistics: tuple[list[int], list[Any]] | None = None
        self._kept: AbstractContextManager[Any] = NO_CONTEXT

    def rate(self, updates: Any) -> Any:
        """See `swa_rate`."""
        return swa_rate(updates)

    def started(self, model: Any, optimizer: Any, step: Any) -> None:
        """Refuse batch norms where there are no batches for them."""
        super().started(model, optimizer, step)
        self._statistics = None
        wanted = self.config.statistics_batches is not None
        # Held ones are among them: they may be released later (adapters=freeze with unfreeze).
        self._norms = norms_with_statistics(model) if wanted else []
        if any(not is_held(norm) for norm in self._norms):
            self._refuse_once_only()

    def _refuse_once_only(self) -> None:
        if self.context.training_forwards is None:
            raise ConfigError(
                "weight_averaging=swa: batch norms take their statistics anew from training batches, and this training data "
                "can be gone through once at a time only (an iterator, or a DataLoader with persistent workers); give the "
                "data set itself, or set weight_averaging.statistics_batches=null to keep those of the weights that train."
            )

    def show(self, model: Any) -> None:
        """The averages, and the batch statistics that go with them."""
        super().show(model)
        updates = [int(part.updates) for part in self._parts.values()]
        norms = [norm for norm in self._norms if not is_held(norm)]
        if not norms or not any(updates):
            return
        try:
            kept = kept_statistics(norms)
            kept.__enter__()
            self._kept = kept
            key = [*updates, len(norms)]
            if self._statistics is None or self._statistics[0] != key:
                self._statistics = key, self._taken(model, norms)
            with torch.no_grad():
                torch._foreach_copy_(running_statistics(norms), self._statistics[1])
        except BaseException:
            self.hide()
            raise

    def hide(self) -> None:
        """Weights and statistics as they train."""
        kept, self._kept = self._kept, NO_CONTEXT
        kept.__exit__(None, None, None)
        super().hide()

    def _taken(self, model: Any, norms: list[Any]) -> list[Any]:
        """Statistics over training batches of all ranks."""
        self._refuse_once_only()
        assert self.context.training_forwards is not None
        sums, number = batch_statistics(model, norms, self.context.training_forwards(self.config.statistics_batches))
        if self.context.data_ranks > 1:
            flat = torch.cat([*sums, sums[0].new_full((1,), number)])
            dist.all_reduce(flat, group=self.context.data_group)
            *sums, total = flat.split([*[s.numel() for s in sums], 1])
            number = int(total)
        if not number:
            raise ConfigError(
                "weight_averaging=swa: there was no training batch to take batch statistics from; look at the data, or set "
                "weight_averaging.statistics_batches=null."
            )
        return list(torch._foreach_div(list(sums), number))
