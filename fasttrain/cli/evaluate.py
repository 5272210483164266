"""`evaluate RUN`: the newest checkpoint of a run, or a checkpoint, on the evaluation data of its config."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from fasttrain.cli.saved import restored
from fasttrain.errors import EXIT_DONE


def evaluate(run: Path, overrides: Sequence[str], as_json: bool) -> int:
    """Print the metrics of a saved state. `run`: what `status` takes, or a checkpoint.

    Raises:
        ConfigError: there is no such run, or it has no checkpoint.
    """
    with restored(run, overrides, "evaluate", as_json) as (trainer, checkpoint):
        metrics = trainer.evaluate()
    if trainer.world.is_main and as_json:
        sys.stdout.write(json.dumps({"step": checkpoint.step, "metrics": metrics}) + "\n")
    elif trainer.world.is_main:
        told = "  ".join(f"{name} {value:.6g}" for name, value in metrics.items())
        sys.stdout.write(f"{checkpoint.path}: {told}\n")
    return EXIT_DONE
