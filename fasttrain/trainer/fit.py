"""Training from the first step to the planned end or a stop. What happens once in a while stands around the step."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fasttrain.trainer.session import Session

if TYPE_CHECKING:
    from fasttrain.trainer.trainer import Trainer


def fit(trainer: Trainer) -> dict[str, Any]:
    """Train; returns what `summary.json` holds. Status: `done`, or `stopped` (resumable) after a signal or time limit.

    A run that is finished already is left untouched, and its summary returned.
    """
    session = Session(trainer)
    if session.folder.finished:
        return session.finished_before()
    with session:
        total, clock, now = trainer.feed.total_steps, session.clock, time.perf_counter
        batches = trainer.feed.training(trainer.task, trainer.plan)
        trainer.model.train()
        clock.start()
        while trainer.step < total:
            session.watch(trainer.step + 1)
            asked = now()
            batch = next(batches)
            clock.waited(now() - asked)
            info = trainer.train_step(batch)
            session.count(clock)
            step = trainer.step
            if session.watching:
                session.log(info)
            if session.evaluation_is_due(step):
                session.evaluate()
            reason = session.stopper.boundary(step) if step < total else None
            if session.save_is_due(step) or reason is not None:
                session.save()
            if reason is not None:
                return session.end("stopped", reason)
        session.evaluate_at_end()
        session.save()
        return session.end("done")
