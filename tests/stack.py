"""A small trainer whose model has repeated blocks, and settings for each built-in strategy."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from fasttrain import Data, Trainer
from tests.helpers import points

# What a strategy is given where its defaults do not suit a small model on the CPU.
SETTINGS = {
    "adapters.freeze": {"freeze": ["blocks.0"]},
    "accumulation.microbatches": {"num": 2},
    "activation_offload.cpu": {"min_bytes": 0, "in_flight": 2},
    # Traces and differentiates as inductor does, and then runs torch's own kernels: no C++ compiler is waited for.
    "compile.blocks": {"backend": "aot_eager"},
    "compile.model": {"backend": "aot_eager"},
    "float8.tensorwise": {"emulate": True, "min_features": 8, "multiple_of": 8},
    "float8.rowwise": {"emulate": True, "min_features": 8, "multiple_of": 8},
    "optimizer.sgd": {"lr": 0.05},
    "gradient_clipping.norm": {"max_norm": 0.1},
    "gradient_clipping.value": {"max_value": 0.01},
    "gradient_clipping.adaptive": {"last_linear": True},
    # So that a short run is averaged, and its averages are not its weights.
    "weight_averaging.ema": {"decay": 0.9},
    "weight_averaging.swa": {"start": 0},
    # Small enough that no step is refused, and moving in a short run.
    "precision.fp16": {"init_scale": 1024.0, "growth_interval": 3},
}

# What a strategy cannot do without.
COMPANIONS = {"activation_checkpointing.budget": [("compile", "blocks")], "float8.rowwise": [("precision", "bf16")]}


def setting(slot, name):
    """What a config says for a strategy, and for what it needs beside it."""
    companions = COMPANIONS.get(f"{slot}.{name}", [])
    given = [(slot, name), *companions]
    return {s: {"name": n, **SETTINGS.get(f"{s}.{n}", {})} for s, n in given}


class Block(nn.Module):
    """A residual block on vectors."""

    def __init__(self, width, norm, dropout):
        super().__init__()
        self.norm, self.dropout = norm(width), nn.Dropout(dropout)
        self.expand, self.contract = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.contract(self.dropout(F.gelu(self.expand(self.norm(x)))))


class StackModel(nn.Module):
    """Two blocks between two linear layers."""

    def __init__(self, norm=nn.LayerNorm, dropout=0.0, blocks=2):
        super().__init__()
        self.embed, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(Block(8, norm, dropout) for _ in range(blocks))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Stack(Trainer):
    """A classifier. Every number of a sample is its own: LayerNorm, no dropout."""

    norm, dropout = nn.LayerNorm, 0.0

    def build_data(self):
        return self.data_of(points())

    def data_of(self, train):
        """Training data; evaluated on, too, where a strategy acts on evaluations and refuses a run without."""
        return Data(train=train, evaluation=train if self.resolved.names.get("schedule") == "plateau" else None)

    def build_model(self):
        return StackModel(self.norm, self.dropout)

    def loss(self, output, batch):
        return F.cross_entropy(output, batch[1])


class Restless(Stack):
    """The same with all that a run has to remember: running statistics and dropout."""

    norm, dropout = nn.BatchNorm1d, 0.2


class PictureModel(StackModel):
    """A convolution before the blocks."""

    def __init__(self, norm, dropout):
        super().__init__(norm, dropout)
        self.embed = nn.Conv2d(2, 8, 2)

    def forward(self, x):
        x = self.embed(x).flatten(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Pictures(Stack):
    """The classifier of points as small images: what every strategy can work on but those of batch norms."""

    def build_data(self):
        x, y = points()
        return self.data_of((x.view(-1, 2, 2, 2), y))

    def build_model(self):
        return PictureModel(self.norm, self.dropout)


class NormedPictures(Pictures):
    """The same with batch norms."""

    norm = nn.BatchNorm1d


class RestlessPictures(Pictures):
    """The same with all that a run has to remember: running statistics and dropout."""

    norm, dropout = nn.BatchNorm1d, 0.2


def gradients(model):
    """A copy of the gradients by name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def batches_of(n=24, size=8):
    """The batches of points, in order."""
    x, y = points(n)
    return [(x[i : i + size], y[i : i + size]) for i in range(0, n, size)]


def is_finite(model):
    return all(torch.isfinite(p).all() for p in model.parameters())
