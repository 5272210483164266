"""Reported faults of bf16 support, TensorFloat-32 defaults and layouts, each kind by the name of its case."""

# The names of the cases are written in capitals.

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from fasttrain.checkpoint import newest
from fasttrain.core.float32 import fp32_state, own_fp32_precision
from fasttrain.core.strategy import Context
from fasttrain.distributed.world import World
from fasttrain.nn.layouts import channels_last, is_channels_last, lost_layouts, lost_when_compiled, to_channels_last
from fasttrain.strategies.precision import Auto, Bf16
from fasttrain.trainer.setup import settled
from tests.helpers import QUIET, Mlp, Recorder
from tests.stack import Stack, StackModel
from tests.strategies.test_memory_format import Picture, Pictures, images


def resolved_on(device, precision):
    """The precision that a config means on a device, as the constructor settles it."""
    trainer = Stack(batch_size=8, steps=1, **QUIET)
    asked = replace(trainer.resolved, names={"precision": precision}, strategies={"precision": Auto.Config()})
    return settled(asked, World(device=device))


@pytest.mark.parametrize(("capability", "name"), [((7, 5), "fp16"), ((8, 0), "bf16")])
def test_BF16_1_auto_takes_fp16_with_a_scaler_on_7_5_and_bf16_on_8_0(monkeypatch, capability, name):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    taken = resolved_on(torch.device("cuda", 0), "auto")
    assert taken.names["precision"] == name
    context = Context(device=torch.device("cuda", 0))
    strategy = taken.classes()["precision"](taken.strategies["precision"], context)
    assert hasattr(type(strategy), "scaler") is (name == "fp16")
    assert strategy.dtypes().compute == {"fp16": torch.float16, "bf16": torch.bfloat16}[name]


def test_BF16_1_bf16_by_name_runs_on_7_5_with_a_warning_of_emulation(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    with pytest.warns(UserWarning, match=r"compute capability 7\.5\) has no bfloat16 in hardware.*torch emulates it"):
        Bf16(None, Context(device=torch.device("cuda", 0))).model(StackModel())


def test_BF16_2_emulation_is_not_counted(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 0))
    assert torch.cuda.is_bf16_supported()
    taken = resolved_on(torch.device("cuda", 0), "auto")
    assert taken.names["precision"] == "fp16"
    assert "and no bfloat16" in taken.reasons["precision"]


MATMUL, CONV = ("cuda", "matmul"), ("cuda", "conv")


@pytest.fixture
def flags():
    own_fp32_precision()
    before = fp32_state()
    yield before
    own_fp32_precision()
    assert fp32_state() == before


@pytest.fixture
def ampere(monkeypatch):
    """A model on the CPU whose strategies are told of an Ampere card."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))

    class OnAmpere(Mlp):
        def context(self):
            return replace(super().context(), device=torch.device("cuda", 0))

    return OnAmpere


@pytest.mark.parametrize(
    ("setting", "matmul", "conv", "said"),
    [
        (None, "none", "tf32", "TensorFloat-32 is off in matmul, on in cuDNN"),
        ("tf32", "tf32", "tf32", "TensorFloat-32 is on in matmul, on in cuDNN"),
        ("fp32", "ieee", "none", "TensorFloat-32 is off in matmul, off in cuDNN"),
    ],
)
def test_TF32_1_left_out_leaves_the_flags_and_a_name_sets_both_and_the_head_says_so(
    flags, ampere, capsys, setting, matmul, conv, said
):
    settings = {} if setting is None else {"precision": setting}
    watcher = Recorder()
    trainer = ampere(batch_size=8, steps=1, observers=[watcher], **settings, **QUIET)
    now = fp32_state()
    assert (now[MATMUL], now[CONV]) == (matmul, conv)
    assert torch.get_float32_matmul_precision() == ("high" if setting == "tf32" else "highest")
    assert torch.backends.cudnn.allow_tf32 is (setting != "fp32")
    if setting is None:
        assert now == flags
    trainer.fit()
    assert watcher.run.notes[-1] == said
    assert said in capsys.readouterr().out


def test_TF32_1_nothing_is_said_of_it_where_no_device_has_it():
    watcher = Recorder()
    Mlp(batch_size=8, steps=1, observers=[watcher], **QUIET).fit()
    assert not any("TensorFloat-32" in note for note in watcher.run.notes)


def test_TF32_3_importing_fasttrain_leaves_torch_as_it_was():
    code = """
