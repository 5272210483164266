"""weight_averaging against torch's own averages: what moves, when, what evaluations and checkpoints see."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from fasttrain import ConfigError, Data, lazy
from fasttrain.checkpoint import newest, stored_tensors
from fasttrain.cli.main import main
from fasttrain.core.plan import Plan
from fasttrain.core.strategy import Context
from fasttrain.errors import CheckpointError
from fasttrain.optim.averages import Averages, ema_rate, move, swa_rate
from fasttrain.strategies.nonfinite import Skip
from fasttrain.strategies.weight_averaging import Ema, EmaConfig, Swa, SwaConfig
from tests.helpers import QUIET, Recorder, largest_difference, points, state
from tests.ranks import run_ranks
from tests.stack import Restless, Stack, StackModel
from tests.strategies.test_nonfinite import make
from tests.test_several_optimizers import SETTINGS as GAN_SETTINGS
from tests.test_several_optimizers import Gan, samples

CONTEXT = Context(device=torch.device("cpu"))
SGD = {"name": "sgd", "lr": 0.1}


class Normed(Stack):
    """Batch norms, data in order, and an evaluation."""

    norm = nn.BatchNorm1d

    def build_data(self):
        return Data(train=points(32), evaluation=points(16, seed=4), shuffle=False)


def trained(kind=Normed, steps=8, fit=True, **settings):
    trainer = kind(batch_size=8, steps=steps, **{"optimizer": SGD, **QUIET, **settings})
    if fit:
        trainer.fit()
    return trainer


def averages_of(trainer):
    """The averages by name, copied; nothing else."""
    saved = trainer.plan.strategies["weight_averaging"].state_dict()
    return {name: value.clone() for name, value in saved.items() if not name.startswith(".")}


def shown(trainer):
    with trainer.evaluating():
        return state(trainer)


def in_plain_torch(averaged, steps=8, every=1, start=0):
    """The same training by hand, with torch's AveragedModel; returns model and averages."""
    torch.manual_seed(0)
    model = StackModel(nn.BatchNorm1d)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    kept = averaged(model)
    x, y = points(32)
    for step in range(1, steps + 1):
        i = (step - 1) % 4 * 8
        F.cross_entropy(model(x[i : i + 8]), y[i : i + 8]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= start and (step - start) % every == 0:
            kept.update_parameters(model)
    return model, kept


# ---- the averages


@pytest.mark.parametrize(("every", "start"), [(1, 0), (3, 0), (2, 3)])
def test_ema_is_torchs_to_the_bit_and_leaves_the_training_alone(every, start):
    trainer = trained(weight_averaging={"name": "ema", "decay": 0.8, "every": every, "start": start})
    model, kept = in_plain_torch(
        lambda m: AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True), every=every, start=start
    )
    assert largest_difference(state(trainer), model.state_dict()) == 0.0
    ours, theirs = shown(trainer), kept.module.state_dict()
    counters = [name for name in ours if name.endswith("num_batches_tracked")]
    assert len(counters) == 2
    assert all(ours[name].dtype == torch.int64 and ours[name].item() == 8 for name in counters)
    assert all(torch.equal(ours[n], theirs[n]) for n in ours if n not in counters)
    assert largest_difference(ours, state(trainer)) > 0.01


def test_swa_is_the_equal_average_of_the_weights():
    trainer = trained(weight_averaging={"name": "swa", "start": 0.5, "every": 2, "statistics_batches": None})
    _, kept = in_plain_torch(AveragedModel, start=4, every=2)
    ours = averages_of(trainer)
    assert (int(kept.n_averaged), len(ours)) == (3, 16)
    for name, parameter in kept.module.named_parameters():
        assert torch.allclose(ours[name], parameter, rtol=0, atol=1e-7)
    # Statistics of batch norms are those of the weights that train, and no average is kept of them.
    assert all(torch.equal(shown(trainer)[n], b) for n, b in trainer.model.named_buffers())


