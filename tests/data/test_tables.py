"""Hugging Face data sets, Arrow tables, and loaders that keep their place."""

import itertools

import datasets
import pyarrow
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from fasttrain import ConfigError, Data
from fasttrain.data.plain import from_plain, to_plain
from fasttrain.data.tables import EVALUATION, TRAIN, prepared
from fasttrain.errors import CheckpointError
from tests.helpers import QUIET, StopAt, Weight

# torchdata 0.11 calls a function that torch 2.14 warns of and that does nothing.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
COLUMNS = {"value": [float(i) for i in range(11)], "word": [f"w{i}" for i in range(11)]}


class Rows(Weight):
    """Trains on the column `value`; keeps what it was given."""

    source, evaluation, workers = None, None, 0

    def build_data(self):
        return Data(train=type(self).source(), evaluation=self.evaluation, num_workers=self.workers)

    def compute_loss(self, batch):
        if self.model.training:
            vars(self).setdefault("given", []).extend(batch["value"].tolist())
        return super().compute_loss((batch["value"],))


def run(source, workers=0, **settings):
    cls = type("Rows", (Rows,), {"source": staticmethod(source), "workers": workers})
    trainer = cls(batch_size=2, **{**QUIET, **settings})
    trainer.fit()
    return trainer


def table():
    return pyarrow.table(COLUMNS)


def dataset():
    return datasets.Dataset.from_dict(COLUMNS)


def stream():
    return dataset().to_iterable_dataset(num_shards=3)


@pytest.mark.parametrize(
    "source", [table, dataset, lambda: datasets.DatasetDict(train=dataset())], ids=["arrow", "set", "dict"]
)
def test_each_row_of_a_table_comes_once_an_epoch_with_its_columns_as_tensors_and_text(source):
    given = run(source, epochs=2).given
    assert sorted(given[:11]) == sorted(given[11:]) == COLUMNS["value"]
    row = prepared(source(), TRAIN, 0, 1)[3]
    assert (row["value"], row["word"]) == (torch.tensor(3.0), "w3")


def test_the_columns_of_a_table_stay_where_they_are():
    held = table()
    taken = prepared(held, TRAIN, 0, 1)
    assert (
        taken.data.column("value").chunk(0).buffers()[1].address == held.column("value").chunk(0).buffers()[1].address
    )


def test_the_split_that_is_meant_is_taken_or_asked_for():
    of = {name: dataset().select(range(n)) for n, name in enumerate(("train", "test", "validation"), start=1)}
    assert len(prepared(datasets.DatasetDict(of), EVALUATION, 0, 1)) == 3
    with pytest.raises(ConfigError, match=r"has the splits test, and none of train; .*dataset\['\.\.\.'\]"):
        prepared(datasets.DatasetDict(test=dataset()), TRAIN, 0, 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_gives_each_row_once_an_epoch(workers):
    given = run(stream, workers, epochs=2).given
    assert sorted(given[:11]) == sorted(given[11:]) == COLUMNS["value"]


def test_ranks_take_parts_of_a_stream():
    parts = [[row["value"].item() for row in prepared(stream(), TRAIN, rank, 3)] for rank in range(3)]
    assert sorted(itertools.chain(*parts)) == COLUMNS["value"]
    assert all(len(part) > 2 for part in parts)


class Steps:
    """An iterable of batches that keeps its place, and how many it made."""

    made = 0

    def __init__(self):
        self.next = 0

    def __iter__(self):
        while self.next < 6:
            Steps.made += 1
            number, self.next = self.next, self.next + 1
            yield {"value": torch.tensor([2.0 * number, 2.0 * number + 1])}
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def loader(workers):
    return lambda: StatefulDataLoader(Numbers(), batch_size=2, shuffle=True, num_workers=workers)


class Numbers:
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return {"value": torch.tensor(float(index))}


SOURCES = {
    "steps": Steps,
    "loader": loader(0),
    "loader-2-workers": loader(2),
    "stream": stream,
    "shuffled": lambda: stream().shuffle(seed=3, buffer_size=4),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_what_keeps_its_place_is_taken_up_there(tmp_path, source):
    workers = 2 if source in (SOURCES["stream"], SOURCES["shuffled"]) else 0
    whole = run(source, workers, epochs=2).given
    settings = {"epochs": 2, "run": {"dir": str(tmp_path), "id": "one"}}
    Steps.made = 0
    first = run(source, workers, **settings, observers=[StopAt(3)])
    second = run(source, workers, **settings, resume="auto")
    assert first.given + second.given == whole
    if source is Steps:
        assert Steps.made == 12 + 1  # the one that was read ahead of the stop


def test_a_place_is_of_as_many_ranks_as_kept_it():
    trainer = run(Steps, steps=3)
    states = [trainer.feed.reader.state_dict()] * 2
    with pytest.raises(CheckpointError, match=r"that 2 ranks read, and this run has 1: .*Shards"):
        trainer.feed.reader.load_state_dict(states)


def test_states_travel_as_json():
    import json

    import numpy as np

    state = {
        "generator": torch.Generator().manual_seed(1).get_state(),
        "numpy": np.arange(3),
        1: (b"bytes", None, 1.5, True),
        "deep": [{"x": np.float32(2)}],
    }
    back = from_plain(json.loads(json.dumps(to_plain(state, "it"))))
    assert torch.equal(back["generator"], state["generator"])
    assert (back["numpy"].tolist(), back[1], back["deep"][0]["x"]) == ([0, 1, 2], state[1], 2)
    with pytest.raises(CheckpointError, match="it holds a object"):
        to_plain([object()], "it")
