"""Predictions: one a sample, in the order of the data, over any number of ranks; and the command that writes them."""

import json
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fasttrain import ConfigError, Data, Trainer
from tests import commands
from tests.helpers import QUIET, Mlp, Passing, points
from tests.ranks import run_ranks


class Output(NamedTuple):
    scores: torch.Tensor
    words: list


class Numbered(Passing):
    """The prediction of a sample is its number, in several forms."""

    class Config(Trainer.Config):
        n: int = 5

    def build_data(self):
        numbers = torch.arange(self.config.n, dtype=torch.float32)[:, None]
        return Data(train=(torch.ones(4, 1),), evaluation=(numbers,))

    def prediction(self, output, batch):
        return {"number": output[:, 0], "inner": Output(output, [f"sample {int(x)}" for x in batch[0]])}


class Rows(torch.utils.data.Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return (torch.tensor([float(index)]),)


class NumberedRows(Numbered):
    def build_data(self):
        return Data(train=(torch.ones(4, 1),), evaluation=Rows(self.config.n))


def predicted(kinds=(Numbered, NumberedRows)):
    told = []
    for kind in kinds:
        for n in range(1, 10):
            for batch_size in (3, 4):
                trainer = kind(batch_size=batch_size, steps=1, n=n, **QUIET)
                out = trainer.predict()
                inner = out["inner"]
                told.append((n, out["number"].tolist(), inner.scores.shape, inner.words, type(inner).__name__))
    return told


def check(told):
    assert len(told) == 2 * 9 * 2
    for n, numbers, shape, words, kind in told:
        assert numbers == list(range(n))
        assert tuple(shape) == (n, 1)
        assert words == [f"sample {i}" for i in range(n)]
        assert kind == "Output"


def test_one_process_predicts_each_sample_in_order():
    check(predicted())


@pytest.mark.ranks
def test_every_rank_gets_the_prediction_of_each_sample_in_order():
    for told in run_ranks(3, predicted, timeout_s=120):
        check(told)


def test_predictions_equal_the_model_and_change_nothing():
    trainer = Mlp(batch_size=4, steps=3, **QUIET)
    trainer.fit()
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    inputs, _ = points(10, seed=4)
    state = torch.get_rng_state()
    predictions = trainer.predict()
    assert torch.equal(torch.get_rng_state(), state)
    assert trainer.model.training
    with torch.no_grad():
        assert torch.equal(predictions, trainer.model(inputs))
    assert not predictions.requires_grad
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())


def test_other_data_may_be_given():
    trainer = Mlp(batch_size=4, steps=1, **QUIET)
    other = points(7, seed=9)
    with torch.no_grad():
        expected = trainer.model(other[0])
    assert torch.equal(trainer.predict(other), expected)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*other), batch_size=2)
    assert torch.allclose(trainer.predict(loader), expected)
    assert len(trainer.predict()) == 10  # the evaluation data is as it was


def test_predictions_use_the_averaged_weights():
    ema = {"name": "ema", "decay": 0.9}
    trainer = Mlp(batch_size=4, steps=5, weight_averaging=ema, optimizer={"name": "sgd", "lr": 1.0}, **QUIET)
    trainer.fit()
    inputs, _ = points(10, seed=4)
    with torch.no_grad():
        raw = trainer.model(inputs)
        with trainer.evaluating():
            averaged = trainer.model(inputs)
    assert torch.equal(trainer.predict(), averaged)
    assert not torch.equal(averaged, raw)


def test_samples_of_different_shapes_come_as_a_list():
    class Lengths(Mlp):
        def prediction(self, output, batch):
            return output[:, : len(output)]

    shapes = [tuple(sample.shape) for sample in Lengths(batch_size=4, steps=1, **QUIET).predict()]
    assert shapes == [(4,)] * 8 + [(2,)] * 2


def test_what_belongs_to_no_sample_is_refused_by_name():
    class Mean(Mlp):
        def prediction(self, output, batch):
            return {"scores": output, "mean": output.mean(0)}

    with pytest.raises(ConfigError, match=r"predictions of 3 samples .*\['mean'\] holds 4; override prediction"):
        Mean(batch_size=3, steps=1, **QUIET).predict()
    with pytest.raises(ConfigError, match=r"no tensor with a dim 0; override prediction"):
        Trainer.from_parts(
            nn.Linear(8, 4), Data(train=points(), evaluation=points()), nn.CrossEntropyLoss(), steps=1, batch_size=4,
            prediction=lambda output, batch: output.mean(), **QUIET,
        ).predict()  # fmt: skip


def test_no_evaluation_data_is_told():
    class Train(Mlp):
        def build_data(self):
            return Data(train=points())

    trainer = Train(batch_size=3, steps=1, **QUIET)
    with pytest.raises(ConfigError, match=r"no evaluation data to predict; give predict\(data\)"):
        trainer.predict()
    assert trainer.predict(points(4)).shape == (4, 4)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    done = commands.run("--config", commands.DIGITS, "steps=3", "epochs=null", f"run.dir={folder}", "run.id=one")
    assert done.returncode == 0, done.stderr
    return folder / "resnet-digits" / "one"


@pytest.fixture(scope="module")
def written(run):
    done = commands.run("predict", str(run))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_predict_writes_safetensors_beside_the_run(run, written):
    file = run / "predictions-3.safetensors"
    assert written == f"{file}: 360 predictions of step 3\n"
    (scores,) = load_file(file).values()
    assert scores.shape == (360, 10)
    assert list(run.glob(".*.tmp")) == []


@pytest.mark.ranks
def test_two_ranks_write_the_same_file(run, written, tmp_path):
    two = tmp_path / "two.safetensors"
    done = commands.run("predict", str(run), "--out", str(two), ranks=2)
    assert done.returncode == 0, done.stderr
    one = load_file(run / "predictions-3.safetensors")
    assert torch.allclose(one["predictions"], load_file(two)["predictions"], atol=1e-5)


def test_predict_as_json_is_one_object_with_every_prediction(run):
    done = commands.run("predict", str(run), "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["step"], told["samples"], told["file"]) == (3, 360, None)
    assert torch.tensor(told["predictions"]).shape == (360, 10)


def test_predict_of_no_run_is_refused(tmp_path):
    done = commands.run("predict", str(tmp_path / "none"))
    assert done.returncode == 2
    assert "predict of" in done.stderr
    done = commands.run("evaluate", str(tmp_path), "--out", "x")
    assert done.returncode == 2
    assert "--out belongs to predict and data" in done.stderr
