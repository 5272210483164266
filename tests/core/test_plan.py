"""How strategies compose into the lines of a step."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from fasttrain import ConfigError
from fasttrain.core.plan import Nest, Plan, bind, explain
from fasttrain.core.slots import SLOTS
from fasttrain.core.strategy import FOLD, NEST, NO_CONTEXT, ORDER, VERBS, Context, Strategy, acts_on
from fasttrain.core.task import Task
from fasttrain.errors import Conflict
from fasttrain.registry import BUILT_IN, find
from fasttrain.strategies.accumulation import Microbatches, MicrobatchesConfig
from fasttrain.strategies.gradient_clipping import Norm
from fasttrain.strategies.optimizer import Sgd
from fasttrain.strategies.precision import Bf16, Fp16
from tests.stack import Stack

CONTEXT = Context(device=torch.device("cpu"), total_steps=3)


def strategy(in_slot, **verbs):
    """A strategy that acts as told."""
    kind = type("Made", (Strategy,), {"slot": in_slot, "name": "made", **verbs})
    return kind(None, CONTEXT)


class Told:
    """A context that writes down what happens to it."""

    def __init__(self, name, log, fails=False):
        self.name, self.log, self.fails = name, log, fails

    def __enter__(self):
        if self.fails:
            raise ValueError(self.name)
        self.log.append(f"enter {self.name}")

    def __exit__(self, kind, error, trace):
        self.log.append(f"leave {self.name}" + (f" {kind.__name__}" if kind else ""))


# ---- composition


def test_a_value_folds_through_every_strategy_in_slot_order():
    late = strategy("weight_averaging", scale=lambda self, loss: loss * 10, batch=lambda self, batch: [*batch, "late"])
    early = strategy("precision", scale=lambda self, loss: loss + 1, batch=lambda self, batch: [*batch, "early"])
    plan = Plan([late, early], CONTEXT)
    assert plan.scale(1) == 20  # (1 + 1) * 10, whatever the order in which they were given
    assert plan.batch([]) == ["early", "late"]


def test_model_and_optimizer_fold_once_in_slot_order():
    def model(self, model):
        return f"{self.slot}({model})"

    def optimizer(self, factory):
        return lambda model: f"{self.slot}<{'' if factory is None else factory(model)}>"

    slots = ["data_parallel", "compile", "optimizer"]
    plan = Plan([strategy(slot, model=model, optimizer=optimizer) for slot in slots], CONTEXT)
    assert plan.model("m") == "optimizer(data_parallel(compile(m)))"
    assert plan.optimizer(None)("m") == "optimizer<data_parallel<compile<>>>"


def test_contexts_nest_and_are_left_in_reverse():
    log = []
    slots = ["activation_offload", "precision", "data_parallel"]
    plan = Plan([strategy(slot, forward=lambda self: Told(self.slot, log)) for slot in slots], CONTEXT)
    with plan.forward():
        log.append("inside")
    order = ["precision", "activation_offload", "data_parallel"]
    assert log == [*(f"enter {s}" for s in order), "inside", *(f"leave {s}" for s in reversed(order))]


def test_contexts_are_left_in_reverse_when_the_inside_fails():
    log = []
    with pytest.raises(KeyError), Nest([Told("a", log), Told("b", log)]):
        raise KeyError("inside")
    assert log == ["enter a", "enter b", "leave b KeyError", "leave a KeyError"]


def test_contexts_entered_already_are_left_when_a_later_one_cannot_be_entered():
    log = []
    with pytest.raises(ValueError, match="c"), Nest([Told("a", log), Told("b", log), Told("c", log, fails=True)]):
        log.append("inside")
    assert log == ["enter a", "enter b", "leave b ValueError", "leave a ValueError"]


def test_around_wraps_the_whole_step_with_the_first_slot_outermost():
    log = []

    def around(self, gradients_of):
        def wrapped(task, batch):
            log.append(f"{self.slot} in")
            loss = gradients_of(task, batch)
            log.append(f"{self.slot} out")
            return loss

        return wrapped

    plan = Plan([strategy(slot, around=around) for slot in ("accumulation", "precision")], CONTEXT)
    weight = torch.ones((), requires_grad=True)
    assert plan.gradients_of(Task(model=None, compute_loss=lambda batch: weight * 3), torch.ones(2)).item() == 3
    assert log == ["precision in", "accumulation in", "accumulation out", "precision out"]
    assert weight.grad.item() == 3


def test_gradients_run_in_order_and_their_verdicts_are_or_ed():
    log = []

    def gradients(verdict):
        def act(self, model, optimizer):
            log.append(self.slot)
            return verdict if verdict is None else torch.tensor(verdict)

        return act

    def plan(*verdicts):
        slots = ["precision", "gradient_clipping", "nonfinite"]
        return Plan([strategy(s, gradients=gradients(v)) for s, v in zip(slots, verdicts, strict=True)], CONTEXT)

    assert plan(None, None, None).gradients(None, None) is None
    assert plan(0.0, None, 0.0).gradients(None, None).item() == 0
    assert plan(1.0, None, 0.0).gradients(None, None).item() == 1
    assert plan(0.0, None, 1.0).gradients(None, None).item() == 1
    assert log == ["precision", "gradient_clipping", "nonfinite"] * 4


@pytest.mark.parametrize("verb", ["split", "forward_backward", "update", "dtypes"])
def test_two_owners_of_one_line_are_a_conflict_that_says_what_to_turn_off(verb):
    two = [strategy(slot, **{verb: lambda self, *args: None}) for slot in ("accumulation", "precision")]
    with pytest.raises(Conflict) as caught:
        Plan(two, CONTEXT)
    assert str(caught.value) == (
        f"precision=made and accumulation=made both replace the line '{verb}' of the step; "
        "turn one off: precision=null or accumulation=null."
    )


# ---- what a line costs


def test_where_one_strategy_acts_the_line_is_its_bound_method():
    bf16, norm = Bf16(None, CONTEXT), Norm(None, CONTEXT)
    cut = Microbatches(MicrobatchesConfig(num=2), CONTEXT)
    plan = Plan([bf16, norm, cut, Sgd(None, CONTEXT)], CONTEXT)
    assert plan.forward == bf16.forward
    assert plan.split == cut.split
    assert plan.model == bf16.model
    assert plan.evaluating == bf16.evaluating


def test_where_nobody_acts_the_line_is_a_default_and_the_context_one_shared_object():
    plan = Plan([], CONTEXT)
    batch = object()
    assert plan.batch(batch) is batch
    assert plan.scale(batch) is batch
    assert plan.forward() is plan.microbatch(True) is plan.evaluating(None) is NO_CONTEXT
    assert plan.started(None, None, 0) is None


def test_bind_gives_the_default_the_one_function_or_a_closure():
    def default():
        raise AssertionError

    def double(value):
        return 2 * value

    assert bind(FOLD, [], default) is default
    for kind in (FOLD, NEST, ORDER):
        assert bind(kind, [double], default) is double
    assert bind(FOLD, [double, double], default)(3) == 12


# ---- what the documentation says of how often

CALLS = {
    # once a run
    "dtypes": 0,  # asked by who builds the context, before there is a plan
    "model": 1,
    "optimizer": 1,
    "started": 1,
    "around": 1,
    # once a step
    "batch": 3,
    "split": 3,
    "gradients": 3,
    "update": 3,
    "updated": 3,
    # once a microbatch
    "microbatch": 6,
    "forward": 6,
    "scale": 6,
    # at log points: the last of the three steps
    "report": 1,
    "logged": 1,
    # evaluation and checkpoints: there are none
    "evaluating": 0,
    "state_dict": 0,
}


@pytest.fixture
def counted(monkeypatch):
    """A strategy that overrides every verb but forward_backward, and counts."""
    from fasttrain import registry
    from fasttrain.registry import register

    monkeypatch.setattr(registry, "_registered", {})
    calls = dict.fromkeys(CALLS, 0)
    events = []

    def counting(verb):
        def act(self, *args):
            calls[verb] += 1
            events.append((verb, *[arg for arg in args if isinstance(arg, bool)]))
            if verb == "split":
                task, batch = args
                return task.split(batch, 2)
            if verb == "update":
                return args[0].step()
            return getattr(Strategy, verb)(self, *args)

        return act

    kind = type("Counted", (Strategy,), {verb: counting(verb) for verb in CALLS})
    register("weight_averaging", "counted")(kind)
    return calls, events


def test_each_verb_is_called_as_often_as_the_documentation_says(counted):
    calls, events = counted
    assert set(CALLS) == set(VERBS) - {"forward_backward"}
    settings = {"batch_size": 8, "steps": 3, "run": {"dir": None}, "log": {"every": 3}}
    Stack(**settings, weight_averaging="counted").fit()
    assert calls == CALLS
    step = [
        ("batch",),
        ("split",),
        *[("microbatch", False), ("forward",), ("scale",)],
        *[("microbatch", True), ("forward",), ("scale",)],
        ("gradients",),
        ("update",),
        ("updated",),
    ]
    assert events == [("around",), ("model",), ("optimizer",), ("started",), *step * 3, ("report",), ("logged",)]


def test_an_owner_of_forward_backward_is_called_once_a_step():
    calls = []

    def forward_backward(self, task, microbatches, weights):
        calls.append((len(microbatches), weights))
        return torch.zeros(())

    cut = Microbatches(MicrobatchesConfig(num=2), CONTEXT)
    plan = Plan([strategy("pipeline_parallel", forward_backward=forward_backward), cut], CONTEXT)
    task = Task(model=None, compute_loss=lambda batch: None)
    for _ in range(3):
        plan.gradients_of(task, torch.ones(8))
    assert calls == [(2, [0.5, 0.5])] * 3


# ---- explain


def test_explain_lists_who_acts_on_which_line():
    cut = Microbatches(MicrobatchesConfig(num=2), CONTEXT)
    plan = Plan([Norm(None, CONTEXT), cut, Fp16(None, CONTEXT), Sgd(None, CONTEXT)], CONTEXT)
    told = dict(plan.explain())
    assert told["forward"] == told["scale"] == told["update"] == ["precision=fp16"]
    assert told["gradients"] == ["precision=fp16", "gradient_clipping=norm"]
    assert told["split"] == ["accumulation=microbatches"]
    assert told["optimizer"] == ["optimizer=sgd"]
    assert told["around"] == []
    assert list(told) == [verb for verb in VERBS if verb not in ("report", "logged", "state_dict")]


def test_explain_names_every_built_in_strategy_somewhere():
    explained = 0
    for slot, table in BUILT_IN.items():
        for name in table:
            kind = find(slot, name)
            lines = [verb for verb, acting in explain({slot: kind}) if acting == [f"{slot}={name}"]]
            assert lines == [v for v in acts_on(kind) if v not in ("report", "logged", "state_dict")]
            assert lines, f"{slot}={name} acts on nothing"
            explained += 1
    assert explained >= 19


# ---- odd steps


def test_a_step_of_ones_own_goes_through_the_public_lines():
    log = []

    @contextmanager
    def telling(name):
        log.append(name)
        yield

    one = strategy(
        "data_parallel",
        microbatch=lambda self, is_last: telling(f"microbatch {is_last}"),
        forward=lambda self: telling("forward"),
        scale=lambda self, loss: loss * 4,
    )
    plan = Plan([one], CONTEXT)
    weight = torch.ones((), requires_grad=True)
    with plan.forward():
        loss = weight * 2
    plan.backward(loss, is_last=False)
    with plan.forward():
        loss = weight * 3
    plan.backward(loss)
    assert log == ["forward", "microbatch False", "forward", "microbatch True"]
    assert weight.grad.item() == 4 * (2 + 3)


def test_a_slot_that_does_not_exist_has_no_strategy():
    assert len(SLOTS) == 18
    with pytest.raises(ConfigError, match="there is no slot 'precison'; did you mean 'precision'"):
        find("precison", "bf16")
