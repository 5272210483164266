"""Reported faults of gradient accumulation, each kind by the name of its case."""

# The names of the cases are written in capitals.

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from fasttrain import Data, Microbatches, Trainer
from tests.helpers import QUIET, Mlp, Recorder, Weight, largest_difference, points, state
from tests.ranks import run_ranks

SGD = {"name": "sgd", "lr": 1.0, "momentum": 0.0}
CUTS = [None, *({"name": "microbatches", "num": num} for num in (1, 2, 3, 4, 8)), {"name": "microbatches", "size": 1}]


class Tokens(Trainer):
    """One weight w = 1; the loss of a token is w times its value; a row of tokens is a sample, 0 is padding."""

    rows: tuple[tuple[float, ...], ...] = ((8, 0, 0), (1, 2, 3))

    def build_data(self):
        return Data(train=torch.tensor(self.rows), shuffle=False)

    def build_model(self):
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        return model

    def count(self, batch):
        return (batch != 0).sum()

    def compute_loss(self, batch):
        return (self.model.weight * batch).sum() / (batch != 0).sum()


class TokensCountedAsNumbers(Tokens):
    def count(self, batch):
        return int((batch != 0).sum())


class Given(Tokens):
    """The same rows, from an iterable that cuts by itself: a row a microbatch."""

    def build_data(self):
        a, b = torch.tensor(self.rows).split(1)
        return Data(train=iter([Microbatches([a, b])]))


def gradient(cls: type[Trainer], **settings: Any) -> tuple[float, float, float]:
    """After one step of rate 1: how far the weight moved, the logged norm and the logged loss."""
    watcher = Recorder()
    settings = {"batch_size": 2, "steps": 1, "optimizer": SGD, **settings}
    trainer = cls(**settings, observers=[watcher], **QUIET)
    trainer.fit()
    (record,) = watcher.steps
    return 1.0 - trainer.model.weight.item(), record["grad_norm"], record["loss"]


