"""A trainer as a run saved it, for the commands that take a run: `evaluate RUN`, `predict RUN`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fasttrain.checkpoint import Checkpoint, newest
from fasttrain.cli.status import find_run
from fasttrain.config import load
from fasttrain.distributed.world import leave
from fasttrain.errors import ConfigError


@contextlib.contextmanager
def restored(run: Path, overrides: Sequence[str], command: str, as_json: bool) -> Iterator[tuple[Any, Checkpoint]]:
    """The trainer of a run with its newest state, and the checkpoint; ranks are left afterwards.

    `run`: what `status` takes, or a checkpoint. Inside, what user code prints leaves standard output to the one object of
    --json.

    Raises:
        ConfigError: there is no such run, or it has no checkpoint.
    """
    if run.name.startswith("step-"):
        step = run.name.removeprefix("step-")
        checkpoint = Checkpoint(int(step), run) if step.isdigit() and run.is_dir() else None
        run = run.parent.parent
    else:
        run = find_run(run, command)
        checkpoint = newest(run)
    config = run / "config.yaml"
    if checkpoint is None or not config.is_file():
        raise ConfigError(
            f"{command} of {run}: it has no checkpoint yet; a run saves at its end, or with checkpoint.every=N."
        )
    resolved = load(config, overrides)
    if resolved.trainer is None:
        raise ConfigError(
            f"{config} names no trainer; of a run started from Python use {command}() there, after restore(checkpoint)."
        )
    try:
        with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
            trainer = resolved.trainer(resolved)
            trainer.restore(checkpoint.path)
            yield trainer, checkpoint
    finally:
        leave()
