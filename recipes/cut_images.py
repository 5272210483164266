"""Image sets made of a package's pictures. All is drawn from fixed seeds, so that the same set comes out each time."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from fasttrain.lazy import np

TRAIN_CROPS, VAL_CROPS = 6, 2
# Training crops lie left of this column of a photo's 720, evaluation crops right of it: no pixel is in both.
BORDER = 448
PATCH_PHOTOS, TRAIN_PATCHES, TEST_PATCHES = 100, 500, 100
# A cell of a sheet of emoji: 32 pixels, and one of border on each side.
CELL = 34
VENDORS = ("google", "twitter")


def photos(sources: list[Path], target: Path) -> None:
    """Cut photos of 720 x 360 into JPEGs of several sizes: `target/{train,val}/CLASS/PHOTO-N.jpg`.

    The class is the word a photo's name begins with: "mountain" of mountain12-sfiera.jpg.
    """
    random = np.random.RandomState(0)
    for source in sources:
        photo = _opened(source)
        word = re.split("[^a-z]", source.name)[0]
        for number in range(TRAIN_CROPS + VAL_CROPS):
            train = number < TRAIN_CROPS
            low, high = (0, BORDER) if train else (BORDER, photo.width)
            width = random.randint(224, high - low + 1)
            height = random.randint(224, photo.height + 1)
            left = low + random.randint(0, high - low - width + 1)
            top = random.randint(0, photo.height - height + 1)
            folder = target / ("train" if train else "val") / word
            folder.mkdir(parents=True, exist_ok=True)
            crop = photo.crop((left, top, left + width, top + height))
            crop.save(folder / f"{source.stem}-{number}.jpg", quality=90)


def patches(sources: list[Path], target: Path) -> None:
    """Cut 100 of the photos, at half size, into patches of 32 x 32: those of the middle columns are for testing.

    Writes uint8 `[50000, 32, 32, 3]` and `[10000, 32, 32, 3]` with int64 labels: which photo it was.
    """
    random = np.random.RandomState(0)
    photos = [_opened(sources[len(sources) * i // PATCH_PHOTOS]).resize((360, 180)) for i in range(PATCH_PHOTOS)]
    train, test = [], []
    for photo in map(np.asarray, photos):
        # Columns 136 to 184 are tested, those from 0 to 134 and from 186 on are trained.
        sides = ((0, 103), (186, 329))
        train += [_patch(photo, *sides[number % 2], random) for number in range(TRAIN_PATCHES)]
        test += [_patch(photo, 136, 153, random) for _ in range(TEST_PATCHES)]
    labels = np.arange(PATCH_PHOTOS)
    _save(target, (np.stack(train), labels.repeat(TRAIN_PATCHES)), (np.stack(test), labels.repeat(TEST_PATCHES)))


def emoji(sources: list[Path], target: Path) -> None:
    """Cut sheets of emoji into pictures of 32 x 32 on white: each sixth emoji, in all its pictures, is for testing.

    `sources`: emoji.json and a sheet a vendor. Labels: the number of the emoji's group, by name; "Component" is left out.
    """
    table, *sheets = sources
    known = [entry for entry in json.loads(table.read_text()) if entry["category"] != "Component"]
    groups = sorted({entry["category"] for entry in known})
    parts: dict[bool, list[tuple[Any, int]]] = {False: [], True: []}
    for vendor, sheet in zip(VENDORS, sheets, strict=True):
        pictures = np.asarray(_opened(sheet, "RGBA"), np.float32)
        opaque = pictures[..., 3:] / 255
        on_white = (pictures[..., :3] * opaque + 255 * (1 - opaque)).astype(np.uint8)
        for number, entry in enumerate(known):
            for cell in (entry, *(entry.get("skin_variations") or {}).values()):
                if cell.get(f"has_img_{vendor}"):
                    x, y = cell["sheet_x"] * CELL + 1, cell["sheet_y"] * CELL + 1
                    picture = on_white[y : y + 32, x : x + 32]
                    parts[number % 6 == 0].append((picture, groups.index(entry["category"])))
    train, test = ((np.stack([p for p, _ in part]), np.array([g for _, g in part])) for part in parts.values())
    _save(target, train, test)


def _opened(path: Path, mode: str = "RGB") -> Any:
    from PIL import Image

    with Image.open(path) as image:
        return image.convert(mode)


def _patch(photo: Any, low: int, high: int, random: Any) -> Any:
    y, x = random.randint(0, 149), random.randint(low, high)
    return photo[y : y + 32, x : x + 32]


def _save(target: Path, train: tuple[Any, Any], test: tuple[Any, Any]) -> None:
    names = ("train_images", "train_labels", "test_images", "test_labels")
    arrays = (train[0], train[1].astype(np.int64), test[0], test[1].astype(np.int64))
    np.savez(target, **dict(zip(names, arrays, strict=True)))
