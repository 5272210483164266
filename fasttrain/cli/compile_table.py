"""`explain --compile`: what torch.compile makes of a trainer's model, on a batch of its data."""

from __future__ import annotations

from typing import Any

from fasttrain.cli.model_table import built
from fasttrain.config import Resolved
from fasttrain.errors import ConfigError
from fasttrain.lazy import torch

COUNTS = (
    ("breaks", "graph breaks"),
    ("recompilations", "functions compiled once more, for another size, kind of block, or evaluation"),
    ("fallbacks", "functions that run uncompiled"),
)


def compilation_of(resolved: Resolved, config: str) -> dict[str, Any]:
    """Build the trainer that a config describes; run forward and backward of a training batch and a batch of evaluation.

    Returns what a run would have in its summary under `compile`, and its sentences under `remarks`.

    Raises:
        ConfigError: nothing is to be compiled, the config names no trainer, or the trainer refuses it.
    """
    from fasttrain.compiler.reference import forward_backward
    from fasttrain.compiler.report import Report

    if "compile" not in resolved.names:
        raise ConfigError("explain --compile: the config compiles nothing; add compile=blocks or compile=model.")
    with built(resolved, config) as trainer:
        task, plan, model = trainer.task, trainer.plan, trainer.model
        report = Report(plan.strategies["compile"].compiled.modules)
        report.watch_calls()
        first = plan.split(task, next(trainer.feed.training(task, plan)))[0]

        def loss() -> Any:
            with plan.forward():
                found = trainer.compute_loss(first)
            return sum(found.values()) if isinstance(found, dict) else found

        forward_backward(model, loss)()
        report.stepped()
        if trainer.data.evaluation is not None:
            model.eval()
            with torch.no_grad(), plan.evaluating(model):
                batch, _ = next(trainer.feed.evaluation(task, plan))
                trainer.compute_loss(plan.split(task, batch)[0])
            report.evaluated()
        return {**report.summary(), "remarks": report.remarks()}


def compile_table(told: dict[str, Any]) -> str:
    """What was compiled, as lines."""
    lines = [
        *told["remarks"],
        "",
        "All in all, for a batch of training and one of evaluation:",
        f"{told['graphs']:>5} graphs of forward passes, {told['from_cache']} of them from the cache",
    ]
    for key, name in COUNTS:
        lines.append(f"{sum(entry['times'] for entry in told[key]):>5} {name}")
        for entry in told[key]:
            what = entry.get("guard") or entry["reason"]
            of = f"{entry['function']}: " if "function" in entry else ""
            at = f"{entry['file']}:{entry['line']}" if entry["file"] else ""
            line = f" at {at} `{entry['code']}`" if at and at not in of else ""
            lines.append(f"        {of}{what}{line}")
    lines.append(f"{told['seconds']:>5.1f} s to compile")
    return "\n".join(lines) + "\n"
