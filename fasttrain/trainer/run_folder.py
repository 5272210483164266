"""Which folder a run writes to, and which earlier run it takes up. Decided on rank 0, the same on every rank."""

from __future__ import annotations

import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasttrain.checkpoint import Checkpoint, checkpoints_in, newest
from fasttrain.config.settings import Settings
from fasttrain.distributed.world import World
from fasttrain.errors import CheckpointError, ConfigError
from fasttrain.observe.process import has_died
from fasttrain.observe.summary_file import read_summary


@dataclass(frozen=True)
class RunFolder:
    """A run's place. `checkpoint`: where it is taken up. `finished`: it is done already, nothing is to do."""

    dir: Path | None
    name: str
    id: str
    checkpoint: Checkpoint | None = None
    finished: bool = False


def status_of(run: Path) -> str | None:
    """What `summary.json` of a run folder says: done, stopped, failed, running; `None` without one."""
    return read_summary(run).get("status")


def _writer(run: Path) -> int | None:
    """The process on this host that writes a run folder now, if another one does."""
    summary = read_summary(run)
    alive = summary.get("status") == "running" and has_died(summary) is False and summary["pid"] != os.getpid()
    return summary["pid"] if alive else None


def choose(settings: Settings, default_name: str, world: World) -> RunFolder:
    """The folder of this run.

    Raises:
        ConfigError: what should be resumed is not there, or a new run would write over an old one.
    """
    if world.size == 1:
        return _choose(settings, default_name)
    chosen: Any = None
    if world.is_main:
        try:
            chosen = _choose(settings, default_name)
        except (ConfigError, CheckpointError) as error:
            chosen = error
    chosen = world.agree(chosen)
    if isinstance(chosen, Exception):
        raise chosen
    return chosen


def _choose(settings: Settings, default_name: str) -> RunFolder:
    run = settings.run
    name = run.name or default_name
    if run.dir is None:
        if settings.resume is not None:
            raise ConfigError(f"resume={settings.resume} with run.dir=null: there is no run folder; set run.dir.")
        return RunFolder(None, name, run.id or _stamp())
    home = Path(run.dir) / name
    if settings.resume == "auto":
        found = home / run.id if run.id else _newest_unfinished(home)
        if found is not None and found.is_dir():
            return _taken_up(found, name)
    elif settings.resume is not None:
        return _from_path(Path(settings.resume))
    return _new(home, name, run.id)


def _newest_unfinished(home: Path) -> Path | None:
    runs = [path for path in home.iterdir() if path.is_dir()] if home.is_dir() else []
    if not runs:
        return None
    newest_run = max(runs, key=lambda path: (path.stat().st_ctime_ns, path.name))
    unfinished = [path for path in runs if status_of(path) != "done" and _writer(path) is None]
    if not unfinished:
        return newest_run if status_of(newest_run) == "done" else None
    return max(unfinished, key=lambda path: (_started(path), path.name))


def _started(run: Path) -> float:
    environment = run / "environment.json"
    return (environment if environment.exists() else run).stat().st_mtime


def _taken_up(path: Path, name: str) -> RunFolder:
    _refuse_two_writers(path)
    return RunFolder(path, name, path.name, _whole(path), finished=status_of(path) == "done")


def _whole(run: Path) -> Checkpoint | None:
    """The checkpoint to go on from; says so where that is not the last one."""
    found, last = newest(run), max(checkpoints_in(run), default=None)
    if found is not None and last is not None and found != last:
        absent = ", ".join(last.missing)
        sys.stderr.write(
            f"{last.path} is damaged ({absent} is not there or was cut short); going on from {found.path}.\n"
        )
    return found


def _from_path(path: Path) -> RunFolder:
    if path.name.startswith("step-") and path.parent.name == "checkpoints":
        run, checkpoint = path.parent.parent, Checkpoint(int(path.name.removeprefix("step-")), path)
    else:
        inside = None if (path / "checkpoints").is_dir() else _newest_unfinished(path)
        run = path if inside is None else inside  # the folder of a name stands for the newest unfinished run in it
        checkpoint = _whole(run)
    if checkpoint is None or not checkpoint.path.is_dir():
        raise ConfigError(
            f"resume={path}: there is no checkpoint; give a run folder, one of its checkpoints/step-N, or resume=auto."
        )
    _refuse_two_writers(run)
    return RunFolder(run, run.parent.name, run.name, checkpoint)


def _refuse_two_writers(run: Path) -> None:
    writer = _writer(run)
    if writer is not None:
        raise ConfigError(
            f"{run} is being written by process {writer} now; stop that first (kill {writer}), or start another run."
        )


def _new(home: Path, name: str, asked: str | None) -> RunFolder:
    try:
        return _made(home, name, asked)
    except OSError as error:
        raise ConfigError(
            f"run.dir={home.parent}: no run folder can be made in it ({error.strerror or error}: {error.filename}); choose "
            "another with run.dir=PATH, or write nothing with run.dir=null."
        ) from error


def _made(home: Path, name: str, asked: str | None) -> RunFolder:
    home.mkdir(parents=True, exist_ok=True)
    if asked is not None:
        path = home / asked
        if path.exists() and any(path.iterdir()):
            raise ConfigError(
                f"run.id={asked}: {path} holds a run already; continue it with resume=auto, or choose another run.id."
            )
        path.mkdir(exist_ok=True)
        return RunFolder(path, name, asked)
    stamp, number = _stamp(), 1
    while True:
        identity = stamp if number == 1 else f"{stamp}-{number}"
        try:
            (home / identity).mkdir()
        except FileExistsError:
            number += 1
        else:
            return RunFolder(home / identity, name, identity)


def _stamp() -> str:
    return time.strftime("%Y%m%d-%H%M%S")


def environment() -> dict[str, Any]:
    """Versions, host and command line: what `environment.json` holds."""
    from importlib import metadata

    packages = ("fasttrain", "torch", "torchvision", "omegaconf", "numpy", "tensorboard", "safetensors")
    versions = {}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "versions": versions,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "command": sys.argv,
    }