def test_the_warm_up_follows_its_formula():
    assert [ema_rate(t, 0.9, warmup=True) for t in range(4)] == pytest.approx([1, 9 / 11, 9 / 12, 9 / 13])
    assert ema_rate(1000, 0.9, warmup=True) == pytest.approx(0.1)
    for t in range(200):
        on_device = torch.tensor(float(t))
        for warmup in (False, True):
            assert ema_rate(on_device, 0.99, warmup).item() == pytest.approx(ema_rate(t, 0.99, warmup), rel=1e-6)
        assert swa_rate(on_device).item() == pytest.approx(swa_rate(t), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("on_device", [False, True])
def test_averages_are_float32_or_wider_whatever_the_weights_are(dtype, on_device):
    weights = {"a": nn.Parameter(torch.randn(5, 3).to(dtype)), "b": nn.Parameter(torch.randn(4).to(dtype))}
    averages = Averages(weights)
    expected = {
        name: w.detach().to(torch.promote_types(dtype, torch.float32), copy=True) for name, w in weights.items()
    }
    for t in range(20):
        rate = ema_rate(t, 0.99)
        averages.update(torch.tensor(rate) if on_device else rate)
        if t:
            expected = {n: torch.lerp(e, weights[n].detach().to(e.dtype), rate) for n, e in expected.items()}
        for weight in weights.values():
            weight.data.add_(0.01)
    for name, average in averages.tensors().items():
        assert average.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert torch.allclose(average, expected[name], rtol=0, atol=1e-6)
    raw = {name: weight.detach().clone() for name, weight in weights.items()}
    with averages.shown():
        for name, weight in weights.items():
            assert weight.dtype == dtype
            assert torch.equal(weight.detach(), averages.tensors()[name].to(dtype))
    assert all(torch.equal(weights[name], raw[name]) for name in raw)


def test_moving_by_one_takes_the_weights_and_moving_by_zero_leaves_the_bits():
    for fused in (False, True):
        weights = [torch.randn(7, 3), torch.randn(11)]
        averages = [torch.zeros_like(w) for w in weights]
        move(averages, weights, torch.tensor(1.0), fused)
        assert all(torch.equal(a, w) for a, w in zip(averages, weights, strict=True))
        move(averages, [w * 3 for w in weights], torch.tensor(0.0), fused)
        assert all(torch.equal(a, w) for a, w in zip(averages, weights, strict=True))


def calls_of(monkeypatch, *names):
    seen = []
    for name in names:
        original = getattr(lazy.torch, name)
        monkeypatch.setattr(
            lazy.torch, name, lambda *a, o=original, n=name, **k: (seen.append((n, len(a[0]))), o(*a, **k))[1]
        )
    return seen


def test_an_update_is_one_call_for_all_tensors(monkeypatch):
    seen = calls_of(monkeypatch, "_foreach_lerp_", "_fused_sgd_")
    trainer = trained(fit=False, weight_averaging="ema", optimizer="adamw")
    batches = trainer.feed.training(trainer.task, trainer.plan)
    for _ in range(3):
        trainer.train_step(next(batches))
    assert seen == [("_foreach_lerp_", 20)] * 3  # 16 weights and 4 running statistics


def test_weights_that_do_not_train_are_not_copied_and_tied_ones_stand_once():
    class Tied(Stack):
        def build_model(self):
            model = super().build_model()
            model.blocks[1].expand.weight = model.blocks[0].expand.weight
            model.embed.requires_grad_(False)
            return model

    trainer = trained(Tied, weight_averaging={"name": "ema", "decay": 0.5})
    averages = averages_of(trainer)
    assert sorted(set(dict(trainer.model.named_parameters())) - set(averages)) == ["embed.bias", "embed.weight"]
    assert "blocks.1.expand.weight" not in averages
    assert len(averages) == 13
    with trainer.evaluating():
        assert trainer.model.blocks[0].expand.weight is trainer.model.blocks[1].expand.weight
        assert torch.equal(trainer.model.blocks[0].expand.weight.detach(), averages["blocks.0.expand.weight"])


def test_a_buffer_that_is_replaced_in_each_forward_is_followed():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.register_buffer("seen", torch.zeros(2))
            self.register_buffer("cache", torch.zeros(2), persistent=False)

    model = Own()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan([Ema(EmaConfig(decay=0.5), CONTEXT)], CONTEXT)
    plan.started(model, optimizer, 0)
    for step in (1, 2, 3):
        model.seen, model.cache = model.seen + step, model.cache + 1
        plan.updated(model, optimizer, step)
    with plan.evaluating(model):
        assert model.seen.tolist() == [4.0, 4.0]  # 1, then (1 + 3)/2 = 2, then (2 + 6)/2
        assert model.cache.tolist() == [3.0, 3.0]
    assert model.seen.tolist() == [6.0, 6.0]


# ---- refused steps


@pytest.fixture
def reads(monkeypatch):
    """Every look at a tensor's value from the host."""
    seen = []
    for method in ("item", "tolist", "__float__", "__bool__", "__int__", "__index__"):
        original = getattr(torch.Tensor, method)
        monkeypatch.setattr(
            torch.Tensor, method, lambda self, *a, m=method, o=original: (seen.append(m), o(self, *a))[1]
        )
    return seen


AVERAGES = {
    "ema": {"name": "ema", "decay": 0.8},
    "ema, warm": {"name": "ema", "decay": 0.99, "warmup": True},
    "ema, every": {"name": "ema", "decay": 0.8, "every": 2, "start": 3},
    "swa": {"name": "swa", "start": 2},
}


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("bad", [(1,), (4,), (2, 3, 7)])
def test_a_skipped_step_moves_no_average(bad, fused, average):
    settings = {"weight_averaging": AVERAGES[average], "schedule": "constant", "optimizer": {**SGD, "fused": fused}}
    skipping = make(*bad, nonfinite="skip", gradient_clipping={"name": "norm", "max_norm": 0.5}, **settings)
    assert skipping.fit()["refused_steps"] == len(bad)
    plain = make(**settings, gradient_clipping={"name": "norm", "max_norm": 0.5})
    batches = plain.feed.training(plain.task, plain.plan)
    for step in range(1, 11):
        batch = next(batches)
        if step not in bad:
            plain.train_step(batch)
    ours, theirs = (t.plan.strategies["weight_averaging"].state_dict() for t in (skipping, plain))
    assert ours[".updates"] == theirs[".updates"]
    assert ours[".updates"][0] > 1
    assert len(averages_of(plain)) == 16
    assert largest_difference(averages_of(skipping), averages_of(plain)) <= (1e-7 if fused else 0.0)


def test_fp16_with_skipping_clipping_and_ema_reads_nothing_between_log_points(reads):
    """The scale overflows in the first steps: neither rate nor average moves until it fits."""

    class Loud(Restless):
        def loss(self, output, batch):
            return super().loss(output, batch) * 1e4

    trainer = Loud(
        batch_size=8,
        steps=100,
        run={"dir": None},
        log={"every": 1000},
        precision={"name": "fp16", "init_scale": 2.0**20, "backoff_factor": 0.25},
        nonfinite="skip",
        gradient_clipping="norm",
        schedule={"name": "linear", "warmup": 10},
        optimizer={"name": "adamw"},
        weight_averaging={"name": "ema", "decay": 0.9, "warmup": True},
    )
    batches = trainer.feed.training(trainer.task, trainer.plan)
    average = trainer.plan.strategies["weight_averaging"]
    before, refused_before, moved, rates = None, 0, [], []
    for step in range(12):
        batch = next(batches)
        reads.clear()
        trainer.train_step(batch)
        if step:  # the first makes the table of rates
            assert reads == []
        refused = int(trainer.plan.refused(trainer.optimizer))
        now = next(iter(average._parts.values())).averages.tensors()
        now = {name: value.clone() for name, value in now.items()}
        if before is not None:
            same = all(torch.equal(now[name], before[name]) for name in now)
            moved.append((refused != refused_before, same))
        before, refused_before = now, refused
        rates.append((step + 1 - refused, float(trainer.optimizer.param_groups[0]["lr"])))
    assert refused >= 2
    assert len([True for was_refused, _ in moved if not was_refused]) >= 3
    assert all(was_refused == same for was_refused, same in moved)
    assert average.state_dict()[".updates"] == [12 - refused]
    assert rates == [(accepted, pytest.approx(1e-3 * (accepted + 1) / 11)) for accepted, _ in rates]


# ---- evaluation


def test_an_evaluation_uses_the_averages_and_before_the_first_update_the_weights():
    watcher = Recorder()
    ema = {"name": "ema", "decay": 0.9, "start": 4}
    trainer = trained(weight_averaging=ema, evaluate={"every": 2}, observers=[watcher])
    plain = trained(evaluate={"every": 2}, observers=[without := Recorder()])
    losses = [[record["metrics"]["loss"] for record in w.evaluations] for w in (watcher, without)]
    # At step 2 there is none; at step 4 the first update took the weights; then they part.
    assert losses[0][:2] == losses[1][:2]
    assert losses[0][2] != losses[1][2]
    assert losses[0][3] != losses[1][3]
    averaged = copy.deepcopy(trainer.model)
    averaged.load_state_dict(shown(trainer))
    averaged.eval()
    x, y = points(16, seed=4)
    assert losses[0][3] == pytest.approx(F.cross_entropy(averaged(x), y).item(), rel=1e-6)
    assert largest_difference(state(trainer), state(plain)) == 0.0
    assert [record["loss"] for record in watcher.steps] == [record["loss"] for record in without.steps]


def test_weights_are_exchanged_not_copied():
    trainer = trained(weight_averaging="ema")
    places = {name: p.data_ptr() for name, p in trainer.model.named_parameters()}
    averages = {
        n: a.data_ptr() for n, a in trainer.plan.strategies["weight_averaging"].state_dict().items() if n[0] != "."
    }
    with trainer.evaluating():
        assert {name: p.data_ptr() for name, p in trainer.model.named_parameters()}.items() <= averages.items()
    assert {name: p.data_ptr() for name, p in trainer.model.named_parameters()} == places


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_of_another_dtype_than_its_average_stays_where_it_lies(dtype):
    """CUDA graphs know a weight by its address, and are recorded anew for another one."""
    weight = nn.Parameter(torch.randn(6).to(dtype))
    averages = Averages({"weight": weight})
    averages.update(1.0)
    averaged = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(3.0)
    raw, place = weight.detach().clone(), weight.data_ptr()
    for _ in range(2):
        with averages.shown():
            assert torch.equal(weight, averaged)
            assert weight.data_ptr() == place
        assert torch.equal(weight, raw)
        assert weight.data_ptr() == place


def test_a_weight_that_is_a_part_of_larger_memory_stays_in_it():
    whole = torch.arange(8.0)
    weight = nn.Parameter(whole[:4])
    averages = Averages({"weight": weight})
    averages.update(1.0)
    with torch.no_grad():
        weight.add_(1.0)
    place = weight.data_ptr()
    with averages.shown():
        assert weight.tolist() == [0, 1, 2, 3] == whole[:4].tolist()
        assert weight.data_ptr() == place
    assert whole.tolist() == [1, 2, 3, 4, 4, 5, 6, 7]


def test_an_evaluation_within_an_evaluation_leaves_the_averages_in():
    trainer = trained(weight_averaging="ema")
    raw, averages = state(trainer), shown(trainer)
    with trainer.evaluating():
        trainer.evaluate()
        assert largest_difference(state(trainer), averages) == 0.0
    assert largest_difference(state(trainer), raw) == 0.0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_blocks_neither_recompile_nor_go_stale():
    torch.compiler.reset()
    compiled = {"compile": {"name": "blocks", "backend": "aot_eager"}}
    ema = {"name": "ema", "decay": 0.5}
    trainer, plain = (trained(Stack, fit=False, weight_averaging=ema, **more) for more in (compiled, {}))
    x = points(8)[0]
    outputs, graphs = [], []
    for t in (trainer, plain):
        batches = t.feed.training(t.task, t.plan)
        for _ in range(4):
            t.train_step(next(batches))
            with torch.no_grad():
                t.model(x)  # without gradients, as evaluations are
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
            with t.evaluating(), torch.no_grad():
                outputs.append(t.model(x))
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert len(set(graphs)) == 1
    for ours, theirs in zip(outputs[:4], outputs[4:], strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-6)
    assert not torch.allclose(outputs[0], outputs[3], rtol=0, atol=1e-4)


# ---- batch statistics of swa


def test_statistics_are_taken_anew_as_torchs_update_bn_does():
    trainer = trained(weight_averaging={"name": "swa", "start": 4})
    expected = copy.deepcopy(trainer.model)
    with torch.no_grad():
        for name, average in averages_of(trainer).items():
            expected.get_parameter(name).copy_(average)
    x, _ = points(32)
    update_bn([x[i : i + 8] for i in range(0, 32, 8)], expected)
    ours = shown(trainer)
    names = [name for name in ours if "running" in name]
    assert len(names) == 4
    for name in names:
        assert torch.allclose(ours[name], expected.state_dict()[name], rtol=1e-5, atol=1e-6)
        assert not torch.allclose(ours[name], state(trainer)[name], rtol=1e-2)


class DataSet(torch.utils.data.Dataset):
    """Draws in each sample, and so would move if anything were drawn twice."""

    def __len__(self):
        return 32

    def __getitem__(self, i):
        x, y = points(32)
        return x[i] + 0.1 * torch.randn(8), y[i]


def loader():
    x, y = points(32)
    generator = torch.Generator().manual_seed(7)
    data = torch.utils.data.TensorDataset(x, y)
    return torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, generator=generator)


