"""Data that cuts its own batches: a DataLoader of the user, or any iterable."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from fasttrain import ConfigError, Data
from tests.helpers import QUIET, Mlp, Recorder, largest_difference, points, state


class Noisy(Dataset):
    """Points with noise drawn from torch's global generator."""

    def __init__(self):
        self.x, self.y = points(24)

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return self.x[index] + 0.1 * torch.randn(8), self.y[index]


class FromLoader(Mlp):
    """A shuffling loader and dropout: both draw from torch's global generator."""

    workers, evaluates = 0, False

    def build_data(self):
        train = DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=self.workers)
        evaluation = DataLoader(TensorDataset(*points(10, seed=4)), batch_size=4) if self.evaluates else None
        return Data(train=train, evaluation=evaluation)

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 4))


class Stop(Recorder):
    def __init__(self, at):
        super().__init__()
        self.at = at

    def stepped(self, record):
        if record["step"] == self.at:
            self.run.request_stop("test")


@pytest.mark.parametrize("stop", [1, 3, 5])
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_on_a_shuffling_loader_is_taken_up_in_the_middle_of_an_epoch(tmp_path, stop, workers):
    cls = type("FromLoader", (FromLoader,), {"workers": workers})
    settings = {"batch_size": 8, "steps": 7, "log": {"every": 1}}
    whole = cls(**settings, run={"dir": None})
    whole.fit()
    run = {"dir": str(tmp_path), "id": "one"}
    assert cls(**settings, run=run, observers=[Stop(stop)]).fit()["steps"] == stop
    resumed = cls(**settings, run=run, resume="auto")
    assert resumed.fit()["steps"] == 7
    assert largest_difference(state(whole), state(resumed)) == 0


def test_evaluating_from_a_loader_leaves_the_training_alone():
    class Evaluated(FromLoader):
        evaluates = True

    def trained(cls):
        trainer = cls(batch_size=8, steps=6, evaluate={"every": 1}, **QUIET)
        trainer.fit()
        return state(trainer)

    assert largest_difference(trained(Evaluated), trained(FromLoader)) == 0


def orders(trainer, batches):
    feed = trainer.feed.training(trainer.task, trainer.plan)
    return torch.cat([next(feed)[0][:, 0] for _ in range(batches)])


def test_epochs_have_orders_of_their_own_and_the_seed_decides_them():
    first, second = orders(FromLoader(batch_size=8, epochs=2, **QUIET), 6).chunk(2)
    assert not torch.equal(first, second)
    assert torch.equal(first, orders(FromLoader(batch_size=8, epochs=2, **QUIET), 3))
    assert not torch.equal(first, orders(FromLoader(batch_size=8, epochs=2, seed=1, **QUIET), 3))


def test_a_distributed_sampler_is_told_the_epoch():
    class Sampled(Mlp):
        def build_data(self):
            dataset = TensorDataset(*points(24))
            sampler = DistributedSampler(dataset, num_replicas=1, rank=0)
            return Data(train=DataLoader(dataset, batch_size=8, sampler=sampler))

    first, second = orders(Sampled(batch_size=8, epochs=2, **QUIET), 6).chunk(2)
    assert not torch.equal(first, second)
    assert torch.equal(first.sort().values, second.sort().values)


def test_limit_batches_bounds_an_evaluation_from_a_loader():
    class Counted(FromLoader):
        evaluates, seen = True, 0

        def metrics(self, output, batch):
            self.seen += 1
            return {}

    trainer = Counted(batch_size=8, limit_batches=2, **QUIET)
    trainer.evaluate()
    assert trainer.seen == 2


def test_a_transform_acts_on_batches_of_a_loader_and_draws_by_position():
    class Transformed(Mlp):
        def build_data(self):
            loader = DataLoader(TensorDataset(*points(24)), batch_size=8)
            return Data(train=loader, transform=lambda batch: [batch[0] * 0 + torch.rand(()), batch[1]])

    drawn = orders(Transformed(batch_size=8, epochs=2, **QUIET), 6)[::8]
    assert len(set(drawn.tolist())) == 6
    trainer = Transformed(batch_size=8, epochs=2, **QUIET)
    torch.rand(100)
    assert torch.equal(drawn, orders(trainer, 6)[::8])


def test_an_iterator_that_is_used_up_is_named_as_such():
    class Once(Mlp):
        def build_data(self):
            return Data(train=iter([points(8)]))

    with pytest.raises(ConfigError, match=r"gave no batch in epoch 2; .* once"):
        Once(batch_size=8, steps=2, **QUIET).fit()


def test_data_without_a_batch_is_refused():
    class Nothing(IterableDataset):
        def __iter__(self):
            return iter(())

    class Empty(Mlp):
        def build_data(self):
            return Data(train=DataLoader(Nothing(), batch_size=8))

    with pytest.raises(ConfigError, match="the training data gave no batch; look at the path"):
        Empty(batch_size=8, steps=2, **QUIET).fit()


class Stream(IterableDataset):
    """Single samples, without end."""

    def __iter__(self):
        x, y = points(24)
        while True:
            yield from zip(x, y, strict=True)


def test_a_stream_of_samples_is_cut_into_batches():
    class Streamed(Mlp):
        def build_data(self):
            return Data(train=Stream())

    class InMemory(Mlp):
        def build_data(self):
            return Data(train=points(24), shuffle=False)

    streamed, whole = (cls(batch_size=8, steps=5, optimizer="sgd", **QUIET) for cls in (Streamed, InMemory))
    assert streamed.fit()["samples"] == 40
    whole.fit()
    assert largest_difference(state(streamed), state(whole)) == 0.0


def test_a_loader_whose_batches_are_not_those_of_the_run_is_refused():
    class Half(Mlp):
        def build_data(self):
            return Data(train=DataLoader(TensorDataset(*points(24)), batch_size=4))

    with pytest.raises(ConfigError, match=r"DataLoader with batch_size=4, while this rank's share .* is 8"):
        Half(batch_size=8, steps=1, **QUIET)


def test_a_lazy_module_is_named_before_anything_is_made_of_it():
    class Lazy(Mlp):
        def build_model(self):
            return nn.Sequential(nn.LazyLinear(4))

    with pytest.raises(ConfigError, match=r"'0\.weight' has no shape yet.*forward"):
        Lazy(batch_size=8, **QUIET)
