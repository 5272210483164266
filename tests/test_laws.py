"""What holds for every strategy. Each law is one test over all that the registry holds."""

from __future__ import annotations

import itertools

import pytest
import torch
import yaml

from fasttrain import ConfigError
from fasttrain.config import load
from fasttrain.core.slots import SLOTS
from fasttrain.registry import BUILT_IN, find
from tests.helpers import Recorder, largest_difference, state
from tests.stack import Restless, Stack, is_finite, setting

EVERY = [(slot, name) for slot, table in BUILT_IN.items() for name in table]
# Strategies that cannot work here, and a part of what they say of it.
REFUSED = {("precision", "tf32"): "has no TensorFloat-32"}
WORKING = [pair for pair in EVERY if pair not in REFUSED]
# Slots that leave the numbers alone, and how far float32 sums in another order may carry them in six steps.
UNCHANGED = {
    "batch_norm": 0.0,  # on one rank
    "data_parallel": 0.0,  # on one rank
    "activation_checkpointing": 0.0,
    "activation_offload": 0.0,
    "memory_format": 1e-6,
    "compile": 1e-6,
    "accumulation": 1e-6,
}
# One of each slot, so that a strategy is tried in company. Not compile: that is tried by itself.
COMPANY = {
    **setting("precision", "fp16"),
    **setting("batch_norm", "sync"),
    **setting("activation_checkpointing", "full"),
    **setting("data_parallel", "ddp"),
    **setting("accumulation", "microbatches"),
    **setting("optimizer", "sgd"),
    **setting("schedule", "cosine"),
    **setting("gradient_clipping", "norm"),
    **setting("nonfinite", "skip"),
}


def in_company(slot, name):
    """A strategy with the others, but those it cannot live with."""
    clashing = {clash.slot for clash in find(slot, name).clashes}
    return {key: value for key, value in {**COMPANY, **setting(slot, name)}.items() if key not in clashing}


# dynamo looks at it and hides the warning by itself, but not where warnings are errors. torch 2.14.1.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
every = pytest.mark.parametrize(("slot", "name"), WORKING, ids=lambda value: value)


@pytest.fixture(autouse=True)
def compile_afresh():
    torch.compiler.reset()


def quiet(steps=6, log=1, **slots):
    return {"batch_size": 8, "steps": steps, "run": {"dir": None}, "log": {"every": log}, **slots}


def losses(watcher):
    return [record["loss"] for record in watcher.steps]


def told(watcher):
    """What each step said, but for times and memory."""
    own = ("loss", "lr", "grad_norm", "loss_scale", "refused_in_a_row", "nonfinite_steps", "samples", "epoch")
    return [{key: record.get(key) for key in own} for record in watcher.steps]


def test_all_strategies_are_known_here():
    assert len(EVERY) >= 19
    assert set(REFUSED) <= set(EVERY)
    assert set(BUILT_IN) <= set(SLOTS)


@pytest.mark.parametrize(("slot", "name"), REFUSED, ids=lambda value: value)
def test_a_strategy_that_cannot_work_here_says_so_before_the_first_step(slot, name):
    with pytest.raises(ConfigError, match=REFUSED[slot, name]) as caught:
        Stack(**quiet(**setting(slot, name)))
    assert f"{slot}={name}" in str(caught.value)
    assert "; use " in str(caught.value)


@every
def test_weight_names_never_change(slot, name):
    plain = Restless(**quiet())
    trainer = Restless(**quiet(steps=1, **setting(slot, name)))
    for _ in range(2):  # as built, and after a step
        assert list(trainer.model.state_dict()) == list(plain.model.state_dict())
        assert [n for n, _ in trainer.model.named_parameters()] == [n for n, _ in plain.model.named_parameters()]
        if trainer.step == 0:
            trainer.fit()
    assert len(plain.model.state_dict()) == 22
    plain.model.load_state_dict(trainer.model.state_dict(), strict=True)


@every
def test_state_survives_save_and_load_in_mid_run_with_equal_losses(tmp_path, slot, name):
    class Stop(Recorder):
        def stepped(self, record):
            super().stepped(record)
            if record["step"] == 4:  # in the middle of the second epoch
                self.run.request_stop("test")

    settings = quiet(steps=7, **setting(slot, name))
    watcher, first, second = Recorder(), Stop(), Recorder()
    straight = Restless(**settings, observers=[watcher])
    straight.fit()
    settings["run"] = {"dir": str(tmp_path), "name": "a", "id": "b"}
    assert Restless(**settings, observers=[first]).fit()["steps"] == 4
    resumed = Restless(**settings, resume="auto", observers=[second])
    resumed.fit()
    assert [record["step"] for record in second.steps] == [5, 6, 7]
    assert told(first) + told(second) == told(watcher)
    assert len(set(losses(watcher))) == 7
    assert largest_difference(state(straight), state(resumed)) == 0.0


