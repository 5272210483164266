"""Reported faults of streams and of ranks with uneven data, each kind by the name of its case."""

# The names of the cases are written in capitals.

from __future__ import annotations

import faulthandler
import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from fasttrain import ConfigError, Data, Microbatches, RunError
from fasttrain.observe import Observer
from tests.helpers import QUIET, Mlp, Recorder, StopAt, Weight, largest_difference, points, state
from tests.ranks import run_ranks

WATCHDOG_S = 30.0
# On a machine of two cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.0}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


# ---- UNEVEN


class Uneven(Mlp):
    """Ranks with other numbers of batches of two samples; together the first 2 x sum(lengths) points, each rank its own."""

    lengths: tuple[int, ...] = (3, 2)
    last: int = 2

    def build_data(self):
        x, y = points(64)
        first = 2 * sum(self.lengths[: rank()])
        batches = [(x[i : i + 2], y[i : i + 2]) for i in range(first, first + 2 * self.lengths[rank()], 2)]
        if batches:
            batches[-1] = tuple(part[: self.last] for part in batches[-1])
        return Data(train=Unsized(batches))

    @property
    def steps_of_samples(self):
        """The samples of each step over all ranks, as one process would see them."""
        x, y = points(64)
        steps = []
        for step in range(max(self.lengths)):
            rows = []
            for r, length in enumerate(self.lengths):
                first = 2 * sum(self.lengths[:r])
                if step < length:
                    held = self.last if step == length - 1 else 2
                    rows += range(first + 2 * step, first + 2 * step + held)
            steps.append((x[rows], y[rows]))
        return steps


