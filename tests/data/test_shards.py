"""Shards: dealt to ranks and workers, each sample once an epoch, taken up by any others in the middle of one."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain import ConfigError, Data, RunError
from fasttrain.data import Shards
from fasttrain.data.by_shards import ByShards
from fasttrain.data.reading import Portion, Position
from fasttrain.data.shards import samples_of
from fasttrain.distributed.world import World
from fasttrain.errors import CheckpointError
from tests.helpers import QUIET, Mlp, StopAt, largest_difference, points, state
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*of them have nothing to read"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


class Counted:
    """`read` of shards that are sizes; keeps what was decoded and skipped."""

    def __init__(self, sizes, skips=True):
        self.sizes, self.decoded, self.skipped = sizes, [], 0
        self.read = self.skipping if skips else self.plain

    def plain(self, shard):
        return iter([100 * shard + i for i in range(self.sizes[shard])])

    def skipping(self, shard, skip=0):
        self.skipped += skip
        return itertools.islice(self.plain(shard), skip, None)

    def decode(self, sample):
        self.decoded.append(sample)
        return sample

    def shards(self, **more):
        return Shards(range(len(self.sizes)), self.read, self.decode, **more)


def readers(shards, batch_size, ranks, workers=0, seed=0, **more):
    """The readers of all ranks, in this process; nothing is added up over them."""
    data = Data(train=shards, num_workers=workers, **more)
    device = torch.device("cpu")
    return [
        ByShards(data, shards, batch_size, seed, World(device=device, rank=rank, size=ranks), None)
        for rank in range(ranks)
    ]


def epoch_of(of_ranks, position, most=None):
    """What each rank gets of an epoch in at most so many steps, all in step as over processes; and where they are then."""
    read = []
    for reader in of_ranks:
        reader._open(position)
        read.append(list(reader._pieces(position)))
    steps = max(map(len, read))
    seen, epoch = position.seen, position.epoch
    for step in range(steps if most is None else min(most, steps)):
        pieces = [pieces[step] if step < len(pieces) else None for pieces in read]
        everywhere = sum(piece.samples for piece in pieces if piece is not None)
        first, seen = seen, seen + everywhere
        after = Position(epoch + 1, 0) if step == steps - 1 else Position(epoch, seen)
        for reader, piece in zip(of_ranks, pieces, strict=True):
            here, mark = (piece.samples, piece.mark) if piece is not None else (0, None)
            reader.given(Portion(None, here, everywhere, epoch, first, after, mark=mark))
        position = after
    return [[piece.batch.tolist() for piece in pieces[:most]] for pieces in read], position


def flat(found):
    return [sample for rank in found for batch in rank for sample in batch]


def all_of(sizes):
    return sorted(100 * shard + i for shard, size in enumerate(sizes) for i in range(size))


# Most examples without processes, which take long to start.
WORKERS = st.sampled_from((0, 0, 0, 0, 1, 2))
SIZES = st.lists(st.integers(0, 12), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    SIZES,
    st.tuples(st.integers(1, 3), WORKERS),
    st.tuples(st.integers(1, 3), WORKERS),
    st.integers(1, 4),
    st.integers(0, 5),
    st.integers(0, 6),
    st.booleans(),
)
def test_each_sample_comes_once_an_epoch_and_after_a_stop_at_another_world_size(
    sizes, layout, other, share, buffer, stop, skips
):
    (ranks, workers), (other_ranks, other_workers) = layout, other
    source = Counted(sizes, skips)
    shards = source.shards(shuffle_buffer=buffer)
    first, position = epoch_of(readers(shards, share * ranks, ranks, workers), Position(1, 0), None)
    assert sorted(flat(first)) == all_of(sizes)
    stopped = readers(shards, share * ranks, ranks, workers)
    begun, position = epoch_of(stopped, Position(1, 0), stop)
    states = json.loads(json.dumps([reader.state_dict() for reader in stopped]))
    if position.epoch == 1 and position.seen:
        again = readers(shards, share * other_ranks, other_ranks, other_workers)
        for reader in again:
            reader.load_state_dict(states)
        rest, _ = epoch_of(again, position, None)
        assert sorted(flat(begun) + flat(rest)) == all_of(sizes)
        if (other_ranks, max(1, other_workers)) == (ranks, max(1, workers)):
            assert [a + b for a, b in zip(begun, rest, strict=True)] == first


def test_batches_are_full_until_the_end_although_workers_end_apart():
    shards = Counted([9, 2, 5, 1]).shards()
    (batches,), _ = epoch_of(readers(shards, 4, 1, workers=3), Position())
    assert [len(batch) for batch in batches] == [4, 4, 4, 4, 1]


def test_shards_and_blocks_have_another_order_in_each_epoch_and_none_without_shuffling():
    shards = Counted([6, 6, 6]).shards(shuffle_buffer=4)
    orders = [flat(epoch_of(readers(shards, 4, 1), Position(epoch))[0]) for epoch in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
    assert flat(epoch_of(readers(shards, 4, 1, seed=1), Position())[0]) != orders[0]
    assert flat(epoch_of(readers(shards, 4, 1, shuffle=False), Position())[0]) == all_of([6, 6, 6])
    whole = Counted([200]).shards(shuffle_buffer=200)
    positions = torch.tensor(flat(epoch_of(readers(whole, 8, 1), Position())[0])).float()
    assert torch.corrcoef(torch.stack([positions, torch.arange(200.0)]))[0, 1].abs() < 0.3


@pytest.mark.parametrize("skips", [True, False])
def test_what_was_given_is_neither_decoded_nor_read_again(skips):
    source = Counted([40], skips)
    shards = source.shards(shuffle_buffer=8)
    list(samples_of(shards, 0, seed=0, epoch=0, shuffle=True, given=27))
    assert len(source.decoded) == 40 - 27
    assert source.skipped == (24 if skips else 0)


def noisy(sample):
    return torch.tensor([float(sample), torch.rand(()).item()])


def test_what_a_sample_draws_hangs_on_neither_ranks_nor_workers():
    shards = Shards([0, 1, 2], Counted([5, 6, 7]).read, noisy)

    def draws(ranks, workers):
        found, _ = epoch_of(readers(shards, 2 * ranks, ranks, workers), Position())
        return sorted(map(tuple, flat(found)))

    one = draws(1, 0)
    assert len({noise for _, noise in one}) == 18
    assert one == draws(2, 0) == draws(1, 2)


def test_an_error_names_the_shard_and_the_sample():
    def read(shard):
        yield {"__key__": "photo-1"}
        yield {"__key__": "photo-2"}
        raise OSError("unexpected end")

    def decode(sample):
        if sample["__key__"] == "photo-2":
            raise ValueError("no JPEG")
        return 0

    with pytest.raises(RunError, match=r"shard a\.tar, sample 2: reading failed \(OSError: unexpected end\)"):
        list(samples_of(Shards(["a.tar"], read, shuffle_buffer=0), 0, 0, 0, True))
    with pytest.raises(RunError, match=r"shard a\.tar, sample 1 \(photo-2\): decoding failed \(ValueError: no JPEG\)"):
        list(samples_of(Shards(["a.tar"], read, decode, shuffle_buffer=0), 0, 0, 0, True))


def test_an_epoch_of_other_shards_is_not_taken_up():
    (reader,) = readers(Counted([3, 3]).shards(), 2, 1)
    epoch_of([reader], Position(), 1)
    (other,) = readers(Counted([3, 3, 3]).shards(), 2, 1)
    with pytest.raises(CheckpointError, match="an epoch of other shards"):
        other.load_state_dict([reader.state_dict()])


@pytest.mark.parametrize("shards", ["a.tar", []])
def test_what_is_no_list_of_shards_is_refused(shards):
    with pytest.raises(ConfigError, match="names no list of shards"):
        Shards(shards, iter)


def test_more_readers_than_shards_are_told():
    with pytest.warns(UserWarning, match=r"2 shards for 1 ranks x 3 workers: 1 of them have nothing to read"):
        readers(Counted([3, 3]).shards(), 2, 1, workers=3)


X, Y = points(40)
SIZES_OF_POINTS = (7, 0, 12, 1, 20)
FIRST = dict(enumerate(itertools.accumulate((0, *SIZES_OF_POINTS))))


def rows(shard):
    return iter(range(FIRST[shard], FIRST[shard + 1]))


def point(row):
    return X[row] + 0.1 * torch.randn(8), Y[row]


def endless(shard):
    return itertools.cycle(range(shard, 40, 2))


class Sharded(Mlp):
    workers, length = 0, 40

    def build_data(self):
        train = Shards(range(5), rows, point, shuffle_buffer=4, length=self.length)
        return Data(
            train=train, evaluation=Shards(range(5), rows, lambda row: (X[row], Y[row])), num_workers=self.workers
        )


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stopped_run_makes_the_very_steps_that_would_have_come(tmp_path, workers):
    cls = type("Sharded", (Sharded,), {"workers": workers})
    settings = {"batch_size": 4, "epochs": 2, "log": {"every": 1}, "run": {"dir": str(tmp_path), "id": "one"}}
    whole = cls(**{**settings, "run": {"dir": None}})
    assert whole.total_steps == whole.fit()["steps"] == 20
    for stop in (3, 9, 10, 14):
        resume = {} if stop == 3 else {"resume": "auto"}
        assert cls(**settings, **resume, observers=[StopAt(stop)]).fit()["steps"] == stop
    resumed = cls(**settings, resume="auto")
    summary = resumed.fit()
    assert (summary["steps"], summary["samples"]) == (20, 80)
    assert largest_difference(state(whole), state(resumed)) == 0.0


def test_an_evaluation_of_shards_is_that_of_their_samples():
    class InMemory(Mlp):
        def build_data(self):
            return Data(train=points(8), evaluation=(X, Y))

    sharded, whole = Sharded(batch_size=8, **QUIET), InMemory(batch_size=8, **QUIET)
    assert sharded.evaluate()["loss"] == pytest.approx(whole.evaluate()["loss"], rel=1e-6)


def test_streams_without_end_are_trained_on_and_taken_up(tmp_path):
    class Endless(Mlp):
        def build_data(self):
            return Data(train=Shards(range(2), endless, point, shuffle_buffer=4), num_workers=0)

    with pytest.raises(ConfigError, match="may have no end"):
        Endless(batch_size=4, **QUIET)
    settings = {"batch_size": 4, "steps": 30, "log": {"every": 1}, "run": {"dir": str(tmp_path), "id": "one"}}
    whole = Endless(**{**settings, "run": {"dir": None}})
    whole.fit()
    Endless(**settings, observers=[StopAt(17)]).fit()
    resumed = Endless(**settings, resume="auto")
    assert resumed.fit()["samples"] == 120
    assert largest_difference(state(whole), state(resumed)) == 0.0


def test_a_wrong_length_of_shards_is_told_in_samples():
    with pytest.warns(UserWarning, match="declares 30 samples an epoch, and 40 came"):
        type("Wrong", (Sharded,), {"length": 30})(batch_size=4, epochs=1, **QUIET).fit()


def numbered(row):
    return X[row], Y[row], row


class Noted(Mlp):
    """Keeps the rows that it was trained on."""

    def build_data(self):
        return Data(train=Shards(range(5), rows, numbered, shuffle_buffer=4))

    def compute_loss(self, batch):
        vars(self).setdefault("given", []).extend(batch[2].tolist())
        return super().compute_loss(batch)


def rows_given(folder, steps=None):
    """The rows of this rank in a run of so many steps, or in one that takes that up and ends the epoch."""
    more = {"epochs": 1, "resume": f"{folder}/noted/one"} if steps is None else {"steps": steps}
    trainer = Noted(batch_size=4, log={"every": 1}, run={"dir": folder, "id": "one"}, **more)
    summary = trainer.fit()
    return trainer.given, summary["steps"], summary["samples"]


@pytest.mark.ranks
def test_an_epoch_that_two_uneven_ranks_began_is_ended_by_one(tmp_path):
    (first, steps, samples), (second, other_steps, other_samples) = run_ranks(2, rows_given, str(tmp_path), 9)
    assert (steps, samples) == (other_steps, other_samples)
    assert len(first) + len(second) == samples < 40
    assert len(first) != len(second)
    rest, _, whole = rows_given(str(tmp_path))
    assert whole == 40
    assert sorted(first + second + rest) == list(range(40))
