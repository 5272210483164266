"""Data kept in memory within a bound: read once, shared by workers and ranks, gone with the last process."""

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fasttrain import ConfigError
from fasttrain.data.cache import Cached, CachedFiles, num_bytes
from fasttrain.data.images import Files, ImageFolder
from fasttrain.data.shared_bytes import SharedBytes, host_memory, shared_on_host
from fasttrain.distributed.world import World
from fasttrain.errors import RunError
from tests.commands import ROOT, environment
from tests.data.pictures import folder
from tests.ranks import run_ranks


class Counting:
    """The bytes of six files, 100 each; writes a line for each reading, from whatever process."""

    def __init__(self, told):
        self.told = str(told)

    def __len__(self):
        return 6

    def __getitem__(self, index):
        with open(self.told, "a") as file:
            file.write(f"{index}\n")
        return np.full(100, index, np.uint8)


def reads(told):
    return sorted(map(int, Path(told).read_text().split())) if Path(told).exists() else []


def test_the_second_time_nothing_is_read(tmp_path):
    told = tmp_path / "reads"
    files = CachedFiles(Counting(told), SharedBytes(6, 10_000))
    for _ in range(3):
        assert [int(files[i].sum()) for i in range(6)] == [100 * i for i in range(6)]
    assert reads(told) == list(range(6))


def test_workers_fill_one_cache_and_read_from_it(tmp_path):
    told = tmp_path / "reads"
    files = CachedFiles(Counting(told), SharedBytes(6, 10_000))
    loader = torch.utils.data.DataLoader(files, batch_size=1, num_workers=2, collate_fn=list)
    for _ in range(2):
        assert [int(batch[0][0]) for batch in loader] == list(range(6))
    assert int(files[5][0]) == 5  # and so does the process that made them
    assert reads(told) == list(range(6))


SPAWNED = """
import pickle, sys
shared = pickle.load(sys.stdin.buffer)
assert bytes(shared.get(0)) == b"ours"
shared.put(1, b"theirs")
"""


def test_a_process_that_was_not_forked_finds_the_same_memory():
    shared = SharedBytes(2, 10_000)
    shared.put(0, b"ours")
    command = [sys.executable, "-c", SPAWNED]
    subprocess.run(command, input=pickle.dumps(shared), cwd=ROOT, env=environment(), check=True, timeout=60)
    assert bytes(shared.get(1)) == b"theirs"


@pytest.mark.parametrize("room", [0, 99, 100, 399, 600])
def test_the_bound_is_kept_and_what_does_not_fit_is_read_each_time(tmp_path, room):
    table = 8 + 16 * 6
    told = tmp_path / "reads"
    shared = SharedBytes(6, table + room)
    files = CachedFiles(Counting(told), shared)
    for _ in range(2):
        assert [int(files[i][0]) for i in range(6)] == list(range(6))
        assert shared.used_bytes <= table + room
    fit = room // 100
    assert len(shared) == fit
    assert len(reads(told)) == 6 + 6 - fit
    assert os.fstat(shared._fd).st_size == table + room


def test_a_smaller_string_still_fits_where_a_larger_one_did_not():
    shared = SharedBytes(3, 8 + 16 * 3 + 50)
    assert [shared.put(0, b"x" * 40), shared.put(1, b"x" * 20), shared.put(2, b"y" * 10)] == [True, False, True]
    assert shared.get(1) is None
    assert bytes(shared.get(2)) == b"y" * 10
    assert shared.put(0, b"z" * 40)  # once there, it stays
    assert bytes(shared.get(0)) == b"x" * 40


def test_bounds_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="does not hold the table of 1,000 places"):
        SharedBytes(1000, 1000)
    with pytest.raises(ConfigError, match="of memory; give a bound"):
        SharedBytes(10, host_memory() + 1)


KILLED = """
import os, sys, time
from fasttrain.data.shared_bytes import SharedBytes
shared = SharedBytes(4, 50_000_000)
if os.fork() == 0:
    shared.put(0, b"x" * 20_000_000)
    with shared._lock():
        print("held", flush=True)
        time.sleep(60)
time.sleep(60)
"""


