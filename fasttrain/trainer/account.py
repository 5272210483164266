"""What a run says of itself: to observers at the start, and in `summary.json`."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from fasttrain.lazy import torch
from fasttrain.observe import RunInfo, peak_memory
from fasttrain.trainer.run_folder import environment

if TYPE_CHECKING:
    from fasttrain.trainer.session import Session
    from fasttrain.trainer.trainer import Trainer

# Figures of the clock that stand in the summary.
TOTALS = ("step_time_s", "data_wait_fraction", "warmup", "apart_s")


def run_info(session: Session) -> RunInfo:
    """A run as its observers see it at the start."""
    trainer = session.trainer
    return RunInfo(
        dir=session.folder.dir,
        name=session.folder.name,
        id=session.folder.id,
        config_yaml=session.config_yaml(),
        explain=explain_text(trainer),
        environment=environment(),
        total_steps=trainer.feed.total_steps,
        steps_per_epoch=trainer.feed.steps_per_epoch,
        start_step=trainer.step,
        batch_size=session.settings.batch_size,
        world_size=trainer.world.size,
        device=str(trainer.device),
        parameters=sum(parameter.numel() for parameter in trainer.model.parameters()),
        unit=trainer.unit,
        config_hash=trainer.resolved.hash(),
        torch_version=torch.__version__,
        request_stop=session.stopper.ask,
    )


def summary(session: Session, status: str, reason: str | None = None, ask_device: bool = True) -> dict[str, Any]:
    """What `summary.json` holds; with `ask_device=False` without what only the device knows."""
    trainer = session.trainer
    refused, times = None, {}
    if ask_device:
        refused = int(sum(float(trainer.plan.refused(optimizer)) for optimizer in trainer.optimizers.values()))
        times = session.clock.totals()
    return {
        "status": status,
        "reason": reason,
        "name": session.folder.name,
        "id": session.folder.id,
        "dir": None if session.folder.dir is None else str(session.folder.dir),
        "steps": trainer.step,
        "total_steps": trainer.feed.total_steps,
        "refused_steps": refused,
        "epochs": trainer.feed.epochs_done,
        "samples": trainer.feed.samples,
        "final_loss": session.last_loss,
        "metrics": session.metrics,
        "wall_s": time.perf_counter() - session.began,
        "startup_s": session.began - trainer.created_at,
        "compile_s": compile_seconds(),
        **{k: v for k, v in times.items() if k in TOTALS or k.endswith("_per_s")},
        "peak_memory_bytes": peak_memory(trainer.device),
        "world_size": trainer.world.size,
        "device": str(trainer.device),
        "torch": torch.__version__,
        "config_hash": trainer.resolved.hash(),
    }


def compile_seconds() -> float:
    """Seconds that torch.compile took in this process so far: tracing and generating code, forward and backward."""
    if "torch._dynamo.utils" not in sys.modules:
        return 0.0
    spent = sys.modules["torch._dynamo.utils"].cumulative_time_spent_ns
    return (spent["entire_frame_compile"] + spent["entire_backward_compile"]) / 1e9


def explain_text(trainer: Trainer) -> str:
    """Who acts on which line of the step, as text."""
    lines = [f"{verb:17s} {', '.join(acting) or '-'}" for verb, acting in trainer.plan.explain()]
    return "\n".join(lines) + "\n"
