"""What the live display shows: functions from records to rich text. Imports rich; `terminal.py` imports this late."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.text import Text

from fasttrain.observe import text
from fasttrain.observe.observer import RunInfo

LABEL, BAR, REST, GOOD, WARN, BAD = "dim", "cyan", "bright_black", "green", "yellow", "red"
MARGIN, GAP = "  ", "   "
WIDEST_BAR, NARROWEST_BAR = 48, 8

# The figures below the bar, the most important first: what does not fit is left out from the end.
Item = tuple[str, str]  # label, value
Row = tuple[str, list[Item]]


class Widths:
    """The widest value seen of each figure, so that a shorter one does not move its neighbours."""

    def __init__(self) -> None:
        self._cells: dict[str, int] = {}

    def pad(self, name: str, value: str) -> str:
        """The value, right-aligned in the cells its figure has needed so far."""
        self._cells[name] = max(self._cells.get(name, 0), len(value))
        return value.rjust(self._cells[name])


def progress_lines(
    record: Mapping[str, Any], left: float | None, unit: str, width: int, widths: Widths, ascii_only: bool = False
) -> list[Text]:
    """The live display: a free line, the bar, the figures; a column at least is left free at the right."""
    return [Text(), _bar_line(record, left, width, widths, ascii_only), _figures_line(record, unit, width, widths)]


def waiting_lines(what: str, width: int) -> list[Text]:
    """The live display before the first figures."""
    return [Text(), Text(f"{MARGIN}{what}"[: width - 1], style=LABEL)]


def _bar_line(record: Mapping[str, Any], left: float | None, width: int, widths: Widths, ascii_only: bool) -> Text:
    step, total = record["step"], record["total_steps"]
    if total is None:  # nobody knows how many there will be: no share of them, no time left
        items = [("step", f"{step:,}")]
        if record.get("epoch") is not None:
            items.append(("epoch", widths.pad("epoch", f"{record['epoch']:.2f}")))
        return Text(MARGIN).append_text(_joined(_fitting(items, width - 1 - len(MARGIN))))
    share = min(1.0, step / total) if total else 1.0
    # Rounded down: 100 % stands for done.
    percent = f"{int(share * 100):3d}%"
    items = [("step", f"{step:,}".rjust(len(f"{total:,}")) + f"/{total:,}")]
    if left is not None:
        items.append(("left", widths.pad("left", text.span(left))))
    items.append(("", percent))
    if record.get("epoch") is not None:
        items.append(("epoch", widths.pad("epoch", f"{record['epoch']:.2f}")))
    room = width - 1 - len(MARGIN)
    items = _fitting(items, room - NARROWEST_BAR)
    # Shown in the order of reading, chosen in the order of importance.
    items.sort(key=lambda item: ["", "step", "epoch", "left"].index(item[0]))
    cells = min(WIDEST_BAR, room - sum(_cells(item) for item in items))
    return Text(MARGIN).append_text(bar(share, max(cells, 0), ascii_only)).append_text(_joined(items))


def _figures_line(record: Mapping[str, Any], unit: str, width: int, widths: Widths) -> Text:
    items = [
        ("loss", widths.pad("loss", text.figure(record.get("loss")))),
        ("", widths.pad("speed", text.speed(record, unit))),
        ("lr", text.rate_of_learning(record.get("lr"))),
    ]
    if record.get("memory"):
        items.append(("memory", widths.pad("memory", text.size(record["memory"]))))
    if record.get("refused_steps"):
        items.insert(2, ("refused", f"{record['refused_steps']:g}"))
    if record.get("grad_norm") is not None:
        items.append(("grad norm", widths.pad("grad norm", text.figure(record["grad_norm"]))))
    items = _fitting(items, width - 1 - len(MARGIN))
    order = ["loss", "refused", "lr", "grad norm", "", "memory"]
    items.sort(key=lambda item: order.index(item[0]))
    line = Text(MARGIN)
    return line.append_text(_joined(items, first="")) if items else line


def bar(share: float, cells: int, ascii_only: bool = False) -> Text:
    """A bar in half cells.

    >>> bar(0.5, 4).plain, bar(1.0, 4).plain, bar(0.5, 4, ascii_only=True).plain
    ('━━──', '━━━━', '##--')
    """
    halves = int(share * cells * 2)
    full, half = divmod(halves, 2)
    if ascii_only:
        return Text("#" * full, style=BAR).append("-" * (cells - full), style=REST)
    drawn = Text("━" * full + "╸" * half, style=GOOD if share >= 1 else BAR)
    return drawn.append("─" * (cells - full - half), style=REST)


def _cells(item: Item, gap: str = GAP) -> int:
    label, value = item
    return len(gap) + len(value) + (len(label) + 1 if label else 0)


def _fitting(items: list[Item], room: int) -> list[Item]:
    chosen: list[Item] = []
    for item in items:
        room -= _cells(item)
        if room < 0:
            break
        chosen.append(item)
    return chosen


def _joined(items: Iterable[Item], first: str = GAP, between: str = GAP) -> Text:
    line, gap = Text(), first
    for label, value in items:
        line.append(gap)
        if label:
            line.append(f"{label} ", style=WARN if label == "refused" else LABEL)
        line.append(value)
        gap = between
    return line


# ---- permanent lines


def header(run: RunInfo, width: int) -> Text:
    """What begins."""
    ranks = "1 rank" if run.world_size == 1 else f"{run.world_size} ranks"
    length = [("", f"{run.total_steps:,} steps" if run.total_steps is not None else "to the end of the data")]
    if run.total_steps is None:
        if run.start_step:
            length = [("steps", f"{run.start_step + 1:,} to the end of the data"), ("", "resumed")]
    elif run.start_step >= run.total_steps:
        length = [("", f"all {run.total_steps:,} steps were made before")]
    elif run.start_step:
        length = [("steps", f"{run.start_step + 1:,} to {run.total_steps:,}"), ("", "resumed")]
    if run.steps_per_epoch:
        length.append(("an epoch", f"{run.steps_per_epoch:,}"))
    rows: list[Row] = [
        ("model", [("", run.model), ("", text.parameters(run.parameters, run.trainable)), *_blocks(run)]),
        ("device", [("", run.device), ("", ranks)]),
        ("batch", [("", f"{run.batch_size:,} samples a step")]),
        ("length", length),
    ]
    rows += [("note", [("", note)]) for note in run.notes]
    if run.dir is not None:
        rows.append(("folder", [("", text.near(run.dir))]))
    return _titled(Text(run.name, style="bold").append(f"  {run.id}", style=LABEL), rows, width)


def _blocks(run: RunInfo) -> list[Item]:
    return [("", blocks)] if (blocks := text.blocks(run.blocks)) else []


def event(
    label: str,
    step: int,
    total_steps: int | None,
    items: Iterable[Item],
    width: int,
    *,
    gap: str = GAP,
    style: str = BAR,
) -> Text:
    """An evaluation or a save, as a line that stays; what is too wide goes on below, cut between its figures."""
    line = Text(MARGIN).append(f"{label:<9}", style=style).append("   step ", style=LABEL)
    line.append(f"{step:,}".rjust(0 if total_steps is None else len(f"{total_steps:,}")))
    return _hanging(line.append("   "), items, width, gap)


def _hanging(line: Text, items: Iterable[Item], width: int, gap: str = GAP) -> Text:
    """A line with items at its end; those for which it is too short go on below the first of them."""
    rows: list[list[Item]] = [[]]
    margin = line.cell_len
    room = width - margin + len(gap)
    for item in items:
        room -= _cells(item, gap)
        if room < 0 and rows[-1]:
            rows.append([])
            room = width - margin + len(gap) - _cells(item, gap)
        rows[-1].append(item)
    for i, row in enumerate(rows):
        line.append("\n" + " " * margin if i else "").append_text(_joined(row, first="", between=gap))
    return line


def evaluation(record: Mapping[str, Any], total_steps: int | None, width: int) -> Text:
    """An evaluation's metrics."""
    items = [(name, text.figure(value)) for name, value in record["metrics"].items()]
    return event("evaluated", record["step"], total_steps, [*items, *_took(record)], width)


