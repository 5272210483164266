"""float8: which layers are swapped, what they compute, and how far that is from the run without. Emulated on the CPU."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fasttrain import ConfigError, lazy
from fasttrain.checkpoint import newest
from fasttrain.config.matrix import clash_of
from fasttrain.core.strategy import Context
from fasttrain.nn.full_precision import run_in_float32
from fasttrain.strategies.float8 import Float8Config, Rowwise, Tensorwise, linears_to_swap, swap_linears
from tests.helpers import QUIET, Recorder, largest_difference, points, state
from tests.stack import Stack, StackModel

SMALL = {"emulate": True, "min_features": 8, "multiple_of": 8}
BLOCKS = ["blocks.0.expand", "blocks.0.contract", "blocks.1.expand", "blocks.1.contract"]
FP8 = torch.float8_e4m3fn


def trained(name, precision=None, steps=30, cls=Stack, config=SMALL, **settings):
    watcher = Recorder()
    trainer = cls(
        batch_size=8,
        steps=steps,
        precision=precision,
        float8=None if name is None else {"name": name, **config},
        optimizer={"name": "adamw", "lr": 0.01},
        observers=[watcher],
        **settings,
        **QUIET,
    )
    trainer.fit()
    return trainer, [record["loss"] for record in watcher.steps], watcher


def float8_layers(model):
    return [name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"]


# ---- which layers


def test_the_linear_layers_of_the_blocks_are_swapped_in_place_and_names_stay():
    torch.manual_seed(0)
    plain = StackModel()
    trainer, _, watcher = trained("tensorwise", steps=1)
    assert float8_layers(trainer.model) == BLOCKS
    assert list(trainer.plan.strategies["float8"].swapped) == BLOCKS
    assert list(trainer.model.state_dict()) == list(plain.state_dict())
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert watcher.run.notes[:2] == (
        f"float8=tensorwise: 4 linear layers in float8 ({', '.join(BLOCKS)}); 2 outside of the blocks stay",
        "float8=tensorwise: emulated: the numbers are float8's, the time is not",
    )


def test_modules_stay_the_same_objects_with_their_hooks():
    model = StackModel()
    layer = model.blocks[0].expand
    weight, seen = layer.weight, []
    layer.register_forward_hook(lambda m, args, out: seen.append(m))
    assert swap_linears([layer], "rowwise", emulate=True) == 1
    model(points()[0])
    assert model.blocks[0].expand is layer
    assert layer.weight is weight
    assert seen == [layer]


def test_what_does_not_fit_stays_and_is_counted_by_its_reason():
    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    replaced = nn.Linear(32, 32)
    run_in_float32([replaced], "cpu")
    model = nn.ModuleDict(
        {
            "fits": nn.Linear(32, 64),
            "small": nn.Linear(32, 8),
            "odd": nn.Linear(32, 36),
            "own": Own(32, 32),
            "replaced": replaced,
            "excluded": nn.Linear(32, 32),
            "conv": nn.Conv2d(16, 16, 1),
        }
    )
    chosen, reasons = linears_to_swap(model.named_modules(), Float8Config(min_features=16), [model["excluded"]])
    assert list(chosen) == ["fits"]
    assert reasons == {
        "with fewer than 16 features": 1,
        "whose features are no multiple of 16": 1,
        "with a forward of their own": 2,
        "excluded": 1,
    }


def test_exclude_and_within_choose_and_what_precision_keeps_in_float32_stays():
    whole = trained("tensorwise", steps=1, config={**SMALL, "within": "model", "exclude": ["head"]})[0]
    assert float8_layers(whole.model) == ["embed", *BLOCKS]
    first = trained("tensorwise", steps=1, config={**SMALL, "exclude": ["blocks.0", "*.contract"]})[0]
    assert float8_layers(first.model) == ["blocks.1.expand"]
    exact = trained("tensorwise", {"name": "bf16", "exclude": ["blocks.1"]}, steps=1)[0]
    assert float8_layers(exact.model) == BLOCKS[:2]
    with pytest.raises(ConfigError, match=r"float8=tensorwise exclude=haed matches no module.*'head'"):
        trained("tensorwise", steps=1, config={**SMALL, "exclude": ["haed"]})


def test_a_model_in_which_nothing_fits_is_refused_with_the_reasons():
    with pytest.raises(
        ConfigError,
        match=r"no linear layer of StackModel can be swapped \(2 outside of the blocks, 4 with fewer than 512",
    ):
        trained("tensorwise", steps=1, config={"emulate": True})


def test_sizes_that_no_kernel_takes_are_refused_unless_emulated():
    with pytest.raises(ConfigError, match=r"multiple of 16; use 16, or emulate=true"):
        Float8Config(multiple_of=8)
    assert Float8Config(multiple_of=32).multiple_of == 32
    with pytest.raises(ConfigError, match="1 or more"):
        Float8Config(min_features=0)


# ---- the device, the package, other strategies


@pytest.mark.parametrize("capability", [None, (8, 0), (8, 6)])
@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_a_device_without_float8_is_refused_with_what_to_write(monkeypatch, name, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    strategy = {"tensorwise": Tensorwise, "rowwise": Rowwise}[name]
    device = torch.device("cpu") if capability is None else torch.device("cuda", 0)
    with pytest.raises(ConfigError) as refused:
        strategy(Float8Config(), Context(device=device)).model(StackModel())
    where = "cpu" if capability is None else f"cuda:0 (compute capability 8.{capability[1]})"
    assert str(refused.value) == (
        f"float8={name}: {where} has no float8 products (CUDA devices have them from compute capability 8.9 on); use "
        "float8=null, or emulate=true to see what float8 does to a loss, slowly."
    )


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0)])
def test_ada_and_later_are_taken_and_a_run_without_compile_is_told_that_it_does_not_pay(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    config = Float8Config(min_features=16)
    for compile in ({}, {"compile": "blocks"}):
        strategy = Tensorwise(config, Context(device=torch.device("cuda", 0), strategies=compile))
        model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(2)])
        strategy._context = Context(
            device=torch.device("cuda", 0), strategies=compile, find_blocks=lambda m: list(m.children())
        )
        strategy.model(model)
        assert float8_layers(model) == ["0.0", "1.0"]
        assert any("use compile=blocks" in note for note in strategy.notes()) is not bool(compile)


def test_torchao_is_asked_for_by_name_where_it_is_missing(monkeypatch):
    def missing(package):
        raise ModuleNotFoundError(package, name="torchao")

    monkeypatch.setattr(lazy.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"float8=rowwise needs the package 'torchao.float8'.*fasttrain\[float8\]"):
        swap_linears([nn.Linear(16, 16)], "rowwise")


def test_rowwise_wants_bfloat16_around_it_and_tensorwise_goes_with_all():
    refused = {
        p
        for p in ("fp32", "tf32", "fp16", "bf16", "bf16_true", "auto")
        if clash_of(("float8", "rowwise"), ("precision", p))
    }
    assert refused == {"fp32", "tf32", "fp16", "auto"}
    with pytest.raises(ConfigError, match=r"float8=rowwise cannot be used with precision=null.*use precision=bf16"):
        trained("rowwise", steps=1)
    assert not any(clash_of(("float8", "tensorwise"), ("precision", p)) for p in ("fp32", "fp16", "bf16", "bf16_true"))


# ---- numbers


def rounded(x, dtype):
    """A tensor as float8 with one scale holds it, written by hand."""
    scale = torch.finfo(dtype).max / x.abs().max().double().clamp(min=1e-12)
    scale = scale.float()
    return (x * scale).clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype).float() / scale


def test_tensorwise_is_float8_written_by_hand():
    torch.manual_seed(0)
    layer, x = nn.Linear(32, 16, bias=False), torch.randn(8, 32, requires_grad=True)
    swapped = copy.deepcopy(layer)
    swap_linears([swapped], "tensorwise", emulate=True)
    output = swapped(x)
    xq, wq = rounded(x.detach(), FP8), rounded(layer.weight.detach(), FP8)
    assert torch.allclose(output, xq @ wq.T, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(output, layer(x), rtol=1e-4, atol=1e-4)
    upstream = torch.randn(8, 16)
    output.backward(upstream)
    gq = rounded(upstream, torch.float8_e5m2)
    assert torch.allclose(swapped.weight.grad, gq.T @ xq, rtol=1e-5, atol=1e-5)
    assert torch.allclose(x.grad, gq @ wq, rtol=1e-5, atol=1e-5)


def gradients_of_a_step(name, precision):
    trainer = Stack(
        batch_size=24,
        steps=1,
        precision=precision,
        float8=None if name is None else {"name": name, **SMALL},
        **QUIET,
    )
    x, y = points()
    with trainer.plan.forward():
        loss = F.cross_entropy(trainer.model(x), y)
    loss.backward()
    return {n: p.grad.float() for n, p in trainer.model.named_parameters()}, loss.item()


@pytest.mark.parametrize(("name", "bound"), [("tensorwise", 0.12), ("rowwise", 0.08)])
@pytest.mark.parametrize("precision", ["bf16", "bf16_true"])
def test_gradients_and_losses_stay_within_the_tolerance_that_the_page_states(name, bound, precision):
    ours, loss = gradients_of_a_step(name, precision)
    exact, expected = gradients_of_a_step(None, None)
    assert loss == pytest.approx(expected, rel=0.01)
    off = {
        n: ((ours[n] - exact[n]).norm() / exact[n].norm()).item() for n in exact if "expand.w" in n or "contract.w" in n
    }
    assert len(off) == 4
    assert 0.001 < max(off.values()) <= bound, off
    losses, reference = trained(name, precision)[1], trained(None, precision)[1]
    assert losses == pytest.approx(reference, rel=0.08)
    assert losses != reference


def test_a_checkpoint_goes_on_bit_for_bit_and_loads_without_float8(tmp_path):
    settings = {
        "batch_size": 8,
        "float8": {"name": "tensorwise", **SMALL},
        "precision": "bf16",
        "run": {"dir": str(tmp_path), "name": "a", "id": "b"},
    }
    Stack(**settings, steps=3).fit()
    resumed = Stack(**settings, steps=6, resume=str(tmp_path / "a" / "b"))
    resumed.fit()
    straight = Stack(**{**settings, "run": {"dir": None}}, steps=6)
    straight.fit()
    assert largest_difference(state(resumed), state(straight)) == 0.0
    plain = Stack(**{**settings, "float8": None, "run": {"dir": None}}, steps=6)
    plain.restore(newest(tmp_path / "a" / "b").path)
    assert largest_difference(state(plain), state(resumed)) == 0.0
    assert float8_layers(plain.model) == []


def test_compiled_and_recomputed_blocks_give_the_same_numbers():
    torch.compiler.reset()
    eager = trained("tensorwise", "bf16_true", steps=4)[1]
    assert trained("tensorwise", "bf16_true", steps=4, activation_checkpointing="full")[1] == eager
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        compiled = trained("tensorwise", "bf16_true", steps=4, compile={"name": "blocks", "backend": "aot_eager"})[1]
    torch.compiler.reset()
    assert compiled == pytest.approx(eager, rel=1e-2)
