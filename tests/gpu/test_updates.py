"""Update rules, clipping, averages, plateaus and mixed images on CUDA: numbers of plain torch, and no wait of the host."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchao.optim import AdamW8bit as TorchaoAdamW8bit

from fasttrain.nn.mixing import Mixing
from fasttrain.optim.adafactor import Adafactor
from fasttrain.optim.adamw_8bit import adamw_8bit_class
from fasttrain.optim.averages import Averages, move
from fasttrain.optim.chunks import step_in_chunks
from fasttrain.optim.guarded import step_unless
from fasttrain.optim.lamb import Lamb
from fasttrain.optim.muon import Muon
from fasttrain.strategies.gradient_clipping import clip_adaptively, clip_by_value
from tests.gpu import models
from tests.gpu.models import Rows, no_waiting, step_without_waiting
from tests.helpers import Recorder
from tests.stack import Restless, Stack

AdamW8bit = adamw_8bit_class()
SHAPES = [(128, 256), (256, 128), (64, 64), (48,)]


def parameters(shapes=SHAPES, device=None):
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(*shape, generator=generator).to(device or models.DEVICE)) for shape in shapes]


def give_gradients(*lists, seed):
    generator = torch.Generator().manual_seed(seed)
    for same in zip(*lists, strict=True):
        grad = torch.randn(same[0].shape, generator=generator)
        for parameter in same:
            parameter.grad = grad.to(parameter.device)


# ---- optimizers


def muon(params):
    groups = [{"params": params[:3], "muon": True}, {"params": params[3:], "muon": False, "fused": True, "lr": 1e-3}]
    return Muon(groups, lr=0.02, weight_decay=0.1)


class TwoOfTorch:
    """torch's Muon for matrices and AdamW for vectors."""

    def __init__(self, params):
        self.both = [
            torch.optim.Muon(params[:3], lr=0.02, weight_decay=0.1),
            torch.optim.AdamW(params[3:], lr=1e-3, weight_decay=0.1, fused=True),
        ]

    def step(self):
        for optimizer in self.both:
            optimizer.step()


RULES = {
    "muon": (muon, TwoOfTorch),
    "adafactor": (lambda p: Adafactor(p, lr=0.01), lambda p: torch.optim.Adafactor(p, lr=0.01)),
    "adamw_8bit": (lambda p: AdamW8bit(p, 1e-2), lambda p: TorchaoAdamW8bit(p, 1e-2)),
}


@pytest.mark.parametrize("name", RULES)
def test_an_update_rule_is_that_of_torch(name):
    ours, theirs = parameters(), parameters()
    make, make_theirs = RULES[name]
    optimizer, other = make(ours), make_theirs(theirs)
    for step in range(5):
        give_gradients(ours, theirs, seed=step)
        optimizer.step()
        other.step()
    for a, b in zip(ours, theirs, strict=True):
        # A moment halfway between two codes may get either, where both were compiled apart.
        assert ((a - b).abs() > 1e-5).float().mean() <= (1e-3 if name == "adamw_8bit" else 0.0)


def test_lamb_on_the_device_is_lamb_on_the_host():
    ours, theirs = parameters(), parameters(device="cpu")
    optimizer, other = Lamb(ours, lr=0.01), Lamb(theirs, lr=0.01)
    for step in range(5):
        give_gradients(ours, theirs, seed=step)
        optimizer.step()
        other.step()
    assert all(torch.allclose(a.cpu(), b, rtol=1e-5, atol=1e-6) for a, b in zip(ours, theirs, strict=True))


MAKE = {**{name: ours for name, (ours, _) in RULES.items()}, "lamb": lambda p: Lamb(p, lr=0.01)}


