"""A trainer whose data set does what a test asks for, for runs in processes of their own.

FAULT (environment): `kill`, `bus`, `exit`, `hang`: what the worker that reads sample 13 does; `none`.
"""

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from fasttrain import Data, Trainer


def die(number):
    """As the system ends a process: nothing handles it."""
    signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None
    os.kill(os.getpid(), number)
    time.sleep(60)


FAULTS = {
    "none": lambda: None,
    "kill": lambda: die(signal.SIGKILL),
    "bus": lambda: die(signal.SIGBUS),
    "exit": lambda: os._exit(3),
    "hang": lambda: time.sleep(1000),
}


def stacked(samples):
    """As a user's own function does: in memory of the worker alone."""
    return torch.stack([x for x, _ in samples]), torch.stack([label for _, label in samples])


class Samples(torch.utils.data.Dataset):
    """Sample i is its number in the first of `width` columns, and a class."""

    def __init__(self, config, folder=None):
        self.config, self.folder = config, folder

    def __len__(self):
        return self.config.size

    def name_of(self, index):
        return f"row {index} of the table"

    def __getitem__(self, index):
        if index == 13 and torch.utils.data.get_worker_info() is not None:
            FAULTS[os.environ.get("FAULT", "none")]()
        time.sleep(self.config.sample_s)
        x = torch.zeros(self.config.width)
        x[0] = index
        return x, torch.tensor(index % 4)


class Reads(Trainer):
    """Writes the samples of each step to a file of its rank."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Trainer.Config):
        """Settings of the data."""

        workers: int = 0
        size: int = 48
        width: int = 4
        own_loader: bool = False
        persistent: bool = False
        own_collate: bool = False
        timeout_s: float | None = None
        step_s: float = 0.0
        sample_s: float = 0.0
        shuffle: bool = False
        evaluates: bool = False
        seen: str | None = None

    def build_data(self):
        c = self.config
        samples = Samples(c)
        train, workers = samples, c.workers
        if c.own_loader:
            train = torch.utils.data.DataLoader(
                samples,
                batch_size=c.batch_size // self.world.size,
                num_workers=workers,
                persistent_workers=c.persistent,
                timeout=c.timeout_s or 0,
            )
            return Data(train=train, evaluation=samples if c.evaluates else None)
        return Data(
            train=train,
            evaluation=samples if c.evaluates else None,
            num_workers=workers,
            collate=stacked if c.own_collate else None,
            shuffle=c.shuffle,
            timeout_s=c.timeout_s,
        )

    def build_model(self):
        return nn.Linear(self.config.width, 4)

    def loss(self, output, batch):
        return F.cross_entropy(output, batch[1])

    def train_step(self, batch):
        time.sleep(self.config.step_s)
        info = super().train_step(batch)
        if self.config.seen is not None:
            given = [] if batch is None else batch[0][:, 0].int().tolist()
            with open(Path(self.config.seen) / f"rank-{self.world.rank}.jsonl", "a") as file:
                file.write(json.dumps({"step": self.step, "indices": given, "ranks": self.world.size}) + "\n")
        return info


if __name__ == "__main__":
    from fasttrain.cli import main

    sys.exit(main())
