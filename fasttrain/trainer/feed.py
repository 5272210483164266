"""From data to batches on the device, at a position that survives a restart."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass, replace
from typing import Any

from fasttrain.config.settings import Settings
from fasttrain.core.batch import Microbatches, map_tensors
from fasttrain.core.plan import Plan
from fasttrain.core.task import Fed, Task
from fasttrain.data import Data
from fasttrain.data.data import batched, form, num_samples_of
from fasttrain.data.loader import epoch_batches, given_batches, kept_generators
from fasttrain.data.order import Order, share
from fasttrain.data.packed import warn_of_huge_lists
from fasttrain.data.seeds import mix
from fasttrain.distributed.world import World
from fasttrain.errors import ConfigError
from fasttrain.lazy import pytree, torch


@dataclass(slots=True)
class Position:
    """Where a run stands in its data: the epoch, and the samples (or batches, where data gives those) seen in it."""

    epoch: int = 0
    seen: int = 0


class Feed:
    """Batches of a run. Says how many steps there are, and tells the task what it knows of each batch."""

    def __init__(self, data: Data, settings: Settings, world: World) -> None:
        self._share = share = settings.batch_size // world.size
        train = batched(data.train, share, data) if share else data.train
        if world.is_main:
            warn_of_huge_lists(train, data.num_workers)
        self.data = replace(data, train=train, evaluation=_stream(data.evaluation, settings, world, data))
        self.settings, self.world, self.device = settings, world, world.device
        self._moves = world.device.type != "cpu"
        # A copy may go on behind the host's back from pinned memory alone; MPS has none.
        self._pins = world.device.type in ("cuda", "xpu")
        self.position = Position()
        self.samples = 0
        self._saw_whole_batch = False
        size = num_samples_of(train)
        if size == 0:
            raise ConfigError("the training data holds no sample; look at the path or the filter that chose them.")
        if settings.batch_size < world.size:
            raise ConfigError(
                f"batch_size={settings.batch_size} cannot be cut over {world.size} ranks; use {world.size} or more."
            )
        self.order = self._order(size) if size is not None else None
        self.steps_per_epoch = self._steps_per_epoch()
        self.total_steps = self._total_steps()
        # The position at which an epoch is over, in what the position counts; None: only going through it tells.
        self.epoch_end = self.steps_per_epoch if self.order is None else self.order.end
        self._agree(size)

    def _agree(self, size: int | None) -> None:
        """Refuse ranks that would draw other orders of the data, or do what all do together at other steps.

        Raises:
            ConfigError: on every rank, naming the first difference.
        """
        settings, evaluation = self.settings, self.data.evaluation
        mine = {
            "seed": settings.seed,
            "batch_size": settings.batch_size,
            "samples": size,
            "shuffle": self.data.shuffle,
            "limit_batches": settings.limit_batches,
            "steps an epoch": self.steps_per_epoch,
            "steps": self.total_steps,
            "evaluation samples": None if evaluation is None else num_samples_of(evaluation) or "as they come",
            "log.every": settings.log.every,
            "evaluate.every": settings.evaluate.every,
            "checkpoint.every": settings.checkpoint.every,
        }
        first, *others = self.world.gather(mine)
        for rank, other in enumerate(others, start=1):
            for key, value in first.items():
                if other[key] != value:
                    raise ConfigError(
                        f"{key}={value} on rank 0 and {key}={other[key]} on rank {rank}, but ranks share one order of the "
                        "data and take every step together; give all ranks the same settings and data, without asking "
                        "for the rank (each takes its share by itself)."
                    )

    def _order(self, size: int) -> Order:
        settings = self.settings
        return Order(
            size=size,
            batch_size=settings.batch_size,
            seed=settings.seed,
            shuffle=self.data.shuffle,
            limit=settings.limit_batches,
        )

    def _steps_per_epoch(self) -> int | None:
        if self.order is not None:
            return self.order.steps_per_epoch
        try:
            steps = len(self.data.train)
        except TypeError:
            return self.settings.limit_batches
        return steps if self.settings.limit_batches is None else min(steps, self.settings.limit_batches)

    def _total_steps(self) -> int:
        if self.settings.steps is not None:
            return self.settings.steps
        epochs = 1 if self.settings.epochs is None else self.settings.epochs
        if self.steps_per_epoch is None:
            raise ConfigError(
                f"epochs={epochs}: the data does not say how many batches an epoch has; set steps=N instead."
            )
        return epochs * self.steps_per_epoch

    def check(self, plan: Plan) -> None:
        """Refuse a last step with fewer samples than ranks, where every rank must compute in each step.

        Raises:
            ConfigError: there would be one.
        """
        if self.order is None:
            return
        rest = self.order.end % self.settings.batch_size
        waiting = [f"{s.slot}={s.name}" for s in plan.strategies.values() if s.forwards_together]
        if waiting and 0 < rest < self.world.size:
            raise ConfigError(
                f"the last step of an epoch has {rest} of {self.order.end} samples for {self.world.size} ranks, and with "
                f"{', '.join(waiting)} every rank needs one; choose another batch_size, or limit_batches="
                f"{self.order.end // self.settings.batch_size}."
            )

    @property
    def epochs_done(self) -> float:
        """Epochs seen so far, with their fraction."""
        return self.position.epoch + (self.position.seen / self.epoch_end if self.epoch_end else 0.0)

    @property
    def shares(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Samples of each rank in a usual step, and in the last one of an epoch if this run comes to it."""
        if self.order is None:
            return None
        size, end, ranks = self.settings.batch_size, self.order.end, self.world.size
        comes = self.total_steps >= self.order.steps_per_epoch
        last = (end % size or size) if comes else min(size, end)
        dealt = [[share(0, count, rank, ranks) for rank in range(ranks)] for count in (min(size, end), last)]
        usual, short = (tuple(high - low for low, high in spans) for spans in dealt)
        return usual, short

    @property
    def evaluates(self) -> bool:
        """Whether evaluations come while the run trains: there is data for them, and it is known after which steps."""
        known = self.settings.evaluate.every is not None or self.steps_per_epoch is not None
        return self.data.evaluation is not None and known

    @property
    def can_begin_anew(self) -> bool:
        """Whether the training data can be gone through beside the training, which is in the middle of it."""
        source = self.data.train
        held = (source, getattr(source, "dataset", None))
        persistent = getattr(source, "persistent_workers", False)
        return self.order is not None or not (persistent or any(isinstance(part, Iterator) for part in held))

    def again(self, task: Task, plan: Plan, batches: int) -> Iterator[Any]:
        """The first training batches of this rank once more, on the device; position and generators stay where they are."""
        world = self.world
        if self.order is not None:
            given = epoch_batches(self.data, self.data.train, self.order, 0, 0, world.rank, world.size, True)
        else:
            given = self._given(self.position.epoch, 0)  # of this epoch, which samplers were told already
        with kept_generators(self.data.train):
            for batch, here, everywhere in itertools.islice(given, batches):
                yield self._deliver(batch, here, everywhere, task, plan)

    def training(self, task: Task, plan: Plan) -> Iterator[Any]:
        """Training batches on the device, from the position on, without end. The position counts what was given."""
        by_samples, end = self.order is not None, self.epoch_end
        while True:
            position = self.position
            for batch, here, everywhere in self._epoch():
                batch = self._deliver(batch, here, everywhere, task, plan, augment=task.augment)
                position.seen += everywhere if by_samples else 1
                self.samples += everywhere
                if end is not None and position.seen >= end:
                    self.position = Position(position.epoch + 1, 0)
                    yield batch
                    break
                yield batch
            else:
                self.position = Position(position.epoch + 1, 0)

    def _epoch(self) -> Iterator[tuple[Any, int, int]]:
        world, position = self.world, self.position
        if self.order is not None:
            return epoch_batches(
                self.data, self.data.train, self.order, position.epoch, position.seen, world.rank, world.size, True
            )
        return self._given(position.epoch, position.seen)

    def _given(self, epoch: int, skip: int) -> Iterator[tuple[Any, int, int]]:
        source, number = self.data.train, -1
        seeds = (self.settings.seed, "given", self.world.rank)
        for number, batch in enumerate(given_batches(source, self.data.transform, *seeds, epoch=epoch)):
            here = self._samples_in(batch, source, number)
            if number >= skip:
                yield batch, here, here * self.world.size
        if number < 0 and epoch:
            raise ConfigError(
                f"the training data gave no batch in epoch {epoch + 1}; an iterator can be gone through once: give what can "
                "be begun anew, such as a DataLoader or an object with __iter__, or fewer steps."
            )
        if number < 0:
            raise ConfigError("the training data gave no batch; look at the path, the filter or the batch size.")

    def _samples_in(self, batch: Any, source: Any, number: int) -> int:
        """Samples in a batch that the data cut. Other sizes than the share are left to the check of whoever cuts it."""
        if isinstance(batch, Microbatches):
            return sum(_leading(microbatch) for microbatch in batch)
        share, held = self._share, _leading(batch)
        # Once a whole batch came, dim 0 is known to be the samples, and a shorter one is a short last one.
        self._saw_whole_batch |= held == share
        if held == share:
            return share
        believed = self._saw_whole_batch or _says_its_size(source, number, held)
        return min(share, held) if believed else share

    def evaluation(self, task: Task, plan: Plan) -> Iterator[tuple[Any, int]]:
        """Evaluation batches on the device with the samples in each; every sample once over all ranks."""
        source, settings, world = self.data.evaluation, self.settings, self.world
        if form(source) == "batches":
            given = given_batches(source, None, settings.seed, "evaluation", world.rank, epoch=0)
            for batch in itertools.islice(given, settings.limit_batches):
                yield self._deliver(batch, _leading(batch), 0, task, plan), _leading(batch)
            return
        size = num_samples_of(source)
        assert size is not None
        order = Order(
            size=size,
            batch_size=settings.evaluate.batch_size or settings.batch_size,
            seed=settings.seed,
            shuffle=False,
            limit=settings.limit_batches,
        )
        for batch, here, everywhere in epoch_batches(self.data, source, order, 0, 0, world.rank, world.size, False):
            if here:
                yield self._deliver(batch, here, everywhere, task, plan), here

    def _deliver(
        self, batch: Any, here: int, everywhere: int, task: Task, plan: Plan, augment: Callable[..., Any] | None = None
    ) -> Any:
        fed = task.fed = Fed(batch, here, everywhere, exact=self.order is not None)
        if batch is None:  # this rank has no sample of a short last step
            return None
        if task.count is not None and everywhere and (self._moves or augment is not None):
            fed.counts = [task.count(microbatch) for microbatch in plan.split(task, batch)]
        if self._moves:
            batch = map_tensors(self._to_device, batch)
        if augment is not None:
            batch = self._augmented(batch, augment)
        fed.batch = batch = plan.batch(batch)
        return batch

    def _augmented(self, batch: Any, augment: Callable[..., Any]) -> Any:
        """The batch as user code changes it on the device: by a seed of its place in the run, one for all ranks."""
        parts = (self.settings.seed, "augment", self.position.epoch, self.position.seen)
        if isinstance(batch, Microbatches):
            return Microbatches(augment(microbatch, mix(*parts, i)) for i, microbatch in enumerate(batch))
        return augment(batch, mix(*parts))

    def _to_device(self, tensor: Any) -> Any:
        if self._pins and tensor.device.type == "cpu":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=self._pins)


def _stream(evaluation: Any, settings: Settings, world: World, data: Data) -> Any:
    if not isinstance(evaluation, torch.utils.data.IterableDataset):
        return evaluation  # a loader may cut an evaluation as it likes
    size = settings.evaluate.batch_size or settings.batch_size
    return batched(evaluation, max(1, size // world.size), data)


def _leading(batch: Any) -> int:
    """Entries along dim 0 of the first tensor of a batch; 1 where there is none."""
    first = batch
    while isinstance(first, (tuple, list)) and first:  # not a union, which would be built anew in each step
        first = first[0]
    if not isinstance(first, torch.Tensor):
        first = next((leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)), None)
    return first.shape[0] if first is not None and first.dim() else 1


def _says_its_size(source: Any, number: int, held: int) -> bool:
    """Whether a batch smaller than its share is known to be the loader's short last one."""
    dataset, step = getattr(source, "dataset", None), getattr(source, "batch_size", None)
    if step is None or not isinstance(dataset, Sized):
        return False
    return held == min(step, len(dataset) - number * step)
