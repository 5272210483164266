"""Pad entries of a batch to few sizes, so that few graphs take all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fasttrain.errors import BatchError, ConfigError
from fasttrain.lazy import torch


@dataclass(frozen=True, kw_only=True)
class Padding:
    """Pad named entries of each batch along a dim.

    `values`: what to pad with, by entry: a key of a dict, a field of a named tuple, or a position in a tuple ("0"). Entries
    that are not named stay. `multiple`: pad to a multiple of so many; or `sizes`: to the smallest of these that holds all.
    `dim`: 1 or more, or from the end; dim 0 holds the samples.
    """

    values: dict[str, float] = field(default_factory=dict)
    multiple: int | None = None
    sizes: list[int] = field(default_factory=list)
    dim: int = 1

    def __post_init__(self) -> None:
        if not self.values:
            raise ConfigError(
                "pad names no entry of a batch; give what to pad with by entry, such as "
                "compile.pad.values={input_ids: 0, attention_mask: 0, labels: -100}."
            )
        if (self.multiple is None) == (not self.sizes):
            raise ConfigError(
                f"pad with multiple={self.multiple} and sizes={self.sizes}: give one of them, for example "
                "compile.pad.multiple=64 or compile.pad.sizes=[128, 256, 512]."
            )
        if min([*self.sizes, 1 if self.multiple is None else self.multiple]) < 1:
            raise ConfigError(f"pad with multiple={self.multiple} and sizes={self.sizes}: a size is 1 or more.")
        if self.dim == 0:
            raise ConfigError("pad.dim=0 holds the samples, and more of them would be counted; use dim=1 for lengths.")

    def target(self, size: int) -> int:
        """The size that a size is padded to.

        Raises:
            BatchError: it is larger than all that there are.
        """
        if self.multiple is not None:
            return -(-size // self.multiple) * self.multiple
        fitting = [held for held in self.sizes if held >= size]
        if not fitting:
            raise BatchError(
                f"compile.pad.sizes={self.sizes} hold no entry of {size}; add a size, or cut the data to "
                f"{max(self.sizes)}."
            )
        return min(fitting)


def pad_batch(batch: Any, padding: Padding) -> Any:
    """The batch with the named entries padded; the others are the same objects. Nothing is read from the device.

    Saves: compilations (and recordings of CUDA graphs) for sizes between. Costs: computing on what was added.
    The numbers stay those without padding, up to rounding, if the model masks what was added and the loss leaves it out
    (`ignore_index`).

    Raises:
        BatchError: the batch has no entry of a name, or an entry no such dim.
    """
    if isinstance(batch, list) and all(isinstance(item, (dict, tuple, list)) for item in batch):
        # Already cut into microbatches: each is a batch, and keeps the kind of what holds it.
        return type(batch)(pad_batch(item, padding) for item in batch)
    return _rebuilt(batch, {name: _padded(_entry(batch, name), name, padding) for name in padding.values})


def _entry(batch: Any, name: str) -> Any:
    if isinstance(batch, Mapping):
        if name in batch:
            return batch[name]
        raise BatchError(
            f"compile.pad.values names '{name}', and a batch has the keys {', '.join(map(str, batch))}; use one of these."
        )
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        fields = getattr(batch, "_fields", ())
        if name in fields:
            return getattr(batch, name)
        if name.isdecimal() and int(name) < len(batch):
            return batch[int(name)]
        known = [*fields, *map(str, range(len(batch)))]
        raise BatchError(
            f"compile.pad.values names '{name}', and a batch has the entries {', '.join(known)}; use one of these."
        )
    raise BatchError(
        f"compile.pad: a batch is a {type(batch).__name__}, and has no entry '{name}'; let the data give a dict or a tuple."
    )


def _padded(entry: Any, name: str, padding: Padding) -> Any:
    if not isinstance(entry, torch.Tensor):
        raise BatchError(
            f"compile.pad: entry '{name}' of a batch is a {type(entry).__name__}, and tensors alone are padded; leave it "
            "out of compile.pad.values."
        )
    dim = padding.dim if padding.dim > 0 else entry.dim() + padding.dim
    if not 0 < dim < entry.dim():
        raise BatchError(
            f"compile.pad.dim={padding.dim}: entry '{name}' of a batch has the shape {tuple(entry.shape)}, and the dims "
            "behind its samples alone are padded; leave it out of compile.pad.values, or give another dim."
        )
    more = padding.target(entry.shape[dim]) - entry.shape[dim]
    if not more:
        return entry
    shape = list(entry.shape)
    shape[dim] = more
    return torch.cat([entry, entry.new_full(shape, padding.values[name])], dim)


def _rebuilt(batch: Any, padded: dict[str, Any]) -> Any:
    if isinstance(batch, dict):
        copy = batch.copy()  # keeps the kind: a BatchEncoding of transformers, an OrderedDict
        for name, entry in padded.items():
            copy[name] = entry
        return copy
    if isinstance(batch, Mapping):
        return type(batch)({**batch, **padded})  # pyright: ignore[reportCallIssue]
    fields = getattr(batch, "_fields", ())
    entries = list(batch)
    for name, entry in padded.items():
        entries[fields.index(name) if name in fields else int(name)] = entry
    return type(batch)(*entries) if fields else type(batch)(entries)
