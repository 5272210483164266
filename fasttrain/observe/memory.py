"""Memory of this process: on its device and on the host. Nothing here reads a tensor or waits for the device."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fasttrain.lazy import torch

if TYPE_CHECKING:
    import torch as _torch

_PROC = Path("/proc/self")


def peak_memory(device: _torch.device | str) -> dict[str, int | None]:
    """Peak bytes since the process began or `reset_peak_memory`: `allocated`, `reserved` (device), `rss` (host).

    `allocated` is what tensors held, `reserved` what the caching allocator took from the device for them. Both are
    `None` on a CPU and where the backend keeps no peaks (MPS). `rss` is the peak resident set of the process.
    """
    stats = _device_stats(device)
    return {
        "allocated": stats.get("allocated_bytes.all.peak"),
        "reserved": stats.get("reserved_bytes.all.peak"),
        "rss": _peak_rss(),
    }


def current_memory(device: _torch.device | str) -> int:
    """Bytes in use now: by tensors on an accelerator, by the whole process (resident set) on a CPU."""
    kind = torch.device(device).type
    if kind == "cpu":
        return _rss()
    if kind == "mps":
        return torch.mps.current_allocated_memory()
    return _device_stats(device).get("allocated_bytes.all.current", 0)


def reset_peak_memory(device: _torch.device | str) -> None:
    """Let the peaks start again from what is in use now, so that a second run does not show the first one's peak.

    The host's peak can be reset on Linux only; elsewhere it stays that of the process.
    """
    if _device_stats(device):
        torch.accelerator.reset_peak_memory_stats(torch.device(device))
    with contextlib.suppress(OSError):
        (_PROC / "clear_refs").write_text("5")


def _device_stats(device: Any) -> dict[str, int]:
    device = torch.device(device)
    accelerator = torch.accelerator.current_accelerator()
    if device.type == "cpu" or accelerator is None or accelerator.type != device.type:
        return {}
    try:
        return torch.accelerator.memory_stats(device)
    except (RuntimeError, NotImplementedError):
        return {}  # a backend without a caching allocator of torch's kind


def _rss() -> int:
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return _peak_rss()


def _peak_rss() -> int:
    # VmHWM and not getrusage: the latter is inherited over exec on Linux, so a small process started by a large one
    # would show its parent's peak; and it cannot be reset.
    try:
        for line in (_PROC / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
