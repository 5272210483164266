"""What a trainer trains on. Every form answers the same question: the samples at these positions, please."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from fasttrain.data.shards import Shards
from fasttrain.errors import ConfigError
from fasttrain.lazy import pytree, torch


@dataclass(frozen=True)
class Data:
    """Training and evaluation data.

    Each of the two is a tree of CPU tensors of equal dim 0 (a tuple, dict, or namedtuple: indexed a batch at a time), a
    map-style data set (`__getitem__` and `__len__`: read by torch's DataLoader), torch's IterableDataset of samples (the
    part of this rank), or an iterable that gives this rank's batches itself (a DataLoader of yours: its batch_size must be
    this rank's share). `transform(batch) -> batch` runs on the host on each training batch; torch's, numpy's and Python's
    global random generators are then seeded by (seed, epoch, position), so that what it draws does not depend on
    workers, prefetching or restarts. The same holds for what a data set draws, sample by sample, and for what an iterable
    draws, batch by batch (the order of a shuffling DataLoader, unless it was given a generator of its own). Samplers and
    data sets with a `set_epoch` are told the epoch, also in workers, which stay for the whole run.

    `drop_last`: the samples that fill no batch of an epoch are left out. `repeats`: repeated augmentation; each image of a
    batch stands in it so many times, augmented anew. `check(batch)` looks at each batch on the host, of training and
    evaluation, and raises what is wrong. `timeout_s`: how long to wait for a batch of the workers, where there are any.

    `size_at(epoch, position)` says how large the samples are read in the step that begins at that sample of the epoch:
    training samples then come from the data set's `at_size(index, size)`. Evaluation reads them as they are.

    `num_workers="auto"`: as many as let reading keep up with the steps, at most the cores of the rank; found in the first
    steps of a run over a map-style data set. Other forms begin no workers then.

    With several ranks, `transform` of tensors in memory sees the batch of all ranks on each of them, so that it draws
    what it draws on one; `transform_share=True` gives it this rank's share alone (less host work, other draws). A data
    set's transform always sees the share.

    `prefetch` training batches are read ahead and copied to the device beside the steps before theirs (0: none). No number
    depends on it. What the data or `transform` looks at of the run (`trainer.step`) is then that many steps behind.

    `lengths`: the length of each training sample; batches are then of samples about as long (docs/text.md).
    `lay_out(microbatch) -> microbatch` runs on the host on each microbatch of training and evaluation, after the batch was
    cut and before it goes to the device: it cuts padding off, or packs sequences into rows. The batch is cut along dim 0 as
    ever; what a laid out microbatch looks like is between `lay_out` and the trainer, whose `count` must know what it holds.
    """

    train: Any
    evaluation: Any = None
    transform: Callable[[Any], Any] | None = None
    transform_share: bool = False
    collate: Callable[[list[Any]], Any] | None = None
    num_workers: int | Literal["auto"] = 0
    shuffle: bool = True
    prefetch: int = 2
    drop_last: bool = False
    repeats: int = 1
    check: Callable[[Any], None] | None = None
    timeout_s: float | None = None
    size_at: Callable[[int, int], int] | None = None
    lengths: Any = None
    lay_out: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        if self.prefetch < 0:
            raise ConfigError(f"prefetch={self.prefetch} batches cannot be kept ahead; use 2, or 0 for none.")
        if self.size_at is not None and not callable(getattr(self.train, "at_size", None)):
            raise ConfigError(
                f"size_at is given, and a {type(self.train).__name__} has no at_size(index, size); add it to read samples "
                "by, or resize batches in Trainer.augment."
            )
        if isinstance(self.repeats, bool) or not isinstance(self.repeats, int) or self.repeats < 1:
            raise ConfigError(
                f"Data(repeats={self.repeats!r}) is no number of copies; give 1 (each image once) or more."
            )
        if self.num_workers != "auto" and (not isinstance(self.num_workers, int) or self.num_workers < 0):
            raise ConfigError(
                f"Data(num_workers={self.num_workers!r}) is no number of workers; give 0 (none: the training process reads) "
                "or more."
            )
        if self.check is not None and not callable(self.check):
            raise ConfigError(
                f"Data(check=...) is a {type(self.check).__name__}; give a function that takes a batch and raises what is "
                "wrong with it."
            )
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ConfigError(
                f"Data(timeout_s={self.timeout_s}) is no time to wait; give seconds, or None: without end."
            )

    @property
    def workers(self) -> int:
        """Loader workers to begin with: none where their number is still to be found."""
        return 0 if self.num_workers == "auto" else self.num_workers


def form(source: Any) -> str:
    """How a source is read: `tensors`, `dataset`, `shards` or `batches`.

    Raises:
        ConfigError: it is none of them, or its tensors hold different numbers of samples.
    """
    if isinstance(source, Shards):
        return "shards"
    if isinstance(source, torch.utils.data.IterableDataset | torch.utils.data.DataLoader):
        return "batches"
    leaves = pytree.tree_leaves(source)
    if leaves and all(isinstance(leaf, torch.Tensor) for leaf in leaves) and not isinstance(source, list):
        sizes = {leaf.shape[0] if leaf.dim() else None for leaf in leaves}
        if len(sizes) != 1 or sizes == {None}:
            raise ConfigError(
                f"the tensors of the data hold {sorted(map(str, sizes))} samples; give tensors of one equal dim 0."
            )
        return "tensors"
    if isinstance(source, tuple | dict):
        # Both have a length and can be indexed, and would pass for data sets of two samples.
        odd = next((leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)), None)
        raise ConfigError(
            f"a {type(source).__name__} of columns must hold tensors alone, and this one holds a {type(odd).__name__}; "
            "convert it with torch.as_tensor, or give a data set whose __getitem__(i) returns sample i."
        )
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        return "dataset"
    if isinstance(source, Iterable):
        return "batches"
    raise ConfigError(
        f"a {type(source).__name__} is no data; give tensors of equal dim 0, a data set with __getitem__ and __len__, or "
        "an iterable of batches."
    )


def num_samples_of(source: Any) -> int | None:
    """Samples in a source; `None` where only going through it would tell."""
    kind = form(source)
    if kind == "tensors":
        return pytree.tree_leaves(source)[0].shape[0]
    return len(source) if kind == "dataset" else None


def taker(source: Any) -> Callable[[Any], Any]:
    """What copies the samples of a tree of tensors at given indices (int64, `[n]`) into a batch.

    The tree is looked at once: going through a pair for each batch takes as long as copying ten small images.
    """
    # index_select beats plain indexing several times over for small samples and for uint8.
    if isinstance(source, torch.Tensor):
        select = source.index_select
        return lambda indices: select(0, indices)
    if type(source) is tuple:
        parts = [taker(part) for part in source]
        return lambda indices: tuple([part(indices) for part in parts])
    if type(source) is dict:
        columns = {name: taker(part) for name, part in source.items()}
        return lambda indices: {name: column(indices) for name, column in columns.items()}
    leaves, spec = pytree.tree_flatten(source)
    return lambda indices: pytree.tree_unflatten([leaf.index_select(0, indices) for leaf in leaves], spec)
