"""Saved tensors on the host: which are moved, how many are on the device at once, and that no number changes."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from fasttrain.models.resnet import build_resnet
from fasttrain.nn.activations import LiveStorages
from fasttrain.nn.offload import Copies, Offloader, StreamedCopies
from fasttrain.nn.recompute import checkpoint_blocks
from fasttrain.nn.selective import keep_by_cost, keep_operations
from tests.helpers import largest_difference, points
from tests.nn.backward import backward
from tests.stack import StackModel, gradients

CPU = torch.device("cpu")
VECTOR = 24 * 8 * 4
MODELS = {
    "stack": (lambda: StackModel(dropout=0.3), lambda: points()[0]),
    "batch norm": (lambda: StackModel(nn.BatchNorm1d), lambda: points()[0]),
    "resnet": (
        lambda: build_resnet("resnet8", num_classes=3, stem="small", width=8).to(memory_format=torch.channels_last),
        lambda: torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)),
    ),
    "attention": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
        lambda: points()[0].view(4, 6, 8),
    ),
    "recurrent": (lambda: First(nn.LSTM(8, 8, batch_first=True)), lambda: points()[0].view(4, 6, 8)),
}
CHECKPOINTING = {"none": None, "full": [None], "selective": [keep_operations(["matmuls", "convolutions", "attention"])]}


class First(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


def offloader(**settings):
    return Offloader(CPU, **{"min_bytes": 0, "in_flight": 2, **settings})


def trained(name, moving=None, checkpointing="none", bf16=False):
    make, data = MODELS[name]
    torch.manual_seed(0)
    model, x = make(), data()
    if CHECKPOINTING[checkpointing] is not None:
        from fasttrain.nn.blocks import find_blocks

        checkpoint_blocks(find_blocks(model), keeps=CHECKPOINTING[checkpointing][0])
    if moving is not None:
        moving.leave([*model.parameters(), *model.buffers()])
    torch.manual_seed(1)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            if moving is not None:
                with moving.hooks:
                    output = model(x)
            else:
                output = model(x)
        output.float().square().mean().backward()
    return {"output": output.detach(), **gradients(model), **dict(model.named_buffers())}


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("name", MODELS)
def test_outputs_gradients_and_statistics_keep_their_bits(name, checkpointing, bf16):
    if name == "recurrent" and (checkpointing != "none" or bf16):
        checkpointing, bf16 = "none", False
    moving = offloader()
    assert largest_difference(trained(name, bf16=bf16), trained(name, moving, checkpointing, bf16)) == 0.0
    assert moving.sent > 0


def test_every_storage_is_moved_once_and_parameters_are_not():
    """24 samples of 8: in a block the input, both results of the norm, and what gelu takes and gives."""
    model, x, moving = StackModel(), points()[0], offloader()
    with moving.hooks:
        output = model(x)
    statistics = 2 * 24 * 4
    # Input of the model, then of each block and of the head; normalised; expanded and after gelu are twice as wide.
    assert moving.sent == VECTOR * (1 + 3) + 2 * (VECTOR + statistics + 2 * 2 * VECTOR)
    output.sum().backward()


def test_under_autocast_the_casts_of_weights_are_not_moved():
    layer, x, moving = nn.Linear(8, 8), points()[0], offloader()
    with torch.autocast("cpu", torch.bfloat16), moving.hooks:
        output = layer(x)
    assert moving.sent == VECTOR // 2  # the input in bfloat16
    output.float().sum().backward()


def test_parts_of_a_storage_that_are_saved_apart_go_as_one():
    moving = offloader()
    x = torch.randn(10, 30, requires_grad=True)
    with moving.hooks:
        a, b, c = (x * 2).exp().chunk(3, dim=1)
        loss = (a * b).sum() + (b * c).sum() + c.t().square().sum()
    assert moving.sent == 10 * 30 * 4
    loss.backward()
    plain = x.detach().clone().requires_grad_()
    a, b, c = (plain * 2).exp().chunk(3, dim=1)
    ((a * b).sum() + (b * c).sum() + c.t().square().sum()).backward()
    assert torch.equal(x.grad, plain.grad)


def test_values_and_layouts_come_back_and_a_small_part_goes_without_the_rest():
    x = torch.randn(1000, 4)
    pictures = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for tensor, sent in ((x[10:12], 8), (x.t(), 4000), (x[3:900:2, 1:3], 4000), (pictures, 120), (x[5:6, 2:], 2)):
        moving = offloader(in_flight=1)
        packed = moving.pack(tensor)
        assert moving.sent == 4 * sent
        moving.pack(torch.ones(1))  # which sends the other off
        back = moving.unpack(packed)
        assert torch.equal(back, tensor)
        assert back.stride() == tensor.stride()
        assert back.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
        assert moving.fetched == 4 * sent


def test_what_stays_on_the_device():
    moving = offloader(min_bytes=100)
    weight = nn.Parameter(torch.ones(20, 20))
    buffer = torch.ones(20, 20)
    moving.leave([buffer])
    small, expanded = torch.ones(24), torch.ones(1).expand(100, 100)
    sparse = torch.eye(20).to_sparse()
    for tensor in (weight, weight.t(), weight[3:], buffer, buffer[1:], small, expanded, sparse):
        assert moving.pack(tensor) is tensor
    assert moving.sent == 0
    assert moving.pack(torch.ones(25)) is not None
    assert moving.sent == 100


def test_a_retained_graph_and_a_graph_that_is_dropped():
    moving = offloader(in_flight=1)
    x = torch.randn(10, 10, requires_grad=True)
    with moving.hooks:
        y = x.exp().sin().exp().sum()
    y.backward(retain_graph=True)
    first = x.grad.clone()
    x.grad = None
    y.backward()
    assert torch.equal(x.grad, first)
    with moving.hooks:
        z = x.exp().sin().exp().sum()
    del y, z
    gc.collect()
    assert moving._by_number == moving._by_storage == {}


def test_two_forwards_before_one_backward_and_a_forward_between():
    results = []
    for moving in (None, offloader(in_flight=3)):
        torch.manual_seed(0)
        model, x = StackModel(), points()[0]
        hooks = moving.hooks if moving is not None else torch.enable_grad()
        with hooks:
            first = model(x[:12]).square().mean()
        with hooks:
            second = model(x[12:]).square().mean()
        first.backward()
        (second * 2).backward()
        results.append(gradients(model))
    assert largest_difference(*results) == 0.0


# ---- on a device, by fake tensors

WIDTH, BATCH, BLOCKS = 64, 4096, 6


class Late(Copies):
    """As copies on a stream: an order of what was begun and waited for."""

    def __init__(self):
        self.told = []

    def to_host(self, source):
        self.told.append("send")
        return super().to_host(source)[0], len(self.told)

    def to_device(self, host, device):
        self.told.append("fetch")
        return super().to_device(host, device)[0], len(self.told)

    def wait(self, event):
        self.told.append(f"wait {event}")


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(StackModel().blocks[0] for _ in range(BLOCKS))
        for block in self.blocks:
            block.norm = nn.LayerNorm(WIDTH)
            block.expand, block.contract = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def on_fake_cuda(moving, checkpointing="none"):
    """Most bytes on the device in forward, at its end, and in backward; those of all gradients."""
    with FakeTensorMode(), torch.device("cuda"):
        model, x = Wide(), torch.empty(BATCH, WIDTH)
        if CHECKPOINTING[checkpointing] is not None:
            checkpoint_blocks(model.blocks, keeps=CHECKPOINTING[checkpointing][0])
        if moving is not None:
            moving.leave([*model.parameters()])
        with LiveStorages("cuda") as live:
            with moving.hooks if moving is not None else torch.enable_grad():
                outputs = [model(x)]
            in_forward, at_end, live.peak = live.peak, live.bytes(), 0
            backward(outputs)
        assert all(parameter.grad is not None for parameter in model.parameters())
        return in_forward, at_end, live.peak, sum(p.nbytes for p in model.parameters())


UNIT = BATCH * WIDTH * 4
# What autograd keeps of a block: its input, normalised, and expanded before and after gelu, twice as wide.
BLOCK = UNIT * (1 + 1 + 2 + 2)


def test_without_moving_all_blocks_are_on_the_device():
    in_forward, at_end, in_backward, _ = on_fake_cuda(None)
    assert min(in_forward, at_end, in_backward) > (BLOCKS - 1) * BLOCK


@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_two_blocks_are_on_the_device_at_once_at_most(in_flight):
    moving = Offloader(torch.device("cuda"), in_flight=in_flight)
    in_forward, at_end, in_backward, weights = on_fake_cuda(moving)
    assert in_forward <= 2 * BLOCK
    assert at_end <= 2 * BLOCK
    # With all gradients, and those of the widest operation's input and result.
    assert in_backward <= 2 * BLOCK + weights + 4 * UNIT
    assert moving.sent >= (BLOCKS - 1) * BLOCK
    assert moving.fetched >= moving.sent - in_flight * 2 * UNIT


def test_a_smaller_number_in_flight_keeps_less_on_the_device():
    kept = [on_fake_cuda(Offloader(torch.device("cuda"), in_flight=in_flight))[1] for in_flight in (1, 3, 8)]
    assert kept == sorted(kept)
    assert len(set(kept)) == 3


def test_with_checkpointing_the_inputs_of_blocks_are_moved_and_nothing_that_is_run_again():
    moving = Offloader(torch.device("cuda"), in_flight=1)
    _, at_end, _, _ = on_fake_cuda(moving, "full")
    assert moving.sent == (BLOCKS) * UNIT
    assert at_end <= 2 * UNIT + 1024
    moving = Offloader(torch.device("cuda"), in_flight=1)
    on_fake_cuda(moving, "selective")
    assert moving.sent == BLOCKS * (UNIT + 2 * UNIT)  # inputs, and the one product that backward needs


def test_every_tensor_is_on_its_way_before_the_one_after_it_is_used():
    moving = Offloader(torch.device("cuda"), in_flight=2)
    moving.copies = copies = Late()
    on_fake_cuda(moving)
    sent = copies.told.count("send")
    fetched = [i for i, told in enumerate(copies.told) if told == "fetch"]
    assert sent == BLOCKS * 4
    assert len(fetched) == sent - 2  # the last two had not left yet
    waited = [copies.told.index(f"wait {i + 1}") for i in fetched]
    assert all(wait > begun + 1 for begun, wait in zip(fetched, waited, strict=True))


def test_a_tensor_that_is_changed_while_it_leaves_is_refused():
    moving = offloader(in_flight=1)
    moving.copies = Late()
    x = torch.ones(10, requires_grad=True)
    y = x * 1
    with moving.hooks:
        z = y.exp()
        with torch.no_grad():
            z.add_(1)
        with pytest.raises(RuntimeError, match="was changed in place while it went to the host"):
            (x * 2).exp()


def test_copies_on_a_stream_begin_after_what_was_computed_and_are_waited_for(monkeypatch):
    """The order in which streams are asked, by stand-ins. Side waits for main, copies, is marked; main waits for that."""
    told = []

    class Stream:
        def __init__(self, device, name="side"):
            self.device, self.name = device, name

        def wait_stream(self, other):
            told.append(f"{self.name} waits for {other.name}")

        def wait_event(self, event):
            told.append(f"{self.name} waits for {event}")

        def record_event(self):
            told.append(f"{self.name} is marked")
            return "the mark"

        def __enter__(self):
            told.append(f"into {self.name}")

        def __exit__(self, *error):
            told.append(f"out of {self.name}")

    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Stream(device, "main"))
    copies = StreamedCopies(CPU, pin=False)
    x = torch.randn(5)
    there = ["side waits for main", "into side", "out of side", "side is marked"]
    host, mark = copies.to_host(x)
    assert told == there
    back, mark = copies.to_device(host, CPU)
    assert told == 2 * there
    copies.wait(mark)
    assert told[-1] == "main waits for the mark"
    assert torch.equal(back, x)
    assert len({x.data_ptr(), host.data_ptr(), back.data_ptr()}) == 3


def test_what_was_on_its_way_when_the_graph_was_dropped_is_waited_for():
    moving = Offloader(torch.device("cuda"), in_flight=1, min_bytes=0)
    moving.copies = copies = Late()
    with FakeTensorMode(), torch.device("cuda"):
        packed = [moving.pack(torch.empty(10)) for _ in range(3)]
        moving.unpack(packed.pop())  # was there still; the second is fetched ahead of its use
        assert copies.told[-1] == "fetch"
        del packed
        gc.collect()
        assert copies.told[-1] == f"wait {copies.told.index('fetch') + 1}"


def test_a_checkpoint_around_inplace_code_and_moving_go_together():
    """The convolution's result is kept, copied before it is changed, and the copy stays where it is."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x):
            return F.silu(self.conv(x), inplace=True).exp()

    results = []
    for moving in (None, offloader()):
        torch.manual_seed(0)
        block = Block()
        x = torch.randn(2, 3, 8, 8)
        if moving is None:
            block(x).sum().backward()
        else:
            checkpoint_blocks([block], keeps=keep_by_cost(0.0))
            with moving.hooks:
                loss = block(x).sum()
            loss.backward()
        results.append(gradients(block))
    assert largest_difference(*results) == 0.0
