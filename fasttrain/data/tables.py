"""Hugging Face data sets and Arrow tables, as the readers take them. Columns stay where they are mapped into memory."""

from __future__ import annotations

from typing import Any

from fasttrain.errors import ConfigError
from fasttrain.lazy import require

TRAIN = ("train",)
EVALUATION = ("validation", "valid", "val", "dev", "test")


def prepared(source: Any, splits: tuple[str, ...], rank: int, ranks: int) -> Any:
    """A source of one of these kinds made ready for a rank; others as they are.

    Of a DatasetDict the first of `splits` is taken. Rows become dicts of tensors (`with_format("torch")`) unless a format
    was set; images and strings stay as they are. A stream is cut to the part of this rank.

    Raises:
        ConfigError: a DatasetDict has none of the splits.
    """
    kind = type(source)
    if kind.__module__.partition(".")[0] == "pyarrow" and kind.__name__ == "Table":
        source = _datasets("a pyarrow Table").Dataset(source)
        kind = type(source)
    if not any(base.__module__.startswith("datasets.") for base in kind.__mro__):
        return source
    datasets = _datasets(f"a {kind.__name__}")
    if isinstance(source, datasets.DatasetDict | datasets.IterableDatasetDict):
        found = next((split for split in splits if split in source), None)
        if found is None:
            raise ConfigError(
                f"the {kind.__name__} has the splits {', '.join(map(str, source))}, and none of {', '.join(splits)}; name "
                "the one that is meant: dataset['...']."
            )
        source = source[found]
    if isinstance(source, datasets.Dataset):
        return source.with_format("torch") if source.format["type"] is None else source
    if isinstance(source, datasets.IterableDataset):
        if ranks > 1:
            source = datasets.distributed.split_dataset_by_node(source, rank=rank, world_size=ranks)
        return source.with_format("torch")
    return source


def _datasets(what: str) -> Any:
    require("datasets.distributed", needed_by=what, install="pip install 'fasttrain[datasets]'")
    return require("datasets", needed_by=what, install="pip install 'fasttrain[datasets]'")
