"""Cases that other projects met: what decays, and what an optimizer's state is after loading."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fasttrain import Data, Trainer
from fasttrain.checkpoint import stored_tensors
from fasttrain.errors import CheckpointError
from fasttrain.optim.adafactor import Adafactor
from fasttrain.optim.adamw_8bit import adamw_8bit_class
from fasttrain.optim.chunks import step_in_chunks
from fasttrain.optim.lamb import Lamb
from fasttrain.optim.muon import Muon
from fasttrain.strategies.optimizer import AdamWConfig, SgdConfig, adamw, sgd
from fasttrain.trainer.state import restore_state, save_state
from tests.helpers import QUIET

MAKE = {"adamw": (adamw, AdamWConfig), "sgd": (sgd, SgdConfig)}


@pytest.mark.parametrize("name", MAKE)
def test_WD_GROUPS_1_matrices_decay_and_norms_and_biases_do_not(name):
    model = nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4), nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    make, config = MAKE[name]
    optimizer = make(model, config(lr=0.1, weight_decay=0.1))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"0.weight", "2.weight"}
    for name in moved:
        assert torch.allclose(model.get_parameter(name), before[name] * 0.99)


class RmsNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))


def test_WD_GROUPS_2_a_norm_of_ones_own_does_not_decay_either():
    optimizer = adamw(nn.ModuleList([nn.Linear(4, 4), RmsNorm()]), AdamWConfig(weight_decay=0.1))
    decays = {name: group["weight_decay"] for group in optimizer.param_groups for name in group["param_names"]}
    assert decays == {"0.weight": 0.1, "0.bias": 0.0, "1.scale": 0.0}


@pytest.mark.parametrize("name", ["adamw", "lamb", "muon", "adafactor", "adamw_8bit", "in chunks"])
def test_FROZEN_5_no_gradient_moves_nothing_and_a_gradient_of_zeros_decays(name):
    weight = nn.Parameter(torch.ones(2, 2))
    settings = {"lr": 0.1, "weight_decay": 0.1}
    optimizer = {
        "adamw": lambda: torch.optim.AdamW([weight], **settings),
        "lamb": lambda: Lamb([weight], **settings),
        "muon": lambda: Muon([{"params": [weight], "muon": True, **settings}]),
        "adafactor": lambda: Adafactor([weight], **settings),
        "adamw_8bit": lambda: adamw_8bit_class()([weight], **settings),
        "in chunks": lambda: torch.optim.AdamW([weight], **settings),
    }[name]()
    if name == "in chunks":
        step_in_chunks(optimizer)
    optimizer.step()
    assert torch.equal(weight, torch.ones(2, 2))
    weight.grad = torch.zeros(2, 2)
    optimizer.step()
    # LAMB scales the whole update, decay included, to the size of the weight: 1 - lr.
    expected = 0.9 if name == "lamb" else 0.99
    assert torch.allclose(weight, torch.full((2, 2), expected))


class Named(Trainer):
    """Two weights of equal shape with gradients 1 and 5, registered in either order."""

    order = ("a", "b")
    dtype = torch.float32

    def build_data(self):
        return Data(train=(torch.ones(4),), shuffle=False)

    def build_model(self):
        model = nn.Module()
        for name in self.order:
            model.register_parameter(name, nn.Parameter(torch.ones(3, dtype=self.dtype)))
        return model

    def compute_loss(self, batch):
        return (self.model.a + 5 * self.model.b).sum() * batch[0].mean()


class Swapped(Named):
    order = ("b", "a")


class TiedWords(Trainer):
    """An embedding of 10 words tied to its head, built on the meta device."""

    def build_data(self):
        return Data(train=(torch.arange(10),), shuffle=False)

    def build_model(self):
        with torch.device("meta"):
            model = nn.ModuleDict({"word": nn.Embedding(10, 4), "head": nn.Linear(4, 10, bias=False)})
            model["head"].weight = model["word"].weight
        return model

    def compute_loss(self, batch):
        return F.cross_entropy(self.model["head"](self.model["word"](batch[0])), batch[0])


def test_TIED_1_a_tied_model_built_on_meta_stays_tied():
    trainer = TiedWords(batch_size=10, steps=1, **QUIET)
    model = trainer.model
    assert model["head"].weight is model["word"].weight
    assert sum(p.numel() for p in model.parameters()) == 40
    trainer.plan.gradients_of(trainer.task, (torch.arange(10),))
    word, head = (model["word"].weight.detach().clone().requires_grad_() for _ in range(2))
    F.cross_entropy(F.embedding(torch.arange(10), word) @ head.T, torch.arange(10)).backward()
    assert torch.allclose(model["word"].weight.grad, word.grad + head.grad)
    before = model["head"].weight.detach().clone()
    trainer.optimizer.step()
    assert torch.equal(model["head"].weight, model["word"].weight)
    assert not torch.equal(model["head"].weight, before)
    # What torch does by itself.
    plain = trainer.build_model().to_empty(device="cpu")
    assert plain["head"].weight is not plain["word"].weight


def test_TIED_3_a_checkpoint_is_taken_up_without_untying(tmp_path):
    settings = {"batch_size": 10, "steps": 2, **QUIET}
    path = saved(stepped(TiedWords(**settings)), tmp_path / "step-1")
    held = [name for name in stored_tensors(path) if name.startswith("model.")]
    assert held == ["model.word.weight"]
    trainer = TiedWords(**settings)
    restore_state(trainer, path)
    stepped(trainer)
    assert trainer.model["head"].weight is trainer.model["word"].weight
    # Assignment, as torch offers it, unties.
    plain = trainer.build_model()
    plain.load_state_dict({name: value.clone() for name, value in trainer.model.state_dict().items()}, assign=True)
    assert plain["head"].weight is not plain["word"].weight


def saved(trainer, path):
    save_state(trainer, path, {"metrics": {}, "observers": [], "config": trainer.resolved.to_yaml()})
    return path


def stepped(trainer, steps=1):
    batches = trainer.feed.training(trainer.task, trainer.plan)
    for _ in range(steps):
        trainer.train_step(next(batches))
    return trainer


def test_OPT_ORDER_1_states_are_matched_by_name(tmp_path):
    settings = {"batch_size": 4, "steps": 2, "optimizer": {"name": "adamw", "lr": 0.1}, **QUIET}
    path = saved(stepped(Named(**settings)), tmp_path / "step-1")
    trainer = Swapped(**settings)
    assert [name for name, _ in trainer.model.named_parameters()] == ["b", "a"]
    restore_state(trainer, path)
    first = {n: trainer.optimizer.state[p]["exp_avg"][0].item() for n, p in trainer.model.named_parameters()}
    assert first == pytest.approx({"a": 0.1, "b": 0.5})


class Classes(Trainer):
    num = 3

    def build_data(self):
        return Data(train=(torch.randn(8, 4), torch.zeros(8, dtype=torch.long)), shuffle=False)

    def build_model(self):
        return nn.ModuleDict({"body": nn.Linear(4, 8), "head": nn.Linear(8, self.num)})

    def compute_loss(self, batch):
        return F.cross_entropy(self.model["head"](self.model["body"](batch[0])), batch[1])


class More(Classes):
    num = 5


def test_OPT_ORDER_3_weights_of_another_shape_are_named_with_both_and_can_be_left_out(tmp_path):
    settings = {"batch_size": 8, "steps": 3, **QUIET}
    before = stepped(Classes(**settings), 2)
    path = saved(before, tmp_path / "step-2")
    with pytest.raises(CheckpointError) as caught:
        restore_state(More(**settings), path)
    told = str(caught.value)
    assert "head.weight has shape (3, 8) there and (5, 8) here, head.bias has shape (3,) there and (5,) here" in told
    assert "; resume_skip=[head.*] leaves these weights as build_model makes them" in told
    trainer = More(**settings, resume_skip=["head.*"])
    made = trainer.model["head"].weight.detach().clone()
    restore_state(trainer, path)
    assert torch.equal(trainer.model["body"].weight, before.model["body"].weight)
    assert torch.equal(trainer.model["head"].weight, made)
    states = {name: set(trainer.optimizer.state[p]) for name, p in trainer.model.named_parameters()}
    full = {"step", "exp_avg", "exp_avg_sq"}
    assert states == {"body.weight": full, "body.bias": full, "head.weight": set(), "head.bias": set()}
    stepped(trainer)
    assert not torch.equal(trainer.model["head"].weight, made)
    # What fits is taken, so that a later resume of this very run does not start its head afresh.
    again = More(**settings, resume_skip=["head.*"])
    restore_state(again, saved(trainer, tmp_path / "step-3"))
    assert torch.equal(again.model["head"].weight, trainer.model["head"].weight)


class NarrowNamed(Named):
    dtype = torch.bfloat16


def test_OPT_DTYPE_1_float32_moments_of_bfloat16_weights_stay_so(tmp_path):
    settings = {"batch_size": 4, "steps": 2, "optimizer": {"name": "sgd", "lr": 0.1}, **QUIET}
    trainer = NarrowNamed(**settings)
    for parameter in trainer.model.parameters():
        trainer.optimizer.state[parameter]["momentum_buffer"] = torch.full((3,), 1.001)
    path = saved(trainer, tmp_path / "step-1")
    again = NarrowNamed(**settings)
    restore_state(again, path)
    buffers = [again.optimizer.state[p]["momentum_buffer"] for p in again.model.parameters()]
    assert [buffer.dtype for buffer in buffers] == [torch.float32] * 2
    assert all(torch.equal(buffer, torch.full((3,), 1.001)) for buffer in buffers)
    # torch's own way back, for comparison.
    plain = torch.optim.SGD(again.model.parameters(), lr=0.1, momentum=0.9)
    plain.load_state_dict({**plain.state_dict(), "state": {0: {"momentum_buffer": torch.full((3,), 1.001)}}})
    (buffer,) = (state["momentum_buffer"] for state in plain.state.values())
    assert (buffer.dtype, buffer[0].item()) == (torch.bfloat16, 1.0)


def test_OPT_DTYPE_2_bfloat16_moments_of_float32_weights_stay_so(tmp_path):
    optimizer = {"name": "adamw", "lr": 0.1, "state_dtype": "bf16"}
    settings = {"batch_size": 4, "steps": 3, "optimizer": optimizer, **QUIET}

    def kept(trainer):
        states = trainer.optimizer.state.values()
        return [(s["exp_avg"].dtype, s["exp_avg"].nbytes + s["exp_avg_sq"].nbytes) for s in states]

    trainer = stepped(Named(**settings))
    assert kept(trainer) == [(torch.bfloat16, 12)] * 2
    again = Named(**settings)
    restore_state(again, saved(trainer, tmp_path / "step-1"))
    assert kept(again) == kept(trainer)
    stepped(again)
    assert kept(again) == kept(trainer)
    assert again.step == 2
