"""torchmetrics in evaluations: reset each time, equal on one rank and several, ranks without a sample included."""

import copy
import math
import subprocess
import sys
import warnings

import pytest
import torch
import torchmetrics
from torch import nn
from torchmetrics.classification import (
    BinaryAccuracy,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassRecall,
)

from fasttrain import ConfigError, Data, Trainer
from tests.helpers import QUIET, Mlp, points
from tests.ranks import run_ranks

SIZES = (1, 2, 4, 5, 9)


class Measured(Mlp):
    """States of every kind: sums, lists, what is stacked over ranks, metrics within metrics, collections."""

    def build_data(self):
        return Data(train=points(8), evaluation=points(self.config.evaluated, seed=4))

    class Config(Mlp.Config):
        evaluated: int = 9

    def build_metrics(self):
        accuracy, f1 = MulticlassAccuracy(4, average="micro"), MulticlassF1Score(4)
        return {
            "auroc": MulticlassAUROC(4),
            "recall": MulticlassRecall(4, average=None),
            "confusion": MulticlassConfusionMatrix(4),
            "some": torchmetrics.MetricCollection({"accuracy": accuracy, "f1": f1}),
            "sum": MulticlassAccuracy(4, average="micro") + MulticlassF1Score(4),
            "each": torchmetrics.ClasswiseWrapper(MulticlassAccuracy(4, average=None)),
            "pearson": torchmetrics.PearsonCorrCoef(),
            "largest": torchmetrics.MaxMetric(),
            "all": torchmetrics.CatMetric(),
        }

    def update_metrics(self, metrics, output, batch):
        for name in ("auroc", "recall", "confusion", "some", "sum", "each"):
            metrics[name].update(output, batch[1])
        metrics["pearson"].update(output[:, 0], output[:, 1])
        metrics["largest"].update(output.amax())
        metrics["all"].update(output[:, 0])


def measured(sizes=SIZES):
    """What is measured of N samples in steps of 2 and of 4, before and after a training step."""
    torch.set_num_threads(1)
    told = []
    for n in sizes:
        for batch_size in (4, 3):
            trainer = Measured(batch_size=batch_size, steps=1, evaluated=n, optimizer={"name": "sgd", "lr": 0}, **QUIET)
            first = trainer.evaluate()
            again = trainer.evaluate()
            values = {name: trainer.measures.values[name] for name in ("confusion", "all")}
            told.append((n, first, again, {name: value.tolist() for name, value in values.items()}))
    return told


