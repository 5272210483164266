"""Reported faults of weight names that a technique changes, each kind by the name of its case."""

# The names of the cases are written in capitals.

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.commands import weights
from tests.helpers import Mlp, largest_difference, state

# torch's compiler looks at `.grad` of what is no leaf, and hides its own warning from all but those who raise on it.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

EAGER = {"name": "blocks", "backend": "eager"}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.relu(self.linear(x))


class Blocks(nn.Module):
    """Two blocks, and a real submodule called "module"."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(8), Block(8)])
        self.module = nn.Linear(8, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.module(x)


NAMES = [
    *(f"blocks.{i}.linear.{kind}" for i in (0, 1) for kind in ("weight", "bias")),
    "module.weight",
    "module.bias",
]


class Plain(Mlp):
    def build_model(self):
        return Blocks()


class CompiledByHand(Mlp):
    """The user compiles one of the blocks."""

    def build_model(self):
        model = Blocks()
        model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
        return model


class CompiledWhole(Mlp):
    def build_model(self):
        return torch.compile(Blocks(), backend="eager")


class WrappedByHand(Mlp):
    """torch's own wrapper for checkpointing, which has a prefix of its own."""

    def build_model(self):
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        model = Blocks()
        model.blocks[1] = checkpoint_wrapper(model.blocks[1], checkpoint_fn=checkpoint, use_reentrant=False)
        return model


class CompiledInPlace(Mlp):
    def build_model(self):
        model = Blocks()
        model.blocks[0].compile(backend="eager")
        return model


WAYS: dict[str, tuple[type[Mlp], dict[str, Any]]] = {
    "plain": (Plain, {}),
    "compiled blocks": (Plain, {"compile": EAGER}),
    "compiled model": (Plain, {"compile": {**EAGER, "name": "model"}}),
    "compiled and checkpointed": (Plain, {"compile": EAGER, "activation_checkpointing": "full"}),
    "checkpointed": (Plain, {"activation_checkpointing": "full"}),
    "bf16, compiled": (Plain, {"compile": EAGER, "precision": "bf16"}),
    "one block by hand": (CompiledByHand, {}),
    "the whole model by hand": (CompiledWhole, {}),
    "one block in place": (CompiledInPlace, {}),
    "wrapped by hand": (WrappedByHand, {}),
}


def settings_in(folder, name: str, steps: int = 2) -> dict[str, Any]:
    return {"batch_size": 8, "steps": steps, "optimizer": "adamw", "run": {"dir": str(folder), "name": name, "id": "x"}}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of each way, as it is asked for."""
    folder, done = tmp_path_factory.mktemp("runs"), {}

    def run(way: str):
        if way not in done:
            cls, settings = WAYS[way]
            done[way] = cls(**settings_in(folder, way.replace(" ", "-")), **settings)
            done[way].fit()
        return done[way], folder / way.replace(" ", "-") / "x"

    return run


@pytest.mark.parametrize("way", WAYS)
def test_PREFIX_1_and_3_a_checkpoint_has_the_names_of_the_plain_module(saved, way):
    _, folder = saved(way)
    held = weights(folder)
    found = {name.removeprefix("model."): value for name, value in held.items() if name.startswith("model.")}
    assert sorted(found) == sorted(NAMES)
    states = {name for name in held if name.startswith("optimizer.model.")}
    assert states == {f"optimizer.model.{name}.{key}" for name in NAMES for key in ("exp_avg", "exp_avg_sq", "step")}
    plain = Blocks()
    plain.load_state_dict(found, strict=True)
    tolerance = 1e-2 if "bf16" in way else 1e-6
    assert largest_difference(plain.state_dict(), state(saved("plain")[0])) < tolerance


@pytest.mark.parametrize("way", [way for way in WAYS if "by hand" not in way])
def test_PREFIX_1_the_model_itself_keeps_its_names(way):
    cls, settings = WAYS[way]
    model = cls(batch_size=8, run={"dir": None}, **settings).model
    assert sorted(model.state_dict()) == sorted(NAMES)
    assert sorted(name for name, _ in model.named_parameters()) == sorted(NAMES)
    plain = Blocks()
    plain.load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(plain.state_dict(), strict=True)


@pytest.mark.parametrize("of", WAYS)
def test_PREFIX_1_a_run_is_taken_up_with_and_without_compiling(saved, of):
    _, folder = saved(of)
    ends = []
    for way in ("plain", "compiled blocks", "compiled model", "one block by hand", "the whole model by hand"):
        cls, settings = WAYS[way]
        trainer = cls(**{**settings_in(folder, "none", steps=4), "run": {"dir": None}}, **settings)
        trainer.restore(folder / "checkpoints" / "step-2")
        held = weights(folder)
        for parameter, name in zip(trainer.model.parameters(), NAMES, strict=True):
            assert torch.equal(parameter, held[f"model.{name}"])
            assert torch.equal(trainer.optimizer.state[parameter]["exp_avg"], held[f"optimizer.model.{name}.exp_avg"])
        assert trainer.fit()["steps"] == 4
        ends.append(list(trainer.model.parameters()))
    for other in ends[1:]:
        for one, two in zip(ends[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


def test_PREFIX_1_compiling_compiles_something(saved):
    """The comparison above compares something: the blocks run through the compiler."""
    torch._dynamo.utils.counters.clear()
    Plain(batch_size=8, steps=1, compile=EAGER, run={"dir": None}).fit()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
