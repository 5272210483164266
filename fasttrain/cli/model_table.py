"""`explain --model`: the parts of a trainer's model as a table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from fasttrain.config import Resolved
from fasttrain.errors import ConfigError
from fasttrain.observe import text
from fasttrain.trainer.account import blocks_of

if TYPE_CHECKING:
    from fasttrain.nn.summary import Summary

# Figures to the right of name and class need so much.
FIGURES = 42
FLOPS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@contextmanager
def built(resolved: Resolved, config: str) -> Iterator[Any]:
    """The trainer that a config describes, to look at; ranks are left afterwards.

    Raises:
        ConfigError: the config names no trainer, or the trainer refuses it.
    """
    from fasttrain.distributed.world import leave

    if resolved.trainer is None:
        raise ConfigError(f"{config}: trainer is not set; name the class, for example trainer: recipes.resnet:ResNet.")
    try:
        yield resolved.trainer(resolved)
    finally:
        leave()


def summary_of(resolved: Resolved, config: str) -> Summary:
    """Build the trainer that a config describes, and look at its model with one batch of its data.

    Raises:
        ConfigError: the config names no trainer, or the trainer refuses it.
    """
    from fasttrain.nn.summary import summarize

    with built(resolved, config) as trainer:
        batch = next(trainer.feed.training(trainer.task, trainer.plan))
        samples = trainer.task.samples(batch)

        def run(model: Any) -> Any:
            own, trainer.model = trainer.model, model
            try:
                return trainer.compute_loss(batch)
            finally:
                trainer.model = own

        def around() -> AbstractContextManager[Any]:
            return trainer.plan.forward()

        return summarize(trainer.model, blocks_of(trainer), run, samples, around)


def table(summary: Summary, width: int = 80) -> str:
    """The summary as lines of at most `width` columns, ASCII but for ×."""
    rows = [row for row in summary.rows if row.parameters or row.tied or row.flops]
    kinds = [row.kind + (f" ×{row.times}" if row.times > 1 else "") for row in rows]
    kind_width = min(max(map(len, [*kinds, summary.kind, "class"])), 24)
    name_width = max(12, min(max(len(row.name) for row in rows), width - FIGURES - kind_width - 2)) if rows else 12
    lines = [
        f"{'part':{name_width}}  {'class':{kind_width}}{'parameters':>12}{'trainable':>11}{'FLOPs':>10}{'share':>8}".rstrip()
    ]
    for row, kind in zip(rows, kinds, strict=True):
        held = "tied" if row.tied and not row.parameters else text.count(row.parameters)
        trains = "all" if row.trainable == row.parameters else text.count(row.trainable)
        lines.append(
            f"{_cut(row.name, name_width):{name_width}}  {_cut(kind, kind_width):{kind_width}}{held:>12}"
            f"{'' if not row.parameters else trains:>11}{flops(row.flops):>10}{row.share:>8.1%}"
        )
    trains = "all" if summary.trainable == summary.parameters else text.count(summary.trainable)
    lines.append(
        f"{'in all':{name_width}}  {_cut(summary.kind, kind_width):{kind_width}}{text.count(summary.parameters):>12}"
        f"{trains:>11}{flops(summary.flops):>10}"
    )
    if summary.not_counted is None:
        lines.append("FLOPs: a forward of one sample; share: of these.")
    else:
        lines.append(_cut(f"FLOPs: not counted: {summary.not_counted}", width, end=True))
        lines.append("share: of the parameters.")
    return "\n".join(lines) + "\n"


def flops(value: int | None) -> str:
    """A number of FLOPs in short.

    >>> flops(8_178_368_512), flops(500), flops(0), flops(None)
    ('8.18 G', '500', '0', '-')
    """
    if value is None:
        return text.UNKNOWN
    for size, letter in FLOPS:
        if value >= size:
            return f"{value / size:.3g} {letter}" if value < 999.5 * size else f"{value / size:,.0f} {letter}"
    return str(value)


def _cut(name: str, width: int, end: bool = False) -> str:
    """A text of at most `width` columns; of a name its end tells most."""
    if len(name) <= width:
        return name
    return f"{name[: width - 3]}..." if end else f"...{name[3 - width :]}"