@pytest.fixture(scope="module")
def alone():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchmetrics tells of classes without a sample
        return measured()


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore")
def test_several_ranks_measure_what_one_does_also_where_some_have_no_sample(alone):
    ranks = 3
    for given in run_ranks(ranks, measured, timeout_s=120):
        assert len(given) == 2 * len(SIZES)
        for (n, first, again, values), (_, expected, _, expected_values) in zip(
            given, copy.deepcopy(alone), strict=True
        ):
            if n <= ranks:
                # Ranks of a single sample each: torchmetrics divides by their largest deviation from their own mean.
                assert math.isnan(first.pop("pearson"))
                expected.pop("pearson")
                again.pop("pearson")
            assert first == pytest.approx(expected, rel=1e-5, abs=1e-6, nan_ok=True), n
            assert again == pytest.approx(first, nan_ok=True)
            assert values["confusion"] == expected_values["confusion"]
            assert torch.tensor(values["confusion"]).sum() == n
            # A list keeps the order of the data.
            assert values["all"] == pytest.approx(expected_values["all"], rel=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_figures_are_numbers_and_what_is_none_stays_in_the_values(alone):
    figures = measured((9,))[0][1]
    assert "confusion" not in figures
    assert {"recall/0", "recall/3", "some/accuracy", "some/f1", "auroc", "loss", "sum"} <= set(figures)
    assert all(isinstance(value, float) for value in figures.values())


def test_the_same_figures_as_torchmetrics_over_all_outputs_at_once():
    trainer = Measured(batch_size=4, steps=1, evaluated=40, **QUIET)
    figures = trainer.evaluate()
    inputs, labels = points(40, seed=4)
    with torch.no_grad():
        output = trainer.model(inputs)
    assert figures["auroc"] == pytest.approx(MulticlassAUROC(4)(output, labels).item(), rel=1e-6)
    assert figures["some/f1"] == pytest.approx(MulticlassF1Score(4)(output, labels).item(), rel=1e-6)
    assert trainer.measures.values["confusion"].tolist() == MulticlassConfusionMatrix(4)(output, labels).tolist()


class Thresholds(Trainer):
    """Outputs are the inputs; two thresholds agree on the first sample and on no other."""

    def build_data(self):
        data = (torch.tensor([[0.95], [0.6], [0.7], [0.8]]), torch.ones(4, 1, dtype=torch.int64))
        return Data(train=data, evaluation=data)

    def build_model(self):
        return nn.Linear(1, 1)

    def build_metrics(self):
        low, high = BinaryAccuracy(threshold=0.5), BinaryAccuracy(threshold=0.9)
        return torchmetrics.MetricCollection({"low": low, "high": high})

    def loss(self, output, batch):
        return output.mean()

    def update_metrics(self, metrics, output, batch):
        metrics.update(*batch)


def test_metrics_that_agree_on_the_first_batch_stay_two():
    figures = Thresholds(batch_size=1, steps=1, **QUIET).evaluate()
    assert (figures["low"], figures["high"]) == (1.0, 0.25)
    # torchmetrics by itself gives both the state of one of them from then on.
    by_itself = Thresholds.build_metrics(None)
    inputs, labels = Thresholds.build_data(None).evaluation
    for sample in zip(inputs, labels, strict=True):
        by_itself.update(*sample)
    assert by_itself.compute()["low"] == 0.25


def test_groups_given_by_hand_stay():
    class Grouped(Mlp):
        def build_metrics(self):
            named = {"f1": MulticlassF1Score(4), "recall": MulticlassRecall(4), "auroc": MulticlassAUROC(4)}
            return torchmetrics.MetricCollection(named, compute_groups=[["f1", "recall"], ["auroc"]])

    trainer = Grouped(batch_size=4, steps=1, **QUIET)
    figures = trainer.evaluate()
    inputs, labels = points(10, seed=4)
    with torch.no_grad():
        output = trainer.model(inputs)
    assert figures["recall"] == pytest.approx(MulticlassRecall(4)(output, labels).item())
    assert trainer.evaluate() == figures


def test_empty_microbatches_are_not_measured():
    settings = {"batch_size": 4, "steps": 1, "accumulation": {"name": "microbatches", "num": 4}, **QUIET}

    class Counted(Mlp):
        fed = ()

        def build_metrics(self):
            return {"f1": MulticlassF1Score(4)}

        def update_metrics(self, metrics, output, batch):
            Counted.fed += (len(output),)
            super().update_metrics(metrics, output, batch)

    cut = Counted(**settings).evaluate()
    assert 0 not in Counted.fed
    assert sum(Counted.fed) == 10
    assert cut["f1"] == pytest.approx(Counted(**settings | {"accumulation": None}).evaluate()["f1"])


def test_labels_of_a_dict_batch_are_found():
    inputs, labels = points(12)
    trainer = Trainer.from_parts(
        nn.Linear(8, 4),
        Data(train={"x": inputs, "label": labels}, evaluation={"x": inputs, "label": labels}),
        nn.CrossEntropyLoss(),
        build_metrics=lambda: {"accuracy": MulticlassAccuracy(4, average="micro")},
        batch_size=4,
        steps=1,
        **QUIET,
    )
    with torch.no_grad():
        right = (trainer.model(inputs).argmax(1) == labels).float().mean().item()
    assert trainer.evaluate()["accuracy"] == pytest.approx(right)


def test_a_run_that_trains_keeps_the_figures_in_its_summary(tmp_path):
    class Run(Mlp):
        def build_metrics(self):
            return {"f1": MulticlassF1Score(4)}

    summary = Run(batch_size=4, steps=2, run={"dir": str(tmp_path)}).fit()
    assert 0 <= summary["metrics"]["f1"] <= 1


def test_no_metric_of_the_kind_is_refused_before_any_work():
    class Odd(Mlp):
        def build_metrics(self):
            return {"f1": 3}

    with pytest.raises(ConfigError, match="build_metrics gives a int for 'f1'; give metrics of torchmetrics"):
        Odd(batch_size=4, steps=1, **QUIET)


def test_metrics_without_an_output_are_refused():
    class Lossless(Mlp):
        loss = Trainer.loss

        def build_metrics(self):
            return {"f1": MulticlassF1Score(4)}

        def compute_loss(self, batch):
            return self.model(batch[0]).mean()

    with pytest.raises(ConfigError, match="gives build_metrics, but no loss"):
        Lossless(batch_size=4, steps=1, **QUIET)


def test_one_name_for_two_things_is_refused():
    class Twice(Mlp):
        def metrics(self, output, batch):
            return {"f1": output.mean()}

        def build_metrics(self):
            return {"f1": MulticlassF1Score(4)}

    with pytest.raises(ConfigError, match="'f1' is measured twice"):
        Twice(batch_size=4, steps=1, **QUIET).evaluate()


def test_a_trainer_without_metrics_never_imports_torchmetrics():
    code = (
        "import sys\nfrom tests.helpers import *\nMlp(batch_size=4, steps=1, **QUIET).evaluate()\n"
        "print('torchmetrics' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False"
