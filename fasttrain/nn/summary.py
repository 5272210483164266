"""What a model is made of: parts, parameters, and the FLOPs of a forward, without computing anything."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

# What a forward computes outside of every part: a loss, an output layer that is a function of an embedding.
ELSEWHERE = "elsewhere"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A part of a model, or a run of neighbours of one class. A parameter is counted in the first row that holds it.

    `times`: how many neighbours. `tied`: elements of parameters that an earlier row counts. `flops`: forward, of one
    sample; None where they were not counted. `share`: of all FLOPs, or else of all parameters.
    """

    name: str
    kind: str
    times: int = 1
    parameters: int = 0
    trainable: int = 0
    tied: int = 0
    flops: int | None = None
    share: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Rows in the order of registration, and their sums. `not_counted`: why there are no FLOPs."""

    kind: str
    rows: list[Row] = field(default_factory=list)
    parameters: int
    trainable: int
    blocks: int
    flops: int | None = None
    not_counted: str | None = None


def summarize(
    model: nn.Module,
    blocks: Sequence[nn.Module] = (),
    run: Callable[[nn.Module], Any] | None = None,
    samples: int = 1,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Summary:
    """The parts of a model: its blocks, and what stands beside them; neighbours of one class are one row.

    `run(model)` is one forward over `samples` samples, inside of `around()`. It is made on fake tensors and on a fake
    copy of the model, so that nothing is computed, no memory is needed, and the model stays as it is. A FLOP is a
    multiplication or an addition in a matrix product, a convolution or attention, as torch counts them; the rest is free.
    A model that reads values of tensors (detection) cannot be run so, which `not_counted` then says.
    """
    parts = dict(_parts(model, {id(block) for block in blocks}))
    flops, total, why = {}, None, None
    if run is not None:
        try:
            flops, total = _count(model, list(parts), run, around)
        except Exception as error:  # whatever a model's own code raises on tensors without values
            why = f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}"
    rows = _rows(parts, flops if total is not None else None, samples)
    if total is not None and (rest := total - sum(flops.values())) > 0:
        rows.append(Row(name="", kind=ELSEWHERE, flops=rest // samples))
    rows = _folded(rows, {name for name, part in parts.items() if isinstance(part, nn.Module)})
    whole = total / samples if total else sum(row.parameters for row in rows)
    own = [row.flops or 0 if total else row.parameters for row in rows]
    return Summary(
        kind=type(model).__name__,
        rows=[replace(row, share=part / whole if whole else 0.0) for row, part in zip(rows, own, strict=True)],
        parameters=sum(row.parameters for row in rows),
        trainable=sum(row.trainable for row in rows),
        blocks=len(blocks),
        flops=None if total is None else total // samples,
        not_counted=why,
    )


def _parts(module: nn.Module, blocks: set[int], prefix: str = "") -> Iterator[tuple[str, nn.Module | nn.Parameter]]:
    """Blocks, modules that hold none, and parameters that belong to a module that is opened; by name."""
    for name, parameter in module.named_parameters(recurse=False):
        yield prefix + name, parameter
    for name, child in module.named_children():
        is_opened = id(child) not in blocks and any(id(part) in blocks for part in child.modules())
        if is_opened:
            yield from _parts(child, blocks, f"{prefix}{name}.")
        else:
            yield prefix + name, child


def _count(
    model: nn.Module,
    names: list[str],
    run: Callable[[nn.Module], Any],
    around: Callable[[], AbstractContextManager[Any]],
) -> tuple[dict[str, int], int]:
    """FLOPs of a forward by part, and in all."""
    # The batch and what a model makes by itself may be real; they become fake when they are used.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(mode):
        fake = copy.deepcopy(model)
    flops = dict.fromkeys(names, 0)
    began: dict[str, int] = {}
    counter = FlopCounterMode(display=False)
    for name in names:
        part = _at(fake, name)
        if isinstance(part, nn.Module):
            part.register_forward_pre_hook(lambda *_, name=name: began.update({name: counter.get_total_flops()}))

            def ended(*_: Any, name: str = name) -> None:
                flops[name] += counter.get_total_flops() - began[name]

            part.register_forward_hook(ended)
    # Attention by its two products, which are counted on every device; compiled blocks by their own code.
    whole_attention, uncompiled = sdpa_kernel(SDPBackend.MATH), torch.compiler.set_stance("force_eager")
    with torch.no_grad(), mode, uncompiled, whole_attention, around(), counter:
        run(fake)
    return flops, counter.get_total_flops()


def _at(model: nn.Module, name: str) -> Any:
    parent, _, last = name.rpartition(".")
    return getattr(model.get_submodule(parent), last)


def _rows(parts: dict[str, nn.Module | nn.Parameter], flops: dict[str, int] | None, samples: int) -> list[Row]:
    rows, seen = [], set()
    for name, part in parts.items():
        held = list(part.parameters()) if isinstance(part, nn.Module) else [part]
        new = [parameter for parameter in held if id(parameter) not in seen]
        seen.update(map(id, held))
        rows.append(
            Row(
                name=name,
                kind=type(part).__name__,
                parameters=sum(parameter.numel() for parameter in new),
                trainable=sum(parameter.numel() for parameter in new if parameter.requires_grad),
                tied=sum(parameter.numel() for parameter in held) - sum(parameter.numel() for parameter in new),
                flops=None if flops is None else flops[name] // samples,
            )
        )
    return rows


def _folded(rows: list[Row], modules: set[str]) -> list[Row]:
    """Neighbours of one class in one list as one row: `layer1.0-2`."""
    folded: list[Row] = []
    firsts: list[str] = []
    for row in rows:
        last = folded[-1] if folded else None
        if last is None or row.kind != last.kind or row.name not in modules or not _follows(firsts[-1], row.name):
            folded.append(row)
            firsts.append(row.name)
            continue
        number = re.findall(r"\d+", row.name)[-1]
        folded[-1] = replace(
            last,
            name=f"{firsts[-1]}-{number}",
            times=last.times + 1,
            parameters=last.parameters + row.parameters,
            trainable=last.trainable + row.trainable,
            tied=last.tied + row.tied,
            flops=None if last.flops is None or row.flops is None else last.flops + row.flops,
        )
    return folded


def _follows(first: str, name: str) -> bool:
    """Whether two names differ in the number at their end alone."""
    stem, number = re.fullmatch(r"(.*?)(\d*)", first).groups()  # pyright: ignore[reportOptionalMemberAccess]
    return bool(number) and re.fullmatch(re.escape(stem) + r"\d+", name) is not None