def test_nothing_is_left_and_nothing_stays_locked_after_a_kill(tmp_path):
    before = set(os.listdir("/dev/shm"))
    command = [sys.executable, "-c", KILLED]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment(), start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    held = [int(fd) for fd in os.listdir(f"/proc/{process.pid}/fd") if "fasttrain-cache" in _target(process.pid, fd)]
    assert held  # Python's mmap holds a second one
    place = (process.pid, held[0], os.stat(f"/proc/{process.pid}/fd/{held[0]}").st_ino)
    mine = SharedBytes.at(place, 4, 50_000_000)
    assert int(mine.get(0)[-1]) == ord("x")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    # The child died with the lock; who still holds the memory goes on.
    assert mine.put(1, b"after")
    assert bytes(mine.get(1)) == b"after"
    assert set(os.listdir("/dev/shm")) <= before
    with pytest.raises(RunError, match="cannot be opened"):
        SharedBytes.at(place, 4, 50_000_000)


def _target(pid, fd):
    try:
        return os.readlink(f"/proc/{pid}/fd/{fd}")
    except OSError:
        return ""


def world():
    return World(device=torch.device("cpu"), rank=dist.get_rank(), size=dist.get_world_size())


def read_by_one_rank_after_the_other(told):
    here = World(device=torch.device("cpu"), rank=dist.get_rank(), size=dist.get_world_size())
    shared = shared_on_host(6, 10_000, here)
    files = CachedFiles(Counting(told), shared)
    seen = []
    for rank in range(here.size):
        if rank == here.rank:
            seen = [int(files[i][0]) for i in range(6)]
        here.barrier()
    with pytest.raises(ConfigError) as refused:
        shared_on_host(6 + here.rank, 10_000, here)
    return seen, shared.used_bytes, os.fstat(shared._fd).st_ino, str(refused.value)


@pytest.mark.ranks
def test_the_ranks_of_a_host_share_one_cache_and_must_agree_on_it(tmp_path):
    told = tmp_path / "reads"
    found = run_ranks(2, read_by_one_rank_after_the_other, told)
    assert [seen for seen, *_ in found] == [list(range(6))] * 2
    assert reads(told) == list(range(6))
    assert len({tuple(rest) for _, *rest in found}) == 1
    assert "6 samples in 10000 bytes on rank 0, and for 7" in found[0][-1]


def test_a_cached_folder_reads_each_file_once(tmp_path, monkeypatch):
    dataset = ImageFolder(folder(tmp_path), size=32)
    plain = [dataset.files[i].tobytes() for i in range(6)]
    dataset.files = CachedFiles(dataset.files, SharedBytes(6, 1_000_000))
    opened, read = [], Files.__getitem__
    monkeypatch.setattr(Files, "__getitem__", lambda files, index: opened.append(index) or read(files, index))
    for _ in range(2):
        assert [dataset[i][0].shape for i in range(6)] == [(3, 32, 32)] * 6
    assert opened == list(range(6))
    assert [dataset.files[i].tobytes() for i in range(6)] == plain


class Made(torch.utils.data.Dataset):
    """Trees of tensors of many kinds; counts how many were made."""

    classes = ("a", "b")

    def __init__(self):
        self.made = 0

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.made += 1
        g = torch.Generator().manual_seed(index)
        return {
            "image": torch.randn(3, 4, 5, generator=g).transpose(1, 2),
            "mask": (torch.tensor(True), torch.randn(3, generator=g).bfloat16()),
            "none": torch.zeros(0, 3),
            "array": np.arange(index),
            "label": index,
        }


def test_cached_samples_are_what_they_were():
    cached, plain = Cached(Made(), 100_000), Made()
    for _ in range(2):
        for index in range(4):
            ours, expected = cached[index], plain[index]
            assert list(ours) == list(expected)
            assert torch.equal(ours["image"], expected["image"])
            assert torch.equal(ours["mask"][0], expected["mask"][0])
            assert ours["mask"][1].dtype is torch.bfloat16
            assert torch.equal(ours["mask"][1], expected["mask"][1])
            assert ours["none"].shape == (0, 3)
            assert np.array_equal(ours["array"], expected["array"])
            assert ours["label"] == index
    assert cached.dataset.made == 4
    cached[1]["image"].zero_()
    assert torch.equal(cached[-3]["image"], plain[1]["image"])
    assert (len(cached), cached.classes) == (4, ("a", "b"))
    with pytest.raises(IndexError):
        cached[4]


@pytest.mark.parametrize("text", ["", "4 G", "GB", "-3GB", "four"])
def test_sizes_that_are_none_are_refused(text):
    with pytest.raises(ConfigError, match="write it as 4GB"):
        num_bytes(text)
