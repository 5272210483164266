"""Seeds for the random decisions of a run, each its own: the order of an epoch, the augmentation of a batch."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator

from fasttrain.lazy import np, torch


def mix(*parts: object) -> int:
    """A seed of 63 bits made from any parts, for example the run's seed, a purpose and an epoch.

    The same parts give the same seed on every machine and Python; any other parts give one that has nothing to do
    with it, which `seed + epoch` does not (run 1 in epoch 0 would repeat run 0 in epoch 1).

    >>> mix(0, "order", 1)
    8024286156118006313
    >>> mix(0, "order", 1) == mix(0, "order", 2)
    False
    """
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class StepSeed(int):
    """The seed of a step, the same on all ranks, and where in the run it was drawn for.

    `epoch` and `position`: where the step begins, in samples over all ranks (in batches where the data cuts them).
    `offset`: samples of the step that ranks before this one hold. What is drawn by `offset` + place in the batch is the
    same however the samples of a step are spread over ranks.
    """

    epoch: int
    position: int
    offset: int

    def __new__(cls, seed: int, *, epoch: int = 0, position: int = 0, offset: int = 0) -> StepSeed:
        """A seed with its place."""
        self = super().__new__(cls, seed)
        self.epoch, self.position, self.offset = epoch, position, offset
        return self

    def purpose(self, name: str) -> int:
        """A seed of its own for one of several things that are drawn in the step."""
        return mix(int(self), name)


def seed_host(seed: int) -> None:
    """Seed the generators that code on the host draws from: torch, numpy and Python."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextlib.contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """Seed the host's generators inside; outside, nothing was drawn."""
    state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    seed_host(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state[0])
        np.random.set_state(state[1])
        random.setstate(state[2])
