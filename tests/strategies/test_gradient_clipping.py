"""gradient_clipping against torch.nn.utils, bit for bit, and against the formula of adaptive clipping."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fasttrain import ConfigError
from fasttrain.core.plan import Plan
from fasttrain.core.strategy import Context
from fasttrain.optim.norms import total_norm
from fasttrain.strategies import gradient_clipping
from fasttrain.strategies.gradient_clipping import (
    Adaptive,
    AdaptiveConfig,
    Norm,
    NormConfig,
    Value,
    ValueConfig,
    clip_adaptively,
    clip_by_norm,
    clip_by_value,
)
from fasttrain.strategies.nonfinite import Skip
from fasttrain.strategies.precision import Fp16, Fp16Config
from tests.helpers import QUIET, Recorder, largest_difference, state
from tests.stack import Stack, StackModel, batches_of, gradients

CONTEXT = Context(device=torch.device("cpu"))


def with_gradients(scale=1.0):
    torch.manual_seed(0)
    model = StackModel()
    x, y = batches_of()[0]
    (F.cross_entropy(model(x), y) * scale).backward()
    model.embed.bias.grad = None  # a parameter that no loss reaches
    return model


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf")])
@pytest.mark.parametrize("max_norm", [1e-3, 0.5, 1e6])
def test_clipping_is_torchs_to_the_bit(max_norm, norm_type):
    model = with_gradients()
    plain = copy.deepcopy(model)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        theirs.grad = None if ours.grad is None else ours.grad.clone()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
    norm = clip_by_norm(list(model.parameters()), max_norm, norm_type)
    assert torch.equal(norm, expected)
    assert len(gradients(model)) == 15
    assert largest_difference(gradients(model), gradients(plain)) == 0.0


def test_gradients_below_the_bound_keep_their_bits():
    model = with_gradients()
    before = gradients(model)
    clip_by_norm(list(model.parameters()), 1e6)
    assert largest_difference(before, gradients(model)) == 0.0


def test_a_training_with_clipping_is_torchs_to_the_bit():
    torch.manual_seed(0)
    model = StackModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    norms, clipped = [], 0
    for x, y in batches_of() * 2:
        F.cross_entropy(model(x), y).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.7).item())
        clipped += norms[-1] > 0.7
        optimizer.step()
        optimizer.zero_grad()
    assert 0 < clipped < 6

    class Ordered(Stack):
        def build_data(self):
            data = super().build_data()
            return type(data)(train=data.train, shuffle=False)

    clipping = {"name": "norm", "max_norm": 0.7}
    settings = {"batch_size": 8, "steps": 6, "optimizer": {"name": "sgd", "lr": 0.1}, "gradient_clipping": clipping}
    trainer = Ordered(**settings, observers=[watcher := Recorder()], **QUIET)
    trainer.fit()
    assert [record["grad_norm"] for record in watcher.steps] == norms  # the norm before it was clipped
    assert largest_difference(state(trainer), model.state_dict()) == 0.0


def test_clipping_comes_after_the_loss_scale_was_undone():
    """Gradient (3, 4) under a scale of 1024: the norm is 5 and the update 1, not 5120 and 0.001."""
    weight = nn.Parameter(torch.zeros(2))
    model = nn.Module()
    model.weight = weight
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    clip = Norm(NormConfig(max_norm=1.0), CONTEXT)
    plan = Plan([clip, Fp16(Fp16Config(init_scale=1024.0), CONTEXT)], CONTEXT)
    plan.scale((weight * torch.tensor([3.0, 4.0])).sum()).backward()
    plan.update(optimizer, plan.gradients(model, optimizer))
    assert plan.report()["grad_norm"].item() == 5.0
    assert (-weight.detach()).tolist() == pytest.approx([0.6, 0.8], rel=1e-5)


def test_only_what_the_optimizer_trains_counts():
    model = with_gradients()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    clip = Norm(NormConfig(max_norm=1e-3), CONTEXT)
    before = gradients(model)
    clip.gradients(model, optimizer)
    after = gradients(model)
    assert torch.equal(clip.norm, nn.utils.get_total_norm([before["head.weight"], before["head.bias"]]))
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"head.weight", "head.bias"}


def test_no_gradients_have_the_norm_zero():
    clip = Norm(None, CONTEXT)
    assert clip.report() == {}
    assert total_norm([]).item() == 0.0
    assert total_norm([nn.Parameter(torch.ones(2))]).item() == 0.0
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    clip.gradients(None, optimizer)
    assert clip.report()["grad_norm"].item() == 0.0


def test_microbatches_are_clipped_together():
    norms = []
    for num in (1, 4):
        accumulation = {"name": "microbatches", "num": num}
        watcher = Recorder()
        Stack(
            batch_size=8, steps=2, gradient_clipping="norm", accumulation=accumulation, observers=[watcher], **QUIET
        ).fit()
        norms.append([record["grad_norm"] for record in watcher.steps])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan")])
def test_a_bound_that_is_none_is_refused(max_norm):
    with pytest.raises(ConfigError, match="must be above 0; to clip nothing use null"):
        NormConfig(max_norm=max_norm)


# ---- value


@pytest.mark.parametrize("max_value", [1e-4, 0.05, 1e6])
def test_clipping_by_value_is_torchs_to_the_bit(max_value):
    model = with_gradients()
    plain = copy.deepcopy(model)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        theirs.grad = None if ours.grad is None else ours.grad.clone()
    nn.utils.clip_grad_value_(plain.parameters(), max_value)
    clip_by_value(list(model.parameters()), max_value)
    assert len(gradients(model)) == 15
    assert largest_difference(gradients(model), gradients(plain)) == 0.0
    assert max(g.abs().max().item() for g in gradients(model).values()) <= max_value * (1 + 1e-6)


@pytest.mark.parametrize("nonfinite", [None, "skip"])
def test_a_training_with_clipping_by_value_is_torchs_to_the_bit(nonfinite):
    torch.manual_seed(0)
    model = StackModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    norms = []
    for x, y in batches_of() * 2:
        F.cross_entropy(model(x), y).backward()
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
        nn.utils.clip_grad_value_(model.parameters(), 0.02)
        optimizer.step()
        optimizer.zero_grad()

    class Ordered(Stack):
        def build_data(self):
            return type(super().build_data())(train=super().build_data().train, shuffle=False)

    clipping = {"name": "value", "max_value": 0.02}
    settings = {"optimizer": {"name": "sgd", "lr": 0.1}, "gradient_clipping": clipping, "nonfinite": nonfinite}
    trainer = Ordered(batch_size=8, steps=6, **settings, observers=[watcher := Recorder()], **QUIET)
    trainer.fit()
    assert [record["grad_norm"] for record in watcher.steps] == norms  # the norm before it was clipped
    assert largest_difference(state(trainer), model.state_dict()) == 0.0


def test_the_norm_is_taken_for_the_log_alone(monkeypatch):
    calls = []
    monkeypatch.setattr(gradient_clipping, "total_norm", lambda *a: (calls.append(1), total_norm(*a))[1])
    for name in ("value", "adaptive"):
        calls.clear()
        settings = {"run": {"dir": None}, "log": {"every": 3}, "gradient_clipping": name}
        Stack(batch_size=8, steps=6, observers=[watcher := Recorder()], **settings).fit()
        assert len(calls) == 2
        assert len([record["grad_norm"] for record in watcher.steps if record["grad_norm"] > 0]) == 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("clip", [Value(ValueConfig(max_value=0.5)), Adaptive(AdaptiveConfig(last_linear=True))])
def test_what_was_not_finite_is_still_seen_after_clipping(clip, bad):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    plan = Plan([clip, Skip(None, CONTEXT)], CONTEXT)
    plan.started(model, optimizer, 0)
    for value, expected in ((1.0, 0.0), (bad, 1.0)):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        model.weight.grad[0, 1] = value
        assert plan.gradients(model, optimizer).item() == expected


@pytest.mark.parametrize("max_value", [0.0, float("nan")])
def test_a_value_that_is_no_bound_is_refused(max_value):
    with pytest.raises(ConfigError, match="must be above 0; to clip nothing use null"):
        ValueConfig(max_value=max_value)


# ---- adaptive


def by_formula(weight, gradient, clipping, eps):
    """Equation 2 of the paper, a unit at a time."""
    if weight.dim() <= 1:
        weight, gradient = weight.reshape(1, -1), gradient.reshape(1, -1)
    clipped = gradient.clone()
    for unit in range(weight.shape[0]):
        bound = clipping * max(weight[unit].norm().item(), eps)
        if gradient[unit].norm().item() > bound:
            clipped[unit] = gradient[unit] * (bound / gradient[unit].norm().item())
    return clipped


@pytest.mark.parametrize("clipping", [1e-3, 0.1, 1e3])
def test_adaptive_clipping_is_the_plain_formula_unit_by_unit(clipping):
    torch.manual_seed(0)
    shapes = [(4, 3), (5, 2, 3, 3), (7,), (), (3, 1)]
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    parameters[0].data[1] = 0.0  # a unit of zeros may move
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    parameters.append(nn.Parameter(torch.ones(2)))  # no loss reaches it
    before = [p.grad.clone() for p in parameters[:-1]]
    clip_adaptively(parameters, clipping, eps=1e-3)
    for parameter, gradient in zip(parameters, before, strict=False):
        expected = by_formula(parameter.detach(), gradient, clipping, 1e-3).reshape(gradient.shape)
        assert torch.allclose(parameter.grad, expected, rtol=1e-5, atol=0)
        if clipping == 1e3:
            assert torch.equal(parameter.grad, gradient) or parameter is parameters[0]
    assert parameters[-1].grad is None
    assert 0 < parameters[0].grad[1].norm().item() <= clipping * 1e-3 * 1.0001


def test_the_last_linear_layer_is_left_alone_unless_asked_for():
    for last_linear in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4), nn.LayerNorm(4))
        x, y = batches_of()[0]
        F.cross_entropy(model(x), y).backward()
        before = gradients(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = Plan([Adaptive(AdaptiveConfig(clipping=1e-4, last_linear=last_linear))], CONTEXT)
        plan.started(model, optimizer, 0)
        plan.gradients(model, optimizer)
        kept = {name for name, value in gradients(model).items() if torch.equal(value, before[name])}
        assert kept == (set() if last_linear else {"2.weight", "2.bias"})


def test_adaptive_clipping_refuses_to_clip_nothing():
    model = nn.Linear(2, 2)
    plan = Plan([Adaptive(None, CONTEXT)], CONTEXT)
    with pytest.raises(ConfigError, match=r"set gradient_clipping\.last_linear=true"):
        plan.started(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)
    with pytest.raises(ConfigError, match=r"gradient_clipping\.clipping=0\.0 must be above 0"):
        AdaptiveConfig(clipping=0.0)


@pytest.mark.parametrize("name", ["value", "adaptive"])
def test_other_clippings_come_after_the_loss_scale_was_undone(name):
    results = []
    for precision in ("fp16", None):
        weight = nn.Parameter(torch.ones(2))
        model = nn.Module()
        model.weight = weight
        optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
        clip = {"value": Value(ValueConfig(max_value=1.0)), "adaptive": Adaptive(AdaptiveConfig(clipping=0.5))}[name]
        plan = Plan([clip, *([Fp16(Fp16Config(init_scale=1024.0), CONTEXT)] if precision else [])], CONTEXT)
        plan.started(model, optimizer, 0)
        plan.scale((weight * torch.tensor([3.0, 4.0])).sum()).backward()
        plan.update(optimizer, plan.gradients(model, optimizer))
        results.append((1 - weight.detach()).tolist())
    assert results[0] == results[1]
    assert results[0] == pytest.approx([1.0, 1.0] if name == "value" else [3 / 5 * 0.5 * 2**0.5, 4 / 5 * 0.5 * 2**0.5])
