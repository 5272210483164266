"""Reported faults of evaluations, each by the name of its case: samples counted twice or not at all, and wrong means."""

# The names of the cases are written in capitals.

from __future__ import annotations

import itertools

import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fasttrain import ConfigError, Data
from tests.helpers import QUIET, Passing, Recorder
from tests.ranks import run_ranks


class Given(Passing):
    """Evaluation data from outside."""

    evaluation = None

    def build_data(self):
        return Data(train=(torch.ones(4, 1),), evaluation=self.evaluation)


class Accuracy(Given):
    def metrics(self, output, batch):
        return {"accuracy": (output > 0).float().mean()}

    def build_metrics(self):
        return {"measured": torchmetrics.MeanMetric(), "samples": torchmetrics.SumMetric()}

    def update_metrics(self, metrics, output, batch):
        metrics["measured"].update((output > 0).float())
        metrics["samples"].update(len(output))


def column(values):
    return torch.tensor(values, dtype=torch.float32)[:, None]


def ranks_of_this_group():
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def loaders(dataset, batch_size, drop_last):
    """Loaders as people write them, by what they say of ranks; with several ranks only the first kinds know of them."""
    common = {"batch_size": batch_size, "drop_last": drop_last}
    ways = {
        "plain": DataLoader(dataset, **common),
        "shuffling": DataLoader(dataset, shuffle=True, **common),
    }
    if ranks_of_this_group() > 1:
        ways["distributed"] = DataLoader(dataset, sampler=DistributedSampler(dataset, shuffle=False), **common)
        ways["distributed, shuffling"] = DataLoader(dataset, sampler=DistributedSampler(dataset), **common)
    return ways


def accuracy_of_one_right_in_five():
    """Only sample 0 is right: what an evaluation says, by the form of the data and the batch size."""
    values = column([1, -1, -1, -1, -1])
    dataset = TensorDataset(values)
    told = {}
    for batch_size in (2, 3, 4):
        forms = {"tensors": (values,), "data set": dataset, **loaders(dataset, batch_size, drop_last=False)}
        for name, source in forms.items():
            trainer = type("Five", (Accuracy,), {"evaluation": source})(batch_size=batch_size + 1, steps=1, **QUIET)
            told[f"{name}, {batch_size}"] = trainer.evaluate()
    return told


def check_one_in_five(told):
    for name, figures in told.items():
        assert figures["accuracy"] == pytest.approx(0.2), name
        assert figures["measured"] == pytest.approx(0.2), name
        assert figures["samples"] == 5, name


def test_EVAL_PAD_1_no_sample_is_counted_twice_in_one_process():
    told = accuracy_of_one_right_in_five()
    assert len(told) == 12
    check_one_in_five(told)


class Numbered(Given):
    """Predictions in forms that are no tensors, beside one."""

    def prediction(self, output, batch):
        return {"number": output[:, 0], "words": [str(int(value)) for value in batch[0]]}


def predictions():
    """For each N, batch size, drop_last and form: how many predictions are right to come, and those that came."""
    ranks, told = ranks_of_this_group(), []
    for n, batch_size, drop_last in itertools.product(range(1, 10), (1, 2, 4), (False, True)):
        numbers = column(range(n))
        dataset = TensorDataset(numbers)
        trainer = type("Some", (Numbered,), {"evaluation": (numbers,)})(
            batch_size=max(batch_size, ranks), steps=1, **QUIET
        )
        sources = {name: s for name, s in loaders(dataset, batch_size, drop_last).items() if name != "shuffling"}
        if not drop_last:
            sources |= {"tensors": (numbers,), "data set": dataset}
        for name, source in sources.items():
            whole = batch_size * (ranks if "distributed" in name else 1)
            expected = n - n % whole if drop_last else n
            given = {"number": torch.tensor([]), "words": []}
            if expected:
                given = trainer.predict(source)
            else:
                with pytest.raises(ConfigError, match="the data gave no sample"):
                    trainer.predict(source)
            told.append((name, n, batch_size, drop_last, expected, given["number"].tolist(), given["words"]))
    return told


def check_predictions(told):
    for name, n, batch_size, drop_last, expected, numbers, words in told:
        case = f"{name}: {n} samples, batch {batch_size}, drop_last={drop_last}"
        assert numbers == list(range(expected)), case
        assert words == [str(i) for i in range(expected)], case


def test_EVAL_PAD_2_exactly_the_predictions_of_the_data_in_one_process():
    told = predictions()
    assert len(told) == 9 * 3 * (3 + 1)
    check_predictions(told)


def of_this_rank_alone():
    """A loader of samples that no other rank has: 3 on rank 0, 1 on each other one."""
    rank = torch.distributed.get_rank()
    loader = DataLoader(TensorDataset(column([1, 1, 1] if rank == 0 else [-1])), batch_size=2)
    return type("Own", (Accuracy,), {"evaluation": loader})(batch_size=4, steps=1, **QUIET).evaluate()


def counted_on_ranks():
    return accuracy_of_one_right_in_five(), predictions(), of_this_rank_alone()


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 3])
def test_EVAL_PAD_1_and_2_on_several_ranks(ranks):
    for five, predicted, own in run_ranks(ranks, counted_on_ranks, timeout_s=200):
        assert len(five) == 3 * 6
        check_one_in_five(five)
        assert len(predicted) == 9 * 3 * (5 + 3)
        check_predictions(predicted)
        # What one rank alone has is left as it is.
        assert own["samples"] == 3 + ranks - 1
        assert (own["accuracy"], own["measured"]) == pytest.approx((3 / own["samples"],) * 2)


