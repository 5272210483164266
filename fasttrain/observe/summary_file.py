"""summary.json and its companions: what a run is, and what came of it."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fasttrain.observe.files import Forgiving, json_text, unwritable, write_atomic
from fasttrain.observe.observer import Observer, RunInfo
from fasttrain.observe.process import identity

NAME = "summary.json"
# What summary.json holds at least; null where nobody can tell.
KEYS = (
    "status",
    "steps",
    "epochs",
    "samples",
    "final_loss",
    "metrics",
    "wall_s",
    "startup_s",
    "compile_s",
    "step_time_s",
    "samples_per_s",
    "data_wait_fraction",
    "peak_memory_bytes",
    "world_size",
    "device",
    "torch",
    "config_hash",
)
EVERY_S = 3.0


def read_summary(run: Path) -> dict[str, Any]:
    """What `summary.json` of a run folder holds; empty where there is none, or none that can be read."""
    try:
        content = json.loads((run / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


class SummaryFile(Observer):
    """Writes `config.yaml`, `explain.txt` and `environment.json` at the start, and keeps `summary.json` true.

    `summary.json` says `running` from the start, with host and pid, so that `status` can tell a run that was killed; it
    is refreshed at log points, at most every three seconds, and holds the final figures at the end. Every file is
    replaced in one go and is always valid JSON (NaN and infinity are null, named under `nonfinite`).
    """

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._path: Path | None = None
        self._content: dict[str, Any] = {}
        self._written_at = 0.0

    def started(self, run: RunInfo) -> None:
        """Write what the run is."""
        if run.dir is None:
            return
        self._path = run.dir / NAME
        self._content = {
            **dict.fromkeys(KEYS),
            "status": "running",
            "name": run.name,
            "id": run.id,
            "steps": run.start_step,
            "total_steps": run.total_steps,
            "metrics": {},
            "step_time_s": {"p50": None, "p95": None},
            "peak_memory_bytes": {"allocated": None, "reserved": None, "rss": None},
            "batch_size": run.batch_size,
            "parameters": run.parameters,
            "trainable_parameters": run.trainable,
            "world_size": run.world_size,
            "device": run.device,
            "torch": run.torch_version,
            "config_hash": run.config_hash,
            "remarks": [],
            **identity(),
            "started_at": self._now(),
        }
        files = {
            "config.yaml": run.config_yaml,
            "explain.txt": run.explain,
            "environment.json": json_text(run.environment),
        }
        path = run.dir
        try:
            run.dir.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                path = run.dir / name
                write_atomic(path, text if text.endswith("\n") else text + "\n")
            path = self._path
            self._put()
        except OSError as error:
            raise unwritable(path, error) from error
        self._forgiving = Forgiving(self._path)

    def stepped(self, record: Mapping[str, Any]) -> None:
        """Refresh the file, if the last time was long enough ago."""
        if self._path is None:
            return
        now = self._now()
        self._content.update(
            steps=record["step"],
            epochs=record.get("epoch"),
            samples=record.get("samples"),
            final_loss=record.get("loss"),
            samples_per_s=record.get("samples_per_s"),
            wall_s=now - self._content["started_at"],
        )
        if now - self._written_at >= EVERY_S:
            self._forgiving(self._put)

    def evaluated(self, record: Mapping[str, Any]) -> None:
        """Keep the newest metrics."""
        if self._path is not None:
            self._content["metrics"] = dict(record["metrics"])
            self._forgiving(self._put)

    def remarked(self, record: Mapping[str, Any]) -> None:
        """Add a remark to `remarks`."""
        if self._path is not None:
            self._content["remarks"].append(dict(record))
            self._forgiving(self._put)

    def failed(self, error: BaseException, summary: Mapping[str, Any]) -> None:
        """Write the final summary of a run that ended by an error."""
        text = str(error)
        self._end(
            summary,
            status="failed",
            error=f"{type(error).__name__}: {text}" if text else type(error).__name__,
            traceback="".join(traceback.format_exception(error)),
        )

    def finished(self, summary: Mapping[str, Any]) -> None:
        """Write the final summary."""
        self._end(summary, status=summary.get("status") or "done")

    def _end(self, summary: Mapping[str, Any], **more: Any) -> None:
        if self._path is not None:
            self._content.update(summary)
            self._content.update(more, ended_at=self._now())
            self._forgiving(lambda: self._put(durable=True))

    def _put(self, durable: bool = False) -> None:
        content = {**self._content, "updated_at": self._now()}
        self._written_at = content["updated_at"]
        assert self._path is not None
        write_atomic(self._path, json_text(content), durable=durable)