@pytest.mark.parametrize("source", ["tensors", "dataset", "loader"])
@pytest.mark.parametrize("accumulation", [None, {"name": "microbatches", "num": 2}], ids=["whole", "microbatches"])
def test_the_statistics_move_nothing_of_the_training(source, accumulation):
    train = {"tensors": lambda: points(32), "dataset": DataSet, "loader": loader}[source]

    class Drawing(Restless):
        def build_data(self):
            return Data(train=train(), evaluation=points(16, seed=4))

    swa = {"name": "swa", "start": 2, "statistics_batches": 3}
    settings = {"evaluate": {"every": 3}, "accumulation": accumulation}
    averaging = trained(Drawing, steps=10, weight_averaging=swa, **settings, observers=[watcher := Recorder()])
    plain = trained(Drawing, steps=10, **settings, observers=[without := Recorder()])
    assert [record["loss"] for record in watcher.steps] == [record["loss"] for record in without.steps]
    assert largest_difference(state(averaging), state(plain)) == 0.0
    first, second = averaging.evaluate(), averaging.evaluate()
    assert first == second == watcher.evaluations[-1]["metrics"]
    assert first != without.evaluations[-1]["metrics"]


def test_dropout_is_off_while_statistics_are_taken():
    modes = []

    class Looking(Restless):
        def build_data(self):
            return Data(train=points(32), evaluation=points(16, seed=4))

        def inputs(self, batch):
            modes.append((self.model.blocks[0].dropout.training, self.model.blocks[0].norm.training))
            return super().inputs(batch)

    trainer = trained(Looking, weight_averaging={"name": "swa", "statistics_batches": 4})
    momenta = [module.momentum for module in trainer.model.modules() if isinstance(module, nn.BatchNorm1d)]
    assert modes.count((True, True)) == 8
    assert modes.count((False, True)) == 4
    assert momenta == [0.1, 0.1]
    assert all(module.training for module in trainer.model.modules())


