from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from fasttrain.observe import current_memory, peak_memory, reset_peak_memory

MIB = 1 << 20


def test_a_cpu_has_a_resident_set_and_no_device_peaks() -> None:
    peaks = peak_memory("cpu")
    assert peaks["allocated"] is None
    assert peaks["reserved"] is None
    assert 0 < current_memory(torch.device("cpu")) <= peak_memory("cpu")["rss"]


def test_the_peak_holds_a_temporary_that_is_gone() -> None:
    before = current_memory("cpu")
    temporary = torch.ones(64 * MIB, dtype=torch.uint8)
    del temporary
    assert peak_memory("cpu")["rss"] >= before + 60 * MIB


PEAKS_OF_TWO_RUNS = """
import torch
from fasttrain.observe import current_memory, peak_memory, reset_peak_memory

# Above 32 MiB, glibc's largest threshold, memory is always mapped anew and never a piece of the heap that is there.
for size in (160, 40):
    reset_peak_memory("cpu")
    begin = current_memory("cpu")
    temporary = torch.ones(size << 20, dtype=torch.uint8)
    del temporary
    print(peak_memory("cpu")["rss"] - begin)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux resets the host's peak")
def test_peak_mem_a_small_run_after_a_large_one_shows_its_own_peak() -> None:
    # In a process of its own: garbage of other tests may be freed in mid-measurement.
    told = subprocess.run([sys.executable, "-c", PEAKS_OF_TWO_RUNS], capture_output=True, text=True, check=True).stdout
    large, small = map(int, told.split())
    assert large >= 150 * MIB
    assert 36 * MIB <= small <= 80 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="getrusage inherits the parent's peak on Linux")
def test_a_small_process_does_not_show_the_peak_of_the_large_one_that_started_it() -> None:
    held = torch.ones(128 * MIB, dtype=torch.uint8)
    code = "from fasttrain.observe.memory import _peak_rss; print(_peak_rss())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(told) < 128 * MIB
    assert peak_memory("cpu")["rss"] > held.nbytes


class Allocator:
    """The figures a caching allocator keeps."""

    def __init__(self) -> None:
        self.current = self.peak = 0

    def take(self, size: int) -> None:
        self.current += size
        self.peak = max(self.peak, self.current)

    def stats(self, device: torch.device) -> dict[str, int]:
        assert device.type == "cuda"
        return {
            "allocated_bytes.all.current": self.current,
            "allocated_bytes.all.peak": self.peak,
            "reserved_bytes.all.peak": 2 * MIB,
        }

    def reset(self, device: torch.device) -> None:
        self.peak = self.current


def test_peak_mem_a_reset_forgets_the_peak_and_keeps_what_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "memory_stats", allocator.stats)
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", allocator.reset)
    allocator.take(40 * MIB)
    allocator.take(-39 * MIB)
    assert peak_memory("cuda:0")["allocated"] == 40 * MIB
    reset_peak_memory("cuda:0")
    allocator.take(MIB // 2)
    allocator.take(-MIB // 2)
    peaks = peak_memory("cuda:0")
    assert (peaks["allocated"], peaks["reserved"]) == (MIB + MIB // 2, 2 * MIB)
    assert current_memory("cuda:0") == MIB


def test_a_device_that_this_machine_lacks_has_no_peaks() -> None:
    assert peak_memory("xpu")["allocated"] is None
    assert current_memory("xpu") == 0
