"""`status RUN`: how a run is doing, read from its folder; works while it runs, and after it was killed."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fasttrain.checkpoint.folder import checkpoints_in
from fasttrain.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, EXIT_WRONG_REQUEST, ConfigError, did_you_mean
from fasttrain.observe import metrics_file, summary_file, text
from fasttrain.observe.process import has_died

EXIT_CODES = {
    "running": EXIT_DONE,
    "done": EXIT_DONE,
    "stopped": EXIT_STOPPED,
    "failed": EXIT_FAILED,
    "died": EXIT_FAILED,
}
RUNS = Path("runs")
# The last lines of metrics.jsonl are looked for in so many bytes at its end.
TAIL = 1 << 20


def status(run: Path, as_json: bool) -> int:
    """Print how a run is doing; returns 0 (running, done), 75 (stopped), 1 (failed, died) or 2 (no such run).

    `run` is a run folder, `runs/<name>` or `<name>` (its newest run), or a config (the newest run of its name).
    """
    try:
        report = inspect(find_run(run))
    except ConfigError as error:
        if as_json:
            print(json.dumps({"status": None, "error": str(error)}))
        else:
            print(error, file=sys.stderr)
        return EXIT_WRONG_REQUEST
    print(json.dumps(report, ensure_ascii=False) if as_json else "\n".join(_lines(report)))
    return EXIT_CODES.get(report["status"], EXIT_FAILED)


# ---- which run


def find_run(run: Path, command: str = "status") -> Path:
    """The run folder that is meant: itself, the newest of a name, or the newest that a config made.

    Raises:
        ConfigError: there is no such run; the message names the nearest one.
    """
    if run.is_file() and run.suffix in (".yaml", ".yml"):
        run = _home_of(run)
    elif run.is_file():
        raise ConfigError(f"{command} of {run}: a file is no run; give its folder, or a config (.yaml).")
    if not run.exists() and (RUNS / run).is_dir():
        run = RUNS / run
    if _is_run(run):
        return run
    runs = [path for path in _folders(run) if _is_run(path)]
    if runs:
        return max(runs, key=lambda path: (_started_at(path), path.name))
    raise ConfigError(f"{command} of {run}: there is no run in it; {_suggestion(run)}")


def _home_of(config: Path) -> Path:
    # A run's own config.yaml means that run.
    if _is_run(config.parent) and config.name == "config.yaml":
        return config.parent
    from fasttrain.config import load

    settings = load(config).settings.run
    name = settings.name or config.stem  # as a run is named that is started from it
    if settings.dir is None:
        raise ConfigError(f"status of {config}: it sets run.dir=null, so its runs leave no folder; set run.dir.")
    home = Path(settings.dir) / name
    return home / settings.id if settings.id is not None else home


def _is_run(path: Path) -> bool:
    return (path / summary_file.NAME).is_file()


def _folders(path: Path) -> list[Path]:
    return [item for item in path.iterdir() if item.is_dir()] if path.is_dir() else []


def _started_at(run: Path) -> float:
    return float(summary_file.read_summary(run).get("started_at") or (run / summary_file.NAME).stat().st_mtime)


def _suggestion(run: Path) -> str:
    # A mistyped id has its neighbours beside it, a mistyped name has them one floor up, or in `runs`.
    known: dict[str, str] = {}
    for home in (run, run.parent, run.parent.parent, RUNS):
        for folder in _folders(home):
            if _is_run(folder) or any(_is_run(inner) for inner in _folders(folder)):
                known.setdefault(folder.name, text.near(folder))
    if not known:
        return "no run was found beside it either; a run writes runs/<name>/<id> when it starts."
    names = [name for name in known if name != run.name] or list(known)
    answer = did_you_mean(run.name, names)
    near = next((name for name in names if answer == f"did you mean '{name}'?"), None)
    return f"did you mean '{known[near]}'?" if near else f"runs are in: {', '.join(sorted(known.values()))}"


# ---- how it is doing


def inspect(run: Path, now: float | None = None) -> dict[str, Any]:
    """The state of a run as one JSON object; what nobody can tell is null."""
    now = time.time() if now is None else now
    summary = summary_file.read_summary(run)
    last, evaluation = _last_lines(run / metrics_file.NAME)
    state = summary.get("status") or "failed"
    gone = has_died(summary)
    if state == "running" and gone:
        state = "died"
    checkpoints = checkpoints_in(run)
    metrics = summary.get("metrics") or {}
    if state in ("running", "died") and evaluation:
        metrics = evaluation
    # While it runs the log is ahead of the summary; at the end the summary knows more.
    is_over = state in ("done", "stopped", "failed")
    report = {
        "run": str(run),
        "status": state,
        "step": summary.get("steps") if is_over else _newer(last.get("step"), summary.get("steps")),
        "total_steps": summary.get("total_steps") or last.get("total_steps"),
        "loss": summary.get("final_loss") if is_over else last.get("loss"),
        "metrics": metrics,
        "samples_per_s": summary.get("samples_per_s") if is_over else last.get("samples_per_s"),
        "step_time_s": summary.get("step_time_s") if is_over else last.get("step_time_s"),
        "last_line_age_s": _age(run, now),
        "checkpoints": len(checkpoints),
        "newest_checkpoint": str(checkpoints[-1].path) if checkpoints else None,
        "host": summary.get("host"),
        "pid": summary.get("pid"),
        "alive": None if gone is None else not gone,
        "reason": summary.get("reason"),
        "error": summary.get("error"),
        "resume": None,
    }
    if state in ("stopped", "failed", "died"):
        report["resume"] = resume_command(run, summary)
    return report


def resume_command(run: Path, summary: Mapping[str, Any]) -> str:
    """What to type to take the run up again."""
    ranks = summary.get("world_size") or 1
    program = "python" if ranks == 1 else f"torchrun --nproc-per-node {ranks}"
    return f"{program} -m fasttrain --config {shlex.quote(str(run / 'config.yaml'))} resume=auto run.id={run.name}"


def _newer(one: int | None, other: int | None) -> int | None:
    return max((step for step in (one, other) if step is not None), default=None)


def _age(run: Path, now: float) -> float | None:
    """Seconds since the run wrote its last figures."""
    for name in (metrics_file.NAME, summary_file.NAME):
        path = run / name
        if path.exists() and path.stat().st_size:
            return max(0.0, now - path.stat().st_mtime)
    return None


def _last_lines(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The newest logged step and the metrics of the newest evaluation, read from the end of the file."""
    step: dict[str, Any] = {}
    evaluation: dict[str, Any] = {}
    for record in _backwards(path):
        if "evaluation" in record:
            evaluation = evaluation or record["evaluation"]
        else:
            step = step or record
        if step and evaluation:
            break
    return step, evaluation