def test_norms_that_are_frozen_keep_their_statistics():
    class Frozen(Normed):
        def build_model(self):
            model = super().build_model()
            model.blocks[0].norm.eval()
            return model

    trainer = trained(Frozen, weight_averaging={"name": "swa"})
    ours = shown(trainer)
    assert ours["blocks.0.norm.running_mean"].abs().sum() == 0.0
    assert ours["blocks.1.norm.running_mean"].abs().sum() > 0.0


def test_data_that_cannot_be_gone_through_twice_is_refused_where_there_are_batch_norms():
    class Once(Normed):
        def build_data(self):
            x, y = points(32)
            return Data(train=iter([(x[:8], y[:8]), (x[8:16], y[8:16])]))

    with pytest.raises(
        ConfigError, match=r"give the data set itself, or set weight_averaging\.statistics_batches=null"
    ):
        trained(Once, steps=2, fit=False, weight_averaging="swa")
    trained(Once, steps=2, fit=False, weight_averaging={"name": "swa", "statistics_batches": None})
    with pytest.raises(ConfigError, match="batch norms take their statistics anew"):
        swa = Plan([Swa(SwaConfig(start=1), CONTEXT)], CONTEXT)
        model = StackModel(nn.BatchNorm1d)
        swa.started(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)


# ---- checkpoints


