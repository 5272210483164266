"""Where CUDA graphs may use their memory again, and gradients that have left it: counted without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fasttrain import ConfigError, Data
from fasttrain.compiler import cuda_graphs
from fasttrain.compiler.cuda_graphs import Generations, Gradients, makes_cuda_graphs
from fasttrain.core.strategy import NO_CONTEXT
from fasttrain.strategies.compile import Blocks, CompileConfig
from tests.helpers import QUIET, points, state
from tests.stack import Stack, StackModel

# dynamo looks at it and hides the warning by itself, but not where warnings are errors. torch 2.14.1.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def afresh():
    torch.compiler.reset()
    triton = torch._inductor.config.triton
    before = getattr(triton, "cudagraph_trees_generation_cloning", None)
    yield
    if hasattr(triton, "cudagraph_trees_generation_cloning"):
        triton.cudagraph_trees_generation_cloning = before


@pytest.fixture
def events(monkeypatch):
    """What happens in a run whose compiled code counts as CUDA graphs: marks, forwards, backwards, in order."""
    told = []
    monkeypatch.setattr(cuda_graphs, "BACKEND", "aot_eager")
    monkeypatch.setattr(cuda_graphs, "DEVICES", ("cpu",))
    monkeypatch.setattr(cuda_graphs, "mark_step_begin", lambda: told.append("mark"))
    return told


class Watched(Stack):
    """Tells of the forwards of its blocks and of backward."""

    told: list[str]

    def build_data(self):
        return Data(train=points(), evaluation=points(20, seed=4))

    def build_model(self):
        model = super().build_model()
        for block in model.blocks:
            block.register_forward_hook(lambda *_: self.told.append("block"))
        model.head.register_full_backward_hook(lambda *_: self.told.append("backward"))
        return model


def watched(told, **settings):
    class Here(Watched):
        pass

    Here.told = told
    compile = {"name": "blocks", "backend": "aot_eager", "reference_steps": 0}
    return Here(batch_size=8, optimizer="sgd", compile=compile, **settings, **QUIET)


MICROBATCH = ["mark", "block", "block", "backward"]


def test_which_settings_make_cuda_graphs():
    assert makes_cuda_graphs("reduce-overhead", "inductor")
    assert makes_cuda_graphs("max-autotune", "inductor")
    assert makes_cuda_graphs(None, "cudagraphs")
    assert not makes_cuda_graphs(None, "inductor")
    assert not makes_cuda_graphs("max-autotune-no-cudagraphs", "inductor")
    assert not makes_cuda_graphs("reduce-overhead", "aot_eager")


@pytest.mark.parametrize("num", [1, 4])
def test_a_generation_begins_once_a_microbatch_and_never_between_two_blocks(events, num):
    accumulation = {"name": "microbatches", "num": num} if num > 1 else None
    trainer = watched(events, steps=2, accumulation=accumulation)
    for _ in range(2):
        trainer.train_step(points(8))
    assert events == MICROBATCH * num * 2


def test_an_evaluation_begins_one_and_so_does_each_of_its_batches(events):
    trainer = watched(events, steps=1)
    trainer.train_step(points(8))
    events.clear()
    trainer.evaluate()
    assert events == ["mark", *["mark", "block", "block"] * 3]  # 20 samples in batches of 8
    events.clear()
    trainer.plan.batch(points(8))  # a training batch, before its step
    trainer.train_step(points(8))
    assert events == MICROBATCH


def test_a_whole_run_with_evaluations_and_accumulation_marks_as_often(events):
    trainer = watched(events, steps=3, accumulation={"name": "microbatches", "num": 2}, evaluate={"every": 3})
    trainer.fit()
    assert events.count("backward") == 6
    assert events.count("mark") == 6 + 1 + 3
    assert events.count("block") == 2 * (6 + 6)  # the batches of an evaluation are cut, too


def test_reference_steps_begin_one_each(events):
    trainer = watched(events, steps=1)
    trainer = type(trainer)(
        batch_size=8, steps=1, compile={"name": "blocks", "backend": "aot_eager", "reference_steps": 1}, **QUIET
    )
    compile = trainer.plan.strategies["compile"]
    compile._compare(trainer.task, points(8))
    # Two eager calls, then three that warm up, record and replay, and one that is timed; perhaps both once more.
    assert events[: 6 * 4] == MICROBATCH * 6
    assert events.count("mark") == events.count("backward") in (6, 10)


def test_two_forwards_before_a_backward_are_one_generation():
    marks = []
    generations = Generations(mark=lambda: marks.append(1))
    for _ in range(2):
        for _ in range(2):
            with generations.forward():
                pass
        with generations.microbatch(True):  # around the backward alone: plan.backward(loss)
            pass
    assert len(marks) == 2
    with generations.microbatch(False), generations.forward():
        pass
    assert len(marks) == 3


def test_a_microbatch_that_failed_is_over():
    marks = []
    generations = Generations(mark=lambda: marks.append(1))
    for _ in range(2):
        with pytest.raises(ValueError, match="planted"), generations.microbatch(True), generations.forward():
            raise ValueError("planted")
    assert len(marks) == 2


# ---- gradients


def test_a_gradient_is_copied_out_once_and_added_to_in_place_from_then_on():
    model = StackModel()
    gradients = Gradients(model.parameters())
    x, y = points(8)
    number = len(list(model.parameters()))

    def backward():
        F.cross_entropy(model(x), y).backward()
        return {name: p.grad.data_ptr() for name, p in model.named_parameters()}

    first = backward()
    held = {name: p.grad for name, p in model.named_parameters()}
    values = {name: grad.clone() for name, grad in held.items()}
    assert gradients.keep() == number
    kept = {name: p.grad.data_ptr() for name, p in model.named_parameters()}
    assert all(kept[name] != first[name] for name in kept)
    assert all(torch.equal(p.grad, values[name]) for name, p in model.named_parameters())
    for grad in held.values():
        grad.fill_(float("nan"))  # as a replay writes over what it computed before
    second = backward()
    assert second == kept
    assert gradients.keep() == 0
    gradients.forget()
    backward()
    assert {name: p.grad.data_ptr() for name, p in model.named_parameters()} == kept
    for name, p in model.named_parameters():
        assert torch.allclose(p.grad, 3 * values[name], rtol=1e-5, atol=1e-8)


def test_a_gradient_that_comes_later_in_a_step_is_copied_then():
    used, late, never = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    gradients = Gradients([p for m in (used, late, never) for p in m.parameters()])
    x = torch.ones(1, 2)
    used(x).sum().backward()
    assert gradients.keep() == 2
    (used(x) + late(x)).sum().backward()
    assert gradients.keep() == 2
    assert never.weight.grad is None
    assert used.weight.grad.tolist() == [[2, 2], [2, 2]]


def test_the_layout_and_dtype_of_a_gradient_stay_and_sparse_ones_are_left_alone():
    weight = nn.Parameter(torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last))
    half = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    table = nn.Embedding(5, 2, sparse=True)
    weight.grad = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    half.grad = torch.ones(3, dtype=torch.bfloat16)
    table(torch.tensor([1])).sum().backward()
    assert Gradients([weight, half, table.weight]).keep() == 2
    assert weight.grad.is_contiguous(memory_format=torch.channels_last)
    assert half.grad.dtype == torch.bfloat16
    assert table.weight.grad.is_sparse


def test_what_was_kept_is_freed_with_the_step():
    parameter = nn.Parameter(torch.zeros(3))
    gradients = Gradients([parameter])
    parameter.grad = torch.ones(3)
    gradients.keep()
    with Generations(gradients).microbatch(True):
        pass
    assert gradients._own == {}


def two_steps(monkeypatch, spoils):
    """Weights after two steps of four microbatches, and how many gradients were copied after each but the last.

    With `spoils`, a new generation overwrites what backward computed and nobody copied, as a replay does.
    """
    pool, copied, keep = [], [], Gradients.keep

    class Pooled(Stack):
        def build_model(self):
            model = super().build_model()
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(lambda p: pool.append(p.grad))
            return model

    def spoil():
        for gradient in pool:
            gradient.fill_(float("nan"))
        pool.clear()

    def counted(self):
        copied.append(keep(self))
        own = {id(gradient) for gradient in self._own.values()}
        pool[:] = [gradient for gradient in pool if id(gradient) not in own]
        return copied[-1]

    with monkeypatch.context() as patched:
        patched.setattr(cuda_graphs, "mark_step_begin", spoil if spoils else lambda: None)
        patched.setattr(Gradients, "keep", counted)
        compile = {"name": "blocks", "backend": "aot_eager", "reference_steps": 0}
        accumulation = {"name": "microbatches", "num": 4}
        trainer = Pooled(batch_size=8, steps=2, compile=compile, accumulation=accumulation, optimizer="sgd", **QUIET)
        for _ in range(2):
            trainer.train_step(points(8))
            pool.clear()  # used up by the step
    return state(trainer), copied


def test_under_accumulation_gradients_leave_the_memory_of_graphs_once_a_step(events, monkeypatch):
    (plain, _), (spoiled, copied) = two_steps(monkeypatch, False), two_steps(monkeypatch, True)
    assert copied == [16, 0, 0] * 2  # each parameter once a step
    assert len(plain) == 16
    assert all(torch.isfinite(value).all() for value in spoiled.values())
    assert all(torch.equal(value, spoiled[name]) for name, value in plain.items())


def test_the_loss_of_a_step_is_no_output_of_a_graph(events):
    kept = []

    class Own(Stack):
        def compute_loss(self, batch):
            kept.append(super().compute_loss(batch))
            return kept[-1]

    compile = {"name": "model", "backend": "aot_eager", "reference_steps": 0}
    trainer = Own(batch_size=8, steps=1, compile=compile, **QUIET)
    info = trainer.train_step(points(8))
    assert torch.equal(info.loss, kept[0])
    assert info.loss.data_ptr() != kept[0].data_ptr()


# ---- where there are none


def test_without_cuda_graphs_every_line_stays_bare():
    trainer = watched([], steps=1)
    compile = trainer.plan.strategies["compile"]
    assert compile._generations is None
    assert {"batch", "microbatch", "forward"} <= set(Blocks.idle(CompileConfig()))
    assert trainer.plan.forward() is NO_CONTEXT
    assert trainer.plan._bare


def test_on_the_cpu_the_mode_changes_nothing(monkeypatch):
    marks = []
    monkeypatch.setattr(cuda_graphs, "mark_step_begin", lambda: marks.append(1))
    compile = {"name": "blocks", "mode": "reduce-overhead"}
    plan = Stack(batch_size=8, steps=1, compile=compile, **QUIET).plan
    assert plan.forward() is NO_CONTEXT
    assert plan._microbatch(False) is NO_CONTEXT
    assert plan.evaluating(None) is NO_CONTEXT
    assert plan.batch("batch") == "batch"
    assert marks == []


def test_outputs_that_are_still_held_are_copied_by_a_compiler_that_can(events):
    triton = torch._inductor.config.triton
    if hasattr(triton, "cudagraph_trees_generation_cloning"):
        assert triton.cudagraph_trees_generation_cloning is None
    watched(events, steps=1)
    assert getattr(triton, "cudagraph_trees_generation_cloning", "user_visible") == "user_visible"


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_tensors_that_come_back_from_the_host_have_no_place_in_cuda_graphs(mode):
    settings = {"batch_size": 8, "activation_offload": "cpu", **QUIET}
    with pytest.raises(ConfigError, match=r"activation_offload=cpu.*; use compile\.mode=null"):
        Stack(compile={"name": "blocks", "mode": mode}, **settings)
    Stack(compile={"name": "blocks", "mode": "max-autotune-no-cudagraphs"}, **settings)
