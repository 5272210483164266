"""The quickstart in plain PyTorch: no Trainer, no plan, no strategy. It is what the framework is compared with, bit for bit.

python -m recipes.flat.resnet --steps 460
"""

from __future__ import annotations

import argparse
import hashlib
import math
from typing import Any

import torch
from torch.nn import functional as F

from fasttrain.models.resnet import build_resnet
from recipes.image_data import digits, shifted

BATCH_SIZE, LEARNING_RATE, MOMENTUM, WEIGHT_DECAY, SEED = 64, 0.1, 0.9, 5e-4, 0


def mix(*parts: object) -> int:
    """A seed out of several things."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def one_cycle(step: int, total: int, warmup: float = 0.2, start: float = 25.0, end: float = 1e4) -> float:
    """What the learning rate is multiplied by in a step: up and down on half cosines."""
    rising = int(warmup * total)
    low, last = 1 / start, 1 / (start * end)
    if step < rising:
        return low + (1 - low) * 0.5 * (1 - math.cos(math.pi * step / rising))
    progress = min(1.0, max(0.0, (step - rising) / max(1, total - 1 - rising)))
    return last + (1 - last) * 0.5 * (1 + math.cos(math.pi * progress))


def groups(model: Any) -> list[dict[str, Any]]:
    """Matrices and kernels decay; norms and biases do not."""
    decays = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": decays, "weight_decay": WEIGHT_DECAY}, {"params": rest, "weight_decay": 0.0}]


def train(steps: int, seed: int = SEED, norm: str = "batch", width: int = 32) -> tuple[Any, list[float]]:
    """Train for `steps` steps; returns the model and the loss of each step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images, labels = digits(shift=0).train
    torch.manual_seed(seed)
    model = build_resnet("resnet8", num_classes=10, channels=1, stem="small", norm=norm, width=width).to(device)
    optimizer = torch.optim.SGD(groups(model), lr=LEARNING_RATE, momentum=MOMENTUM, nesterov=True, fused=True)
    torch.manual_seed(seed)
    losses = []
    step, epoch = 0, 0
    while step < steps:
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(mix(seed, "order", epoch)))
        for first in range(0, len(labels), BATCH_SIZE):
            if step == steps:
                break
            picked = order[first : first + BATCH_SIZE]
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(mix(seed, "batch", epoch, first))
                x = shifted(images[picked], by=1).to(device)
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * one_cycle(step, steps)
            loss = F.cross_entropy(model(x), labels[picked].to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
            step += 1
        epoch += 1
    return model, [loss.item() for loss in losses]


def accuracy(model: Any) -> float:
    """Share of the held-out digits that are named rightly."""
    device = next(model.parameters()).device
    images, labels = (tensor.to(device) for tensor in digits(shift=0).evaluation)
    model.eval()
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=460)
    model, losses = train(parser.parse_args().steps)
    print(f"loss {losses[-1]:.4f}  accuracy {accuracy(model):.4f}")
