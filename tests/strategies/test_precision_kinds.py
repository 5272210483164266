"""bf16_true against plain torch, modules left in float32, and the precision that a device has in hardware."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import yaml
from torch import nn
from torch.nn import functional as F

from fasttrain import ConfigError, Data, Trainer
from fasttrain.checkpoint import load_plain, newest, stored_tensors
from fasttrain.core.strategy import Context
from fasttrain.models.resnet import build_resnet
from fasttrain.nn.full_precision import in_float32, run_in_float32
from fasttrain.nn.narrow_weights import narrow_weights
from fasttrain.nn.patterns import modules_matching
from fasttrain.optim.chunks import step_in_chunks
from fasttrain.optim.rounding import shared_generator
from fasttrain.strategies.precision import Auto, Bf16, Bf16True
from tests.helpers import QUIET, Recorder, largest_difference, points, state
from tests.stack import Stack, StackModel, batches_of

BF16 = torch.bfloat16


class Ordered(Stack):
    """The batches of `batches_of`, in order, and torch's own SGD."""

    def build_data(self):
        return Data(train=points(), evaluation=points(), shuffle=False)

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)


def trained(cls=Ordered, steps=6, **settings):
    watcher = Recorder()
    trainer = cls(batch_size=8, steps=steps, observers=[watcher], **settings, **QUIET)
    trainer.fit()
    return trainer, [record["loss"] for record in watcher.steps]


def plain(dtype, steps=6, head=None):
    """A loop as one writes it: the model cast, the inputs cast, the loss in float32. `head`: the dtype of the last layer."""
    torch.manual_seed(0)
    model = StackModel()
    for part in model.children():
        part.to(dtype if part is not model.head or head is None else head)
    if head is not None:
        model.head.forward = lambda x: F.linear(x.to(head), model.head.weight, model.head.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    if dtype is BF16:
        step_in_chunks(optimizer, narrow=True, generator=shared_generator("cpu"))
    losses = []
    for x, y in (batches_of() * steps)[:steps]:
        loss = F.cross_entropy(model(x.to(dtype)).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


# ---- bf16_true


def test_bf16_true_is_a_model_cast_by_hand_with_a_loss_in_float32():
    trainer, losses = trained(precision="bf16_true")
    model, expected = plain(BF16)
    assert losses == expected
    assert losses != plain(torch.float32)[1]
    assert largest_difference(state(trainer), model.state_dict()) == 0.0
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {BF16}


def test_weights_gradients_and_activations_are_bfloat16_and_what_the_loss_gets_is_float32():
    trainer = Ordered(batch_size=8, steps=1, precision="bf16_true", **QUIET)
    given = {}
    for name, module in trainer.model.named_modules():
        if name:
            module.register_forward_hook(lambda m, a, out, name=name: given.update({name: out.dtype}))
    x, y = batches_of()[0]
    output = trainer.model(x)
    F.cross_entropy(output, y).backward()
    assert output.dtype == torch.float32
    assert set(given.values()) == {BF16}
    assert len(given) == 12
    assert {p.grad.dtype for p in trainer.model.parameters()} == {BF16}
    policy = trainer.plan.context.dtypes
    assert (policy.compute, policy.reduce, policy.parameters) == (BF16, torch.float32, BF16)


@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.RMSNorm(8)], ids=lambda n: type(n).__name__)
def test_a_norm_of_bfloat16_weights_is_computed_in_float32_and_rounded_once(norm):
    torch.manual_seed(0)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    narrow_weights(nn.Sequential(norm), BF16)
    x = torch.randn(64, 8).to(BF16) * 3 + 1
    wide = copy.deepcopy(norm).float()
    wide._forward_pre_hooks.clear()
    assert norm.weight.dtype == BF16
    assert torch.equal(norm(x), wide(x.float()).to(BF16))


def test_softmax_of_bfloat16_is_computed_in_float32_and_rounded_once():
    x = torch.randn(8, 999, generator=torch.Generator().manual_seed(0)).to(BF16)
    assert torch.equal(x.softmax(1), x.float().softmax(1).to(BF16))


