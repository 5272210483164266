"""`profile: true`: where the time of a few steps goes, by torch's profiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fasttrain.lazy import torch

# Steps before it looks (compilation, first allocations), steps that only warm the profiler up, and steps that are kept.
WAIT, WARM_UP, KEPT = 5, 2, 3


def start_profile(folder: Path, device_type: str) -> Any:
    """Start torch's profiler; call `.step()` after each step, `.stop()` at the end.

    Writes `folder/trace.json` (for https://ui.perfetto.dev or chrome://tracing) and `folder/operations.txt`, once the kept
    steps are over. Costs: time in these steps, and nothing before and after.
    Source: https://docs.pytorch.org/docs/stable/profiler.html
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += {
        "cuda": [torch.profiler.ProfilerActivity.CUDA],
        "xpu": [torch.profiler.ProfilerActivity.XPU],
    }.get(device_type, [])

    def write(profiler: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / "trace.json"))
        by = "self_cpu_time_total" if len(activities) == 1 else "self_device_time_total"
        table = profiler.key_averages(group_by_input_shape=True).table(sort_by=by, row_limit=50)
        (folder / "operations.txt").write_text(table + "\n")

    profiler = torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(wait=WAIT, warmup=WARM_UP, active=KEPT, repeat=1),
        on_trace_ready=write,
        record_shapes=True,
        profile_memory=True,
        acc_events=True,  # one cycle: nothing adds up; without it torch 2.11 warns that earlier cycles are dropped
    )
    profiler.start()
    return profiler