class Unsized:
    """An iterable without a length: of a list, or of what a function gives."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items() if callable(self.items) else self.items)


def watched(function, cases):
    """`function(*case)` for each case, each ended by a watchdog; the start of a process is not what is watched."""
    found = []
    for case in cases:
        faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
        found.append(function(*case))
        faulthandler.cancel_dump_traceback_later()
    return found


ON_TWO_RANKS: dict = {}
ON_THREE_RANKS: dict = {}


def all_cases(n):
    return {name: watched(*case) for name, case in {2: ON_TWO_RANKS, 3: ON_THREE_RANKS}[n].items()}


def by_case(n):
    """What each case gave, on each rank, `[name][case][rank]`: one start of processes for all, which takes long."""
    found = run_ranks(n, all_cases, n, timeout_s=150.0)
    return {name: list(zip(*(of_rank[name] for of_rank in found), strict=True)) for name in found[0]}


@pytest.fixture(scope="module")
def two_ranks():
    return by_case(2)


@pytest.fixture(scope="module")
def three_ranks():
    return by_case(3)


def trained_unevenly(lengths, last, settings):
    cls = type("Uneven", (Uneven,), {"lengths": lengths, "last": last})
    watcher = Recorder()
    trainer = cls(batch_size=2 * len(lengths), optimizer=SGD, observers=[watcher], **QUIET, **settings)
    summary = trainer.fit()
    return summary["steps"], summary["samples"], [r["loss"] for r in watcher.steps], state(trainer)


def by_hand(lengths, last, epochs=1):
    """Plain torch on one process: each step is the mean over the samples that its ranks hold together."""
    cls = type("Uneven", (Uneven,), {"lengths": lengths, "last": last})
    trainer = Mlp(batch_size=2, **QUIET)
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    losses = []
    for x, y in cls.steps_of_samples.fget(cls) * epochs:
        loss = torch.nn.functional.cross_entropy(trainer.model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, state(trainer)


MICROBATCHES = {"name": "microbatches", "num": 2}
TWO_RANKS = (
    ((3, 2), 2, {"epochs": 1}),
    ((2, 3), 1, {"epochs": 2}),
    ((4, 0), 2, {"epochs": 1}),
    ((5, 4), 2, {"epochs": 1, "accumulation": MICROBATCHES}),
    ((2, 1), 2, {"epochs": 2, "gradient_clipping": {"name": "norm", "max_norm": 1e9}, "nonfinite": "skip"}),
)
THREE_RANKS = (((1, 4, 2), 1, {"epochs": 2}), ((3, 3, 0), 1, {"epochs": 1}))


ON_TWO_RANKS["trained"] = (trained_unevenly, TWO_RANKS)
ON_THREE_RANKS["trained"] = (trained_unevenly, THREE_RANKS)


@pytest.mark.ranks
def test_UNEVEN_1_ranks_with_other_numbers_of_batches_end_together(two_ranks, three_ranks):
    trained = [*two_ranks["trained"], *three_ranks["trained"]]
    for (lengths, last, settings), found in zip([*TWO_RANKS, *THREE_RANKS], trained, strict=True):
        losses, weights = by_hand(lengths, last, settings["epochs"])
        steps, samples, told, first = found[0]
        assert steps == max(lengths) * settings["epochs"] == len(losses)
        assert samples == settings["epochs"] * sum(2 * n - (2 - last) for n in lengths if n)
        assert told == pytest.approx(losses, rel=1e-5)
        assert largest_difference(first, weights) < 1e-6
        for other in found[1:]:
            assert other[:2] == (steps, samples)
            assert largest_difference(other[3], first) == 0.0


class Windows(Weight):
    """One weight; each rank gives windows of microbatches of one value each, one rank one microbatch fewer."""

    values = ((1.0, 2.0, 3.0, 4.0, 5.0), (6.0, 7.0, 8.0, 9.0))
    names = False

    def build_data(self):
        mine = [(torch.tensor([value]),) for value in self.values[rank()]]
        return Data(train=Unsized([Microbatches(mine[i : i + 2]) for i in range(0, len(mine), 2)]))

    def count(self, batch):
        tokens = batch[0].sum().long()  # so many tokens a sample
        return {"loss": tokens} if self.names else tokens

    def compute_loss(self, batch):
        loss = super().compute_loss(batch)
        return {"loss": loss} if self.names else loss


class SampleWindows(Windows):
    count = Weight.count


class NamedWindows(Windows):
    names = True


def moved_by(cls):
    trainer = cls(batch_size=4, epochs=1, optimizer={**SGD, "lr": 1.0}, **QUIET)
    return trainer.fit()["steps"], trainer.model.weight.item()


ON_TWO_RANKS["windows"] = (moved_by, ((SampleWindows,), (Windows,), (NamedWindows,)))


@pytest.mark.ranks
def test_UNEVEN_2_a_window_with_one_microbatch_less_is_weighed_by_what_all_ranks_counted(two_ranks):
    steps = [(1, 2, 6, 7), (3, 4, 8, 9), (5,)]
    by_samples = 1.0 - sum(sum(values) / len(values) for values in steps)
    by_tokens = 1.0 - sum(sum(v * v for v in values) / sum(values) for values in steps)
    expected = [by_samples, by_tokens, by_tokens]
    for of_ranks, weight in zip(two_ranks["windows"], expected, strict=True):
        assert of_ranks == ((3, pytest.approx(weight, rel=1e-6)),) * 2


def synchronised():
    cls = type("Uneven", (WithNorm,), {"lengths": (3, 2)})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer = cls(batch_size=4, epochs=2, batch_norm="sync", **QUIET)
        summary = trainer.fit()
    return summary["steps"], trainer.total_steps, [str(w.message) for w in told if "left out" in str(w.message)]


class WithNorm(Uneven):
    def build_model(self):
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))


ON_TWO_RANKS["synchronised"] = (synchronised, ((),))


@pytest.mark.ranks
def test_UNEVEN_1_with_synchronised_statistics_an_epoch_ends_with_the_shortest_rank_and_says_so(two_ranks):
    (((steps, planned, told), (other, other_planned, nothing)),) = two_ranks["synchronised"]
    assert steps == other == 4
    assert planned == other_planned is None
    assert len(told) == 1
    assert nothing == []
    assert "with batch_norm=sync every rank needs a batch" in told[0]


class Fails(Uneven):
    def build_data(self):
        given = list(super().build_data().train)

        def batches():
            yield given[0]
            if rank() == 1:
                raise OSError("the disk of rank 1 is gone")
            yield from given[1:]

        return Data(train=Unsized(batches))


def failed():
    with pytest.raises((RunError, OSError)) as told:
        Fails(batch_size=4, steps=3, **QUIET).fit()
    return type(told.value).__name__, str(told.value)


ON_TWO_RANKS["failed"] = (failed, ((),))


@pytest.mark.ranks
def test_UNEVEN_1_an_error_of_one_rank_ends_all(two_ranks):
    ((first, second),) = two_ranks["failed"]
    assert first == ("RunError", "reading the training data failed on rank 1, which says why; all ranks end.")
    assert second == ("OSError", "the disk of rank 1 is gone")


class Judged(Weight):
    """The loss of a validation is the value that this rank gives it."""

    by_rank = ((0.3, 0.4), (0.5, 0.2))

    def build_data(self):
        return Data(train=(torch.zeros(4),), evaluation=Unsized([(torch.tensor([1.0]),)]))

    def evaluate(self):
        self.asked = getattr(self, "asked", -1) + 1
        return super().evaluate()

    def compute_loss(self, batch):
        if self.model.training:
            return super().compute_loss(batch)
        return torch.tensor(self.by_rank[rank()][self.asked])


class StopsWhenWorse(Observer):
    """Early stopping on the mean loss; keeps what it decided."""

    def __init__(self):
        self.best, self.decisions = float("inf"), []

    def started(self, run):
        self.run = run

    def evaluated(self, record):
        loss = record["metrics"]["loss"]
        self.decisions.append((round(loss, 6), loss < self.best))
        if loss >= self.best:
            self.run.request_stop("worse")
        self.best = min(self.best, loss)


def judged(by_rank):
    watcher = StopsWhenWorse()
    cls = type("Judged", (Judged,), {"by_rank": by_rank})
    summary = cls(batch_size=2, steps=3, evaluate={"every": 1}, observers=[watcher], **QUIET).fit()
    return watcher.decisions, summary["status"]


FALLING, RISING = ((0.3, 0.4, 0.0), (0.5, 0.2, -1.0)), ((0.3, 0.5, 9.0), (0.5, 0.4, 9.0))
ON_TWO_RANKS["judged"] = (judged, ((FALLING,), (RISING,)))


@pytest.mark.ranks
def test_UNEVEN_4_ranks_judge_an_evaluation_by_the_mean_over_all_of_them(two_ranks):
    better, worse = two_ranks["judged"]
    assert better[0] == better[1]
    assert better[0] == ([(0.4, True), (0.3, True), (-0.5, True)], "done")
    assert worse[0] == worse[1]
    # The stop that all ranks ask for comes a step or so later.
    assert worse[0][0][:2] == [(0.4, True), (0.45, False)]


class EvaluatesUnevenly(Mlp):
    def build_data(self):
        x, y = points(10, seed=4)
        first, end = ((0, 7), (7, 10), (10, 10))[rank()]
        parts = [(x[i : min(i + 2, end)], y[i : min(i + 2, end)]) for i in range(first, end, 2)]
        return Data(train=points(24), evaluation=Unsized(parts))


def evaluated():
    return EvaluatesUnevenly(batch_size=6, steps=1, **QUIET).evaluate()["loss"]


ON_THREE_RANKS["evaluated"] = (evaluated, ((),))


@pytest.mark.ranks
def test_UNEVEN_1_an_evaluation_of_other_lengths_counts_each_sample_once(three_ranks):
    expected = Mlp(batch_size=6, steps=1, **QUIET).evaluate()["loss"]
    assert three_ranks["evaluated"] == [(pytest.approx(expected, rel=1e-6),) * 3]


# ---- ITERABLE


class Numbers(IterableDataset):
    """0, 1, 2, ...; knows nothing of workers."""

    n = 4

    def __iter__(self):
        return iter(range(self.n))


class Shuffled(Numbers):
    """The same in an order, and with noise, of the global generator's."""

    n = 13

    def __iter__(self):
        for i in torch.randperm(self.n).tolist():
            yield torch.tensor([i, torch.randint(1000, ()).item()])


