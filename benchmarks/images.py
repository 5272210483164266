"""Images a second of a folder of JPEGs: ours against torchvision's reference loader.

    python benchmarks/images.py [--path data/photos/train] [--workers 0 1 2] [--rounds 5] [--size 224] [--save]

Reference: torchvision's ImageFolder under RandomResizedCrop, flip, float32 and normalisation, by torch's DataLoader with the
same number of workers, at its best: workers stay, and batches are pinned nowhere. Ours: the recipe's data set, read as
the Trainer reads it, and normalised as on the device (here: the CPU, in the same process, so that both give the same).
Both take turns in one process, an epoch of the same images each; the figure is the median over rounds of the ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torchvision
from torch.utils.data import DataLoader, Subset
from torchvision import datasets
from torchvision.transforms import v2

from benchmarks.saved import append
from fasttrain import Data
from fasttrain.data.by_order import ByOrder
from fasttrain.data.images import ImageFolder
from fasttrain.data.order import Order
from fasttrain.data.reading import Position
from fasttrain.nn.augment import Normalise

RESULTS = Path(__file__).parent / "results" / "data_images.csv"
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BATCH = 64


def reference(path: str, size: int, workers: int, batches: int) -> Callable[[], float]:
    """Seconds of an epoch of torchvision's loader."""
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(size, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, DEVIATION),
        ]
    )
    dataset = Subset(datasets.ImageFolder(path, transform), range(BATCH * batches))
    loader = DataLoader(dataset, BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0)

    def epoch() -> float:
        started = time.perf_counter()
        seen = sum(len(images) for images, _ in loader)
        assert seen == BATCH * batches
        return time.perf_counter() - started

    return epoch


def ours(path: str, size: int, workers: int, batches: int) -> Callable[[], float]:
    """Seconds of as many images of our folder."""
    dataset = ImageFolder(path, size=size)
    order = Order(size=len(dataset), batch_size=BATCH, limit=batches)
    reader = ByOrder(Data(train=dataset, num_workers=workers), dataset, order, 0, 1)
    normalise = Normalise(MEAN, DEVIATION)
    portions: Iterator = reader.portions(Position())

    def epoch() -> float:
        started = time.perf_counter()
        for _ in range(batches):
            images = normalise(next(portions).batch[0])
            assert images.dtype is torch.float32
        return time.perf_counter() - started

    return epoch


def measure(path: str, size: int, workers: int, batches: int, rounds: int) -> dict[str, float]:
    """Images a second of both, and the ratio of their times: medians over rounds that take turns."""
    pair = reference(path, size, workers, batches), ours(path, size, workers, batches)
    for epoch in pair:
        epoch()
    times = [[epoch() for epoch in pair] for _ in range(rounds)]
    images = BATCH * batches
    return {
        "reference_images_per_s": round(images / statistics.median(theirs for theirs, _ in times)),
        "images_per_s": round(images / statistics.median(mine for _, mine in times)),
        "ratio": round(statistics.median(theirs / mine for theirs, mine in times), 2),
    }


def main() -> None:
    """Measure, print and, if asked, append to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default="data/photos/train")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--size", type=int, nargs="+", default=[224])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for size in arguments.size:
        for workers in arguments.workers:
            found = measure(arguments.path, size, workers, arguments.batches, arguments.rounds)
            row = {"images": Path(arguments.path).parent.name, "size": size, "workers": workers, **found}
            print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
            rows.append(row)
    if arguments.save:
        append(RESULTS, rows, torchvision=torchvision.__version__, cpus=os.cpu_count())


if __name__ == "__main__":
    main()
