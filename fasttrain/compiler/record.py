"""What torch.compile did: graphs, breaks, recompilations, what runs uncompiled, and how long it took."""

from __future__ import annotations

import linecache
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._dynamo import utils as dynamo

# Compilations that torch remembers; what lies further back when the record is brought up to date is lost.
REMEMBERED = 1024
LIMIT = "recompile limit exceeded"
TORCH = str(Path(torch.__file__).parent)
OURS = str(Path(__file__).parents[1])
# What torch calls the two commonest breaks says nothing to whoever does not know its source.
PLAIN_GUARDS = {
    "GLOBAL_STATE changed: grad_mode": "gradients are off in evaluation, and on in training",
    "GLOBAL_STATE changed: training": "the mode changed between training and evaluation",
}
PLAIN_REASONS = {
    "generic_jump": "a branch on a tensor's values (if, while, assert)",
    "Failed to trace builtin operator": "a builtin that cannot be traced",
    "Attempted to call function marked as skipped": "a call of a function that torch does not trace",
}

AT_RUN_TIME = "in a function that runs already (TORCH_LOGS=cudagraphs says which, and why)"
IDLE_WORDS = ("Dynamo does not know how to trace the ", "Dynamo does not know how to trace ", " (has_kwargs False)")


@dataclass(frozen=True, kw_only=True)
class Place:
    """A line of code: `line` from 1 on, `text` as it stands there.

    `file` is as seen from the working folder; of an installed package, from where packages are.
    """

    file: str
    line: int
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f" `{self.text}`" if self.text else "")


@dataclass(frozen=True, kw_only=True)
class Break:
    """Code that splits a graph in two: it runs uncompiled between them."""

    place: Place | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class Recompilation:
    """A function was compiled again, since a `guard` that its graphs rest on did not hold; `place` is where that is from."""

    function: str
    place: Place | None
    guard: str


@dataclass(frozen=True, kw_only=True)
class Fallback:
    """A function that runs uncompiled: torch gave it up at `place` (`limit=False`), or made too many graphs of it."""

    function: str
    place: Place | None
    reason: str
    limit: bool


