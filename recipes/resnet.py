"""ResNets of torchvision on images: the quickstart trains on scikit-learn's digits, the full run on an ImageNet folder.

python -m fasttrain --config configs/resnet_digits.yaml
torchrun --nproc-per-node 8 -m fasttrain --config configs/resnet50_imagenet.yaml
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from fasttrain import Data, Trainer
from fasttrain.data.packed import pack_folder
from fasttrain.errors import ConfigError
from fasttrain.lazy import F, torch
from fasttrain.nn.mixing import Mixing


@dataclass(frozen=True, kw_only=True)
class ResNetModel:
    """`stem`: `imagenet` halves the image twice before the first block; `small` keeps small images as they are.

    `width` is the number of channels of the first stage. `norm=group` makes every sample's result its own.
    """

    name: Literal["resnet8", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152"] = "resnet18"
    stem: Literal["imagenet", "small"] = "imagenet"
    norm: Literal["batch", "group"] = "batch"
    width: int = 64
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ImageData:
    """`digits`: 8×8 grey images inside scikit-learn. `folder`: class folders of images below `path`/train and /val."""

    name: Literal["digits", "folder"] = "digits"
    path: str | None = None
    image_size: int = 224
    shift: int = 1
    num_workers: int = 0


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

    def build_data(self) -> Data:
        """Images and labels; tensors in memory, or a folder read by workers."""
        if self.config.data.name == "digits":
            return digits(self.config.data.shift)
        return image_folder(self.config.data)

    def build_model(self) -> Any:
        """A ResNet for as many classes as the data has."""
        from fasttrain.models.resnet import build_resnet

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

    def augment(self, batch: Any, seed: int) -> Any:
        """Images blended in pairs, and soft targets `[batch, classes]`, where the config asks for it."""
        return batch if self.mixing is None else self.mixing(batch[0], batch[1], seed)

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        """Images, `[batch, channels, height, width]`."""
        return (batch[0],)

    def loss(self, output: Any, batch: Any) -> Any:
        """Mean cross-entropy; labels are classes, or probabilities where images were blended."""
        return F.cross_entropy(
            output, batch[1], label_smoothing=self.config.label_smoothing if self.model.training else 0.0
        )

    def metrics(self, output: Any, batch: Any) -> dict[str, Any]:
        """Share of images whose likeliest class is the true one."""
        return {"accuracy": (output.argmax(1) == batch[1]).float().mean()}


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
    """Each image moved by up to `by` pixels in both directions, drawn anew; what comes in is `fill`."""
    count, _, height, width = images.shape
    padded = F.pad(images, (by, by, by, by), value=fill)
    down, right = torch.randint(2 * by + 1, (2, count))
    rows = down[:, None] + torch.arange(height)
    columns = right[:, None] + torch.arange(width)
    return (
        padded[torch.arange(count)[:, None, None], :, rows[:, :, None], columns[:, None, :]]
        .permute(0, 3, 1, 2)
        .contiguous()
    )


def image_folder(config: ImageData) -> Data:
    """An ImageNet-like folder: random crops and flips for training, centre crops for evaluation.

    Raises:
        ConfigError: `path` is not set, or lacks a `train` or `val` folder.
    """
    from pathlib import Path

    if config.path is None:
        raise ConfigError("data.name=folder needs data.path=DIR with train/CLASS/*.jpg and val/CLASS/*.jpg below it.")
    for part in ("train", "val"):
        if not (Path(config.path) / part).is_dir():
            raise ConfigError(f"data.path={config.path}: there is no folder '{part}' in it; give train/ and val/.")
    from torchvision import datasets
    from torchvision.transforms import v2

    normalise = [
        v2.PILToTensor(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
    ]
    size = config.image_size
    train = v2.Compose([v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip(), *normalise])
    val = v2.Compose([v2.Resize(size * 256 // 224, antialias=True), v2.CenterCrop(size), *normalise])
    return Data(
        train=pack_folder(datasets.ImageFolder(f"{config.path}/train", train)),
        evaluation=pack_folder(datasets.ImageFolder(f"{config.path}/val", val)),
        num_workers=config.num_workers,
    )


def num_classes(data: Data) -> int:
    """Classes of a data set."""
    return len(data.train.classes) if hasattr(data.train, "classes") else int(data.train[1].max()) + 1


def channels(data: Data) -> int:
    """Channels of an image."""
    return 3 if hasattr(data.train, "classes") else data.train[0].shape[1]
