"""A folder of images, one folder a class, as ImageNet comes: read as uint8 pixels, decoded no finer than they are needed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from fasttrain.data.packed import PackedSamples, PackedStrings
from fasttrain.data.pixels import BROKEN, centre_box, random_box, read_pixels
from fasttrain.errors import BrokenSample, ConfigError
from fasttrain.lazy import np, torch

SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class ImageFolder:
    """A map-style data set of `root/CLASS/**/NAME.jpg`: uint8 pixels `[3, size, size]` and the number of the class.

    Classes are sorted by name. Training draws a box of the picture (`scale` of its area, 3/4 to 4/3 in aspect) and
    mirrors half of the pictures, by torch's global generator; else the middle of the picture is taken. The box is known
    before anything is decoded: a JPEG whose box is at least twice the size wanted is decoded to a half, a quarter or an
    eighth of its sides (`reduced=False`: always whole).
    Pixels stay bytes, a quarter of what float32 takes through workers' queues and over the bus; make them numbers on the
    device (`fasttrain.nn.augment.normalised`).

    Saves: about a third of the host's time an image over torchvision's reference loader (docs/images.md).
    `files`: what gives the bytes of a file by its number, for example a cache of them (`fasttrain.data.cache`).

    Raises:
        ConfigError: the folder, or one of a class, is missing or holds no image; a file is none by its name.
        BrokenSample: when a sample is read that is no picture, or not all of one.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        size: int = 224,
        train: bool = True,
        scale: tuple[float, float] = (0.08, 1.0),
        mirror: bool = True,
        reduced: bool = True,
    ) -> None:
        self.root, self.size, self.reduced = os.fspath(root), size, reduced
        self.classes = class_folders(self.root)
        self.samples = PackedSamples(
            (path, label) for label, name in enumerate(self.classes) for path in images_in(f"{self.root}/{name}")
        )
        self.mirrors = train and mirror
        self.box_of = partial(random_box, scale=scale) if train else centre_box
        self.files: Any = Files(self.samples.paths)

    @property
    def targets(self) -> Any:
        """The class of each sample, int64 `[n]`."""
        return self.samples.classes

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.at_size(index, self.size)

    def at_size(self, index: int, size: int) -> tuple[Any, int]:
        """A sample of `[3, size, size]` pixels."""
        try:
            pixels = read_pixels(self.files[index], self.box_of, size, self.reduced)
        except BROKEN as error:
            raise BrokenSample(self.name_of(index), reason_of(error)) from error
        if self.mirrors and torch.rand(()) < 0.5:
            pixels = pixels.flip(2)
        return pixels, int(self.samples.classes[index])

    def name_of(self, index: int) -> str:
        """The path of a sample."""
        return self.samples.paths[index]

    def fingerprint(self) -> str:
        """What ranks must agree on, told and digested: the classes, and how many samples each has."""
        counts = np.bincount(self.samples.classes, minlength=len(self.classes)).tolist()
        digest = hashlib.blake2b(repr((self.classes, counts)).encode(), digest_size=4).hexdigest()
        return f"{len(self)} images of {len(self.classes)} classes, {self.classes[0]} to {self.classes[-1]} ({digest})"

    def without(self, left_out: Any) -> ImageFolder:
        """This data set without the samples of these numbers, in place: all that follow move up.

        Raises:
            ConfigError: nothing would be left of a class.
        """
        kept = np.delete(np.arange(len(self)), left_out)
        classes = self.samples.classes[kept]
        gone = set(range(len(self.classes))) - set(classes.tolist())
        if gone:
            raise ConfigError(
                f"{self.root}/{self.classes[min(gone)]}: all images of this class are broken; look at them, or take the "
                "class out of train and val."
            )
        self.samples = PackedSamples(self.samples[i] for i in kept.tolist())
        self.files = Files(self.samples.paths)
        return self


class Files:
    """The bytes of files by their number: uint8 arrays."""

    def __init__(self, paths: PackedStrings) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return np.fromfile(self.paths[index], dtype=np.uint8)


def class_folders(root: str) -> list[str]:
    """Names of the folders in `root`, sorted.

    Raises:
        ConfigError: there is no such folder, or none in it.
    """
    if not os.path.isdir(root):
        raise ConfigError(f"{root}: there is no such folder; give one with a folder of images for each class.")
    names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise ConfigError(
            f"{root}: there is no folder in it; put the images of each class in one, as {root}/cat/1.jpg."
        )
    return names


def images_in(folder: str) -> list[str]:
    """Paths of all images below a folder, sorted; hidden files are passed over.

    Raises:
        ConfigError: there is none, or a file that is none by its name.
    """
    found = sorted(_files_below(folder))
    odd = next((path for path in found if not path.lower().endswith(SUFFIXES)), None)
    if odd is not None:
        raise ConfigError(
            f"{odd}: this is no image by its name; move it out of the folder, or give it one of the endings "
            f"{' '.join(SUFFIXES)}."
        )
    if not found:
        raise ConfigError(f"{folder}: there is no image of this class; remove the folder, or put its images there.")
    return found


def _files_below(folder: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from _files_below(entry.path)
            else:
                yield entry.path


def train_and_val(path: str | os.PathLike[str], **settings: Any) -> tuple[ImageFolder, ImageFolder]:
    """The data sets of `path`/train and `path`/val, which must hold the same classes; settings as of `ImageFolder`.

    Raises:
        ConfigError: one of them is missing or differs in its classes.
    """
    for part in ("train", "val"):
        if not (Path(path) / part).is_dir():
            raise ConfigError(f"{path}: there is no folder '{part}' in it; give train/CLASS/*.jpg and val/CLASS/*.jpg.")
    train = ImageFolder(Path(path) / "train", train=True, **settings)
    val = ImageFolder(Path(path) / "val", train=False, **settings)
    for name in sorted(set(train.classes) ^ set(val.classes)):
        has, lacks = ("train", "val") if name in train.classes else ("val", "train")
        raise ConfigError(
            f"{path}/{lacks}/{name}: there is no such folder, but there is {path}/{has}/{name}; both must hold the same "
            "classes, since the number of a class is its place in the sorted names."
        )
    return train, val


def reason_of(error: BaseException) -> str:
    """One line of why a file could not be read."""
    if isinstance(error, FileNotFoundError):
        return "the file is gone"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    # torchvision names its own source file before what it says.
    return lines[0].rpartition(".cpp:")[2].partition(", ")[2] or lines[0]
