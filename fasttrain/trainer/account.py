"""What a run says of itself: to observers at the start, and in `summary.json`."""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from fasttrain.core.float32 import tensorfloat
from fasttrain.errors import ConfigError
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
        environment={**environment(), "affinity": trainer.binding.told()},
        total_steps=trainer.feed.total_steps,
        steps_per_epoch=trainer.feed.steps_per_epoch,
        start_step=trainer.step,
        batch_size=session.settings.batch_size,
        world_size=trainer.world.size,
        device=str(trainer.device),
        model=type(trainer.model).__name__,
        blocks=Counter(type(block).__name__ for block in blocks_of(trainer)),
        parameters=sum(parameter.numel() for parameter in trainer.model.parameters()),
        trainable=sum(parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad),
        unit=trainer.unit,
        config_hash=trainer.resolved.hash(),
        torch_version=torch.__version__,
        notes=notes(trainer),
        request_stop=session.stopper.ask,
    )


def notes(trainer: Trainer) -> tuple[str, ...]:
    """What the head of a run says of its numerics and of choices that were made for it."""
    taken = trainer.resolved.reasons
    chosen = [f"{slot}={trainer.resolved.names[slot]} ({why})" for slot, why in taken.items()]
    told = (*chosen, *trainer.plan.notes())
    if trainer.plan.context.device.type != "cuda":  # no other device has it
        return told
    switches = ", ".join(f"{'on' if is_on else 'off'} in {where}" for where, is_on in tensorfloat().items())
    return (*told, f"TensorFloat-32 is {switches}")


def blocks_of(trainer: Trainer) -> list[Any]:
    """The blocks of a trainer's model; none where nothing repeats."""
    try:
        return trainer.plan.context.blocks(trainer.model, "model")
    except ConfigError:
        return []


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
        "compile_s": compile_seconds() - session.compiled_before,
        **{k: v for k, v in times.items() if k in TOTALS or k.endswith("_per_s")},
        "data": trainer.feed.summary(),
        **trainer.plan.summary(),
        "remarks": list(session.remarks),
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