class Sharing(Numbers):
    """Deals itself to the workers."""

    n = 7

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        return iter(range(first, self.n, step))


class LooksLate(Numbers):
    def __iter__(self):
        yield from range(2)
        yield get_worker_info().id


class ItsOwnIterator(Numbers):
    def __iter__(self):
        return self

    def __next__(self):
        return 0


class Cut(Numbers):
    """Its worker_init_fn gives each worker a part."""

    n, first, step = 7, 0, 1

    def __iter__(self):
        return iter(range(self.first, self.n, self.step))


def cut(worker):
    dataset = get_worker_info().dataset
    dataset.first, dataset.step = worker, 3


def epoch_of(source, workers=0, epochs=1, batch_size=2):
    """The samples of some epochs as a trainer is fed with them."""

    class Fed(Weight):
        def build_data(self):
            return Data(train=source, num_workers=workers)

    trainer = Fed(batch_size=batch_size, epochs=epochs, **QUIET)
    found, feed = [], trainer.feed.training(trainer.task, trainer.plan)
    while not trainer.feed.is_over(0):
        found.append(next(feed))
    return found


def test_ITERABLE_1_the_plain_loader_repeats():
    assert [x.item() for x in DataLoader(Numbers(), num_workers=2)] == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("workers", [2, 3])
