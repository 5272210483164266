"""Every sample once an epoch, the same draws whatever reads them, and positions that are arithmetic."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain import ConfigError, Data
from fasttrain.data.by_order import ByOrder
from fasttrain.data.data import form, num_samples_of
from fasttrain.data.order import Order, share
from fasttrain.data.seeds import own_randomness


class Indices(torch.utils.data.Dataset):
    """Sample i is i, and what it draws from each generator."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return index, torch.rand(()).double(), torch.tensor(np.random.rand()), torch.tensor(random.random())


def read(data, order, epoch=0, position=0, ranks=1):
    """What each rank reads of an epoch: a list of (batch, here, everywhere) a rank."""
    readers = [ByOrder(data, data.train, order, rank, ranks) for rank in range(ranks)]
    by_rank = [[portion[:3] for portion in reader.epoch(epoch, position)] for reader in readers]
    for reader in readers:
        reader.close()
    return by_rank


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 40),
    batch_size=st.integers(1, 12),
    ranks=st.integers(1, 4),
    epoch=st.integers(0, 3),
    skipped=st.integers(0, 6),
    in_memory=st.booleans(),
    limit=st.one_of(st.none(), st.integers(1, 5)),
)
def test_every_sample_is_seen_once_over_all_ranks(size, batch_size, ranks, epoch, skipped, in_memory, limit):
    data = Data(train=(torch.arange(size),) if in_memory else Indices(size))
    order = Order(size=size, batch_size=batch_size, seed=3, limit=limit)
    position = min(skipped * batch_size, order.end)
    by_rank = read(data, order, epoch, position, ranks)
    assert {len(batches) for batches in by_rank} == {len(order.spans(position))}
    seen = []
    for step in zip(*by_rank, strict=True):
        heres = [here for _, here, _ in step]
        assert max(heres) - min(heres) <= 1
        assert {everywhere for _, _, everywhere in step} == {sum(heres)}
        for batch, here, _ in step:
            assert (0 if batch is None else len(batch[0])) == here
            seen += [] if batch is None else batch[0].tolist()
    assert seen == order.epoch(epoch)[position : order.end].tolist()
    assert sorted(order.epoch(epoch).tolist()) == list(range(size))


@settings(max_examples=100, deadline=None)
@given(first=st.integers(0, 100), count=st.integers(0, 50), ranks=st.integers(1, 9))
def test_shares_are_contiguous_and_leave_nothing_out(first, count, ranks):
    shares = [share(first, first + count, rank, ranks) for rank in range(ranks)]
    assert [i for low, high in shares for i in range(low, high)] == list(range(first, first + count))


def test_epochs_have_other_orders_and_seeds_too():
    orders = [
        tuple(Order(size=50, batch_size=5, seed=seed).epoch(epoch).tolist()) for seed in (0, 1) for epoch in (0, 1)
    ]
    assert len(set(orders)) == 4
    assert Order(size=5, batch_size=5, shuffle=False).epoch(7).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (1, 2), (2, 0), (3, 1)])
def test_what_a_sample_draws_depends_on_nothing_but_seed_epoch_and_sample(ranks, workers):
    def drawn(ranks, workers, position=0):
        data = Data(train=Indices(11), num_workers=workers)
        order = Order(size=11, batch_size=4, seed=1)
        rows = {}
        for batches in read(data, order, 2, position, ranks):
            for batch, here, _ in batches:
                if here:
                    rows |= {int(i): row for i, *row in zip(*(column.tolist() for column in batch), strict=True)}
        return rows

    expected = drawn(1, 0)
    assert len(expected) == 11
    assert drawn(ranks, workers) == expected
    late = drawn(ranks, workers, position=8)
    assert len(late) == 3
    assert late == {index: expected[index] for index in late}
    assert len({tuple(row) for row in expected.values()}) == 11


