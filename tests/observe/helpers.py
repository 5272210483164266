from __future__ import annotations

from pathlib import Path
from typing import Any

from fasttrain.observe import RunInfo


class Clock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time

    def wait(self, seconds: float) -> None:
        self.time += seconds


def run_info(folder: Path | None = None, **changes: Any) -> RunInfo:
    values: dict[str, Any] = {
        "dir": folder,
        "name": "digits",
        "id": "one",
        "config_yaml": "batch_size: 8\n",
        "explain": "forward: precision=bf16",
        "environment": {"versions": {"torch": "2.14"}},
        "total_steps": 100,
        "steps_per_epoch": 10,
        "start_step": 0,
        "batch_size": 8,
        "world_size": 1,
        "device": "cpu",
        "model": "ResNet",
        "parameters": 11_181_642,
        "trainable": 11_181_642,
        "blocks": {"BasicBlock": 8},
        "unit": "samples",
        "config_hash": "abc",
        "torch_version": "2.14",
        "request_stop": lambda reason: None,
    }
    return RunInfo(**{**values, **changes})


def record(step: int, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "step": step,
        "total_steps": 100,
        "samples": step * 8,
        "epoch": step / 10,
        "loss": 1 / step,
        "lr": 0.1,
        "grad_norm": 1.5,
        "step_time_s": 0.5,
        "data_wait_s": 0.01,
        "samples_per_s": 16.0,
        "memory": 2**30,
    }
    return {**values, **changes}
