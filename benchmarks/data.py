"""Samples a second of data in memory: the feed of a Trainer against torch's DataLoader over the same TensorDataset.

    python benchmarks/data.py [--rounds 7] [--only 28] [--save]

The host's part alone, on one thread, shuffled, epoch after epoch. The two take turns in blocks of batches within one
process. The figure is the median over rounds of the ratio of their speeds.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.overhead import endless
from benchmarks.saved import append
from fasttrain import Data, Trainer

RESULTS = Path(__file__).parent / "results" / "data_in_memory.csv"
# Name, shape of an image, dtype, number of images: as many as make a few hundred MB at most.
KINDS: dict[str, tuple[tuple[int, ...], torch.dtype, int]] = {
    "28x28 float32": ((28, 28), torch.float32, 60000),
    "28x28 uint8": ((28, 28), torch.uint8, 60000),
    "32x32x3 uint8": ((32, 32, 3), torch.uint8, 50000),
    "224x224x3 uint8": ((224, 224, 3), torch.uint8, 2000),
    "224x224x3 float32": ((224, 224, 3), torch.float32, 500),
}


class Reading(Trainer):
    """A trainer that is never stepped: only its feed is asked."""

    source: tuple[torch.Tensor, torch.Tensor]

    def build_data(self) -> Data:
        """The images of a kind."""
        return Data(train=self.source)

    def build_model(self) -> nn.Module:
        """A trainer has one."""
        return nn.Linear(1, 1)

    def loss(self, output: Any, batch: Any) -> Any:
        """Never asked for."""
        raise NotImplementedError


def feed_of(source: tuple[torch.Tensor, torch.Tensor], batch_size: int) -> Iterator[Any]:
    """The batches that a Trainer is fed."""
    kind = type("Reading", (Reading,), {"source": source})
    trainer = kind(batch_size=batch_size, steps=10**9, device="cpu", run={"dir": None}, optimizer={"name": "sgd"})
    return trainer.feed.training(trainer.task, trainer.plan)


def speed(batches: Iterator[Any], number: int, batch_size: int) -> float:
    """Samples a second over so many batches."""
    began = time.perf_counter()
    for _ in range(number):
        next(batches)
    return number * batch_size / (time.perf_counter() - began)


def compare(name: str, batch_size: int, rounds: int) -> dict[str, Any]:
    """Both ways over the same images, in turns."""
    shape, dtype, size = KINDS[name]
    images = torch.randint(0, 255, (size, *shape), dtype=torch.uint8).to(dtype)
    source = images, torch.randint(10, (size,))
    loader = DataLoader(TensorDataset(*source), batch_size=batch_size, shuffle=True)
    ways: dict[str, Iterator[Any]] = {"feed": feed_of(source, batch_size), "loader": endless(loader)}
    measured: dict[str, Callable[[int], float]] = {
        way: lambda number, batches=batches: speed(batches, number, batch_size) for way, batches in ways.items()
    }
    # A block is one epoch and no more: making its order is part of the work.
    number = size // batch_size
    for block in measured.values():
        block(number // 4)
    speeds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds):
        for way in list(ways)[:: 1 if turn % 2 else -1]:
            speeds[way].append(measured[way](number))
    ratios = [a / b for a, b in zip(speeds["feed"], speeds["loader"], strict=True)]
    return {
        "images": name,
        "batch_size": batch_size,
        "ratio": round(statistics.median(ratios), 2),
        "least_ratio": round(min(ratios), 2),
        "feed_samples_per_s": round(statistics.median(speeds["feed"])),
        "loader_samples_per_s": round(statistics.median(speeds["loader"])),
    }


def main() -> None:
    """Measure, print, and append to the results where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="a part of the name of what to measure")
    parser.add_argument("--save", action="store_true", help="append to benchmarks/results/data_in_memory.csv")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for batch_size in (32, 256):
        for name in KINDS:
            if arguments.only in name:
                rows.append(compare(name, batch_size, arguments.rounds))
                print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if arguments.save:
        append(RESULTS, rows, device=platform.processor() or platform.machine())


if __name__ == "__main__":
    main()
