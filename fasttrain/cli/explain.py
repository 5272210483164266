"""`explain`: the resolved config, and who acts on which line of the step.

With --model, what the model is made of; with --compile, what torch.compile makes of it.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fasttrain.cli.compile_table import compilation_of, compile_table
from fasttrain.cli.model_table import summary_of, table
from fasttrain.config import load
from fasttrain.core.plan import explain as lines_of
from fasttrain.core.strategy import VERBS
from fasttrain.errors import EXIT_DONE


def explain(
    config: str, overrides: Sequence[str], as_json: bool, with_model: bool = False, with_compilation: bool = False
) -> int:
    """Print the resolved config and the lines of the step, or in their place the parts of the model or its compilation.

    Both build data and model; in JSON they stand beside the rest.
    """
    resolved = load(config, overrides)
    lines = lines_of(resolved.classes(), resolved.strategies)
    model = None
    if with_model:
        with contextlib.redirect_stdout(sys.stderr):  # for what a trainer prints while it is built
            model = summary_of(resolved, config)
    compilation = None
    if with_compilation:
        with contextlib.redirect_stdout(sys.stderr):
            compilation = compilation_of(resolved, config)
    if as_json:
        told: dict[str, Any] = {"config": resolved.as_dict(), "step": dict(lines)}
        if model is not None:
            told["model"] = asdict(model)
        if compilation is not None:
            told["compile"] = compilation
        sys.stdout.write(json.dumps(told) + "\n")
        return EXIT_DONE
    if model is not None:
        sys.stdout.write(table(model))
    if compilation is not None:
        sys.stdout.write(("\n" if model is not None else "") + compile_table(compilation))
    if model is not None or compilation is not None:
        return EXIT_DONE
    sys.stdout.write(resolved.to_yaml().rstrip() + "\n\n")
    sys.stdout.write(f"{'line of the step':18s} {'composes':10s} who acts on it\n")
    for verb, acting in lines:
        sys.stdout.write(f"{verb:18s} {VERBS[verb]:10s} {', '.join(acting) or '-'}\n")
    return EXIT_DONE
