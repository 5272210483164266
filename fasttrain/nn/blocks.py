"""Find the repeated blocks of a model: what checkpointing, compiling and sharding take as a unit."""

from __future__ import annotations

import difflib
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from fasttrain.errors import ConfigError
from fasttrain.lazy import nn


def find_blocks(model: Any) -> list[Any]:
    """The outermost repeated modules of a model, in order of registration: residual blocks, transformer layers.

    1. A candidate is an entry of a `ModuleList`, `ModuleDict` or `Sequential` that holds two or more weight matrices
       and whose class stands at least twice in such lists; in a `ModuleList` once is enough (ALBERT, a model of one
       layer). Layers of torch.nn are none, however often they stand there; a plain `Sequential` is one where others
       are made of the same classes.
    2. A class of which no two members are alike in shape, and which holds most of its parameters in other candidates,
       is a stage (`ConvNeXtStage`), and is opened. Members that are alike are blocks, whatever is repeated inside them
       (experts).
    3. Where what was found holds less than half of the parameters, attributes of a module count as its lists do
       (`inception3a`, `inception3b`), but for those around or inside of what was found.
    4. Where nothing was found, one matrix with company is enough (a `Sequential` of a linear layer and an activation).

    Nothing is run, so shapes on the meta device do.

    Raises:
        ConfigError: nothing repeats.
    """
    found = _repeated(model)
    if 2 * _size(found) < _size([model]):
        found = _with_attributes(model, found)
    found = found or _repeated(model, matrices=1)
    if not found:
        raise ConfigError(
            f"no repeated blocks were found in {type(model).__name__}; override blocks(model) in the Trainer and "
            "return the modules to take as units, or name them: blocks=[layer1.*, layer2.*]."
        )
    return found


def named_blocks(model: Any, patterns: Sequence[str]) -> list[Any]:
    """The modules whose names match a pattern, in order of registration.

    `*`, `?` and `[...]` stand for a part of a name between two dots: `layer1.*` is each child of `layer1`, and nothing
    inside these.

    Raises:
        ConfigError: a pattern matches nothing, or a list that has no forward, or a module inside of another one.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    chosen: set[str] = set()
    for pattern in patterns:
        names = [name for name in modules if name and _matches(name, pattern)]
        if not names:
            raise ConfigError(
                f"blocks={pattern}: no module of {type(model).__name__} has such a name; {_hint(model, pattern)}"
            )
        for name in names:
            if isinstance(modules[name], nn.ModuleList | nn.ModuleDict) and not _has_forward(modules[name]):
                kind = type(modules[name]).__name__
                raise ConfigError(f"blocks={pattern}: '{name}' is a {kind}, which is never called itself; use {name}.*")
        chosen.update(names)
    found = list({id(modules[name]): modules[name] for name in modules if name in chosen}.values())
    inside = {id(part): block for block in found for part in block.modules() if part is not block}
    for name in modules:
        if name in chosen and id(modules[name]) in inside:
            outer = next(n for n in chosen if modules[n] is inside[id(modules[name])])
            raise ConfigError(f"blocks: '{name}' lies inside of '{outer}', which is chosen too; name one of the two.")
    return found


def names_of(model: Any, modules: Iterable[Any]) -> list[str]:
    """The names that modules have in a model."""
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(module)] for module in modules]


def _repeated(model: Any, matrices: int = 2) -> list[Any]:
    """Blocks among the entries of lists."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)]
    members: dict[Any, list[Any]] = defaultdict(list)
    times: dict[Any, int] = defaultdict(int)
    for container in lists:
        # Not children(): one block that is run several times may stand in a list several times.
        for child in container._modules.values():
            if child is not None and _is_block(child, matrices):
                kind = _kind(child)
                times[kind] += 2 if isinstance(container, nn.ModuleList) else 1
                members[kind].append(child)
    kinds = {kind for kind in members if times[kind] > 1}
    return _outermost(model, _without_stages(kinds, members), {id(container) for container in lists})