# ---- means


class Batches:
    """Batches as they come; a list would be a data set of samples."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def evaluated(values, cut, kind=Accuracy, **settings):
    """The figures of values that come in batches of the sizes `cut`."""
    batches = Batches([(batch,) for batch in column(values).split(cut)])
    return type("Cut", (kind,), {"evaluation": batches})(batch_size=4, steps=1, **QUIET, **settings).evaluate()


class Value(Given):
    def metrics(self, output, batch):
        return {"value": output.mean()}


def test_EVAL_AVG_1_a_small_last_batch_weighs_what_it_holds():
    figures = evaluated([0.7] * 256 + [0.8] * 256 + [0.9] * 10, [256, 256, 10], kind=Value)
    assert figures["value"] == pytest.approx(0.752874, abs=1e-6)
    assert figures["loss"] == pytest.approx(0.752874, abs=1e-6)


@pytest.mark.parametrize("size", [1, 7, 100, 256, 522])
def test_EVAL_AVG_1_however_the_data_is_cut(size):
    values = [0.7] * 256 + [0.8] * 256 + [0.9] * 10
    data = {"evaluation": (column(values),)}
    trainer = type("Whole", (Value,), data)(batch_size=4, steps=1, evaluate={"batch_size": size}, **QUIET)
    assert trainer.evaluate()["value"] == pytest.approx(0.752874, abs=1e-6)


class Rising(Accuracy):
    """The one weight is -1.5, and rises by 1 a step: outputs are negative after epoch 1 and positive after epoch 2."""

    evaluation = (torch.ones(4, 1),)

    def build_model(self):
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, -1.5)
        return model

    def loss(self, output, batch):
        return -output.mean()


@pytest.mark.parametrize("sanity", [0, 1, 2])
def test_EVAL_AVG_3_nothing_is_kept_from_an_earlier_evaluation(sanity):
    seen = Recorder()
    settings = {"optimizer": {"name": "sgd", "lr": 1.0}, "evaluate": {"every": 1}, **QUIET}
    trainer = Rising(batch_size=4, epochs=2, observers=[seen], **settings)
    for _ in range(sanity):
        trainer.evaluate()
    trainer.fit()
    told = [(record["metrics"]["accuracy"], record["metrics"]["measured"]) for record in seen.evaluations]
    assert told == [(0.0, 0.0), (1.0, 1.0)]
    assert seen.evaluations[-1]["metrics"]["samples"] == 4


def test_EVAL_AVG_3_nor_from_one_that_failed_in_its_middle():
    class Failing(Accuracy):
        evaluation = (column([1, 1, -1, -1]),)
        fails = True

        def metrics(self, output, batch):
            if self.fails and output.min() < 0:
                raise ValueError("in the middle")
            return super().metrics(output, batch)

    trainer = Failing(batch_size=2, steps=1, **QUIET)
    with pytest.raises(ValueError, match="in the middle"):
        trainer.evaluate()
    trainer.fails = False
    figures = trainer.evaluate()
    assert (figures["accuracy"], figures["measured"], figures["samples"]) == (0.5, 0.5, 4)


def test_EVAL_AVG_4_the_loss_is_of_all_batches():
    assert evaluated([4, 4, 2, 2, 0], [2, 2, 1])["loss"] == pytest.approx(2.4)


@pytest.mark.parametrize("order", list(itertools.permutations([0, 1, 2])))
def test_EVAL_AVG_4_in_whatever_order_they_come(order):
    batches = [([4, 4], 2), ([2, 2], 2), ([0], 1)]
    values = [value for i in order for value in batches[i][0]]
    assert evaluated(values, [batches[i][1] for i in order])["loss"] == pytest.approx(2.4)


class Words(Given):
    """A mean over words: those of a sample that are no padding (nan)."""

    def loss(self, output, batch):
        return batch[0].nanmean()

    def count(self, batch):
        return (~batch[0].isnan()).sum()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_mean_over_words_weighs_words_and_a_batch_without_any_counts_nothing(size):
    nan = float("nan")
    words = torch.tensor([[4.0, 4.0, 4.0], [nan, nan, nan], [1.0, nan, nan]])
    data = {"evaluation": (words,), "inputs": lambda self, batch: (batch[0][:, :1],)}
    trainer = type("Padded", (Words,), data)(batch_size=4, steps=1, evaluate={"batch_size": size}, **QUIET)
    assert trainer.evaluate()["loss"] == pytest.approx(13 / 4)


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_microbatches_leave_the_means_alone(parts):
    settings = {"accumulation": {"name": "microbatches", "num": parts}}
    data = {"evaluation": (column([4, 4, 2, 2, 0]),)}
    figures = type("Parts", (Accuracy,), data)(batch_size=4, steps=1, **QUIET, **settings).evaluate()
    assert figures["loss"] == pytest.approx(2.4)
    assert (figures["accuracy"], figures["measured"], figures["samples"]) == (pytest.approx(0.8), pytest.approx(0.8), 5)
