"""`validate`: every problem of a config at once, without torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from fasttrain.config import check
from fasttrain.errors import EXIT_DONE, EXIT_WRONG_REQUEST


def validate(config: str, overrides: Sequence[str], as_json: bool) -> int:
    """Print all problems of a config, or that there are none; exit code 2 if there are."""
    _, problems = check(config, overrides)
    if as_json:
        told = [problem.as_dict() for problem in problems]
        sys.stdout.write(json.dumps({"ok": not problems, "problems": told}) + "\n")
    elif problems:
        sys.stdout.write(f"{len(problems)} problem{'s' if len(problems) > 1 else ''}:\n")
        sys.stdout.writelines(f"  {problem}\n" for problem in problems)
    else:
        sys.stdout.write(f"{config}: no problem\n")
    return EXIT_WRONG_REQUEST if problems else EXIT_DONE
