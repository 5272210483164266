"""`evaluate RUN`: the newest checkpoint of a run, or a checkpoint, on the evaluation data of its config."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from fasttrain.checkpoint import Checkpoint, newest
from fasttrain.cli.status import find_run
from fasttrain.config import load
from fasttrain.distributed.world import leave
from fasttrain.errors import EXIT_DONE, ConfigError


def evaluate(run: Path, overrides: Sequence[str], as_json: bool) -> int:
    """Print the metrics of a saved state. `run`: what `status` takes, or a checkpoint.

    Raises:
        ConfigError: there is no such run, or it has no checkpoint.
    """
    if run.name.startswith("step-"):
        step = run.name.removeprefix("step-")
        checkpoint = Checkpoint(int(step), run) if step.isdigit() and run.is_dir() else None
        run = run.parent.parent
    else:
        run = find_run(run, "evaluate")
        checkpoint = newest(run)
    config = run / "config.yaml"
    if checkpoint is None or not config.is_file():
        raise ConfigError(
            f"evaluate of {run}: it has no checkpoint yet; a run saves at its end, or with checkpoint.every=N."
        )
    resolved = load(config, overrides)
    if resolved.trainer is None:
        raise ConfigError(f"{config} names no trainer; a run started from Python is evaluated there, by evaluate().")
    shown = sys.stderr if as_json else sys.stdout  # standard output is for the one object alone
    try:
        with contextlib.redirect_stdout(shown):
            trainer = resolved.trainer(resolved)
            trainer.restore(checkpoint.path)
            metrics = trainer.evaluate()
        main = trainer.world.is_main
    finally:
        leave()
    if main and as_json:
        sys.stdout.write(json.dumps({"step": checkpoint.step, "metrics": metrics}) + "\n")
    elif main:
        told = "  ".join(f"{name} {value:.6g}" for name, value in metrics.items())
        sys.stdout.write(f"{checkpoint.path}: {told}\n")
    return EXIT_DONE
