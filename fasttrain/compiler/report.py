"""What compilation did to a run, as sentences and figures."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from fasttrain.compiler.record import Break, Compilations, Fallback, Recompilation, Record
from fasttrain.errors import CompileError
from fasttrain.lazy import torch

# Single breaks and functions that are told; of more the number alone, as summary.json has them all.
TOLD = 5
# A function that is compiled so often again for guards that differ in their numbers alone will go on like that.
STORM = 4
# How often compilation in later steps, and in evaluations, is told.
MORE = 2
ON_PURPOSE = "`torch.compiler.disable()`d function"


class Report:
    """Gathers what is compiled from step to step, and says what whoever reads the run should know; each thing once.

    `modules` are those whose forwards were compiled. `strict`: anything of them that runs uncompiled is an error. `main`:
    whether to tell what differs from rank to rank without meaning anything, such as how long it took.
    """

    def __init__(self, modules: Iterable[Any], strict: bool = False, main: bool = True) -> None:
        self.modules = list(modules)
        self.strict = strict
        self.main = main
        self.all = Compilations()
        self._record = Record()
        self._kinds = Counter(type(module).__name__ for module in self.modules)
        self._uncalled: dict[int, Any] = {}
        self._inlined = False
        self._begun = False
        self._evaluated = False
        self._again: Counter[tuple[str, str]] = Counter()
        self._remarks: list[str] = []
        self._told: Counter[str] = Counter()

    def watch_calls(self) -> None:
        """Before the first step: see in it which of the modules are called at all."""
        self._uncalled = {id(m): m.register_forward_pre_hook(self._was_called) for m in self.modules}

    def _was_called(self, module: Any, inputs: Any) -> None:
        if torch.compiler.is_compiling():  # within code that the user compiled, whose graph may not break for this
            self._inlined = True
            return
        handle = self._uncalled.pop(id(module), None)
        if handle is not None:
            handle.remove()

    # ---- after each step and evaluation

    def stepped(self) -> bool:
        """After a step: whether anything was compiled in it.

        Raises:
            CompileError: `strict`, and something runs uncompiled.
        """
        taken = self._take(is_news=self._begun, where="in a later step" if self._begun else None)
        if not self._begun:
            self._begin()
        return taken

    def evaluated(self) -> None:
        """After an evaluation. The first may well compile: it is without gradients, and of another size.

        Raises:
            CompileError: `strict`, and something runs uncompiled.
        """
        self._take(is_news=self._evaluated, where="in an evaluation")
        self._evaluated = True

    def _take(self, is_news: bool, where: str | None) -> bool:
        """Whether anything was compiled; it is added, and told with `where`."""
        taken = self._record.take()
        if taken is None:
            return False
        self._add(taken, is_news)
        if where is not None:
            self._more(taken, where)
        return True

    def _begin(self) -> None:
        """What the first step compiled, in one sentence."""
        self._begun = True
        if self._uncalled and not self._inlined:
            number, of = len(self._uncalled), self._kinds.total()
            self._object(
                f"{number} of {of} compiled forwards ({_of(self._kinds)}) were not called in the first step, so that "
                "nothing of them was compiled; call the module itself (module(x), not a method of it), or name what is "
                "called with blocks=[...]"
            )
        for handle in self._uncalled.values():
            handle.remove()
        self._uncalled = {}
        if self.all.graphs and self.main:
            cached = self.all.from_cache
            where = "" if not cached else ", read from the cache" if cached == self.all.graphs else f", {cached} cached"
            breaks = self.all.breaks.total()
            self._remarks.insert(
                0,
                f"{_number(self.all.graphs, 'graph')} of {_of(self._kinds)}, {_number(breaks, 'graph break')}, "
                f"{self.all.seconds:.1f} s to compile{where}",
            )

    def _more(self, taken: Compilations, where: str) -> None:
        """What was compiled once the run was under way: the first few times, as it takes time that nobody expects."""
        self._told[where] += 1
        if self.main and taken.graphs and self._told[where] <= MORE:
            guard = next(iter(taken.recompilations), None)
            why = "" if guard is None else f", as a guard did not hold: {guard.guard}"
            self._remarks.append(
                f"{_number(taken.graphs, 'graph')} more {where}, {taken.seconds:.1f} s to compile{why}"
            )

    def _add(self, taken: Compilations, is_news: bool) -> None:
        known = {*self.all.breaks, *self.all.fallbacks}
        fresh = [entry for entry in (*taken.breaks, *taken.fallbacks) if entry not in known]
        self.all.add(taken)
        for entry in fresh:
            self._fault(entry)
        for entry in taken.recompilations if is_news else ():
            self._recompiled(entry)
        for reason in taken.graphs_skipped:
            if reason not in self._told:
                self._told[reason] += 1
                self._object(f"CUDA graphs are left out: {reason}")

    def _fault(self, entry: Break | Fallback) -> None:
        kind = type(entry).__name__
        self._told[kind] += 1
        text = _of_break(entry) if isinstance(entry, Break) else _of_fallback(entry)
        if isinstance(entry, Break) and ON_PURPOSE in entry.reason:
            self._remarks.append(text)
        elif self._told[kind] <= TOLD or self.strict:
            self._object(text)

    def _recompiled(self, entry: Recompilation) -> None:
        key = entry.function, re.sub(r"\d+", "#", entry.guard)
        self._again[key] += 1
        if self._again[key] == STORM:
            self._remarks.append(
                f"{entry.function} is compiled again and again, {STORM} times by now, as a guard does not hold: "
                f"{entry.guard}{_at(entry.place)}; {_cure(entry.guard)}"
            )

    def _object(self, text: str) -> None:
        if self.strict:
            raise CompileError(f"compile.strict: {text}. compile.strict=false goes on all the same.")
        self._remarks.append(text)

    # ---- told

    def remarks(self) -> list[str]:
        """Sentences on what came up since this was last asked."""
        told, self._remarks = self._remarks, []
        for kind, plural in ((Break.__name__, "graph breaks"), (Fallback.__name__, "functions that run uncompiled")):
            more = self._told[kind] - TOLD
            if more > self._told[f"more {kind}"]:
                self._told[f"more {kind}"] = more
                told.append(f"{more} more {plural} by now: summary.json has them all")
        return [f"{text}." for text in told]

    def summary(self) -> dict[str, Any]:
        """Figures of the whole run, as plain values."""
        return self.all.as_dict()


def _of(kinds: Counter[str]) -> str:
    return ", ".join(f"{number} {kind}" if number > 1 else kind for kind, number in kinds.items())


def _number(number: int, of: str) -> str:
    return f"{number or 'no'} {of}{'' if number == 1 else 's'}"


def _at(place: Any) -> str:
    return "" if place is None else f" at {place}"


def _of_break(entry: Break) -> str:
    told = f"graph break{_at(entry.place)}: {entry.reason}; that code runs uncompiled, between two graphs"
    return told if ON_PURPOSE in entry.reason else f"{told}; {_mend(entry.reason)}"


def _of_fallback(entry: Fallback) -> str:
    if entry.limit:
        return (
            f"{entry.function} has as many graphs as torch makes of a function, and whatever fits none of them runs "
            f"uncompiled from now on; the guard that failed last: {entry.reason}{_at(entry.place)}; {_cure(entry.reason)}"
        )
    return f"{entry.function} runs uncompiled, as torch gives it up{_at(entry.place)}: {entry.reason}"


def _mend(reason: str) -> str:
    """What to do about a break."""
    if "branch" in reason:
        return "torch.where computes both sides in one graph"
    if "item" in reason or "capture_scalar" in reason:
        return "keep the number in a tensor"
    return "take it out of the forward, or leave the part out on purpose with torch.compiler.disable"


def _cure(guard: str) -> str:
    """What to do about a guard that keeps failing."""
    if "size" in guard or "stride" in guard:
        return "let sizes be symbols with compile.dynamic=null or true, or pad batches to few sizes with compile.pad"
    return "keep what changes from call to call in a tensor, or outside of the compiled forward"