def test_norms_with_running_statistics_stay_float32_and_take_narrow_inputs():
    model = build_resnet("resnet8", num_classes=4, stem="small", channels=1, width=8)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    narrow_weights(model, BF16)
    out = []
    norms[0].register_forward_hook(lambda m, a, output: out.append((a[0].dtype, output.dtype)))
    model(torch.randn(4, 1, 8, 8)).sum().backward()
    assert out == [(BF16, BF16)]
    assert len(norms) == 9
    assert {t.dtype for norm in norms for t in (norm.weight, norm.running_mean, norm.running_var)} == {torch.float32}
    assert {model.conv1.weight.dtype, model.fc.weight.dtype, model.conv1.weight.grad.dtype} == {BF16}


class Noisy(nn.Module):
    """Takes images and a time each; adds a table of positions that is no parameter."""

    def __init__(self):
        super().__init__()
        self.time, self.proj = nn.Linear(1, 8), nn.Linear(8, 8)
        self.register_buffer("table", torch.full((8,), 1.001))
        self.seen = {}

    def forward(self, x, t):
        self.seen = {"x": x.dtype, "t": t.dtype, "time": t[2].item()}
        return self.proj(x + self.table) + self.time(t[:, None] / 1000)


def test_numbers_a_sample_targets_and_buffers_are_left_as_they_are():
    class Diffusion(Trainer):
        def build_data(self):
            return Data(
                train=(torch.randn(8, 8), torch.arange(994.0, 1002.0), torch.full((8, 8), 997.0)), shuffle=False
            )

        def build_model(self):
            return Noisy()

        def inputs(self, batch):
            return batch[:2]

        def loss(self, output, batch):
            assert output.dtype == batch[2].dtype == torch.float32
            return F.mse_loss(output, batch[2])

    trainer = Diffusion(batch_size=8, steps=1, precision="bf16_true", **QUIET)
    trainer.fit()
    assert trainer.model.seen == {"x": BF16, "t": torch.float32, "time": 996.0}
    assert torch.tensor(997.0).to(BF16).item() == 996.0
    assert trainer.model.table.dtype == torch.float32


def test_a_part_called_from_outside_takes_what_the_user_gives():
    class Outside(Ordered):
        def compute_loss(self, batch):
            x = self.model.embed(batch[0])  # not through the model's own forward
            for block in self.model.blocks:
                x = block(x)
            return F.cross_entropy(self.model.head(x).float(), batch[1])

    assert trained(Outside, precision="bf16_true")[1] == plain(BF16)[1]


def test_a_checkpoint_keeps_bfloat16_under_the_same_names(tmp_path):
    settings = {"batch_size": 8, "precision": "bf16_true", "run": {"dir": str(tmp_path), "name": "a", "id": "b"}}
    first = Ordered(**settings, steps=3)
    first.fit()
    path = newest(tmp_path / "a" / "b").path
    held = {n.removeprefix("model."): d for n, (_, d) in stored_tensors(path).items() if n.startswith("model.")}
    assert list(StackModel().state_dict()) == sorted(held, key=list(StackModel().state_dict()).index)
    assert set(held.values()) == {BF16}
    assert "bf16_true" in load_plain(path)["config"]
    second = Ordered(**{**settings, "steps": 3, "run": {"dir": None}})
    second.restore(path)
    assert largest_difference(state(first), state(second)) == 0.0


def test_a_weight_shared_with_a_float32_module_stays_float32_and_both_compute():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mix, self.head = nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens):
            return self.head(self.mix(self.embed(tokens)))

    model = Tied()
    assert narrow_weights(model, BF16, [model.head]) == 2
    output = model(torch.arange(10))
    assert (model.embed.weight.dtype, model.mix.weight.dtype, output.dtype) == (torch.float32, BF16, torch.float32)
    assert model.head.weight is model.embed.weight


def test_bf16_true_compiles_whole_and_gives_the_same():
    torch.compiler.reset()
    torch.manual_seed(0)
    model = StackModel(norm=nn.BatchNorm1d)
    narrow_weights(model, BF16, [model.head, model.blocks[0].norm])
    x = points()[0]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), copy.deepcopy(model)(x))


