"""Mixup and CutMix: a training batch whose images, and whose targets alike, are blends of two samples.

Whole batches, on their device, and nothing is read from it: what is drawn are two or four numbers a step, on the host.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

from fasttrain.errors import BatchError, ConfigError
from fasttrain.lazy import torch


def partners(n: int, device: Any = None) -> Any:
    """Who each of `n` samples is mixed with: the neighbours 0 and 1, 2 and 3, and so on; int64, `[n]`.

    A last one without a neighbour stays itself. The order of samples is random already, so neighbours are as good as any
    pair, and they stay together where a batch is spread over ranks in even shares: a rank mixes what one process would.

    >>> partners(5).tolist()
    [1, 0, 3, 2, 4]
    """
    return (torch.arange(n, device=device) ^ 1).clamp_(max=n - 1)


def soft_targets(labels: Any, partner: Any, share: float, classes: int) -> Any:
    """`share` of each sample's own class, the rest of its partner's; `[n]` int64 to float32 `[n, classes]`.

    Labels that are `[n, classes]` already are blended as they are.
    """
    if labels.dim() == 1:
        labels = (labels[:, None] == torch.arange(classes, device=labels.device)).to(torch.float32)
    return labels.mul(share).add_(labels.index_select(0, partner), alpha=1.0 - share)


def mixup(images: Any, labels: Any, share: float, classes: int) -> tuple[Any, Any]:
    """`share` of each image and of its target, the rest of its partner's.

    `images` `[n, ...]` floating; `labels` `[n]` or `[n, classes]`. Returns images and targets `[n, classes]`.
    Source: Zhang et al. 2018, arXiv:1710.09412.
    """
    partner = partners(len(images), images.device)
    mixed = images.mul(share).add_(images.index_select(0, partner), alpha=1.0 - share)
    return mixed, soft_targets(labels, partner, share, classes)


def cutmix(images: Any, labels: Any, box: tuple[int, int, int, int], classes: int) -> tuple[Any, Any]:
    """The partner's pixels in a box of each image, and as much of its target as the box takes of the area.

    `images` `[n, ..., height, width]`; `box`: top, bottom, left, right (from the first to before the last).
    Source: Yun et al. 2019, arXiv:1905.04899.
    """
    top, bottom, left, right = box
    height, width = images.shape[-2:]
    partner = partners(len(images), images.device)
    mixed = images.clone()
    mixed[..., top:bottom, left:right] = images[..., top:bottom, left:right].index_select(0, partner)
    share = 1.0 - (bottom - top) * (right - left) / (height * width)
    return mixed, soft_targets(labels, partner, share, classes)


def draw_box(numbers: random.Random, share: float, height: int, width: int) -> tuple[int, int, int, int]:
    """A box of (1 - `share`) of the area, its centre anywhere; what lies outside of the image is cut off."""
    side = math.sqrt(1.0 - share)
    row, column = numbers.randrange(height), numbers.randrange(width)
    half_height, half_width = int(side * height / 2), int(side * width / 2)
    return (
        max(0, row - half_height),
        min(height, row + half_height),
        max(0, column - half_width),
        min(width, column + half_width),
    )


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """Mixup or CutMix, drawn anew for each batch from a seed: `mixing(images, labels, seed)`.

    `mixup` and `cutmix`: both parameters of the Beta distribution of the share that stays an image's own; `None` leaves
    that one out. With both, each batch takes one of them, by equal chance. `probability`: of mixing a batch at all; the
    targets are `[n, classes]` either way.
    Costs: two copies of the images a batch; a harder task, which wants more epochs.

    It is not `torchvision.transforms.v2.MixUp` and `CutMix`, whose pairs cross the shares of ranks (each sample with the
    one before it), and which draw from the global generator, where a stopped run would have to take it up.

    Raises:
        ConfigError: neither is given, or a number is out of its range.
    """

    classes: int
    mixup: float | None = None
    cutmix: float | None = None
    probability: float = 1.0

    def __post_init__(self) -> None:
        given = {name: alpha for name, alpha in (("mixup", self.mixup), ("cutmix", self.cutmix)) if alpha is not None}
        if not given:
            raise ConfigError(
                "neither mixup nor cutmix is given; use mixup=0.2 or cutmix=1.0, or leave the mixing out."
            )
        for name, alpha in given.items():
            if not 0 < alpha < math.inf:
                raise ConfigError(
                    f"{name}={alpha} is no parameter of a Beta distribution; use a number above 0, or null."
                )
        if not 0 < self.probability <= 1:
            raise ConfigError(f"probability={self.probability} is not above 0 and at most 1; use 1.0 for every batch.")

    def __call__(self, images: Any, labels: Any, seed: int) -> tuple[Any, Any]:
        """Mixed images and soft targets `[n, classes]` of `[n, channels, height, width]` and `[n]`.

        The same `seed` draws the same share and box. New tensors; what is given stays.

        Raises:
            BatchError: images that are not floating.
        """
        if not images.is_floating_point():
            raise BatchError(f"images of {images.dtype} cannot be blended; convert them to float32 before.")
        numbers = random.Random(seed)
        # All is drawn every time, so that no setting moves what another draws.
        mixes, cuts = numbers.random() < self.probability, numbers.random() < 0.5
        if not mixes:
            return images, soft_targets(labels, partners(len(labels), labels.device), 1.0, self.classes)
        if self.mixup is None or (cuts and self.cutmix is not None):
            assert self.cutmix is not None
            share = numbers.betavariate(self.cutmix, self.cutmix)
            height, width = images.shape[-2:]
            return cutmix(images, labels, draw_box(numbers, share, height, width), self.classes)
        return mixup(images, labels, numbers.betavariate(self.mixup, self.mixup), self.classes)
