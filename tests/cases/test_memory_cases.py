"""Reported faults of memory that is never given back, each by the name of its case."""

# The names of the cases are written in capitals.

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import weakref
from pathlib import Path

import pytest
import torch

from fasttrain import Data
from fasttrain.data import PackedStrings
from fasttrain.data.by_order import ByOrder
from fasttrain.data.order import Order
from fasttrain.data.packed import PackedSamples, huge_lists
from tests.helpers import QUIET, Mlp, Recorder
from tests.stack import setting

COMPANY = {
    "plain": {},
    "refusable": setting("nonfinite", "skip") | setting("gradient_clipping", "norm") | setting("schedule", "cosine"),
    "fp16": setting("precision", "fp16"),
    "microbatches": setting("accumulation", "microbatches"),
    "averaged": setting("weight_averaging", "ema") | setting("nonfinite", "skip"),
}


def with_a_graph():
    """Tensors alive that hold the graph they were computed by."""
    gc.collect()
    # By type: isinstance would ask lazy modules of torch for their class, and they warn.
    tensors = [held for held in gc.get_objects() if issubclass(type(held), torch.Tensor)]
    return sum(tensor.grad_fn is not None for tensor in tensors)


class Logging(Mlp):
    """Logs the loss as it is, with its graph."""

    def compute_loss(self, batch):
        loss = super().compute_loss(batch)
        self.log("raw", loss)
        return loss


@pytest.mark.parametrize("company", COMPANY)
def test_MEM_LEAK_1_values_that_are_logged_each_step_keep_no_graph(company):
    counts = {}

    class Counting(Logging):
        def train_step(self, batch):
            info = super().train_step(batch)
            if self.step in (10, 200):
                counts[self.step] = with_a_graph()
            return info

    before = with_a_graph()
    watcher = Recorder()
    settings = {**QUIET, "log": {"every": 50}, **COMPANY[company]}
    Counting(batch_size=8, steps=200, observers=[watcher], **settings).fit()
    assert counts == {10: before, 200: before}
    assert [record["raw"] for record in watcher.steps] == pytest.approx([r["loss"] for r in watcher.steps], abs=1.0)


def test_MEM_LEAK_1_a_graph_that_is_kept_would_be_counted():
    before = with_a_graph()
    kept = torch.ones(2, requires_grad=True) * 2
    assert with_a_graph() == before + 1
    del kept


@pytest.mark.parametrize("company", COMPANY)
def test_MEM_LEAK_2_the_loss_of_a_step_is_gone_when_the_next_forward_begins(company):
    alive = []

    class Watching(Mlp):
        last = None

        def compute_loss(self, batch):
            if self.last is not None:
                alive.append(self.last() is not None)
            loss = super().compute_loss(batch)
            self.last = weakref.ref(loss) if loss.requires_grad else None  # evaluations have no graph
            return loss

    settings = {**QUIET, "log": {"every": 2}, **COMPANY[company]}
    gc.collect()
    gc.disable()
    try:
        trainer = Watching(batch_size=8, steps=6, observers=[Recorder()], **settings)
        trainer.fit()
    finally:
        gc.enable()
    assert len(alive) >= 5
    assert not any(alive)


def proportional_bytes():
    """Memory of this process and its children, shared pages by their share (`Pss` of the kernel)."""
    total = 0
    for process in (os.getpid(), *(child.pid for child in multiprocessing.active_children())):
        rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
        total += int(re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)[1]) * 1024
    return total


class Lengths:
    """Samples are the lengths of texts; every text is looked at."""

    def __init__(self, texts):
        self.texts = texts

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return torch.tensor(len(self.texts[index]))


def growth_over_an_epoch(texts):
    """How much memory grew from the first batch to the last, and what it was at first."""
    dataset = Lengths(texts)
    data = Data(train=dataset, num_workers=2)
    # In order: shuffled, what is fetched ahead of the first batch has touched most pages already.
    order = Order(size=len(dataset), batch_size=2_000, seed=0, shuffle=False, limit=None)
    batches = ByOrder(data, dataset, order, 0, 1).epoch(0)
    total = next(batches)[0].sum()
    gc.collect()
    before = proportional_bytes()
    for _ in range(98):
        total += next(batches)[0].sum()
    after = proportional_bytes()
    total += next(batches)[0].sum()
    assert next(batches, None) is None
    assert total == sum(map(len, texts))
    return after - before, before


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="only Linux tells proportional memory")
def test_MEM_LEAK_3_workers_do_not_copy_packed_texts():
    texts = [f"{i:0100d}" for i in range(200_000)]
    packed = PackedStrings(texts)
    assert packed[199_999] == texts[-1]
    of_list, _ = growth_over_an_epoch(texts)
    del texts
    of_packed, at_first = growth_over_an_epoch(packed)
    assert of_packed < 0.2 * at_first
    assert of_packed < 10e6 < of_list


class OfPairs(torch.utils.data.Dataset):
    def __init__(self, n):
        self.samples, self.classes = [("a.png", 0)] * n, torch.zeros(n)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        return self.classes[i]


def test_MEM_LEAK_3_a_huge_list_of_a_data_set_is_told_where_there_are_workers():
    huge, small = OfPairs(100_000), OfPairs(99_999)
    assert huge_lists(huge) == [("OfPairs.samples", 100_000)]
    assert huge_lists(small) == []
    assert huge_lists(torch.utils.data.Subset(huge, range(8))) == [("Subset.dataset.samples", 100_000)]
    both = torch.utils.data.ConcatDataset([small, huge])
    assert huge_lists(both) == [("ConcatDataset.datasets[1].samples", 100_000)]
    assert huge_lists([1.0] * 100_000) == [("list", 100_000)]
    huge.samples = PackedSamples(huge.samples)
    assert huge_lists(huge) == []
    assert huge.samples[99_999] == ("a.png", 0)

    class Huge(Mlp):
        workers = 2

        def build_data(self):
            return Data(train=OfPairs(100_000), num_workers=self.workers)

    with pytest.warns(UserWarning, match=r"OfPairs\.samples \(100,000 entries\): each of the 2 workers comes to hold"):
        Huge(batch_size=8, steps=1, **QUIET)
    Huge.workers = 0
    Huge(batch_size=8, steps=1, **QUIET)  # warnings are errors here
