"""What holds for every strategy. Each law is one test over all that the registry holds."""

from __future__ import annotations

import functools
import re

import pytest
import torch
import yaml

from fasttrain import ConfigError
from fasttrain.config import load, matrix
from fasttrain.config.matrix import clash_of, every_pair, every_strategy
from fasttrain.core.slots import SLOTS
from fasttrain.nn.low_rank import merged_state
from fasttrain.registry import BUILT_IN, find
from tests.commands import ROOT
from tests.helpers import Recorder, largest_difference, state
from tests.stack import NormedPictures, Pictures, RestlessPictures, is_finite, setting

EVERY = every_strategy()
# Strategies that cannot work here, and a part of what they say of it.
REFUSED = {("precision", "tf32"): "has no TensorFloat-32"}
if not hasattr(torch.autograd.graph, "region_activation_memory_budget"):  # before torch 2.14
    REFUSED["activation_checkpointing", "budget"] = "takes no budget for single graphs"
WORKING = [pair for pair in EVERY if pair not in REFUSED]
# What leaves the numbers alone, by slot or by slot and name, and how far float32 sums in another order may carry the
# weights in six steps.
UNCHANGED = {
    "precision.fp32": 0.0,
    "memory_format": 1e-6,
    "batch_norm.sync": 0.0,  # on one rank
    "activation_checkpointing": 0.0,
    "activation_checkpointing.budget": 1e-6,  # compiled
    "activation_offload": 0.0,
    "compile": 1e-6,
    "data_parallel": 0.0,  # on one rank
    "accumulation": 1e-6,
    "nonfinite": 0.0,
    "weight_averaging": 0.0,  # of the weights that train
}
# Weights that a strategy adds to the model's own, or keeps in a form of its own; `merged_state` gives those of the model.
ADDS = {"adapters.lora": r"\.lora_[AB]\.", "adapters.qlora": r"\.lora_[AB]\.|\.weight\."}
# Under these, sums in another order differ by what the narrow dtype resolves.
NARROW = {
    "precision.bf16",
    "precision.fp16",
    "precision.bf16_true",
    "precision.auto",
    "float8.tensorwise",
    "float8.rowwise",
}
# Wide enough for six steps of an optimizer that divides by the size of the gradient, where that is near zero.
LOSS_BOUND, NARROW_LOSS_BOUND = 1e-4, 2e-2
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
    together = {**COMPANY, **setting(slot, name)}
    return {key: v for key, v in together.items() if key == slot or clash_of((slot, name), (key, v["name"])) is None}


def unchanged(slot, name):
    """How far a strategy may move the weights of a float32 run; None if that is what it is for."""
    return UNCHANGED.get(f"{slot}.{name}", UNCHANGED.get(slot))


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
    assert len(EVERY) == 41
    assert set(REFUSED) <= set(EVERY)
    assert set(BUILT_IN) <= set(SLOTS)


@pytest.mark.parametrize(("slot", "name"), REFUSED, ids=lambda value: value)
def test_a_strategy_that_cannot_work_here_says_so_before_the_first_step(slot, name):
    with pytest.raises(ConfigError, match=REFUSED[slot, name]) as caught:
        Pictures(**quiet(**setting(slot, name)))
    assert f"{slot}={name}" in str(caught.value)
    assert "; use " in str(caught.value)


@every
def test_weight_names_never_change(slot, name):
    plain = RestlessPictures(**quiet())
    trainer = RestlessPictures(**quiet(steps=1, **setting(slot, name)))

    def own(names):
        return [n for n in names if not re.search(ADDS.get(f"{slot}.{name}", "(?!)"), n)]

    for _ in range(2):  # as built, and after a step
        assert own(trainer.model.state_dict()) == list(plain.model.state_dict())
        assert own(dict(trainer.model.named_parameters())) == [n for n, _ in plain.model.named_parameters()]
        if trainer.step == 0:
            trainer.fit()
    assert len(plain.model.state_dict()) == 22
    assert (own(trainer.model.state_dict()) == list(trainer.model.state_dict())) == (f"{slot}.{name}" not in ADDS)
    plain.model.load_state_dict(merged_state(trainer.model), strict=True)


