"""Finding the files of an image folder that cannot be read, and leaving them out when that is asked for."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from fasttrain.data.images import ImageFolder, reason_of
from fasttrain.data.pixels import BROKEN, centre_box, read_pixels
from fasttrain.data.workers import read
from fasttrain.lazy import torch

if TYPE_CHECKING:
    from fasttrain.distributed.world import World


def find_broken(dataset: ImageFolder, indices: Any = None, num_workers: int = 0) -> list[tuple[int, str]]:
    """Number and reason of each sample that cannot be read; of `indices`, or of all.

    Each file is decoded as a whole: a header tells nothing of what follows it. That takes about a millisecond a photo and
    core. What decodes without complaint and shows garbage is not found.
    """
    indices = range(len(dataset)) if indices is None else indices
    looks = torch.utils.data.DataLoader(
        _Looks(dataset, indices), batch_size=64, num_workers=num_workers, collate_fn=list
    )
    return [found for batch in read(looks) for found in batch if found is not None]


class _Looks(torch.utils.data.Dataset if TYPE_CHECKING else object):
    """Each sample looked at: None, or its number and what is wrong."""

    def __init__(self, dataset: ImageFolder, indices: Any) -> None:
        self.dataset, self.indices = dataset, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, place: int) -> tuple[int, str] | None:
        index = int(self.indices[place])
        try:
            read_pixels(self.dataset.files[index], centre_box, 8, reduced=False)
        except BROKEN as error:
            return index, reason_of(error)
        return None


def leave_out_broken(dataset: ImageFolder, world: World, num_workers: int = 0) -> list[str]:
    """Leave out of a data set what cannot be read, before its samples are numbered for an order; returns what, and why.

    Ranks look at a part each and leave out the same. Warns, on the first rank, with the list.

    Raises:
        ConfigError: nothing would be left of a class.
    """
    mine = find_broken(dataset, range(world.rank, len(dataset), world.size), num_workers)
    found = sorted(pair for part in world.gather(mine) for pair in part)
    told = [f"{dataset.name_of(index)}: {reason}" for index, reason in found]
    if told and world.is_main:
        listed = "\n  ".join(told[:20]) + (f"\n  and {len(told) - 20} more" if len(told) > 20 else "")
        warnings.warn(f"{len(told)} of {len(dataset)} images are broken and left out:\n  {listed}", stacklevel=2)
    if found:
        dataset.without([index for index, _ in found])
    return told
