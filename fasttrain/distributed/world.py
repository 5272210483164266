"""Joining the ranks of a run, and leaving them cleanly."""

from __future__ import annotations

import atexit
import datetime
import os
from dataclasses import dataclass
from typing import Any

from fasttrain.core.devices import kind_and_index
from fasttrain.errors import ConfigError
from fasttrain.lazy import dist, torch

# Backends that move tensors of each device; collectives on host tensors always go over gloo.
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}

_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}


@dataclass(frozen=True, kw_only=True)
class World:
    """The ranks of a run as one of them sees it."""

    device: torch.device
    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        """Whether this rank writes and speaks for all."""
        return self.rank == 0

    def agree(self, value: object) -> object:
        """Rank 0's value on every rank. Plain Python values."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: object) -> list[Any]:
        """The values of all ranks, in their order, on every rank. Plain Python values."""
        if self.size == 1:
            return [value]
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, value)
        return every

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            dist.barrier()


def launched_ranks() -> int:
    """How many ranks a launcher such as torchrun announced; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def pick_device(asked: str | None, local_rank: int = 0) -> torch.device:
    """The device of this rank: the one asked for, or the machine's accelerator, or the CPU.

    Raises:
        ConfigError: no such kind of device, or it is not to be had here.
    """
    if asked is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        kind, index = (accelerator.type if accelerator is not None else "cpu"), None
    else:
        kind, index = kind_and_index(asked)
    if kind == "cpu":
        return torch.device("cpu")
    if not getattr(torch, kind).is_available():
        raise ConfigError(
            f"device={asked}: torch {torch.__version__} sees no {kind} device here; use device=cpu, or look at the "
            "driver and at the build of torch."
        )
    if kind == "mps":
        return torch.device("mps")
    index = local_rank if index is None else index
    count = getattr(torch, kind).device_count()
    if index >= count:
        raise ConfigError(
            f"rank with local number {local_rank} wants {kind}:{index}, but this machine has {count} {kind} device(s); "
            f"start at most {count} processes a machine."
        )
    return torch.device(kind, index)


def join(device: str | None = None, timeout_s: float = 1800.0) -> World:
    """Join the ranks that a launcher announced in the environment; one process needs none.

    A process group that exists already is used as it is. The group is left when the interpreter ends, or by `leave`.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if dist.is_available() and dist.is_initialized():
        where = pick_device(device, int(os.environ.get("LOCAL_RANK", dist.get_rank())))
        if where.type not in ("cpu", "mps"):
            torch.accelerator.set_device_index(where.index)
        _check_carriers(where)
        return World(device=where, rank=dist.get_rank(), size=dist.get_world_size(), local_rank=local_rank)
    where = pick_device(device, local_rank)
    if where.type not in ("cpu", "mps"):
        torch.accelerator.set_device_index(where.index)
    size = launched_ranks()
    if size == 1:
        return World(device=where)
    if where.type not in BACKENDS:
        raise ConfigError(f"{size} ranks were started, but {where.type} devices cannot talk to each other; start one.")
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE={size} is set but {', '.join(missing)} is not; start the ranks with torchrun, or unset WORLD_SIZE."
        )
    if device is not None and ":" in device and where.index is not None:
        raise ConfigError(
            f"device={device} with {size} ranks: all would take the same one; use device={where.type}, and choose devices "
            f"with {_VISIBLE.get(where.type, 'the launcher')}."
        )
    dist.init_process_group(
        BACKENDS[where.type],
        timeout=datetime.timedelta(seconds=timeout_s),
        device_id=where if where.type != "cpu" else None,
    )
    atexit.register(leave)
    return World(device=where, rank=dist.get_rank(), size=size, local_rank=local_rank)


_abandoned = False


def abandon() -> None:
    """After an error: leave without waiting for collectives under way, which the other ranks may never enter."""
    global _abandoned
    _abandoned = True


def _check_carriers(device: torch.device) -> None:
    """Refuse a group that exists already and carries tensors of the host or of the device alone."""
    group = dist.group.WORLD
    assert group is not None
    held = {kind.type for kind in group._device_types}
    if dist.get_world_size() > 1 and not held >= {"cpu", device.type}:
        raise ConfigError(
            f"the process group that exists already (backend {dist.get_backend()}) carries tensors of "
            f"{', '.join(sorted(held))}, and a run on {device} needs {' and '.join(sorted({'cpu', device.type}))}; "
            f'use init_process_group("{BACKENDS.get(device.type, "gloo")}"), or let the Trainer join the ranks.'
        )


def leave() -> None:
    """Leave the ranks. Does nothing where none were joined."""
    if dist.is_available() and dist.is_initialized() and not (_abandoned and _waits_when_left()):
        dist.destroy_process_group()
    atexit.unregister(leave)


def _waits_when_left() -> bool:
    # Destroying a group of NCCL (or XCCL) waits for all its collectives, for as long as the time-out; one that is not
    # destroyed is aborted when the interpreter ends.
    return any(name in dist.get_backend_config() for name in ("nccl", "xccl"))


def lost_a_rank(error: BaseException) -> bool:
    """Whether an error says that another rank left in the middle of a collective."""
    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket", "Timed out waiting")
    return isinstance(error, dist.DistError | RuntimeError) and any(sign in str(error) for sign in signs)
