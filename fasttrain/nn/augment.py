"""Changing images on their device, a batch at a time: moved, mirrored, resized, made numbers.

What is drawn for a sample follows from the seed of the step and the place of the sample in the step (`offset` + place in
this batch), so that a step draws the same on one rank and on many. Numbers are drawn on the host, which costs no wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fasttrain.lazy import F, torch


def drawn(seed: int, n: int, low: int, high: int, *, each: int = 1, offset: int = 0, device: Any = None) -> Any:
    """Whole numbers from `low` to before `high`: int64 `[n, each]`, those of the samples from `offset` on.

    >>> torch.equal(drawn(7, 5, 0, 9), torch.cat([drawn(7, 2, 0, 9), drawn(7, 3, 0, 9, offset=2)]))
    True
    """
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(low, high, (offset + n, each), generator=generator)
    return numbers[offset:].to(device, non_blocking=True)


def mirrored(images: Any, seed: int, offset: int = 0) -> Any:
    """Half of the images, drawn one by one, with left and right exchanged; `[n, ..., width]`. A new tensor."""
    flips = drawn(seed, len(images), 0, 2, offset=offset, device=images.device)
    return torch.where(flips.view(-1, *[1] * (images.dim() - 1)) == 1, images.flip(-1), images)


def shifted(images: Any, by: int, seed: int, offset: int = 0, fill: float = 0) -> Any:
    """Each image moved by up to `by` pixels in both directions; what comes in is `fill`. `[n, channels, height, width]`.

    It is a random crop of the image with `by` pixels of padding around it (He et al. 2016, section 4.2: 4 of 32).
    """
    down, right = drawn(seed, len(images), 0, 2 * by + 1, each=2, offset=offset, device=images.device).unbind(1)
    return moved(images, by, down, right, fill)


def moved(images: Any, by: int, down: Any, right: Any, fill: float = 0) -> Any:
    """The window of each image, padded with `by` pixels of `fill`, that begins at row `down` and column `right` (`[n]`)."""
    count, _, height, width = images.shape
    padded = F.pad(images, (by, by, by, by), value=fill)
    rows = down[:, None] + torch.arange(height, device=images.device)
    columns = right[:, None] + torch.arange(width, device=images.device)
    sample = torch.arange(count, device=images.device)[:, None, None]
    return padded[sample, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def resized(images: Any, size: int) -> Any:
    """Square images of another side, bilinear with antialiasing; of the same dtype."""
    if images.shape[-2:] == (size, size):
        return images
    # CUDA resizes no bytes.
    result = F.interpolate(images.float(), (size, size), mode="bilinear", antialias=True)
    return result if images.is_floating_point() else result.round_().clamp_(0, 255).to(images.dtype)


class Normalise:
    """Pixels from 0 to 255 as numbers of mean 0 and deviation 1 by channel: `normalise(images)`, float32, on their device.

    `mean` and `deviation`: of each channel, where 1 is the brightest. Images that are floating already stay as they are.
    Saves: uint8 is a quarter of float32 on the way from worker to trainer and over the bus to the device.
    """

    def __init__(self, mean: Sequence[float], deviation: Sequence[float], device: Any = None) -> None:
        # Made once, here: a constant made in each step would wait for its way to the device.
        self.factor = torch.tensor([1 / (255 * d) for d in deviation], device=device)[:, None, None]
        self.less = torch.tensor([m / d for m, d in zip(mean, deviation, strict=True)], device=device)[:, None, None]

    def __call__(self, images: Any) -> Any:
        """`[n, channels, height, width]`, uint8 to float32. A new tensor."""
        return images if images.is_floating_point() else images.to(torch.float32).mul_(self.factor).sub_(self.less)
