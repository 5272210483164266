"""Arguments that change after a block was called: its second forward gets them as the first one did."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from torch import nn

from fasttrain.nn.arguments import Passed, snapshot
from fasttrain.nn.recompute import checkpoint_blocks

Pair = namedtuple("Pair", "first second")


class Cache:
    """Keys by layer; each is put in once, and then taken from it."""

    def __init__(self):
        self.keys, self.me = {}, self


class Layer(nn.Module):
    """Adds up what earlier layers gave, held in a list, an object or a tuple around a list."""

    def __init__(self, number):
        super().__init__()
        self.number, self.linear, self.runs = number, nn.Linear(4, 4), 0

    def forward(self, x, held=None):
        self.runs += 1
        if isinstance(held, Cache):
            if self.number not in held.keys:
                held.keys[self.number] = self.linear(x)
            return torch.tanh(x + sum(held.keys.values()))
        held = held[0] if isinstance(held, tuple) else held
        return torch.tanh(self.linear(x + sum(held)))


def run(layers, form):
    held = [torch.ones(2, 4)] if form != "an object" else Cache()
    x = torch.arange(8.0).reshape(2, 4) / 8
    for layer in layers:
        x = layer(x, held=(held, 3) if form == "a tuple" else held) if form != "position" else layer(x, held)
        if isinstance(held, list):
            held.append(x)
    x.sum().backward()
    return x, len(held.keys) if isinstance(held, Cache) else len(held)


@pytest.mark.parametrize("form", ["a keyword", "position", "a tuple", "an object"])
def test_lists_and_caches_that_grow_afterwards_change_no_bit(form):
    results = []
    for is_checkpointed in (False, True):
        torch.manual_seed(0)
        layers = nn.ModuleList(Layer(i) for i in range(3))
        if is_checkpointed:
            assert checkpoint_blocks(layers) == 3
        results.append((*run(layers, form), [p.grad for p in layers.parameters()]))
        assert [layer.runs for layer in layers] == [1 + is_checkpointed] * 3
    (x, entries, grads), (y, others, checked) = results
    assert torch.equal(x, y)
    assert entries == others == (3 if form == "an object" else 4), "the caller sees what the blocks wrote"
    assert all(torch.equal(a, b) for a, b in zip(grads, checked, strict=True))


def test_the_first_run_gets_the_objects_themselves_and_each_later_one_a_copy_of_its_own():
    held, tensor = [torch.ones(2)], torch.ones(2)
    passed = Passed((tensor, held), {"more": {"a": held}})
    (_, first), kwargs = passed.take()
    assert first is held
    assert kwargs["more"]["a"] is held
    held.append("later")
    for _ in range(2):
        (same, second), kwargs = passed.take()
        assert same is tensor
        assert len(second) == 1
        assert second is kwargs["more"]["a"], "two names of one list stay that"
        second.append("in this run")


def test_a_snapshot_shares_tensors_modules_and_functions():
    cache, module, tensor = Cache(), nn.Linear(1, 1), torch.ones(1)
    cache.keys.update(module=module, tensor=tensor, function=len, pair=Pair([tensor], 2), dtype=torch.float32)
    copied = snapshot(cache)
    assert copied is not cache
    assert copied.me is copied
    assert copied.keys is not cache.keys
    assert copied.keys["module"] is module
    assert copied.keys["tensor"] is copied.keys["pair"].first[0] is tensor
    assert copied.keys["pair"].first is not cache.keys["pair"].first
    assert isinstance(copied.keys["pair"], Pair)
    for plain in (tensor, module, (tensor, 1), None, "text", len, torch.bfloat16):
        assert snapshot(plain) is plain