@pytest.mark.parametrize("name", MAKE)
def test_the_device_refuses_a_step_by_itself(name):
    params = parameters()
    optimizer = MAKE[name](params)
    good, bad = (torch.full((), value, device=models.DEVICE) for value in (0.0, 1.0))
    give_gradients(params, seed=0)
    step_unless(optimizer, good)
    before = [parameter.detach().clone() for parameter in params]
    give_gradients(params, seed=1)
    for parameter in params:
        parameter.grad[0] = float("nan")
    with no_waiting():
        step_unless(optimizer, bad)
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
    give_gradients(params, seed=2)
    with no_waiting():
        step_unless(optimizer, good)
    assert all(torch.isfinite(p).all() for p in params)
    assert not any(torch.equal(a, b) for a, b in zip(params, before, strict=True))


@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb", "muon", "adafactor", "adamw_8bit"])
def test_a_refusable_and_scheduled_step_never_waits_for_the_device(name):
    settings = {**models.SETTINGS, "deterministic": False, "device": models.DEVICE, "steps": 9}
    rest = {"precision": "fp16", "schedule": "cosine", "gradient_clipping": "norm", "nonfinite": "skip"}
    assert step_without_waiting(Rows(**settings, **rest, optimizer=name)).step == 3


def test_states_on_the_host_are_not_overwritten_while_they_are_copied():
    shapes = [(1024, 1024)] * 12

    def stepped(chunked):
        params = parameters(shapes)
        optimizer = torch.optim.AdamW(params, lr=1e-2, fused=True)
        if chunked:
            step_in_chunks(optimizer, offload=True, chunk=2 * 2**20)
        grads = [torch.randn_like(p) for p in params]
        for step in range(30):  # the host is far ahead of the device
            for parameter, grad in zip(params, grads, strict=True):
                parameter.grad = grad * (step % 3 - 0.5)
            optimizer.step()
        torch.cuda.synchronize()
        return params, [optimizer.state[p][key].cpu() for p in params for key in ("exp_avg", "exp_avg_sq")]

    torch.manual_seed(0)
    plain = stepped(False)
    torch.manual_seed(0)
    offloaded = stepped(True)
    for a, b in zip(plain, offloaded, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---- gradient_clipping


@pytest.mark.parametrize("clip", [lambda p: clip_by_value(p, 0.5), clip_adaptively], ids=["value", "adaptive"])
def test_clipping_on_the_device_is_clipping_on_the_host(clip):
    ours, theirs = parameters(), parameters(device="cpu")
    give_gradients(ours, theirs, seed=0)
    kept = [parameter.grad.clone() for parameter in theirs]
    with no_waiting():
        clip(ours)
    clip(theirs)
    assert not any(torch.equal(a.grad, b) for a, b in zip(theirs, kept, strict=True))
    assert all(torch.allclose(a.grad.cpu(), b.grad, rtol=1e-5, atol=0.0) for a, b in zip(ours, theirs, strict=True))


# ---- weight_averaging


def test_averages_move_in_one_kernel_by_a_step_length_on_the_device():
    # Also of odd sizes, and beginning where no vector load may begin.
    base = torch.randn(1001, device=models.DEVICE)
    weights = [torch.randn(300, 70, device=models.DEVICE), torch.randn(7, device=models.DEVICE), base[1:]]
    weights.append(torch.randn(4, 8, 5, 5, device=models.DEVICE).contiguous(memory_format=torch.channels_last))
    averages = [torch.zeros_like(weight) for weight in weights]
    by = [torch.full((), value, device=models.DEVICE) for value in (1.0, 0.0, 0.25)]
    with no_waiting():
        move(averages, weights, by[0], fused=True)
    assert all(torch.equal(a, w) for a, w in zip(averages, weights, strict=True))
    others = [torch.randn_like(weight) for weight in weights]
    with no_waiting():
        move(averages, others, by[1], fused=True)
    assert all(torch.equal(a, w) for a, w in zip(averages, weights, strict=True))
    move(averages, others, by[2], fused=True)
    for average, weight, other in zip(averages, weights, others, strict=True):
        assert torch.allclose(average, torch.lerp(weight, other, 0.25), rtol=1e-6, atol=1e-6)


def test_parameters_of_a_model_are_averaged_by_the_fused_kernel():
    model = models.Wide().to(models.DEVICE)
    averages = Averages(dict(model.named_parameters()))
    assert [kind.fused for kind in averages._kinds.values()] == [True]


@pytest.mark.parametrize("name", ["ema", "swa"])
def test_averages_follow_accepted_steps_alone(name):
    """Against averages in float64 of the weights that were seen; the loss scale overflows at first."""
    averaging = {"name": "ema", "decay": 0.8} if name == "ema" else {"name": "swa", "start": 0}
    settings = {"batch_size": 8, "steps": 30, "device": models.DEVICE, "run": {"dir": None}, "log": {"every": 100}}
    precision = {"name": "fp16", "init_scale": 2.0**24}
    rest = {"nonfinite": "skip", "gradient_clipping": "norm", "weight_averaging": averaging}
    trainer = Restless(**settings, **rest, precision=precision)
    strategy = trainer.plan.strategies["weight_averaging"]
    trainer.plan.started_with(trainer.model, [trainer.optimizer], 0)
    batches = trainer.feed.training(trainer.task, trainer.plan)
    trainer.model.train()
    expected, accepted, refused = None, 0, 0
    before = {n: p.detach().double() for n, p in trainer.model.named_parameters()}
    for _ in range(20):
        trainer.train_step(next(batches))
        now = {n: p.detach().double() for n, p in trainer.model.named_parameters()}
        if all(torch.equal(now[n], before[n]) for n in now):
            refused += 1
            continue
        by = 1.0 if expected is None else 0.2 if name == "ema" else 1 / (accepted + 1)
        expected = {n: now[n] if expected is None else expected[n].lerp(now[n], by) for n in now}
        before, accepted = now, accepted + 1
    (part,) = strategy._parts.values()
    found = part.averages.tensors()
    assert refused > 2
    assert accepted > 5
    assert float(part.updates) == accepted
    assert all(torch.allclose(found[n].double(), expected[n], rtol=1e-5, atol=1e-6) for n in expected)


# ---- schedule


def test_a_plateau_lowers_the_rate_as_torchs_does():
    class Noise(Stack):
        """Nothing can be learned from a constant."""

        def loss(self, output, batch):
            return super().loss(output, batch) * 0.0 + 1.0

    watcher = Recorder()
    plateau = {"name": "plateau", "patience": 1, "factor": 0.5}
    settings = {"batch_size": 8, "steps": 12, "device": models.DEVICE, "run": {"dir": None}, "log": {"every": 1}}
    optimizer = {"name": "sgd", "lr": 0.1}
    Noise(
        **settings,
        schedule=plateau,
        optimizer=optimizer,
        nonfinite="skip",
        evaluate={"every": 1},
        observers=[watcher],
    ).fit()
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(plain, patience=1, factor=0.5)
    expected = []
    for record in watcher.evaluations:
        expected.append(plain.param_groups[0]["lr"])
        scheduler.step(record["metrics"]["loss"])
    assert [record["lr"] for record in watcher.steps] == pytest.approx(expected, rel=1e-6)
    assert expected[-1] < 0.01


# ---- mixed images


@pytest.mark.parametrize("kind", [{"mixup": 0.4}, {"cutmix": 1.0}], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_images_are_mixed_on_the_device_as_on_the_host(kind, layout):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(33, 3, 24, 24, generator=generator).contiguous(memory_format=layout)
    labels = torch.randint(10, (33,), generator=generator)
    mixing = Mixing(classes=10, **kind)
    there, their_labels = images.to(models.DEVICE), labels.to(models.DEVICE)
    for seed in range(3):
        expected = mixing(images, labels, seed)
        with no_waiting():
            found = mixing(there, their_labels, seed)
        assert found[0].is_contiguous(memory_format=layout)
        for a, b in zip(found, expected, strict=True):
            assert a.device.type == models.DEVICE
            assert torch.allclose(a.cpu(), b, rtol=1e-6, atol=1e-6)