import random, warnings, torch

def flags():
    return (torch.backends.fp32_precision, torch.backends.cuda.matmul.fp32_precision, torch.get_float32_matmul_precision(),
            torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.benchmark, torch.get_default_dtype(),
            torch.initial_seed(), torch.get_rng_state().sum().item(), hash(random.getstate()), list(warnings.filters))

before = flags()
import fasttrain
from fasttrain import Trainer, Data, ConfigError
assert flags() == before, (before, flags())
print("same")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("same\n", 0), done.stderr


def strides(model):
    """Whether the input of each convolution is channels_last, in the order of the forward; hooks of the test's own."""
    seen = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_pre_hook(
                lambda m, args, name=name: seen.update({name: args[0].is_contiguous(memory_format=torch.channels_last)})
            )
    return seen


def loses_the_layout_of_relu():
    """A compiler backend that takes relu apart into what forgets its input's layout, as in pytorch/pytorch#197109."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def decomposed(x):
        return torch.ops.aten.clone.default(torch.clamp(x, min=0), memory_format=torch.contiguous_format)

    return aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
        decompositions={torch.ops.aten.relu.default: decomposed},
    )


def test_CHANNELS_LAST_1_all_convolutions_get_channels_last_in_eager_and_a_report_lists_what_compiled_differs_in():
    torch.compiler.reset()
    model, x = Picture(), to_channels_last(images()[0])
    assert channels_last(model) == 4
    assert lost_layouts(model, x) == []
    assert lost_when_compiled(model, x, backend="aot_eager") == []
    lost = lost_when_compiled(model, x, backend=loses_the_layout_of_relu())
    assert [entry.module for entry in lost] == ["blocks.0.3", "blocks.1.3", "blocks.2.3"]
    assert lost[0].where == "compiled code between stem and blocks.0.3"
    seen = strides(model)
    model(x)
    assert seen == dict.fromkeys(["stem", "blocks.0.3", "blocks.1.3", "blocks.2.3"], True)


@pytest.mark.parametrize("by", ["resume", "restore", "assignment"])
def test_CHANNELS_LAST_3_weights_are_channels_last_after_a_resume_and_so_are_the_inputs_of_the_first_step(tmp_path, by):
    settings = {
        "batch_size": 8,
        "memory_format": "channels_last",
        "optimizer": {"name": "sgd", "lr": 0.05},
        "run": {"dir": str(tmp_path), "name": "a", "id": "b"},
    }
    Pictures(**settings, steps=2).fit()
    seen = []

    class Looks(Pictures):
        def inputs(self, batch):
            seen.append(batch[0].is_contiguous(memory_format=torch.channels_last))
            return (batch[0],)

    path = newest(tmp_path / "a" / "b").path
    if by == "resume":
        trainer = Looks(**settings, steps=3, resume=str(tmp_path / "a" / "b"))
        trainer.fit()
    else:
        trainer = Looks(**{**settings, "run": {"dir": None}}, steps=3)
        if by == "assignment":
            for parameter in trainer.model.parameters():
                parameter.data = parameter.data.contiguous()
            assert trainer.model.stem.weight.is_contiguous()
        trainer.restore(path)
        trainer.train_step(next(trainer.feed.training(trainer.task, trainer.plan)))
    weights = [m.weight for m in trainer.model.modules() if isinstance(m, torch.nn.Conv2d)]
    assert [is_channels_last(weight) for weight in weights] == [True] * 4
    assert seen == [True]


def test_CHANNELS_LAST_3_slices_of_channels_and_stacked_means_lose_it_and_are_named():
    class Slices(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(4, 8, 3)

        def forward(self, x):
            return self.second(self.first(x)[:, :4])

    model = Slices()
    channels_last(model)
    found = lost_layouts(model, to_channels_last(images()[0]))
    assert found == [("second", "the code of the model between first and second")]
