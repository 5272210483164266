"""The Trainer. It names no strategy: what tricks do is bound into the plan, a line of the step each."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

from fasttrain.config import Resolved, from_keywords
from fasttrain.config.settings import Settings
from fasttrain.core.batch import num_samples
from fasttrain.core.float32 import own_fp32_precision
from fasttrain.core.strategy import Context
from fasttrain.core.task import StepInfo
from fasttrain.data import Data, StepSeed
from fasttrain.distributed.affinity import bind
from fasttrain.distributed.world import World, join
from fasttrain.errors import ConfigError
from fasttrain.nn.blocks import find_blocks
from fasttrain.nn.materialise import is_on_meta, materialise
from fasttrain.trainer.calibration import training_forwards, undisturbed
from fasttrain.trainer.evaluation import evaluate
from fasttrain.trainer.feed import Feed
from fasttrain.trainer.figures import Figures
from fasttrain.trainer.fit import fit
from fasttrain.trainer.left_out import trains
from fasttrain.trainer.looks import Looks
from fasttrain.trainer.measures import build_measures
from fasttrain.trainer.setup import (
    block_finder,
    build_optimizers,
    build_plan,
    build_task,
    check_loss,
    check_model,
    completed,
    config_class,
    only_trains,
    seed_everything,
    set_determinism,
    waiting_together,
)
from fasttrain.trainer.state import restore_state


class Trainer(Looks):
    """Trains a model. A subclass gives the model, the data, and the loss; a config chooses the tricks.

        class Digits(Trainer):
            def build_model(self): return resnet18(num_classes=10)
            def build_data(self): return Data(train=..., evaluation=...)
            def inputs(self, batch): return (batch["image"],)
            def loss(self, output, batch): return F.cross_entropy(output, batch["label"])

        Digits(batch_size=64, epochs=3, precision="bf16").fit()

    `batch_size` is global: samples per optimizer step over all ranks and microbatches.

    Args:
        resolved: settings and strategies as read from a config; instead of keywords.
        observers: looked on by these too.
        settings: any setting or slot by its name.

    Raises:
        ConfigError: the request was wrong.
    """

    Config: ClassVar[type[Settings]] = Settings
    unit: ClassVar[str] = "samples"
    whole_batch_loss: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        if "Config" in vars(cls):
            cls.Config = config_class(cls.Config)

    def __init__(self, resolved: Resolved | None = None, /, *, observers: Any = (), **settings: Any) -> None:
        self.begin(from_keywords(type(self), settings) if resolved is None else resolved, observers)
        self.plan = build_plan(self.resolved, self.context())
        self.feed.check(self.plan)
        check_loss(type(self), Trainer, self.plan)
        seed_everything(self.seed)
        model = self.build_model()
        check_model(model, self.config.blocks)
        self.model = self.plan.model(self.place(model))
        self.optimizers = build_optimizers(self, Trainer)
        if len(self.optimizers) == 1:
            (self.optimizer,) = self.optimizers.values()
        self.task = build_task(self, Trainer)
        self.measures = build_measures(self)
        seed_everything(self.seed + self.world.rank)
        self.plan.started_with(self.model, self.optimizers.values(), self.step)
        self.built_trains = trains(self.model)

    def begin(self, resolved: Resolved, observers: Any = ()) -> None:
        """Join the ranks and build the data: all that comes before the model."""
        # Where the start-up of a run is counted from; a command line that began earlier says so.
        self.created_at = time.perf_counter()
        self.world = self.join(resolved.settings)
        self.binding = bind(resolved.settings.affinity, self.world)
        self.resolved = completed(resolved, self.world, type(self).build_optimizer is not Trainer.build_optimizer)
        self.config: Any = self.resolved.settings
        self.seed: int = self.config.seed
        self.device = self.world.device
        self.observers = list(observers)
        self.step = 0
        self.figures = Figures()
        set_determinism(self.config.deterministic, self.config.debug)
        own_fp32_precision()  # what an earlier run set for itself
        seed_everything(self.seed)
        self.data = self.build_data()
        self.feed = Feed(self.data, self.config, self.world, waiting_together(self.resolved))

    # ---- what research code gives (more of it, for evaluations: looks.py)

    def build_data(self) -> Data:
        """The data; called first. Random draws follow the seed."""
        raise NotImplementedError(f"{type(self).__name__}: override build_data(self) and return Data(train=...).")

    def build_model(self) -> Any:
        """The model; `self.data` is there. Its weights follow the seed."""
        raise NotImplementedError(f"{type(self).__name__}: override build_model(self) and return a module.")

    def build_optimizer(self, model: Any) -> Any:
        """An optimizer of your own over a model or part of it; instead of the slot `optimizer`."""
        return None

    def augment(self, batch: Any, seed: StepSeed) -> Any:
        """A training batch on the device, before it is cut: this rank's share. All ranks get one `seed` a step.

        The seed is a `fasttrain.data.StepSeed`: it tells which samples of the step these are.
        """
        return batch

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        """Arguments of the model: the first entry of a tuple, if not overridden."""
        if isinstance(batch, (tuple, list)):  # not a union, which would be built anew in each step
            return (batch[0],)
        raise NotImplementedError(
            f"{type(self).__name__}: give inputs(self, batch) and loss(self, output, batch), or override "
            "compute_loss(self, batch)."
        )

    def loss(self, output: Any, batch: Any) -> Any:
        """Mean loss over what is counted: 0-dim; or a dict of such means, with the same keys in `count`."""
        raise NotImplementedError(
            f"{type(self).__name__}: override loss(self, output, batch) or compute_loss(self, batch)."
        )

    def compute_loss(self, batch: Any) -> Any:
        """The loss of a microbatch. Overriding this alone is fine for everything but pipeline parallelism."""
        return self.loss(self.model(*self.inputs(batch)), batch)

    def count(self, batch: Any) -> Any:
        """What a batch weighs in the mean: samples, if not overridden. A number or a tensor on the batch's device."""
        return num_samples(batch)

    def split(self, batch: Any, n: int) -> list[Any]:
        """Cut a batch into `n` microbatches; override where samples do not lie along dim 0."""
        raise NotImplementedError

    def blocks(self, model: Any) -> list[Any]:
        """The repeated parts that checkpointing, compiling and sharding take as units; the setting `blocks` goes before."""
        return find_blocks(model)

    def parts(self) -> dict[str, Any]:
        """Parts of the model with an optimizer each."""
        return {"model": self.model}

    # ---- the step

    def train_step(self, batch: Any) -> StepInfo:
        """One optimizer step: gradients of the whole batch, then new parameters."""
        loss = self.plan.gradients_of(self.task, batch)
        bad = self.plan.gradients(self.model, self.optimizer)
        self.plan.update(self.optimizer, bad)
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.plan.updated(self.model, self.optimizer, self.step)
        return StepInfo(self.step, loss)

    def step_part(self, part: str, compute_loss: Callable[[Any], Any], batch: Any) -> Any:
        """The update of one part, from a loss of its own; the other parts stay. Returns that loss.

        For a `train_step` of your own with several optimizers; every strategy stays in force. Count the step yourself.
        """
        optimizer = self.optimizers[part]
        task = replace(self.task, compute_loss=compute_loss)
        with only_trains(self.model, self.parts()[part]):
            loss = self.plan.gradients_of(task, batch)
            bad = self.plan.gradients(self.model, optimizer)
            self.plan.update(optimizer, bad)
            optimizer.zero_grad(set_to_none=True)
        self.plan.updated(self.model, optimizer, self.step + 1)
        return loss

    def fit(self) -> dict[str, Any]:
        """Train to the planned end or to a stop; returns what `summary.json` holds."""
        return fit(self)

    def evaluate(self) -> dict[str, float]:
        """Loss and metrics over the evaluation data, each sample exactly once over all ranks."""
        return evaluate(self)

    def restore(self, checkpoint: str | Path) -> None:
        """Take up the whole state of a checkpoint folder (`checkpoints/step-N`).

        Raises:
            CheckpointError: it is damaged, or of another model.
        """
        restore_state(self, Path(checkpoint))

    def log(self, name: str, value: Any, kind: str = "scalar") -> None:
        """Log a scalar (averaged over microbatches and ranks by count), an `image` or a `histogram`.

        Kept on the device, and read at log points only; between them a call costs nothing.
        """
        if self.figures.watching:
            self.figures.add(name, value, self.plan.weight, kind)

    @property
    def total_steps(self) -> int | None:
        """Planned optimizer steps of the run: what schedules are made for; `None`: nobody knows."""
        return self.feed.total_steps

    # ---- seams of the constructor

    def join(self, settings: Settings) -> World:
        """Join the ranks."""
        return join(settings.device)

    def place(self, model: Any) -> Any:
        """Bring the model to the device; one built on the meta device is made there."""
        return materialise(model, self.device) if is_on_meta(model) else model.to(self.device)

    def context(self) -> Context:
        """What strategies may know."""
        return Context(
            device=self.device,
            data_rank=self.world.rank,
            data_ranks=self.world.size,
            batch_size=self.config.batch_size,
            total_steps=self.total_steps,
            steps_per_epoch=self.feed.steps_per_epoch,
            find_blocks=block_finder(self.blocks, self.config.blocks),
            shares=self.feed.shares,
            project_dir=None if self.config.run.dir is None else Path(self.config.run.dir),
            evaluates=self.feed.evaluates,
            training_forwards=partial(training_forwards, self) if self.feed.can_begin_anew else None,
            undisturbed=partial(undisturbed, self),
            strategies=dict(self.resolved.names),
        )

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer" and "optimizers" in vars(self):
            raise ConfigError(
                f"{type(self).__name__} has the optimizers {', '.join(self.optimizers)}; override train_step and use "
                "step_part(name, compute_loss, batch) or self.optimizers[name]."
            )
        raise AttributeError(f"{type(self).__name__} has no attribute '{name}'")

    def evaluating(self) -> AbstractContextManager[Any]:
        """Around an evaluation of your own: strategies swap in what they evaluate with."""
        return self.plan.evaluating(self.model)

    # ---- without a subclass

    @classmethod
    def from_parts(cls, model: Any, data: Any, loss: Callable[[Any, Any], Any], **settings: Any) -> Self:
        """A trainer from a model, data, and a loss.

        `data` is a `Data`, or anything its `train` takes. The model is called with the first entry of a tuple batch, or
        with all entries of a dict batch but `label`, `labels`, `target` and `targets`. A loss from torch
        (`nn.CrossEntropyLoss()`, `F.cross_entropy`) is called with the output and the batch's second (or label) entry; a
        function of your own with the output and the batch. Overrides by keyword: `inputs`, `count`, `metrics`,
        `build_metrics`, `update_metrics`, `prediction`.
        """
        from fasttrain.trainer.parts import subclass_from_parts

        return subclass_from_parts(cls, model, data, loss, settings)(**settings)
