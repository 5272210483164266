"""Trainers of a size that a GPU is busy with, the same training by hand, and what a test asks of the device."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F

from fasttrain import Data, Trainer
from tests.helpers import Recorder

DEVICE = "cuda"
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


def rows():
    """Inputs `[ROWS, WIDTH]` and classes `[ROWS]`, on the host."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randint(8, (ROWS,), generator=generator)


class Rows(Trainer):
    def build_data(self):
        return Data(train=rows(), shuffle=False)

    def build_model(self):
        return Wide()

    def loss(self, output, batch):
        return F.cross_entropy(output, batch[1])


def sgd(model):
    """torch's own, which rounds to nearest."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=0.05, momentum=0.9, fused=True)


class BySgd(Rows):
    def build_optimizer(self, model):
        return sgd(model)


SETTINGS = {"batch_size": 512, "steps": 4, "deterministic": True, "run": {"dir": None}, "log": {"every": 1}}


def fitted(cls=BySgd, **settings):
    """A trainer after a run, and the loss of each step."""
    watcher = Recorder()
    trainer = cls(**{**SETTINGS, "device": DEVICE, **settings}, observers=[watcher])
    trainer.fit()
    return trainer, [record["loss"] for record in watcher.steps]


def initial(cls=BySgd, **settings):
    """The model as a run begins with it."""
    return cls(**{**SETTINGS, "device": DEVICE, **settings}).model


def by_hand(model, output_of=None, steps=4, batch=512, data=None, deterministic=True):
    """The loss of each step of a loop as one writes it; `output_of(model, x)`: the forward."""
    torch.use_deterministic_algorithms(deterministic)
    output_of = output_of or (lambda model, x: model(x))
    optimizer = sgd(model)
    x, y = (tensor.to(DEVICE) for tensor in (data or rows()))
    losses = []
    for i in range(steps):
        span = slice(i * batch, (i + 1) * batch)
        loss = F.cross_entropy(output_of(model, x[span]), y[span])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@contextmanager
def no_waiting():
    """Whatever makes the host wait for the device is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def step_without_waiting(trainer, warm_up=2):
    """Steps to warm up, and one in which the host must not wait."""
    batches = trainer.feed.training(trainer.task, trainer.plan)
    trainer.model.train()
    for _ in range(warm_up):
        trainer.train_step(next(batches))
    batch = next(batches)
    with no_waiting():
        trainer.train_step(batch)
    return trainer


def step_bytes(cls=Rows, **settings):
    """Peak bytes of a step above what lies in memory before it."""
    shown = {"batch_size": 16384, "steps": 9, "run": {"dir": None}, "optimizer": "sgd", "device": DEVICE}
    trainer = cls(**{**shown, **settings})
    batches = trainer.feed.training(trainer.task, trainer.plan)
    trainer.train_step(next(batches))
    batch = next(batches)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    trainer.train_step(batch)
    return torch.cuda.max_memory_allocated() - before
