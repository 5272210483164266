"""ResNets as torchvision builds them, with a stem for small images, other norms, other widths."""

from __future__ import annotations

from typing import Any

from torch import nn
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.models.resnet import ResNet as TorchvisionResNet

from fasttrain.errors import ConfigError, did_you_mean

# Blocks in each stage. resnet8 has one basic block in each of three stages, for images of a few pixels.
SHAPES: dict[str, tuple[type[nn.Module], list[int]]] = {
    "resnet8": (BasicBlock, [1, 1, 1]),
    "resnet18": (BasicBlock, [2, 2, 2, 2]),
    "resnet34": (BasicBlock, [3, 4, 6, 3]),
    "resnet50": (Bottleneck, [3, 4, 6, 3]),
    "resnet101": (Bottleneck, [3, 4, 23, 3]),
    "resnet152": (Bottleneck, [3, 8, 36, 3]),
}


def group_norm(channels: int) -> nn.GroupNorm:
    """GroupNorm with groups of at least 8 channels, at most 32 of them. Source: Wu and He 2018, arXiv:1803.08494."""
    groups = max(
        divisor for divisor in range(1, 33) if channels % divisor == 0 and channels // divisor >= min(8, channels)
    )
    return nn.GroupNorm(groups, channels)


def build_resnet(
    name: str,
    *,
    num_classes: int,
    channels: int = 3,
    stem: str = "imagenet",
    norm: str = "batch",
    width: int = 64,
    dropout: float = 0.0,
) -> nn.Module:
    """A ResNet: images `[batch, channels, height, width]` to logits `[batch, num_classes]`.

    `stem`: `imagenet` (7x7, stride 2, then pooling), `small` (3x3, stride 1) or `half` (3x3, stride 2).
    Module names are torchvision's, so its weights load where the shapes agree (names and sizes of the standard models).
    Source: He et al. 2016, arXiv:1512.03385.

    Raises:
        ConfigError: no such ResNet.
    """
    if name not in SHAPES:
        raise ConfigError(f"there is no ResNet '{name}'; {did_you_mean(name, SHAPES)}")
    block, stages = SHAPES[name]
    model: Any = _ResNet(block, stages, num_classes, group_norm if norm == "group" else nn.BatchNorm2d, width)
    if stem in ("small", "half"):
        model.conv1 = nn.Conv2d(channels, width, 3, stride=1 if stem == "small" else 2, padding=1, bias=False)
        model.maxpool = nn.Identity()
    elif channels != 3 or width != 64:
        model.conv1 = nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False)
    if stem != "imagenet" or channels != 3 or width != 64:
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    if dropout:
        model.fc = nn.Sequential(nn.Dropout(dropout), model.fc)
    return model


class _ResNet(TorchvisionResNet):
    """torchvision's ResNet with the stages asked for, of the width asked for."""

    def __init__(self, block: Any, stages: list[int], num_classes: int, norm_layer: Any, width: int) -> None:
        nn.Module.__init__(self)
        self._norm_layer = norm_layer
        self.inplanes, self.dilation, self.groups, self.base_width = width, 1, 1, 64
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = norm_layer(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        for i, blocks in enumerate(stages):
            layer = self._make_layer(block, width * 2**i, blocks, stride=1 if i == 0 else 2)
            self.add_module(f"layer{i + 1}", layer)
        self.num_stages = len(stages)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(width * 2 ** (len(stages) - 1) * block.expansion, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.BatchNorm2d | nn.GroupNorm):
                nn.init.constant_(module.weight, 1)
                nn.init.constant_(module.bias, 0)

    def forward(self, x: Any) -> Any:
        """Logits of images."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for i in range(self.num_stages):
            x = getattr(self, f"layer{i + 1}")(x)
        return self.fc(self.avgpool(x).flatten(1))
