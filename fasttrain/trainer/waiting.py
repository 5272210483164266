"""How much of a run is spent waiting for data, on what, and what to change."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fasttrain.data import Data
from fasttrain.data.data import form
from fasttrain.lazy import torch

# A larger share of the time than this is told.
MUCH = 0.05
# Told of runs long enough for it to matter and to be measured.
ENOUGH_S, ENOUGH_STEPS = 10.0, 20


class Timed:
    """A function that adds up the seconds it takes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.seconds = function, 0.0

    def __call__(self, *arguments: Any) -> Any:
        """Call the function."""
        began = time.perf_counter()
        try:
            return self.function(*arguments)
        finally:
            self.seconds += time.perf_counter() - began


@dataclass(slots=True)
class Spent:
    """Seconds of the process that trains, over batches of training data: all of the reading, and the way to the device."""

    batches: int = 0
    reading: float = 0.0
    copying: float = 0.0
    _timed: dict[str, Timed] = field(default_factory=dict)

    def timed(self, data: Data) -> Data:
        """The same data, with the functions that the user gave for batches timed."""
        for name in ("transform", "collate"):
            if (function := getattr(data, name)) is not None:
                self._timed[name] = Timed(function)
        return replace(data, **self._timed)

    def parts(self) -> dict[str, float]:
        """Seconds a batch by part: `samples` is what is left of the reading."""
        batches = self.batches or 1
        of_functions = {name: timed.seconds / batches for name, timed in self._timed.items()}
        samples = max(0.0, self.reading / batches - sum(of_functions.values()))
        return {"samples": samples, **of_functions, "copy": self.copying / batches}


class Waiting:
    """Says once that a run waits for its data, and what to change for this very data."""

    def __init__(self, data: Data, spent: Spent, rank: int, ranks: int, cores: int) -> None:
        self.data, self.spent, self.rank, self.ranks, self.cores = data, spent, rank, ranks, cores
        self.told = False

    def remark(self, waited_s: float, seconds: float, steps: int, num_workers: int) -> str | None:
        """What to say of a run that waited so long of so many seconds; None: nothing, or it was said."""
        if self.told or seconds < ENOUGH_S or steps < ENOUGH_STEPS or waited_s <= MUCH * seconds:
            return None
        self.told = True
        if self.rank:  # the figures differ, and one line for all of these ranks is enough
            return f"the run waits for data more than {MUCH:.0%} of the time; its rank 0 does not have to"
        part, takes = max(self.spent.parts().items(), key=lambda item: item[1])
        return (
            f"the run waits for data {waited_s / seconds:.0%} of the time ({waited_s / steps * 1000:.3g} ms of "
            f"{seconds / steps * 1000:.3g} ms a step; most of the host's time goes to the {part}, {takes * 1000:.3g} ms a "
            f"batch); {self.advice(part, num_workers)}"
        )

    def advice(self, part: str, num_workers: int) -> str:
        """What makes this part of this data faster."""
        kind = form(self.data.train)
        if part == "copy":
            return "let batches be smaller on the bus: uint8, converted and normalised on the device in Trainer.augment"
        if part == "transform":
            if kind == "tensors" and self.ranks > 1 and not self.data.transform_share:
                return (
                    f"set transform_share=True: each of the {self.ranks} ranks transforms the batch of all of them now; or "
                    "do it on the device, in Trainer.augment"
                )
            by_workers = "in the data set's __getitem__, where workers can do it, or " if kind == "dataset" else ""
            return f"do what transform does {by_workers}on the device, in Trainer.augment: it keeps this process busy"
        if kind == "tensors":
            return "keep smaller types in memory (uint8, converted in Trainer.augment), or take a larger batch_size"
        if kind == "batches":
            return self._advice_on_batches()
        has = f"num_workers is {num_workers}, and this rank has {self.cores} core{'s' if self.cores > 1 else ''}"
        if num_workers < self.cores and self.cores > 1:
            return f"set num_workers=auto, or a larger number ({has})"
        return f"keep decoded samples in memory, or decode at a smaller size ({has})"

    def _advice_on_batches(self) -> str:
        source = self.data.train
        if isinstance(source, torch.utils.data.DataLoader):
            has = f"it has {source.num_workers}, and this rank has {self.cores} cores"
            return f"give the DataLoader more num_workers ({has}), or a data set that is cheaper to read"
        return f"read ahead in the iterable, by processes of its own (this rank has {self.cores} cores)"
