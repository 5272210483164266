"""The tree of errors. Each message has three parts: what was asked, why it cannot be, what to type instead.

FasttrainError
├── ConfigError            the request was wrong; found before any work (exit code 2)
│   ├── ConfigErrors       several of them, told together
│   ├── Conflict           two strategies that cannot live together, or two owners of one line
│   └── MissingPackage     an optional package is needed and not installed
└── RunError               the run failed (exit code 1)
    ├── BatchError         a batch cannot be cut as asked
    ├── NonFinite          a loss or gradient was infinite or not a number
    ├── SyncError          gradients of ranks cannot be combined as the code asks
    ├── BrokenSample       a sample of the data cannot be read
    ├── LostWorker         a process that reads data died, or gave nothing in time
    └── CheckpointError    a checkpoint cannot be written or read
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import asdict, dataclass

EXIT_DONE, EXIT_FAILED, EXIT_WRONG_REQUEST, EXIT_STOPPED = 0, 1, 2, 75


class FasttrainError(Exception):
    """Whatever fasttrain itself raises."""

    exit_code = EXIT_FAILED


class ConfigError(FasttrainError, ValueError):
    """The request was wrong."""

    exit_code = EXIT_WRONG_REQUEST


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One mistake of a config, and where it stands."""

    key: str
    message: str
    suggestion: str = ""
    file: str = ""
    line: int | None = None

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}: " if self.file and self.line else f"{self.file}: " if self.file else ""
        key = f"{self.key}: " if self.key else ""
        return f"{place}{key}{self.message}" + (f"; {self.suggestion}" if self.suggestion else "")

    def as_dict(self) -> dict[str, str | int | None]:
        """The problem as `validate --json` prints it."""
        return asdict(self)


class ConfigErrors(ConfigError):
    """Every mistake of a config, told at once."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class Conflict(ConfigError):
    """Two strategies cannot live together."""


class MissingPackage(ConfigError):
    """An optional package is needed and not installed."""


class RunError(FasttrainError, RuntimeError):
    """The run failed."""


class BatchError(RunError):
    """A batch cannot be cut as asked."""


class NonFinite(RunError):
    """A loss or a gradient was infinite or not a number."""


class SyncError(RunError):
    """The gradients of the ranks cannot be combined as the code asks."""


class BrokenSample(RunError):
    """A sample cannot be read: its name (for example a file's path), and why.

    Data sets may raise it. Whatever a data set raises reaches the user as one of these, with the error as its cause.
    """

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.reason = name, reason
        super().__init__(name, reason)  # both, so that it comes out of a worker's pickle as it was

    def __str__(self) -> str:
        return f"{self.name} could not be read: {self.reason}; mend it, or leave it out of the data."


class LostWorker(RunError):
    """A process that reads data died, or gave nothing in time."""


class CompileError(RunError):
    """Code that was to be compiled runs uncompiled."""


class CheckpointError(RunError):
    """A checkpoint cannot be written or read."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A suggestion for a mistyped word: the nearest known one, or all of them where none is near."""
    known = sorted(known)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if near:
        return f"did you mean '{near[0]}'?"
    return f"known here: {', '.join(known)}" if known else "nothing can be set here"
