"""Small trainers used by many tests."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from fasttrain import Data, Trainer

QUIET = {"run": {"dir": None}, "log": {"every": 1}}


class Recorder:
    """An observer that keeps what it is told."""

    def __init__(self):
        from fasttrain.observe import Observer

        self.inner = Observer()
        self.steps, self.evaluations, self.saves, self.summary, self.error = [], [], [], None, None
        self.remarks = []

    def started(self, run):
        self.run = run

    def stepped(self, record):
        self.steps.append(dict(record))

    def evaluated(self, record):
        self.evaluations.append(dict(record))

    def remarked(self, record):
        self.remarks.append(dict(record))

    def saved(self, record):
        self.saves.append(dict(record))

    def failed(self, error, summary):
        self.error = error

    def finished(self, summary):
        self.summary = summary

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class StopAt(Recorder):
    """Asks for a stop after each of some steps."""

    def __init__(self, *at):
        super().__init__()
        self.at = at

    def stepped(self, record):
        super().stepped(record)
        if record["step"] in self.at:
            self.run.request_stop("test")


def points(n=24, seed=3):
    """Inputs `[n, 8]` and classes `[n]`."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 8, generator=g), torch.randint(4, (n,), generator=g)


class Mlp(Trainer):
    """A small classifier; samples are rows of two tensors."""

    n = 24

    def build_data(self):
        return Data(train=points(self.n), evaluation=points(10, seed=4))

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))

    def loss(self, output, batch):
        return F.cross_entropy(output, batch[1])


class Passing(Trainer):
    """A model that gives its input back, a column of numbers."""

    def build_model(self):
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        return model

    def loss(self, output, batch):
        return output.mean()


def loss_and_gradients(trainer):
    """The loss of a trainer's first step, over all ranks. The gradients are then in its model."""
    batch = next(trainer.feed.training(trainer.task, trainer.plan))
    trainer.model.train()
    loss = trainer.plan.gradients_of(trainer.task, batch)
    if trainer.world.size > 1:
        torch.distributed.all_reduce(loss)
        loss = loss / trainer.world.size
    return loss.item()


class Weight(Trainer):
    """One weight w = 1; the loss of a sample is w times its value; masked samples (nan) are not counted."""

    values: tuple[float, ...] = (8.0, 1.0, 2.0, 3.0)

    def build_data(self):
        return Data(train=(torch.tensor(self.values),), shuffle=False)

    def build_model(self):
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        return model

    def compute_loss(self, batch):
        return (self.model.weight * batch[0]).mean()


def state(trainer):
    """A copy of the weights."""
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def largest_difference(a, b):
    """The largest absolute difference between two states."""
    assert set(a) == set(b)
    return max((a[name].double() - b[name].double()).abs().max().item() for name in a)


def by_dimension(model, weight_decay=0.01):
    """Parameter groups as one writes them by hand for a model without embeddings: matrices decay, the rest does not."""
    decays = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": decays, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
