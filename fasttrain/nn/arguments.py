"""Give a second forward its arguments as the first one got them: lists and caches change in between."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

Forward = Callable[..., Any]


class Passed:
    """Arguments of a forward that may be run again: themselves the first time, and then as they were at the beginning.

    The first run gets the very objects, since callers look into what a block wrote to a cache.
    """

    __slots__ = ("as_passed", "given")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.given: Any = (args, kwargs)
        self.as_passed = snapshot(self.given)

    def take(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for the next run."""
        given, self.given = self.given, None
        return snapshot(self.as_passed) if given is None else given


def with_arguments_kept(change: Callable[[Forward], Forward]) -> Callable[[Forward], Forward]:
    """`change`, which makes a forward run twice, for forwards whose arguments may change between the two runs.

    A dense block appends to the list that its layers were called with; a decoder fills a cache. Costs nothing where all
    arguments are tensors and numbers. Tensors are not copied.
    """

    def changed(forward: Forward) -> Forward:
        def run(module: nn.Module, *args: Any, _passed: Passed | None = None, **kwargs: Any) -> Any:
            if _passed is not None:
                args, kwargs = _passed.take()
            return forward(module, *args, **kwargs)

        running_twice = change(run)

        def keeping_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # A compiled graph holds values, no objects: what changes afterwards is not seen by its recomputation.
            runs_once = torch.compiler.is_compiling() or not torch.is_grad_enabled()
            if runs_once or (_are_fixed(args) and _are_fixed(kwargs.values())):
                return running_twice(module, *args, **kwargs)
            # The arguments go along as they are, too: devices, and so random states, are read from them.
            return running_twice(module, *args, _passed=Passed(args, kwargs), **kwargs)

        return keeping_forward

    return changed


def _are_fixed(values: Iterable[Any]) -> bool:
    return all(_is_fixed(value) for value in values)


def _is_fixed(value: Any) -> bool:
    """Whether nothing in a value can be replaced."""
    if value is None or isinstance(value, Tensor | nn.Module | int | float | str):
        return True
    if isinstance(value, tuple):
        return _are_fixed(value)
    return not isinstance(value, list | dict) and (callable(value) or not hasattr(value, "__dict__"))


def snapshot(value: Any, seen: dict[int, Any] | None = None) -> Any:
    """A value with its own lists, dicts and objects, down to tensors, modules and functions, which are shared."""
    if _is_fixed(value):
        return value
    seen = {} if seen is None else seen
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, tuple):
        parts = [snapshot(entry, seen) for entry in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    seen[id(value)] = copied = copy.copy(value)
    if isinstance(value, list):
        copied[:] = [snapshot(entry, seen) for entry in value]
    elif isinstance(value, dict):
        copied.update({key: snapshot(entry, seen) for key, entry in value.items()})
    if hasattr(copied, "__dict__"):
        vars(copied).update({name: snapshot(entry, seen) for name, entry in vars(value).items()})
    return copied
