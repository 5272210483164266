"""Reported faults of loss scaling, clipping, fused optimizers and autocast, each kind by the name of its case."""

# The names of the cases are written in capitals.

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fasttrain import ConfigError, Data, Trainer
from fasttrain.checkpoint import newest
from tests.helpers import QUIET, Mlp, Recorder, Weight, by_dimension, largest_difference, points, state

OPTIMIZERS = [{"name": n, "lr": 0.1, "fused": fused} for n in ("sgd", "adamw") for fused in (True, False)]


class Overflow(Mlp):
    """The gradients of step 1 are infinite."""

    def loss(self, output, batch):
        loss = super().loss(output, batch)
        return loss * float("inf") if self.step == 0 and self.model.training else loss


def scales(trainer: Trainer) -> list[float]:
    """Fit, and give the loss scale that each backward starts from."""
    used, scale = [], trainer.plan.scale

    def watch(loss):
        scaled = scale(loss)
        used.append((scaled.double() / loss.double()).item())
        return scaled

    trainer.plan.scale = watch
    trainer.fit()
    return used


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("by", ["resume", "restore"])
def test_SCALER_STATE_1_a_resumed_run_starts_from_the_saved_scale(tmp_path, optimizer, by):
    settings = {
        "batch_size": 8,
        "optimizer": optimizer,
        "precision": {"name": "fp16", "init_scale": 65536.0, "growth_interval": 2},
        "run": {"dir": str(tmp_path), "name": "a", "id": "b"},
    }
    first = Overflow(**settings, steps=5)
    # The first loss is infinite, so its scale cannot be seen.
    assert scales(first)[1:] == pytest.approx([32768.0, 32768.0, 65536.0, 65536.0], rel=1e-6)
    scaler = first.plan.strategies["precision"].scaler
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (131072.0, 0)
    if by == "resume":
        second = Overflow(**{**settings, "steps": 6}, resume=str(tmp_path / "a" / "b"))
    else:
        second = Overflow(**{**settings, "steps": 6, "run": {"dir": None}})
        second.restore(newest(tmp_path / "a" / "b").path)
        restored = second.plan.strategies["precision"].scaler
        assert (restored.get_scale(), restored._get_growth_tracker()) == (131072.0, 0)
    assert scales(second) == pytest.approx([131072.0], rel=1e-6)
    assert second.step == 6


@pytest.mark.parametrize("steps", [2, 4])
def test_SCALER_STATE_1_the_growth_tracker_is_taken_up_too(tmp_path, steps):
    settings = {
        "batch_size": 8,
        "precision": {"name": "fp16", "init_scale": 65536.0, "growth_interval": 2},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "run": {"dir": str(tmp_path), "name": "a", "id": "b"},
    }
    Overflow(**settings, steps=steps).fit()
    trainer = Overflow(**{**settings, "steps": 7}, resume=str(tmp_path / "a" / "b"))
    straight = Overflow(**{**settings, "steps": 7, "run": {"dir": None}})
    straight.fit()
    trainer.fit()
    ends = [t.plan.strategies["precision"].scaler for t in (trainer, straight)]
    assert [(s.get_scale(), s._get_growth_tracker()) for s in ends] == [(262144.0, 0)] * 2
    assert largest_difference(state(trainer), state(straight)) == 0.0


def saved_at_1024(tmp_path) -> dict[str, Any]:
    settings = {
        "batch_size": 8,
        "precision": {"name": "fp16", "init_scale": 1024.0},
        "run": {"dir": str(tmp_path), "name": "a", "id": "b"},
    }
    Mlp(**settings, steps=2).fit()
    return settings


@pytest.mark.parametrize(
    "given", [{"name": "fp16", "init_scale": 1024.0}, "fp16", {"name": "fp16", "init_scale": 8.0}], ids=str
)
def test_SCALER_STATE_2_the_first_scale_after_a_load_is_the_saved_one(tmp_path, given):
    settings = saved_at_1024(tmp_path)
    changed = {**settings, "precision": given, "steps": 3}
    assert scales(Mlp(**changed, resume=str(tmp_path / "a" / "b"))) == pytest.approx([1024.0], rel=1e-6)
    loaded = Mlp(**{**changed, "run": {"dir": None}})
    loaded.restore(tmp_path / "a" / "b" / "checkpoints" / "step-2")
    assert scales(loaded) == pytest.approx([1024.0], rel=1e-6)
    touched = Mlp(**{**changed, "run": {"dir": None}})
    assert touched.plan.strategies["precision"].scaler.get_scale() == (given if given != "fp16" else {}).get(
        "init_scale", 65536.0
    )
    touched.restore(tmp_path / "a" / "b" / "checkpoints" / "step-2")
    assert scales(touched) == pytest.approx([1024.0], rel=1e-6)


