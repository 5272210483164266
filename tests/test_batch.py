"""Batches of every shape are cut rightly, or refused with the one message."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch.utils.data import default_collate

from fasttrain.core.batch import cut, map_tensors, num_samples
from fasttrain.errors import BatchError

Pair = namedtuple("Pair", "image label")


@dataclass
class Registered:
    image: torch.Tensor
    label: torch.Tensor


torch.utils._pytree.register_dataclass(Registered)


@dataclass
class Unregistered:
    image: torch.Tensor


def test_structure_is_kept_and_every_sample_stands_once():
    x, y = torch.arange(8.0), torch.arange(8)
    for batch in (dict(x=x, y=y), (x, y), [x, y], Pair(x, y), Registered(x, y), default_collate([(1.0, 1)] * 8)):
        pieces = cut(batch, 3, expected=8)
        assert [num_samples(piece) for piece in pieces] == [2, 3, 3]
        assert {type(piece) for piece in pieces} == {type(batch)}
    pieces = cut((x, y), 3)
    assert torch.equal(torch.cat([piece[0] for piece in pieces]), x)


def test_lists_of_other_things_are_cut_and_scalars_shared():
    batch = dict(x=torch.zeros(8, 3), path=[str(i) for i in range(8)], temperature=torch.tensor(1.0), epoch=3, name="a")
    pieces = cut(batch, 4, expected=8)
    assert pieces[1]["path"] == ["2", "3"]
    assert {piece["epoch"] for piece in pieces} == {3}
    assert {piece["name"] for piece in pieces} == {"a"}
    assert all(piece["temperature"].dim() == 0 for piece in pieces)


def test_fewer_samples_than_pieces_leave_empty_pieces():
    assert [len(piece) for piece in cut(torch.zeros(2, 3), 4)] == [0, 1, 0, 1]


def test_pieces_are_views():
    batch = torch.zeros(4, 3)
    cut(batch, 2)[1].fill_(1)
    assert batch.sum() == 6


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        (([torch.zeros(3, 4 + i, 5) for i in range(8)], torch.zeros(8)), "holds 3"),
        ([torch.zeros(3, 4, 5) for _ in range(8)], "holds 3"),
        ([dict(boxes=torch.zeros(i + 1, 4)) for i in range(8)], "boxes"),
        (dict(tokens=torch.zeros(100), cu_seqlens=torch.tensor([0, 40, 60, 100])), "cu_seqlens"),
        (dict(tokens=torch.zeros(1, 100), labels=torch.zeros(1, 100)), "holds 1"),
        (dict(x=torch.zeros(5, 8, 3), y=torch.zeros(8)), "holds 5"),
        (dict(x=torch.zeros(8, 3), bias=torch.zeros(12, 5, 5)), "holds 12"),
        (Unregistered(torch.zeros(8, 3)), "it has no tensor with a dim 0"),
        (dict(epoch=3), "it has no tensor with a dim 0"),
        (dict(x=torch.zeros(5, 3)), "holds 5"),
    ],
    ids=[
        "sized images",
        "list of images",
        "boxes",
        "packed",
        "one row",
        "time first",
        "shared",
        "object",
        "none",
        "short",
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused_with_one_message(batch, told):
    with pytest.raises(BatchError) as error:
        cut(batch, 4, expected=8)
    message = str(error.value)
    assert message.startswith("the batch cannot be cut along dim 0: ")
    assert told in message
    assert "override split(batch, n)" in message
    assert "Microbatches([...])" in message
    assert "whole_batch_loss = True" in message


def test_jagged_tensors_are_cut_by_sample():
    samples = [torch.full((i + 1, 4), float(i)) for i in range(8)]
    jagged = torch.nested.as_nested_tensor(samples, layout=torch.jagged)
    pieces = cut(dict(x=jagged, y=torch.arange(8)), 4, expected=8)
    assert [piece["x"].unbind()[0].shape for piece in pieces] == [(1, 4), (3, 4), (5, 4), (7, 4)]
    assert all(torch.equal(piece["x"].unbind()[1], samples[piece["y"][1]]) for piece in pieces)


def test_tensors_are_mapped_and_objects_left_alone():
    batch = dict(x=torch.zeros(2), names=["a", "b"], n=3)
    doubled = map_tensors(lambda tensor: tensor + 1, batch)
    assert doubled["x"].sum() == 2
    assert (doubled["names"], doubled["n"]) == (["a", "b"], 3)
