"""`Trainer.augment`: training batches that change on the device, drawn from a seed of their place in the run."""

import pytest
import torch
from torch.nn import functional as F

from fasttrain import Data
from fasttrain.core.batch import Microbatches
from fasttrain.distributed.world import World
from fasttrain.nn.losses import linear_cross_entropy
from fasttrain.nn.mixing import Mixing
from tests.helpers import QUIET, Mlp, Recorder, largest_difference, points, state
from tests.ranks import run_ranks
from tests.test_device_step import META, Sides


class Blended(Mlp):
    """Points as images of 1 x 2 x 4 pixels, blended; keeps the seeds it was given and the targets it was asked about."""

    mixing = Mixing(classes=4, mixup=0.5, cutmix=1.0)

    def build_data(self):
        self.seeds, self.shapes = [], []
        return super().build_data()

    def augment(self, batch, seed):
        self.seeds.append(seed)
        images, targets = self.mixing(batch[0].unflatten(1, (1, 2, 4)), batch[1], seed)
        return images.flatten(1), targets

    def loss(self, output, batch):
        self.shapes.append(tuple(batch[1].shape))
        return F.cross_entropy(output, batch[1])


def trained(kind=Blended, **settings):
    watcher = Recorder()
    trainer = kind(batch_size=8, optimizer={"name": "adamw", "lr": 0.01}, observers=[watcher], **{**QUIET, **settings})
    trainer.fit()
    return trainer, [record["loss"] for record in watcher.steps]


def test_training_is_augmented_and_evaluation_is_not():
    trainer, losses = trained(steps=3)
    assert trainer.shapes == [(8, 4)] * 3 + [(8,), (2,)]
    assert len(trainer.seeds) == 3
    assert losses != trained(Mlp, steps=3)[1]


def test_each_step_of_each_run_has_a_seed_of_its_own():
    seeds = trained(epochs=3)[0].seeds
    other = trained(epochs=3, seed=1)[0].seeds
    assert len(set(seeds + other)) == 18
    assert trained(epochs=3)[0].seeds == seeds


def test_microbatches_are_cut_from_the_augmented_batch():
    whole, losses = trained(epochs=2)
    cut, cut_losses = trained(epochs=2, accumulation={"name": "microbatches", "num": 3})
    assert cut.seeds == whole.seeds
    assert cut_losses == pytest.approx(losses, rel=1e-5)


def test_a_stopped_run_draws_on_as_if_it_had_not_been(tmp_path):
    class Stop(Recorder):
        def stepped(self, record):
            super().stepped(record)
            if record["step"] == 4:
                self.run.request_stop("test")

    straight, losses = trained(epochs=3)
    how = {"batch_size": 8, "optimizer": {"name": "adamw", "lr": 0.01}, "log": {"every": 1}, "epochs": 3}
    run = {"dir": str(tmp_path), "name": "halved", "id": "x"}
    first, second = Stop(), Recorder()
    halved = Blended(**how, run=run, observers=[first])
    assert halved.fit()["status"] == "stopped"
    resumed = Blended(**how, run=run, resume="auto", observers=[second])
    assert resumed.fit()["status"] == "done"
    assert halved.seeds[:4] + resumed.seeds == straight.seeds
    assert [record["loss"] for record in first.steps + second.steps] == losses
    assert largest_difference(state(straight), state(resumed)) == 0.0


def seeds_and_losses():
    trainer, losses = trained(epochs=2)
    return trainer.seeds, losses, state(trainer)


@pytest.mark.ranks
def test_two_ranks_draw_and_learn_as_one():
    seeds, losses, weights = seeds_and_losses()
    for rank_seeds, rank_losses, rank_weights in run_ranks(2, seeds_and_losses):
        assert rank_seeds == seeds
        assert rank_losses == pytest.approx(losses, rel=1e-5)
        assert largest_difference(rank_weights, weights) < 1e-5


class Placed(Mlp):
    """Keeps where each batch stands."""

    def build_data(self):
        self.places = []
        return super().build_data()

    def augment(self, batch, seed):
        self.places.append((seed.epoch, seed.position, seed.offset, len(batch[0])))
        return batch


def places():
    return trained(Placed, epochs=2)[0].places


@pytest.mark.ranks
def test_a_seed_tells_which_samples_of_the_step_a_rank_holds():
    """24 samples in steps of 8 (9 on three ranks would not divide): each rank begins where the one before ends."""
    assert places() == [(epoch, position, 0, 8) for epoch in (0, 1) for position in (0, 8, 16)]
    by_rank = run_ranks(3, places)
    for steps in zip(*by_rank, strict=True):
        assert len({step[:2] for step in steps}) == 1
        ends = [offset + samples for *_, offset, samples in steps]
        assert [step[2] for step in steps] == [0, *ends[:-1]]
        assert ends[-1] == 8
    assert [len(steps) for steps in by_rank] == [6, 6, 6]


class Counted(Blended):
    """Counts labels, which are no labels any more once blended."""

    def count(self, batch):
        assert batch[1].dtype is torch.int64
        return (batch[1] >= 0).sum()


def test_counts_are_of_the_batch_before():
    assert trained(Counted, epochs=2)[1] == trained(epochs=2)[1]
    assert trained(Counted, epochs=2, accumulation={"name": "microbatches", "num": 2})[1] == pytest.approx(
        trained(epochs=2)[1], rel=1e-5
    )


class Twice:
    """Gives one batch twice an epoch."""

    def __init__(self, batch):
        self.batch = batch

    def __iter__(self):
        return iter([self.batch, self.batch])


class Given(Blended):
    """The loader cuts microbatches itself."""

    def build_data(self):
        super().build_data()
        x, y = points(8)
        return Data(train=Twice(Microbatches([(x[:4], y[:4]), (x[4:], y[4:])])))


def test_given_microbatches_are_augmented_each_with_a_seed_of_its_own():
    trainer, losses = trained(Given, steps=2)
    assert len(losses) == 2
    assert len(set(trainer.seeds)) == 4
    assert trainer.shapes == [(4, 4)] * 4


class OnMeta(Blended):
    def join(self, settings):
        return World(device=META)


def test_a_mixed_step_stays_on_its_device():
    trainer = OnMeta(batch_size=8, steps=9, optimizer={"name": "sgd", "lr": 0.1}, **QUIET)
    batches = trainer.feed.training(trainer.task, trainer.plan)
    trainer.model.train()
    for _ in range(6):
        with Sides() as seen:
            batch = next(batches)
            trainer.plan.gradients_of(trainer.task, batch)
        # The batch itself is brought over: two tensors.
        assert seen.mixed == ["_to_copy.default"] * 2
        assert seen.reads == []
        assert batch[1].shape == (8, 4)


def test_a_loss_in_chunks_stays_on_its_device():
    hidden, weight = (torch.randn(shape, device=META, requires_grad=True) for shape in ((50, 8), (30, 8)))
    target = torch.zeros(50, dtype=torch.int64, device=META)
    with Sides() as seen:
        linear_cross_entropy(hidden, weight, target, label_smoothing=0.1, z_loss=1e-4, rows=7).backward()
    assert seen.mixed == seen.reads == []
    assert [hidden.grad.shape, weight.grad.shape] == [hidden.shape, weight.shape]
