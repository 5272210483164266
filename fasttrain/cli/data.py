"""`data`: looks at the data set of a config, and says what is wrong with it."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fasttrain.cli.data_page import page
from fasttrain.cli.data_sheet import contact_sheet
from fasttrain.config import Resolved, load
from fasttrain.data import Data
from fasttrain.data.by_order import ByOrder
from fasttrain.data.data import form, num_samples_of
from fasttrain.data.naming import name_of
from fasttrain.data.order import Order, at_most
from fasttrain.data.survey import Survey, survey
from fasttrain.distributed.world import launched_ranks, leave
from fasttrain.errors import EXIT_DONE, EXIT_FAILED, ConfigError, FasttrainError
from fasttrain.lazy import torch
from fasttrain.observe.defaults import is_terminal
from fasttrain.observe.files import json_line
from fasttrain.trainer.feed import Feed

SECONDS = 2.0  # how long the loader is measured with each number of workers, its start apart
LISTED = 20  # samples named of a kind of fault, on a screen; a class is named by one sample
FEW_LABELS = 1000  # more different whole numbers than this, and half as many as samples: no classes


def data(config: str, overrides: Sequence[str], as_json: bool, out: str | None) -> int:
    """Print what the data holds; returns 0, or 1 where something is wrong with it.

    `out`: the folder of the contact sheet (`runs/data/CONFIG` if not given). `limit_batches` limits what is looked at.

    Raises:
        ConfigError: the config is wrong, or its trainer refuses to build its data.
    """
    resolved = load(config, overrides)
    if resolved.trainer is None:
        raise ConfigError(f"{config}: trainer is not set; name the class, for example trainer: recipes.resnet:ResNet.")
    if launched_ranks() > 1:
        raise ConfigError(
            "data looks with one process, which reads by as many as there are cores; start it without torchrun."
        )
    folder = Path(out) if out is not None else Path(resolved.settings.run.dir or "runs") / "data" / Path(config).stem
    try:
        with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
            report = look(resolved, folder)
    finally:
        leave()
    if as_json:
        sys.stdout.write(json_line(report) + "\n")
    else:
        sys.stdout.write(page(report, is_terminal(sys.stdout), LISTED))
    return EXIT_DONE if report["ok"] else EXIT_FAILED


def look(resolved: Resolved, folder: Path) -> dict[str, Any]:
    """The report as `--json` prints it."""
    kind: Any = resolved.trainer
    trainer = kind.__new__(kind)
    trainer.begin(resolved)  # the data alone: a model is built for the sheet, if augmenting may need it
    settings, given = resolved.settings, trainer.data
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    sources = {"train": given.train} | ({} if given.evaluation is None else {"evaluation": given.evaluation})
    surveys = {
        name: survey(given, source, trainer.label_of, cores if cores > 1 else 0, _looked_at(source, settings))
        for name, source in sources.items()
    }
    if len(surveys["train"].labels) > max(FEW_LABELS, surveys["train"].seen // 2):
        for found in surveys.values():
            found.labels.clear()
    names = getattr(given.train, "classes", getattr(trainer, "classes", None))
    # Labels of a part of the training data do not tell how many classes there are.
    whole = settings.limit_batches is None or surveys["train"].seen == surveys["train"].samples
    telling = [surveys["train"]] if whole else list(surveys.values())
    classes = (
        len(names) if names is not None else max((label for found in telling for label in found.labels), default=-1) + 1
    )
    gc.collect()
    problems = [
        problem for name, found in surveys.items() for problem in _problems(name, found, classes, names, sources[name])
    ]
    twice = _twice(surveys, sources)
    sheet, text = None, None
    try:
        shown = trainer if _needs_no_model(kind) else kind(resolved)
        shown.feed = Feed(_readable(shown.data, surveys["train"]), settings, shown.world)
        sheet, text = contact_sheet(shown, folder, names)
    except FasttrainError as error:
        problems.append(f"no training batch could be made: {error}")
    return {
        "ok": not problems,
        "problems": problems,
        "classes": classes if any(found.labels for found in surveys.values()) else None,
        "class_names": None if names is None else [str(name) for name in names],
        "parts": {name: _as_dict(found) for name, found in surveys.items()},
        "in_both": twice,
        "sheet": None if sheet is None else str(sheet),
        "text": text,
        "loader": _speeds(_readable(given, surveys["train"]), settings.batch_size, cores),
    }


def _needs_no_model(kind: Any) -> bool:
    from fasttrain.trainer import Trainer

    return kind.augment is Trainer.augment


def _problems(part: str, found: Survey, classes: int, names: Any, source: Any) -> list[str]:
    told = [f"{part}: {name} could not be read: {reason}" for _, name, reason in found.broken]
    for label in sorted(found.labels):
        if not 0 <= label < classes:
            told.append(
                f"{part}: label {label} is outside of 0 to {classes - 1}, in {found.labels[label]:,} samples, the first "
                f"{found.names[label]}"
            )
    if found.labels and found.seen == found.samples:
        for label in range(classes):
            if label not in found.labels:
                called = f" ({names[label]})" if names is not None else ""
                told.append(f"{part}: class {label}{called} has no sample")
    told += [
        f"{part}: {entry.nonfinite:,} values of {name} are not finite"
        for name, entry in found.entries.items()
        if entry.nonfinite
    ]
    return told


def _twice(surveys: dict[str, Survey], sources: dict[str, Any]) -> dict[str, Any] | None:
    """Samples that training and evaluation share, where samples can be told apart."""
    if "evaluation" not in surveys or not all(found.prints for found in surveys.values()):
        return None
    train, held_out = surveys["train"].prints, surveys["evaluation"].prints
    both = [digest for digest in held_out if digest in train]
    pairs = [
        [name_of(sources["train"], train[digest]), name_of(sources["evaluation"], held_out[digest])]
        for digest in both[:LISTED]
    ]
    return {"count": len(both), "first": pairs}


def _as_dict(found: Survey) -> dict[str, Any]:
    entries = {}
    for name, entry in found.entries.items():
        lengths = sorted((shape[0], count) for shape, count in entry.shapes.items() if shape)
        entries[name] = {
            "dtype": entry.dtype,
            "shapes": [[list(shape), count] for shape, count in entry.shapes.most_common(8)],
            "different_shapes": len(entry.shapes),
            "range": [entry.low, entry.high],
            "lengths": _histogram(lengths) if len(entry.shapes) > 1 else None,
        }
    return {
        "samples": found.samples,
        "looked_at": found.seen,
        "entries": entries,
        "labels": {str(label): found.labels[label] for label in sorted(found.labels)} or None,
        "broken": [{"name": name, "reason": reason} for _, name, reason in found.broken],
        "repeated": found.repeated if found.prints else None,
    }


def _histogram(lengths: list[tuple[int, int]], bins: int = 10) -> list[list[int]]:
    """`[from, to, samples]` for ranges of equal width over sizes along dim 0 with how often they come."""
    low, high = lengths[0][0], lengths[-1][0]
    width = max(1, -(-(high - low + 1) // bins))
    counts = [[start, min(start + width - 1, high), 0] for start in range(low, high + 1, width)]
    for length, count in lengths:
        counts[(length - low) // width][2] += count
    return counts


def _readable(given: Data, found: Survey) -> Data:
    """The training data without what cannot be read: a sheet is drawn and reading is measured all the same."""
    if not found.broken or found.samples is None:
        return given
    left_out = {index for index, _, _ in found.broken}
    kept = [index for index in range(found.samples) if index not in left_out]
    return replace(given, train=torch.utils.data.Subset(given.train, kept), size_at=None)


def _looked_at(source: Any, settings: Any) -> int | None:
    """How many samples `limit_batches` leaves of a source; None: all."""
    limit, batch_size, size = settings.limit_batches, settings.batch_size, num_samples_of(source)
    if limit is None or (limit < 1 and size is None):
        return None
    return batch_size * (int(limit) if size is None else max(1, at_most(limit, -(-size // batch_size))))


def _speeds(given: Data, batch_size: int, cores: int) -> list[dict[str, Any]]:
    """Samples a second of the training data as the run reads it, by number of workers."""
    if form(given.train) == "batches":
        return []
    size = num_samples_of(given.train)
    assert size is not None
    numbers = (
        [0] if form(given.train) == "tensors" else sorted({0, 1, cores, *(1 << i for i in range(10) if 1 << i < cores)})
    )
    told = []
    for workers in numbers:
        order = Order(size=size, batch_size=batch_size, seed=0, shuffle=given.shuffle)
        reader = ByOrder(replace(given, num_workers=workers), given.train, order, 0, 1)
        told.append({"workers": workers, "samples_per_s": _rate(reader)})
        gc.collect()  # or the next workers, which are forks, inherit the last of these and end them
    return told


def _rate(reader: ByOrder) -> float:
    from fasttrain.data.reading import Position

    portions = reader.portions(Position())
    try:
        next(portions)
        began, samples = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - began) < SECONDS:
            samples += next(portions).here
        return samples / elapsed
    finally:
        portions.close()  # pyright: ignore[reportAttributeAccessIssue]
