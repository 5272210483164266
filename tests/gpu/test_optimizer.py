"""Optimizers on CUDA: states on the host, narrow weights, fewer gradients, and no wait of the host in a step."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.models import Rows
from tests.helpers import largest_difference, state

SETTINGS = {
    "batch_size": 512,
    "steps": 4,
    "device": "cuda",
    "deterministic": True,
    "run": {"dir": None},
    "log": {"every": 1},
}


def stepped(steps=4, **optimizer):
    """A trainer after some steps, and the peak of the device's memory in the last of them."""
    trainer = Rows(**SETTINGS, optimizer={"name": "adamw", **optimizer})
    batches = trainer.feed.training(trainer.task, trainer.plan)
    for step in range(steps):
        if step == steps - 1:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        trainer.train_step(next(batches))
    torch.cuda.synchronize()
    return trainer, torch.cuda.max_memory_allocated()


def moments(trainer):
    return [value for s in trainer.optimizer.state.values() for value in s.values() if value.dim() > 0]


def test_offloaded_moments_are_on_the_host_pinned_and_the_numbers_stay():
    plain, _ = stepped()
    trainer, _ = stepped(offload=True)
    assert {(m.device.type, m.is_pinned()) for m in moments(trainer)} == {("cpu", True)}
    assert {m.device.type for m in moments(plain)} == {"cuda"}
    assert len(moments(trainer)) == len(moments(plain)) > 20
    assert largest_difference(state(trainer), state(plain)) == 0.0
    assert all(torch.equal(a, b.cpu()) for a, b in zip(moments(trainer), moments(plain), strict=True))


def test_steps_in_the_backward_pass_take_less_memory_and_give_the_same_bits():
    plain, peak = stepped()
    kept = state(plain)
    gradients = sum(p.nbytes for p in plain.model.parameters())
    del plain
    trainer, lower = stepped(in_backward=True)
    assert largest_difference(state(trainer), kept) == 0.0
    assert lower < peak - gradients // 4


@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb", "muon", "adafactor", "adamw_8bit"])
@pytest.mark.parametrize("memory", [{}, {"in_backward": True}], ids=str)
def test_a_step_never_waits_for_the_device(name, memory):
    trainer = Rows(**{**SETTINGS, "deterministic": False}, optimizer={"name": name, **memory})
    batches = trainer.feed.training(trainer.task, trainer.plan)
    for _ in range(2):
        trainer.train_step(next(batches))
    batch = next(batches)
    torch.cuda.set_sync_debug_mode("error")
    trainer.train_step(batch)
    torch.cuda.set_sync_debug_mode("default")
    assert trainer.step == 3
