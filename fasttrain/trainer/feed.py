"""How a run is fed: how many steps it has, and each batch on the device with what is known of it."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from fasttrain.config.settings import Settings
from fasttrain.core.batch import Microbatches, leading
from fasttrain.core.plan import Plan
from fasttrain.core.task import Fed, Task
from fasttrain.data import Data
from fasttrain.data.amounts import no_steps, refuse_repeats
from fasttrain.data.by_order import ByOrder
from fasttrain.data.data import form, num_samples_of
from fasttrain.data.evaluating import Evaluating
from fasttrain.data.order import Order, share
from fasttrain.data.packed import warn_of_huge_lists
from fasttrain.data.reading import Portion, Position, Reader
from fasttrain.data.seeds import StepSeed, mix
from fasttrain.data.streamed import Streamed
from fasttrain.data.suspects import bad_label, ranges
from fasttrain.data.tables import EVALUATION, TRAIN, prepared
from fasttrain.distributed.affinity import cores_of_rank
from fasttrain.distributed.world import World
from fasttrain.errors import ConfigError
from fasttrain.lazy import torch
from fasttrain.observe import StepClock
from fasttrain.trainer.delivery import Ahead, Carrier, Sent
from fasttrain.trainer.readers import reader_of, refuse_other_ranks
from fasttrain.trainer.waiting import Spent, Waiting
from fasttrain.trainer.workers import Workers

# A portion that was read: what the host found out about it, and its batch under way.
Read = tuple[Portion, Fed, Sent]


class Feed:
    """Batches of a run. Says how many steps there are, and tells the task what it knows of each batch.

    `waiting`: strategies with which every rank must compute in each step.
    """

    def __init__(self, data: Data, settings: Settings, world: World, waiting: Sequence[str] = ()) -> None:
        data = replace(
            data,
            train=prepared(data.train, TRAIN, world.rank, world.size),
            evaluation=prepared(data.evaluation, EVALUATION, world.rank, world.size),
        )
        if world.is_main:
            warn_of_huge_lists(data.train, data.workers)
        size = num_samples_of(data.train)
        if size == 0:
            raise ConfigError("the training data holds no sample; look at the path or the filter that chose them.")
        self.settings, self.world, self.device, self._size = settings, world, world.device, size
        self.spent = Spent()
        self.data = self.spent.timed(replace(data, num_workers=data.workers))
        self.cores = cores_of_rank()
        found = data.num_workers == "auto" and form(data.train) == "dataset"
        self.workers = Workers(self.cores) if found else None
        self.waiting = Waiting(data, self.spent, world.rank, world.size, self.cores)
        self.carrier = Carrier(world.device)
        # Batches kept ahead of the step; where the device copies nothing by itself, that would only hold memory.
        self.prefetch = data.prefetch if self.carrier.streams else 0
        # Reads what is missing of them; called when a step was launched, so that the device works meanwhile.
        self.read_ahead: Callable[[], None] | None = None
        self.position = Position()
        self.samples = 0
        refuse_repeats(data, settings.batch_size)
        self.reader: Reader = reader_of(self.data, settings, world, size)
        # What was given last, and its reader; None while the next one is read.
        self._in_step: tuple[Portion, Reader | Evaluating] | None = None
        self._evaluating: Evaluating | None = None
        self._keeps_workers = False
        if self.reader.steps_per_epoch == 0:
            raise no_steps(data, settings.batch_size, settings.limit_batches)
        if settings.batch_size < world.size:
            raise ConfigError(
                f"batch_size={settings.batch_size} cannot be cut over {world.size} ranks; use {world.size} or more."
            )
        refuse_other_ranks(world, settings, self.data, size)
        if isinstance(self.reader, Streamed):
            self.reader.join(", ".join(waiting) or None)
        self.steps_per_epoch = self.reader.steps_per_epoch
        # None: epochs of a length that nobody knows.
        self.total_steps = self._total_steps()

    @property
    def order(self) -> Order | None:
        """The order of the training samples; None where the data cuts its own batches."""
        return self.reader.order if isinstance(self.reader, ByOrder) else None

    def _total_steps(self) -> int | None:
        settings = self.settings
        if settings.steps is not None:
            return settings.steps
        if self.steps_per_epoch is None:
            if settings.epochs is None:
                raise ConfigError(
                    "neither steps nor epochs is set, and the data does not say how many batches an epoch has: it may have "
                    "no end; set steps=N, or epochs=1 to go through it once."
                )
            return None
        return self._epochs * self.steps_per_epoch

    @property
    def _epochs(self) -> int:
        return 1 if self.settings.epochs is None else self.settings.epochs

    @property
    def ends_with_epochs(self) -> bool:
        """Whether the run ends after so many epochs of data that ends by itself, in whatever number of steps."""
        return self.settings.steps is None and self.reader.ends_by_itself

    def is_over(self, step: int) -> bool:
        """Whether the run is at its end with this step, the last one whose batch was given."""
        if self.ends_with_epochs:
            return self.position.epoch >= self._epochs
        return self.total_steps is not None and step >= self.total_steps

    def remarks(self) -> list[str]:
        """What is to be said of the data before the first step."""
        order, asked = self.order, self.settings.batch_size
        if order is None or order.size >= asked:
            return []
        return [f"batch_size={asked}, and the training data holds {order.size} samples: each step takes all of them"]

    def check(self, plan: Plan) -> None:
        """Refuse a last step with fewer samples than ranks, where every rank must compute in each step.

        Raises:
            ConfigError: there would be one.
        """
        if (order := self.order) is None:
            return
        rest = order.end % self.settings.batch_size
        waiting = [f"{s.slot}={s.name}" for s in plan.strategies.values() if s.forwards_together]
        if waiting and 0 < rest < self.world.size:
            raise ConfigError(
                f"the last step of an epoch has {rest} of {order.end} samples for {self.world.size} ranks, and with "
                f"{', '.join(waiting)} every rank needs one; choose another batch_size, or limit_batches="
                f"{order.end // self.settings.batch_size}."
            )

    @property
    def epochs_done(self) -> float:
        """Epochs seen so far, with their fraction."""
        end = self.reader.epoch_end
        return self.position.epoch + (min(self.position.seen / end, 1.0) if end else 0.0)

    @property
    def shares(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Samples of each rank in a usual step, and in the last one of an epoch if this run comes to it."""
        total = self.total_steps
        return self.reader.shares(total) if isinstance(self.reader, ByOrder) and total is not None else None

    @property
    def evaluates(self) -> bool:
        """Whether evaluations come while the run trains: there is data for them, and it is known after which steps."""
        known = self.settings.evaluate.every is not None or self.steps_per_epoch is not None or self.ends_with_epochs
        return self.data.evaluation is not None and known

    @property
    def can_begin_anew(self) -> bool:
        """Whether the training data can be gone through beside the training, which is in the middle of it."""
        return self.reader.can_begin_anew

    def again(self, task: Task, plan: Plan, batches: int) -> Iterator[Any]:
        """The first training batches of this rank once more, on the device; position and generators stay where they are."""
        with self.reader.undisturbed(), contextlib.closing(self.reader.beside(self.position)) as portions:
            for read in self._read(itertools.islice(portions, batches), self.reader, task, plan):
                yield self._given(read, task, plan)

    def training(self, task: Task, plan: Plan, steps: int | None = None) -> Generator[Any, None, None]:
        """Training batches on the device, from the position on. The position counts what was given.

        `steps`: how many will be asked for; nothing is read ahead of the last of them.
        """
        with contextlib.closing(self._timed_portions()) as portions:
            reading = self._read(
                self._of_this_run(portions), self.reader, task, plan, counting=task.augment is not None
            )
            ahead = Ahead(reading, self.prefetch, steps) if self.prefetch else None
            self.read_ahead = None if ahead is None else ahead.fill
            try:
                for read in reading if ahead is None else ahead:
                    batch, portion = self._given(read, task, plan, task.augment), read[0]
                    self.position = portion.after
                    self.reader.given(portion)
                    self.samples += portion.everywhere
                    self._in_step = portion, self.reader
                    yield batch
                    self._in_step = None
                    if ahead is not None:
                        ahead.fill()
            finally:
                self.read_ahead = None

    def _timed_portions(self) -> Generator[Portion, None, None]:
        """What the reader gives from the position on; read on by another number of workers once that was found."""
        now, spent, workers = time.perf_counter, self.spent, self.workers
        reading = self.reader.portions(self.position)
        try:
            while True:
                began = now()
                portion = next(reading, None)
                if portion is None:
                    return
                took = now() - began
                spent.reading += took
                spent.batches += 1
                yield portion
                if workers is not None and workers.read(took):
                    reading.close()  # ends its workers
                    self.data = replace(self.data, num_workers=workers.num)
                    self.reader = reader_of(self.data, self.settings, self.world, self._size)
                    reading = self.reader.portions(portion.after)
        finally:
            reading.close()

    def found_out(self, clock: StepClock) -> list[str]:
        """What there is to say of the data by now: the workers that were found, or that the run waits."""
        found = None if self.workers is None else self.workers.remark()
        waits = None
        if self.workers is None or self.workers.settled:
            waits = self.waiting.remark(*clock.waited(), self._num_workers)
        return [f"data: {text}" for text in (found, waits) if text is not None]

    def summary(self) -> dict[str, Any]:
        """Workers, and seconds that the process that trains spent on a batch, by part."""
        told: dict[str, Any] = {"num_workers": self._num_workers, "seconds_a_batch": self.spent.parts()}
        return told if self.workers is None else {**told, "auto": self.workers.summary()}

    @property
    def _num_workers(self) -> int:
        train = self.data.train
        return train.num_workers if isinstance(train, torch.utils.data.DataLoader) else self.data.workers

    def _of_this_run(self, portions: Iterable[Portion]) -> Iterator[Portion]:
        """All of them; or those up to the end of the last epoch, if that ends the run."""
        for portion in portions:
            yield portion
            if self.ends_with_epochs and portion.after.epoch >= self._epochs:
                return

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands in its data, over all ranks; every rank calls this. Plain values."""
        mine = self.reader.state_dict()
        return {"samples": self.samples, "position": asdict(self.position), "readers": self.world.gather(mine)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; the ranks may be others where the data allows it.

        Raises:
            CheckpointError: it does not.
        """
        self.samples, self.position = state["samples"], Position(**state["position"])
        if self.position.seen:  # an epoch begins without any state
            self.reader.load_state_dict(state["readers"])

    def evaluation(self, task: Task, plan: Plan, source: Any = None) -> Iterator[tuple[Any, Portion]]:
        """Evaluation batches on the device, with what is known of each; every sample once over all ranks.

        `source`: in place of the evaluation data, in one of its forms.
        """
        evaluating = self._evaluating if source is None else None
        if evaluating is None:
            evaluating = self._evaluation_of(self.data if source is None else replace(self.data, evaluation=source))
        if kept := source is None and self._keeps_workers:
            self._evaluating = evaluating
        try:
            ahead = Ahead(
                self._read((p for p in evaluating.portions() if p.here), evaluating, task, plan), self.prefetch
            )
            for read in ahead:
                batch = self._given(read, task, plan)
                self._in_step = read[0], evaluating
                yield batch, read[0]
                self._in_step = None
                ahead.fill()
        finally:
            if not kept:
                evaluating.close()

    def _evaluation_of(self, data: Data) -> Evaluating:
        settings = self.settings
        batch_size = settings.evaluate.batch_size or settings.batch_size
        return Evaluating(data, batch_size, settings.seed, self.world, settings.limit_batches)

    @contextlib.contextmanager
    def keeping_workers(self) -> Iterator[None]:
        """Inside, the workers of evaluations stay from one to the next; afterwards they have ended."""
        self._keeps_workers = True
        try:
            yield
        finally:
            self._keeps_workers = False
            if self._evaluating is not None:
                self._evaluating.close()
                self._evaluating = None

    def name_batch(self, error: Exception) -> None:
        """Note in an error of a step which samples its batch holds."""
        if self._in_step is not None and not isinstance(error, ConfigError):
            portion, reader = self._in_step
            if (bad := bad_label(error, portion.batch)) is not None:
                error.add_note(
                    f"Label {bad[0]} is that of {reader.told(portion, bad[1])}; mend it, or give more classes."
                )
            elif (held := ranges(error, portion.batch)) is not None:
                error.add_note(f"Whole numbers in the batch of this step, or of one shortly before: {held}.")
            error.add_note(f"The batch of this step: {reader.told(portion)}.")
            self._in_step = None  # told once

    def _read(
        self,
        portions: Iterable[Portion],
        reader: Reader | Evaluating,
        task: Task,
        plan: Plan,
        counting: bool = False,
    ) -> Iterator[Read]:
        """Portions with all that is found on the host, and their batches under way to the device."""
        count = task.count if self.carrier.moves or counting else None
        for portion in portions:
            batch = portion.batch
            if self.data.check is not None and batch is not None:
                self._check(batch, portion, reader)
            # A `split` or layout of the user's may count other samples than those along dim 0.
            own = task.cut is not None or self.data.lay_out is not None
            exact = portion.exact and not (own and self.reader.ends_by_itself)
            fed = Fed(batch, portion.here, portion.everywhere, exact=exact, alone=portion.alone)
            given, task.fed = task.fed, fed  # whoever cuts the batch asks the task what is known of it
            if self.data.lay_out is not None and batch is not None and not isinstance(batch, Microbatches):
                fed.batch = batch = Microbatches(map(self.data.lay_out, plan.split(task, batch)))
            if count is not None and batch is not None and portion.everywhere:
                fed.counts = [count(microbatch) for microbatch in plan.split(task, batch)]
            task.fed = given
            if not self.prefetch:
                yield portion, fed, (batch, None)
                continue
            began = time.perf_counter()
            sent = self.carrier.send(batch)
            self.spent.copying += time.perf_counter() - began
            yield portion, fed, sent

    def _check(self, batch: Any, portion: Portion, reader: Reader | Evaluating) -> None:
        assert self.data.check is not None
        try:
            self.data.check(batch)
        except Exception as error:
            error.add_note(f"Found in {reader.told(portion)}.")
            raise

    def _given(self, read: Read, task: Task, plan: Plan, augment: Callable[..., Any] | None = None) -> Any:
        portion, fed, sent = read
        task.fed, batch = fed, sent[0]
        if batch is None:  # this rank has no sample of a short last step
            return None
        if self.carrier.moves:
            began = time.perf_counter()
            batch = self.carrier.receive(sent)
            self.spent.copying += time.perf_counter() - began
        if augment is not None:
            batch = self._augmented(batch, augment, portion)
        fed.batch = batch = plan.batch(batch)
        return batch

    def _augmented(self, batch: Any, augment: Callable[..., Any], portion: Portion) -> Any:
        """The batch as user code changes it on the device: by a seed of its place in the run, one for all ranks."""
        world, parts = self.world, (self.settings.seed, "augment", portion.epoch, portion.first)
        place = partial(StepSeed, epoch=portion.epoch, position=portion.first)
        if isinstance(batch, Microbatches):
            return Microbatches(
                augment(microbatch, place(mix(*parts, i), offset=leading(microbatch) * world.rank))
                for i, microbatch in enumerate(batch)
            )
        return augment(batch, place(mix(*parts), offset=share(0, portion.everywhere, world.rank, world.size)[0]))
