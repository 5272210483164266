"""Models with weights and buffers of unusual kinds: what is computed with them is what was meant, or is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fasttrain import ConfigError, Data
from fasttrain.errors import CheckpointError
from tests.helpers import QUIET, points, state
from tests.stack import Stack, StackModel


class Odd(Stack):
    """Trains and evaluates a given kind of model."""

    kind: type = StackModel

    def build_data(self):
        return Data(train=points(), evaluation=points(10, seed=4))

    def build_model(self):
        return self.kind()


def odd(model, steps=4, **settings):
    trainer = type("Of", (Odd,), {"kind": model})(batch_size=8, steps=steps, **QUIET, **settings)
    trainer.fit()
    return trainer


class Spectral(StackModel):
    """A complex weight, as in layers that work on frequencies."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

    def forward(self, x):
        return super().forward(torch.fft.ifft(torch.fft.fft(x.float()) @ self.mix).real)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_a_complex_weight_beside_bfloat16_ones_keeps_its_imaginary_part(optimizer):
    trainer = odd(Spectral, precision="bf16_true", optimizer=optimizer)
    torch.manual_seed(0)
    before = Spectral().mix
    mix = trainer.model.mix
    assert mix.dtype is torch.complex64
    assert (mix.imag.norm() / before.imag.norm()).item() == pytest.approx(1.0, abs=0.1)
    assert not torch.equal(mix.imag, before.imag)


@pytest.mark.parametrize("optimizer", ["lamb", "adamw_8bit", "adafactor"])
def test_a_rule_for_real_numbers_refuses_a_complex_weight(optimizer):
    with pytest.raises(ConfigError, match=f"optimizer={optimizer}: 'mix' is complex, .* use optimizer=adamw"):
        odd(Spectral, optimizer=optimizer)


class Scaled(StackModel):
    """A weight that is a single number, and a head in float64."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return super().forward(x) * self.scale


@pytest.mark.parametrize(
    "settings", [{"precision": "bf16_true"}, {"optimizer": {"name": "sgd", "state_dtype": "bf16"}}]
)
def test_a_weight_of_a_single_number_is_stepped_like_the_others(settings):
    settings = {"optimizer": "sgd", **settings}
    trainer = odd(Scaled, **settings)
    assert trainer.model.scale.item() != 1.0
    moment = trainer.optimizer.state[trainer.model.scale]["momentum_buffer"]
    assert moment.dtype is torch.bfloat16
    assert moment.item() != 0.0


def test_float64_weights_beside_bfloat16_ones_keep_their_digits():
    from fasttrain.optim.chunks import step_in_chunks

    wide, narrow = nn.Parameter(torch.ones(3, dtype=torch.float64)), nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([wide, narrow], lr=1.0, foreach=False)
    step_in_chunks(optimizer, narrow=True)
    wide.grad, narrow.grad = torch.full_like(wide, 2.0**-40), torch.ones_like(narrow)
    optimizer.step()
    assert wide.tolist() == [1.0 - 2.0**-40] * 3
    assert narrow.tolist() == [0.0] * 3


class Masked(StackModel):
    """A mask of infinities that is saved, as of a causal attention."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))

    def forward(self, x):
        return super().forward(x) @ self.mask.softmax(-1)


def test_a_mask_of_infinities_is_not_averaged_into_no_number():
    trainer = odd(Masked, weight_averaging={"name": "ema", "decay": 0.9})
    figures = trainer.evaluate()
    assert figures["loss"] == figures["loss"]
    with trainer.evaluating():
        assert torch.equal(trainer.model.mask, Masked().mask)


class OverImages(nn.Module):
    """A block with a norm over two dims."""

    def __init__(self):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm([2, 4]), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.b(self.a(self.norm(x.view(-1, 2, 4)).flatten(1)))


class WithNormsOverImages(nn.Sequential):
    def __init__(self):
        super().__init__(nn.ModuleList([OverImages(), OverImages()]), nn.Linear(8, 4))

    def forward(self, x):
        for block in self[0]:
            x = block(x)
        return self[1](x)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_norm_over_two_dims_neither_decays_nor_is_orthogonalised(optimizer):
    trainer = odd(WithNormsOverImages, optimizer=optimizer)
    norms = {f"0.{i}.norm.{part}" for i in (0, 1) for part in ("weight", "bias")}
    groups = [group for group in trainer.optimizer.param_groups if norms & set(group["param_names"])]
    assert {name for group in groups for name in group["param_names"]} >= norms
    assert [group["weight_decay"] for group in groups] == [0.0]
    assert not any(group.get("muon") for group in groups)


def test_averages_take_in_what_begins_to_train_later():
    late = {"name": "freeze", "freeze": ["embed", "blocks.0"], "unfreeze": {"blocks.0": 2}}
    trainer = odd(StackModel, steps=6, adapters=late, weight_averaging={"name": "ema", "decay": 0.5})
    raw = state(trainer)
    with trainer.evaluating():
        shown = state(trainer)
    differ = {name.split(".")[0] + name.split(".")[1] for name in raw if not torch.equal(raw[name], shown[name])}
    assert {"blocks0", "blocks1"} <= differ
    assert torch.equal(raw["embed.weight"], shown["embed.weight"])
    saved = trainer.plan.strategies["weight_averaging"].state_dict()
    assert "blocks.0.norm.weight" in saved
    assert "embed.weight" not in saved