class Sized(Indices):
    """Samples as long as they are asked for."""

    def at_size(self, index, size):
        return torch.full((size,), float(index))


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (1, 2), (3, 1)])
def test_samples_are_read_at_the_size_of_their_step_on_all_ranks(ranks, workers):
    data = Data(train=Sized(11), num_workers=workers, size_at=lambda epoch, position: 1 + epoch * 100 + position)
    order = Order(size=11, batch_size=4)
    for batches in read(data, order, 2, 4, ranks):
        assert [batch.shape[1] for batch, *_ in batches] == [205, 209]
    evaluated = next(ByOrder(replace(data, num_workers=0), Sized(11), order, 0, 1, train=False).epoch(0)).batch
    assert len(evaluated) == 4  # the columns of samples as they are


def test_a_data_set_that_knows_no_sizes_is_refused():
    with pytest.raises(ConfigError, match="a Indices has no at_size"):
        Data(train=Indices(3), size_at=lambda epoch, position: 4)


def test_reading_draws_nothing_from_the_trainings_own_generators():
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    data = Data(train=Indices(6), transform=lambda batch: [part + torch.rand(()) for part in batch])
    read(data, Order(size=6, batch_size=2))
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (np.random.get_state()[1].tolist(), random.getstate())


def test_generators_are_kept_once_a_batch_and_not_for_each_sample(monkeypatch):
    kept = []
    monkeypatch.setattr(
        "fasttrain.data.fetching.own_randomness", lambda seed: kept.append(seed) or own_randomness(seed)
    )
    batches = read(Data(train=Indices(12)), Order(size=12, batch_size=4))
    assert [len(batch[0]) for batch, *_ in batches[0]] == [4, 4, 4]
    assert len(kept) == 3


def test_generators_are_put_back_after_an_error():
    state = torch.get_rng_state()
    with pytest.raises(KeyError), own_randomness(3):
        torch.rand(3)
        raise KeyError
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_transform_draws_the_same_on_any_number_of_ranks(ranks):
    data = Data(train=(torch.arange(10.0),), transform=lambda batch: (batch[0] + torch.rand(len(batch[0])),))
    order = Order(size=10, batch_size=4)
    values = [torch.cat([batch[0] for batch, *_ in step]) for step in zip(*read(data, order, ranks=ranks), strict=True)]
    expected = [batch[0] for batch, *_ in read(data, order)[0]]
    assert all(torch.equal(one, other) for one, other in zip(values, expected, strict=True))


def test_a_transform_of_the_share_alone_draws_by_rank():
    data = Data(
        train=(torch.zeros(8),), transform=lambda batch: (batch[0] + torch.rand(len(batch[0])),), transform_share=True
    )
    (first,), (second,) = read(data, Order(size=8, batch_size=8), ranks=2)
    assert not torch.equal(first[0][0], second[0][0])


def test_forms_of_data():
    x = torch.zeros(4, 2)
    assert form((x, x)) == form({"x": x}) == form(x) == "tensors"
    assert form(Indices(3)) == form([1, 2]) == "dataset"
    assert form(iter([x])) == form(torch.utils.data.DataLoader(Indices(3))) == "batches"
    assert num_samples_of((x, x)) == 4
    assert num_samples_of(iter([x])) is None
    with pytest.raises(ConfigError, match="of one equal dim 0"):
        form((x, torch.zeros(3)))
    with pytest.raises(ConfigError, match="is no data"):
        form(3)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ((np.zeros((4, 2)), np.zeros(4)), "a ndarray"),
        ({"x": torch.zeros(4, 2), "name": ["a", "b", "c", "d"]}, "a str"),
        ((torch.zeros(4, 2), [0, 1, 2, 3]), "a int"),
    ],
)
def test_a_tuple_or_dict_of_columns_that_are_no_tensors_is_no_data_set_of_as_many_samples(source, named):
    with pytest.raises(ConfigError, match=f"{named}.*torch.as_tensor"):
        form(source)


def test_a_list_of_samples_stays_a_data_set():
    assert form([(np.zeros(2), 1), (np.ones(2), 0)]) == form([{"x": 1}]) == "dataset"
    assert num_samples_of([(np.zeros(2), 1), (np.ones(2), 0)]) == 2
