"""compile: how many graphs are made, and that they compute what eager code does."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fasttrain import ConfigError, Data, lazy
from fasttrain.compiler.apply import compile_forwards
from fasttrain.models.bert import Bert
from fasttrain.models.bert_config import BertConfig
from fasttrain.models.resnet import build_resnet
from fasttrain.nn.blocks import find_blocks
from fasttrain.nn.recompute import checkpoint_blocks
from fasttrain.strategies.compile import CompileConfig
from tests.compiler.counting import GRAPHS, fresh_compiler  # noqa: F401
from tests.helpers import QUIET, Recorder, largest_difference, points, state
from tests.stack import Restless, Stack, StackModel, gradients

# dynamo looks at it and hides the warning by itself, but not where warnings are errors. torch 2.14.1.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


COUNTING = {"backend": "counting"}
SETTING = {"name": "blocks", "backend": "counting"}


def grads_of(model, x):
    output = model(x)
    output.square().mean().backward()
    found = {**gradients(model), "output": output.detach()}
    model.zero_grad()
    return found


def test_blocks_of_one_class_share_a_graph():
    torch.manual_seed(0)
    plain, model = StackModel(blocks=5), StackModel(blocks=5)
    model.load_state_dict(plain.state_dict())
    names = list(model.state_dict())
    assert len(compile_forwards(model.blocks, **COUNTING).modules) == 5
    assert list(model.state_dict()) == names
    x, _ = points()
    for _ in range(3):
        assert largest_difference(grads_of(model, x), grads_of(plain, x)) < 1e-6
    assert len(GRAPHS) == 1


def test_a_bert_is_one_graph_whatever_its_depth():
    model = Bert(BertConfig(vocabulary=50, width=16, layers=6, heads=2, feedforward=32, dropout=0.0), pooler=False)
    compile_forwards(find_blocks(model), **COUNTING)
    model(torch.randint(50, (2, 12))).sum().backward()
    assert len(GRAPHS) == 1


def test_blocks_whose_shapes_differ_have_a_graph_each():
    torch.manual_seed(0)
    model = build_resnet("resnet8", num_classes=3, stem="small", width=8)
    plain = build_resnet("resnet8", num_classes=3, stem="small", width=8)
    plain.load_state_dict(model.state_dict())
    compile_forwards(find_blocks(model), **COUNTING)
    x = torch.randn(4, 3, 8, 8)
    assert largest_difference(grads_of(model, x), grads_of(plain, x)) < 1e-6
    assert largest_difference(model.state_dict(), plain.state_dict()) < 1e-6  # running statistics
    assert len(GRAPHS) == 3


@pytest.mark.parametrize("recomputed", [False, True])
def test_training_evaluation_and_a_short_last_batch_are_all_compiled(caplog, recomputed):
    """Ten graphs of one function, where torch by itself stops at eight and goes on uncompiled."""

    class Kinds(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(block for width in (4, 6, 8, 10, 12) for block in StackModel(blocks=1).blocks)
            for block, width in zip(self.blocks, (4, 6, 8, 10, 12), strict=True):
                block.norm = nn.LayerNorm(width)
                block.expand, block.contract = nn.Linear(width, width), nn.Linear(width, width)

        def forward(self, x):
            return sum(block(x[:, : block.norm.normalized_shape[0]]).sum() for block in self.blocks)

    model = Kinds()
    if recomputed:
        checkpoint_blocks(model.blocks)
    compile_forwards(model.blocks, **COUNTING)
    x = torch.randn(8, 12)
    with caplog.at_level(logging.WARNING, logger="torch._dynamo"):
        for _ in range(2):
            model.train()
            model(x).backward()
            model.eval()
            with torch.no_grad():
                model(x)
        trained = len(GRAPHS)
        model.train()
        model(x[:5]).backward()
    assert trained == 10
    assert len(GRAPHS) == 15
    assert "recompile_limit" not in caplog.text


def test_a_short_last_batch_costs_one_graph_and_drops_no_sample():
    """Batches of 8, 8, 5: the size becomes a symbol, and later sizes take the same graph."""

    class Ragged(Stack):
        def build_data(self):
            return Data(train=points(21), shuffle=False)

    results = []
    for compile in (None, SETTING):
        watcher = Recorder()
        trainer = Ragged(batch_size=8, epochs=2, compile=compile, observers=[watcher], **QUIET)
        assert trainer.fit()["samples"] == 42
        results.append((state(trainer), [record["loss"] for record in watcher.steps]))
    assert len(GRAPHS) == 2
    assert largest_difference(results[0][0], results[1][0]) < 1e-5
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-6)


def test_after_the_second_size_every_size_takes_the_same_graph():
    torch.manual_seed(0)
    model = StackModel()
    compile_forwards(model.blocks, **COUNTING)
    made = []
    for size in (8, 5, 7, 3, 12):
        model(points()[0][:size]).sum().backward()
        made.append(len(GRAPHS))
    assert made == [1, 2, 2, 2, 2]


# ---- with checkpointing


def operations(graph):
    return [str(node.target) for node in graph.graph.nodes]


def test_checkpointed_blocks_are_really_compiled_and_recomputed():
    torch.manual_seed(0)
    plain, model = StackModel(blocks=3), StackModel(blocks=3)
    model.load_state_dict(plain.state_dict())
    checkpoint_blocks(model.blocks)
    compile_forwards(model.blocks, **COUNTING)
    x, _ = points()
    assert largest_difference(grads_of(model, x), grads_of(plain, x)) < 1e-6
    assert len(GRAPHS) == 1
    assert any("checkpoint" in operation for operation in operations(GRAPHS[0])), (
        "the recomputation is not in the graph"
    )


def test_block_compile_after_checkpointing_would_compile_nothing():
    """Why the forward is compiled and not the module: nothing is said, and no graph is made."""
    import functools

    model = StackModel()
    for block in model.blocks:
        block.forward = functools.partial(
            torch.utils.checkpoint.checkpoint, type(block).forward, block, use_reentrant=False
        )
        block.compile(backend="counting")
    model(points()[0]).sum().backward()
    assert GRAPHS == []


@pytest.mark.parametrize("order", [["activation_checkpointing", "compile"], ["compile", "activation_checkpointing"]])
def test_training_with_both_is_eager_training_whatever_the_order_in_the_config(order):
    settings = {"activation_checkpointing": "full", "compile": SETTING}
    trainer = Stack(batch_size=8, steps=4, optimizer="sgd", **{slot: settings[slot] for slot in order}, **QUIET)
    plain = Stack(batch_size=8, steps=4, optimizer="sgd", **QUIET)
    trainer.fit()
    plain.fit()
    assert len(GRAPHS) == 1
    assert largest_difference(state(trainer), state(plain)) < 1e-6
    assert list(trainer.model.state_dict()) == list(plain.model.state_dict())


def test_statistics_of_batch_norm_move_once_under_both():
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = StackModel(nn.BatchNorm1d)
        if compiled:
            checkpoint_blocks(model.blocks)
            compile_forwards(model.blocks, **COUNTING)
        model(points()[0]).sum().backward()
        results.append(dict(model.named_buffers()))
    assert len(GRAPHS) == 1
    assert results[1]["blocks.1.norm.num_batches_tracked"].item() == 1
    assert largest_difference(*results) < 1e-6


def test_the_mask_of_a_compiled_and_recomputed_dropout_is_the_same_in_forward_and_backward():
    class Dropped(nn.Module):
        def forward(self, x):
            return F.dropout(x, 0.5) * x

    block = Dropped()
    checkpoint_blocks([block])
    compile_forwards([block], **COUNTING)
    x = torch.ones(1000, requires_grad=True)
    output = block(x)
    torch.rand(17)
    output.sum().backward()
    assert len(GRAPHS) == 1
    assert torch.equal(output == 0, x.grad == 0)
    assert 400 < (x.grad == 0).sum() < 600


# ---- the strategy


def test_training_evaluation_and_their_switches_compile_no_more_graphs_than_kinds():
    class Evaluated(Restless):
        def build_data(self):
            return Data(train=points(), evaluation=points(16, seed=4))

    trainer = Evaluated(batch_size=8, steps=9, compile=SETTING, **QUIET)
    trainer.fit()
    assert len(GRAPHS) == 2  # training and evaluation; evaluated three times


def test_only_what_the_trainer_names_as_blocks_is_compiled():
    class Named(Stack):
        def blocks(self, model):
            return [model.head]

    Named(batch_size=8, steps=1, compile=SETTING, **QUIET).fit()
    assert len(GRAPHS) == 1
    assert [o for o in operations(GRAPHS[0]) if "gelu" in o] == []


def test_settings_reach_torch_compile(monkeypatch):
    seen = []
    monkeypatch.setattr(lazy.torch, "compile", lambda function, **settings: seen.append(settings) or function)
    compile_forwards(StackModel(blocks=1).blocks)
    compile_forwards(StackModel(blocks=1).blocks, mode="max-autotune", fullgraph=True, dynamic=False)
    assert seen == [
        {"backend": "inductor", "fullgraph": False, "dynamic": None},
        {"backend": "inductor", "mode": "max-autotune", "fullgraph": True, "dynamic": False},
    ]


def test_fullgraph_refuses_a_break_in_a_block_and_without_it_the_parts_are_compiled():
    class Breaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            x = self.linear(x)
            torch._dynamo.graph_break()
            return x.relu()

    x, _ = points()
    block = Breaks()
    compile_forwards([block], **COUNTING)
    block(x).sum().backward()
    assert len(GRAPHS) == 2
    torch.compiler.reset()  # or the parts would be taken from before
    block = Breaks()
    compile_forwards([block], backend="counting", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        block(x)


def test_an_unknown_mode_is_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match=r"compile\.mode"):
        Stack(batch_size=8, compile={"name": "blocks", "mode": "max-autotun"}, **QUIET)


def test_an_unknown_backend_is_refused_before_the_first_step():
    with pytest.raises(ConfigError, match=r"compile\.backend=inductr: .*did you mean 'inductor'"):
        Stack(batch_size=8, compile={"name": "blocks", "backend": "inductr"}, **QUIET)


@pytest.mark.slow
def test_inductor_trains_as_eager_code_does():
    results = []
    for compile in (None, "blocks"):
        watcher = Recorder()
        settings = {"activation_checkpointing": "full", "compile": compile, "optimizer": "sgd"}
        trainer = Stack(batch_size=8, steps=4, observers=[watcher], **settings, **QUIET)
        trainer.fit()
        results.append((state(trainer), [record["loss"] for record in watcher.steps]))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    assert largest_difference(results[0][0], results[1][0]) < 1e-5
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-5)


def test_an_error_of_the_compiler_says_how_to_train_without_and_where_compiled_code_is_kept(monkeypatch, tmp_path):
    import torch._inductor.compile_fx as inductor

    def fails(*_, **__):
        raise RuntimeError("planted")

    monkeypatch.setattr(inductor, "compile_fx", fails)
    torch.compiler.reset()
    watcher = Recorder()
    trainer = Stack(batch_size=8, steps=1, compile="blocks", run={"dir": str(tmp_path)}, observers=[watcher])
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        trainer.fit()
    note, of_the_batch = caught.value.__notes__
    assert of_the_batch.startswith("The batch of this step: ")
    assert note.startswith("compile=blocks failed; to train without it: compile=null. What was compiled is kept in ")
    assert f"{tmp_path}/.compile/torch" in note
    assert watcher.error is caught.value


def test_errors_of_the_model_get_no_advice_on_compiling():
    class Fails(Stack):
        def compute_loss(self, batch):
            raise ValueError("planted")

    with pytest.raises(ValueError, match="planted") as caught:
        Fails(batch_size=8, steps=1, compile={"name": "blocks", "backend": "aot_eager"}, **QUIET).fit()
    (note,) = caught.value.__notes__
    assert note.startswith("The batch of this step: ")


@pytest.mark.parametrize("setting", [{"cache": "false"}, {"artifacts": "true"}])
def test_a_path_that_reads_like_a_switch_is_refused(setting):
    (name,) = setting
    with pytest.raises(
        ConfigError, match=f"{name}=(true|false) would be a path of that name; give a path, or use {name}=null"
    ):
        CompileConfig(**setting)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "cudagraphs"])
def test_a_mode_that_the_backend_would_leave_aside_is_refused(backend):
    with pytest.raises(
        ConfigError, match=f"mode=max-autotune is for backend=inductor, and {backend} would leave it aside"
    ):
        CompileConfig(backend=backend, mode="max-autotune")


@pytest.mark.parametrize("name", ["blocks", "model"])
def test_a_model_that_the_user_compiled_has_no_break_by_us(name):
    class Own(Stack):
        def build_model(self):
            return torch.compile(super().build_model(), backend="aot_eager", fullgraph=True)

    torch.compiler.reset()
    watcher = Recorder()
    compile = {"name": name, "backend": "aot_eager", "strict": True, "reference_steps": 0}
    trainer = Own(batch_size=8, steps=3, compile=compile, observers=[watcher], **QUIET)
    told = trainer.fit()["compile"]
    assert (told["breaks"], told["fallbacks"]) == ([], [])
    assert told["graphs"] >= 1
    assert not any("were not called" in record["text"] for record in watcher.remarks)
    plain = Stack(batch_size=8, steps=3, **QUIET)
    plain.fit()
    weights = {key.removeprefix("_orig_mod."): value for key, value in state(trainer).items()}
    assert largest_difference(weights, state(plain)) == 0.0