@pytest.mark.parametrize("precision", [None, "fp16"])
@pytest.mark.parametrize("average", AVERAGES)
def test_a_resumed_run_has_the_averages_of_a_straight_one(tmp_path, average, precision):
    run = {"dir": str(tmp_path), "name": "a", "id": "b"}
    settings = {"weight_averaging": AVERAGES[average], "evaluate": {"every": 3}}
    if precision:
        settings |= {"precision": {"name": "fp16", "init_scale": 1024.0}}
    straight = trained(Restless, steps=9, **settings)
    trained(Restless, steps=5, run=run, **settings)
    resumed = trained(Restless, steps=9, run=run, resume=str(tmp_path / "a" / "b"), **settings)
    assert largest_difference(state(straight), state(resumed)) == 0.0
    assert len(averages_of(straight)) >= 16
    if average != "swa":  # a fraction or not, its start is a step here
        assert largest_difference(averages_of(straight), averages_of(resumed)) == 0.0
    counts = [t.plan.strategies["weight_averaging"].state_dict()[".updates"] for t in (straight, resumed)]
    assert counts[0] == counts[1] != [0]


def test_a_run_that_takes_up_averaging_begins_with_the_weights_it_has(tmp_path):
    run = {"dir": str(tmp_path), "name": "a", "id": "b"}
    trained(steps=4, run=run)
    ema = {"name": "ema", "decay": 0.5}
    resumed = trained(steps=5, run=run, resume=str(tmp_path / "a" / "b"), weight_averaging=ema)
    weights = {name: p for name, p in state(resumed).items() if not name.endswith("num_batches_tracked")}
    assert largest_difference(averages_of(resumed), weights) == 0.0  # one update


