"""Every sample once an epoch, whatever reads it; batches fetched whole; copies of repeated augmentation."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset

from fasttrain import ConfigError, Data
from fasttrain.data.by_order import ByOrder
from fasttrain.data.order import Order
from fasttrain.data.reading import Position
from tests.helpers import QUIET, Mlp, points


class Drawn(Dataset):
    """Sample i: its number and a draw."""

    def __init__(self, n):
        self.n, self.calls = n, []

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(()).item()], dtype=torch.float64)


class Whole(Drawn):
    def __getitems__(self, indices):
        self.calls.append(len(indices))
        return [self[i] for i in indices]


def rows(readers, position, steps):
    """All rows of so many steps over all ranks in the order of the step, and where a run stands after them."""
    by_rank = [reader.portions(position) for reader in readers]
    seen, after = [], position
    for _ in range(steps):
        portions = [next(portions) for portions in by_rank]
        assert len({(p.after.epoch, p.after.seen) for p in portions}) == 1
        after = portions[0].after
        seen += [row for p in portions if p.here for row in p.batch.tolist()]
    for portions in by_rank:
        portions.close()
    return seen, after


def readers(size, batch_size, ranks, workers, **order):
    data = Data(train=Drawn(size), num_workers=workers)
    of = Order(size=size, batch_size=batch_size, seed=5, **order)
    return [ByOrder(data, data.train, of, rank, ranks) for rank in range(ranks)]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_every_sample_is_read_once_an_epoch_also_after_a_stop_and_a_resume_by_others(workers):
    @settings(max_examples=40 if workers == 0 else 3, deadline=None, database=None)
    @given(
        size=st.integers(1, 23),
        batch_size=st.integers(1, 9),
        ranks=st.integers(1, 3),
        later_ranks=st.integers(1, 3),
        later_workers=st.integers(0, 2) if workers else st.just(0),
        stop=st.integers(0, 6),
    )
    def holds(size, batch_size, ranks, later_ranks, later_workers, stop):
        per_epoch = -(-size // batch_size)
        stop = min(stop, 2 * per_epoch)
        first, after = rows(readers(size, batch_size, ranks, workers), Position(), stop)
        rest, end = rows(readers(size, batch_size, later_ranks, later_workers), after, 2 * per_epoch - stop)
        assert (end.epoch, end.seen) == (2, 0)
        seen = first + rest
        for epoch in range(2):
            assert sorted(int(i) for i, _ in seen[epoch * size : (epoch + 1) * size]) == list(range(size))
        whole, _ = rows(readers(size, batch_size, 1, 0), Position(), 2 * per_epoch)
        assert seen == whole, "what samples draw, too"

    holds()


@pytest.mark.parametrize("source", [Whole(20), Subset(Whole(20), range(20))])
def test_a_data_set_that_gives_a_batch_at_once_is_asked_once_a_batch(source):
    reader = ByOrder(Data(train=source), source, Order(size=20, batch_size=8), 0, 1)
    given = [portion.batch for portion in reader.epoch(0)]
    inner = getattr(source, "dataset", source)
    assert inner.calls == [8, 8, 4]
    again = [portion.batch for portion in reader.epoch(0)]
    assert all(map(torch.equal, given, again))
    late = next(reader.epoch(0, 8)).batch
    assert torch.equal(late, given[1]), "draws follow from the place in the epoch"
    assert not torch.equal(next(reader.epoch(1)).batch, given[0])


def test_a_subset_of_a_data_set_that_gives_single_samples_draws_by_sample():
    """torch's Subset has the method for batches whatever it holds."""
    source = Subset(Drawn(20), range(20))
    order = Order(size=20, batch_size=8)
    one = {int(i): x for p in ByOrder(Data(train=source), source, order, 0, 1).epoch(0) for i, x in p.batch.tolist()}
    two = {
        int(i): x
        for rank in range(2)
        for p in ByOrder(Data(train=source), source, order, rank, 2).epoch(0)
        for i, x in p.batch.tolist()
    }
    assert len(one) == 20
    assert one == two


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_repeats_puts_copies_of_an_image_into_one_batch_each_with_draws_of_its_own(ranks):
    seen, _ = rows(readers(10, 4, ranks, 0, repeats=2), Position(), 3)
    numbers = [int(i) for i, _ in seen]
    assert len(numbers) == 10
    assert numbers[::2] == numbers[1::2]
    assert len(set(numbers)) == 5
    assert len({x for _, x in seen}) == 10
    once, _ = rows(readers(10, 4, 1, 0), Position(), 3)
    assert {tuple(row) for row in seen[::2]} <= {tuple(row) for row in once}, "the first copy draws what it always does"
    next_epoch, _ = rows(readers(10, 4, 1, 0, repeats=2), Position(1, 0), 3)
    assert {i for i, _ in next_epoch} != set(map(float, numbers))


class Set(Mlp):
    more = {}

    def build_data(self):
        return Data(train=points(24), **self.more)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"repeats": 3}, "repeats=3.* batch_size=8"),
        ({"repeats": 0}, "repeats=0"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"timeout_s": 0.0, "num_workers": 1}, "is no time to wait"),
        ({"check": 3}, "check=.* is a int"),
    ],
)
def test_settings_of_data_that_make_no_sense_are_refused(more, told):
    with pytest.raises(ConfigError, match=told):
        type("Set", (Set,), {"more": more})(batch_size=8, steps=1, **QUIET)


def test_check_sees_each_batch_of_training_and_evaluation_and_its_error_names_the_samples():
    seen = []

    def check(batch):
        seen.append(len(batch[0]))
        if len(seen) == 5:
            raise ConfigError("class 7 of 4")

    cls = type("Set", (Set,), {"more": {"check": check, "evaluation": points(10), "shuffle": False}})
    with pytest.raises(ConfigError, match="class 7 of 4") as told:
        cls(batch_size=8, epochs=1, **QUIET).fit()
    assert seen == [8, 8, 8, 8, 2]
    assert told.value.__notes__ == ["Found in sample 8, sample 9 of the evaluation data."]
