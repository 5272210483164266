"""The way from the host to the device, with no such device there: `meta` stands for one that copies on streams."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_leaves

from fasttrain import Data
from fasttrain.core.batch import Microbatches
from fasttrain.distributed.world import World
from fasttrain.errors import ConfigError
from fasttrain.trainer.delivery import Ahead, Carrier
from fasttrain.trainer.fit import train_until
from fasttrain.trainer.session import Session
from tests.helpers import QUIET, Mlp, Recorder, points, state
from tests.test_device_step import META

OLD = {"optimizer": {"name": "adamw", "lr": 0.01}}


class Streams:
    """What a device with streams offers, and in which order it is used."""

    def __init__(self):
        self.told, self.now, self.copied = [], "step", 0

    def Stream(self, device):
        self.told.append("new stream")
        return SimpleNamespace(name="side", record_event=self.record)

    def record(self):
        event, self.copied = self.copied, self.copied + 1
        self.told.append(("copied", event))
        return event

    def stream(self, stream):
        streams = self

        class Current:
            def __enter__(self):
                streams.now = stream.name

            def __exit__(self, *error):
                streams.now = "step"

        return Current()

    def current_stream(self, device):
        return SimpleNamespace(name=self.now, wait_event=lambda event: self.told.append(("waits", event)))


# One for all tests: torch keeps what it once found under a device's name.
STREAMS = Streams()


@pytest.fixture
def streams(monkeypatch):
    """`meta` copies on streams, and pinning and copying are told in the order in which they come."""
    found, to = STREAMS, torch.Tensor.to
    found.told.clear()
    found.copied = 0

    def pin(tensor):
        assert tensor.device.type == "cpu"
        found.told.append("pins")
        return tensor

    def moved(tensor, *arguments, **keywords):
        if arguments[:1] == (META,):
            found.told.append(("copies on", found.now, keywords.get("non_blocking", False)))
        return to(tensor, *arguments, **keywords)

    monkeypatch.setattr(torch, "meta", found, raising=False)
    monkeypatch.setattr("fasttrain.trainer.delivery.STREAMED", ("meta",))
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", moved)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: found.told.append(("used by", stream.name))
    )
    return found


BATCH = (torch.ones(3, 2), {"label": torch.zeros(3), "name": "three"})


def test_a_batch_is_pinned_and_copied_on_a_side_stream_for_which_the_step_waits(streams):
    carrier = Carrier(META)
    sent = carrier.send(BATCH)
    assert streams.told == ["new stream", "pins", "pins", *[("copies on", "side", True)] * 2, ("copied", 0)]
    streams.told.clear()
    batch = carrier.receive(sent)
    assert streams.told == [("waits", 0), *[("used by", "step")] * 2]
    assert batch[1]["name"] == "three"
    assert {leaf.device for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)} == {META}
    carrier.receive(carrier.send(BATCH))
    assert "new stream" not in streams.told
    assert ("waits", 1) in streams.told


def test_microbatches_and_jagged_tensors_are_copied_ahead_too(streams):
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    carrier = Carrier(META)
    batch = carrier.receive(carrier.send(Microbatches([(torch.ones(2),), (jagged,)])))
    assert type(batch) is Microbatches
    assert len(batch) == 2
    assert batch[1][0].is_nested
    assert batch[1][0].device == META
    assert streams.told.count(("used by", "step")) == 2


def test_what_the_allocator_cannot_be_told_of_is_copied_when_its_step_comes(streams):
    carrier = Carrier(META)
    sparse = torch.eye(3).to_sparse()
    sent = carrier.send((torch.ones(3), sparse))
    assert streams.told == []
    assert {leaf.device for leaf in carrier.receive(sent)} == {META}
    assert [entry for entry in streams.told if entry != "pins"] == [("copies on", "step", True)] * 2


def test_a_batch_without_anything_to_move_costs_no_stream(streams):
    carrier = Carrier(META)
    assert carrier.receive(carrier.send({"names": ["a", "b"]})) == {"names": ["a", "b"]}
    assert carrier.receive(carrier.send(None)) is None
    assert streams.told == []


class Moving:
    """A batch class of a user's own, with no more than `to`."""

    def __init__(self, x):
        self.x = x

    def to(self, device, **keywords):
        moved = type(self)(self.x.to(device, **keywords))
        moved.asked = keywords
        return moved


class Whole(Moving):
    """One that can do all that a tensor can."""

    def pin_memory(self):
        return type(self)(self.x.pin_memory())

    def record_stream(self, stream):
        self.x.record_stream(stream)


