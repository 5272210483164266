"""adapters against peft, bitsandbytes and plain torch; what is frozen stays, to the bit."""

from __future__ import annotations

import copy
import dataclasses

import bitsandbytes
import peft
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from fasttrain import ConfigError
from fasttrain.core.plan import Plan
from fasttrain.core.strategy import Context
from fasttrain.errors import CheckpointError, Conflict
from fasttrain.nn.frozen import is_held
from fasttrain.nn.low_rank import attach_adapters, is_adapter, merged_state, quantise_linears
from fasttrain.nn.patterns import select
from fasttrain.strategies.adapters import Freeze, FreezeConfig, Lora, LoraConfig, Qlora, QloraConfig
from tests.helpers import QUIET, Recorder, largest_difference, points, state
from tests.stack import Restless, Stack, StackModel, batches_of, gradients

CONTEXT = Context(device=torch.device("cpu"))


def built(make=StackModel, seed=0):
    torch.manual_seed(seed)
    return make()


def adapted(strategy=Lora, make=StackModel, context=CONTEXT, **config):
    """A model after the strategy."""
    model = built(make)
    torch.manual_seed(1)
    Plan([strategy(strategy.Config(**config))], context).model(model)
    return model


def trained(model, steps=4, lr=1e-2):
    """Losses of a few steps on what trains."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    losses = []
    torch.manual_seed(2)
    for x, y in (batches_of() * steps)[:steps]:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trains(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


# ---- lora

VARIANTS = {
    "plain": {},
    "dropout": {"dropout": 0.3},
    "rslora": {"rslora": True, "rank": 3},
    "dora": {"dora": True},
    "dora with dropout": {"dora": True, "dropout": 0.3},
}


def by_peft(variant):
    """The same model with peft's own layers."""
    model = built()
    given = {"rank": 8, "dropout": 0.0, "rslora": False, "dora": False, **variant}
    config = peft.LoraConfig(
        r=given["rank"],
        lora_alpha=16,
        lora_dropout=given["dropout"],
        use_rslora=given["rslora"],
        use_dora=given["dora"],
        target_modules=["expand", "contract"],
    )
    torch.manual_seed(1)
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_training_is_pefts_to_the_bit(variant):
    ours, theirs = adapted(**VARIANTS[variant]), by_peft(VARIANTS[variant])
    assert trained(ours) == trained(theirs)
    adapters = {n: p for n, p in ours.named_parameters() if is_adapter(n)}
    names = peft.get_peft_model_state_dict(theirs)
    assert len(adapters) == len(names) == (12 if "dora" in variant else 8)
    for name, value in adapters.items():
        key = f"base_model.model.{name}"
        saved = names[key] if key in names else names[key.removesuffix(".weight")]
        assert torch.equal(value, saved), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_merged_weights_are_pefts_and_compute_what_the_adapted_model_does(variant):
    ours, theirs = adapted(**VARIANTS[variant]), by_peft(VARIANTS[variant])
    trained(ours), trained(theirs)
    merged, expected = merged_state(ours), theirs.merge_and_unload().state_dict()
    assert list(merged) == list(built().state_dict()) == list(expected)
    assert largest_difference(merged, expected) < 1e-6
    plain = built()
    plain.load_state_dict(merged)
    x = batches_of()[0][0]
    assert torch.allclose(plain.eval()(x), ours.eval()(x), atol=1e-5)
    assert not torch.equal(merged["blocks.0.expand.weight"], ours.blocks[0].expand.weight)


def test_nothing_changes_before_the_first_step():
    x = batches_of()[0][0]
    assert torch.equal(adapted()(x), built()(x))


def test_weights_keep_their_names_and_layers_stay_the_objects_they_were():
    model = built()
    layers = dict(model.named_modules())
    names = list(model.state_dict())
    Plan([Lora()], CONTEXT).model(model)
    assert [name for name in model.state_dict() if not is_adapter(name)] == names
    assert all(dict(model.named_modules())[name] is layer for name, layer in layers.items())
    assert type(model.blocks[0].expand) is nn.Linear
    assert list(model.blocks[0].expand.state_dict()) == [
        "weight",
        "bias",
        "lora_A.weight",
        "lora_B.weight",
    ]


