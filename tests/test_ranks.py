"""Trainers on several ranks: uneven shares, empty ones, and what must be the same everywhere."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fasttrain import ConfigError, Data
from tests.helpers import QUIET, Mlp, Recorder, largest_difference, points, state
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks


class Rows(torch.utils.data.Dataset):
    """A map-style data set of `n` points."""

    def __init__(self, n):
        self.x, self.y = points(n)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Short(Mlp):
    """17 samples in steps of 8: the last step has one."""

    n = 17


class ShortRows(Short):
    def build_data(self):
        return Data(train=Rows(17), evaluation=points(10, seed=4))


class Masked(Short):
    """Labels of class 0 are not counted."""

    def loss(self, output, batch):
        return F.cross_entropy(output, batch[1].masked_fill(batch[1] == 0, -100))

    def count(self, batch):
        return (batch[1] != 0).sum()


class Normed(Short):
    n = 18

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 4))


class MaskedNormed(Masked):
    n = 18
    build_model = Normed.build_model


def trained(trainer_class, settings=None):
    watcher = Recorder()
    trainer = trainer_class(
        batch_size=8, epochs=2, optimizer={"name": "sgd", "lr": 0.1}, observers=[watcher], **QUIET, **(settings or {})
    )
    summary = trainer.fit()
    return state(trainer), [record["loss"] for record in watcher.steps], summary["metrics"]


@pytest.mark.parametrize("trainer_class", [Short, ShortRows, Masked])
@pytest.mark.parametrize("accumulation", [None, {"name": "microbatches", "num": 2}])
def test_a_last_step_with_fewer_samples_than_ranks_is_exact(trainer_class, accumulation):
    weights, losses, metrics = trained(trainer_class)
    for other, other_losses, other_metrics in run_ranks(2, trained, trainer_class, {"accumulation": accumulation}):
        assert largest_difference(other, weights) < 1e-6
        assert other_losses == pytest.approx(losses, rel=1e-5)
        assert other_metrics == pytest.approx(metrics, rel=1e-5)
        assert len(losses) == 6


@pytest.mark.parametrize("trainer_class", [Normed, MaskedNormed])
def test_synchronised_batch_norm_waits_for_no_rank_that_counts_nothing(trainer_class):
    weights, losses, _ = trained(trainer_class)
    for other, other_losses, _ in run_ranks(2, trained, trainer_class, {"batch_norm": "sync"}):
        assert other_losses == pytest.approx(losses, rel=1e-4)
        assert largest_difference(other, weights) < 1e-5


def refused():
    with pytest.raises(ConfigError, match="every rank needs one"):
        Short(batch_size=8, batch_norm="sync", **QUIET)
    return True


def test_a_step_too_short_for_synchronised_batch_norm_is_refused_at_the_start():
    assert run_ranks(2, refused) == [True, True]


def dropout_masks():
    class Dropped(Mlp):
        def build_model(self):
            return nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 4))

    trainer = Dropped(batch_size=8, **QUIET)
    trainer.model.train()
    return trainer.model[0](torch.ones(64)), state(trainer)


def test_ranks_start_from_the_same_weights_and_draw_other_masks():
    (mask, weights), (other_mask, other_weights) = run_ranks(2, dropout_masks)
    assert largest_difference(weights, other_weights) == 0.0
    assert not torch.equal(mask, other_mask)


def stopped_on_one_rank(folder):
    class Stops(Recorder):
        def stepped(self, record):
            if torch.distributed.get_rank() == 1 and record["step"] == 3:
                self.run.request_stop("rank 1 had enough")

    trainer = Mlp(
        batch_size=8, steps=100_000, observers=[Stops()], log={"every": 1}, run={"dir": folder, "name": "a", "id": "b"}
    )
    summary = trainer.fit()
    return summary["status"], summary["reason"], summary["steps"]


def test_a_stop_asked_on_one_rank_stops_all_after_the_same_step(tmp_path):
    first, second = run_ranks(2, stopped_on_one_rank, str(tmp_path))
    assert first == second
    assert first[:2] == ("stopped", "rank 1 had enough")
    assert [path.name for path in (tmp_path / "a" / "b" / "checkpoints").iterdir()] == [f"step-{first[2]}"]


def resumed(folder, steps):
    trainer = Mlp(
        batch_size=8,
        steps=steps,
        resume="auto",
        checkpoint={"every": 3},
        optimizer="adamw",
        run={"dir": folder, "name": "a", "id": "b"},
    )
    trainer.fit()
    return state(trainer)


def test_two_ranks_resume_with_equal_bits(tmp_path):
    straight = run_ranks(2, trained_adamw, 7)
    run_ranks(2, resumed, str(tmp_path), 3)
    # A run that is done is left alone, so the longer one is taken up from the checkpoint by its path.
    again = run_ranks(2, resumed_from, str(tmp_path / "a" / "b" / "checkpoints" / "step-3"), 7)
    for one, other in zip(straight, again, strict=True):
        assert largest_difference(one, other) == 0.0


class OwnStatistics(Mlp):
    """Running statistics that differ between ranks, states that are rounded, and averages of all of them."""

    settings = {
        "batch_size": 8,
        "steps": 8,
        "optimizer": {"name": "adamw", "state_dtype": "bf16"},
        "weight_averaging": {"name": "ema", "decay": 0.9},
        "evaluate": {"every": 100},
    }

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 4), nn.BatchNorm1d(4))


def straight_and_resumed(folder):
    run = {"dir": folder, "name": "a", "id": "b"}
    straight = OwnStatistics(**OwnStatistics.settings, run=run, checkpoint={"every": 5})
    straight.fit()
    resumed = OwnStatistics(**OwnStatistics.settings, run={"dir": None})
    resumed.restore(f"{folder}/a/b/checkpoints/step-5")
    resumed.fit()
    with straight.evaluating(), resumed.evaluating():
        averages = largest_difference(state(straight), state(resumed))
    return averages, largest_difference(state(straight), state(resumed)), straight.evaluate() == resumed.evaluate()


def test_two_ranks_resume_with_the_statistics_of_rank_0_and_the_same_rounding(tmp_path):
    assert run_ranks(2, straight_and_resumed, str(tmp_path)) == [(0.0, 0.0, True)] * 2


def trained_adamw(steps):
    trainer = Mlp(batch_size=8, steps=steps, optimizer="adamw", **QUIET)
    trainer.fit()
    return state(trainer)


def resumed_from(path, steps):
    trainer = Mlp(batch_size=8, steps=steps, resume=path, optimizer="adamw")
    trainer.fit()
    return state(trainer)


def odd_step():
    """The public way to a step of one's own: contexts, and plan.backward inside or outside of them."""
    results = []
    for inside in (True, False):
        trainer = Mlp(batch_size=8, optimizer={"name": "sgd", "lr": 0.1}, **QUIET)
        x, y = points(16)
        rank = torch.distributed.get_rank()
        halves = [(x[i : i + 4], y[i : i + 4]) for i in (8 * rank, 8 * rank + 4)]
        for i, batch in enumerate(halves):
            if inside:
                with trainer.plan.microbatch(i == 1):
                    with trainer.plan.forward():
                        loss = trainer.compute_loss(batch) / 2
                    trainer.plan.backward(loss)
            else:
                trainer.plan.backward(trainer.compute_loss(batch) / 2, is_last=i == 1)
        results.append({name: parameter.grad.clone() for name, parameter in trainer.model.named_parameters()})
    return results


def test_an_own_step_may_call_backward_inside_or_outside_of_a_microbatch():
    trainer = Mlp(batch_size=16, **QUIET)
    trainer.compute_loss(points(16)).backward()
    expected = {name: parameter.grad for name, parameter in trainer.model.named_parameters()}
    for rank in run_ranks(2, odd_step):
        for grads in rank:
            assert largest_difference(grads, expected) < 1e-6
