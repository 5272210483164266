"""`explain`: the resolved config, and who acts on which line of the step."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from fasttrain.config import load
from fasttrain.core.plan import explain as lines_of
from fasttrain.core.strategy import VERBS
from fasttrain.errors import EXIT_DONE


def explain(config: str, overrides: Sequence[str], as_json: bool) -> int:
    """Print the resolved config and the lines of the step."""
    resolved = load(config, overrides)
    lines = lines_of(resolved.classes())
    if as_json:
        told = {"config": resolved.as_dict(), "step": dict(lines)}
        sys.stdout.write(json.dumps(told) + "\n")
        return EXIT_DONE
    sys.stdout.write(resolved.to_yaml().rstrip() + "\n\n")
    sys.stdout.write(f"{'line of the step':18s} {'composes':10s} who acts on it\n")
    for verb, acting in lines:
        sys.stdout.write(f"{verb:18s} {VERBS[verb]:10s} {', '.join(acting) or '-'}\n")
    return EXIT_DONE
