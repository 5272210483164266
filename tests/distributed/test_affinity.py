"""Cores beside the device, on made-up machines and on this one."""

import json
import os
from types import SimpleNamespace

import pytest
import torch

from fasttrain.distributed import affinity
from fasttrain.distributed.affinity import Binding, bind, cores_of_rank, numbers, ranges
from fasttrain.distributed.world import World
from fasttrain.errors import ConfigError
from tests.helpers import Mlp
from tests.ranks import run_ranks

CUDA = torch.device("cuda", 3)


class Process:
    """A process that may run on some cores of a machine; notes where its threads were moved to."""

    def __init__(self, cores):
        self.cores, self.moved = set(cores), []

    def sched_getaffinity(self, thread):
        return set(self.cores) if thread == 0 or thread == os.getpid() else {0}

    def sched_setaffinity(self, thread, cores):
        self.moved.append((thread, set(cores)))


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Two nodes of four cores, one of memory alone, and a GPU on the second."""
    system = tmp_path / "devices" / "system"
    for node, cores in {0: "0-1,4-5\n", 1: "2-3,6-7\n", 2: "\n"}.items():
        (system / "node" / f"node{node}").mkdir(parents=True)
        (system / "node" / f"node{node}" / "cpulist").write_text(cores)
    (system / "cpu").mkdir()
    (system / "cpu" / "online").write_text("0-7\n")
    card = tmp_path / "bus" / "pci" / "devices" / "0001:c1:00.0"
    card.mkdir(parents=True)
    (card / "numa_node").write_text("1\n")
    found = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xC1, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(affinity, "_bound", None)
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE", raising=False)
    return tmp_path


@pytest.fixture
def process(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    process = Process(range(8))
    for name in ("sched_getaffinity", "sched_setaffinity"):
        monkeypatch.setattr(os, name, getattr(process, name))
    return process


def world(device="cpu", local_rank=0):
    return World(device=torch.device(device), local_rank=local_rank)


@pytest.mark.parametrize("asked", ["auto", "numa"])
def test_a_rank_runs_beside_its_gpu(machine, process, asked):
    told = bind(asked, world(CUDA, 3), machine)
    assert told == Binding(cores="2-3,6-7", node=1, why="the NUMA node of cuda:3")
    # The thread that calls, and whatever other thread had the same cores; those with a place of their own keep it.
    assert process.moved == [(0, {2, 3, 6, 7}), (os.getpid(), {2, 3, 6, 7})]
    assert told.told() == {"cores": "2-3,6-7", "node": 1, "why": "the NUMA node of cuda:3", "threads": None}


def test_ranks_on_the_cpu_are_dealt_over_the_nodes(machine, process, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    nodes = []
    for rank in range(4):
        monkeypatch.setattr(affinity, "_bound", None)
        nodes.append(bind("auto", world(local_rank=rank), machine).node)
    assert nodes == [0, 0, 1, 1]


def test_a_second_trainer_of_a_process_finds_it_bound(machine, process):
    first = bind("auto", world(), machine)
    process.cores = {0, 1, 4, 5}
    assert bind("auto", world(), machine) is first
    assert len(process.moved) == 2


def test_whoever_bound_the_process_before_goes_first(machine, process):
    process.cores = {2, 3}
    told = bind("auto", world(CUDA), machine)
    assert told == Binding(cores="2-3", node=None, why="bound already when it was started")
    assert process.moved == []
    assert bind("numa", world(CUDA), machine).cores == "2-3"


def test_nothing_is_bound_where_it_is_turned_off_or_there_is_one_node_or_the_system_does_not_tell(machine, process):
    assert bind(None, world(CUDA), machine).why == "affinity=null"
    (machine / "bus" / "pci" / "devices" / "0001:c1:00.0" / "numa_node").write_text("-1\n")
    assert bind("auto", world(CUDA), machine).why == "the system does not say which NUMA node cuda:3 is on"
    with pytest.raises(ConfigError, match=r"affinity=numa: the system does not say .* use affinity=auto"):
        bind("numa", world(CUDA), machine)
    (machine / "devices" / "system" / "node" / "node1" / "cpulist").write_text("")
    for asked in ("auto", "numa"):
        assert bind(asked, world(CUDA), machine).why == "the machine has one NUMA node"
    assert process.moved == []


def test_numa_is_refused_where_no_core_of_the_node_may_be_used(machine, process):
    process.cores = {0, 1}
    with pytest.raises(ConfigError, match="none of the cores that the process may use is on NUMA node 1 of cuda:3"):
        bind("numa", world(CUDA), machine)


def test_threads_beyond_the_cores_are_given_up_unless_their_number_was_set(machine, process, monkeypatch):
    set_to = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert bind("auto", world(), machine).threads is None
    monkeypatch.setattr(affinity, "_bound", None)
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert bind("auto", world(), machine).threads == 4
    assert set_to == [4]


def test_cores_are_shared_by_the_ranks_of_a_machine_unless_each_was_given_its_own(machine, process, monkeypatch):
    assert [cores_of_rank(machine, ranks) for ranks in (1, 2, 3, 16)] == [8, 4, 2, 1]
    process.cores = {0, 1}
    assert [cores_of_rank(machine, ranks) for ranks in (1, 2, 4, 8)] == [2, 2, 2, 1]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert cores_of_rank(machine) == 1


@pytest.mark.parametrize("text", ["0", "0-3", "1,3,5-6", ""])
def test_lists_of_numbers_are_read_and_written_alike(text):
    assert ranges(numbers(text)) == text


def bound_here():
    rank = torch.distributed.get_rank()
    before = os.sched_getaffinity(0)
    told = bind("auto", World(device=torch.device("cpu"), local_rank=rank))
    return before, os.sched_getaffinity(0), told


@pytest.mark.ranks
def test_on_this_machine_a_rank_is_on_one_node_or_is_told_why_not():
    for before, after, told in run_ranks(2, bound_here):
        assert numbers(told.cores) == after
        assert (told.node is None) == (after == before)
        assert told.why


def test_environment_json_tells_where_a_run_was_bound(tmp_path):
    trainer = Mlp(batch_size=8, steps=1, affinity=None, run={"dir": str(tmp_path), "name": "a", "id": "1"})
    trainer.fit()
    told = json.loads((tmp_path / "a" / "1" / "environment.json").read_text())["affinity"]
    assert told == trainer.binding.told()
    assert numbers(told["cores"]) == os.sched_getaffinity(0)
