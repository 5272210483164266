"""Settings of Data, and data whose samples have no number: followed, or refused with what to do instead."""

import os
import signal
import time

import pytest
import torch

from fasttrain import ConfigError, Data
from fasttrain.core.batch import Microbatches
from fasttrain.data import Shards
from fasttrain.errors import LostWorker
from tests.commands import descendants
from tests.data.reading_runs import die
from tests.helpers import QUIET, Mlp, points

X, Y = points(24)
NUMBERS = range(24)


def rows(shard):
    return iter(range(8 * shard, 8 * shard + 8))


def point(row):
    return X[row], Y[row]


def hangs(row):
    if torch.utils.data.get_worker_info() is not None:
        time.sleep(1000)
    return point(row)


def dies(row):
    if torch.utils.data.get_worker_info() is not None:
        die(signal.SIGKILL)
    return point(row)


SHARDS = Shards(range(3), rows, point)


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, sample=point):
        self.sample = sample

    def __iter__(self):
        return map(self.sample, NUMBERS)


class Streamed(Mlp):
    train, more = SHARDS, {}

    def build_data(self):
        return Data(train=self.train, **self.more)


def trainer(train, more, **settings):
    return type("Streamed", (Streamed,), {"train": train, "more": more})(**{"batch_size": 8, **settings}, **QUIET)


LOADER = torch.utils.data.DataLoader(list(zip(X, Y, strict=True)), batch_size=8)


@pytest.mark.parametrize(
    ("train", "more", "told"),
    [
        (SHARDS, {"drop_last": True}, r"drop_last=True\) with a Shards: .* limit_batches=N"),
        (Stream(), {"drop_last": True}, r"drop_last=True\) with a Stream: .* limit_batches=N"),
        (LOADER, {"drop_last": True}, r"drop_last=True\) with a DataLoader: .* set it in the DataLoader"),
        (SHARDS, {"repeats": 2}, r"repeats=2\) with a Shards, which cuts its own batches; give a data set"),
        (SHARDS, {"lengths": [1] * 24}, r"lengths=.* gives its own batches; leave lengths out"),
        (SHARDS, {"size_at": lambda epoch, position: 8}, r"a Shards has no at_size"),
        (LOADER, {"timeout_s": 5.0, "num_workers": 1}, r"timeout_s=5.0\) .* set timeout in the DataLoader"),
        ([(X, Y)], {"timeout_s": 5.0, "num_workers": 1}, r"timeout_s=5.0\) with a Once, .* leave it out"),
    ],
)
def test_what_cannot_be_done_without_numbers_is_refused(train, more, told):
    if isinstance(train, list):
        train = Once(train)
    with pytest.raises(ConfigError, match=told):
        trainer(train, more, steps=2)


class Once:
    """An iterable of batches."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


@pytest.mark.parametrize("train", [SHARDS, Stream()], ids=["shards", "stream"])
def test_batches_are_checked_and_laid_out(train):
    checked, laid_out = [], []

    def lay_out(microbatch):
        laid_out.append(len(microbatch[0]))
        return microbatch[0].double(), microbatch[1]

    more = {"check": lambda batch: checked.append(len(batch[0])), "lay_out": lay_out, "shuffle": False}
    run = trainer(train, more, epochs=1, accumulation={"name": "microbatches", "num": 2})
    batches = list(run.feed.training(run.task, run.plan, 3))
    assert checked == [8, 8, 8]
    assert laid_out == [4] * 6
    assert all(isinstance(batch, Microbatches) and batch[0][0].dtype == torch.float64 for batch in batches)


@pytest.mark.slow
def test_a_worker_of_shards_that_hangs_is_told_after_timeout_s_and_ended():
    before = set(descendants(os.getpid()))
    with pytest.raises(LostWorker, match=r"worker 0 of 1 .* reads the training data, gave nothing for 1.5 s"):
        trainer(Shards(range(3), rows, hangs), {"num_workers": 1, "timeout_s": 1.5}, epochs=1).fit()
    assert set(descendants(os.getpid())) == before


def test_a_worker_of_shards_that_dies_is_named():
    with pytest.raises(LostWorker, match=r"worker 0 of 1 .* reads the training data, was killed by SIGKILL"):
        trainer(Shards(range(3), rows, dies), {"num_workers": 1}, epochs=1).fit()


def test_a_worker_that_dies_in_an_evaluation_is_named_outside_a_run_too():
    more = {"num_workers": 1, "evaluation": Shards(range(3), rows, dies)}
    with pytest.raises(LostWorker, match=r"worker 0 of 1 .* reads the evaluation data, was killed by SIGKILL"):
        trainer((X, Y), more, steps=1).evaluate()


@pytest.mark.parametrize(("workers", "timeout"), [(1, 7.0), ("auto", 0)])
def test_workers_of_a_stream_have_timeout_s_too(workers, timeout):
    run = trainer(Stream(), {"num_workers": workers, "timeout_s": 7.0}, steps=1)
    assert run.feed.reader.source.timeout == timeout
