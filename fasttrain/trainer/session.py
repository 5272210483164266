"""What surrounds the steps of one `fit`: the run folder, observers, the clock, stops, evaluation and saving."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fasttrain.checkpoint.folder import prune
from fasttrain.config.settings import seconds
from fasttrain.distributed.reductions import add_over_ranks, read_together
from fasttrain.distributed.stopping import Stopper
from fasttrain.distributed.world import abandon
from fasttrain.lazy import torch
from fasttrain.observe import (
    Observer,
    StepClock,
    current_memory,
    default_observers,
    reset_peak_memory,
)
from fasttrain.observe.summary_file import read_summary
from fasttrain.trainer.account import compile_seconds, run_info, summary
from fasttrain.trainer.evaluation import figures_of
from fasttrain.trainer.profiling import start_profile
from fasttrain.trainer.run_folder import choose
from fasttrain.trainer.state import check_savable, refuse_wrong_length, restore_state, save_state

if TYPE_CHECKING:
    from fasttrain.core.task import StepInfo
    from fasttrain.trainer.trainer import Trainer

REMARKS = " remarks"  # no figure has such a name
# Figures of the clock that stand in a logged step.
SPEED = ("step_time_s", "data_wait_s", "warmup_s")


class Session:
    """One `fit`. Entering it starts observers and signal handlers; leaving it ends them, on errors too."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.settings = trainer.config
        self.folder = choose(self.settings, self.default_name(), trainer.world)
        self.clock = StepClock(trainer.device.type)
        self.watching = False
        self.evaluated_at: int | None = None
        self.saved_at: int | None = None
        self.metrics: dict[str, float] = {}
        self.last_loss: float | None = None
        self.start_step = 0
        self.began = time.perf_counter()
        self.compiled_before = compile_seconds()
        limit = self.settings.max_time
        self.stopper = Stopper(trainer.world.rank, trainer.world.size, None if limit is None else seconds(limit))
        self.observers: list[Observer] = []
        self.profiler: Any = None
        self._warned = False
        self._apart = trainer.plan.apart
        self._remarked: set[str] = set()
        self.remarks: list[dict[str, Any]] = []
        self._by_samples = trainer.task.count is None
        self._evaluates = trainer.data.evaluation is not None
        self._log_every = self.settings.log.every
        self._save_every = self.settings.checkpoint.every

    def default_name(self) -> str:
        """The run's name where none is set: that of the trainer's class."""
        return type(self.trainer).__name__.lower()

    def config_yaml(self) -> str:
        """The config with the run's name in it, so that the file is enough to go on."""
        settings = replace(self.settings, run=replace(self.settings.run, name=self.folder.name))
        return replace(self.trainer.resolved, settings=settings).to_yaml()

    # ---- beginning and end

    def __enter__(self) -> Session:
        trainer, folder = self.trainer, self.folder
        if folder.dir is not None:
            check_savable(trainer)
        self.observers = [
            *default_observers(is_main=trainer.world.is_main, run_dir=folder.dir),
            *trainer.observers,
        ]
        if folder.checkpoint is not None:
            self._take_up()
        self.start_step = trainer.step
        reset_peak_memory(trainer.device)
        self.stopper.start(trainer.step)
        if self.settings.profile and folder.dir is not None and trainer.world.is_main:
            self.profiler = start_profile(folder.dir / "profile", trainer.device.type)
        started: list[Observer] = []
        try:
            info = run_info(self)
            for observer in self.observers:
                observer.started(info)
                started.append(observer)
            self._tell(trainer.feed.remarks())
        except BaseException as error:
            self.observers = started  # those hold files and the terminal; the others hold nothing yet
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def _take_up(self) -> None:
        assert self.folder.checkpoint is not None
        plain = restore_state(self.trainer, self.folder.checkpoint.path)
        refuse_wrong_length(self.trainer, self.folder.checkpoint.path, plain["config"])
        self.metrics = plain["metrics"]
        self.saved_at = self.trainer.step
        # By class and in order: rank 0, which saved, has observers that others have not, and a user may add one.
        for observer in self.observers:
            kind = type(observer).__name__
            saved = next((state for state in plain["observers"] if state["class"] == kind), None)
            if saved is not None:
                plain["observers"].remove(saved)
                observer.load_state_dict(saved["state"])

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stopper.end()
        if self.profiler is not None:
            self.profiler.stop()
        if error is None:
            return
        abandon()
        reason = f"{type(error).__name__}: {error}"
        try:
            known = summary(self, "failed", reason)
        except RuntimeError:  # a device that failed (an assert in a kernel) answers nothing more
            known = summary(self, "failed", reason, ask_device=False)
        for observer in self.observers:
            try:
                observer.failed(error, known)
            except OSError:
                pass
            except Exception as its_own:  # the first error is the one to tell
                error.add_note(f"{type(observer).__name__}.failed raised, too: {type(its_own).__name__}: {its_own}")

    def finished_before(self) -> dict[str, Any]:
        """The summary of a run that was done already; nothing is touched."""
        assert self.folder.dir is not None
        if self.trainer.world.is_main:
            more = f"resume={self.folder.dir} steps=N"
            sys.stdout.write(f"{self.folder.dir} is done already; nothing to do. To train it further: {more}\n")
        return read_summary(self.folder.dir)

    def end(self, status: str, reason: str | None = None) -> dict[str, Any]:
        """Tell the observers that the run ended."""
        self.remark()
        known = summary(self, status, reason)
        for observer in self.observers:
            observer.finished(known)
        return known

    # ---- around each step

    def watch(self, step: int) -> None:
        """Before a step: whether its figures will be read."""
        watching = step % self._log_every == 0 or self.trainer.feed.is_over(step)
        if watching != self.watching:
            self.watching = watching
            self.trainer.plan.watch_norm = self.trainer.figures.watching = watching

    def count(self, clock: StepClock) -> None:
        """After a step: what it took in, over all ranks."""
        if self.profiler is not None:
            self.profiler.step()
        unlike = None if self._apart is None else self._apart()
        task = self.trainer.task
        samples = task.fed.global_samples if task.fed is not None else self.settings.batch_size
        if self._by_samples or task.counted is None:
            clock.step(samples, apart=unlike)
        else:
            clock.step(samples, {self.trainer.unit: task.counted}, unlike)

    def evaluation_is_due(self, step: int) -> bool:
        """Whether to evaluate after this step: every so many, or after each epoch."""
        if not self._evaluates:
            return False
        every = self.settings.evaluate.every
        if every is not None:
            return step % every == 0
        return self.trainer.feed.position.seen == 0

    def save_is_due(self, step: int) -> bool:
        """Whether to save after this step."""
        return self._save_every is not None and step % self._save_every == 0

    # ---- once in a while

    def log(self, info: StepInfo) -> None:
        """Read the figures of a step from the device, in one go, and tell the observers."""
        trainer = self.trainer
        sums, media = trainer.figures.take()
        if info.loss is not None:
            sums["loss"] = [info.loss, 1.0]
        figures = self._reported()
        groups = [group for optimizer in trainer.optimizers.values() for group in optimizer.param_groups]
        # A rate is a tensor where steps can be refused.
        rates_now = {f"lr|{i}": group["lr"] for i, group in enumerate(groups)}
        pairs_now = {f"{name}|{i}": pair[i] for name, pair in sums.items() for i in (0, 1)}
        read = read_together({**figures, **rates_now, **pairs_now})
        figures = {name: read[name] for name in figures}
        trainer.plan.logged({"step": trainer.step, **figures})
        window = {k: v for k, v in self.clock.window().items() if k in SPEED or k.endswith("_per_s")}
        remarks = self._new_remarks()
        mine = {name: (read[f"{name}|0"], read[f"{name}|1"]) for name in sums}
        pairs = add_over_ranks({**mine, REMARKS: (len(remarks), 0.0)}, trainer.world.size)
        number_of_remarks, _ = pairs.pop(REMARKS)
        logged = {name: total / weight if weight else float("nan") for name, (total, weight) in pairs.items()}
        loss = self.last_loss = logged.pop("loss", None)
        if loss is not None and not math.isfinite(loss):
            self._warn_of_loss(loss)
        rates = [read[name] for name in rates_now]
        record = {
            "step": info.step,
            "total_steps": trainer.feed.total_steps,
            "samples": trainer.feed.samples,
            "epoch": trainer.feed.epochs_done,
            "loss": loss,
            "lr": rates[0] if len(set(rates)) == 1 else rates,
            "grad_norm": figures.pop("grad_norm", None),
            **window,
            "memory": current_memory(trainer.device),
            **logged,
            **media,
            **figures,
        }
        for observer in self.observers:
            observer.stepped(record)
        if number_of_remarks:
            self._tell(remarks)

    def remark(self) -> None:
        """Tell what strategies and the feed have to say by now; every rank calls this."""
        self._tell(self._new_remarks())

    def _new_remarks(self) -> list[str]:
        return [*self.trainer.plan.remarks(), *self.trainer.feed.found_out(self.clock)]

    def _tell(self, remarks: list[str]) -> None:
        """Tell the remarks of all ranks, each once; what other ranks alone say is told with the first of them."""
        for rank, of_rank in enumerate(self.trainer.world.gather(remarks)):
            for text in of_rank:
                if text not in self._remarked:
                    self._remarked.add(text)
                    record = {"step": self.trainer.step, "text": f"rank {rank}: {text}" if rank else text}
                    self.remarks.append(record)
                    for observer in self.observers:
                        observer.remarked(record)

    def _warn_of_loss(self, loss: float) -> None:
        if self._warned or "nonfinite" in self.trainer.plan.strategies or not self.trainer.world.is_main:
            return
        self._warned = True
        sys.stderr.write(
            f"step {self.trainer.step}: the loss is {loss}, and the weights may be, too; nonfinite=raise ends such a run at "
            "the first bad gradient, nonfinite=skip leaves bad steps out.\n"
        )

    def _reported(self) -> dict[str, Any]:
        """What strategies report; tensors are not read yet."""
        plan = self.trainer.plan
        figures: dict[str, Any] = {}
        if plan.watched_norm is not None:
            figures["grad_norm"], plan.watched_norm = plan.watched_norm, None
        figures |= plan.report()
        refused = sum(plan.refused(optimizer) for optimizer in self.trainer.optimizers.values())
        if isinstance(refused, torch.Tensor) or refused:
            figures["refused_steps"] = refused
        return figures

    def check(self) -> None:
        """Let strategies object to the steps since the last log point."""
        self.trainer.plan.logged({"step": self.trainer.step, **read_together(self._reported())})

    def evaluate(self) -> None:
        """Evaluate now, and tell the observers."""
        trainer = self.trainer
        began = time.perf_counter()
        with self.clock.paused("evaluation"):
            self.metrics = figures_of(trainer.evaluate(), type(trainer).__name__)
        self.evaluated_at = trainer.step
        if not self.metrics:  # nothing was evaluated, so there is nothing to be better or worse than the best
            self._tell(["the evaluation gave no figure, for want of a batch; look at Data(evaluation=...)"])
            return
        trainer.plan.evaluated(self.metrics)
        self.remark()
        record = {
            "step": trainer.step,
            "epoch": trainer.feed.epochs_done,
            "metrics": self.metrics,
            "seconds": time.perf_counter() - began,
        }
        for observer in self.observers:
            observer.evaluated(record)

    def evaluate_at_end(self) -> None:
        """Evaluate the final weights, unless that was just done."""
        if self.trainer.data.evaluation is not None and self.evaluated_at != self.trainer.step:
            self.evaluate()

    def save(self) -> None:
        """Save everything, unless this step is saved already; then drop older checkpoints."""
        trainer, folder = self.trainer, self.folder.dir
        if folder is None or self.saved_at == trainer.step:
            return
        self.check()
        path = folder / "checkpoints" / f"step-{trainer.step}"
        began = time.perf_counter()
        with self.clock.paused("saving"):
            written = save_state(
                trainer,
                path,
                {
                    "metrics": self.metrics,
                    "observers": [{"class": type(o).__name__, "state": o.state_dict()} for o in self.observers],
                    "config": self.config_yaml(),
                },
            )
        self.saved_at = trainer.step
        if not trainer.world.is_main:
            return
        prune(folder, self.settings.checkpoint.keep)
        record = {"step": trainer.step, "path": str(path), "bytes": written, "seconds": time.perf_counter() - began}
        for observer in self.observers:
            observer.saved(record)
