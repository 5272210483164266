"""accumulation: how many microbatches, of which size, and that their mean is the mean of the batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fasttrain import ConfigError, Data, Microbatches
from fasttrain.core.plan import Plan
from fasttrain.core.strategy import Context
from fasttrain.core.task import Fed, Task
from fasttrain.errors import BatchError
from fasttrain.strategies.accumulation import Microbatches as Accumulation
from fasttrain.strategies.accumulation import MicrobatchesConfig, num_microbatches
from tests.helpers import QUIET, largest_difference, points, state
from tests.stack import Stack, StackModel, gradients

CPU = torch.device("cpu")


def plan_of(data_ranks=1, **config):
    context = Context(device=CPU, data_ranks=data_ranks)
    return Plan([Accumulation(MicrobatchesConfig(**config), context)], context)


def task_of(compute_loss=lambda batch: None, **settings):
    return Task(model=None, compute_loss=compute_loss, **settings)


def sizes(pieces):
    return [len(piece) for piece in pieces]


@pytest.mark.parametrize(
    ("samples", "config", "expected"),
    [
        (8, {"num": 1}, [8]),
        (8, {"num": 4}, [2, 2, 2, 2]),
        (8, {"num": 3}, [2, 3, 3]),
        (8, {"num": 8}, [1] * 8),
        (3, {"num": 5}, [0, 1, 0, 1, 1]),  # the same number on every rank, some of them empty
        (8, {"size": 8}, [8]),
        (8, {"size": 100}, [8]),
        (8, {"size": 4}, [4, 4]),
        (8, {"size": 3}, [2, 3, 3]),  # at most 3, and as even as can be
        (7, {"size": 3}, [2, 2, 3]),
        (1, {"size": 3}, [1]),
        (0, {"size": 3}, [0]),
    ],
)
def test_a_batch_is_cut_into_even_pieces(samples, config, expected):
    batch = torch.arange(samples)
    pieces = plan_of(**config).split(task_of(), batch)
    assert sizes(pieces) == expected
    assert torch.equal(torch.cat(pieces), batch)
    if samples:
        assert {piece.untyped_storage().data_ptr() for piece in pieces} == {batch.untyped_storage().data_ptr()}


@pytest.mark.parametrize(("here", "everywhere", "expected"), [(5, 9, 3), (4, 9, 3), (4, 8, 2), (0, 1, 1), (1, 1, 1)])
def test_every_rank_makes_the_same_number_however_the_samples_fall(here, everywhere, expected):
    """On two ranks, microbatches of at most two: the larger share decides."""
    batch = torch.arange(here)
    task = task_of()
    task.fed = Fed(batch, here, everywhere)
    assert len(plan_of(data_ranks=2, size=2).split(task, batch)) == expected
    task.fed = Fed(None, 0, everywhere)
    assert plan_of(data_ranks=2, size=2).split(task, None) == [None] * expected


def test_the_number_of_microbatches_is_arithmetic():
    assert num_microbatches(MicrobatchesConfig(num=3), 100) == 3
    assert [num_microbatches(MicrobatchesConfig(size=4), n) for n in (0, 1, 4, 5, 8, 9)] == [1, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("config", [{}, {"num": 2, "size": 4}, {"num": 0}, {"size": -1}])
def test_exactly_one_of_num_and_size_is_taken(config):
    with pytest.raises(ConfigError, match=r"give one of them, 1 or more, for example accumulation\.size=8"):
        MicrobatchesConfig(**config)


class CountedForwards(Stack):
    """Writes down the size of each microbatch, and whether it was in training."""

    n = 21

    def build_data(self):
        self.seen = []
        return Data(train=points(self.n), evaluation=points(10, seed=4))

    def loss(self, output, batch):
        self.seen.append((len(output), self.model.training))
        return super().loss(output, batch)


@pytest.mark.parametrize(
    ("config", "training", "evaluation"),
    [
        ({"num": 2}, [4, 4, 4, 4, 2, 3], [4, 4, 1, 1]),
        ({"size": 4}, [4, 4, 4, 4, 2, 3], [4, 4, 2]),
        ({"size": 3}, [2, 3, 3, 2, 3, 3, 2, 3], [2, 3, 3, 2]),
    ],
)
def test_an_epoch_with_a_short_last_batch_runs_these_microbatches(config, training, evaluation):
    accumulation = {"name": "microbatches", **config}
    trainer = CountedForwards(batch_size=8, epochs=1, accumulation=accumulation, **QUIET)
    trainer.fit()
    assert [size for size, is_training in trainer.seen if is_training] == training
    assert [size for size, is_training in trainer.seen if not is_training] == evaluation


@pytest.mark.parametrize("norm", [nn.LayerNorm, lambda width: nn.GroupNorm(2, width)], ids=["LayerNorm", "GroupNorm"])
@pytest.mark.parametrize("config", [{"num": 2}, {"num": 3}, {"size": 1}, {"size": 5}])
def test_the_gradient_of_pieces_is_that_of_the_whole(norm, config):
    torch.manual_seed(0)
    model = StackModel(norm)
    x, y = points(13)
    F.cross_entropy(model(x), y).backward()
    expected = gradients(model)
    model.zero_grad()
    task = task_of(lambda batch: F.cross_entropy(model(batch[0]), batch[1]))
    loss = plan_of(**config).gradients_of(task, (x, y))
    assert loss.item() == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-6)
    assert len(expected) == 16
    # float32 sums in another order.
    assert largest_difference(expected, gradients(model)) < 2e-7


def test_one_microbatch_is_the_whole_batch_to_the_bit():
    results = []
    for accumulation in (None, {"name": "microbatches", "num": 1}, {"name": "microbatches", "size": 8}):
        trainer = Stack(batch_size=8, steps=4, accumulation=accumulation, **QUIET)
        trainer.fit()
        results.append(state(trainer))
    assert largest_difference(results[0], results[1]) == largest_difference(results[0], results[2]) == 0.0


def test_microbatches_weigh_by_what_they_count_and_not_by_their_number():
    """Masked samples: 8 and 1 count in the first piece, 2 in the second. A mean of means would give 3.25."""
    values = torch.tensor([8.0, 1.0, 2.0, 0.0])
    mask = torch.tensor([1.0, 1.0, 1.0, 0.0])
    weight = torch.ones((), requires_grad=True)
    task = task_of(
        lambda batch: (weight * batch[0] * batch[1]).sum() / batch[1].sum(), count=lambda batch: batch[1].sum()
    )
    loss = plan_of(num=2).gradients_of(task, (values, mask))
    assert loss.item() == pytest.approx(11 / 3, rel=1e-6)
    assert weight.grad.item() == pytest.approx(11 / 3, rel=1e-6)
    assert task.counted == 3.0


def test_a_piece_that_counts_nothing_is_left_out_and_its_nan_does_not_spread():
    weight = torch.ones((), requires_grad=True)
    forwards = []

    def compute_loss(batch):
        forwards.append(len(batch))
        return (weight * batch[~batch.isnan()]).mean()

    nan = float("nan")
    task = task_of(compute_loss, count=lambda batch: (~batch.isnan()).sum())
    loss = plan_of(num=2).gradients_of(task, torch.tensor([nan, nan, 2.0, 4.0]))
    assert loss.item() == weight.grad.item() == 3.0
    assert forwards == [2]


def test_a_step_that_counts_nothing_is_refused_and_counted_apart():
    class Masked(Stack):
        def build_data(self):
            x, y = points(8)
            return Data(train=(x, torch.full_like(y, -100)))

        def count(self, batch):
            return (batch[1] != -100).sum()

    trainer = Masked(batch_size=8, steps=2, accumulation={"name": "microbatches", "num": 2}, **QUIET)
    before = state(trainer)
    summary = trainer.fit()
    assert (summary["steps"], summary["refused_steps"]) == (2, 2)
    assert largest_difference(before, state(trainer)) == 0.0


def test_gradients_are_cleared_once_a_step_and_the_optimizer_steps_once():
    steps = []

    class Counted(Stack):
        def build_optimizer(self, model):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer.register_step_post_hook(lambda *_: steps.append(self.step))
            return optimizer

    trainer = Counted(batch_size=8, steps=3, accumulation={"name": "microbatches", "num": 4}, **QUIET)
    trainer.fit()
    assert steps == [0, 1, 2]
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_an_own_split_is_asked_and_its_number_is_checked():
    class Rows(Stack):
        asked = []

        def split(self, batch, n):
            self.asked.append(n)
            return [(batch[0][i::n], batch[1][i::n]) for i in range(n)]

    accumulation = {"name": "microbatches", "num": 4}
    own, plain = Rows(batch_size=8, steps=2, accumulation=accumulation, **QUIET), Stack(batch_size=8, steps=2, **QUIET)
    own.fit()
    plain.fit()
    assert Rows.asked == [4, 4]
    # AdamW divides by the size of a gradient: where that is near nothing, rounding shows.
    assert largest_difference(state(own), state(plain)) < 1e-4

    class Fewer(Rows):
        def split(self, batch, n):
            return [batch]

    with pytest.raises(BatchError, match=r"split\(batch, 4\) gave 1 microbatches; return 4, empty ones if need be"):
        Fewer(batch_size=8, steps=1, accumulation=accumulation, **QUIET).fit()


def test_what_a_loader_has_cut_is_taken_as_it_is():
    pieces = Microbatches([torch.ones(3), torch.ones(5)])
    assert sizes(plan_of(num=4).split(task_of(), pieces)) == [3, 5]


def test_channels_are_not_taken_for_samples():
    batch = {"image": torch.zeros(8, 3), "mean_of_channels": torch.zeros(3)}
    with pytest.raises(BatchError, match=r"the batch cannot be cut along dim 0: .*override split"):
        plan_of(num=2).split(task_of(), batch)
