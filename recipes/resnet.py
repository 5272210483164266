"""ResNets of torchvision on images: the quickstart trains on scikit-learn's digits, the full run on an ImageNet folder.

python -m fasttrain --config configs/resnet_digits.yaml
python -m fasttrain --config configs/resnet_patches.yaml
torchrun --nproc-per-node 8 -m fasttrain --config configs/resnet50_imagenet.yaml
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fasttrain import Data, Trainer
from fasttrain.data import StepSeed
from fasttrain.errors import ConfigError
from fasttrain.lazy import F
from fasttrain.nn.augment import Normalise, mirrored, resized, shifted
from fasttrain.nn.mixing import Mixing
from recipes.image_data import STATISTICS, ImageData, build_images, channels, num_classes


@dataclass(frozen=True, kw_only=True)
class ResNetModel:
    """`stem`: `imagenet` halves the image twice before the first block, `half` once; `small` keeps small images as they are.

    `width` is the number of channels of the first stage. `norm=group` makes every sample's result its own.
    """

    name: Literal["resnet8", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152"] = "resnet18"
    stem: Literal["imagenet", "half", "small"] = "imagenet"
    norm: Literal["batch", "group"] = "batch"
    width: int = 64
    dropout: float = 0.0


class ResNet(Trainer):
    """Image classification."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Trainer.Config):
        """`label_smoothing` takes that share of the target away from the true class.

        `mixup` and `cutmix` blend training images, by the parameter of their Beta distribution (docs/losses.md).
        """

        model: ResNetModel = field(default_factory=ResNetModel)
        data: ImageData = field(default_factory=ImageData)
        label_smoothing: float = 0.0
        mixup: float | None = None
        cutmix: float | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if not 0 <= self.label_smoothing < 1:
                raise ConfigError(f"label_smoothing={self.label_smoothing} is not in 0 to 1; use 0.1, or 0 for none.")
            if self.mixes:
                Mixing(classes=1, mixup=self.mixup, cutmix=self.cutmix)

        @property
        def mixes(self) -> bool:
            """Whether training images are blended."""
            return self.mixup is not None or self.cutmix is not None

    mixing: Mixing | None = None
    normalise: Normalise | None = None

    def build_data(self) -> Data:
        """Images and labels; tensors in memory, or a folder read by workers."""
        data = self.config.data
        return replace(build_images(data, self.world, self.size_at), repeats=data.repeats, prefetch=data.prefetch)

    def size_at(self, epoch: int, position: int) -> int:
        """The side of training images in the step that begins at a sample of an epoch."""
        data = self.config.data
        full = data.image_size if data.in_folders else self.data.train[0].shape[-1]
        steps = epoch * (self.feed.steps_per_epoch or 0) + position // self.config.batch_size
        return data.sizes.at(full, steps / self.total_steps, self.seed, epoch, position)

    def build_model(self) -> Any:
        """A ResNet for as many classes as the data has."""
        from fasttrain.models.resnet import build_resnet

        if self.config.data.name in STATISTICS:
            self.normalise = Normalise(*STATISTICS[self.config.data.name], device=self.device)
        if self.config.mixes:
            classes = num_classes(self.data)
            self.mixing = Mixing(classes=classes, mixup=self.config.mixup, cutmix=self.config.cutmix)
        config = self.config.model
        return build_resnet(
            config.name,
            num_classes=num_classes(self.data),
            channels=channels(self.data),
            stem=config.stem,
            norm=config.norm,
            width=config.width,
            dropout=config.dropout,
        )

    def augment(self, batch: Any, seed: StepSeed) -> Any:
        """Images from memory moved, mirrored and resized, and all blended in pairs, where the config asks for it.

        Blended ones have soft targets, `[batch, classes]`.
        """
        images, labels = batch
        data = self.config.data
        if not data.in_folders:
            if data.shift and data.name != "digits":  # those were moved on the host
                images = shifted(images, data.shift, seed.purpose("shift"), seed.offset)
            if data.mirrors:
                images = mirrored(images, seed.purpose("mirror"), seed.offset)
            if data.sizes is not None:
                images = resized(images, self.size_at(seed.epoch, seed.position))
        return (images, labels) if self.mixing is None else self.mixing(self.numbers(images), labels, seed)

    def numbers(self, images: Any) -> Any:
        """Images as floating numbers: bytes are made so on the device."""
        return images if self.normalise is None else self.normalise(images)

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        """Images, `[batch, channels, height, width]`."""
        return (self.numbers(batch[0]),)

    def loss(self, output: Any, batch: Any) -> Any:
        """Mean cross-entropy; labels are classes, or probabilities where images were blended."""
        return F.cross_entropy(
            output, batch[1], label_smoothing=self.config.label_smoothing if self.model.training else 0.0
        )

    def metrics(self, output: Any, batch: Any) -> dict[str, Any]:
        """Share of images whose likeliest class is the true one."""
        return {"accuracy": (output.argmax(1) == batch[1]).float().mean()}