def test_ITERABLE_1_each_item_of_a_stream_comes_once_an_epoch_and_that_workers_repeat_is_told(workers):
    with pytest.warns(UserWarning, match=r"Numbers does not look at .*get_worker_info") as told:
        found = epoch_of(Numbers(), workers, epochs=2)
    assert sorted(torch.cat(found).tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len([w for w in told if "get_worker_info" in str(w.message)]) == 1


def test_ITERABLE_1_what_a_stream_draws_is_the_same_in_all_workers():
    with pytest.warns(UserWarning, match="Shuffled does not look"):
        found = torch.cat(epoch_of(Shuffled(), 3, epochs=2))
    first, second = found[:13], found[13:]
    for epoch in (first, second):
        assert sorted(epoch[:, 0].tolist()) == list(range(13))
    assert first[:, 0].tolist() != second[:, 0].tolist()
    assert len(set(first[:, 1].tolist())) > 6


def test_ITERABLE_1_a_stream_that_deals_itself_to_workers_is_trusted():
    assert sorted(torch.cat(epoch_of(Sharing(), 3)).tolist()) == list(range(7))


@pytest.mark.parametrize("persistent", [False, True])
def test_ITERABLE_1_a_loader_of_the_users_is_looked_after_likewise(persistent):
    def loader(dataset, **more):
        return DataLoader(dataset, batch_size=2, num_workers=3, persistent_workers=persistent, **more)

    with pytest.warns(UserWarning, match="Shuffled does not look"):
        found = torch.cat(epoch_of(loader(Shuffled()), epochs=2))
    assert sorted(found[:13, 0].tolist()) == sorted(found[13:, 0].tolist()) == list(range(13))
    for dealt in (loader(Sharing()), loader(Cut(), worker_init_fn=cut)):
        assert sorted(torch.cat(epoch_of(dealt)).tolist()) == list(range(7))


@pytest.mark.parametrize(
    ("dataset", "said"),
    [(LooksLate(), r"looked at get_worker_info\(\) after"), (ItsOwnIterator(), "is its own iterator")],
    ids=["late", "iterator"],
)
@pytest.mark.filterwarnings("ignore:LooksLate does not look at")
def test_ITERABLE_1_what_would_repeat_and_cannot_be_dealt_is_refused(dataset, said):
    with pytest.raises(RunError, match=said):
        epoch_of(dataset, 2)


class Declared:
    """Says another number of batches than it has; `declared=None`: says nothing."""

    def __init__(self, real):
        self.real = real

    def __iter__(self):
        x, y = points(24)
        return ((x[i : i + 4], y[i : i + 4]) for i in range(0, 4 * self.real, 4))


class DeclaredFour(Declared):
    def __len__(self):
        return 4


class DeclaredStream(IterableDataset):
    """Samples; torch itself would warn of each one too many."""

    def __init__(self, real):
        self.real = real

    def __len__(self):
        return 16

    def __iter__(self):
        return zip(*(part[: 4 * self.real] for part in points(24)), strict=True)


def declared(source, **settings):
    class Run(Mlp):
        def build_data(self):
            return Data(train=source, evaluation=points(10, seed=4))

    watcher = Recorder()
    trainer = Run(batch_size=4, optimizer=SGD, observers=[watcher], **QUIET, **settings)
    return trainer, trainer.fit(), watcher


@pytest.mark.parametrize("kind", [DeclaredFour, DeclaredStream])
@pytest.mark.parametrize("real", [3, 5])
def test_ITERABLE_2_epochs_end_with_the_data_and_one_warning_states_both_lengths(kind, real):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer, summary, watcher = declared(kind(real), epochs=2, schedule="linear")
    assert [str(w.message) for w in told if "declare" in str(w.message)] == [str(told[0].message)]
    assert f"declares 4 batches an epoch, and {real} came" in str(told[0].message)
    assert (summary["steps"], summary["epochs"], trainer.total_steps) == (2 * real, 2.0, 8)
    # A rate a step that was made, of the planned eight.
    assert [r["lr"] for r in watcher.steps] == pytest.approx(
        [max(0.0, 0.1 * (1 - s / 8)) for s in range(1, 2 * real + 1)]
    )
    assert [e["step"] for e in watcher.evaluations] == [real, 2 * real]
    assert [e["epoch"] for e in watcher.evaluations] == [1.0, 2.0]
    assert watcher.steps[-1]["step"] == 2 * real


def test_ITERABLE_2_a_right_length_is_no_news():
    trainer, summary, _ = declared(DeclaredFour(4), epochs=2)
    assert (summary["steps"], trainer.total_steps) == (8, 8)


def test_ITERABLE_2_without_a_length_epochs_are_counted_all_the_same(tmp_path, capsys):
    _, summary, watcher = declared(Declared(5), epochs=3)
    assert (summary["steps"], summary["epochs"], summary["total_steps"]) == (15, 3.0, None)
    assert [e["step"] for e in watcher.evaluations] == [5, 10, 15]
    assert capsys.readouterr().out.count("to the end of the data") == 1


def test_ITERABLE_2_a_schedule_over_all_steps_asks_for_their_number():
    with pytest.raises(ConfigError, match=r"schedule=cosine needs to know how many steps there are; set steps=N"):
        declared(Declared(5), epochs=3, schedule="cosine")
    _, summary, watcher = declared(Declared(5), steps=8, schedule="linear")
    assert (summary["steps"], summary["epochs"]) == (8, 1.0)
    assert watcher.steps[-1]["lr"] == pytest.approx(0.0)


def test_ITERABLE_2_data_that_may_have_no_end_wants_to_know_when_to_stop():
    with pytest.raises(ConfigError, match="neither steps nor epochs is set"):
        declared(Declared(5))


def test_ITERABLE_2_data_twice_as_long_as_declared_is_told_before_it_ends():
    class Endless(DeclaredFour):
        def __iter__(self):
            return itertools.cycle([points(4)])

    with pytest.warns(UserWarning, match="declares 4 batches an epoch, and 8 have come so far"):
        _, summary, _ = declared(Endless(0), steps=20)
    assert summary["steps"] == 20


@pytest.mark.parametrize("stop", [2, 3, 4])
def test_ITERABLE_2_a_stopped_run_goes_on_where_its_epoch_was(tmp_path, stop):
    class Run(Mlp):
        def build_data(self):
            return Data(train=Declared(3))

    settings = {"batch_size": 4, "epochs": 2, "log": {"every": 1}, "run": {"dir": str(tmp_path), "id": "one"}}
    whole = Run(**{**settings, "run": {"dir": None}})
    whole.fit()
    assert Run(**settings, observers=[StopAt(stop)]).fit()["steps"] == stop
    resumed = Run(**settings, resume="auto")
    assert resumed.fit()["steps"] == 6
    assert largest_difference(state(whole), state(resumed)) == 0.0
