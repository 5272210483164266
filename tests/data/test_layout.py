"""How sequences lie in a batch: each once in every layout, in rows with room, with boundaries that the model can keep to."""

import itertools
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain import ConfigError
from fasttrain.core.batch import cut
from fasttrain.data.text import Layout, LayoutConfig, Sequences, separate_sequences
from fasttrain.data.text.layout import first_fit_decreasing, pack
from tests.commands import ROOT

PAD = 99
lengths_lists = st.lists(st.integers(1, 12), min_size=1, max_size=20)


def layout(kind, **settings):
    return Layout(
        LayoutConfig(layout=kind, **{"sequence_length": 12, "multiple": 4, **settings}), {"tokens": PAD, "labels": -100}
    )


def samples_of(lengths):
    """Sequence i holds 100 i, 100 i + 1, ..., and says its number."""
    return [
        {"tokens": 100 * i + torch.arange(n), "labels": 7 * torch.arange(n), "number": torch.tensor(i)}
        for i, n in enumerate(lengths)
    ]


# ---- rows


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), max_size=60), room=st.integers(0, 40))
def test_every_sequence_gets_a_place_in_a_row_that_has_room(lengths, room):
    capacity = max(lengths, default=1) + room
    rows = first_fit_decreasing(lengths, capacity)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in row) <= capacity for row in rows)
    # Never more than 11/9 of the fewest possible, which the sum bounds from below, and 6/9; or two rows half full.
    fewest = -(-sum(lengths) // capacity)
    halves = sum(length > capacity / 2 for length in lengths)
    assert len(rows) <= max(11 / 9 * max(fewest, halves) + 6 / 9, 2 * sum(lengths) / capacity + 1)
    assert rows == first_fit_decreasing(list(lengths), capacity)
    # Evened out they are as many, hold the same and are no wider.
    even = pack(lengths, capacity)
    assert sorted(i for row in even for i in row) == list(range(len(lengths)))
    assert len(even) == len(rows)
    widest = [max((sum(lengths[i] for i in row) for row in each), default=0) for each in (even, rows)]
    assert widest[0] <= widest[1]


def test_rows_of_real_lengths_are_nearly_full():
    rng = np.random.default_rng(0)
    for batch in (32, 128, 1024):
        lengths = np.clip(rng.gamma(2, 14, batch).astype(int) + 3, 3, 128).tolist()
        assert sum(lengths) / (128 * len(first_fit_decreasing(lengths, 128))) > {32: 0.85, 128: 0.95, 1024: 0.99}[batch]
        rows = pack(lengths, 128)
        assert sum(lengths) / (len(rows) * max(sum(lengths[i] for i in row) for row in rows)) > 0.95


# ---- batches


@settings(max_examples=100, deadline=None)
@given(lengths=lengths_lists)
def test_a_padded_batch_holds_each_sequence_in_its_row(lengths):
    made = layout("padded")
    batch = made.collate(samples_of(lengths))
    width = min(-(-max(lengths) // 4) * 4, 12)
    assert batch["tokens"].shape == batch["labels"].shape == (len(lengths), width)
    assert batch["length"].tolist() == lengths
    laid = made.lay_out(batch)
    assert laid["number"].tolist() == list(range(len(lengths)))
    if "mask" not in laid:
        assert set(lengths) == {width}
    for i, n in enumerate(lengths):
        assert laid["tokens"][i].tolist() == [*range(100 * i, 100 * i + n), *[PAD] * (width - n)]
        assert laid["labels"][i].tolist() == [*range(0, 7 * n, 7), *[-100] * (width - n)]
        assert "mask" not in laid or laid["mask"][i].tolist() == [True] * n + [False] * (width - n)


@settings(max_examples=150, deadline=None)
@given(lengths=lengths_lists, kind=st.sampled_from(["packed", "unpadded"]), row_length=st.sampled_from([None, 12, 30]))
def test_rows_hold_each_sequence_once_between_boundaries(lengths, kind, row_length):
    made = layout(kind, row_length=row_length)
    laid = made.lay_out(made.collate(samples_of(lengths)))
    rows, width = laid["tokens"].shape
    flat, labels = laid["tokens"].flatten().tolist(), laid["labels"].flatten().tolist()
    assert rows == 1 if kind == "unpadded" else width <= (row_length or 12)
    assert set(laid) == {"tokens", "labels", "number", "first", "boundaries"}
    for i, (first, n) in enumerate(zip(laid["first"].tolist(), lengths, strict=True)):
        assert flat[first : first + n] == list(range(100 * i, 100 * i + n))
        assert labels[first : first + n] == list(range(0, 7 * n, 7))
        assert first % width + n <= width  # in one row
    assert flat.count(PAD) == rows * width - sum(lengths)
    assert labels.count(-100) == flat.count(PAD)

    within = laid["boundaries"]
    assert sum(within.lengths) == rows * width == int(within.cu_seqlens[-1])
    assert max(within.lengths) <= within.longest == max(lengths)
    # Each stretch is one sequence, or filling of one row.
    starts = within.cu_seqlens[:-1].tolist()
    assert set(zip(laid["first"].tolist(), lengths, strict=True)) <= set(zip(starts, within.lengths, strict=True))
    stretches = within.stretches().view(rows, width)
    for row in stretches.tolist():
        assert row == sorted(row)
    assert all(set(a.tolist()).isdisjoint(b.tolist()) for a, b in itertools.pairwise(stretches))
    assert within.places().tolist() == [place for n in within.lengths for place in range(n)]


def test_an_unpadded_batch_holds_no_filling_beyond_the_multiple():
    made = layout("unpadded")
    assert made.lay_out(made.collate(samples_of([5, 9, 3])))["tokens"].shape == (1, 20)
    alone = layout("unpadded", multiple=1)
    assert alone.lay_out(alone.collate(samples_of([5, 9, 3])))["tokens"].shape == (1, 17)


def test_each_microbatch_is_cut_to_its_own_longest():
    made = layout("padded")
    batch = made.collate(samples_of([12, 11, 3, 4]))
    long, short = (made.lay_out(piece) for piece in cut(batch, 2))
    assert long["tokens"].shape == (2, 12)
    assert short["tokens"].shape == (2, 4)
    assert short["number"].tolist() == [2, 3]


@pytest.mark.parametrize("kind", ["padded", "packed", "unpadded"])
def test_a_microbatch_without_samples_stays_without(kind):
    made = layout(kind)
    *_, empty = cut(made.collate(samples_of([5])), 3)[:1]
    laid = made.lay_out(empty)
    assert {name: len(entry) for name, entry in laid.items()} == {"tokens": 0, "labels": 0, "number": 0, "length": 0}


def test_no_row_is_wider_than_a_sequence_may_be():
    made = layout("padded", sequence_length=11, multiple=8)
    assert made.collate(samples_of([9, 11]))["tokens"].shape == (2, 11)
    packed = layout("packed", sequence_length=11, multiple=8)
    assert packed.lay_out(packed.collate(samples_of([9, 11])))["tokens"].shape == (2, 11)


# ---- sequences


@settings(max_examples=100, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(5, 2**16), max_size=12), min_size=1, max_size=10), longest=st.integers(3, 9)
)
def test_documents_keep_every_token_in_pieces_that_are_short_enough(documents, longest):
    tokens, ends = separate_sequences(documents, longest, start=1, separator=2)
    pieces = np.split(tokens, ends[:-1])
    assert all(piece[0] == 1 and piece[-1] == 2 and 2 <= len(piece) <= longest for piece in pieces)
    joined = [token for piece in pieces for token in piece[1:-1].tolist()]
    assert joined == [token for document in documents for token in document]
    assert len(pieces) == sum(max(1, -(-len(document) // (longest - 2))) for document in documents)


def test_sequences_are_a_data_set_with_an_entry_a_token_and_an_entry_a_sequence():
    data = Sequences([3, 4, 9], {"tokens": np.arange(9, dtype=np.int16)}, {"label": np.array([5, 6, 7])})
    assert len(data) == 3
    assert data.lengths.tolist() == [3, 1, 5]
    assert [data[i]["tokens"].tolist() for i in range(3)] == [[0, 1, 2], [3], [4, 5, 6, 7, 8]]
    assert [int(data[i]["label"]) for i in range(3)] == [5, 6, 7]
    assert data[0]["tokens"].dtype == torch.int64
    by_length = data.sorted_by_length()
    assert [by_length[i]["tokens"].tolist() for i in range(3)] == [[3], [0, 1, 2], [4, 5, 6, 7, 8]]
    assert [int(by_length[i]["label"]) for i in range(3)] == [6, 5, 7]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": "pakced"}, "did you mean 'packed'"),
        ({"row_length": 5}, "cannot hold a sequence of data.sequence_length=12; use 12 or more"),
        ({"multiple": 0}, "use 1 or more"),
        ({"sequence_length": 2}, "use 3 or more"),
    ],
)
def test_layouts_without_sense_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        LayoutConfig(**{"layout": "packed", "sequence_length": 12, **change})


def test_the_example_of_the_page_runs():
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "text.md").read_text(), re.DOTALL)
    assert block.count("assert ") == 4
    exec(block, {})
