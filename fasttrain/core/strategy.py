"""Strategies and the verbs they override. A verb is a line of the training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fasttrain.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from fasttrain.core.task import Task

# An absent context is this one object: entering it costs 129 ns against 1,281 for a generator-based one.
NO_CONTEXT: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True, kw_only=True)
class Clash:
    """Two strategies that cannot live together; declared by the one that has the limit.

    `name=None` means every strategy of the slot; `name="null"` that the slot is off, for a strategy that needs it on.
    """

    slot: str
    name: str | None = None
    why: str
    instead: str


@dataclass(frozen=True, kw_only=True)
class DtypePolicy:
    """What is computed, reduced and kept in which dtype. Decided by `precision`, carried out by whoever computes.

    `None` means the dtype of the parameters. `parameters`: the narrow dtype that weights are kept in, where they are;
    whoever updates them rounds stochastically.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    parameters: torch.dtype | None = None


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a strategy may know of its surroundings.

    `data_group` is the process group over which the batch is spread (`None`: torch's default group, or no ranks at all).
    `project_dir`: the folder of all runs (`None`: nothing is written). `shares`: samples of each data rank in a
    usual step, and in the short last one of an epoch (`None`: the data cuts its own batches).
    `evaluates`: whether evaluations come while the run trains (`None`: not known). `training_forwards(n)` runs the model
    on `n` training batches at most, one microbatch at each `next`, without gradients and without moving anything of the
    run (`None`: the data cannot be gone through a second time). Within `undisturbed()` forwards and backwards move nothing
    of the run: neither random generators nor buffers, modes or figures (`None`: nobody sees to that).
    """

    device: torch.device
    data_rank: int = 0
    data_ranks: int = 1
    data_group: Any = None
    host_group: Any = None
    dtypes: DtypePolicy = field(default_factory=DtypePolicy)
    batch_size: int | None = None
    total_steps: int | None = None
    steps_per_epoch: int | None = None
    project_dir: Path | None = None
    shares: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    find_blocks: Callable[[nn.Module], list[nn.Module]] | None = None
    evaluates: bool | None = None
    training_forwards: Callable[[int], Iterator[None]] | None = None
    undisturbed: Callable[[], AbstractContextManager[None]] | None = None
    strategies: Mapping[str, str] = field(default_factory=dict)

    def blocks(self, model: nn.Module, needed_by: str) -> list[nn.Module]:
        """The repeated blocks of a model, as its trainer names them or as they are found.

        Raises:
            ConfigError: there are none; the message begins with `needed_by`.
        """
        from fasttrain.nn.blocks import find_blocks

        try:
            return self.find_blocks(model) if self.find_blocks is not None else find_blocks(model)
        except ConfigError as error:
            raise ConfigError(f"{needed_by}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class NoConfig:
    """A strategy without settings."""


class Strategy:
    """The base: every verb does nothing. A strategy overrides those it acts on, and holds no trainer.

    A subclass names its `slot` and `name`, gives a frozen keyword-only dataclass `Config`, and may declare `clashes`.
    """

    slot: ClassVar[str]
    name: ClassVar[str]
    clashes: ClassVar[tuple[Clash, ...]] = ()
    # Whether forwards of several ranks wait for each other, so that every rank must run each of them.
    forwards_together: ClassVar[bool] = False
    Config: ClassVar[type] = NoConfig
    # The bound lines of the step (`forward`, `scale`, `microbatch`, `refused`); set by the plan.
    lines: Any = None

    def __init__(self, config: Any = None, context: Context | None = None) -> None:
        self.config = self.Config() if config is None else config
        self._context = context

    @property
    def context(self) -> Context:
        """The surroundings; a strategy made by hand has none until a plan gives them."""
        assert self._context is not None, f"{self.slot}={self.name} was given no context"
        return self._context

    @classmethod
    def limits(cls, config: Any) -> tuple[Clash, ...]:
        """What this strategy cannot live with under these settings; `clashes` where they do not matter."""
        return cls.clashes

    @classmethod
    def stands_for(cls, device: torch.device) -> tuple[str, str] | None:
        """The strategy of the slot that is meant on a device, and why; `None`: this one.

        Asked before anything is built; settings that both have are carried over.
        """
        return None

    def notes(self) -> list[str]:
        """What to say of itself at the head of a run, once the model is built; a few words each."""
        return []

    @classmethod
    def idle(cls, config: Any) -> tuple[str, ...]:
        """Verbs that it overrides, and that have nothing to do under these settings: their lines stay bare."""
        return ()

    # fold: a value passes through every strategy in slot order
    def model(self, model: nn.Module) -> nn.Module:
        """Change the model in place, once. Weight names stay."""
        return model

    def optimizer(self, factory: Any) -> Any:
        """Give or wrap the factory `model -> Optimizer`, once."""
        return factory

    def loss(self, loss: Any) -> Any:
        """Change the user's loss function `(output, batch) -> loss`, once."""
        return loss

    def batch(self, batch: Any) -> Any:
        """Change each batch, on the device."""
        return batch

    def around(self, gradients_of: Any) -> Any:
        """Wrap `(task, batch) -> loss`, which does all forwards and backwards of a step; once."""
        return gradients_of

    def scale(self, loss: Tensor) -> Tensor:
        """Change the loss that backward starts from, each microbatch."""
        return loss

    # nest: contexts, the earlier slot outermost
    def microbatch(self, is_last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of one microbatch; gradients travel only on the last."""
        return NO_CONTEXT

    def forward(self) -> AbstractContextManager[Any]:
        """Around the forward of one microbatch."""
        return NO_CONTEXT

    def evaluating(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Around an evaluation."""
        return NO_CONTEXT

    def saving(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Around the writing of a checkpoint, also of one in the middle of an evaluation: the model as it trains."""
        return NO_CONTEXT

    # in order
    def started(self, model: nn.Module, optimizer: Any, step: int | Tensor) -> None:
        """After initialisation or restore. `step`: accepted steps so far."""

    def gradients(self, model: nn.Module, optimizer: Any) -> Tensor | None:
        """Look at or change the gradients of a step; may return a device flag (0-dim float, 1 = not finite)."""

    def updated(self, model: nn.Module, optimizer: Any, step: int | Tensor) -> None:
        """After an accepted step. `step`: accepted steps so far; a device tensor where a step can be refused."""

    def report(self) -> Mapping[str, Tensor | float]:
        """Figures for the log, read at log points only."""
        return {}

    def logged(self, figures: Mapping[str, float]) -> None:
        """At log points, after all figures were read; may raise."""

    def evaluated(self, figures: Mapping[str, float]) -> None:
        """After each evaluation: its figures, the same on every rank."""

    def remarks(self) -> list[str]:
        """Sentences on what came up since this was last asked.

        That is after the first step, at log points, after evaluations, and at the end.
        """
        return []

    def summary(self) -> Mapping[str, Any]:
        """Plain figures of the run so far; they stand in `summary.json` under the slot's name."""
        return {}

    def apart(self) -> str | None:
        """After each step: what made it unlike the others (`compilation`), so that its time is counted apart."""
        return None

    def ended(self) -> None:
        """After a run, one that failed too: write what is kept, and give back what was changed in the process."""

    def left_out(self, model: nn.Module) -> set[str]:
        """Names of weights that a checkpoint leaves out: frozen, and as whoever builds the model has them."""
        return set()

    # one owner
    def dtypes(self) -> DtypePolicy:
        """The numerics of the run; `precision` alone answers."""
        return DtypePolicy()

    def split(self, task: Task, batch: Any) -> list[Any]:
        """Cut a batch into microbatches."""
        return [batch]

    def forward_backward(self, task: Task, microbatches: list[Any], weights: Any) -> Any:
        """All forwards and backwards of a step."""
        raise NotImplementedError

    def update(self, optimizer: Any, bad: Tensor | None) -> None:
        """Step the optimizer unless `bad`."""
        raise NotImplementedError

    # each its own
    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values to keep in a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""


FOLD, NEST, ORDER, OWNER = "fold", "nest", "in order", "one owner"
VERBS: dict[str, str] = {
    "dtypes": OWNER,
    "model": FOLD,
    "optimizer": FOLD,
    "loss": FOLD,
    "started": ORDER,
    "batch": FOLD,
    "around": FOLD,
    "split": OWNER,
    "microbatch": NEST,
    "forward": NEST,
    "scale": FOLD,
    "forward_backward": OWNER,
    "gradients": ORDER,
    "update": OWNER,
    "updated": ORDER,
    "evaluating": NEST,
    "saving": NEST,
    "report": ORDER,
    "logged": ORDER,
    "evaluated": ORDER,
    "remarks": ORDER,
    "summary": ORDER,
    "apart": ORDER,
    "ended": ORDER,
    "left_out": ORDER,
    "state_dict": ORDER,
}

# Verbs beside the step: they change nothing in it, and `explain` does not list them.
BESIDE = ("saving", "report", "logged", "evaluated", "remarks", "summary", "apart", "ended", "left_out", "state_dict")


def acts_on(strategy: type[Strategy], config: Any = None) -> list[str]:
    """The verbs a strategy overrides, in the order of the step; with a config, those that it has a use for."""
    idle = () if config is None else strategy.idle(config)
    return [verb for verb in VERBS if getattr(strategy, verb) is not getattr(Strategy, verb) and verb not in idle]


def conflicts(strategies: Mapping[str, tuple[type[Strategy], Any]]) -> list[tuple[str, Clash]]:
    """What cannot live together: the slot that has the limit, and the limit. Takes class and config by slot.

    A pair in which both sides declare the limit stands once. A config of None is not known (it is wrong in itself).
    """
    found: list[tuple[str, Clash]] = []
    told: set[frozenset[str]] = set()
    for slot, (cls, config) in strategies.items():
        for clash in cls.clashes if config is None else cls.limits(config):
            other = strategies[clash.slot][0].name if clash.slot in strategies else "null"
            applies = clash.name == other or (clash.name is None and other != "null")
            if applies and (pair := frozenset((slot, clash.slot))) not in told:
                told.add(pair)
                found.append((slot, clash))
    return found
