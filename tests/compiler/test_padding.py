"""Batches padded to few sizes: their numbers are those without, and mistakes name the batch's entries."""

from __future__ import annotations

from collections import namedtuple
from types import MappingProxyType

import pytest
import torch

from fasttrain import ConfigError, Data, Trainer
from fasttrain.compiler.apply import GRAPHS_PER_KIND
from fasttrain.compiler.padding import Padding, pad_batch
from fasttrain.core.batch import Microbatches
from fasttrain.errors import BatchError
from fasttrain.models.bert import BertForMaskedLM
from fasttrain.models.bert_config import BertConfig
from tests.compiler.counting import GRAPHS, fresh_compiler  # noqa: F401
from tests.helpers import QUIET, Recorder, largest_difference, state

# dynamo looks at it and hides the warning by itself, but not where warnings are errors. torch 2.14.1.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
VALUES = {"tokens": 0, "mask": 0, "labels": -100}
LENGTHS = (5, 7, 8, 9, 12, 15)


def text(length, samples=4, seed=0):
    g = torch.Generator().manual_seed(seed + length)
    tokens = torch.randint(1, 50, (samples, length), generator=g)
    mask = torch.ones(samples, length, dtype=torch.long)
    mask[0, length // 2 :] = 0
    labels = torch.where((torch.rand(samples, length, generator=g) < 0.4) & (mask == 1), tokens, -100)
    labels[:, 0] = tokens[:, 0]
    return {"tokens": tokens, "mask": mask, "labels": labels, "name": ["x"] * samples}


# ---- the function


def test_named_entries_are_padded_to_a_multiple_with_a_value_each_and_the_others_stay():
    batch = text(5)
    padded = pad_batch(batch, Padding(values=VALUES, multiple=4))
    assert {name: padded[name].shape[1] for name in VALUES} == dict.fromkeys(VALUES, 8)
    for name, value in VALUES.items():
        assert torch.equal(padded[name][:, :5], batch[name])
        assert (padded[name][:, 5:] == value).all()
        assert padded[name].dtype == batch[name].dtype
    assert padded["name"] is batch["name"]
    assert batch["tokens"].shape[1] == 5  # the batch that was given stays


def test_what_has_the_size_already_is_the_same_object():
    batch = text(8)
    assert all(padded is batch[name] for name, padded in pad_batch(batch, Padding(values=VALUES, multiple=4)).items())


def test_sizes_are_taken_in_any_order_and_one_that_is_too_long_is_refused():
    padding = Padding(values={"tokens": 0}, sizes=[16, 8])
    assert [pad_batch(text(n), padding)["tokens"].shape[1] for n in (1, 8, 9, 16)] == [8, 8, 16, 16]
    with pytest.raises(BatchError, match=r"compile\.pad\.sizes=\[16, 8\] hold no entry of 17; add a size"):
        pad_batch(text(17), padding)


Pair = namedtuple("Pair", ["tokens", "labels"])


@pytest.mark.parametrize("kind", [tuple, list, Pair._make, Microbatches, MappingProxyType])
def test_the_kind_of_a_batch_stays(kind):
    tokens, labels = text(5)["tokens"], text(5)["labels"]
    if kind is Microbatches:
        padded = pad_batch(
            Microbatches([(tokens, labels), (tokens[:2], labels[:2])]), Padding(values={"1": -100}, multiple=4)
        )
        assert type(padded) is Microbatches
        assert [tuple(piece[1].shape) for piece in padded] == [(4, 8), (2, 8)]
        assert padded[0][0] is tokens
        return
    if kind is MappingProxyType:
        batch, names = MappingProxyType({"tokens": tokens, "labels": labels}), ["labels"]
    else:
        batch, names = kind([tokens, labels]), ["1", *(["labels"] if kind == Pair._make else [])]
    for name in names:
        padded = pad_batch(batch, Padding(values={name: -100}, multiple=4))
        assert type(padded) is type(batch)
        first, second = padded.values() if isinstance(padded, MappingProxyType) else padded
        assert first is tokens
        assert second.shape == (4, 8)


def test_dims_count_from_the_end_too_and_masks_of_truth_values_stay_such():
    batch = {"mask": torch.ones(2, 1, 3, 5, dtype=torch.bool), "x": torch.ones(2, 5, 3)}
    padded = pad_batch(batch, Padding(values={"mask": 0}, multiple=4, dim=-1))
    assert padded["mask"].shape == (2, 1, 3, 8)
    assert padded["mask"].dtype == torch.bool
    assert not padded["mask"][..., 5:].any()
    assert pad_batch(batch, Padding(values={"x": 0}, multiple=4))["x"].shape == (2, 8, 3)


@pytest.mark.parametrize(
    ("batch", "values", "message"),
    [
        ({"tokens": torch.ones(2, 3), "mask": 1}, {"input_ids": 0}, r"names 'input_ids', .* keys tokens, mask; use"),
        ((torch.ones(2, 3), 1), {"2": 0}, r"names '2', .* entries 0, 1; use"),
        (Pair(1, 2), {"mask": 0}, r"names 'mask', .* entries tokens, labels, 0, 1; use"),
        (torch.ones(2, 3), {"0": 0}, r"a batch is a Tensor, and has no entry '0'; let the data give a dict or a tuple"),
        ({"name": ["x"]}, {"name": 0}, r"entry 'name' of a batch is a list, and tensors alone are padded"),
        ({"y": torch.ones(2)}, {"y": 0}, r"pad\.dim=1: entry 'y' of a batch has the shape \(2,\)"),
    ],
)
def test_an_entry_that_is_not_there_or_cannot_be_padded_is_named(batch, values, message):
    with pytest.raises(BatchError, match=message):
        pad_batch(batch, Padding(values=values, multiple=4))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"multiple": 8}, r"pad names no entry of a batch; give what to pad with by entry"),
        ({"values": {"x": 0}}, r"multiple=None and sizes=\[\]: give one of them"),
        ({"values": {"x": 0}, "multiple": 8, "sizes": [8]}, r"give one of them"),
        ({"values": {"x": 0}, "multiple": 0}, r"a size is 1 or more"),
        ({"values": {"x": 0}, "multiple": 8, "dim": 0}, r"pad\.dim=0 holds the samples"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Padding(**settings)


# ---- in a run


class Words(Trainer):
    """A small BERT on batches of several lengths, masked where there is no text."""

    def build_data(self):
        class Batches:
            def __init__(self, seed):
                self.seed = seed

            def __len__(self):
                return len(LENGTHS)

            def __iter__(self):
                return (text(length, seed=self.seed) for length in LENGTHS)

        return Data(train=Batches(0), evaluation=Batches(100))

    def build_model(self):
        config = BertConfig(vocabulary=50, width=16, layers=2, heads=2, feedforward=32, dropout=0.0, positions=32)
        return BertForMaskedLM(config)

    def count(self, batch):
        return (batch["labels"] != -100).sum()

    def compute_loss(self, batch):
        self.seen = [*getattr(self, "seen", []), tuple(batch["tokens"].shape)]
        return self.model(batch["tokens"], batch["mask"], labels=batch["labels"])


def trained(compile, **settings):
    torch.compiler.reset()
    GRAPHS.clear()
    trainer = Words(
        batch_size=4, epochs=2, optimizer="sgd", compile=compile, observers=[Recorder()], **settings, **QUIET
    )
    trainer.fit()
    watcher = trainer.observers[0]
    losses = [record["loss"] for record in watcher.steps]
    return trainer, losses, [record["metrics"]["loss"] for record in watcher.evaluations], len(GRAPHS)


def setting(**more):
    return {"name": "blocks", "backend": "counting", "reference_steps": 0, **more}


@pytest.mark.parametrize("accumulation", [None, {"name": "microbatches", "num": 2}])
def test_a_padded_run_has_the_losses_weights_and_evaluations_of_one_without(accumulation):
    plain, losses, evaluations, _ = trained(None, accumulation=accumulation)
    padded, *others, _ = trained(setting(pad={"multiple": 16, "values": VALUES}), accumulation=accumulation)
    assert {shape[1] for shape in plain.seen} == set(LENGTHS)
    assert {shape[1] for shape in padded.seen} == {16}  # in evaluations too
    assert len(losses) == 12
    assert len(evaluations) == 2
    assert others[0] == pytest.approx(losses, rel=1e-5)
    assert others[1] == pytest.approx(evaluations, rel=1e-5)
    assert largest_difference(state(plain), state(padded)) < 1e-6


def test_padding_to_one_size_takes_one_graph_for_training_and_one_for_evaluation():
    assert 2 * len(LENGTHS) > GRAPHS_PER_KIND
    assert trained(setting(dynamic=False))[-1] == GRAPHS_PER_KIND  # the others run uncompiled
    assert trained(setting(dynamic=False, pad={"sizes": [8, 16], "values": VALUES}))[-1] == 4
    assert trained(setting(dynamic=False, pad={"multiple": 16, "values": VALUES}))[-1] == 2


def test_without_padding_the_line_of_the_batch_stays_bare():
    batch = text(5)
    assert Words(batch_size=4, steps=1, compile=setting(), **QUIET).plan.batch(batch) is batch


def test_a_key_that_no_batch_has_is_told_at_the_first_one():
    trainer = Words(batch_size=4, steps=1, compile=setting(pad={"multiple": 8, "values": {"ids": 0}}), **QUIET)
    with pytest.raises(BatchError, match=r"names 'ids', and a batch has the keys tokens, mask, labels, name"):
        trainer.fit()


def test_a_mistake_in_the_setting_is_told_with_its_key():
    with pytest.raises(ConfigError, match=r"compile\.pad"):
        Words(batch_size=4, steps=1, compile=setting(pad={"multiple": 8}), **QUIET)
    with pytest.raises(ConfigError, match=r"compile\.pad\.multiples"):
        Words(batch_size=4, steps=1, compile=setting(pad={"multiples": 8, "values": VALUES}), **QUIET)