def saved_bytes(model, x, autocast=False):
    """Bytes that autograd keeps for the backward pass, each storage once, without the weights."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held = {}

    def pack(tensor):
        held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", BF16, enabled=autocast):
        model(x)
    return sum(t.untyped_storage().nbytes() for pointer, t in held.items() if pointer not in weights)


def test_activations_take_half_as_many_bytes():
    def model():
        return build_resnet("resnet8", num_classes=4, stem="small", width=16)

    x = torch.randn(32, 3, 32, 32)
    full = saved_bytes(model(), x)
    assert saved_bytes(model(), x, autocast=True) <= 0.62 * full
    narrow = model()
    narrow_weights(narrow, BF16)
    assert saved_bytes(narrow, x) <= 0.51 * full
    layer = nn.TransformerEncoderLayer(64, 4, 256, 0.0, activation="gelu", batch_first=True)
    x = torch.randn(8, 32, 64)
    full = saved_bytes(layer, x)
    narrow_weights(layer, BF16)
    assert saved_bytes(layer, x) <= 0.51 * full


# ---- exclude


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16_true"])
def test_excluded_modules_run_in_float32_on_float32_inputs_and_the_others_do_not(precision):
    trainer = Ordered(
        batch_size=8, steps=1, precision={"name": precision, "exclude": ["head", "blocks.*.norm"]}, **QUIET
    )
    seen = {}
    plain_forward = F.linear, F.layer_norm

    def linear(x, weight, bias=None):
        seen.setdefault("linear", []).append((x.dtype, weight.dtype, torch.is_autocast_enabled("cpu")))
        return plain_forward[0](x, weight, bias)

    def layer_norm(x, *args, **kwargs):
        seen.setdefault("norm", []).append((x.dtype, torch.is_autocast_enabled("cpu")))
        return plain_forward[1](x, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "linear", linear)
        patch.setattr(F, "layer_norm", layer_norm)
        with trainer.plan.forward():
            trainer.model(points()[0])
    assert len(seen["linear"]) == 6
    assert seen["linear"][-1] == (torch.float32, torch.float32, False)
    assert (torch.float32, torch.float32, False) not in seen["linear"][:-1]
    assert seen["norm"] == [(torch.float32, False)] * 2


def test_an_excluded_head_equals_one_written_by_hand():
    trainer, losses = trained(precision={"name": "bf16_true", "exclude": ["head"]})
    model, expected = plain(BF16, head=torch.float32)
    assert losses == expected
    assert largest_difference(state(trainer), model.state_dict()) == 0.0
    assert {n for n, p in trainer.model.named_parameters() if p.dtype == torch.float32} == {"head.weight", "head.bias"}


def test_everything_excluded_is_float32_training():
    reference = trained(steps=4)[1]
    assert trained(steps=4, precision={"name": "bf16", "exclude": ["*"]})[1] == reference
    assert trained(steps=4, precision={"name": "bf16_true", "exclude": ["*"]})[1] == reference


def test_a_pattern_that_matches_nothing_names_close_modules():
    with pytest.raises(ConfigError, match=r"precision=bf16 exclude=haed matches no module of StackModel.*'head'"):
        Ordered(batch_size=8, precision={"name": "bf16", "exclude": ["haed"]}, **QUIET)
    with pytest.raises(ConfigError, match=r"layers\.\*\.norm matches no module.*blocks\.1\.norm"):
        Ordered(batch_size=8, precision={"name": "bf16_true", "exclude": ["head", "layers.*.norm"]}, **QUIET)
    with pytest.raises(ConfigError, match="there are embed, head"):
        modules_matching(StackModel(), ["zzz"], "x")


def test_a_list_of_modules_stands_for_what_it_holds():
    assert list(modules_matching(StackModel(), ["blocks"], "x")) == ["blocks.0", "blocks.1"]
    assert list(modules_matching(StackModel(), ["blocks.*.norm"], "x")) == ["blocks.0.norm", "blocks.1.norm"]


def test_a_class_that_is_exchanged_later_is_not_lost_in_an_excluded_module():
    class Twice(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    layer = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    expected = layer(x) * 2
    run_in_float32([layer], "cpu")
    layer.__class__ = Twice
    assert torch.equal(layer(x), expected)


def test_what_stands_under_an_excluded_module_is_known():
    model = StackModel()
    run_in_float32([model.blocks[0]], "cpu")
    assert in_float32(model) == set(model.blocks[0].modules())


def test_a_copy_computes_with_its_own_weights():
    model = StackModel()
    narrow_weights(model, BF16, [model.head])
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    x = points()[0]
    assert other(x).abs().max() == 0
    assert model(x).abs().max() > 0


# ---- what the device has


@pytest.fixture
def card(monkeypatch):
    def of(major, minor):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
        return torch.device("cuda", 0)

    return of


@pytest.mark.parametrize(
    ("capability", "name"),
    [((6, 1), "fp32"), ((7, 0), "fp16"), ((7, 5), "fp16"), ((8, 0), "bf16"), ((9, 0), "bf16"), ((12, 0), "bf16")],
)
def test_auto_takes_what_a_card_has_in_hardware(card, capability, name):
    taken, why = Auto.stands_for(card(*capability))
    assert taken == name
    assert f"compute capability {capability[0]}.{capability[1]}" in why


@pytest.mark.parametrize("has", [True, False])
def test_auto_on_a_cpu_looks_for_bfloat16_instructions_and_the_run_says_so(monkeypatch, has):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    watcher = Recorder()
    trainer = Stack(
        batch_size=8, steps=1, precision={"name": "auto", "exclude": ["head"]}, observers=[watcher], **QUIET
    )
    name = "bf16" if has else "fp32"
    assert trainer.plan.strategies["precision"].name == trainer.resolved.names["precision"] == name
    assert dict(trainer.plan.explain())["forward"] == (["precision=bf16"] if has else [])
    trainer.fit()
    assert watcher.run.notes[0].startswith(f"precision={name} (auto: cpu ")
    assert f"name: {name}" in watcher.run.config_yaml
    assert "auto" not in str(yaml.safe_load(watcher.run.config_yaml)["precision"])
    assert ("exclude: [head]" in watcher.run.config_yaml) is has
    same = Stack(batch_size=8, steps=1, precision=dict(trainer.resolved.as_dict()["precision"]), **QUIET)
    assert same.resolved.hash() == trainer.resolved.hash()


def test_clashes_are_those_of_the_precision_taken(monkeypatch):
    monkeypatch.setattr(Auto, "stands_for", classmethod(lambda cls, device: ("fp16", "for a test")))
    trainer = Stack(batch_size=8, steps=2, precision="auto", **QUIET)
    assert trainer.plan.strategies["precision"].scaler.get_scale() == 65536.0
    with pytest.raises(ConfigError, match="precision=fp16"):
        Stack(batch_size=8, steps=2, precision="auto", nonfinite="raise", **QUIET)


def test_a_plan_made_by_hand_is_told_to_name_the_precision():
    context = Context(device=torch.device("cpu"))
    for verb in (lambda: Auto(None, context).dtypes(), lambda: Auto(None, context).model(nn.Linear(2, 2))):
        with pytest.raises(ConfigError, match=r"Auto\.stands_for"):
            verb()


@pytest.mark.parametrize("strategy", [Bf16, Bf16True])
def test_asked_for_bfloat16_on_a_card_that_emulates_it_runs_with_one_warning(card, strategy):
    with pytest.warns(UserWarning, match=r"no bfloat16 in hardware.*use precision=fp16, or precision=auto") as told:
        strategy(None, Context(device=card(7, 5))).model(StackModel())
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategy(None, Context(device=card(7, 5), data_rank=1)).model(StackModel())
        strategy(None, Context(device=card(8, 0))).model(StackModel())


def test_the_head_of_a_run_says_where_no_time_is_saved(capsys):
    trained(Stack, steps=1, precision={"name": "fp16", "exclude": ["head"]})
    printed = capsys.readouterr().out
    assert "precision=fp16: cpu has no float16 products in hardware: no time is saved\n" in printed
    assert "precision=fp16: float32 in head\n" in printed
