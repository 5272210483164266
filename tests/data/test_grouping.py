"""Batches of samples about as long: every sample once, the rest last, and nothing that depends on ranks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain import ConfigError, Data
from fasttrain.data.grouping import group_by_length
from fasttrain.data.order import Order, share
from fasttrain.data.seeds import mix
from tests.helpers import QUIET, Mlp, points


def order_of(lengths, batch_size, **settings):
    return Order(size=len(lengths), batch_size=batch_size, lengths=torch.as_tensor(lengths), **settings)


def padding(lengths, order, batch_size):
    """Share of a padded epoch that is padding."""
    spans = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    slots = sum(int(lengths[span].max()) * len(span) for span in spans)
    return 1 - int(lengths.sum()) / slots


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=60),
    batch_size=st.integers(1, 9),
    window=st.integers(1, 5),
    seed=st.integers(0, 3),
)
def test_every_sample_is_in_the_epoch_once_and_the_rest_stays_last(lengths, batch_size, window, seed):
    lengths = torch.tensor(lengths)
    shuffled = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed))
    grouped = group_by_length(shuffled, lengths, batch_size, torch.Generator().manual_seed(seed), window)
    assert sorted(grouped.tolist()) == list(range(len(lengths)))
    whole = len(lengths) // batch_size * batch_size
    assert torch.equal(grouped[whole:], shuffled[whole:])
    # A batch is a run of its window in the order of length.
    batches = {tuple(batch.tolist()) for batch in grouped[:whole].reshape(-1, batch_size)}
    expected = set()
    for first in range(0, whole, window * batch_size):
        part = shuffled[first : min(first + window * batch_size, whole)].tolist()
        part.sort(key=lambda i: int(lengths[i]))
        expected |= {tuple(part[i : i + batch_size]) for i in range(0, len(part), batch_size)}
    assert batches == expected


def test_epochs_group_anew_from_the_seed():
    lengths = torch.randint(1, 100, (500,), generator=torch.Generator().manual_seed(0))
    order = order_of(lengths, 10, seed=3)
    assert torch.equal(order.epoch(1), order_of(lengths, 10, seed=3).epoch(1))
    assert not torch.equal(order.epoch(1), order.epoch(2))
    assert not torch.equal(order.epoch(1), order_of(lengths, 10, seed=4).epoch(1))
    batches = [{frozenset(batch.tolist()) for batch in order.epoch(epoch).reshape(-1, 10)} for epoch in (1, 2)]
    assert len(batches[0] & batches[1]) < 5  # others meet in the next epoch


def test_batches_do_not_come_in_the_order_of_their_length():
    lengths = torch.arange(1000)
    firsts = order_of(lengths, 10).epoch(0).reshape(-1, 10)[:, 0]
    ascending = int((firsts[1:] > firsts[:-1]).sum())
    assert 30 < ascending < 70  # of 99, as for any shuffled order


def test_little_is_padded_where_batches_are_grouped():
    rng = np.random.default_rng(0)
    lengths = torch.from_numpy(np.clip(rng.gamma(2, 20, 4000).astype(int) + 3, 3, 256))
    shuffled = padding(lengths, Order(size=4000, batch_size=32).epoch(0), 32)
    grouped = padding(lengths, order_of(lengths, 32).epoch(0), 32)
    assert shuffled > 0.5
    assert grouped < 0.06


def test_the_samples_of_a_step_are_the_same_on_any_number_of_ranks():
    order = order_of(torch.arange(23) % 7, 6)
    indices = order.epoch(0)
    for ranks in (1, 2, 3, 5):
        for first, end in order.spans():
            shares = [share(first, end, rank, ranks) for rank in range(ranks)]
            assert [i for a, b in shares for i in indices[a:b].tolist()] == indices[first:end].tolist()


def test_an_order_without_lengths_is_the_plain_permutation():
    generator = torch.Generator().manual_seed(mix(5, "order", 2))
    assert torch.equal(Order(size=40, batch_size=7, seed=5).epoch(2), torch.randperm(40, generator=generator))


class Grouped(Mlp):
    def build_data(self):
        train = points(24)
        return Data(train=train, lengths=np.arange(24) % 5)


def seen_of(trainer, steps):
    given = trainer.feed.training(trainer.task, trainer.plan)
    return [next(given)[0] for _ in range(steps)]


def test_a_trainer_reads_its_data_in_the_grouped_order_and_goes_on_in_the_middle_of_an_epoch():
    trainer = Grouped(batch_size=5, epochs=2, seed=7, **QUIET)
    x, _ = points(24)
    order = order_of(np.arange(24) % 5, 5, seed=7)
    expected = [x[order.epoch(epoch)[a:b]] for epoch in (0, 1) for a, b in order.spans()]
    seen = seen_of(trainer, 10)
    assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))
    again = Grouped(batch_size=5, epochs=2, seed=7, **QUIET)
    again.feed.position.seen = 10
    assert torch.equal(seen_of(again, 1)[0], expected[2])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Data(train=points(24), lengths=[1, 2, 3]), r"holds \(3,\) entries for 24 samples"),
        (Data(train=points(24), lengths=range(24), shuffle=False), r"shuffle=False\); leave lengths out"),
        (Data(train=iter([points(4)]), lengths=range(24)), "gives its own batches; leave lengths out"),
    ],
)
def test_lengths_that_cannot_group_are_refused(data, message):
    class Wrong(Mlp):
        def build_data(self):
            return data

    with pytest.raises(ConfigError, match=message):
        Wrong(batch_size=4, steps=2, **QUIET)


def test_a_run_in_the_middle_of_a_grouped_epoch_is_not_taken_up_with_another_batch_size(tmp_path):
    # Batches of another size are other groups: samples would come twice, others not at all.
    first = Grouped(batch_size=4, steps=3, run={"dir": str(tmp_path), "name": "a", "id": "a"}, checkpoint={"every": 3})
    first.fit()
    checkpoint = tmp_path / "a" / "a" / "checkpoints" / "step-3"
    on = {"steps": 6, "resume": str(checkpoint), "run": {"dir": str(tmp_path), "name": "b"}}
    assert Grouped(batch_size=4, **on).fit()["steps"] == 6
    with pytest.raises(ConfigError, match=r"grouped by\s+length.*Go on with batch_size=4"):
        Grouped(batch_size=8, **on).fit()
