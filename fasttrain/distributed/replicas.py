"""Make the copies of a model on all ranks one and the same, and say where they are not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fasttrain.errors import SyncError
from fasttrain.lazy import dist, torch

if TYPE_CHECKING:
    from torch import Tensor, nn

CHUNK_BYTES = 256 * 2**20


def describe(model: nn.Module) -> list[tuple[str, str]]:
    """Each parameter and buffer in order: its name, and shape, dtype and whether it trains, in words.

    >>> from torch import nn
    >>> describe(nn.Linear(2, 3, bias=False))
    [('weight', 'a parameter of shape (3, 2), float32, trained')]
    """
    lines = []
    for name, parameter in model.named_parameters():
        kind = "trained" if parameter.requires_grad else "frozen"
        lines.append((name, f"a parameter of {_form(parameter)}, {kind}"))
    for name, buffer in model.named_buffers():
        lines.append((name, f"a buffer of {_form(buffer)}"))
    return lines


def _form(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')}"


def first_difference(mine: list[tuple[str, str]], theirs: list[tuple[str, str]], rank: int) -> str | None:
    """The first line in which this rank's model is not that of rank 0; `None` where they agree."""
    for (name, form), (other_name, other_form) in zip(mine, theirs, strict=False):
        if name != other_name:
            return f"rank {rank} has '{name}' where rank 0 has '{other_name}'"
        if form != other_form:
            return f"'{name}' is {form} on rank {rank} and {other_form} on rank 0"
    if len(mine) != len(theirs):
        longer, where, lacking = (mine, rank, 0) if len(mine) > len(theirs) else (theirs, 0, rank)
        return f"'{longer[min(len(mine), len(theirs))][0]}' is there on rank {where} and missing on rank {lacking}"
    return None


def check_replicas(model: nn.Module, group: Any = None) -> None:
    """Refuse a model that is not built alike on all ranks: names, shapes, dtypes, what trains.

    Costs: two small exchanges of host objects, once. `group`: a group that can carry host objects.

    Raises:
        SyncError: on every rank, with the first difference.
    """
    mine = describe(model)
    theirs: list[Any] = [mine]
    dist.broadcast_object_list(theirs, group=group, group_src=0)
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, first_difference(mine, theirs[0], dist.get_rank(group)), group=group)
    difference = next((text for text in found if text is not None), None)
    if difference is not None:
        raise SyncError(
            f"gradients of {type(model).__name__} are to be averaged over {len(found)} ranks, but the models differ: "
            f"{difference}; build the same model on every rank, from the same config and without asking for the rank."
        )


def broadcast_tensors(tensors: Iterable[Tensor], group: Any = None, host_group: Any = None) -> None:
    """Give every rank the values of rank 0, bit for bit, in place; any dtype.

    Costs: one broadcast per device and 256 MiB, and a copy of that size. `host_group` carries tensors on the CPU
    (`None`: the same as `group`).
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_device.setdefault(tensor.device, []).append(tensor.detach())
    for device, members in by_device.items():
        carrier = host_group if device.type == "cpu" and host_group is not None else group
        # The widest dtypes first: each piece of the flat bytes then starts at a multiple of its element size.
        members.sort(key=lambda tensor: -tensor.element_size())
        chunk: list[Tensor] = []
        held = 0
        for tensor in members:
            chunk.append(tensor)
            held += tensor.nbytes
            if held >= CHUNK_BYTES:
                _broadcast_chunk(chunk, carrier)
                chunk, held = [], 0
        if chunk:
            _broadcast_chunk(chunk, carrier)


def _broadcast_chunk(tensors: list[Tensor], group: Any) -> None:
    with torch.no_grad():
        flat = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])
        dist.broadcast(flat, group=group, group_src=0)
        if dist.get_rank(group) == 0:
            return
        for tensor, piece in zip(tensors, flat.split([tensor.nbytes for tensor in tensors]), strict=True):
            tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))