def test_all_linear_layers_of_the_blocks_are_targets_and_nothing_else():
    adapters = {name.split(".lora_")[0] for name in trains(adapted())}
    assert adapters == {f"blocks.{i}.{layer}" for i in (0, 1) for layer in ("expand", "contract")}


def test_targets_may_be_patterns_or_ends_of_names():
    def layers(*targets):
        return {name.split(".lora_")[0] for name in trains(adapted(targets=list(targets)))}

    assert layers("head") == {"head"}
    assert layers("expand") == {"blocks.0.expand", "blocks.1.expand"}
    assert layers("blocks.1") == {"blocks.1.expand", "blocks.1.contract"}
    assert layers("blocks.*.con*", "embed") == {"blocks.0.contract", "blocks.1.contract", "embed"}


def test_a_head_trains_with_the_adapters_where_that_is_asked_for():
    model = adapted(train=["head.*"])
    assert {name for name in trains(model) if not is_adapter(name)} == {"head.weight", "head.bias"}
    before = state_of(model)
    trained(model)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == trains(model)


def state_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


class Attention(nn.Module):
    """torch's own encoder, which has a fused path of its own in evaluation."""

    def __init__(self, layers=2):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.embedding = nn.Embedding(5, 8)

    def forward(self, x):
        return self.encoder(x)


def test_torchs_fused_encoder_does_not_leave_the_adapters_out():
    model = adapted(make=Attention)
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in trains(model)} == {"linear1", "linear2"}
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.ones_(parameter)
    x = torch.randn(3, 4, 8)
    expected = model(x)
    with torch.no_grad():
        assert torch.allclose(model.eval()(x), expected, atol=1e-5)
        assert not torch.allclose(built(Attention).eval()(x), expected, atol=1e-2)


def test_a_copy_computes_with_its_own_adapters():
    model = adapted()
    other = copy.deepcopy(model)
    nn.init.ones_(other.blocks[0].expand.lora_B.weight)
    x = batches_of()[0][0]
    assert not torch.equal(model(x), other(x))
    assert torch.equal(model(x), built()(x))