def _backwards(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL))
            tail = file.read()
    except OSError:
        return
    for line in reversed(tail.splitlines(keepends=True)):
        record = metrics_file.parse(line)
        if record is not None:
            yield record


# ---- for people


def _lines(report: Mapping[str, Any]) -> list[str]:
    state, step, total = report["status"], report["step"], report["total_steps"]
    progress = f"step {step if step is not None else text.UNKNOWN}"
    if total:
        progress += f"/{total}" + (f" ({step / total:.0%})" if step is not None else "")
    rows = [("run", report["run"]), ("status", state), ("progress", progress)]
    rows.append(("loss", text.figure(report["loss"])))
    if report["metrics"]:
        rows.append(("metrics", "  ".join(f"{name} {text.figure(v)}" for name, v in report["metrics"].items())))
    step_time = report["step_time_s"]
    if isinstance(step_time, Mapping):
        step_time = step_time.get("p50")
    if report["samples_per_s"] is not None:
        rows.append(("speed", f"{text.rate(report['samples_per_s'])} samples/s, {text.short_time(step_time)} a step"))
    if report["last_line_age_s"] is not None:
        rows.append(("last line", f"{text.span(report['last_line_age_s'])} ago"))
    newest = f", newest {Path(report['newest_checkpoint']).name}" if report["newest_checkpoint"] else ""
    rows.append(("checkpoints", f"{report['checkpoints']}{newest}"))
    if state == "running":
        unseen = "" if report["alive"] else " (another host: whether it still lives cannot be seen from here)"
        rows.append(("process", f"{report['pid']} on {report['host']}{unseen}"))
    if state == "died":
        rows.append(("process", f"{report['pid']} on {report['host']} is gone, without a word"))
    if state == "stopped" and report["reason"]:
        rows.append(("reason", report["reason"]))
    if state == "failed" and (report["error"] or report["reason"]):
        rows.append(("error", (report["error"] or report["reason"]).splitlines()[0]))
    if report["resume"]:
        rows.append(("resume", report["resume"]))
    return [f"{label:<12} {value}" for label, value in rows]