def test_SCALER_STATE_2_precision_is_given_once_and_fit_takes_none(tmp_path):
    with pytest.raises(TypeError, match="precision"):
        Mlp(batch_size=8, steps=1, precision="fp16", **QUIET).fit(precision="fp16")


def test_SCALER_STATE_2_a_checkpoint_without_a_scale_begins_with_the_configured_one(tmp_path):
    settings = {**saved_at_1024(tmp_path), "run": {"dir": str(tmp_path), "name": "plain", "id": "b"}}
    Mlp(**{**settings, "precision": "bf16"}, steps=2).fit()
    assert scales(Mlp(**settings, steps=3, resume=str(tmp_path / "plain" / "b"))) == pytest.approx([1024.0], rel=1e-6)


class ThreeFour(Trainer):
    """The gradient is (3, 4) whatever the weights."""

    def build_data(self):
        return Data(train=torch.tensor([[3.0, 4.0]]).expand(8, 2).contiguous(), shuffle=False)

    def build_model(self):
        model = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def compute_loss(self, batch):
        return (self.model.weight * batch).sum(1).mean()


@pytest.mark.parametrize(
    "precision", ["fp32", "bf16", *({"name": "fp16", "init_scale": s} for s in (1.0, 1024.0, 65536.0))], ids=str
)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("num", [1, 2, 4])
@pytest.mark.parametrize("nonfinite", [None, "skip", "raise"])
def test_CLIP_UNSCALE_1_the_threshold_is_for_gradients_without_the_loss_scale(precision, fused, num, nonfinite):
    if isinstance(precision, dict) and nonfinite == "raise":
        nonfinite = {
            "name": "skip",
            "max_in_a_row": 1,
        }  # as raise is refused with fp16: the first bad step ends the run
    watcher = Recorder()
    trainer = ThreeFour(
        batch_size=4,
        steps=1,
        precision=precision,
        optimizer={"name": "sgd", "lr": 1.0, "momentum": 0.0, "fused": fused},
        gradient_clipping={"name": "norm", "max_norm": 1.0},
        accumulation={"name": "microbatches", "num": num},
        nonfinite=nonfinite,
        observers=[watcher],
        **QUIET,
    )
    trainer.fit()
    assert watcher.steps[0]["grad_norm"] == 5.0
    assert trainer.model.weight.norm().item() == pytest.approx(1.0, abs=1e-6)
    assert trainer.model.weight.tolist()[0] == pytest.approx([-0.6, -0.8], abs=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16", {"name": "fp16", "init_scale": 1024.0}], ids=str)
def test_CLIP_UNSCALE_1_what_is_below_the_threshold_is_left_alone(precision):
    watcher = Recorder()
    trainer = ThreeFour(
        batch_size=4,
        steps=1,
        precision=precision,
        optimizer={"name": "sgd", "lr": 1.0, "momentum": 0.0},
        gradient_clipping={"name": "norm", "max_norm": 5.1},
        observers=[watcher],
        **QUIET,
    )
    trainer.fit()
    assert (watcher.steps[0]["grad_norm"], trainer.model.weight.tolist()) == (5.0, [[-3.0, -4.0]])


def test_CLIP_UNSCALE_1_the_logged_norm_without_clipping_has_no_loss_scale():
    watcher = Recorder()
    ThreeFour(
        batch_size=4, steps=2, precision={"name": "fp16", "init_scale": 1024.0}, observers=[watcher], **QUIET
    ).fit()
    assert [record["grad_norm"] for record in watcher.steps] == [5.0, 5.0]


class Six(Mlp):
    n = 6


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("accumulation", [{"num": 4}, {"size": 1}, {"num": 1}], ids=str)
@pytest.mark.parametrize("n", [5, 6, 7])
def test_CLIP_UNSCALE_2_gradients_are_unscaled_once_a_step(monkeypatch, optimizer, accumulation, n):
    calls = []
    unscale = torch.amp.GradScaler.unscale_
    monkeypatch.setattr(torch.amp.GradScaler, "unscale_", lambda self, opt: calls.append(opt) or unscale(self, opt))

    class Samples(Mlp):
        pass

    Samples.n = n
    trainer = Samples(
        batch_size=4,
        epochs=2,
        optimizer=optimizer,
        precision="fp16",
        gradient_clipping="norm",
        accumulation={"name": "microbatches", **accumulation},
        **QUIET,
    )
    assert trainer.fit()["steps"] == 4
    assert calls == [trainer.optimizer] * 4


def test_CLIP_UNSCALE_2_with_two_optimizers_each_is_unscaled_once_a_step(monkeypatch):
    calls = []
    unscale = torch.amp.GradScaler.unscale_
    monkeypatch.setattr(torch.amp.GradScaler, "unscale_", lambda self, opt: calls.append(opt) or unscale(self, opt))
    trainer = Pair(batch_size=8, steps=3, precision="fp16", gradient_clipping="norm", **QUIET)
    trainer.fit()
    assert calls == [trainer.optimizers["a"], trainer.optimizers["b"]] * 3


class Pair(Mlp):
    """Two parts with an optimizer each."""

    def build_model(self):
        return nn.ModuleDict({"a": nn.Linear(8, 4), "b": nn.Linear(8, 4)})

    def parts(self):
        return dict(self.model.items())

    def evaluate(self):
        return {}

    def train_step(self, batch):
        from fasttrain.trainer import StepInfo

        for name in ("a", "b"):
            loss = self.step_part(name, lambda b, name=name: F.cross_entropy(self.model[name](b[0]), b[1]), batch)
        self.step += 1
        return StepInfo(self.step, loss)


class Linear(Mlp):
    def build_model(self):
        return nn.Linear(8, 4)


def trained(cls: type[Trainer] = Linear, steps: int = 3, **settings: Any) -> dict[str, Any]:
    trainer = cls(batch_size=8, steps=steps, **settings, **QUIET)
    trainer.fit()
    return state(trainer)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("max_norm", [0.5, 0.05, None])
@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16", {"name": "fp16", "init_scale": 256.0}], ids=str)
def test_FUSED_1_fused_and_unfused_end_at_the_same_weights(name, max_norm, num, precision):
    settings = {
        "precision": precision,
        "gradient_clipping": None if max_norm is None else {"name": "norm", "max_norm": max_norm},
        "accumulation": {"name": "microbatches", "num": num},
    }
    fused, unfused = (trained(**settings, optimizer={"name": name, "lr": 0.01, "fused": f}) for f in (True, False))
    assert largest_difference(fused, unfused) < 1e-6
    start = state(Linear(batch_size=8, steps=3, **settings, **QUIET))
    assert largest_difference(fused, start) > 1e-4


@pytest.mark.parametrize("fused", [True, False])
def test_FUSED_1_the_loss_scale_leaves_no_trace(fused):
    """As in float32 arithmetic: the model's products are exact in float16."""
    ends = [
        trained(
            ThreeFour,
            precision=precision,
            gradient_clipping={"name": "norm", "max_norm": 0.5},
            optimizer={"name": "adamw", "lr": 0.01, "fused": fused},
        )
        for precision in ("fp32", {"name": "fp16", "init_scale": 256.0}, {"name": "fp16", "init_scale": 65536.0})
    ]
    assert largest_difference(ends[0], ends[1]) < 1e-6
    assert largest_difference(ends[0], ends[2]) < 1e-6


def test_FUSED_1_equals_torchs_own_scaler_and_clipping():
    class Whole(Linear):
        def build_data(self):
            return Data(train=points(), shuffle=False)

    trainer = Whole(
        batch_size=24,
        steps=3,
        optimizer={"name": "adamw", "lr": 0.01, "fused": True},
        precision={"name": "fp16", "init_scale": 256.0},
        gradient_clipping={"name": "norm", "max_norm": 0.5},
        **QUIET,
    )
    trainer.fit()
    torch.manual_seed(0)
    model, (x, y) = nn.Linear(8, 4), points()
    plain = torch.optim.AdamW(by_dimension(model), lr=0.01, fused=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for _ in range(3):
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(plain)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(plain)
        scaler.update()
        plain.zero_grad()
    assert largest_difference(trainer.model.state_dict(), model.state_dict()) < 1e-6


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("fused", [True, None])
def test_FUSED_2_bf16_clips_with_a_fused_optimizer_and_has_no_scaler(monkeypatch, name, fused):
    made = []
    init = torch.amp.GradScaler.__init__
    monkeypatch.setattr(
        torch.amp.GradScaler, "__init__", lambda self, *a, **k: made.append(self) or init(self, *a, **k)
    )
    watcher = Recorder()
    trainer = ThreeFour(
        batch_size=4,
        steps=2,
        precision="bf16",
        optimizer={"name": name, "lr": 1.0, "fused": fused},
        gradient_clipping={"name": "norm", "max_norm": 1.0},
        observers=[watcher],
        **QUIET,
    )
    norms = []
    gradients = trainer.plan.gradients
    trainer.plan.gradients = lambda model, opt: (gradients(model, opt), norms.append(model.weight.grad.norm().item()))[
        0
    ]
    assert trainer.fit()["steps"] == 2
    assert all(group["fused"] for group in trainer.optimizer.param_groups)
    assert made == []
    assert norms == pytest.approx([1.0, 1.0], abs=1e-5)
    assert [record["grad_norm"] for record in watcher.steps] == [5.0, 5.0]
    assert "loss_scale" not in watcher.steps[0]


class Peeks(Linear):
    """Looks at its output without gradients before the forward that is trained."""

    def compute_loss(self, batch):
        with torch.no_grad():
            self.model(batch[0])
        return super().compute_loss(batch)


class EvaluatesFirst(Linear):
    """Evaluates in the middle of a step, inside of its autocast."""

    def compute_loss(self, batch):
        if self.model.training:
            self.evaluate()
        return super().compute_loss(batch)


@pytest.mark.parametrize("precision", ["fp32", "bf16", {"name": "fp16", "init_scale": 256.0}], ids=str)
@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize("cls", [Peeks, EvaluatesFirst])
def test_AUTOCAST_1_a_forward_without_gradients_before_leaves_the_gradients_alone(cls, num, precision):
    settings = {"precision": precision, "accumulation": {"name": "microbatches", "num": num}, "optimizer": "sgd"}
    plain, other = trained(**settings), trained(cls, **settings)
    assert largest_difference(plain, other) == 0.0
    assert largest_difference(plain, state(Linear(batch_size=8, steps=3, **settings, **QUIET))) > 1e-3


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_AUTOCAST_1_training_goes_on_as_before_after_an_evaluation_each_step(precision):
    settings = {"precision": precision, "optimizer": "sgd"}
    assert largest_difference(trained(**settings, evaluate={"every": 1}), trained(**settings)) == 0.0


def halved(where: str) -> type[Trainer]:
    class Half(Linear):
        def build_model(self):
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
            (model if where == "all" else model[1]).half()
            return model

    return Half


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("where", ["all", "a part"])
def test_AUTOCAST_3_half_weights_are_refused_before_the_first_step(precision, where):
    with pytest.raises(ConfigError) as refused:
        halved(where)(batch_size=8, steps=1, precision=precision, **QUIET)
    text = str(refused.value)
    assert f"precision={precision}: {4 if where == 'all' else 2} weights are float16" in text
    assert "mixed precision keeps float32 weights and casts inside autocast" in text
    assert "leave out model.half()" in text
    assert refused.value.exit_code == 2


def test_AUTOCAST_3_a_model_given_as_a_part_is_looked_at_too():
    with pytest.raises(ConfigError, match=r"leave out model\.half\(\)"):
        Trainer.from_parts(
            nn.Linear(8, 4).half(), Data(train=points()), F.cross_entropy, batch_size=8, precision="fp16", **QUIET
        )


def test_the_helper_of_one_weight_has_the_gradient_it_says():
    trainer = Weight(batch_size=4, steps=1, optimizer={"name": "sgd", "lr": 1.0, "momentum": 0.0}, **QUIET)
    trainer.fit()
    assert trainer.model.weight.item() == -2.5
