"""Reported faults of compilation with sizes that change, each by the name of its case."""

# The names of the cases are written in capitals.

from __future__ import annotations

import pytest
from torch import nn
from torch.nn import functional as F

from fasttrain import Data, Trainer
from fasttrain.errors import CompileError
from tests.compiler.counting import GRAPHS, fresh_compiler  # noqa: F401
from tests.helpers import QUIET, Recorder, largest_difference, points, state
from tests.stack import Stack

# dynamo looks at it and hides the warning by itself, but not where warnings are errors. torch 2.14.1.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
LIMIT = "has as many graphs as torch makes of a function"


class Growing(Trainer):
    """A linear model on batches of 2, 3, ... 13 samples."""

    def build_data(self):
        class Batches:
            def __len__(self):
                return 12

            def __iter__(self):
                return ((x[:size], y[:size]) for size in range(2, 14))

        x, y = points(13)
        return Data(train=Batches())

    def build_model(self):
        return nn.Linear(8, 4)

    def loss(self, output, batch):
        self.made = [*getattr(self, "made", []), len(GRAPHS)]
        return F.cross_entropy(output, batch[1])


def growing(**more):
    # Other sizes than the share are taken as the loader gives them.
    compile = {"name": "model", "backend": "counting", "dynamic": False, "reference_steps": 0, **more}
    return Growing(batch_size=13, steps=12, compile=compile, observers=[Recorder()], **QUIET)


def test_COMPILE_SHAPES_1_after_eight_compilations_the_run_says_that_the_limit_was_hit():
    trainer = growing()
    summary = trainer.fit()
    assert trainer.made == [1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8, 8]
    told = [record["text"] for record in trainer.observers[0].remarks]
    assert len([text for text in told if LIMIT in text]) == 1
    assert summary["compile"]["graphs"] == 8
    assert trainer.step == 12


def test_COMPILE_SHAPES_1_with_strict_the_limit_ends_the_run():
    trainer = growing(strict=True)
    with pytest.raises(CompileError, match=rf"^compile\.strict: .*{LIMIT}"):
        trainer.fit()
    assert len(GRAPHS) == 8
    assert trainer.step < 12


@pytest.mark.parametrize("name", ["blocks", "model"])
@pytest.mark.parametrize(("samples", "rest", "graphs"), [(29, 5, 2), (25, 1, 2)])
def test_COMPILE_SHAPES_3_a_short_last_batch_is_compiled_once_and_no_sample_is_dropped(name, samples, rest, graphs):
    seen = []

    class Ragged(Stack):
        def build_data(self):
            return Data(train=points(samples), shuffle=False)

        def loss(self, output, batch):
            seen.append(len(output))
            return super().loss(output, batch)

    results = []
    for compile in (None, {"name": name, "backend": "counting", "reference_steps": 0}):
        seen.clear()
        trainer = Ragged(batch_size=8, epochs=2, compile=compile, observers=[Recorder()], **QUIET)
        assert trainer.fit()["samples"] == 2 * samples
        assert seen[-8:] == [8, 8, 8, rest] * 2  # compiled, both sizes were tried before the first step
        assert seen[:-8] == ([] if compile is None else [8, rest])
        results.append((state(trainer), [record["loss"] for record in trainer.observers[0].steps]))
    assert len(GRAPHS) == graphs
    assert largest_difference(results[0][0], results[1][0]) < 1e-5
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-6)


def test_COMPILE_SHAPES_3_a_batch_of_one_adds_a_third():
    class Sizes(Stack):
        def build_data(self):
            class Batches:
                def __len__(self):
                    return 5

                def __iter__(self):
                    x, y = points(8)
                    return ((x[:size], y[:size]) for size in (8, 8, 8, 5, 1))

            return Data(train=Batches())

    compile = {"name": "blocks", "backend": "counting", "reference_steps": 0}
    Sizes(batch_size=8, epochs=2, compile=compile, **QUIET).fit()
    assert len(GRAPHS) == 3