def test_convolutions_and_the_conv1d_of_gpt2_are_merged_right():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.linear = nn.Conv2d(2, 6, 3, stride=2, padding=1), Conv1D(5, 6)

        def forward(self, x):
            return self.linear(self.conv(x).mean((2, 3)))

    for config in ({}, {"dora": True, "targets": ["linear"]}):
        model = adapted(make=Net, **{"targets": ["conv", "linear"], **config})
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                nn.init.normal_(parameter)
        plain = built(Net)
        plain.load_state_dict(merged_state(model))
        x = torch.randn(4, 2, 8, 8)
        assert torch.allclose(plain(x), model(x), atol=1e-4)
        assert not torch.allclose(built(Net)(x), model(x), atol=1e-1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_adapters_of_narrow_layers_are_wide(dtype):
    layer = nn.Linear(8, 4).to(dtype)
    attach_adapters([layer], 2, 4.0)
    assert layer.lora_A.weight.dtype == layer.lora_B.weight.dtype == torch.float32
    nn.init.ones_(layer.lora_B.weight)
    layer(torch.randn(3, 8, dtype=dtype)).sum().backward()
    assert layer.lora_A.weight.grad.dtype == torch.float32
    assert layer(input=torch.randn(3, 8, dtype=dtype)).dtype == dtype


REFUSED = {
    "a typing error": (Lora, StackModel, {"targets": ["expnd"]}, "did you mean 'expand'?"),
    "a layer that is no layer": (Lora, StackModel, {"targets": ["blocks.0.norm"]}, "no layer that can be adapted"),
    "no such head": (Lora, StackModel, {"train": ["haed.*"]}, "train: nothing is called 'haed.*'; did you mean 'head'"),
    "no blocks": (Lora, lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), {}, r"adapters.targets=\[0, 1\]"),
    "blocks without linear layers": (
        Lora,
        lambda: nn.Sequential(*(nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU()) for _ in range(2))),
        {},
        "adapters.targets",
    ),
    "attention that is read": (Lora, Attention, {"targets": ["out_proj"]}, "no layer that can be adapted"),
    "an embedding": (Lora, Attention, {"targets": ["embedding"]}, "no layer that can be adapted"),
    "dora of a convolution": (
        Lora,
        lambda: nn.Sequential(nn.Conv2d(2, 2, 1), nn.Flatten()),
        {"targets": ["0"], "dora": True},
        "use dora=false",
    ),
    "4 bits of a convolution": (
        Qlora,
        lambda: nn.Sequential(nn.Conv2d(2, 2, 1)),
        {"targets": ["0"]},
        "use adapters=lora",
    ),
    "nothing frozen of that name": (Freeze, StackModel, {"freeze": ["blok"]}, "did you mean 'blocks'"),
    "everything frozen": (Freeze, StackModel, {"freeze": ["*"]}, "freeze less"),
    "unfreezing what is not frozen": (
        Freeze,
        StackModel,
        {"freeze": ["embed"], "unfreeze": {"head": 3}},
        "nothing that is frozen is called 'head'",
    ),
    "an epoch of unknown length": (
        Freeze,
        StackModel,
        {"freeze": ["embed"], "unfreeze": {"embed": "1ep"}},
        "the length of an epoch is not known; give steps",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused_with_what_to_write(what):
    strategy, make, config, message = REFUSED[what]
    with pytest.raises(ConfigError, match=message) as caught:
        adapted(strategy, make, **config)
    assert str(caught.value).startswith("adapters=")
    assert "; " in str(caught.value)


def test_a_tied_head_is_no_target():
    class Tied(StackModel):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(4, 8)
            self.head.weight = self.table.weight

    with pytest.raises(ConfigError, match=r"'head' shares its weight with 'table'.*use other targets"):
        adapted(make=Tied, targets=["head"])
    assert len(trains(adapted(make=Tied))) == 8


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        (LoraConfig, {"rank": 0}, "rank=0 is no rank"),
        (LoraConfig, {"alpha": 0.0}, "alpha=0.0"),
        (QloraConfig, {"dropout": 1.0}, "below 1"),
        (LoraConfig, {"targets": []}, "adapts nothing"),
        (FreezeConfig, {}, "neither is given"),
        (FreezeConfig, {"freeze": ["a"], "train": ["b"]}, "both are given"),
        (FreezeConfig, {"freeze": ["a"], "unfreeze": {"a": "soon"}}, "no time; write steps"),
        (FreezeConfig, {"freeze": ["a"], "unfreeze": {"a": 0}}, "no time"),
        (FreezeConfig, {"freeze": ["a"], "unfreeze": {"a": "1.5"}}, "no time"),
    ],
)
def test_a_wrong_setting_says_what_to_write(config, given, message):
    with pytest.raises(ConfigError, match=message) as caught:
        config(**given)
    assert "; " in str(caught.value)


def test_patterns_choose_by_names_and_by_parts():
    names = ["conv1.weight", "layer1.0.conv1.weight", "layer10.conv.weight"]
    assert select(names, ["conv1"], "x") == ["conv1.weight"]
    assert select(names, ["conv1"], "x", anywhere=True) == names[:2]
    assert select(names, ["layer1.*"], "x") == ["layer1.0.conv1.weight"]
    assert select(names, ["*conv*"], "x") == names
    with pytest.raises(
        ConfigError, match=r"x: nothing is called 'zzz'; there are conv1.weight, conv1, layer1.0.conv1.weight"
    ):
        select(names, ["zzz"], "x")


