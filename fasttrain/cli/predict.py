"""`predict RUN`: what the model of a run gives for each sample of the evaluation data of its config."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fasttrain.cli.saved import restored
from fasttrain.core.batch import num_samples
from fasttrain.errors import EXIT_DONE, ConfigError
from fasttrain.lazy import pytree, torch
from fasttrain.observe.files import json_line

ONLY = "predictions"  # the name of a lone tensor


def predict(run: Path, overrides: Sequence[str], as_json: bool, out: str | None) -> int:
    """Write the predictions of a saved state. `run`: what `status` takes, or a checkpoint.

    They go to `out`, or to `predictions-STEP.safetensors` in the run's folder, by names made of the output's structure;
    with `as_json` and no `out` they are printed, samples as nested lists.

    Raises:
        ConfigError: there is no such run, it has no checkpoint, or its predictions are no tensors and go to a file.
    """
    with restored(run, overrides, "predict", as_json) as (trainer, checkpoint):
        predictions = trainer.predict()
        is_main = trainer.world.is_main
    if not is_main:
        return EXIT_DONE
    samples = _samples(predictions)
    file = None
    if out is not None or not as_json:
        beside = checkpoint.path.parent.parent / f"predictions-{checkpoint.step}.safetensors"
        file = Path(out) if out is not None else beside
        _write(_named(predictions), file)
    if as_json:
        told = {"step": checkpoint.step, "samples": samples, "file": None if file is None else str(file)}
        if file is None:
            told["predictions"] = pytree.tree_map(_as_list, predictions)
        sys.stdout.write(json_line(told) + "\n")
    else:
        sys.stdout.write(f"{file}: {samples:,} predictions of step {checkpoint.step}\n")
    return EXIT_DONE


def _samples(predictions: Any) -> int:
    # Samples that differ in shape come as a list of tensors.
    leaf = pytree.tree_leaves(predictions, is_leaf=lambda node: isinstance(node, list))[0]
    return len(leaf) if isinstance(leaf, list) else num_samples(leaf)


def _as_list(leaf: Any) -> Any:
    return leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf


def _named(predictions: Any) -> dict[str, Any]:
    leaves, _ = pytree.tree_flatten_with_path(predictions, is_leaf=lambda node: isinstance(node, list))
    named = {"/".join(_plain(key) for key in path) or ONLY: leaf for path, leaf in leaves}
    for name, leaf in named.items():
        if not isinstance(leaf, torch.Tensor):
            raise ConfigError(
                f"the predictions '{name}' are a {type(leaf).__name__} of samples that are no tensors of one shape, and a "
                "safetensors file holds tensors alone; use --json without --out, or override prediction(output, batch)."
            )
    return named


def _plain(key: Any) -> str:
    """An entry of a path into a tree, without its brackets and quotes."""
    return str(next(getattr(key, part) for part in ("key", "name", "idx") if hasattr(key, part)))


def _write(tensors: dict[str, Any], file: Path) -> None:
    from safetensors.torch import save_file

    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, temporary)
        os.replace(temporary, file)
    except OSError as error:
        raise ConfigError(
            f"the predictions cannot be written to {file} ({error.strerror or error}); give --out FILE."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
