"""From the bytes of a picture to the pixels of a box in it, at the size that is wanted."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

from fasttrain.lazy import F, np, torch

# Left, top, width and height in the pixels of the file.
Box = tuple[int, int, int, int]
BoxOf = Callable[[int, int], Box]
# What libjpeg can decode at once to a part of each side, and Pillow asks it for.
REDUCTIONS = (8, 4, 2)
# What Pillow and torchvision raise for bytes that are no whole picture.
BROKEN = (OSError, SyntaxError, ValueError, RuntimeError, EOFError, IndexError, struct.error, zlib.error)


def random_box(
    width: int, height: int, scale: tuple[float, float] = (0.08, 1.0), ratio: tuple[float, float] = (3 / 4, 4 / 3)
) -> Box:
    """A box of a share of the area in `scale` and of an aspect in `ratio`; draws from torch's global generator.

    The draws are those of torchvision's RandomResizedCrop.
    Source: Szegedy et al. 2014, arXiv:1409.4842.
    """
    from torchvision.transforms import v2

    drawn = v2.RandomResizedCrop(1, scale=scale, ratio=ratio).make_params(
        [torch.empty((1, height, width), device="meta")]
    )
    return drawn["left"], drawn["top"], drawn["width"], drawn["height"]


def centre_box(width: int, height: int, share: float = 224 / 256) -> Box:
    """The square in the middle whose side is `share` of the shorter side: Resize and CenterCrop of torchvision in one."""
    side = max(1, round(min(width, height) * share))
    return (width - side) // 2, (height - side) // 2, side, side


def reduction(width: int, height: int, size: int) -> int:
    """By how much a JPEG may be reduced while it is decoded: 8, 4, 2 or 1. The box keeps `size` pixels on both sides.

    >>> reduction(500, 375, 224), reduction(500, 450, 224), reduction(4000, 3000, 224)
    (1, 2, 8)
    """
    return next((by for by in REDUCTIONS if min(width, height) >= by * size), 1)


def read_pixels(encoded: Any, box_of: BoxOf, size: int, reduced: bool = True) -> Any:
    """The pixels of a box of an encoded picture: uint8 `[3, size, size]`.

    `encoded`: uint8 numpy array, the bytes of the file. `box_of(width, height)` is asked once the header told the size, so
    that a JPEG can be decoded at a part of its size (`reduced`): the fewer pixels it has then, the less is computed.
    Bilinear with antialiasing, as torchvision's reference; where a JPEG was reduced, that takes part of the averaging over.

    Raises:
        One of `BROKEN`: this is no picture, or a part of it is missing.
    """
    from PIL import Image

    with Image.open(io.BytesIO(encoded)) as image:
        left, top, width, height = box_of(*image.size)
        by = reduction(width, height, size) if image.format == "JPEG" and reduced else 1
        if by > 1:
            image.draft(None, (image.width // by, image.height // by))
            box = (left / by, top / by, (left + width) / by, (top + height) / by)
            return planes(image.resize((size, size), Image.Resampling.BILINEAR, box=box)).contiguous()
        pixels = planes(image.crop((left, top, left + width, top + height)))
    # Not by Pillow: torch resizes bytes with vector instructions, twice as fast.
    return F.interpolate(pixels[None], (size, size), mode="bilinear", antialias=True)[0]


def planes(image: Any) -> Any:
    """A Pillow image as uint8 `[3, height, width]`; what is transparent comes as the colour that lies under it."""
    if image.mode == "P":  # a palette may hold transparency, which Pillow does not convert to RGB without a warning
        image = image.convert("RGBA")
    image = image if image.mode == "RGB" else image.convert("RGB")
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)