def test_a_batch_class_without_pinning_is_copied_all_the_same_and_named_once(streams):
    carrier = Carrier(META)
    with pytest.warns(UserWarning, match=r"hold a Moving, which has no pin_memory\(\).*give it pin_memory\(\)") as told:
        moved = [carrier.receive(carrier.send(Moving(torch.ones(3)))) for _ in range(3)]
    assert len(told) == 1
    assert {batch.x.device for batch in moved} == {META}
    assert moved[0].asked == {}
    assert "pins" not in streams.told


def test_a_batch_class_that_can_be_pinned_is_copied_ahead(streams):
    carrier = Carrier(META)
    sent = carrier.send((Whole(torch.ones(3)),))
    assert streams.told == ["new stream", "pins", ("copies on", "side", True), ("copied", 0)]
    assert carrier.receive(sent)[0].x.device == META
    assert streams.told[-1] == ("used by", "step")


# ---- reading ahead


def test_items_are_made_ahead_up_to_the_depth_and_none_beyond_the_last_that_is_asked_for():
    made = []
    ahead = Ahead((made.append(i) or i for i in range(9)), depth=2, most=4)
    assert next(ahead) == 0
    assert made == [0]
    ahead.fill()
    ahead.fill()
    assert made == [0, 1, 2]
    assert next(ahead) == 1
    ahead.fill()
    assert [next(ahead), next(ahead)] == [2, 3]
    ahead.fill()
    assert made == [0, 1, 2, 3]
    assert next(ahead) == 4


def test_an_error_is_raised_when_its_item_is_asked_for():
    def items():
        yield 0
        yield 1
        raise ValueError("the third")

    ahead = Ahead(items(), depth=5)
    ahead.fill()
    ahead.fill()
    assert [next(ahead), next(ahead)] == [0, 1]
    with pytest.raises(ValueError, match="the third"):
        next(ahead)


def test_items_end_when_they_do():
    ahead = Ahead(iter(range(3)), depth=2)
    ahead.fill()
    assert list(ahead) == [0, 1, 2]


# ---- a run that reads ahead: on the CPU, so that its numbers can be compared


class Given(torch.utils.data.Dataset):
    """Points with noise; notes what is asked for."""

    def __init__(self, asked):
        self.asked, (self.x, self.y) = asked, points()

    def __len__(self):
        return 24

    def __getitem__(self, index):
        self.asked.append(index)
        return self.x[index] + 0.1 * torch.randn(8), self.y[index]


class Drawing(Mlp):
    """Draws from all over: in the data, in the transform, in the step, and counts by the batch."""

    prefetch = 0

    def build_data(self):
        self.asked, self.counted, self.knew = [], [], []

        def transform(batch):
            return batch[0] + torch.rand(1), batch[1]

        return Data(train=Given(self.asked), transform=transform, evaluation=points(10, 4), prefetch=self.prefetch)

    def augment(self, batch, seed):
        return batch[0] + 1e-3 * self.step, batch[1]

    def count(self, batch):
        self.counted.append(len(self.asked))
        return (batch[1] > 0).sum()

    def train_step(self, batch):
        self.knew.append(self.task.known(batch) is not None and self.task.fed.samples == len(batch[1]))
        self.seen_at = (self.feed.position.epoch, self.feed.position.seen)
        batch = batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]
        self.task.fed.batch = batch
        return super().train_step(batch)


@pytest.fixture
def reads_ahead(monkeypatch):
    """The CPU reads ahead like a device with streams, and copies nothing."""
    monkeypatch.setattr("fasttrain.trainer.delivery.Carrier.send", lambda self, batch: (batch, None))


def trained(prefetch, steps=9, kind=Drawing, **settings):
    watcher = Recorder()
    depth = {"prefetch": prefetch}
    trainer = type("Drawing", (kind,), depth)(batch_size=5, steps=steps, observers=[watcher], **OLD, **QUIET | settings)
    trainer.feed.prefetch = prefetch
    trainer.fit()
    return trainer, [record["loss"] for record in watcher.steps]


@pytest.mark.usefixtures("reads_ahead")
@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_no_number_depends_on_reading_ahead(prefetch):
    (plain, losses), (ahead, same) = trained(0), trained(prefetch)
    assert losses == same
    assert len(losses) == 9
    assert ahead.asked == plain.asked
    assert ahead.knew == [True] * 9
    assert all(torch.equal(a, b) for a, b in zip(state(plain).values(), state(ahead).values(), strict=True))
    # The first count is taken when no more than its own batch was read, and later ones are ahead by the depth.
    assert ahead.counted[0] == plain.counted[0] == 5
    assert ahead.feed.samples == plain.feed.samples == 4 * 5 + 4 + 4 * 5


