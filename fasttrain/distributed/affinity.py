"""Binding a rank to the cores beside its device, on machines whose memory is spread over several NUMA nodes."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fasttrain.distributed.world import World
from fasttrain.errors import ConfigError
from fasttrain.lazy import torch

SYS = Path("/sys")


@dataclass(frozen=True, kw_only=True)
class Binding:
    """The cores a rank runs on. `node`: the NUMA node it was bound to; None: it was not bound, and `why`.

    `threads`: what torch's intra-op threads were lowered to; None: they were left alone.
    """

    cores: str
    node: int | None
    why: str
    threads: int | None = None

    def told(self) -> dict[str, Any]:
        """As plain values, for `environment.json`."""
        return asdict(self)


def local_ranks() -> int:
    """The ranks on this machine, as a launcher announced them; 1 without one."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE") or "1"))


def cores_of_rank(sys: Path = SYS, ranks: int | None = None) -> int:
    """How many cores this rank can count on: its share of those of the machine, or all it was bound to by itself."""
    ranks = local_ranks() if ranks is None else ranks
    allowed = len(_allowed())
    machine = len(_online(sys)) or allowed
    return max(1, min(allowed, machine // ranks))


# What an earlier trainer of this process was bound to: a second one finds cores taken away, and by nobody else.
_bound: Binding | None = None


def bind(asked: str | None, world: World, sys: Path = SYS) -> Binding:
    """Bind this process, all its threads and the workers it will start to the cores of its device's NUMA node.

    Ranks of one node share its cores: the system spreads them better than a fixed cut does when one rank loads data while
    another computes (torch advises the same, `torchrun --numa-binding=node`). Memory follows by itself: the system takes
    it from the node of the core that touches it first.

    Args:
        asked: `auto`: only where the machine has several nodes, the device's is known, and nobody has bound the process
            yet (taskset, numactl, Slurm, `torchrun --numa-binding`, a container). `numa`: bind, within the cores that are
            left. None: do not.
        world: gives the device and the number of the rank on this machine.
        sys: where the system tells of itself.

    Raises:
        ConfigError: `numa` is asked for where it cannot be.
    """
    global _bound
    if _bound is not None:
        return _bound
    if not hasattr(os, "sched_setaffinity"):
        return _unbound(asked, "this system binds no processes to cores")
    if asked is None:
        return _unbound(None, "affinity=null")
    nodes, allowed = _nodes(sys), _allowed()
    if len(nodes) < 2:
        return _unbound(None, "the machine has one NUMA node")
    if asked == "auto" and allowed != _online(sys):
        return _unbound(None, "bound already when it was started")
    node = _node_of(world, sorted(nodes), sys)
    if node is None:
        return _unbound(asked, f"the system does not say which NUMA node {world.device} is on")
    cores = nodes[node] & allowed
    if not cores:
        return _unbound(asked, f"none of the cores that the process may use is on NUMA node {node} of {world.device}")
    _bound = Binding(cores=ranges(cores), node=node, why=f"the NUMA node of {world.device}", threads=_take(cores))
    return _bound


def _unbound(asked: str | None, why: str) -> Binding:
    if asked == "numa":
        raise ConfigError(f"affinity=numa: {why}; use affinity=auto, which then binds nothing.")
    return Binding(cores=ranges(_allowed()), node=None, why=why)


def _take(cores: set[int]) -> int | None:
    """Move every thread of this process to the cores; threads of torch that would then share a core are given up."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    for thread in os.listdir("/proc/self/task"):
        try:
            if os.sched_getaffinity(int(thread)) == before:  # others were given a place of their own
                os.sched_setaffinity(int(thread), cores)
        except ProcessLookupError:  # it ended meanwhile
            continue
    if "OMP_NUM_THREADS" in os.environ or torch.get_num_threads() <= len(cores):
        return None
    torch.set_num_threads(len(cores))
    return len(cores)


def _node_of(world: World, nodes: list[int], sys: Path) -> int | None:
    if world.device.type == "cpu":
        return nodes[world.local_rank % local_ranks() * len(nodes) // local_ranks()]
    if world.device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(world.device)
    address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    told = sys / "bus" / "pci" / "devices" / address / "numa_node"
    node = int(told.read_text()) if told.exists() else -1
    return node if node in nodes else None


def _nodes(sys: Path) -> dict[int, set[int]]:
    """The cores of each NUMA node; nodes of memory alone left out."""
    folders = (sys / "devices" / "system" / "node").glob("node[0-9]*")
    found = {int(folder.name[4:]): numbers((folder / "cpulist").read_text()) for folder in folders}
    return {node: cores for node, cores in found.items() if cores}


def _online(sys: Path) -> set[int]:
    told = sys / "devices" / "system" / "cpu" / "online"
    return numbers(told.read_text()) if told.exists() else set()


def _allowed() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def numbers(text: str) -> set[int]:
    """The numbers of a list as the system writes it.

    >>> sorted(numbers("0-2,8"))
    [0, 1, 2, 8]
    """
    spans = [part.partition("-") for part in text.strip().split(",") if part]
    return {number for low, _, high in spans for number in range(int(low), int(high or low) + 1)}


def ranges(cores: set[int]) -> str:
    """Numbers as the system writes them.

    >>> ranges({0, 1, 2, 8})
    '0-2,8'
    """
    spans: list[list[int]] = []
    for core in sorted(cores):
        if spans and core == spans[-1][1] + 1:
            spans[-1][1] = core
        else:
            spans.append([core, core])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
