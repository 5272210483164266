"""How strategies compose into the lines of a step."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from fasttrain import ConfigError, Data, registry
from fasttrain.core.plan import Nest, Plan, bind, explain
from fasttrain.core.slots import SLOTS
from fasttrain.core.strategy import (
    BESIDE,
    FOLD,
    NEST,
    NO_CONTEXT,
    ORDER,
    VERBS,
    Clash,
    Context,
    Strategy,
    acts_on,
    conflicts,
)
from fasttrain.core.task import Task
from fasttrain.errors import Conflict
from fasttrain.registry import BUILT_IN, find, register
from fasttrain.strategies.accumulation import Microbatches, MicrobatchesConfig
from fasttrain.strategies.gradient_clipping import Norm
from fasttrain.strategies.optimizer import Sgd
from fasttrain.strategies.precision import Bf16, Fp16
from tests.helpers import Weight, points
from tests.stack import Stack

CONTEXT = Context(device=torch.device("cpu"), total_steps=3)

# Lines that stand outside of the step, which `explain` leaves out.


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


def test_the_loss_function_folds_once_and_every_caller_gets_it(monkeypatch):
    def doubled(self, loss):
        return lambda output, batch: (loss(output, batch) * 2, CALLED.append(self.slot))[0]

    class Doubled(Strategy):
        slot, name = "weight_averaging", "doubled"
        loss = doubled

    class Evaluated(Stack):
        def build_data(self):
            return Data(train=points(), evaluation=points(16, seed=4))

    class Own(Evaluated):
        """Its own compute_loss calls self.loss, as ours does."""

        def compute_loss(self, batch):
            return self.loss(self.model(batch[0]), batch)

    CALLED = []
    monkeypatch.setattr(registry, "_registered", {})
    register("weight_averaging", "doubled")(Doubled)
    for kind in (Evaluated, Own):
        plain = kind(batch_size=8, steps=1, run={"dir": None})
        trainer = kind(batch_size=8, steps=1, run={"dir": None}, weight_averaging="doubled")
        batch = next(iter(trainer.feed.training(trainer.task, trainer.plan)))
        assert CALLED == []
        assert trainer.task.compute_loss(batch).item() == 2 * plain.task.compute_loss(batch).item()
        assert CALLED == ["weight_averaging"]
        assert trainer.evaluate()["loss"] == pytest.approx(2 * plain.evaluate()["loss"], rel=1e-6)
        assert (trainer.task.loss is trainer.loss) == (kind is Evaluated)
        CALLED.clear()


def test_a_strategy_that_changes_the_loss_is_refused_where_there_is_none(monkeypatch):
    class Weighs(Strategy):
        slot, name = "weight_averaging", "weighs"

        def loss(self, loss):
            return loss

    monkeypatch.setattr(registry, "_registered", {})
    register("weight_averaging", "weighs")(Weighs)
    with pytest.raises(ConfigError) as caught:
        Weight(batch_size=2, steps=1, run={"dir": None}, weight_averaging="weighs")
    assert str(caught.value) == (
        "weight_averaging=weighs is set to change loss(output, batch), and Weight has none of its own, only "
        "compute_loss(batch); give inputs(batch) and loss(output, batch) instead, or set weight_averaging.loss=false."
    )


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
    "loss": 1,
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
    "apart": 3,
    # at log points: the last of the three steps
    "report": 1,
    "logged": 1,
    # after the first step, at log points and at the end
    "remarks": 3,
    "summary": 1,
    "ended": 1,
    # evaluation and checkpoints: there are none
    "evaluated": 0,
    "evaluating": 0,
    "saving": 0,
    "left_out": 0,
    "state_dict": 0,
}


@pytest.fixture
def counted(monkeypatch):
    """A strategy that overrides every verb but forward_backward, and counts."""
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
        ("apart",),
    ]
    start = [("around",), ("model",), ("optimizer",), ("loss",), ("started",)]
    end = [("report",), ("logged",), ("remarks",), ("remarks",), ("summary",), ("ended",)]
    assert events == [*start, *step, ("remarks",), *step * 2, *end]


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


# ---- what cannot live together


class NeedsCompile(Strategy):
    slot, name = "activation_checkpointing", "needs_compile"
    clashes = (Clash(slot="compile", name="null", why="it acts in graphs.", instead="add compile=blocks."),)


class Picky(Strategy):
    """Has a limit under one of its settings only."""

    slot, name = "optimizer", "picky"

    @classmethod
    def limits(cls, config):
        return (Clash(slot="gradient_clipping", why="gradients are gone", instead="use null"),) if config else ()


def test_a_plan_refuses_what_cannot_live_together_and_what_lacks_its_companion():
    with pytest.raises(
        Conflict, match="needs_compile cannot be used with compile=null: it acts in graphs; add compile="
    ):
        Plan([NeedsCompile(None, CONTEXT)], CONTEXT)
    Plan([NeedsCompile(None, CONTEXT), strategy("compile")], CONTEXT)
    Plan([Picky(False, CONTEXT), Norm(None, CONTEXT)], CONTEXT)
    Plan([Picky(True, CONTEXT)], CONTEXT)
    with pytest.raises(
        Conflict, match="optimizer=picky cannot be used with gradient_clipping=norm: gradients are gone"
    ):
        Plan([Picky(True, CONTEXT), Norm(None, CONTEXT)], CONTEXT)


def test_a_config_that_could_not_be_read_has_the_limits_of_its_class_alone():
    assert conflicts({"optimizer": (Picky, None), "gradient_clipping": (Norm, None)}) == []
    assert [slot for slot, _ in conflicts({"activation_checkpointing": (NeedsCompile, None)})] == [NeedsCompile.slot]


# ---- explain


def test_remarks_and_figures_of_strategies_are_gathered_by_slot():
    told = ["one."]
    speaks = strategy("compile", remarks=lambda self: [told.pop()] if told else [], summary=lambda self: {"graphs": 3})
    plan = Plan([speaks, strategy("accumulation")], CONTEXT)
    assert plan.remarks() == ["compile=made: one."]
    assert plan.remarks() == []
    assert plan.summary() == {"compile": {"graphs": 3}}


def test_a_step_is_counted_apart_for_the_first_reason_and_not_asked_for_where_nobody_gives_one():
    assert Plan([strategy("compile")], CONTEXT).apart is None
    silent = strategy("accumulation", apart=lambda self: None)
    late = strategy("optimizer", apart=lambda self: "later")
    assert Plan([silent], CONTEXT).apart() is None
    first = strategy("compile", apart=lambda self: "compilation")
    assert Plan([late, silent, first], CONTEXT).apart() == "compilation"


def test_explain_lists_who_acts_on_which_line():
    cut = Microbatches(MicrobatchesConfig(num=2), CONTEXT)
    plan = Plan([Norm(None, CONTEXT), cut, Fp16(None, CONTEXT), Sgd(None, CONTEXT)], CONTEXT)
    told = dict(plan.explain())
    assert told["forward"] == told["scale"] == told["update"] == ["precision=fp16"]
    assert told["gradients"] == ["precision=fp16", "gradient_clipping=norm"]
    assert told["split"] == ["accumulation=microbatches"]
    assert told["optimizer"] == ["optimizer=sgd"]
    assert told["around"] == []
    assert list(told) == [verb for verb in VERBS if verb not in BESIDE]


def test_explain_names_every_built_in_strategy_somewhere():
    explained = 0
    for slot, table in BUILT_IN.items():
        for name in table:
            kind = find(slot, name)
            lines = [verb for verb, acting in explain({slot: kind}) if acting == [f"{slot}={name}"]]
            assert lines == [v for v in acts_on(kind) if v not in BESIDE]
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


# ---- what checkpoints leave out


def test_a_checkpoint_leaves_out_what_any_strategy_names():
    frozen = strategy("adapters", left_out=lambda self, model: {"a", "b"})
    other = strategy("batch_norm", left_out=lambda self, model: {"b", "c"})
    assert Plan([frozen, other], CONTEXT).left_out(None) == {"a", "b", "c"}
    assert Plan([], CONTEXT).left_out(None) == set()


def test_a_verb_that_has_nothing_to_do_under_its_settings_leaves_the_line_bare():
    @dataclass(frozen=True, kw_only=True)
    class Often:
        often: bool = False

    class Sometimes(Strategy):
        slot, name = "gradient_clipping", "sometimes"
        Config = Often

        @classmethod
        def idle(cls, config):
            return () if config.often else ("microbatch",)

        def microbatch(self, is_last):
            return NO_CONTEXT

    for often, acting in ((False, []), (True, ["gradient_clipping=sometimes"])):
        plan = Plan([Sometimes(Often(often=often))], Context(device=torch.device("cpu")))
        assert dict(plan.explain())["microbatch"] == acting
        assert plan._bare is not often
    assert acts_on(Sometimes) == ["microbatch"]
