"""What the Trainer costs over the same training written by hand.

    python benchmarks/overhead.py [--rounds 9] [--save]

Flat loop and Trainer take turns in blocks of steps within one process, on the same data; both read their figures every
so many steps (100 for the MLP, 10 for the recipes). The figure is the median over rounds of the ratio of their times.
Identical code against itself shows the noise of the method. Beside it: microseconds a step, and Python calls a step
(counted apart, by the profiler of the interpreter).
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.saved import append
from fasttrain import Data, Trainer
from fasttrain.config import load
from fasttrain.models.resnet import build_resnet
from fasttrain.trainer.fit import train_until
from fasttrain.trainer.session import Session
from recipes.flat import bert as flat_bert

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "overhead.csv"
Block = Callable[[int], object]


# ---- the flat loops: one step for each batch


def flat_block(
    model: nn.Module,
    optimizer: Any,
    batches: Iterator[Any],
    loss_of: Callable[[Any, Any], Any],
    after: Any = None,
    log_every: int = 10,
) -> Block:
    """A hand-written loop."""

    def block(steps: int) -> None:
        for step in range(steps):
            batch = next(batches)
            loss = loss_of(model, batch)
            loss.backward()
            if after is not None:
                after(model)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step % log_every == log_every - 1:
                loss.item()

    return block


def trainer_block(trainer: Trainer) -> Block:
    """The loop of `fit`, a block at a time: everything that surrounds a step is there."""
    session = Session(trainer)
    session.__enter__()
    batches = trainer.feed.training(trainer.task, trainer.plan)
    trainer.model.train()

    def block(steps: int) -> None:
        end = trainer.step + steps
        train_until(session, batches, lambda step: step >= end)

    return block


def endless(loader: DataLoader) -> Iterator[Any]:
    """A loader without end."""
    while True:
        yield from loader


QUIET: dict[str, Any] = {"run": {"dir": None}, "log": {"every": 100}, "steps": 10**9}


def mlp() -> tuple[Block, Block, Block, int]:
    """Two layers; a step of a few hundred microseconds with torch's DataLoader."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(4096, 32, generator=g), torch.randint(10, (4096,), generator=g)

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))

    def loader() -> DataLoader:
        return DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(0))

    def flat() -> Block:
        m = model()
        optimizer = torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9, fused=True)
        return flat_block(m, optimizer, endless(loader()), lambda m, b: F.cross_entropy(m(b[0]), b[1]), log_every=100)

    class Mlp(Trainer):
        def build_data(self) -> Data:
            return Data(train=loader())

        def build_model(self) -> nn.Module:
            return model()

        def loss(self, output: Any, batch: Any) -> Any:
            return F.cross_entropy(output, batch[1])

    trainer = Mlp(batch_size=8, optimizer={"name": "sgd", "lr": 0.01}, **QUIET)
    return flat(), flat(), trainer_block(trainer), 500


def resnet() -> tuple[Block, Block, Block, int]:
    """The quickstart."""
    from recipes.flat.resnet import MOMENTUM, groups
    from recipes.image_data import digits

    resolved = load(
        ROOT / "configs" / "resnet_digits.yaml",
        ["run.dir=null", "log.every=10", "steps=1000000", "data.shift=0", "evaluate.every=1000000"],
    )
    trainer = resolved.trainer(resolved)
    data = digits(0)

    def batches() -> Iterator[Any]:
        while True:
            order = torch.randperm(len(data.train[1]))
            for first in range(0, len(order), 64):
                picked = order[first : first + 64]
                yield data.train[0].index_select(0, picked), data.train[1].index_select(0, picked)

    def flat() -> Block:
        torch.manual_seed(0)
        m = build_resnet("resnet8", num_classes=10, channels=1, stem="small", width=32)
        optimizer = torch.optim.SGD(groups(m), lr=0.01, momentum=MOMENTUM, nesterov=True, fused=True)
        return flat_block(m, optimizer, batches(), lambda m, b: F.cross_entropy(m(b[0]), b[1]))

    return flat(), flat(), trainer_block(trainer), 23


def bert() -> tuple[Block, Block, Block, int]:
    """Masked-LM pretraining of the tiny BERT."""
    resolved = load(
        ROOT / "configs" / "bert_docstrings.yaml",
        ["run.dir=null", "log.every=10", "evaluate.every=1000000", "epochs=null", "steps=1000000"],
    )
    trainer = resolved.trainer(resolved)
    config, text = flat_bert.Config(), flat_bert.corpus(flat_bert.Config().data)

    def batches() -> Iterator[Any]:
        while True:
            order = torch.randperm(len(text.train))
            for first in range(0, len(order) - config.batch_size, config.batch_size):
                tokens = text.train[order[first : first + config.batch_size]]
                yield flat_bert.hide(tokens, text, config.data.mask_probability)

    def flat() -> Block:
        torch.manual_seed(0)
        m = flat_bert.build_model(text, config)
        optimizer = torch.optim.AdamW(
            flat_bert.groups(m, config.weight_decay), lr=1e-4, betas=config.betas, eps=config.eps, fused=True
        )
        return flat_block(
            m,
            optimizer,
            batches(),
            lambda m, b: flat_bert.loss_of(m, b)[0],
            after=lambda m: nn.utils.clip_grad_norm_(m.parameters(), config.max_norm),
        )

    return flat(), flat(), trainer_block(trainer), 10


# ---- measuring


def timed(block: Block, steps: int) -> float:
    """Seconds a step."""
    began = time.perf_counter()
    block(steps)
    return (time.perf_counter() - began) / steps


def calls(block: Block, steps: int) -> float:
    """Python function calls a step."""
    count = 0

    def counting(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(counting)
    try:
        block(steps)
    finally:
        sys.setprofile(None)
    return count / steps


def compare(name: str, make: Callable[[], tuple[Block, Block, Block, int]], rounds: int) -> dict[str, Any]:
    """Flat, flat again, and the Trainer, in turns."""
    flat, same, trainer, steps = make()
    for block in (flat, same, trainer):
        block(max(3, steps // 5))
    times: dict[str, list[float]] = {"flat": [], "same": [], "trainer": []}
    for turn in range(rounds):
        order = [("flat", flat), ("same", same), ("trainer", trainer)]
        for label, block in order[turn % 3 :] + order[: turn % 3]:
            times[label].append(timed(block, steps))
    ratio = statistics.median(t / f for t, f in zip(times["trainer"], times["flat"], strict=True))
    noise = statistics.median(s / f for s, f in zip(times["same"], times["flat"], strict=True))
    return {
        "recipe": name,
        "ratio": round(ratio, 4),
        "flat_against_itself": round(noise, 4),
        "flat_us": round(statistics.median(times["flat"]) * 1e6, 1),
        "trainer_us": round(statistics.median(times["trainer"]) * 1e6, 1),
        "flat_calls": round(calls(flat, min(steps, 30)), 1),
        "trainer_calls": round(calls(trainer, min(steps, 30)), 1),
    }


def main() -> None:
    """Measure, print, and append to the results where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=["mlp", "resnet", "bert"])
    parser.add_argument("--save", action="store_true", help="append to benchmarks/results/overhead.csv")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, make in {"mlp": mlp, "resnet": resnet, "bert": bert}.items():
        if arguments.only in (None, name):
            row = compare(name, make, arguments.rounds)
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            rows.append(row)
    if arguments.save:
        append(RESULTS, rows, device=platform.processor() or platform.machine())


if __name__ == "__main__":
    main()
