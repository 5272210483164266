"""Layouts, adapters, recomputation and host memory on CUDA: equal numbers, fewer bytes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fasttrain import Data, Trainer
from fasttrain.models.resnet import build_resnet
from fasttrain.nn.layouts import is_channels_last
from fasttrain.nn.losses import linear_cross_entropy
from tests.gpu import models
from tests.gpu.models import (
    BLOCKS,
    Wide,
    by_hand,
    fitted,
    initial,
    no_waiting,
    sgd,
    step_bytes,
)
from tests.helpers import largest_difference, state

# ---- memory_format

PIXELS, IMAGES = 64, 128


def images():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(IMAGES, 3, PIXELS, PIXELS, generator=generator), torch.arange(IMAGES) % 10


class Pictures(Trainer):
    def build_data(self):
        return Data(train=images(), shuffle=False)

    def build_model(self):
        return build_resnet("resnet18", num_classes=10)

    def build_optimizer(self, model):
        return sgd(model)

    def loss(self, output, batch):
        return F.cross_entropy(output, batch[1])


FEW = {"batch_size": 32, "steps": 3}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_channels_last_is_the_layout_of_every_convolution_and_gives_the_numbers_of_a_loop_by_hand(precision):
    dtype = torch.bfloat16 if precision == "bf16" else None

    def output_of(model, x):
        with torch.autocast(models.DEVICE, dtype, enabled=dtype is not None):
            return model(x.contiguous(memory_format=torch.channels_last)).float()

    # Kernels that were chosen for one layout are not those of the other, so both are those of channels_last.
    model = initial(Pictures, precision=precision, **FEW).to(memory_format=torch.channels_last)
    expected = by_hand(model.train(), output_of, steps=3, batch=32, data=images())
    trainer, losses = fitted(Pictures, precision=precision, memory_format="channels_last", **FEW)
    assert losses == expected
    assert largest_difference(state(trainer), model.state_dict()) == 0.0
    plain = fitted(Pictures, precision=precision, **FEW)[1]
    # Other kernels: the first loss differs by rounding, and batch norms carry that on.
    assert losses[0] == pytest.approx(plain[0], rel=1e-4 if dtype is None else 3e-2)


def test_outputs_and_gradients_of_convolutions_are_channels_last():
    settings = {**models.SETTINGS, **FEW, "device": models.DEVICE}
    trainer = Pictures(**settings, precision="bf16", memory_format="channels_last")
    convolutions = {name: m for name, m in trainer.model.named_modules() if isinstance(m, nn.Conv2d)}
    kept = {}

    def look(name):
        def forward(module, args, output):
            # Of one pixel or one channel both layouts are the same, and would show nothing.
            assert min(output.shape[1], output.shape[2]) > 1
            kept[name, "output"] = is_channels_last(output)
            output.register_hook(lambda grad: kept.update({(name, "gradient"): is_channels_last(grad)}))

        return forward

    for name, module in convolutions.items():
        module.register_forward_hook(look(name))
    batch = next(trainer.feed.training(trainer.task, trainer.plan))
    trainer.train_step(batch)
    assert len(kept) == 2 * len(convolutions) == 40
    assert all(kept.values())


# ---- adapters


class Corrected(nn.Module):
    """A linear layer and its low-rank correction, written out."""

    def __init__(self, weight, bias, a, b, scaling):
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        self.a, self.b, self.scaling = nn.Parameter(a.clone()), nn.Parameter(b.clone()), scaling

    def forward(self, x):
        return F.linear(x, self.weight, self.bias) + F.linear(F.linear(x, self.a), self.b) * self.scaling


def corrected_by_hand(adapted, weight_of):
    """A plain model that computes what an adapted one does; its adapters alone train."""
    model = Wide().to(models.DEVICE)
    kept = {name: value for name, value in adapted.state_dict().items() if name in model.state_dict()}
    model.load_state_dict({n: v for n, v in kept.items() if v.is_floating_point()}, strict=False)
    model.requires_grad_(False)
    for mine, other in zip(model.blocks, adapted.blocks, strict=True):
        for name in ("expand", "contract"):
            layer = getattr(other, name)
            a, b = layer.lora_A.weight.detach(), layer.lora_B.weight.detach()
            setattr(mine, name, Corrected(weight_of(layer), layer.bias.detach(), a, b, layer.lora_scaling))
    return model


def weight_of(layer):
    quantised = getattr(layer.weight, "quant_state", None)
    if quantised is None:
        return layer.weight.detach()
    import bitsandbytes

    return bitsandbytes.functional.dequantize_4bit(layer.weight.data, quantised)


@pytest.mark.parametrize("name", ["lora", "qlora"])
def test_adapters_train_as_corrections_written_out(name):
    settings = {"adapters": {"name": name, "rank": 16}, "precision": "fp32"}
    model = corrected_by_hand(initial(**settings), weight_of)
    expected = by_hand(model, steps=8)
    trainer, losses = fitted(**settings, steps=8)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[-1] != losses[0]
    trained = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * BLOCKS
    assert all("lora_" in n for n in trained)
    for mine, other in zip(model.blocks, trainer.model.blocks, strict=True):
        assert torch.allclose(mine.contract.b, other.contract.lora_B.weight, rtol=0.0, atol=1e-5)


def test_qlora_keeps_a_seventh_of_float32s_bytes():
    def layer_bytes(name):
        blocks = initial(adapters=name).blocks
        return sum(p.nbytes for n, p in blocks.named_parameters() if n.endswith(("expand.weight", "contract.weight")))

    assert layer_bytes("qlora") == layer_bytes("lora") / 8  # the scales stand beside them
    before = torch.cuda.memory_allocated()
    model = initial(adapters="lora")
    lora = torch.cuda.memory_allocated() - before
    del model
    before = torch.cuda.memory_allocated()
    model = initial(adapters="qlora")
    assert torch.cuda.memory_allocated() - before < 0.25 * lora
    del model


# ---- recomputation

KEEPS = {
    "full": "full",
    "selective": "selective",
    "matmuls": {"name": "selective", "keep": "matmuls"},
}


def test_what_is_kept_is_what_was_asked_for():
    peaks = {name: step_bytes(activation_checkpointing=setting) for name, setting in {"plain": None, **KEEPS}.items()}
    # Of a block plain training keeps ten times its input; the matrix products give five of these.
    assert peaks["full"] <= peaks["selective"] <= peaks["matmuls"] < 0.85 * peaks["plain"]
    assert peaks["selective"] < 0.5 * peaks["plain"]
    assert peaks["matmuls"] > 1.2 * peaks["full"]


@pytest.mark.parametrize("name", KEEPS)
def test_recomputed_blocks_give_the_same_bits(name):
    model = initial()
    expected = by_hand(model)
    trainer, losses = fitted(activation_checkpointing=KEEPS[name])
    assert losses == expected
    assert largest_difference(state(trainer), model.state_dict()) == 0.0


def test_a_budget_keeps_less_than_compiled_code_does_by_itself():
    def compiled(budget):
        checkpointing = None if budget is None else {"name": "budget", "budget": budget}
        torch.compiler.reset()
        return step_bytes(compile="blocks", activation_checkpointing=checkpointing)

    by_itself, none = compiled(None), compiled(0.0)
    assert none < 0.7 * by_itself
    torch.compiler.reset()
    expected = by_hand(initial(), deterministic=False)
    settings = {"compile": "blocks", "deterministic": False}
    _, losses = fitted(activation_checkpointing={"name": "budget", "budget": 0.5}, **settings)
    assert losses == pytest.approx(expected, rel=1e-4)


# ---- linear + cross-entropy


def test_linear_cross_entropy_never_holds_all_scores_and_gives_the_plain_loss():
    n, width, classes = 8192, 256, 32768

    def leaves():
        generator = torch.Generator(models.DEVICE).manual_seed(0)
        hidden = torch.randn(n, width, device=models.DEVICE, generator=generator)
        weight = 0.02 * torch.randn(classes, width, device=models.DEVICE, generator=generator)
        target = torch.randint(classes, (n,), device=models.DEVICE, generator=generator)
        target[::7] = -100
        return hidden.requires_grad_(), weight.requires_grad_(), target

    def plain(hidden, weight, target):
        return F.cross_entropy(F.linear(hidden, weight), target)

    results, peaks = [], []
    for loss_of in (plain, lambda h, w, t: linear_cross_entropy(h, w, t)):
        hidden, weight, target = leaves()
        loss_of(hidden, weight, target).backward()  # what cuBLAS takes at first
        hidden.grad = weight.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with no_waiting():
            loss = loss_of(hidden, weight, target)
            loss.backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        results.append((loss.detach(), hidden.grad, weight.grad))
    for expected, found in zip(*results, strict=True):
        assert (found - expected).norm() < 1e-4 * expected.norm()
    assert peaks[0] > 2 * n * classes * 4  # scores, and their logarithms or gradient
    assert peaks[1] < n * classes * 4