@every
def test_the_order_of_slots_in_the_file_is_irrelevant(tmp_path, slot, name):
    slots = in_company(slot, name)
    results = []
    for order in (list(slots), list(reversed(slots))):
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(quiet(steps=3, **{key: slots[key] for key in order}), sort_keys=False))
        written = path.read_text()
        assert sorted(order, key=lambda key: written.index(f"\n{key}:")) == order
        trainer = Stack(load(path, ["trainer=tests.stack:Stack"]))
        assert list(trainer.plan.strategies) == [s for s in SLOTS if s in slots]
        trainer.fit()
        results.append(state(trainer))
    assert largest_difference(*results) == 0.0


@every
def test_observers_change_nothing(slot, name):
    watched = Restless(**quiet(**setting(slot, name)), observers=[watcher := Recorder()])
    watched.fit()
    alone = Restless(**quiet(log=1000, **setting(slot, name)))  # after the first is done: it seeds the dropout
    alone.fit()
    assert len(watcher.steps) == 6
    assert largest_difference(state(watched), state(alone)) == 0.0


TRICKS = [pair for pair in WORKING if pair[0] in UNCHANGED]


def test_the_memory_tricks_are_known_here():
    assert len(TRICKS) >= 5


@pytest.mark.parametrize(("slot", "name"), TRICKS, ids=lambda value: value)
def test_a_memory_trick_changes_no_number(slot, name):
    plain = Stack(**quiet(optimizer="sgd"), observers=[without := Recorder()])
    trainer = Stack(**quiet(optimizer="sgd", **setting(slot, name)), observers=[watcher := Recorder()])
    plain.fit()
    trainer.fit()
    assert largest_difference(state(plain), state(trainer)) <= UNCHANGED[slot]
    assert losses(watcher) == pytest.approx(losses(without), rel=UNCHANGED[slot], abs=0.0)


PAIRS = [(one, other) for one, other in itertools.combinations(EVERY, 2) if one[0] != other[0]]


def test_every_pair_of_strategies_trains_or_explains_itself_before_the_first_step():
    trained, explained = [], []
    start = state(Stack(**quiet()))
    for one, other in PAIRS:
        torch.compiler.reset()
        try:
            trainer = Stack(**quiet(steps=2, **setting(*one), **setting(*other)))
        except ConfigError as error:
            explained.append((one, other, str(error)))
            continue
        assert trainer.fit()["refused_steps"] == 0, (one, other)
        assert is_finite(trainer.model), (one, other)
        assert largest_difference(state(trainer), start) > 0.0, (one, other)
        trained.append((one, other))
    assert len(trained) + len(explained) == len(PAIRS) >= 153
    assert [pair for *pair, _ in explained] == [
        list(pair) for pair in PAIRS if set(pair) & set(REFUSED) or clash(*pair)
    ]
    assert len([pair for pair in PAIRS if clash(*pair)]) >= 1
    # Each says what to write instead, for what this device lacks as for what does not go together.
    assert all("; use " in why or "cannot be used with" in why for *_, why in explained)


def clash(one, other):
    """Whether one of two strategies declares that it cannot live with the other."""
    return any(
        (declared.slot, declared.name) in ((b[0], b[1]), (b[0], None))
        for a, b in ((one, other), (other, one))
        for declared in find(*a).clashes
    )


@pytest.fixture
def reads(monkeypatch):
    """Every look at a tensor's value from the host."""
    seen = []
    for method in ("item", "tolist", "__float__", "__bool__", "__int__", "__index__"):
        original = getattr(torch.Tensor, method)

        def counted(self, *args, method=method, original=original):
            seen.append(method)
            return original(self, *args)

        monkeypatch.setattr(torch.Tensor, method, counted)
    return seen


def test_a_host_read_is_seen(reads):
    one = torch.ones(1)
    assert (one.item(), one.tolist(), float(one), bool(one), int(one), [7, 8][one.to(int)]) == (1, [1], 1, True, 1, 8)
    assert len(reads) == 6


@pytest.mark.parametrize("company", [False, True], ids=["alone", "in company"])
@every
def test_nothing_is_read_on_the_host_between_two_log_points(reads, slot, name, company):
    trainer = Restless(**quiet(log=1000, **(in_company if company else setting)(slot, name)))
    batches = trainer.feed.training(trainer.task, trainer.plan)
    trainer.train_step(next(batches))  # compiles, and fills what is made at the first step
    reads.clear()
    for _ in range(4):
        trainer.train_step(next(batches))
    assert trainer.step == 5
    assert reads == []
