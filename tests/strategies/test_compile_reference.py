"""compile: eager reference steps before the first step, and that nothing of the run moves by them."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fasttrain import ConfigError, Data
from fasttrain.compiler import reference
from fasttrain.core.plan import Plan
from fasttrain.core.strategy import Context
from fasttrain.core.task import Task
from fasttrain.strategies.compile import Blocks, CompileConfig
from tests.helpers import QUIET, Recorder, points, state
from tests.ranks import run_ranks
from tests.stack import Block, Restless, Stack, StackModel

# dynamo looks at it and hides the warning by itself, but not where warnings are errors. torch 2.14.1.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def afresh():
    torch.compiler.reset()


@pytest.fixture
def clock(monkeypatch):
    """Each call takes 4 s eagerly and 3 s compiled, and compiling 5 s more; `clock` may be told otherwise."""
    took = {"eager": 4.0, "compiled": 3.0, "compiling": 8.0}

    class Clock:
        def __init__(self):
            self.took, self.now, self.calls = took, 0.0, []

        def compare(self, run, eager, **settings):
            def counted():
                kind = "eager" if self.eager else "compiled"
                if kind == "compiled" and "compiled" not in self.calls:
                    self.now += took["compiling"]
                else:
                    self.now += took[kind]
                self.calls.append(kind)
                run()

            def entered():
                outer = self

                class Entered:
                    def __enter__(self):
                        outer.eager = True
                        self.inner = eager()
                        self.inner.__enter__()

                    def __exit__(self, *error):
                        outer.eager = False
                        self.inner.__exit__(*error)

                return Entered()

            settings["now"] = lambda: self.now
            return compare(counted, entered, **settings)

    compare, made = reference.compare, Clock()
    made.eager = False
    monkeypatch.setattr(reference, "compare", made.compare)
    return made


def setting(**more):
    return {"name": "blocks", "backend": "aot_eager", **more}


def trained(cls, steps=4, reference_steps=3, **settings):
    """Losses and weights of a run."""
    torch.compiler.reset()
    watcher = Recorder()
    compile = setting(reference_steps=reference_steps)
    trainer = cls(batch_size=8, steps=steps, compile=compile, observers=[watcher], **settings, **QUIET)
    trainer.fit()
    return [record["loss"] for record in watcher.steps], state(trainer), trainer


KINDS = {
    "dropout and batch norm": {},
    "accumulation": {"accumulation": {"name": "microbatches", "num": 2}},
    "uneven microbatches": {"accumulation": {"name": "microbatches", "size": 3}},
    "in_backward": {"optimizer": {"name": "adamw", "in_backward": True}},
    "fp16": {"precision": {"name": "fp16", "init_scale": 1024.0, "growth_interval": 3}},
    "bf16_true": {"precision": "bf16_true"},
    "ema": {"weight_averaging": {"name": "ema", "decay": 0.9}},
    "checkpointed": {"activation_checkpointing": "full"},
    "offloaded": {"activation_offload": {"name": "cpu", "min_bytes": 0, "in_flight": 2}},
}


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_a_run_with_reference_steps_has_bit_for_bit_the_losses_and_weights_of_one_without(settings):
    plain_losses, plain, without = trained(Restless, reference_steps=0, **settings)
    losses, weights, trainer = trained(Restless, **settings)
    assert "ratio" not in without.plan.summary()["compile"]
    assert trainer.plan.summary()["compile"]["eager_step_s"] > 0
    assert losses == plain_losses
    assert len(losses) == 4
    assert all(torch.equal(weights[name], value) for name, value in plain.items())


class Pops(Stack):
    """Takes an entry out of its batch."""

    def build_data(self):
        x, y = points()
        return Data(train={"x": x, "label": y})

    def compute_loss(self, batch):
        label = batch.pop("label")
        return F.cross_entropy(self.model(batch["x"]), label)


class Normalises(Stack):
    """Changes its batch in place."""

    def compute_loss(self, batch):
        batch[0].mul_(0.5).add_(0.1)
        return F.cross_entropy(self.model(batch[0]), batch[1])


class Counts(Stack):
    """Counts its batches."""

    met = 0

    def compute_loss(self, batch):
        self.met += 1
        return F.cross_entropy(self.model(batch[0]), batch[1]) * self.met


@pytest.mark.parametrize("kind", [Pops, Normalises, Counts])
def test_user_code_that_changes_its_batch_or_counts_sees_nothing_of_the_comparison(kind):
    plain_losses, plain, _ = trained(kind, reference_steps=0)
    losses, weights, trainer = trained(kind)
    assert "ratio" in trainer.plan.summary()["compile"]
    assert losses == plain_losses
    assert all(torch.equal(weights[name], value) for name, value in plain.items())


def both_on_a_rank():
    results = []
    for steps in (0, 3):
        losses, weights, trainer = trained(Restless, reference_steps=steps)
        results.append((losses, weights, trainer.plan.strategies["data_parallel"].averager.traffic.rounds))
    (plain_losses, plain, plain_rounds), (losses, weights, rounds) = results
    assert dist.get_world_size() == 2
    return (
        losses == plain_losses,
        all(torch.equal(weights[name], value) for name, value in plain.items()),
        (plain_rounds, rounds),
        {"compiled_step_s", "eager_step_s", "pays_after_steps", "ratio"} <= set(trainer.plan.summary()["compile"]),
        [record["text"] for record in trainer.observers[0].remarks if "for forward and backward" in record["text"]],
    )


@pytest.mark.ranks
def test_on_two_ranks_no_gradient_travels_for_it_and_every_number_stays():
    told = run_ranks(2, both_on_a_rank, timeout_s=120)
    assert [rank[:4] for rank in told] == [(True, True, (4, 4), True)] * 2
    assert told[0][4] == told[1][4]  # what rank 0 found, told to the observers of all
    assert len(told[0][4]) == 1


def test_a_resumed_run_which_compares_anew_equals_an_uninterrupted_one(tmp_path):
    settings = {"batch_size": 8, "compile": setting(), "log": {"every": 1}, "checkpoint": {"every": 3}}
    whole = Restless(steps=6, run={"dir": str(tmp_path / "a")}, **settings)
    whole.fit()
    torch.compiler.reset()
    first = Restless(steps=6, run={"dir": str(tmp_path / "b"), "id": "x"}, **settings)
    step = first.train_step

    def stops(batch):
        if first.step == 3:
            raise KeyboardInterrupt
        return step(batch)

    first.train_step = stops
    with pytest.raises(KeyboardInterrupt):
        first.fit()
    torch.compiler.reset()
    second = Restless(
        steps=6, resume=str(tmp_path / "b" / "restless" / "x"), run={"dir": str(tmp_path / "b")}, **settings
    )
    second.fit()
    assert second.plan.strategies["compile"].reference.step == 3
    assert second.plan.strategies["compile"].reference.found is not None
    expected = state(whole)
    assert all(torch.equal(expected[name], value) for name, value in state(second).items())


def test_eager_calls_come_first_and_only_before_the_first_step(clock):
    _, _, trainer = trained(Stack, steps=3)
    assert clock.calls == ["eager"] * 4 + ["compiled"] * 4
    summary = trainer.plan.summary()["compile"]
    assert {name: summary[name] for name in ("eager_step_s", "compiled_step_s", "ratio", "pays_after_steps")} == {
        "eager_step_s": 4.0,
        "compiled_step_s": 3.0,
        "ratio": 0.75,
        "pays_after_steps": 5,
    }


@pytest.mark.parametrize("steps", [1, 3])
def test_eager_steps_run_no_compiled_code(clock, steps):
    ran = []

    def counting(graph, inputs):
        return lambda *given: ran.append(1) or graph(*given)

    torch._dynamo.register_backend(counting, name=f"counting_calls_{steps}")
    trainer = Stack(
        batch_size=8, steps=1, compile=setting(reference_steps=steps) | {"backend": f"counting_calls_{steps}"}, **QUIET
    )
    trainer.fit()
    # Two blocks in each call: one that compiles, those that are timed, and the step itself.
    assert len(ran) == 2 * (1 + steps + 1)


def test_the_verdict_is_told_once_in_the_run_with_the_figures_and_the_flag(clock):
    clock.took.update(compiled=5.24)
    _, _, trainer = trained(Stack, steps=3)
    (remark,) = [record for record in trainer.observers[0].remarks if "drop it" in record["text"]]
    assert remark["text"] == (
        "compile=blocks: a step takes 1.31 x eager's time (5.24 s against 4.00 s for forward and backward); "
        "drop it: compile=null"
    )
    assert remark["step"] == 1
    assert trainer.plan.remarks() == []
    assert trainer.observers[0].summary["compile"]["ratio"] == pytest.approx(1.31)


def test_what_is_left_of_the_run_and_the_microbatches_of_a_step_decide_whether_compiling_pays(clock):
    num = {"accumulation": {"name": "microbatches", "num": 2}}
    _, _, trainer = trained(Stack, steps=2, **num)
    compared = trainer.plan.strategies["compile"].reference
    assert compared.calls == 2
    assert compared.summary()["pays_after_steps"] == 3  # 5 s won back by twice 1 s a step
    assert "pays after 3 steps, and the run has 2; drop it: compile=null" in reference.verdict(
        compared.found, off=compared.off, calls=2, steps_left=2
    )


@pytest.mark.parametrize("where", ["eager", "compiled"])
def test_a_run_goes_on_where_memory_runs_out_in_the_comparison(monkeypatch, where):
    monkeypatch.setattr(reference, "free_memory", lambda: freed.append(1))
    freed, calls = [], itertools.count()
    fails = {"eager": range(2, 3), "compiled": range(5, 6)}[where]  # the second eager call, the second compiled one

    class Full(Stack):
        def compute_loss(self, batch):
            if next(calls) + 1 in fails:
                raise torch.OutOfMemoryError("planted")
            return super().compute_loss(batch)

        def inputs(self, batch):
            return (batch[0],)

    compile = setting(reference_steps=3 if where == "eager" else 2)
    trainer = Full(batch_size=8, steps=2, compile=compile, observers=[Recorder()], **QUIET)
    assert trainer.fit()["steps"] == 2
    remarks = [
        r["text"] for r in trainer.observers[0].remarks if "not compared" in r["text"] or "without it" in r["text"]
    ]
    if where == "eager":
        assert freed == [1]
        assert len(remarks) == 1
        assert remarks[0].startswith("compile=blocks: without it this batch does not fit into memory; with it")
    else:
        assert remarks == ["compile=blocks: not compared with eager code (out of memory)"]


def test_a_loss_that_autograd_grad_does_not_handle_is_not_compared_and_trains_all_the_same():
    class Old(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
            self.blocks = nn.ModuleList(Block(8, nn.LayerNorm, 0.0) for _ in range(2))

        def forward(self, x):
            x = self.embed(x)
            return self.head(checkpoint(lambda x: self.blocks[1](self.blocks[0](x)), x, use_reentrant=True))

    class Reentrant(Stack):
        def build_model(self):
            return Old()

    trainer = Reentrant(batch_size=8, steps=2, compile=setting(), observers=[Recorder()], **QUIET)
    assert trainer.fit()["steps"] == 2
    remarks = [
        r["text"] for r in trainer.observers[0].remarks if "not compared" in r["text"] or "without it" in r["text"]
    ]
    assert len(remarks) == 1
    assert remarks[0].startswith("compile=blocks: not compared with eager code (torch.autograd.grad: ")
    assert "ratio" not in trainer.plan.summary()["compile"]


def test_budget_is_not_compared_and_says_why():
    if not hasattr(torch.autograd.graph, "region_activation_memory_budget"):
        with pytest.raises(ConfigError, match="use activation_checkpointing=selective"):
            Stack(batch_size=8, steps=1, compile=setting(), activation_checkpointing="budget", **QUIET)
        return
    trainer = Stack(batch_size=8, steps=1, compile=setting(), activation_checkpointing="budget", **QUIET)
    assert trainer.plan.notes() == [
        "compile=blocks: not compared with eager code: activation_checkpointing=budget saves memory in compiled code alone"
    ]
    trainer.fit()
    assert trainer.plan.strategies["compile"].reference is None
    off = Stack(batch_size=8, steps=1, compile=setting(reference_steps=0), activation_checkpointing="budget", **QUIET)
    assert off.plan.notes() == []


def test_without_a_comparison_nothing_is_timed():
    trainer = Stack(batch_size=8, steps=1, compile=setting(reference_steps=0), **QUIET)
    trainer.fit()
    assert trainer.plan.strategies["compile"].reference is None
    with pytest.raises(ConfigError, match=r"reference_steps=-1 cannot be measured"):
        CompileConfig(reference_steps=-1)


def test_a_plan_without_a_trainer_compares_nothing():
    model = StackModel()
    plan = Plan([Blocks(CompileConfig(backend="aot_eager"))], Context(device=torch.device("cpu"), total_steps=3))
    plan.model(model)
    x, y = points()
    calls = []

    def loss(batch):
        calls.append(1)
        return F.cross_entropy(model(batch[0]), batch[1])

    plan.gradients_of(Task(model=model, compute_loss=loss), (x, y))
    assert len(calls) == 1


def test_a_rank_without_samples_in_the_first_step_compares_at_its_next_one():
    class Short(Stack):
        def build_data(self):
            return Data(train=points(16))

    trainer = Short(batch_size=8, steps=2, compile=setting(), **QUIET)
    compile, task = trainer.plan.strategies["compile"], trainer.task
    assert not compile._compare(task, None)
    assert compile.reference is None
    assert compile._compare(task, points(8))
    assert compile.reference.found is not None
