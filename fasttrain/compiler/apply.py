"""Compile the forwards of modules, in place."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from types import CodeType, FunctionType
from typing import Any

from fasttrain.errors import ConfigError, did_you_mean
from fasttrain.lazy import torch
from fasttrain.nn.forwards import replace_forward


def compile_forwards(
    modules: Iterable[Any],
    *,
    backend: str | Callable[..., Any] = "inductor",
    mode: str | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
) -> Compiled:
    """Compile the forward of each module, in place; modules of one class share their graphs.

    Saves: time, by fusing what is between matrix products. Costs: compilation at the first steps.
    Weight names stay; `copy.deepcopy` of what holds the modules computes with the copy's weights. The settings are
    torch.compile's; `dynamic=None`: sizes that were seen to change become symbols.

    Raises:
        ConfigError: torch has no such backend.
    Source: https://docs.pytorch.org/docs/stable/generated/torch.compile.html
    """
    check_backend(backend)
    settings: dict[str, Any] = {"backend": backend, "fullgraph": fullgraph, "dynamic": dynamic}
    if mode is not None:
        settings["mode"] = mode
    modules = list({id(module): module for module in modules}.values())
    eager = [vars(module).get("forward") for module in modules]
    kinds: dict[Any, _Kind] = {}

    def compiled(forward: Callable[..., Any], module: Any) -> Callable[..., Any]:
        return torch.compile(code_of_its_kind(forward, module, kinds), **settings)

    for module in modules:
        # Not module.compile(): with a forward that checkpointing replaced, that compiles nothing and does not say so.
        replace_forward(module, partial(compiled, module=module))
    return Compiled(modules, eager)


def check_backend(backend: Any) -> None:
    """Refuse a name that torch knows no backend by.

    Raises:
        ConfigError: with the nearest that there is.
    """
    from torch._dynamo.exc import InvalidBackend

    try:
        torch._dynamo.lookup_backend(backend)
    except InvalidBackend:
        near = did_you_mean(backend, torch._dynamo.list_backends())
        raise ConfigError(f"compile.backend={backend}: torch knows no backend of that name; {near}") from None


class Compiled:
    """Modules whose forwards were compiled, and a way back to those they had before."""

    def __init__(self, modules: list[Any], eager: list[Any]) -> None:
        self.modules = modules
        # The attribute that a module had as its forward; None: that of its class.
        self._eager = eager
        self._compiled = [module.forward for module in modules]
        self._depth = 0

    def eager(self) -> Eager:
        """A context in which the modules run the forwards they had before; nothing is asked in a call, in it or out of it.

        Graphs stay, and are used again afterwards. Copies of the modules go on with what they were copied with.

        Raises:
            RuntimeError: on entering; a forward was replaced once more since, and would be lost.
        """
        return Eager(self)

    def _swap(self, forwards: list[Any]) -> None:
        for module, forward in zip(self.modules, forwards, strict=True):
            if forward is None:
                vars(module).pop("forward", None)
            else:
                module.forward = forward


class Eager:
    """Puts back what forwards were before they were compiled. May be entered inside itself."""

    __slots__ = ("_of",)

    def __init__(self, of: Compiled) -> None:
        self._of = of

    def __enter__(self) -> None:
        of = self._of
        if not of._depth:
            for module, compiled in zip(of.modules, of._compiled, strict=True):
                if vars(module).get("forward") is not compiled:
                    raise RuntimeError(
                        f"the forward of a {type(module).__name__} was replaced after it was compiled, and would be lost; "
                        "replace forwards before compile_forwards."
                    )
            of._swap(of._eager)
        of._depth += 1

    def __exit__(self, *error: object) -> None:
        of = self._of
        of._depth -= 1
        if not of._depth:
            of._swap(of._compiled)


# torch's own limit for a function: training, evaluation and short last batches take a graph each, some twice.
GRAPHS_PER_KIND = 8
# What a module may add that differs from others of its kind by a number alone: its place in a decoder with a cache, its
# rate of dropped paths. Training and evaluation, each for one size and for any.
GRAPHS_PER_NUMBER = 4


class _Kind:
    """The code of a kind of modules, and the numbers in which its members differ."""

    def __init__(self, code: CodeType) -> None:
        self.code, self.numbers = code, set[Any]()


# By the code as it was written: how many kinds of modules were compiled with it in this process.
_NUMBERS: weakref.WeakKeyDictionary[CodeType, int] = weakref.WeakKeyDictionary()


def code_of_its_kind(function: Any, module: Any, kinds: dict[Any, _Kind]) -> Any:
    """The same function, with a code object that it shares with modules of its kind alone: class, weights, settings.

    `kinds`: those met before in this model. Weights count by name, shape, dtype and whether they train.

    By code object torch counts graphs, and remembers which sizes changed. All blocks of a class share it (with
    checkpointing, all blocks of all models). So the stages of a ResNet-50 would make its image sizes symbols, though each
    stage only ever sees one (slower code, and some that inductor cannot compile: a ConvNeXt's); and its 8 kinds of blocks
    take 8 graphs for training alone, after which torch's limit of 8 lets all else run uncompiled. With code of its own the
    limit is one for each kind, and a storm of recompilations ends there, however deep the model is.

    Modules that differ from their kind by numbers alone stay together, and may have graphs of their own: for those the
    limit of this process is raised; it is never lowered. Another model of the kind, compiled later, has graphs of its own:
    what it breaks and what runs uncompiled is then found again, and told of it, too; the cache on the disk keeps that short.
    torch.compile(isolate_recompiles=True) counts apart, too, but not sizes. torch 2.14.1.
    """
    if not isinstance(function, FunctionType):
        return function
    written = function.__code__
    key, numbers = _kind(module)
    kind = kinds.get((written, key))
    if kind is None:
        # torch remembers sizes by the name, too.
        number = _NUMBERS[written] = _NUMBERS.get(written, 0) + 1
        kind = kinds[written, key] = _Kind(
            written.replace(co_name=f"{written.co_name}_{number}" if number > 1 else written.co_name)
        )
    kind.numbers.add(numbers)
    needed = GRAPHS_PER_KIND + GRAPHS_PER_NUMBER * (len(kind.numbers) - 1)
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, needed)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, needed)
    return with_code(function, kind.code)


def with_code(function: FunctionType, code: CodeType) -> FunctionType:
    """The same function with another code object: torch keeps and counts graphs by that."""
    own = FunctionType(code, function.__globals__, None, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    own.__dict__.update(function.__dict__)
    return own


def _kind(module: Any) -> tuple[Any, Any]:
    """What decides whether two modules share a graph: classes, weights and settings; and, apart, single numbers."""
    settings: list[Any] = []
    numbers: list[Any] = []
    for name, part in module.named_modules():
        settings.append((name, type(part).__module__, type(part).__qualname__))
        for key, value in vars(part).items():
            if type(value) in (int, float):
                numbers.append((name, key, value))
            elif key != "training" and all(
                isinstance(item, int | float | str | torch.dtype | None)
                for item in (value if isinstance(value, tuple) else (value,))
            ):
                settings.append((name, key, value))
    for name, weight in (*module.named_parameters(), *module.named_buffers()):
        settings.append((name, tuple(weight.shape), weight.dtype, weight.requires_grad))
    return tuple(settings), tuple(numbers)
