"""Trainers of a size that a GPU is busy with."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from fasttrain import Data, Trainer

WIDTH, ROWS, BLOCKS = 256, 16384, 12


class Wide(nn.Module):
    """Residual blocks that keep about ten times their input for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Feedforward() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Feedforward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.expand, self.contract = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.contract(F.gelu(self.expand(self.norm(x))))


class Rows(Trainer):
    def build_data(self):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(ROWS, WIDTH, generator=generator)
        return Data(train=(x, torch.randint(8, (ROWS,), generator=generator)), shuffle=False)

    def build_model(self):
        return Wide()

    def loss(self, output, batch):
        return F.cross_entropy(output, batch[1])