def test_the_norms_of_a_frozen_base_keep_their_statistics():
    trainer = Restless(batch_size=8, steps=3, adapters="lora", **QUIET)
    before = state(trainer)
    trainer.fit()
    changed = {name for name, value in state(trainer).items() if not torch.equal(value, before[name])}
    assert len(changed) == 8
    assert all(is_adapter(name) for name in changed)
    woken = adapted(make=lambda: StackModel(nn.BatchNorm1d), train=["blocks.0.norm"])
    assert [is_held(block.norm) for block in woken.blocks] == [False, True]


# ---- 4 bits


class Wide(nn.Module):
    """Two blocks whose linear layers are large beside their scales."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


WIDE = dataclasses.replace(CONTEXT, find_blocks=lambda model: list(model.blocks))


@pytest.mark.parametrize(("double_quant", "most"), [(True, 0.27), (False, 0.2825)])
def test_4_bit_weights_with_their_scales_take_a_quarter_of_16_bits(double_quant, most):
    model = adapted(Qlora, Wide, WIDE, double_quant=double_quant)
    entries = {n: v for n, v in model.state_dict().items() if ".weight" in n and not is_adapter(n)}
    # The tables of the 16 values (and 256 scales) and the description of a layer do not grow with it.
    fixed = ("quant_map", "bitsandbytes__nf4")
    held = sum(value.nbytes for name, value in entries.items() if not name.endswith(fixed))
    weights = 4 * 64 * 256
    assert 0.25 * 2 * weights < held <= most * 2 * weights
    assert {type(layer) for layer in model.modules() if hasattr(layer, "lora_A")} == {bitsandbytes.nn.Linear4bit}
    assert len(trains(model)) == 8
    assert all(is_adapter(name) for name in trains(model))


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_a_4_bit_training_is_one_over_the_rounded_weights(compute):
    context = dataclasses.replace(WIDE, dtypes=dataclasses.replace(WIDE.dtypes, compute=compute))
    model = adapted(Qlora, Wide, context)
    rounded = {name: value.to(torch.float32) for name, value in merged_state(model).items()}
    plain = built(Wide)
    assert 0 < largest_difference(rounded, plain.state_dict()) < 0.03
    plain.load_state_dict(rounded)
    torch.manual_seed(1)
    Plan([Lora()], WIDE).model(plain)
    x = torch.randn(16, 64)
    grads = []
    for one in (model, plain):
        one.load_state_dict(
            {n: torch.ones_like(v) / 64 for n, v in one.state_dict().items() if "lora_B" in n}, strict=False
        )
        one(x).square().mean().backward()
        grads.append(gradients(one))
    assert len(grads[0]) == 8
    for name, grad in grads[0].items():
        assert torch.allclose(
            grad, grads[1][name], rtol=0, atol=grad.abs().max() * (1e-5 if compute == torch.float32 else 3e-2)
        )


def test_4_bit_weights_do_not_move_in_training_and_evaluation():
    model = adapted(
        Qlora, Wide, dataclasses.replace(WIDE, dtypes=dataclasses.replace(WIDE.dtypes, compute=torch.bfloat16))
    )
    before = state_of(model)
    for _ in range(2):
        model.train()
        model(torch.randn(4, 64)).sum().backward()
        model.eval()
        with torch.no_grad():
            model(torch.randn(4, 64))
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[n], before[n]) and after[n].dtype == before[n].dtype for n in before)


def test_a_4_bit_conv1d_is_merged_in_its_own_layout():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = Conv1D(6, 64)

        def forward(self, x):
            return self.fc(x)

    model = adapted(Qlora, Net, targets=["fc"])
    nn.init.normal_(model.fc.lora_B.weight)
    plain = built(Net)
    plain.load_state_dict(merged_state(model))
    x = torch.randn(5, 64)
    assert torch.allclose(plain(x), model(x), atol=1e-4)


def test_a_layer_in_two_places_is_exchanged_in_both():
    model = nn.ModuleDict({"a": nn.Linear(64, 64)})
    model["b"] = model["a"]
    (new,) = quantise_linears(model, [model["a"]])
    assert model["a"] is model["b"] is new


def test_a_device_without_4_bit_weights_is_refused():
    with pytest.raises(
        ConfigError, match=r"adapters=qlora: bitsandbytes has no 4-bit weights on vulkan.*use adapters=lora"
    ):
        adapted(Qlora, Wide, dataclasses.replace(WIDE, device=torch.device("vulkan")))


def test_a_missing_package_is_told_with_what_to_install(monkeypatch):
    import importlib

    real = importlib.import_module

    def without(name, *args):
        if name == "peft":
            raise ModuleNotFoundError("No module named 'peft'", name="peft")
        return real(name, *args)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(ConfigError, match=r"needs the package 'peft'.*pip install 'fasttrain\[adapters\]'"):
        adapted()


# ---- freeze


def test_a_frozen_part_gets_no_gradient_and_stands_in_no_group():
    trainer = Stack(batch_size=8, steps=1, adapters={"name": "freeze", "freeze": ["embed", "blocks.0"]}, **QUIET)
    names = [name for group in trainer.optimizer.param_groups for name in group["param_names"]]
    kept = [name for name in dict(trainer.model.named_parameters()) if not name.startswith(("embed", "blocks.0"))]
    assert sorted(names) == sorted(kept)
    F.cross_entropy(trainer.model(points()[0]), points()[1]).backward()
    assert set(gradients(trainer.model)) == set(names)


def test_training_what_is_left_is_torchs_to_the_bit():
    model = adapted(Freeze, freeze=["embed", "blocks.0"])
    plain = built()
    plain.embed.requires_grad_(False)
    plain.blocks[0].requires_grad_(False)
    assert trained(model) == trained(plain)
    assert largest_difference(model.state_dict(), plain.state_dict()) == 0.0


def test_parts_begin_to_train_at_their_times_and_their_norms_with_them():
    unfreeze = {"blocks.1": 3, "blocks.0": "2ep", "embed.bias": 5}
    settings = {"name": "freeze", "train": ["head"], "unfreeze": unfreeze}

    class Watching(Restless):
        seen: list = []

        def train_step(self, batch):
            model = self.model
            self.seen.append(
                [
                    p.requires_grad
                    for p in (model.blocks[1].expand.weight, model.blocks[0].expand.weight, model.embed.bias)
                ]
                + [block.norm.training for block in model.blocks]
                + [model.embed.weight.requires_grad]
            )
            return super().train_step(batch)

    trainer = Watching(batch_size=8, steps=8, adapters=settings, **QUIET)
    assert trainer.feed.steps_per_epoch == 3
    trainer.fit()
    by_step = [list(column) for column in zip(*trainer.seen, strict=True)]
    assert by_step[0] == [False] * 3 + [True] * 5
    assert by_step[1] == [False] * 6 + [True] * 2
    assert by_step[2] == [False] * 5 + [True] * 3
    assert by_step[3:5] == [by_step[1], by_step[0]]
    assert by_step[5] == [False] * 8


def test_what_is_not_yet_unfrozen_is_neither_decayed_nor_given_states():
    trainer = Stack(
        batch_size=8,
        steps=2,
        optimizer={"name": "adamw", "weight_decay": 0.5},
        adapters={"name": "freeze", "freeze": ["embed"], "unfreeze": {"embed": 2}},
        **QUIET,
    )
    before = state(trainer)
    trainer.fit()
    assert torch.equal(trainer.model.embed.weight, before["embed.weight"])
    assert len(trainer.optimizer.state[trainer.model.embed.weight]) == 0
    assert trainer.model.embed.weight.requires_grad


def test_sharding_and_a_late_unfreezing_are_refused_together():
    assert {c.name for c in Freeze.limits(FreezeConfig(freeze=["a"], unfreeze={"a": 1}))} == {
        "fsdp",
        "hsdp",
        "deepspeed",
    }
    assert Freeze.limits(FreezeConfig(freeze=["a"])) == ()
    with pytest.raises(Conflict, match="use float8=null"):
        Plan([Lora(), _named("float8", "rowwise")], CONTEXT)


def _named(slot_, name_):
    from fasttrain.core.strategy import Strategy

    class Other(Strategy):
        slot, name = slot_, name_

    return Other()


# ---- checkpoints


def in_folder(tmp_path, **given):
    return {
        "batch_size": 8,
        "steps": 3,
        "log": {"every": 1},
        "run": {"dir": str(tmp_path), "name": "a", "id": "b"},
        **given,
    }


class Large(Stack):
    """A base of a megabyte under small adapters."""

    def build_model(self):
        model = StackModel()
        model.table = nn.Linear(512, 512)
        return model


@pytest.mark.parametrize("name", ["lora", "qlora", "freeze"])
def test_a_checkpoint_holds_what_trains_and_not_the_base(tmp_path, name):
    chosen = {"freeze": {"name": "freeze", "train": ["head"]}}.get(name, {"name": name, "rank": 2})
    trainer = Large(**in_folder(tmp_path / "small", adapters=chosen), observers=[small := Recorder()])
    trainer.fit()
    held = Large(
        **in_folder(tmp_path / "whole", adapters={**chosen, "save_frozen": True}), observers=[whole := Recorder()]
    )
    held.fit()
    base = trainer.model.table.weight.nbytes
    assert base == 2**20
    assert small.saves[-1]["bytes"] < 0.05 * base
    assert whole.saves[-1]["bytes"] > base
    resumed = Large(
        **in_folder(tmp_path / "small", adapters=chosen) | {"steps": 5}, resume=str(tmp_path / "small" / "a" / "b")
    )
    assert resumed.fit()["steps"] == 5


@pytest.mark.parametrize("name", ["lora", "qlora"])
def test_a_checkpoint_is_not_taken_up_over_another_base(tmp_path, name):
    Stack(**in_folder(tmp_path, adapters=name)).fit()
    run = tmp_path / "a" / "b" / "checkpoints" / "step-3"
    with pytest.raises(
        CheckpointError, match=r"'embed.weight' of this run is not the one it was trained over; build the"
    ):
        Stack(**in_folder(tmp_path, adapters=name, seed=5) | QUIET).restore(run)
    with pytest.raises(CheckpointError, match=r"which this run has not|that this run has not"):
        Stack(**in_folder(tmp_path) | QUIET).restore(run)


def test_a_frozen_weight_that_was_written_is_kept(tmp_path):
    class Writing(Stack):
        def train_step(self, batch):
            with torch.no_grad():
                self.model.embed.bias.add_(1.0)
            return super().train_step(batch)

    trainer = Writing(**in_folder(tmp_path, adapters="lora"))
    trainer.fit()
    again = Writing(**in_folder(tmp_path, adapters="lora") | QUIET)
    again.restore(tmp_path / "a" / "b" / "checkpoints" / "step-3")
    assert torch.equal(again.model.embed.bias, trainer.model.embed.bias)
    assert largest_difference(state(again), state(trainer)) == 0.0


def test_a_digest_is_taken_once_of_what_is_not_written(tmp_path, monkeypatch):
    from fasttrain.trainer import left_out

    taken = []
    real = left_out.digest
    monkeypatch.setattr(left_out, "digest", lambda tensor: taken.append(tensor.shape) or real(tensor))
    Stack(**in_folder(tmp_path, adapters="lora", checkpoint={"every": 1})).fit()
    assert len(taken) == 16  # the weights and biases of the base, in three saves


def test_a_digest_depends_on_every_bit_and_not_on_the_layout():
    from fasttrain.trainer.left_out import digest

    x = torch.randn(3, 4, 5, 6)
    assert digest(x) == digest(x.to(memory_format=torch.channels_last)) == digest(x.clone())
    other = x.clone()
    other[2, 3, 4, 5] = torch.nextafter(other[2, 3, 4, 5], torch.tensor(9.0))
    assert (
        len({digest(x), digest(other), digest(x.view(4, 3, 5, 6)), digest(x.view(torch.int32)), digest(x.bfloat16())})
        == 5
    )
