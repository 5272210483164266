"""Training from the first step to the planned end or a stop. What happens once in a while stands around the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any, NoReturn

from fasttrain.data.lost import deaths_explained
from fasttrain.errors import ConfigError
from fasttrain.trainer.session import Session
from fasttrain.trainer.setup import own_determinism, set_determinism

if TYPE_CHECKING:
    from fasttrain.trainer.trainer import Trainer


def fit(trainer: Trainer) -> dict[str, Any]:
    """Train; returns what `summary.json` holds. Status: `done`, or `stopped` (resumable) after a signal or time limit.

    A run that is finished already is left untouched, and its summary returned. Flags of determinism and of debugging are
    as before afterwards, and so is what strategies changed in the process (`Strategy.ended`).
    """
    set_determinism(trainer.config.deterministic, trainer.config.debug)
    try:
        return _fit(trainer)
    finally:
        own_determinism()
        trainer.plan.ended()


def _fit(trainer: Trainer) -> dict[str, Any]:
    session = Session(trainer)
    if session.folder.finished:
        return session.finished_before()
    with session, trainer.feed.keeping_workers(), deaths_explained():
        if not trainer.model.training:  # else parts that the user put into evaluation mode would lose it
            trainer.model.train()
        feed = trainer.feed
        steps = None if feed.total_steps is None or feed.ends_with_epochs else feed.total_steps - trainer.step
        with closing(feed.training(trainer.task, trainer.plan, steps)) as batches, deaths_explained():
            reason = train_until(session, batches, feed.is_over)
        if reason is not None:
            return session.end("stopped", reason)
        session.evaluate_at_end()
        session.save()
        return session.end("done")


def train_until(session: Session, batches: Iterator[Any], is_over: Callable[[int], bool]) -> str | None:
    """Train until `is_over(step)`; returns the reason if the run was stopped before, saved after its last step."""
    trainer, clock, feed = session.trainer, session.clock, session.trainer.feed
    first = trainer.step + 1 if trainer.plan.speaks else None
    clock.start()
    over = is_over(trainer.step)
    while not over:
        before = trainer.step
        clock.asks()
        batch = next(batches)
        clock.given()
        # Not before: only the batch that ends the data tells that this step is the last.
        session.watch(before + 1)
        try:
            info = trainer.train_step(batch)
        except Exception as error:
            feed.name_batch(error)
            raise
        if feed.read_ahead is not None:  # before anything waits for the device
            clock.asks()
            feed.read_ahead()
            clock.given()
        step = trainer.step
        if step == before or info is None:
            _refuse_own_step(step == before, step)
        session.count(clock)
        if step == first:  # what the first step compiled, for one, took long enough
            session.remark()
        if session.watching:
            session.log(info)
        if session.evaluation_is_due(step):
            session.evaluate()
        over = is_over(step)
        reason = None if over else session.stopper.boundary(step)
        if session.save_is_due(step) or reason is not None:
            session.save()
        if reason is not None:
            return reason
    return None


def _refuse_own_step(did_not_count: bool, step: int) -> NoReturn:
    if did_not_count:
        raise ConfigError(f"train_step left self.step at {step}; count the step in it, self.step += 1.")
    raise ConfigError("train_step returned None; return StepInfo(self.step, loss), the loss detached (from fasttrain).")