def _with_attributes(model: Any, found: list[Any]) -> list[Any]:
    """What was found, and modules whose class stands at least twice among the attributes of one module."""
    blocks = {id(block) for block in found}
    taken = {id(part) for block in found for part in block.modules()}
    # What holds a block is not one itself: the two equal towers of a model stay open.
    taken |= {id(module) for module in model.modules() if any(id(part) in blocks for part in module.modules())}
    members: dict[Any, list[Any]] = defaultdict(list)
    times: dict[Any, int] = defaultdict(int)
    for module in model.modules():
        children = [child for child in module.children() if id(child) not in taken and _is_block(child, 2)]
        counts = Counter(map(_kind, children))
        for child in children:
            times[_kind(child)] = max(times[_kind(child)], counts[_kind(child)])
            members[_kind(child)].append(child)
    kinds = _without_stages({kind for kind in members if times[kind] > 1}, members)

    def walk(module: Any) -> Iterator[Any]:
        for child in module.children():
            if id(child) in blocks or (_kind(child) in kinds and id(child) not in taken):
                yield child
            else:
                yield from walk(child)

    return _once(walk(model))


def _without_stages(kinds: set[Any], members: dict[Any, list[Any]]) -> set[Any]:
    """The kinds that are no stages: groups of blocks that all differ, and consist of smaller blocks."""
    stages = set()
    for kind in kinds:
        group = _once(members[kind])
        parts = [part for member in group for part in member.modules() if part is not member]
        inner = [part for part in parts if (own := _kind(part)) != kind and own in kinds]
        if kind[0] is not nn.Sequential:  # which has no class of its own, so that it is a branch of a block rather
            inner = [part for part in inner if type(part) is not nn.Sequential]
        is_stage = 2 * _size(inner) > _size(group) and not _any_alike(group)
        if is_stage or (kind[0] is nn.Sequential and inner):
            stages.add(kind)
    return kinds - stages


def _any_alike(group: list[Any]) -> bool:
    """Whether two of these have more than half of their parameters in common, by name and shape."""
    shapes = [{(name, parameter.shape) for name, parameter in member.named_parameters()} for member in group]
    return any(2 * len(a & b) > max(len(a), len(b)) for a, b in itertools.combinations(shapes, 2))


def _outermost(model: Any, kinds: set[Any], lists: set[int]) -> list[Any]:
    def walk(module: Any) -> Iterator[Any]:
        for child in module.children():
            if id(module) in lists and _kind(child) in kinds:
                yield child
            else:
                yield from walk(child)

    return _once(walk(model))


def _kind(module: Any) -> Any:
    """What counts as the same: the class, and for a plain Sequential the classes it is made of, too."""
    return (type(module), *(map(type, module) if type(module) is nn.Sequential else ()))


def _is_block(module: Any, matrices: int) -> bool:
    kind = type(module)
    if issubclass(kind, nn.ModuleList | nn.ModuleDict):
        return False
    is_layer = kind.__module__.startswith("torch.nn.") and not kind.__name__.startswith("Transformer")
    if is_layer and kind is not nn.Sequential:
        return False
    has_parts = any(True for _ in module.children())
    return has_parts and sum(parameter.dim() > 1 for parameter in module.parameters()) >= matrices


def _size(modules: Iterable[Any]) -> int:
    """Elements of all parameters of these modules, each parameter once."""
    return sum({id(p): p.numel() for module in modules for p in module.parameters()}.values())


def _once(modules: Iterable[Any]) -> list[Any]:
    return list({id(module): module for module in modules}.values())


def _has_forward(module: Any) -> bool:
    return type(module).forward is not nn.Module.forward


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _hint(model: Any, pattern: str) -> str:
    """Names that would do: those near to what was written, and the blocks that are found without a name."""
    names = [name for name, _ in model.named_modules() if name]
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.6)
    told = f"near it: {', '.join(near)}" if near else ""
    try:
        found = names_of(model, find_blocks(model))
    except ConfigError:
        return told or f"its parts: {', '.join(name for name, _ in model.named_children())}"
    parents = dict.fromkeys(name.rpartition(".")[0] for name in found)
    listed = ", ".join(f"{parent}.*" if parent else "*" for parent in parents)
    return f"use {listed}" + (f"; {told}" if told else "")
