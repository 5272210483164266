"""optimizer against torch's own, bit for bit; groups, fused kernels, and steps that are refused."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fasttrain import ConfigError, Data
from fasttrain.checkpoint import stored_tensors
from fasttrain.optim.adamw_8bit import adamw_8bit_class
from fasttrain.optim.fused import give_momentum_buffers
from fasttrain.optim.groups import parameter_groups
from fasttrain.optim.guarded import obeys_found_inf, step_unless
from fasttrain.strategies.optimizer import AdamWConfig, SgdConfig, adamw, sgd
from tests.helpers import QUIET, Recorder, by_dimension, largest_difference, points, state
from tests.ranks import run_ranks
from tests.stack import Stack, StackModel, batches_of, setting


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


TORCHS = {
    "sgd": (
        {"name": "sgd", "lr": 0.1, "momentum": 0.8, "weight_decay": 0.01, "nesterov": True},
        lambda m: torch.optim.SGD(by_dimension(m, 0.01), 0.1, momentum=0.8, nesterov=True, fused=True),
    ),
    "sgd without momentum": (
        {"name": "sgd", "lr": 0.1, "momentum": 0.0},
        lambda m: torch.optim.SGD(m.parameters(), 0.1, fused=True),
    ),
    "sgd, not fused": (
        {"name": "sgd", "lr": 0.1, "fused": False},
        lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, fused=False),
    ),
    "adamw": ({"name": "adamw"}, lambda m: torch.optim.AdamW(by_dimension(m, 0.01), fused=True)),
    "adamw, all decays": (
        {"name": "adamw", "decay_norms": True},
        lambda m: torch.optim.AdamW(m.parameters(), fused=True),
    ),
    "adamw, other settings": (
        {"name": "adamw", "lr": 0.02, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.2},
        lambda m: torch.optim.AdamW(by_dimension(m, 0.2), 0.02, betas=(0.8, 0.95), eps=1e-6, fused=True),
    ),
    "adamw, not fused": (
        {"name": "adamw", "lr": 0.02, "fused": False},
        lambda m: torch.optim.AdamW(by_dimension(m, 0.01), 0.02, fused=False),
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
    (group,) = parameter_groups(model, lr=0.1, weight_decay=0.0)
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


# ---- where states are kept, and when parameters are stepped

NAMES = ["sgd", "adamw", "lamb", "muon", "adamw_8bit", "adafactor"]


def trained(steps=6, kind=Ordered, **settings):
    trainer = kind(batch_size=8, steps=steps, observers=[watcher := Recorder()], **settings, **QUIET)
    trainer.fit()
    return trainer, watcher


@pytest.mark.parametrize(
    "more", [{}, {"schedule": "cosine", "accumulation": {"name": "microbatches", "num": 4}}], ids=str
)
@pytest.mark.parametrize("name", NAMES)
def test_in_backward_gives_the_same_bits_and_leaves_no_gradient_to_look_at(name, more):
    plain, without = trained(optimizer=name, **more)
    trainer, watcher = trained(optimizer={"name": name, "in_backward": True}, **more)
    assert largest_difference(state(trainer), state(plain)) == 0.0
    assert [record["loss"] for record in watcher.steps] == [record["loss"] for record in without.steps]
    assert [record["lr"] for record in watcher.steps] == [record["lr"] for record in without.steps]
    # The norm of no gradients would be 0, which is not what it was.
    assert {record["grad_norm"] for record in watcher.steps} == {None}
    assert all(record["grad_norm"] > 0 for record in without.steps)


@pytest.mark.parametrize("trick", [("activation_checkpointing", "full"), ("compile", "blocks")], ids=str)
def test_in_backward_goes_with_what_changes_the_backward_pass(trick):
    torch.compiler.reset()
    plain, _ = trained(optimizer="adamw", **setting(*trick))
    torch.compiler.reset()
    trainer, _ = trained(optimizer={"name": "adamw", "in_backward": True}, **setting(*trick))
    assert largest_difference(state(trainer), state(plain)) == 0.0
    assert {s["step"].item() for s in trainer.optimizer.state.values()} == {6.0}


def test_in_backward_holds_one_gradient_at_a_time():
    alive = []

    class Counting(Ordered):
        def build_model(self):
            model = super().build_model()
            for parameter in model.parameters():  # before the hooks that step
                parameter.register_post_accumulate_grad_hook(lambda _: alive.append(self.held(model)))
            return model

        def held(self, model):
            return sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)

    trainer, _ = trained(kind=Counting, optimizer={"name": "adamw", "in_backward": True})
    assert len(alive) == 6 * 16
    assert max(alive) == max(p.nbytes for p in trainer.model.parameters())
    alive.clear()
    trained(kind=Counting, optimizer="adamw")
    assert max(alive) == sum(p.nbytes for p in trainer.model.parameters())


ALL_GRADIENTS = {
    "precision": "fp16",
    "gradient_clipping": "norm",
    "nonfinite": "skip",
    "data_parallel": "ddp",
}


@pytest.mark.parametrize("slot", ALL_GRADIENTS)
def test_in_backward_is_refused_with_what_needs_all_gradients_first(slot):
    with pytest.raises(
        ConfigError, match=f"optimizer=adamw cannot be used with {slot}={ALL_GRADIENTS[slot]}: .*; use "
    ):
        Ordered(batch_size=8, optimizer={"name": "adamw", "in_backward": True}, **{slot: ALL_GRADIENTS[slot]}, **QUIET)


def test_in_backward_is_refused_for_several_optimizers():
    class Two(Ordered):
        def parts(self):
            return {"embed": self.model.embed, "head": self.model.head}

    with pytest.raises(ConfigError, match=r"in_backward=true: with several optimizers, .*; use optimizer.in_b"):
        Two(batch_size=8, optimizer={"name": "adamw", "in_backward": True}, **QUIET)


def test_microbatches_are_an_optimizers_business_only_in_the_backward_pass():
    plain = Ordered(batch_size=8, optimizer="adamw", **QUIET)
    trainer = Ordered(batch_size=8, optimizer={"name": "adamw", "in_backward": True}, **QUIET)
    assert dict(plain.plan.explain())["microbatch"] == []
    assert plain.plan._bare
    assert dict(trainer.plan.explain())["microbatch"] == ["optimizer=adamw"]


@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb", "muon"])
def test_offload_gives_the_same_bits(name):
    """On the CPU the host is the device; that states travel is tested where there is a GPU."""
    plain, _ = trained(optimizer=name, schedule="cosine")
    trainer, _ = trained(optimizer={"name": name, "offload": True}, schedule="cosine")
    assert largest_difference(state(trainer), state(plain)) == 0.0


MEMORY = {
    "in_backward": {"in_backward": True},
    "offload": {"offload": True},
    "bf16 moments": {"state_dtype": "bf16"},
    "all": {"in_backward": True, "offload": True, "state_dtype": "bf16"},
}


@pytest.mark.parametrize("precision", ["fp32", "bf16_true"])
@pytest.mark.parametrize("memory", MEMORY)
def test_a_resumed_run_goes_on_with_equal_bits(tmp_path, memory, precision):
    """Stochastic rounding draws from a generator of its own, whose state is in the checkpoint."""

    class Stop(Recorder):
        def stepped(self, record):
            if record["step"] == 3:
                self.run.request_stop("test")

    settings = {"batch_size": 8, "steps": 6, "log": {"every": 1}, "precision": precision, "schedule": "cosine"}
    settings["optimizer"] = {"name": "adamw", **MEMORY[memory]}
    straight = Ordered(**settings, run={"dir": None})
    straight.fit()
    settings["run"] = {"dir": str(tmp_path), "name": "a", "id": "b"}
    assert Ordered(**settings, observers=[Stop()]).fit()["steps"] == 3
    resumed = Ordered(**settings, resume="auto")
    assert resumed.fit()["steps"] == 6
    assert largest_difference(state(straight), state(resumed)) == 0.0
    bytes_of = [sum(v.nbytes for s in t.optimizer.state.values() for v in s.values()) for t in (straight, resumed)]
    assert bytes_of[0] == bytes_of[1]


def test_bf16_true_takes_half_the_bytes_of_weights_and_moments_but_for_what_it_keeps_in_float32():
    def held(precision):
        trainer, _ = trained(optimizer="adamw", precision=precision)
        moments = {n: trainer.optimizer.state[p]["exp_avg"] for n, p in trainer.model.named_parameters()}
        assert {n: m.dtype for n, m in moments.items()} == {n: p.dtype for n, p in trainer.model.named_parameters()}
        return {n: p.nbytes + 2 * moments[n].nbytes for n, p in trainer.model.named_parameters()}

    wide, narrow = held("fp32"), held("bf16_true")
    halves = {name for name in wide if wide[name] == 2 * narrow[name]}
    assert all(narrow[name] == wide[name] for name in wide.keys() - halves)
    assert {name for name in wide if ".norm." not in name} <= halves
    assert sum(wide[name] for name in halves) > 0.9 * sum(wide.values())


def narrow_on_two_ranks():
    trainer, _ = trained(optimizer="adamw", precision="bf16_true", seed=5)
    return state(trainer)


@pytest.mark.ranks
def test_replicas_round_alike():
    one, other = run_ranks(2, narrow_on_two_ranks)
    assert largest_difference(one, other) == 0.0


class Wide(Ordered):
    """Has weights that are large enough for moments of 8 bits."""

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 4))


def test_moments_of_8_bits_survive_a_save_and_load_as_plain_tensors(tmp_path):
    class Stop(Recorder):
        def stepped(self, record):
            if record["step"] == 3:
                self.run.request_stop("test")

    settings = {"batch_size": 8, "steps": 6, "log": {"every": 1}, "optimizer": "adamw_8bit"}
    straight = Wide(**settings, run={"dir": None})
    straight.fit()
    settings["run"] = {"dir": str(tmp_path), "name": "a", "id": "b"}
    Wide(**settings, observers=[Stop()]).fit()
    held = stored_tensors(tmp_path / "a" / "b" / "checkpoints" / "step-3")
    assert held["optimizer.model.0.weight.exp_avg:codes"] == (torch.Size([512, 8]), torch.uint8)
    assert held["optimizer.model.0.weight.exp_avg:scale"] == (torch.Size([16]), torch.float32)
    assert held["optimizer.model.0.bias.exp_avg"] == (torch.Size([512]), torch.float32)
    resumed = Wide(**settings, resume="auto")
    resumed.fit()
    assert largest_difference(state(straight), state(resumed)) == 0.0
    moment = resumed.optimizer.state[resumed.model[0].weight]["exp_avg"]
    assert type(moment) is type(straight.optimizer.state[straight.model[0].weight]["exp_avg"])


def test_muon_takes_the_matrices_of_blocks_and_nothing_else():
    trainer = Ordered(batch_size=8, optimizer={"name": "muon", "adamw": {"lr": 0.5, "weight_decay": 0.25}}, **QUIET)
    kinds = {name: group for group in trainer.optimizer.param_groups for name in group["param_names"]}
    by_muon = {name for name, group in kinds.items() if group["muon"]}
    assert by_muon == {f"blocks.{i}.{part}.weight" for i in (0, 1) for part in ("expand", "contract")}
    assert len(kinds) == 16
    assert (kinds["head.weight"]["lr"], kinds["head.weight"]["weight_decay"]) == (0.5, 0.25)
    assert (kinds["head.bias"]["lr"], kinds["head.bias"]["weight_decay"]) == (0.5, 0.0)
    assert (kinds["blocks.0.expand.weight"]["lr"], kinds["blocks.0.expand.weight"]["weight_decay"]) == (0.02, 0.1)


def test_muon_needs_blocks_and_says_so():
    with pytest.raises(ConfigError, match="optimizer=muon: no repeated blocks were found in Sequential"):
        Wide(batch_size=8, optimizer="muon", **QUIET)


def test_adamw_8bit_without_torchao_says_how_to_get_it(monkeypatch):
    adamw_8bit_class.cache_clear()
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ConfigError, match=r"optimizer=adamw_8bit needs .*; pip install 'fasttrain\[torchao\]'"):
        Ordered(batch_size=8, optimizer="adamw_8bit", **QUIET)
    adamw_8bit_class.cache_clear()
