"""Writing and reading a checkpoint: tensors as safetensors by torch.distributed.checkpoint, the rest as JSON.

torch's own metadata file is a pickle, and reading a planted one runs its code; safetensors and JSON cannot. Everything is
written into `step-N.tmp`, then the manifest of sizes, then the folder is renamed: what has its name is complete.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fasttrain.checkpoint.folder import MANIFEST, Checkpoint
from fasttrain.errors import CheckpointError
from fasttrain.lazy import dist, torch

STATE = "state.json"


def _ranks() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


@contextmanager
def _quiet() -> Iterator[None]:
    # torch warns of its own use of deprecated names while it saves; nothing a user could change.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def save(path: Path, tensors: Mapping[str, Any], plain: Mapping[str, Any]) -> int:
    """Write a checkpoint at `path`; every rank calls it. Returns its bytes (on rank 0; elsewhere 0).

    `tensors` may hold DTensors, tensors that all ranks have alike, and tensors that one rank alone has. `plain` is
    JSON-able, and rank 0's is written.

    Raises:
        CheckpointError: the disk is full, or the folder cannot be written.
    """
    from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageWriter
    from torch.distributed.checkpoint import save as dcp_save

    rank, ranks = _ranks()
    unfinished = path.with_name(path.name + ".tmp")
    try:
        if rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        if ranks > 1:
            dist.barrier()
        state = _with_memory_of_their_own({name: _storable(tensor).contiguous() for name, tensor in tensors.items()})
        with _quiet():
            dcp_save(
                state,
                storage_writer=HuggingFaceStorageWriter(str(unfinished), save_distributed=True),
                no_dist=ranks == 1,
            )
        if rank != 0:
            dist.barrier()
            return 0
        scalars = sorted(name for name, tensor in tensors.items() if tensor.dim() == 0)
        (unfinished / STATE).write_text(json.dumps({"scalars": scalars, **plain}))
        files = {file.name: {"bytes": file.stat().st_size} for file in sorted(unfinished.iterdir())}
        for name in files:
            _sync(unfinished / name)
        (unfinished / MANIFEST).write_text(json.dumps({"format": 1, "files": files}, indent=1))
        _sync(unfinished / MANIFEST)
        if path.exists():
            shutil.rmtree(path)
        unfinished.rename(path)
        _sync(path.parent)
    except (OSError, CheckpointException) as problem:
        error = _cause(problem)
        if not isinstance(error, OSError):
            raise
        shutil.rmtree(unfinished, ignore_errors=True)
        free = shutil.disk_usage(path.parent if path.parent.exists() else Path.cwd()).free
        raise CheckpointError(
            f"the checkpoint {path} could not be written: {error.strerror or error} ({free:,} bytes are free there); make "
            "room, or choose another folder with run.dir=..."
        ) from problem
    if ranks > 1:
        dist.barrier()
    return sum(file["bytes"] for file in files.values())


def _storable(tensor: Any) -> Any:
    # safetensors cannot address a slice of no dims: such tensors travel with one.
    return tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()


def _with_memory_of_their_own(tensors: dict[str, Any]) -> dict[str, Any]:
    # safetensors refuses two names for one memory, as of weights tied by `.data`.
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.numel():
            place = tensor.untyped_storage().data_ptr()
            if place in seen:
                tensors[name] = tensor.clone()
            seen.add(place)
    return tensors


def _repeats(tensor: Any) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _fill_expanded(tensor: Any, values: Any) -> None:
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    tensor.copy_(values)


def _cause(error: BaseException) -> BaseException:
    """What one rank met, out of torch's exception about all of them."""
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if failures else error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_plain(path: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint.

    Raises:
        CheckpointError: it is not there or is damaged.
    """
    try:
        return json.loads((path / STATE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the checkpoint {path} cannot be read: {error}; resume from another one.") from error


def stored_tensors(path: Path) -> dict[str, tuple[Any, Any]]:
    """Shape and dtype of every tensor of a checkpoint, by name.

    Raises:
        CheckpointError: one of its files is not there or was cut short.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    absent = Checkpoint(-1, path).missing
    if absent:
        raise CheckpointError(
            f"the checkpoint {path} is damaged: {', '.join(absent)} is not there or was cut short; put it back, or resume "
            "from another one with resume=PATH."
        )
    metadata: Any = HuggingFaceStorageReader(str(path)).read_metadata()
    scalars = set(load_plain(path)["scalars"])
    return {
        name: (torch.Size() if name in scalars else entry.size, entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
    }


def load_tensors(path: Path, into: Mapping[str, Any]) -> None:
    """Read tensors of a checkpoint in place; every rank calls it with the names it wants. DTensors take their shard.

    Raises:
        CheckpointError: a name is not there, has another shape, or a file is damaged.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    from torch.distributed.checkpoint import load as dcp_load

    held = stored_tensors(path)
    missing = sorted(set(into) - set(held))
    if missing:
        raise CheckpointError(
            f"the checkpoint {path} lacks {len(missing)} of {len(into)} tensors (the first: {missing[0]}); it is of another "
            "model or optimizer."
        )
    for name, tensor in into.items():
        if held[name][0] != tensor.shape:
            raise CheckpointError(
                f"the checkpoint {path} holds {name} with shape {tuple(held[name][0])}, this run has {tuple(tensor.shape)}; "
                "it is of another model."
            )
    state = {name: _storable(tensor) for name, tensor in into.items()}
    expanded = {name: tensor for name, tensor in state.items() if _repeats(tensor)}
    state |= {
        name: torch.empty_like(tensor, memory_format=torch.contiguous_format) for name, tensor in expanded.items()
    }
    with _quiet():
        dcp_load(state, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=_ranks()[1] == 1)
    for name, tensor in expanded.items():
        _fill_expanded(tensor, state[name])
