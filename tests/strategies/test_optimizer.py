"""optimizer against torch's own, bit for bit; groups, fused kernels, and steps that are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fasttrain import ConfigError, Data
from fasttrain.optim.guarded import give_momentum_buffers, obeys_found_inf, step_unless
from fasttrain.strategies.optimizer import AdamWConfig, SgdConfig, adamw, named_groups, sgd
from tests.helpers import QUIET, Recorder, largest_difference, points, state
from tests.stack import Stack, StackModel, batches_of


class Ordered(Stack):
    def build_data(self):
        return Data(train=points(), shuffle=False)


def plain_loop(make, steps=6):
    torch.manual_seed(0)
    model = StackModel()
    optimizer = make(model)
    for x, y in (batches_of() * steps)[:steps]:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def by_dimension(model, weight_decay):
    """Groups as one writes them by hand: matrices decay, the rest does not."""
    decays = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": decays, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]


TORCHS = {
    "sgd": (
        {"name": "sgd", "lr": 0.1, "momentum": 0.8, "weight_decay": 0.01, "nesterov": True},
        lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.8, weight_decay=0.01, nesterov=True, fused=True),
    ),
    "sgd without momentum": (
        {"name": "sgd", "lr": 0.1, "momentum": 0.0},
        lambda m: torch.optim.SGD(m.parameters(), 0.1, fused=True),
    ),
    "sgd, not fused": (
        {"name": "sgd", "lr": 0.1, "fused": False},
        lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, fused=False),
    ),
    "adamw": ({"name": "adamw"}, lambda m: torch.optim.AdamW(m.parameters(), fused=True)),
    "adamw, other settings": (
        {"name": "adamw", "lr": 0.02, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.2, "decay_norms": False},
        lambda m: torch.optim.AdamW(by_dimension(m, 0.2), 0.02, betas=(0.8, 0.95), eps=1e-6, fused=True),
    ),
    "adamw, not fused": (
        {"name": "adamw", "lr": 0.02, "fused": False},
        lambda m: torch.optim.AdamW(m.parameters(), 0.02, fused=False),
    ),
}


@pytest.mark.parametrize("case", TORCHS)
def test_training_is_torchs_optimizer_to_the_bit(case):
    setting, make = TORCHS[case]
    model, optimizer = plain_loop(make)
    trainer = Ordered(batch_size=8, steps=6, optimizer=setting, **QUIET)
    trainer.fit()
    assert largest_difference(state(trainer), model.state_dict()) == 0.0
    assert type(trainer.optimizer) is type(optimizer)
    assert len(trainer.optimizer.state) == len(optimizer.state) == (0 if "without" in case else 16)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_defaults_are_torchs_own_but_for_the_rate_and_momentum_of_sgd(name):
    config, kind = {"sgd": (SgdConfig(), torch.optim.SGD), "adamw": (AdamWConfig(), torch.optim.AdamW)}[name]
    optimizer = {"sgd": sgd, "adamw": adamw}[name](StackModel(), config)
    theirs = kind([nn.Parameter(torch.ones(1))]).defaults
    differs = {key for key, value in theirs.items() if optimizer.defaults[key] != value}
    assert differs == {"sgd": {"lr", "momentum", "fused"}, "adamw": {"fused"}}[name]


def test_weight_decay_leaves_out_what_has_one_dimension_if_asked():
    """With gradients of zero, matrices shrink by lr * decay and nothing else moves: also a norm written by the user."""

    class RmsNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

    model = nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4), nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), RmsNorm()])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = adamw(model, AdamWConfig(lr=0.1, weight_decay=0.1, decay_norms=False))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"0.weight", "2.weight"}
    for name in moved:
        assert torch.allclose(model.get_parameter(name), before[name] * 0.99)
    assert [group["param_names"] for group in optimizer.param_groups] == [
        ["0.weight", "2.weight"],
        ["0.bias", "1.weight", "1.bias", "2.bias", "3.weight", "3.bias", "4.scale"],
    ]


def test_frozen_parameters_and_those_without_a_gradient_are_left_alone():
    model = StackModel()
    model.embed.requires_grad_(False)
    optimizer = adamw(model, AdamWConfig(lr=0.1, weight_decay=0.5))
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert len(names) == 14
    assert not [name for name in names if name.startswith("embed")]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.head.weight.grad = torch.ones_like(model.head.weight)
    optimizer.step()
    assert [n for n, p in model.named_parameters() if not torch.equal(p, before[n])] == ["head.weight"]


def test_a_parameter_with_two_names_is_updated_once():
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    model["b"].weight = model["a"].weight
    (group,) = named_groups(model, 0.0, True)
    assert group["param_names"] == ["a.weight"]


def test_a_model_in_which_nothing_trains_is_refused():
    class Frozen(Stack):
        def build_model(self):
            return super().build_model().requires_grad_(False)

    with pytest.raises(ConfigError, match="StackModel has no parameter that trains; set requires_grad on some"):
        Frozen(batch_size=8, **QUIET)


def test_fused_is_taken_where_there_is_a_kernel_and_refused_where_not():
    assert all(group["fused"] for group in adamw(StackModel(), AdamWConfig()).param_groups)
    assert not adamw(StackModel(), AdamWConfig(fused=False)).param_groups[0]["fused"]
    with torch.device("meta"):
        model = StackModel()
    assert not sgd(model, SgdConfig()).param_groups[0]["fused"]
    with pytest.raises(ConfigError, match="optimizer=sgd fused=true: no fused kernel for meta; leave it out"):
        sgd(model, SgdConfig(fused=True))


MAKE = {
    "sgd": lambda p, fused: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=fused),
    "adam": lambda p, fused: torch.optim.Adam(p, lr=0.1, fused=fused),
    "adamw": lambda p, fused: torch.optim.AdamW(p, lr=0.1, fused=fused),
    "adagrad": lambda p, fused: torch.optim.Adagrad(p, lr=0.1, fused=fused),
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", MAKE)
def test_a_refused_step_changes_neither_weights_nor_state(monkeypatch, name, fused):
    """Fused optimizers obey on the device; for others one value a step is read."""
    torch.manual_seed(0)
    model = StackModel()
    optimizer = MAKE[name](model.parameters(), fused)
    if name == "sgd" and fused:
        give_momentum_buffers(optimizer)
    reads = []
    item = torch.Tensor.item

    def step(bad):
        x, y = batches_of()[0]
        F.cross_entropy(model(x), y).backward()
        flag = torch.tensor(float(bad))
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "item", lambda self: reads.append(self is flag) or item(self))
            step_unless(optimizer, flag)
        optimizer.zero_grad()

    # Fused Adagrad obeys from a torch after 2.11 on; before, a value is read, and the result is the same.
    obeys = fused and (name != "adagrad" or getattr(optimizer, "_step_supports_amp_scaling", False))
    assert obeys_found_inf(optimizer) is obeys
    step(bad=False)
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    held = {
        (n, k): v.clone() for n, p in model.named_parameters() for k, v in optimizer.state[p].items() if v is not None
    }
    step(bad=True)
    assert largest_difference(dict(model.named_parameters()), weights) == 0.0
    for (parameter, key), value in held.items():
        assert torch.equal(optimizer.state[model.get_parameter(parameter)][key], value), (parameter, key)
    assert len(held) >= 16
    step(bad=False)
    assert largest_difference(dict(model.named_parameters()), weights) > 0.0
    assert not hasattr(optimizer, "found_inf")
    assert reads.count(True) == (0 if obeys else 3)


def test_the_default_optimizer_is_adamw():
    trainer = Ordered(batch_size=8, **QUIET)
    assert type(trainer.optimizer) is torch.optim.AdamW
    assert dict(trainer.plan.explain())["optimizer"] == ["optimizer=adamw"]


def test_an_optimizer_of_ones_own_takes_the_place_of_the_slot():
    class Own(Ordered):
        def build_optimizer(self, model):
            return torch.optim.RMSprop(model.parameters(), lr=0.01)

    watcher = Recorder()
    trainer = Own(batch_size=8, steps=3, schedule="linear", observers=[watcher], **QUIET)
    trainer.fit()
    assert type(trainer.optimizer) is torch.optim.RMSprop
    assert [record["lr"] for record in watcher.steps] == pytest.approx([0.01 * 2 / 3, 0.01 / 3, 0.0])
    with pytest.raises(ConfigError, match="optimizer=sgd is set, but the trainer overrides build_optimizer; drop one"):
        Own(batch_size=8, optimizer="sgd", **QUIET)
