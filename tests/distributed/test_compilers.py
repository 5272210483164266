"""Ranks compile outside of collectives and wait for each other, and have the same graphs."""

from __future__ import annotations

import datetime
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fasttrain import Data
from fasttrain.distributed import compilers
from fasttrain.distributed.compilers import sizes_to_rehearse, wait_for_compilers
from fasttrain.errors import RunError
from tests.helpers import QUIET, points
from tests.ranks import RankError, run_ranks
from tests.stack import Stack

# ---- the wait


def test_one_rank_waits_for_nobody():
    assert wait_for_compilers(0, 1) == 0.0


def late(limit_s):
    rank, told = dist.get_rank(), []
    if rank == 1:
        time.sleep(2.5)
    try:
        waited = wait_for_compilers(rank, 3, limit_s=limit_s, tell_every_s=1.0, tell=told.append)
    except RunError as error:
        waited = str(error)
    dist.barrier()
    return waited, told


@pytest.mark.ranks
def test_all_ranks_wait_for_the_last_and_the_first_says_for_whom():
    (first, told), (last, nothing), (other, also_nothing) = run_ranks(3, late, 60.0)
    assert first > 1.5
    assert other > 1.5
    assert last < 1.0
    assert told
    assert all(line.startswith("rank 1 is still compiling, ") for line in told)
    assert nothing == also_nothing == []


@pytest.mark.ranks
def test_after_the_limit_the_waiting_ranks_name_whom_they_waited_for():
    (first, _), (last, _), (other, _) = run_ranks(3, late, 0.5)
    expected = "rank 1 is still compiling after 0 s, and this rank waits; look at what it does"
    assert first.startswith(expected)
    assert other.startswith(expected)
    assert isinstance(last, float)  # the others had called before they gave up


# ---- which sizes


@pytest.mark.parametrize(
    ("mine", "usual", "last", "sizes"),
    [
        (4, [4, 4], [4, 4], [4]),
        (3, [3, 4], [3, 4], [3]),  # uneven, but never another
        (4, [4, 4], [3, 4], [4, 3]),
        (4, [4, 4, 4], [1, 2, 2], [4, 2, 1]),
        (4, [4, 4, 4], [0, 0, 1], [4, 1]),
        (1, [1, 2], [0, 1], [1]),
    ],
)
def test_sizes_are_those_that_any_rank_meets(mine, usual, last, sizes):
    assert sizes_to_rehearse(mine, usual, last) == sizes


# ---- a run

COMPILE = {"name": "blocks", "backend": "sleeps", "reference_steps": 0}


class Ragged(Stack):
    """Steps of 8 samples, and a last one of 7: 3 on rank 0 and 4 on rank 1."""

    def build_data(self):
        return Data(train=points(23), shuffle=False)


class Watched:
    """Graphs by the moment at which they were made, and collectives of the process group."""

    def __init__(self, slow_rank=None, seconds=0.0):
        self.graphs, self.collectives, self.moment = [], 0, "before the first step"
        self.slow_rank, self.seconds = slow_rank, seconds
        # Not the bound method: torch 2.11 writes attributes on what it is given.
        torch._dynamo.register_backend(lambda graph, inputs: self.compile(graph, inputs), name="sleeps")

    def compile(self, graph, inputs):
        if dist.get_rank() == self.slow_rank:
            time.sleep(self.seconds)
        sizes = [tuple(map(str, v.shape)) for v in inputs if isinstance(v, torch.Tensor) and not v.requires_grad]
        symbols = sum(isinstance(value, torch.SymInt) for value in inputs)
        self.graphs.append((self.moment, symbols, sizes))
        return graph.forward

    def count(self, name):
        real = getattr(dist, name)

        def counted(*args, **kwargs):
            self.collectives += 1
            return real(*args, **kwargs)

        return mock.patch.object(dist, name, counted)


