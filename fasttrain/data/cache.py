"""Data sets kept in memory within a bound, so that an epoch after the first one reads nothing."""

from __future__ import annotations

import pickle
import re
from typing import TYPE_CHECKING, Any

from fasttrain.data.shared_bytes import SharedBytes, shared_on_host
from fasttrain.errors import ConfigError
from fasttrain.lazy import pytree, torch

if TYPE_CHECKING:
    from fasttrain.distributed.world import World

UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class CachedFiles:
    """The bytes of files by their number, as `files` gives them, kept in `shared` when they are first read.

    File bytes rather than pixels: a JPEG of 100 kB holds 600 kB of pixels. Shared by the workers of a rank and the ranks of
    a host; a file for which there is no room any more is read each time.
    """

    def __init__(self, files: Any, shared: SharedBytes) -> None:
        self.files, self.shared = files, shared

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        kept = self.shared.get(index)
        if kept is not None:
            return kept
        data = self.files[index]
        self.shared.put(index, data)
        return data


class Cached:
    """A map-style data set whose samples are kept once they were made, in memory shared by workers and ranks of a host.

    For samples that are the same each time (decoded, resized, tokenized): what the data set draws for a sample would be
    drawn once and stay. Augment later, in a transform of the batch or on the device. Samples are trees of tensors, arrays
    and plain Python values; what comes from the cache is a copy.

    Costs: a copy of the sample's bytes each time, 20 to 40 µs. `max_bytes` is never gone beyond: what does not fit is made
    anew each time. Give `world` on several ranks (`Trainer.world`), or each rank keeps a cache of its own.
    """

    def __init__(self, dataset: Any, max_bytes: int, world: World | None = None) -> None:
        self.dataset = dataset
        count = len(dataset)
        self.shared = SharedBytes(count, max_bytes) if world is None else shared_on_host(count, max_bytes, world)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        kept = self.shared.get(range(len(self))[index])
        if kept is not None:
            return unpacked(kept)
        sample = self.dataset[index]
        self.shared.put(range(len(self))[index], packed(sample))
        return sample

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.dataset, name)  # classes, name_of and what else is asked of the data set


def packed(sample: Any) -> bytes:
    """A sample as bytes."""
    # torch pickles a tensor by way of a file in memory, which takes ten times as long as an array.
    return pickle.dumps(
        pytree.tree_map(lambda leaf: _Tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf, sample), 5
    )


def unpacked(data: Any) -> Any:
    """A sample from its bytes; tensors of their own memory."""
    return pytree.tree_map(lambda leaf: leaf.tensor() if isinstance(leaf, _Tensor) else leaf, pickle.loads(data))


class _Tensor:
    """A tensor as an array, and its dtype where numpy has none such."""

    def __init__(self, tensor: Any) -> None:
        self.dtype, self.shape = tensor.dtype, tuple(tensor.shape)
        flat = tensor.detach().reshape(-1) if tensor.numel() else tensor.new_empty(0)  # an empty one may have no stride
        self.array = flat.view(torch.uint8).numpy()

    def tensor(self) -> Any:
        if not self.array.size:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.from_numpy(self.array.copy()).view(self.dtype).view(self.shape)


def num_bytes(text: str | int) -> int:
    """A size in bytes of `4GB`, `500 MB`, `2GiB`, or of a plain number.

    >>> num_bytes("4GB"), num_bytes("1.5 GiB"), num_bytes(1000)
    (4000000000, 1610612736, 1000)

    Raises:
        ConfigError: it is no such size.
    """
    found = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([A-Za-z]*)", str(text).strip())
    units = {name.lower(): factor for name, factor in UNITS.items()} | {"": 1}
    if found is None or found[2].lower() not in units:
        raise ConfigError(f"{text!r} is no size in bytes; write it as 4GB, 500MB or 2GiB.")
    return int(float(found[1]) * units[found[2].lower()])