@dataclass(kw_only=True)
class Compilations:
    """What was compiled in a stretch of time. Each break, recompilation and fallback with how often it came.

    `graphs` are those of forward passes; `from_cache` those of them that were read from the disk. `seconds` is time spent
    tracing and generating code, for forward and backward.
    """

    graphs: int = 0
    from_cache: int = 0
    seconds: float = 0.0
    breaks: Counter[Break] = field(default_factory=Counter)
    recompilations: Counter[Recompilation] = field(default_factory=Counter)
    fallbacks: Counter[Fallback] = field(default_factory=Counter)
    graphs_skipped: Counter[str] = field(default_factory=Counter)

    def add(self, other: Compilations) -> None:
        """Add a later stretch."""
        self.graphs += other.graphs
        self.from_cache += other.from_cache
        self.seconds += other.seconds
        self.breaks += other.breaks
        self.recompilations += other.recompilations
        self.fallbacks += other.fallbacks
        self.graphs_skipped += other.graphs_skipped

    def __bool__(self) -> bool:
        return bool(self.graphs or self.seconds or self.breaks or self.fallbacks or self.graphs_skipped)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for `summary.json`."""
        return {
            "graphs": self.graphs,
            "from_cache": self.from_cache,
            "seconds": self.seconds,
            "breaks": [_entry(entry, times) for entry, times in self.breaks.items()],
            "recompilations": [_entry(entry, times) for entry, times in self.recompilations.items()],
            "fallbacks": [_entry(entry, times) for entry, times in self.fallbacks.items()],
            "cuda_graphs_skipped": dict(self.graphs_skipped),
        }


def _entry(entry: Any, times: int) -> dict[str, Any]:
    told = {key: value for key, value in vars(entry).items() if key != "place"}
    place = entry.place
    return {
        "file": place and place.file,
        "line": place and place.line,
        "code": place and place.text,
        **told,
        "times": times,
    }


class Record:
    """Watches what torch.compile does in this process, from when it is made.

    `take()` gives what came since it was last called. When nothing was compiled it costs three comparisons, so that it can
    be asked after each step. Everything compiled in the process is seen, whoever asked for it.
    """

    def __init__(self) -> None:
        dynamo.set_compilation_metrics_limit(REMEMBERED)
        self._seen: Any = _last(dynamo._compilation_metrics)
        self._seen_break: Any = _last(dynamo.graph_break_reasons)
        self._skips = _skips()
        self._functions: dict[str, tuple[str, Place | None]] = {}

    def take(self) -> Compilations | None:
        """What was compiled since the last call; `None`: nothing."""
        entries, reasons = dynamo._compilation_metrics, dynamo.graph_break_reasons
        skips = _skips()
        if _last(entries) is self._seen and _last(reasons) is self._seen_break and skips == self._skips:
            return None
        taken = Compilations()
        for entry in _since(entries, self._seen):
            self._add(taken, entry)
        for reason in _since(reasons, self._seen_break):
            taken.breaks[Break(place=_innermost(reason.user_stack), reason=gist(reason.reason))] += 1
        # What torch finds while a graph is to be recorded or replayed (inputs that change in place, addresses that never
        # stay) is in no entry of a compilation.
        found = skips - min(skips, self._skips) - taken.graphs_skipped.total()
        if found > 0:
            taken.graphs_skipped[AT_RUN_TIME] += found
        self._seen, self._seen_break, self._skips = _last(entries), _last(reasons), skips
        return taken or None

    def _add(self, taken: Compilations, entry: Any) -> None:
        spent = (entry.dynamo_cumulative_compile_time_us or 0) + (entry.backward_cumulative_compile_time_us or 0)
        taken.seconds += spent / 1e6
        frame = (entry.compile_id or "").partition("/")[0]
        if entry.co_name is not None:
            place = _place(entry.co_filename, entry.co_firstlineno)
            self._functions[frame] = f"{name_of(entry.co_name)} ({place.file}:{place.line})", place
        function, place = self._functions.get(frame, ("a function", None))
        if entry.fail_type is not None:
            limit = LIMIT in (entry.fail_reason or "")
            if not limit and entry.fail_user_frame_filename is not None:
                place = _place(entry.fail_user_frame_filename, entry.fail_user_frame_lineno)
            reason = entry.recompile_reason if limit else entry.fail_reason
            told = guard_of(reason)[0] if limit else gist(reason or entry.fail_type)
            if limit and (at := guard_of(reason)[1]) is not None:
                place = at
            taken.fallbacks[Fallback(function=function, place=place, reason=told, limit=limit)] += 1
        elif entry.recompile_reason is not None:
            guard, at = guard_of(entry.recompile_reason)
            taken.recompilations[Recompilation(function=function, place=at or place, guard=guard)] += 1
        if entry.is_forward and entry.graph_op_count and entry.fail_type is None:
            taken.graphs += 1
            taken.from_cache += bool(entry.aotautograd_local_cache_hit_count)
        if entry.cudagraph_skip_reason:
            taken.graphs_skipped[gist(entry.cudagraph_skip_reason)] += 1


def _skips() -> int:
    """How often torch left CUDA graphs out in this process."""
    return dynamo.counters["inductor"]["cudagraph_skips"]


def _last(entries: Any) -> Any:
    return entries[-1] if entries else None


def _since(entries: Any, seen: Any) -> list[Any]:
    """What came after `seen`; everything, if that is no longer there (torch forgot it in `torch.compiler.reset`)."""
    fresh: list[Any] = []
    for entry in reversed(entries):
        if entry is seen:
            break
        fresh.append(entry)
    return fresh[::-1]


def _place(file: str, line: int) -> Place:
    text = linecache.getline(file, line).strip()
    near = os.path.relpath(file)
    _, installed, module = file.rpartition(f"{os.sep}site-packages{os.sep}")
    return Place(file=module if installed else file if near.startswith("..") else near, line=line, text=text)


def _innermost(stack: Iterable[Any]) -> Place | None:
    """The innermost line that is not torch's, else the innermost one."""
    frames = list(stack)
    if not frames:
        return None
    of_user = [frame for frame in frames if not frame.filename.startswith((TORCH, OURS + os.sep + "nn"))]
    frame = (of_user or frames)[-1]
    return _place(frame.filename, frame.lineno)


def name_of(function: str) -> str:
    """A function as its author knows it: torch names what comes after a break by the line where it goes on.

    >>> name_of("forward"), name_of("torch_dynamo_resume_in_forward_at_8")
    ('forward', 'forward from line 8 on')
    """
    resumed = re.fullmatch(r"torch_dynamo_resume_in_(.+)_at_(\d+)", function)
    return f"{resumed[1]} from line {resumed[2]} on" if resumed else function


def gist(reason: str) -> str:
    """The first line of what torch says, and the first sentence of its explanation; in plain words where it is terse.

    >>> gist("generic_jump TensorVariable()")
    "a branch on a tensor's values (if, while, assert)"
    """
    lines = [line.strip() for line in reason.strip().splitlines()] or [""]
    head = next((plain for terse, plain in PLAIN_REASONS.items() if lines[0].startswith(terse)), lines[0])
    explained = next((line for line in lines[1:] if line.startswith("Explanation: ")), "")
    sentence = re.split(r"(?<=[.!])(?<!e\.g\.)\s", explained.removeprefix("Explanation: "))[0].rstrip(".")
    for idle in IDLE_WORDS:
        sentence = sentence.replace(idle, "")
    return f"{head}: {sentence}" if sentence else head


def guard_of(reason: str | None) -> tuple[str, Place | None]:
    """The guard that failed, and the line that it comes from where torch says which.

    >>> guard_of("0/1: self.n == 1   # self.n += 1  # b/a.py:29 in forward (HINT: ...)")[0]
    'self.n == 1'
    """
    text = re.sub(r"^\d+/\d+(_\d+)?: ", "", (reason or "no guard is named").strip())
    guard, _, rest = text.partition("  # ")
    guard = re.split(r"\s*\(HINT: |\s*\nUser stack", guard)[0]
    frames = re.findall(r'File "([^"]+)", line (\d+), in', rest or text)
    guard = " ".join(guard.split())
    return PLAIN_GUARDS.get(guard, guard), _place(frames[-1][0], int(frames[-1][1])) if frames else None