def train(watched, **settings):
    """Two epochs on each rank; what was compiled when."""

    class Run(Ragged):
        def train_step(self, batch):
            watched.moment = f"step {self.step + 1}"
            return super().train_step(batch)

    real = compilers.wait_for_compilers

    def waiting(*args, **kwargs):
        before = watched.collectives
        waited = real(*args, **kwargs)
        watched.moment = "in a step"
        watched.sent = before - watched.began
        return waited

    trainer = Run(batch_size=8, steps=6, compile=COMPILE, **settings, **QUIET)
    with mock.patch.object(compilers, "wait_for_compilers", waiting):
        watched.began = watched.collectives
        trainer.fit()
    return {name: value.tolist() for name, value in trainer.model.state_dict().items()}


def ragged():
    torch.manual_seed(0)
    watched = Watched()
    sent = 0
    real = compilers.rehearse

    def rehearsing(*args):
        nonlocal sent
        before = watched.collectives
        done = real(*args)
        sent = watched.collectives - before
        assert done
        return done

    names = ("all_reduce", "all_gather_object", "broadcast_object_list", "barrier", "broadcast", "all_gather")
    patches = [watched.count(name) for name in names]
    for patch in patches:
        patch.start()
    with mock.patch.object(compilers, "rehearse", rehearsing):
        weights = train(watched)
    for patch in patches:
        patch.stop()
    return watched.graphs, sent, watched.collectives, weights


@pytest.mark.ranks
def test_ranks_make_the_same_graphs_before_the_first_step_and_none_in_one():
    """A ragged last batch: rank 1 never gets 3 samples, and has the graph for them all the same."""
    first, second = run_ranks(2, ragged, timeout_s=120.0)
    graphs, sent, collectives, weights = first
    assert second[0] == graphs
    assert [symbols for _, symbols, _ in graphs] == [0, 0]
    assert {moment for moment, _, _ in graphs} == {"step 1"}
    assert sent == second[1] == 0
    assert collectives == second[2] > 0
    assert second[3] == weights


def plain():
    torch.manual_seed(0)
    trainer = Ragged(batch_size=8, steps=6, **QUIET)
    trainer.fit()
    return {name: value.tolist() for name, value in trainer.model.state_dict().items()}


@pytest.mark.ranks
def test_a_rehearsal_moves_nothing_of_the_training():
    """The backend runs what was traced as it is, so the weights are those of eager code, bit for bit."""
    (_, _, _, compiled), _ = run_ranks(2, ragged, timeout_s=120.0)
    eager, _ = run_ranks(2, plain, timeout_s=120.0)
    assert compiled == eager


def slow(rehearses):
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=3))
    torch.manual_seed(0)
    watched = Watched(slow_rank=1, seconds=6.0)
    if not rehearses:
        with mock.patch("fasttrain.strategies.compile.compile_together", return_value=None):
            return train(watched)
    return train(watched)


@pytest.mark.ranks
def test_a_rank_that_compiles_for_longer_than_the_time_out_does_not_end_the_run():
    first, second = run_ranks(2, slow, True, timeout_s=120.0)
    assert first == second


@pytest.mark.ranks
def test_without_the_wait_it_would():
    with pytest.raises(RankError, match=r"rank 0 failed[\s\S]*(Timed out|timeout)"):
        run_ranks(2, slow, False, timeout_s=120.0)


class SlowEvaluation(Watched):
    """What is compiled without gradients takes long on rank 1."""

    def compile(self, graph, inputs):
        self.seconds = 0.0 if torch.is_grad_enabled() else 6.0
        return super().compile(graph, inputs)


def evaluated(waits):
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=3))
    SlowEvaluation(slow_rank=1)

    class Evaluates(Stack):
        def build_data(self):
            return Data(train=points(16), evaluation=points(16), shuffle=False)

    trainer = Evaluates(batch_size=8, steps=2, compile=COMPILE, **QUIET)
    trainer.plan.strategies["compile"]._evaluated = not waits  # as if it were not the first
    return trainer.fit()["metrics"]["loss"]


@pytest.mark.ranks
def test_a_rank_that_compiles_for_longer_than_the_time_out_in_an_evaluation_does_not_end_the_run():
    first, second = run_ranks(2, evaluated, True, timeout_s=120.0)
    assert first == second
    with pytest.raises(RankError, match=r"rank 0 failed[\s\S]*(Timed out|timeout)"):
        run_ranks(2, evaluated, False, timeout_s=120.0)
