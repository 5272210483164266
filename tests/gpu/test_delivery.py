"""Batches on their way to a GPU: copied beside the steps, without a wait of the host, and never written over too early."""

from __future__ import annotations

import pytest
import torch

from fasttrain import Data
from fasttrain.trainer.delivery import Carrier
from tests.helpers import QUIET, Mlp, Recorder, points

DEVICE = torch.device("cuda")


def busy(steps: int = 20) -> torch.Tensor:
    """Work of some ten milliseconds for the stream that is current."""
    x = torch.randn(2048, 2048, device=DEVICE)
    for _ in range(steps):
        x = x @ x * 1e-3
    return x


def test_a_copy_goes_on_beside_a_step():
    carrier, batch = Carrier(DEVICE), (torch.randn(64, 3, 224, 224),)
    carrier.receive(carrier.send(batch))  # streams, events and pinned memory are made
    busy(2)
    torch.cuda.synchronize()
    began, computed, copied = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    began.record()
    busy(200)
    computed.record()
    sent = carrier.send(batch)
    copied.record(carrier._side)
    received = carrier.receive(sent)
    torch.cuda.synchronize()
    assert began.elapsed_time(copied) < began.elapsed_time(computed)
    assert torch.equal(received[0].cpu(), batch[0])


def test_memory_of_a_batch_is_not_written_over_while_a_step_reads_it():
    carrier = Carrier(DEVICE)
    sums = []
    for number in range(30):
        (x,) = carrier.receive(carrier.send((torch.full((1 << 20,), float(number)),)))
        busy(2)
        sums.append(x.sum())  # runs long after the next batches were sent
        del x
    assert [value.item() / (1 << 20) for value in sums] == list(range(30))


def test_pinned_memory_is_used_again():
    carrier, before = Carrier(DEVICE), None
    for number in range(20):
        carrier.receive(carrier.send((torch.randn(1 << 20),)))
        torch.cuda.synchronize()
        if number == 3:
            before = torch.cuda.host_memory_stats()["num_host_alloc"]
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == before


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
def test_sending_and_receiving_never_waits_for_the_device(prefetch):
    kind = type("Mlp", (Mlp,), {"build_data": lambda self: Data(train=points(), prefetch=prefetch)})
    trainer = kind(batch_size=5, steps=40, device="cuda", **QUIET)
    batches = trainer.feed.training(trainer.task, trainer.plan, 40)
    for _ in range(10):
        trainer.train_step(next(batches))
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(20):
        trainer.train_step(next(batches))
        if prefetch:
            trainer.feed.read_ahead()


def trained(prefetch):
    watcher = Recorder()
    kind = type("Mlp", (Mlp,), {"build_data": lambda self: Data(train=points(), prefetch=prefetch)})
    summary = kind(batch_size=5, steps=30, device="cuda", observers=[watcher], **QUIET).fit()
    return [record["loss"] for record in watcher.steps], summary


def test_losses_are_the_same_bits_at_every_depth():
    torch.use_deterministic_algorithms(True)
    plain, _ = trained(0)
    for prefetch in (1, 2, 5):
        losses, summary = trained(prefetch)
        assert losses == plain
        assert 0 <= summary["data_wait_fraction"] < 1
    assert len(plain) == 30
