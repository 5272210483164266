"""Small image folders with real JPEGs: photos of scikit-learn, cut and scaled."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import numpy as np
from PIL import Image


@functools.cache
def photos() -> list[Image.Image]:
    """Two photos, 640 × 427."""
    # Beside scikit-learn, which takes seconds to import.
    package = importlib.util.find_spec("sklearn")
    images = Path(package.origin).parent / "datasets" / "images"
    return [Image.open(images / name).convert("RGB") for name in ("china.jpg", "flower.jpg")]


def folder(
    root: Path, classes: tuple[str, ...] = ("cat", "dog"), count: int = 3, size: tuple[int, int] = (96, 64)
) -> Path:
    """`root/CLASS/N.jpg`, all different."""
    rng = np.random.default_rng(0)
    for place, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for number in range(count):
            left, top = int(rng.integers(640 - size[0] + 1)), int(rng.integers(427 - size[1] + 1))
            photo = photos()[place % 2].crop((left, top, left + size[0], top + size[1]))
            photo.save(root / name / f"{number}.jpg", quality=90)
    return root


def both(root: Path, **settings) -> Path:
    """`root/train` and `root/val`."""
    folder(root / "train", **settings)
    folder(root / "val", **settings)
    return root