@pytest.mark.parametrize("accumulation", CUTS, ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("cls", [Tokens, TokensCountedAsNumbers])
def test_GA_NORM_1_a_short_and_a_long_sample_weigh_by_tokens(accumulation, precision, cls):
    assert gradient(cls, accumulation=accumulation, precision=precision) == (3.5, 3.5, 3.5)


@pytest.mark.parametrize("fused", [True, False])
def test_GA_NORM_1_a_loader_that_cuts_by_itself_weighs_by_tokens(fused):
    assert gradient(Given, optimizer={**SGD, "fused": fused}) == (3.5, 3.5, 3.5)


@pytest.mark.parametrize("accumulation", CUTS, ids=str)
def test_GA_NORM_1_adamw_takes_the_step_of_the_whole_batch(accumulation):
    weight = torch.ones(1, 1, requires_grad=True)
    plain = torch.optim.AdamW([weight], lr=0.1)
    weight.grad = torch.full((1, 1), 3.5)
    plain.step()
    trainer = Tokens(batch_size=2, steps=1, optimizer={"name": "adamw", "lr": 0.1}, accumulation=accumulation, **QUIET)
    trainer.fit()
    assert trainer.model.weight.item() == pytest.approx(weight.item(), rel=1e-7)


class Two(Trainer):
    """The loss is 2.0 whatever the weights; its gradient is 1."""

    def build_data(self):
        return Data(train=torch.ones(8, 1), evaluation=torch.ones(5, 1))

    def build_model(self):
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def compute_loss(self, batch):
        weight = self.model.weight
        return 2.0 + (batch * (weight - weight.detach())).mean()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("clipping", [None, {"name": "norm", "max_norm": 0.1}])
@pytest.mark.parametrize("num", [1, 2, 4, 8])
def test_GA_NORM_3_logged_loss_and_norm_do_not_grow_with_the_number_of_microbatches(num, clipping, precision):
    watcher = Recorder()
    trainer = Two(
        batch_size=8,
        epochs=3,
        precision=precision,
        accumulation={"name": "microbatches", "num": num},
        gradient_clipping=clipping,
        observers=[watcher],
        **QUIET,
    )
    trainer.fit()
    assert [(record["loss"], record["grad_norm"]) for record in watcher.steps] == [(2.0, 1.0)] * 3
    assert [record["metrics"]["loss"] for record in watcher.evaluations] == [2.0] * 3


class Ones(Weight):
    """Every sample has the gradient 1."""

    values = (1.0,) * 6


class OnesFromLoader(Ones):
    def build_data(self):
        return Data(train=torch.utils.data.DataLoader(torch.ones(6, 1), batch_size=4))

    def compute_loss(self, batch):
        return (self.model.weight * batch).mean()


class Stream(torch.utils.data.IterableDataset):
    """Six samples; nobody can know that beforehand."""

    def __iter__(self):
        return iter(torch.ones(6, 1))


class OnesFromStream(OnesFromLoader):
    def build_data(self):
        return Data(train=torch.utils.data.DataLoader(Stream(), batch_size=4))


class OnesCutByTheLoader(OnesFromLoader):
    """Windows of four and two microbatches of one sample each."""

    def build_data(self):
        one = torch.ones(1, 1)
        return Data(train=iter([Microbatches([one] * 4), Microbatches([one] * 2)]))


class OnesCounted(Ones):
    def count(self, batch):
        return len(batch[0])


def path_of(cls: type[Trainer], length: dict[str, int], **settings: Any) -> list[float]:
    weights = [1.0]

    class Watched(cls):
        def train_step(self, batch):
            info = super().train_step(batch)
            weights.append(self.model.weight.item())
            return info

    settings = {"batch_size": 4, "optimizer": SGD, **length, **settings}
    Watched(**settings, **QUIET).fit()
    return [after - before for before, after in pairwise(weights)]


@pytest.mark.parametrize("accumulation", CUTS, ids=str)
@pytest.mark.parametrize("cls", [Ones, OnesCounted])
def test_GA_LAST_1_a_short_last_window_moves_as_far_as_a_whole_one(cls, accumulation):
    assert path_of(cls, {"epochs": 2}, accumulation=accumulation) == [-1.0] * 4


@pytest.mark.parametrize("accumulation", CUTS, ids=str)
@pytest.mark.parametrize("cls", [OnesFromLoader, OnesFromStream])
def test_GA_LAST_1_a_short_last_batch_of_a_loader_moves_as_far_as_a_whole_one(cls, accumulation):
    assert path_of(cls, {"steps": 4}, accumulation=accumulation) == [-1.0] * 4


def test_GA_LAST_1_a_run_resumed_right_before_the_short_batch_of_a_stream_goes_on(tmp_path):
    settings = {
        "batch_size": 4,
        "optimizer": SGD,
        "accumulation": {"name": "microbatches", "num": 2},
        "run": {"dir": str(tmp_path), "name": "a", "id": "b"},
    }
    OnesFromStream(**settings, steps=1).fit()
    resumed = OnesFromStream(**{**settings, "steps": 4}, resume=str(tmp_path / "a" / "b"))
    resumed.fit()
    assert (resumed.step, resumed.model.weight.item()) == (4, -3.0)


@pytest.mark.parametrize("accumulation", [None, {"name": "microbatches", "num": 4}], ids=str)
def test_GA_LAST_1_a_short_window_cut_by_the_loader_moves_as_far_as_a_whole_one(accumulation):
    assert path_of(OnesCutByTheLoader, {"steps": 2}, accumulation=accumulation) == [-1.0] * 2


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("fused", [True, False])
def test_GA_LAST_1_in_half_precision_with_clipping_too(precision, fused):
    moved = path_of(
        Ones,
        {"epochs": 2},
        precision=precision,
        optimizer={**SGD, "fused": fused},
        gradient_clipping={"name": "norm", "max_norm": 0.5},
        accumulation={"name": "microbatches", "size": 1},
    )
    assert moved == pytest.approx([-0.5] * 4, abs=1e-5)


class OneEach(Trainer):
    """Sample i touches parameter i alone."""

    def build_data(self):
        return Data(train=torch.arange(5))

    def build_model(self):
        return nn.ParameterList([nn.Parameter(torch.zeros(())) for _ in range(5)])

    def compute_loss(self, batch):
        return torch.stack([self.model[i] for i in batch.tolist()]).mean()


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("accumulation", CUTS, ids=str)
def test_GA_LAST_2_microbatches_after_the_last_whole_window_reach_a_step(optimizer, fused, accumulation):
    settings = {"optimizer": {"name": optimizer, "fused": fused}, "accumulation": accumulation, "schedule": "linear"}
    trainer = OneEach(batch_size=4, epochs=1, **settings, **QUIET)
    assert (trainer.feed.steps_per_epoch, trainer.feed.total_steps) == (2, 2)
    assert trainer.fit()["steps"] == 2
    assert [parameter.item() < 0 for parameter in trainer.model] == [True] * 5
    assert trainer.optimizer.param_groups[0]["lr"] == 0.0


class Windows(Mlp):
    """Notes how many microbatches each step has."""

    n = 3

    def train_step(self, batch):
        self.windows = [*getattr(self, "windows", []), 0]
        return super().train_step(batch)

    def compute_loss(self, batch):
        if self.model.training:
            self.windows[-1] += 1
        return super().compute_loss(batch)

    def loss(self, output, batch):
        self.log("accuracy", (output.argmax(1) == batch[1]).float().mean())
        return super().loss(output, batch)


class WindowsFromLoader(Windows):
    def build_data(self):
        return Data(train=torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*points(3)), batch_size=2))


