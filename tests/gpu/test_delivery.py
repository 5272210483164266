"""Batches on their way to a GPU: copied beside the steps, without a wait of the host, and never written over too early."""

from __future__ import annotations

import warnings

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


class Pair:
    """A batch class of a user's own, which nobody told how to be pinned."""

    def __init__(self, samples):
        self.x, self.y = map(torch.stack, zip(*samples, strict=True))

    def to(self, device):
        moved = object.__new__(Pair)
        moved.x, moved.y = self.x.to(device), self.y.to(device)
        return moved


class OfTuples(Mlp):
    collate, pinned = None, False

    def build_data(self):
        loader = torch.utils.data.DataLoader(
            list(zip(*points(20), strict=True)),
            batch_size=5,
            num_workers=2,
            persistent_workers=True,
            pin_memory=self.pinned,
            collate_fn=self.collate,
        )
        return Data(train=loader)


class OfPairs(OfTuples):
    collate, whole_batch_loss = Pair, True

    def inputs(self, batch):
        return (batch.x,)

    def loss(self, output, batch):
        return super().loss(output, (batch.x, batch.y))

    def count(self, batch):
        return len(batch.y)


def losses_of(kind, device="cuda"):
    watcher = Recorder()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        kind(batch_size=5, epochs=3, device=device, observers=[watcher], **QUIET).fit()
    return [record["loss"] for record in watcher.steps], [str(one.message) for one in told]


@pytest.mark.parametrize("pinned", [False, True])
def test_PERSIST_2_a_batch_class_that_cannot_be_pinned_trains_through_all_epochs(pinned):
    torch.use_deterministic_algorithms(True)
    losses, told = losses_of(type("OfPairs", (OfPairs,), {"pinned": pinned}))
    assert len(losses) == 3 * 4
    assert len([text for text in told if "batches hold a Pair, which has no pin_memory()" in text]) == 1
    assert losses == losses_of(OfTuples)[0]