@every
def test_state_survives_save_and_load_in_mid_run_with_equal_losses(tmp_path, slot, name):
    class Stop(Recorder):
        def stepped(self, record):
            super().stepped(record)
            if record["step"] == 4:  # in the middle of the second epoch
                self.run.request_stop("test")

    settings = quiet(steps=7, **setting(slot, name))
    watcher, first, second = Recorder(), Stop(), Recorder()
    straight = RestlessPictures(**settings, observers=[watcher])
    straight.fit()
    settings["run"] = {"dir": str(tmp_path), "name": "a", "id": "b"}
    assert RestlessPictures(**settings, observers=[first]).fit()["steps"] == 4
    resumed = RestlessPictures(**settings, resume="auto", observers=[second])
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
        kind = NormedPictures if (slot, name) == ("batch_norm", "frozen") else Pictures
        trainer = kind(load(path, [f"trainer=tests.stack:{kind.__name__}"]))
        assert list(trainer.plan.strategies) == [s for s in SLOTS if s in slots]
        trainer.fit()
        results.append(state(trainer))
    assert largest_difference(*results) == 0.0


@every
def test_observers_change_nothing(slot, name):
    watched = RestlessPictures(**quiet(**setting(slot, name)), observers=[watcher := Recorder()])
    watched.fit()
    alone = RestlessPictures(**quiet(log=1000, **setting(slot, name)))  # after the first is done: it seeds the dropout
    alone.fit()
    assert len(watcher.steps) == 6
    assert largest_difference(state(watched), state(alone)) == 0.0


TRICKS = [pair for pair in WORKING if unchanged(*pair) is not None]


def test_the_memory_tricks_are_known_here():
    assert len(TRICKS) >= 8


@pytest.mark.parametrize(("slot", "name"), TRICKS, ids=lambda value: value)
def test_a_memory_trick_changes_no_number(slot, name):
    plain = Pictures(**quiet(optimizer="sgd"), observers=[without := Recorder()])
    trainer = Pictures(**quiet(optimizer="sgd", **setting(slot, name)), observers=[watcher := Recorder()])
    plain.fit()
    trainer.fit()
    assert largest_difference(state(plain), state(trainer)) <= unchanged(slot, name)
    assert losses(watcher) == pytest.approx(losses(without), rel=unchanged(slot, name), abs=0.0)


# ---- pairs

PAIRS = every_pair()


def trained(*strategies, **more):
    """A run under some strategies, over all data in each step: its losses, and its weights at the end."""
    slots = dict(more)
    for slot, name in strategies:
        slots = {**setting(slot, name), **slots}
    # Batch statistics of a microbatch are other ones by nature, so there are none but for what freezes them.
    kind = NormedPictures if slots.get("batch_norm", {}).get("name") == "frozen" else Pictures
    torch.compiler.reset()
    trainer = kind(**quiet(**slots) | {"batch_size": 24}, observers=[watcher := Recorder()])
    assert trainer.fit()["refused_steps"] == 0
    assert is_finite(trainer.model)
    return losses(watcher), state(trainer)


@functools.cache
def trained_alone(*strategies):
    """The same under the one strategy that changes numbers, or under none."""
    return trained(*strategies)


def bound(*strategies):
    """How far the losses of a run may be from one without the memory tricks among its strategies."""
    if not any(unchanged(*strategy) for strategy in strategies):
        return 0.0
    return NARROW_LOSS_BOUND if any(f"{slot}.{name}" in NARROW for slot, name in strategies) else LOSS_BOUND


def test_the_pairs_are_counted():
    assert len(PAIRS) == 761
    assert len({frozenset(pair) for pair in PAIRS}) == len(PAIRS)
    assert sum(clash_of(*pair) is not None for pair in PAIRS) == 9


@pytest.mark.parametrize("one", EVERY, ids=".".join)
def test_every_pair_of_strategies_trains_or_explains_itself_before_the_first_step(one):
    others = [other for first, other in PAIRS if first == one]
    seen = 0
    for other in others:
        seen += 1
        if clash_of(one, other) is not None or REFUSED.keys() & {one, other}:
            with pytest.raises(ConfigError) as caught:
                trained(one, other)
            # Each says what to write instead, for what this device lacks as for what does not go together.
            assert "; " in str(caught.value), (one, other)
            assert ("cannot be used with" in str(caught.value)) == (clash_of(one, other) is not None), (one, other)
            continue
        told, weights = trained(one, other)
        assert told[-1] < told[0], (one, other, told)
        changing = [strategy for strategy in (one, other) if unchanged(*strategy) is None]
        if len(changing) < 2:
            expected, weights_expected = trained_alone(*changing)
            assert told == pytest.approx(expected, rel=bound(one, other), abs=0.0), (one, other)
            if bound(one, other) == 0.0:
                assert largest_difference(weights, weights_expected) == 0.0, (one, other)
    assert seen == sum(first == one for first, _ in PAIRS)


