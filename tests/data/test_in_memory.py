"""Data in memory is indexed a batch at a time: counted in operations, not in seconds."""

from collections import Counter, namedtuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fasttrain import Data
from fasttrain.data.data import taker
from tests.helpers import QUIET, Mlp, points

Pair = namedtuple("Pair", "x y")
X, Y = points(20)
TREES = {
    "tensor": X,
    "tuple": (X, Y),
    "dict": {"x": X, "label": Y},
    "namedtuple": Pair(X, Y),
    "nested": {"images": (X, X * 2), "label": Y},
}


class Operations(TorchDispatchMode):
    """Counts what torch is asked to do."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", TREES)
def test_a_batch_of_a_tree_is_the_tree_of_its_samples(name):
    tree, indices = TREES[name], torch.tensor([3, 0, 19])
    batch = taker(tree)(indices)
    expected = torch.utils._pytree.tree_map(lambda tensor: tensor[indices], tree)
    assert type(batch) is type(tree)
    leaves, spec = torch.utils._pytree.tree_flatten(batch)
    same, same_spec = torch.utils._pytree.tree_flatten(expected)
    assert spec == same_spec
    assert all(torch.equal(a, b) for a, b in zip(leaves, same, strict=True))


@pytest.mark.parametrize(("name", "tensors"), [("tensor", 1), ("tuple", 2), ("namedtuple", 2), ("nested", 3)])
def test_a_batch_takes_one_operation_a_tensor_and_one_for_its_place(name, tensors):
    kind = type("Given", (Mlp,), {"build_data": lambda self: Data(train=TREES[name])})
    trainer = kind(batch_size=4, steps=5, **QUIET)
    batches = trainer.feed.training(trainer.task, trainer.plan)
    next(batches)  # draws the order of the epoch
    with Operations() as seen:
        next(batches)
        next(batches)
    assert seen.counts == {"index_select": 2 * tensors, "slice": 2}


def test_batches_that_were_given_are_not_written_to_again():
    kind = type("Given", (Mlp,), {"build_data": lambda self: Data(train=(X, Y))})
    trainer = kind(batch_size=4, steps=5, **QUIET)
    batches = trainer.feed.training(trainer.task, trainer.plan)
    held = [next(batches) for _ in range(10)]
    copies = [batch[0].clone() for batch in held]
    for _ in range(10):
        next(batches)
    assert all(torch.equal(batch[0], copy) for batch, copy in zip(held, copies, strict=True))
    assert len({batch[0].data_ptr() for batch in held}) == 10