@pytest.mark.parametrize("cls", [Windows, WindowsFromLoader])
def test_GA_LAST_3_a_window_never_reaches_into_the_next_epoch(cls):
    watcher = Recorder()
    trainer = cls(
        batch_size=2, epochs=2, accumulation={"name": "microbatches", "size": 1}, observers=[watcher], **QUIET
    )
    trainer.fit()
    assert trainer.windows == [2, 1, 2, 1]
    assert [record["epoch"] for record in watcher.steps] == pytest.approx([2 / 3, 1, 5 / 3, 2], abs=0.17)
    assert all(0.0 <= record["accuracy"] <= 1.0 for record in watcher.steps)
    assert {round(record["accuracy"] * 2) / 2 for record in watcher.steps} == {r["accuracy"] for r in watcher.steps}


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_GA_LAST_3_a_run_resumed_inside_an_epoch_keeps_its_windows(tmp_path, stop):
    class Stop(Recorder):
        def stepped(self, record):
            if record["step"] == stop:
                self.run.request_stop("test")

    settings = {
        "batch_size": 2,
        "epochs": 2,
        "accumulation": {"name": "microbatches", "size": 1},
        "log": {"every": 1},
        "run": {"dir": str(tmp_path), "name": "a", "id": "b"},
    }
    first = Windows(**settings, observers=[Stop()])
    assert first.fit()["status"] == "stopped"
    second = Windows(**settings, resume="auto")
    assert second.fit()["steps"] == 4
    assert first.windows + second.windows == [2, 1, 2, 1]


# ---- two ranks


class OneNetTwoLosses(Mlp):
    n = 21  # 8, 8, 5: the last step has 2 samples on one rank and 3 on the other


class UnequalStream(Weight):
    """An iterable that gives the ranks shares of other sizes: 3 samples of gradient 1 here, 1 of gradient 5 there."""

    def build_data(self):
        rows = torch.full((3, 1), 1.0) if self.world.rank == 0 else torch.full((1, 1), 5.0)
        return Data(train=iter([(rows,)]))


def on_two_ranks() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for cut in (None, 1, 2, 3):
        accumulation = None if cut is None else {"name": "microbatches", "num": cut}
        for precision in ("fp32", "fp16"):
            found[f"tokens {cut} {precision}"] = gradient(Tokens, accumulation=accumulation, precision=precision)
        found[f"ones {cut}"] = path_of(Ones, {"epochs": 1}, accumulation=accumulation)
        trainer = OneNetTwoLosses(batch_size=8, epochs=2, optimizer="sgd", accumulation=accumulation, **QUIET)
        trainer.fit()
        found[f"net {cut}"] = state(trainer)
        trainer = OneEach(batch_size=4, epochs=1, accumulation=accumulation, **QUIET)
        trainer.fit()
        found[f"one each {cut}"] = [parameter.item() for parameter in trainer.model]
        trainer = Two(batch_size=8, epochs=1, accumulation=accumulation, observers=[watcher := Recorder()], **QUIET)
        trainer.fit()
        found[f"two {cut}"] = [(record["loss"], record["grad_norm"]) for record in watcher.steps]
    found["unequal"] = path_of(UnequalStream, {"steps": 1})
    found["rank"] = dist.get_rank()
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(2, on_two_ranks, timeout_s=120)


@pytest.mark.ranks
@pytest.mark.parametrize("cut", [None, 1, 2, 3])
def test_GA_NORM_1_samples_of_two_ranks_weigh_by_tokens(ranks, cut):
    for found in ranks:
        for precision in ("fp32", "fp16"):
            assert found[f"tokens {cut} {precision}"] == (3.5, 3.5, 3.5)
        assert found[f"two {cut}"] == [(2.0, 1.0)]


@pytest.mark.ranks
@pytest.mark.parametrize("cut", [None, 1, 2, 3])
def test_GA_LAST_1_a_short_last_window_over_two_ranks_is_right(ranks, cut):
    one = OneNetTwoLosses(batch_size=8, epochs=2, optimizer="sgd", **QUIET)
    one.fit()
    for found in ranks:
        assert found[f"ones {cut}"] == [-1.0, -1.0]
        assert all(value < 0 for value in found[f"one each {cut}"])
        # float32 sums in another order: 6 steps of rounding.
        assert largest_difference(found[f"net {cut}"], state(one)) < 1e-6


@pytest.mark.ranks
def test_GA_NORM_1_ranks_whose_iterables_give_unequal_batches_weigh_by_samples(ranks):
    assert [found["unequal"] for found in ranks] == [[-2.0], [-2.0]]


def test_the_loss_of_a_class_is_what_is_compared():
    """The nets above differ from one another after training, so that equality says something."""
    trainer = OneNetTwoLosses(batch_size=8, epochs=2, optimizer="sgd", **QUIET)
    before = state(trainer)
    trainer.fit()
    assert largest_difference(before, state(trainer)) > 1e-2
    assert F.cross_entropy(trainer.model(points(21)[0]), points(21)[1]).item() > 0