def test_the_state_of_the_other_kind_is_left_alone(tmp_path):
    run = {"dir": str(tmp_path), "name": "a", "id": "b"}
    trained(steps=6, run=run, weight_averaging="ema")
    swa = {"name": "swa", "start": 2}
    resumed = trained(steps=8, run=run, resume=str(tmp_path / "a" / "b"), weight_averaging=swa)
    assert resumed.plan.strategies["weight_averaging"].state_dict()[".updates"] == [2]


def test_averages_of_other_weights_are_refused(tmp_path):
    run = {"dir": str(tmp_path), "name": "a", "id": "b"}

    class Partly(Normed):
        def build_model(self):
            model = super().build_model()
            model.embed.requires_grad_(False)
            return model

    trained(Partly, steps=4, run=run, weight_averaging="ema")
    with pytest.raises(CheckpointError, match=r"holds no average of embed\.weight, which trains here"):
        trained(Normed, steps=6, run=run, resume=str(tmp_path / "a" / "b"), weight_averaging="ema")


def test_evaluate_run_evaluates_the_averages(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(
        "trainer: tests.strategies.test_weight_averaging:Normed\nbatch_size: 8\nsteps: 8\nrun: {name: a, id: b}\n"
        "optimizer: sgd\nweight_averaging: {name: swa, start: 4}\n"
    )
    assert main(["--config", "config.yaml"]) == 0
    told = json.loads((tmp_path / "runs" / "a" / "b" / "summary.json").read_text())["metrics"]
    capsys.readouterr()
    assert main(["evaluate", "runs/a/b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"] == told
    assert main(["evaluate", "runs/a/b", "--json", "weight_averaging=null"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"] != told


# ---- several parts, several ranks


class AveragedGan(Gan):
    def build_data(self):
        return Data(train=(samples(),), evaluation=(samples(),), shuffle=False)

    def build_model(self):
        model = super().build_model()
        for part in model.values():
            part.insert(1, nn.BatchNorm1d(16))
        return model

    def compute_loss(self, batch):
        return self.critic_loss(batch)


@pytest.mark.parametrize("more", [{}, {"nonfinite": "skip"}], ids=["plain", "refusable"])
def test_each_part_of_a_gan_is_averaged_once_a_step(more):
    trainer = AveragedGan(**GAN_SETTINGS, **more, weight_averaging={"name": "ema", "decay": 0.5})
    by_hand = None
    batches = trainer.feed.training(trainer.task, trainer.plan)
    for _ in range(4):
        trainer.train_step(next(batches))
        # Buffers move with the part whose weights they stand beside, and the critic's also in the generator's turn.
        now = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        by_hand = now if by_hand is None else {name: torch.lerp(by_hand[name], now[name], 0.5) for name in now}
    averages = averages_of(trainer)
    assert trainer.plan.strategies["weight_averaging"].state_dict()[".updates"] == [4, 4]
    assert sorted(set(averages) - set(by_hand)) == [
        f"{part}.1.running_{kind}" for part in ("critic", "generator") for kind in ("mean", "var")
    ]
    assert max((averages[name] - by_hand[name]).abs().max().item() for name in by_hand) < 1e-6
    raw = state(trainer)
    trainer.evaluate()
    assert largest_difference(state(trainer), raw) == 0.0


def ranks_state(average):
    trainer = trained(Normed, weight_averaging=AVERAGES[average], nonfinite="skip")
    return averages_of(trainer), shown(trainer), trainer.evaluate()


@pytest.mark.ranks
@pytest.mark.parametrize("average", ["ema", "swa"])
def test_every_rank_has_the_same_averages_and_evaluates_them(average):
    (first, first_shown, first_figures), (second, second_shown, second_figures) = run_ranks(2, ranks_state, average)
    assert len(first) >= 16
    assert largest_difference(first, second) == 0.0
    assert largest_difference(first_shown, second_shown) == 0.0
    assert first_figures == second_figures


# ---- settings


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: EmaConfig(decay=1.0), "decay=1.0 must be between 0 and 1"),
        (lambda: EmaConfig(every=0), "every=0 must be at least 1"),
        (lambda: SwaConfig(start=2.5), "start=2.5: give a number of steps or a fraction below 1"),
        (lambda: SwaConfig(statistics_batches=0), "use null"),
    ],
)
def test_settings_that_mean_nothing_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        config()


def test_an_average_that_would_never_begin_is_refused():
    with pytest.raises(ConfigError, match="the first update would come at step 100, and the run has 8"):
        trained(fit=False, weight_averaging={"name": "ema", "start": 100})
    with pytest.raises(ConfigError, match="how many there are is not known"):
        plan = Plan([Swa(None, CONTEXT)], CONTEXT)
        plan.started(nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), 0)


def test_the_strategy_can_be_used_without_a_trainer():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    plan = Plan([Ema(EmaConfig(decay=0.5), CONTEXT), Skip(None, CONTEXT)], CONTEXT)
    plan.started_with(model, [optimizer], 0)
    seen = []
    for step, value in enumerate((1.0, float("nan"), 1.0), start=1):
        model(torch.full((1, 2), value)).sum().backward()
        plan.update(optimizer, plan.gradients(model, optimizer))
        optimizer.zero_grad()
        plan.updated(model, optimizer, step)
        seen.append(model.weight.detach().clone())
    with plan.evaluating(model):
        assert torch.allclose(model.weight, (seen[0] + seen[2]) / 2)
    assert torch.equal(model.weight, seen[2])


def test_a_checkpoint_names_raw_and_averaged_weights_apart(tmp_path):
    run = {"dir": str(tmp_path), "name": "a", "id": "b"}
    trainer = trained(run=run, weight_averaging="ema")
    held = stored_tensors(newest(tmp_path / "a" / "b").path)
    for name in averages_of(trainer):
        assert f"model.{name}" in held
        assert held[f"strategy.weight_averaging.{name}"][1] == torch.float32
