"""Images for the ResNet recipe: small sets in memory, folders of JPEGs read by workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fasttrain import Data
from fasttrain.data.cache import CachedFiles, num_bytes
from fasttrain.data.images import train_and_val
from fasttrain.data.shared_bytes import shared_on_host
from fasttrain.data.sizes import Sizes
from fasttrain.distributed.affinity import cores_of_rank
from fasttrain.errors import ConfigError
from fasttrain.lazy import torch
from fasttrain.nn.augment import moved
from recipes import sets

if TYPE_CHECKING:
    from fasttrain.distributed.world import World

# Mean and deviation of each channel, where 1 is the brightest. Photos: of ImageNet's training set.
PHOTOS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
STATISTICS = {"fashion": ((0.286,), (0.353,)), "patches": PHOTOS, "photos": PHOTOS, "folder": PHOTOS}


@dataclass(frozen=True, kw_only=True)
class ImageData:
    """Which images, and what is done to those that are trained on (docs/images.md).

    `name`: `digits` (8×8, grey, inside scikit-learn), `fashion` (Fashion-MNIST, 28×28, grey), `patches` (of 100 photos,
    32×32), `photos` (real JPEGs in 27 folders), `folder` (class folders below `path`/train and `path`/val, as ImageNet).
    `path`: where the set lies, if not where `scripts/fetch_data NAME` puts it.
    `shift`: sets in memory are moved by up to so many pixels. `mirror`: half of the images are mirrored; null: those of
    patches and folders are. `sizes`: a schedule of smaller sides; of the images' own side where they are in memory.
    `repeats`: each image stands so many times in a batch, changed anew each time (repeated augmentation).
    `prefetch`: batches that are copied to the device ahead of their step.

    Of folders alone: `image_size`; `num_workers` (auto: found in the first steps); `reduced`: JPEGs are decoded no finer
    than needed; `cache`: keep files in memory up to `4GB` a host; `broken`: `skip` looks at every file before the run, and
    leaves out and lists those that cannot be read.
    """

    name: Literal["digits", "fashion", "patches", "photos", "folder"] = "digits"
    path: str | None = None
    image_size: int = 224
    shift: int = 1
    mirror: bool | None = None
    num_workers: int | Literal["auto"] = 0
    sizes: Sizes | None = None
    repeats: int = 1
    prefetch: int = 2
    reduced: bool = True
    cache: str | None = None
    broken: Literal["raise", "skip"] = "raise"

    def __post_init__(self) -> None:
        if self.cache is not None:
            num_bytes(self.cache)
        if self.shift < 0 or self.image_size < 1:
            raise ConfigError(f"shift={self.shift}, image_size={self.image_size}: use 0 or more, and 1 or more pixels.")
        if self.prefetch < 0 or (self.num_workers != "auto" and self.num_workers < 0):
            raise ConfigError(
                f"prefetch={self.prefetch}, num_workers={self.num_workers}: use 0 or more, or num_workers=auto."
            )
        if self.sizes is not None and self.in_folders:
            self.sizes.sides(self.image_size)

    @property
    def in_folders(self) -> bool:
        """Whether the images are files in folders, and not tensors in memory."""
        return self.name in ("photos", "folder")

    @property
    def mirrors(self) -> bool:
        """Whether half of the training images are mirrored."""
        return self.name not in ("digits", "fashion") if self.mirror is None else self.mirror


def build_images(config: ImageData, world: World, size_at: Callable[[int, int], int] | None = None) -> Data:
    """The data of a config. `size_at(epoch, position)`: the side of training images from folders.

    Raises:
        ConfigError: the set is not there, or not what it should be.
    """
    if config.in_folders:
        return image_folders(config, world, size_at if config.sizes is not None else None)
    if config.name == "digits":
        return digits(config.shift)
    if config.name == "fashion":
        folder = None if config.path is None else Path(config.path)
        parts = [sets.fashion_mnist(train, folder) for train in (True, False)]
        images = [torch.from_numpy(pixels.copy())[:, None] for pixels, _ in parts]
    else:
        parts = [sets.patches(train) for train in (True, False)]
        images = [torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous() for pixels, _ in parts]
    train, evaluation = zip(images, (torch.from_numpy(labels) for _, labels in parts), strict=True)
    return Data(train=train, evaluation=evaluation)


def image_folders(config: ImageData, world: World, size_at: Callable[[int, int], int] | None) -> Data:
    """Class folders of images: random boxes for training, the middle for evaluation.

    Raises:
        ConfigError: `path` is not set, or lacks a `train` or `val` folder.
    """
    if config.path is None and config.name == "folder":
        raise ConfigError("data.name=folder needs data.path=DIR with train/CLASS/*.jpg and val/CLASS/*.jpg below it.")
    path = sets.path_of("photos") if config.path is None else config.path
    train, val = train_and_val(path, size=config.image_size, reduced=config.reduced, mirror=config.mirrors)
    if config.broken == "skip":
        from fasttrain.data.broken import leave_out_broken

        workers = cores_of_rank() if config.num_workers == "auto" else config.num_workers
        for part in (train, val):
            leave_out_broken(part, world, workers)
    if config.cache is not None:
        # Training alone: evaluations are few.
        train.files = CachedFiles(train.files, shared_on_host(len(train), num_bytes(config.cache), world))
    return Data(train=train, evaluation=val, num_workers=config.num_workers, size_at=size_at)


def digits(shift: int = 1) -> Data:
    """1,437 training and 360 held-out handwritten digits, 8×8, as scikit-learn ships them; values in -1 to 1.

    Source: Alpaydin and Kaynak 1998, UCI Machine Learning Repository, doi:10.24432/C50P49.
    """
    from fasttrain.lazy import require

    datasets = require("sklearn.datasets", needed_by="data.name=digits", install="pip install 'fasttrain[recipes]'")
    images, labels = datasets.load_digits(return_X_y=True)
    images = torch.from_numpy(images).to(torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
    labels = torch.from_numpy(labels)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out, train = order[:360], order[360:]
    return Data(
        train=(images[train], labels[train]),
        evaluation=(images[held_out], labels[held_out]),
        transform=(lambda batch: (shifted(batch[0], shift), batch[1])) if shift else None,
    )


def shifted(images: Any, by: int, fill: float = -1.0) -> Any:
    """Each image moved by up to `by` pixels in both directions, drawn from the host's generator; what comes in is `fill`."""
    down, right = torch.randint(2 * by + 1, (2, len(images)))
    return moved(images, by, down, right, fill)


def num_classes(data: Data) -> int:
    """Classes of a data set."""
    return len(data.train.classes) if hasattr(data.train, "classes") else int(data.train[1].max()) + 1


def channels(data: Data) -> int:
    """Channels of an image."""
    return 3 if hasattr(data.train, "classes") else data.train[0].shape[1]