@pytest.mark.usefixtures("reads_ahead")
def test_batches_are_read_once_the_step_before_was_launched_and_never_beyond_the_last():
    trainer, order = type("Drawing", (Drawing,), {"prefetch": 2})(batch_size=5, steps=5, **QUIET), []
    trainer.feed.prefetch = 2
    step = trainer.train_step
    trainer.train_step = lambda batch: order.append(len(trainer.asked)) or step(batch)
    with Session(trainer) as session:
        reason = train_until(session, trainer.feed.training(trainer.task, trainer.plan, steps=5), trainer.feed.is_over)
    assert reason is None
    assert order == [5, 15, 20, 24, 24]


@pytest.mark.usefixtures("reads_ahead")
@pytest.mark.parametrize("prefetch", [0, 2, 5])
def test_a_run_that_is_stopped_and_taken_up_goes_on_with_the_batch_that_was_not_given(prefetch, tmp_path):
    run = {"run": {"dir": str(tmp_path), "name": "a", "id": "1"}}
    whole, losses = trained(0, steps=7)
    first, before = trained(prefetch, steps=7, kind=Stopping, **run)
    assert first.feed.position.seen == 15
    assert first.feed.samples == 15
    again, after = trained(prefetch, steps=7, **run, resume="auto")
    assert before + after == losses
    assert len(after) == 4
    assert again.feed.samples == whole.feed.samples


class Stopping(Drawing):
    """Asks for a stop after three steps."""

    def train_step(self, batch):
        info = super().train_step(batch)
        if self.step == 3:
            self.stop("enough")
        return info

    def fit(self):
        for observer in self.observers:
            self.stop = lambda reason, watcher=observer: watcher.run.request_stop(reason)
        return super().fit()


def test_a_cpu_reads_nothing_ahead():
    trainer = type("Drawing", (Drawing,), {"prefetch": 5})(batch_size=5, steps=3, **QUIET)
    next(trainer.feed.training(trainer.task, trainer.plan, steps=3))
    assert trainer.asked
    assert len(trainer.asked) == 5
    assert trainer.feed.read_ahead is None


class OnMeta(Mlp):
    """A run on a device with streams."""

    def join(self, settings):
        return World(device=META)

    def count(self, batch):
        assert {leaf.device.type for leaf in batch} == {"cpu"}
        return 1.0 * len(batch[1])


def test_a_run_on_a_device_copies_ahead_by_the_depth(streams):
    trainer = OnMeta(batch_size=6, steps=9, **OLD, **QUIET)
    streams.told.clear()
    batches = trainer.feed.training(trainer.task, trainer.plan, steps=4)
    copied = []
    for _ in range(4):
        batch = next(batches)
        assert trainer.task.fed.batch is batch
        assert trainer.task.fed.counts == [6.0]
        trainer.feed.read_ahead()
        assert trainer.task.fed.batch is batch
        copied.append([entry for entry in streams.told if entry[0] in ("copied", "waits")])
    # Copies that began and waits for them: two are ahead of the step, and none beyond the fourth.
    assert [len(entries) for entries in copied] == [4, 6, 7, 8]
    assert copied[-1] == [
        *[("copied", 0), ("waits", 0), ("copied", 1), ("copied", 2), ("waits", 1), ("copied", 3)],
        *[("waits", 2), ("waits", 3)],
    ]
    assert ("copies on", "step", True) not in streams.told


def test_without_a_depth_a_batch_is_copied_on_the_stream_of_its_step(streams):
    kind = type("OnMeta", (OnMeta,), {"build_data": lambda self: Data(train=points(), prefetch=0)})
    trainer = kind(batch_size=6, steps=9, **OLD, **QUIET)
    streams.told.clear()
    next(trainer.feed.training(trainer.task, trainer.plan))
    assert streams.told == ["pins", ("copies on", "step", True)] * 2


def test_evaluation_batches_are_copied_ahead(streams):
    trainer = OnMeta(batch_size=4, steps=9, **OLD, **QUIET)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        given = [portion.here for _, portion in trainer.feed.evaluation(trainer.task, trainer.plan)]
    assert given == [4, 4, 2]
    order = [entry for entry in streams.told if entry[0] in ("copied", "waits")]
    assert order[:4] == [("copied", 0), ("waits", 0), ("copied", 1), ("copied", 2)]


def test_a_depth_below_nothing_is_refused():
    with pytest.raises(ConfigError, match="prefetch=-1 batches cannot be kept ahead; use 2, or 0"):
        Data(train=points(), prefetch=-1)
