"""Blocks that torch.compile breaks, gives up, or compiles again and again. Tests look for their lines by the marks."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn


def line_of(mark: str) -> int:
    """The line of this file that ends with the mark."""
    lines = Path(__file__).read_text().splitlines()
    (line,) = [number for number, text in enumerate(lines, start=1) if text.endswith(f"# {mark}")]
    return line


class _Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)


class Whole(_Block):
    """Nothing is planted."""

    def forward(self, x):
        return x + self.linear(x).relu()


class Branches(_Block):
    """A branch on a tensor's values."""

    def forward(self, x):
        x = self.linear(x)
        if x.sum() > 0:  # branch
            x = x + 1
        return x.relu()


class Looks(_Block):
    """An operation that torch.compile does not support: the size of its result depends on values."""

    def forward(self, x):
        x = self.linear(x)
        positive = x.nonzero()  # unsupported
        return x * (1 + positive.shape[0])


class Unknown(_Block):
    """An operator of the user's that says nothing of the shapes it gives."""

    def forward(self, x):
        return torch.ops.fasttrain_tests.doubled(self.linear(x))  # unknown


class Loops(_Block):
    """A break within a loop: torch gives the whole function up."""

    def forward(self, x):
        for _ in range(2):
            x = self.linear(x)
            torch._dynamo.graph_break()  # loop
        return x


class Counts(_Block):
    """A number that changes from call to call, on which the graph rests: a storm of recompilations."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.calls = 0

    def forward(self, x):
        self.calls += 1  # storm
        return self.linear(x) * (1 + 0.01 * self.calls)


class Apart(_Block):
    """A part that its author left out of compilation."""

    def forward(self, x):
        return self.beside(self.linear(x)).relu()  # apart

    @torch.compiler.disable
    def beside(self, x):
        return x + 1


@torch.library.custom_op("fasttrain_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _backward(context, gradient):
    return gradient * 2


doubled.register_autograd(_backward)
