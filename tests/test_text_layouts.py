"""Layouts in a run: the same masks, the same batches and the same gradient, on any number of ranks, workers and pieces."""

from __future__ import annotations

import itertools

import pytest
import torch

from fasttrain.core.plan import Microbatches
from recipes.bert import Bert
from tests.helpers import largest_difference, loss_and_gradients, state
from tests.ranks import run_ranks

LAYOUTS = ("padded", "packed", "unpadded")
TEXT = {"packages": ["json", "logging"], "vocabulary": 300, "sequence_length": 32, "held_out": 0.2}


def build(layout="padded", workers=0, dtype=torch.float32, **settings):
    """A tiny masked-word training on docstrings kept apart."""
    data = {**TEXT, "layout": layout, **settings.pop("data", {})}
    model = {"width": 32, "layers": 1, "heads": 2, "feedforward": 32}
    quiet = {"run": {"dir": None}, "log": {"every": 1}, "evaluate": {"every": 10**6}}

    class WithWorkers(Bert):
        def build_data(self):
            made = super().build_data()
            object.__setattr__(made, "num_workers", workers)
            return made

        def build_model(self):
            return super().build_model().to(dtype)

    return WithWorkers(**{"batch_size": 10, "epochs": 2, "data": data, "model": model, "seed": 3, **quiet, **settings})


def sequences_of(batch):
    """What each sequence of a step's batch consists of: tokens as hidden, and what was hidden there."""
    found = []
    for microbatch in batch if isinstance(batch, Microbatches) else [batch]:
        tokens, labels = microbatch["tokens"], torch.full_like(microbatch["tokens"], -100)
        is_label = microbatch["labels"] != -100
        rows = torch.arange(len(tokens))[:, None].expand_as(microbatch["positions"])
        labels[rows[is_label], microbatch["positions"][is_label]] = microbatch["labels"][is_label]
        if "boundaries" in microbatch:
            within = microbatch["boundaries"]
            pieces = zip(tokens.flatten().split(within.lengths), labels.flatten().split(within.lengths), strict=True)
            pieces = [(a, b) for a, b in pieces if a[0] == 2]  # sequences begin with [CLS], filling does not
        else:
            mask = microbatch.get("mask", torch.ones_like(tokens, dtype=torch.bool))
            pieces = [(a[m], b[m]) for a, b, m in zip(tokens, labels, mask, strict=True)]
        found += [(tuple(a.tolist()), tuple(b.tolist())) for a, b in pieces]
    return found


def sequences_by_step(steps=None, skip=0, **settings):
    """The sequences of each step of this rank, as a sorted list a step."""
    trainer = build(**settings)
    trainer.feed.position.seen = skip * trainer.config.batch_size
    steps = trainer.feed.steps_per_epoch + 2 - skip if steps is None else steps
    given = trainer.feed.training(trainer.task, trainer.plan)
    return [sorted(sequences_of(next(given))) for _ in range(steps)]


@pytest.fixture(scope="module")
def expected():
    return sequences_by_step(layout="padded")


def test_every_document_comes_once_an_epoch_with_masks_drawn_anew(expected):
    trainer = build()
    per_epoch = trainer.feed.steps_per_epoch
    epoch = [sequence for step in expected[:per_epoch] for sequence in step]
    assert len(epoch) == len(trainer.text.train) > 100
    restored = sorted(tuple(b if b != -100 else a for a, b in zip(*sequence, strict=True)) for sequence in epoch)
    train = trainer.text.train
    assert restored == sorted(tuple(train[i]["tokens"].tolist()) for i in range(len(train)))
    # In the next epoch the same documents have other holes.
    again = {sequence for step in expected[per_epoch:] for sequence in step}
    assert len(again) == 20
    assert len(again & set(epoch)) < 6


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"workers": 2},
        {"accumulation": {"name": "microbatches", "size": 3}},
        {"skip": 4},
    ],
    ids=["at once", "workers", "microbatches", "from the middle"],
)
def test_masks_are_the_same_in_every_layout_however_they_are_read(layout, change, expected):
    skip = change.get("skip", 0)
    steps = 6 if "workers" in change else None
    found = sequences_by_step(layout=layout, steps=steps, **change)
    assert found == expected[skip:][: len(found)]
    assert len(found) >= 6


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [3])
def test_masks_and_batches_are_the_same_on_several_ranks(ranks, expected):
    by_rank = run_ranks(ranks, packed_on_a_rank)
    together = [sorted(itertools.chain(*shares)) for shares in zip(*by_rank, strict=True)]
    assert together == expected
    assert len(together) > 10


def packed_on_a_rank():
    return sequences_by_step(layout="packed", accumulation={"name": "microbatches", "num": 2})


def gradients_of(**settings):
    """Loss and gradient of the first step, over all ranks."""
    trainer = build(dtype=torch.float64, **settings)
    return loss_and_gradients(trainer), torch.cat([p.grad.flatten() for p in trainer.model.parameters()])


PIECES = {"accumulation": {"name": "microbatches", "size": 3}}


@pytest.mark.parametrize("more", [{}, PIECES], ids=["at once", "microbatches"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_of_a_step_is_the_same_in_every_layout(layout, more):
    loss, gradient = gradients_of(layout="padded")
    other_loss, other = gradients_of(layout=layout, **more)
    assert other_loss == pytest.approx(loss, rel=1e-12)
    assert ((other - gradient).norm() / gradient.norm()).item() < 1e-12


@pytest.mark.ranks
@pytest.mark.parametrize("layout", ["packed"])
def test_the_gradient_of_a_step_is_the_same_on_two_ranks(layout):
    loss, gradient = gradients_of(layout="padded")
    for rank_loss, rank_gradient in run_ranks(2, gradients_on_a_rank, layout):
        assert rank_loss == pytest.approx(loss, rel=1e-12)
        assert ((rank_gradient - gradient).norm() / gradient.norm()).item() < 1e-12


def gradients_on_a_rank(layout):
    return gradients_of(layout=layout, **PIECES)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_evaluation_is_the_same_in_every_layout_and_batch_size(layout):
    expected = build(dtype=torch.float64, layout="padded").evaluate()
    found = build(dtype=torch.float64, layout=layout, evaluate={"every": 10**6, "batch_size": 37}, **PIECES).evaluate()
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-12)
    assert found == pytest.approx(expected, rel=1e-6)  # the accuracy of a batch is in single precision
    assert set(found) == {"loss", "accuracy", "perplexity", "unigram_entropy"}


def test_grouping_changes_which_documents_meet_and_neither_their_masks_nor_how_often_they_come(expected):
    grouped = sequences_by_step(layout="packed", data={"group_by_length": True})
    per_epoch = build().feed.steps_per_epoch
    assert sorted(itertools.chain(*grouped[:per_epoch])) == sorted(itertools.chain(*expected[:per_epoch]))
    assert grouped != expected


def test_a_packed_run_goes_on_from_a_checkpoint_with_the_bits_of_one_that_never_stopped(tmp_path):
    run = {"dir": str(tmp_path), "name": "a"}
    settings = {"layout": "packed", "data": {"group_by_length": True}, "epochs": None, "schedule": "constant"}
    whole = build(**settings, steps=7)
    whole.fit()
    build(**settings, steps=4, run=run | {"id": "a"}, checkpoint={"every": 4}).fit()
    resumed = build(
        **settings, steps=7, run=run | {"id": "b"}, resume=str(tmp_path / "a" / "a" / "checkpoints" / "step-4")
    )
    assert resumed.fit()["steps"] == 7
    assert largest_difference(state(resumed), state(whole)) == 0.0