def save(record: Mapping[str, Any], total_steps: int | None, width: int) -> Text:
    """A checkpoint."""
    items = [("", text.size(record["bytes"]))] if record.get("bytes") is not None else []
    return event("saved", record["step"], total_steps, [*items, *_took(record)], width)


def remark(record: Mapping[str, Any], total_steps: int | None, width: int) -> Text:
    """Something to know; its words are broken where the window ends."""
    words = [("", word) for word in record["text"].split()]
    return event("note", record["step"], total_steps, words, width, gap=" ", style=WARN)


def _took(record: Mapping[str, Any]) -> list[Item]:
    return [("in", text.short_time(record["seconds"]))] if record.get("seconds") is not None else []


STYLES = {"done": GOOD, "stopped": WARN, "failed": BAD}


def ending(
    status: str, summary: Mapping[str, Any], run: RunInfo, width: int, error: BaseException | None = None
) -> Text:
    """What came of the run."""
    get = summary.get
    title = Text().append(status, style=f"bold {STYLES.get(status, '')}")
    if get("steps") is not None:
        title.append(f"  {get('steps'):,} steps")
    if get("wall_s") is not None:
        title.append(f" in {text.span(get('wall_s'))}")
    rows: list[Row] = []
    if error is not None:
        lines = str(error).splitlines()
        rows.append(("error", [("", f"{type(error).__name__}{': ' + lines[0] if lines else ''}")]))
    elif get("reason"):
        rows.append(("reason", [("", str(get("reason")))]))
    if get("final_loss") is not None:
        rows.append(("loss", [("", text.figure(get("final_loss")))]))
    rows.append(("evaluation", [(name, text.figure(value)) for name, value in (get("metrics") or {}).items()]))
    if get("samples_per_s") is not None:
        times = get("step_time_s") or {}
        steps = [(f"step {key}", text.short_time(times[key])) for key in ("p50", "p95") if times.get(key) is not None]
        rows.append(("speed", [("", text.speed(summary, run.unit)), *steps]))
    if get("data_wait_fraction") is not None:
        rows.append(("data wait", [("", f"{get('data_wait_fraction'):.1%} of the step time")]))
    memory = get("peak_memory_bytes") or {}
    rows.append(("peak", [(name, text.size(memory[key])) for key, name in _PEAKS if memory.get(key) is not None]))
    rows.append(("start-up", [(name, text.short_time(get(key))) for key, name in _STARTS if get(key)]))
    if run.dir is not None:
        rows.append(("folder", [("", text.near(run.dir))]))
        rows.append(("curves", [("", f"tensorboard --logdir {text.near(run.dir.parent)}")]))
    return _titled(title, rows, width)


_PEAKS = (("allocated", "allocated"), ("reserved", "reserved"), ("rss", "host"))
_STARTS = (("startup_s", ""), ("compile_s", "compilation"))


def _titled(title: Text, rows: list[Row], width: int) -> Text:
    rows = [(label, items) for label, items in rows if items]
    widest = max(len(label) for label, _ in rows) if rows else 0
    page = Text("\n" + MARGIN).append_text(title)
    for label, items in rows:
        line = Text(MARGIN).append(label.ljust(widest + 2), style=LABEL)
        page.append("\n").append_text(_hanging(line, items, width))
    return page.append("\n")