@pytest.mark.slow
@pytest.mark.parametrize("one", EVERY, ids=".".join)
def test_every_strategy_trains_in_code_that_inductor_made_or_explains_itself(one):
    compile = one if one[0] == "compile" else ("compile", "blocks")
    one = ("precision", "fp32") if one[0] == "compile" else one
    inductor = {"compile": {"name": compile[1], "backend": "inductor"}}
    if clash_of(one, compile) is not None or one in REFUSED:
        with pytest.raises(ConfigError, match="; "):
            trained(one, **inductor)
        return
    told, _ = trained(one, **inductor)
    expected, _ = trained(one)
    assert told[-1] < told[0]
    narrow = f"{one[0]}.{one[1]}" in NARROW  # inductor rounds less often to the narrow dtype
    assert told == pytest.approx(expected, rel=NARROW_LOSS_BOUND if narrow else LOSS_BOUND)


# Settings of an optimizer that change where and when it works, and no number.
PLACES = {"in_backward": {"in_backward": True}, "offload": {"offload": True}}
OTHERS = [strategy for strategy in EVERY if strategy[0] != "optimizer"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("other", OTHERS, ids=".".join)
def test_steps_elsewhere_give_the_same_numbers_with_every_strategy_or_explain_themselves(place, other):
    adamw = {"optimizer": {"name": "adamw", **PLACES[place]}}
    cls, config = find("optimizer", "adamw"), find("optimizer", "adamw").Config(**PLACES[place])
    limits = {(clash.slot, clash.name) for clash in cls.limits(config)}
    if other in REFUSED or limits & {other, (other[0], None)}:
        with pytest.raises(ConfigError, match="; "):
            trained(other, **adamw)
        return
    told, weights = trained(other, **adamw)
    expected, weights_expected = trained(other, ("optimizer", "adamw"))
    if (place, other) == ("in_backward", ("precision", "bf16_true")):
        # Weights are rounded in the order in which gradients arrive, so they meet other random numbers.
        assert told == pytest.approx(expected, rel=NARROW_LOSS_BOUND)
        return
    assert told == expected
    assert largest_difference(weights, weights_expected) == 0.0


COMPILED_STEP = {"compile": {"name": "blocks", "backend": "aot_eager", "optimizer": True, "loss": True}}


@pytest.mark.parametrize("other", [s for s in EVERY if s[0] != "compile"], ids=".".join)
def test_a_compiled_step_and_loss_give_the_numbers_of_eager_ones_with_every_strategy_or_explain_themselves(other):
    cls = find("compile", "blocks")
    limits = {(clash.slot, clash.name) for clash in cls.limits(cls.Config(optimizer=True))}
    if other in REFUSED or other in limits:
        with pytest.raises(ConfigError, match="; "):
            trained(other, **COMPILED_STEP)
        return
    told, _ = trained(other, **COMPILED_STEP)
    expected, _ = trained(other, ("compile", "blocks"))
    narrow = f"{other[0]}.{other[1]}" in NARROW
    assert told[-1] < told[0]
    assert told == pytest.approx(expected, rel=NARROW_LOSS_BOUND if narrow else LOSS_BOUND)


def test_the_page_of_pairs_is_what_the_code_says():
    told = (ROOT / "docs" / "strategies" / "matrix.md").read_text()
    assert told == matrix.to_markdown(), "python -m fasttrain.config.matrix > docs/strategies/matrix.md"


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
    trainer = RestlessPictures(**quiet(log=1000, **(in_company if company else setting)(slot, name)))
    batches = trainer.feed.training(trainer.task, trainer.plan)
    trainer.train_step(next(batches))  # compiles, and fills what is made at the first step
    reads.clear()
    for _ in range(4):
        trainer.train_step(next(batches))
    assert trainer.step == 5
    assert reads == []