def test_swa_takes_statistics_anew_for_norms_that_begin_to_train_later():
    class Late(Odd):
        norm = nn.BatchNorm1d

        def build_model(self):
            return StackModel(nn.BatchNorm1d)

    late = {"name": "freeze", "freeze": ["embed", "blocks.0"], "unfreeze": {"blocks.0": 2}}
    trainer = Late(batch_size=8, steps=6, adapters=late, weight_averaging={"name": "swa", "start": 0}, **QUIET)
    with trainer.evaluating():
        pass
    trainer.fit()
    raw = state(trainer)
    with trainer.evaluating():
        shown = state(trainer)
    for block in ("blocks.0", "blocks.1"):
        assert not torch.equal(raw[f"{block}.norm.running_mean"], shown[f"{block}.norm.running_mean"])


def test_averages_of_weights_that_were_left_out_of_a_resume_begin_with_the_new_weights(tmp_path):
    class Small(Odd):
        classes = 4

        def build_model(self):
            model = StackModel()
            model.head = nn.Linear(8, self.classes)
            return model

    class Large(Small):
        classes = 6

    settings = {"batch_size": 8, "weight_averaging": {"name": "ema", "decay": 0.9}}
    Small(steps=3, run={"dir": str(tmp_path), "name": "a", "id": "x"}, **settings).fit()
    trainer = Large(steps=5, run={"dir": None}, resume_skip=["head.*"], **settings)
    trainer.restore(tmp_path / "a" / "x" / "checkpoints" / "step-3")
    averages = trainer.plan.strategies["weight_averaging"].state_dict()
    assert torch.equal(averages["head.weight"], trainer.model.head.weight)
    assert not torch.equal(averages["embed.weight"], trainer.model.embed.weight)


@dataclasses.dataclass(frozen=True)
class Output:
    """What a model gives, by name."""

    logits: torch.Tensor
    more: dict[str, torch.Tensor]


class Named(StackModel):
    def forward(self, x):
        logits = super().forward(x)
        return Output(logits, {"hidden": logits})


def test_fields_of_a_dataclass_reach_the_loss_in_float32():
    seen = set()

    class Of(Odd):
        kind = Named

        def loss(self, output, batch):
            seen.update({output.logits.dtype, output.more["hidden"].dtype})
            return F.cross_entropy(output.logits, batch[1])

    Of(batch_size=8, steps=2, precision="bf16_true", **QUIET).fit()
    assert seen == {torch.float32}


class Own(Odd):
    """Plain descent by an optimizer of one's own, whose updates are below half a step of bfloat16."""

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=1e-4)


def test_an_optimizer_of_ones_own_rounds_stochastically_and_resumes_with_equal_bits(tmp_path):
    settings = {"batch_size": 8, "precision": "bf16_true", "checkpoint": {"every": 20}}
    straight = Own(steps=40, run={"dir": str(tmp_path), "name": "a", "id": "x"}, **settings)
    bias = straight.model.head.weight.detach().clone()
    straight.fit()
    moved = (straight.model.head.weight.detach() != bias).float().mean().item()
    assert moved > 0.1  # rounding to the nearest moves none of these
    resumed = Own(steps=40, run={"dir": None}, **settings)
    resumed.restore(tmp_path / "a" / "x" / "checkpoints" / "step-20")
    resumed.fit()
    assert all(
        torch.equal(one, other) for one, other in zip(state(straight).values(), state(resumed).values(), strict=True)
    )


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_weights_that_train_in_16_bits_under_a_precision_that_keeps_32_are_warned_of(precision):
    class Narrow(Odd):
        def build_model(self):
            return StackModel().bfloat16()

    with pytest.warns(UserWarning, match=r"precision=\w+: 16 weights that train have 16 bits .* precision=bf16_true"):
        Narrow(batch_size=8, steps=1, precision=precision, **QUIET)


def test_a_frozen_base_in_16_bits_is_nothing_to_warn_of():
    class Narrow(Odd):
        def build_model(self):
            return StackModel().bfloat16()

    assert Narrow(batch_size=8, steps=1, precision="bf16", adapters="lora", **QUIET)


@pytest.mark.parametrize(("given", "told"), [(None, "None"), (1.0, "a float"), ({"loss": "low"}, "loss: str")])
def test_an_evaluation_of_ones_own_that_gives_no_numbers_is_told(given, told):
    class Of(Odd):
        def evaluate(self):
            return given

    with pytest.raises(ConfigError, match=f"Of.evaluate returned {told}; return a dict of numbers by name"):
        Of(batch_size=8, steps=1, **QUIET).fit()


def test_an_evaluation_of_ones_own_may_give_tensors(tmp_path):
    class Of(Odd):
        def evaluate(self):
            return {"loss": torch.tensor(1.5)}

    summary = Of(batch_size=8, steps=1, run={"dir": str(tmp_path)}).fit()
    assert summary["metrics"] == {"loss": 1.5}


def test_a_seed_of_more_than_64_bits_is_refused():
    with pytest.raises(ConfigError, match="has more than 64 bits"):
        Odd(batch_size=8, steps=1, seed=10**25, **QUIET)


def test_4_bit_weights_of_another_base_are_not_mixed_with_this_ones_scales(tmp_path):
    class Large(Odd):
        factor = 1.0

        def build_model(self):
            model = StackModel()
            for block in model.blocks:
                block.expand, block.contract = nn.Linear(8, 64), nn.Linear(64, 8)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(self.factor)
            return model

    class Other(Large):
        factor = 2.0  # of which the packed numbers have as many digits

    settings = {"batch_size": 8, "adapters": {"name": "qlora", "save_frozen": True}}
    Large(steps=2, run={"dir": str(tmp_path), "name": "a", "id": "x"}, **settings).fit()
    checkpoint = tmp_path / "a" / "x" / "checkpoints" / "step-2"
    Large(steps=3, run={"dir": None}, **settings).restore(checkpoint)
    with pytest.raises(CheckpointError, match="quant_state"):
        Other(steps=3, run={"dir": None}, **settings).restore(checkpoint)
