"""gradient_clipping against torch.nn.utils.clip_grad_norm_, bit for bit."""

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
from fasttrain.strategies.gradient_clipping import Norm, NormConfig, clip_by_norm
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
