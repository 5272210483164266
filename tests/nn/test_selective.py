"""Selective checkpointing: what is kept by which rule, bytes and FLOPs as counted, and that no number changes."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from fasttrain import ConfigError
from fasttrain.models.bert import Bert, BertForMaskedLM
from fasttrain.models.bert_config import BertConfig
from fasttrain.models.resnet import build_resnet
from fasttrain.nn.activations import kept_bytes
from fasttrain.nn.blocks import find_blocks
from fasttrain.nn.recompute import checkpoint_blocks
from fasttrain.nn.selective import PRESETS, find_operation, flops_of, keep_by_cost, keep_operations
from tests.helpers import largest_difference, points
from tests.stack import StackModel, gradients

aten = torch.ops.aten
MIB = 2**20
RULES = {
    "cost": keep_by_cost(),
    "every product": keep_by_cost(0.0),
    "matmuls": keep_operations(["matmuls"]),
    "all presets": keep_operations(["matmuls", "convolutions", "attention"]),
    "norms and dropout": keep_operations(["aten.native_layer_norm", "aten.native_batch_norm", "aten.bernoulli.p"]),
}


# ---- the figures of the page


def resnet50():
    return build_resnet("resnet50", num_classes=1000), torch.empty(16, 3, 224, 224)


def bert_base():
    return Bert(BertConfig(dropout=0.0), pooler=False), torch.zeros(8, 512, dtype=torch.long)


@functools.cache
def counted(make, how, bf16=False):
    """Bytes kept at the end of forward and FLOPs of a step, on fake tensors."""
    with FakeTensorMode():
        model, x = make()
        if how == "full":
            checkpoint_blocks(find_blocks(model))
        elif how == "selective":
            checkpoint_blocks(find_blocks(model), keeps=keep_by_cost())

        def forward():
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                return model(x)

        kept = kept_bytes(forward)
        with FlopCounterMode(display=False) as flops:
            forward().float().sum().backward()
    return kept, flops.get_total_flops()


@pytest.mark.parametrize(
    ("make", "how", "bf16", "saved", "flops"),
    [
        (resnet50, "full", False, 0.60, 1.34),
        (bert_base, "full", False, 0.60, 1.34),
        (resnet50, "selective", False, 0.45, 1.12),
        (resnet50, "selective", True, 0.38, 1.12),
        (bert_base, "selective", False, 0.30, 1.00),
        (bert_base, "selective", True, 0.38, 1.00),
    ],
)
def test_bytes_saved_and_flops_paid(make, how, bf16, saved, flops):
    kept, work = counted(make, how, bf16)
    all_kept, all_work = counted(make, None, bf16)
    assert 1 - kept / all_kept >= saved
    assert 1.0 <= work / all_work <= flops


@pytest.mark.parametrize(("make", "saved"), [(resnet50, 0.44), (bert_base, 0.36)])
def test_bf16_alone_saves_bytes(make, saved):
    """Everything counts here, the narrow copies of the weights of products too; of activations alone it is 38 % or more."""
    (wide, work), (narrow, same_work) = counted(make, None), counted(make, None, bf16=True)
    model, _ = make()
    products = [m for block in find_blocks(model) for m in block.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    copies = sum(2 * parameter.numel() for module in products for parameter in module.parameters())
    assert 1 - narrow / wide >= saved
    assert 1 - (narrow - copies) / wide >= 0.38
    assert work == same_work


def test_the_bytes_of_bert_are_those_of_arithmetic():
    """Of 16 times the width in a layer the rule keeps 11: input, q, k, v, attention and two projections, and 4 of expand."""
    unit = 8 * 512 * 768 * 4
    kept, _ = counted(bert_base, "selective")
    everything, _ = counted(bert_base, None)
    small = 0.01 * unit * 12
    statistics = 2 * 2 * 8 * 512 * 4 + 8 * 12 * 512 * 4
    assert abs(everything - 12 * (16 * unit + statistics) - 2 * unit) < small
    assert abs(kept - 12 * (1 + 3 + 1 + 1 + 4 + 1) * unit - 2 * unit) < 2 * small


def test_the_flops_of_a_bottleneck_are_those_of_arithmetic():
    """Of a block at the third stage the convolution that widens is run again (256 to 1024 channels), and nothing else."""
    with FakeTensorMode():
        work = []
        for keeps in (None, keep_by_cost()):
            block = find_blocks(build_resnet("resnet50", num_classes=10))[8]
            if keeps is not None:
                checkpoint_blocks([block], keeps=keeps)
            with FlopCounterMode(display=False) as counter:
                block(torch.empty(4, 1024, 14, 14, requires_grad=True)).sum().backward()
            work.append(counter.get_total_flops())
    assert work[1] - work[0] == 2 * 256 * 1024 * 4 * 14 * 14


# ---- which results are kept


def rules_of(operation, *args, **kwargs):
    return keep_by_cost()(operation, args, kwargs, operation(*args, **kwargs))


def test_the_rule_goes_by_flops_for_each_byte():
    def product(width, dtype=torch.float32):
        return rules_of(aten.mm.default, torch.empty(32, width, dtype=dtype), torch.empty(width, 8, dtype=dtype))

    assert (
        flops_of(aten.mm.default, (torch.empty(32, 400), torch.empty(400, 8)), {}, torch.empty(32, 8))
        == 2 * 400 * 32 * 8
    )
    assert (product(400), product(401)) == (False, True)  # 2 x 400 FLOPs for 4 bytes
    assert (product(200, torch.bfloat16), product(201, torch.bfloat16)) == (False, True)
    with FakeTensorMode():
        q = torch.empty(2, 4, 512, 64)
        assert rules_of(aten._scaled_dot_product_flash_attention_for_cpu.default, q, q, q)
        assert not rules_of(aten.gelu.default, q)
        assert not rules_of(aten._softmax.default, q, -1, False)


def test_an_operation_that_torch_knows_nothing_of_is_kept():
    @torch.library.custom_op("fasttrain_tests::own_kernel", mutates_args=())
    def own_kernel(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert rules_of(torch.ops.fasttrain_tests.own_kernel.default, torch.ones(3))


def test_names_mean_operations_overloads_and_presets():
    assert find_operation("aten.mm") is aten.mm
    assert find_operation("torch.ops.aten.convolution.default") is aten.convolution.default
    keeps = keep_operations(["aten.mm", "attention"])
    q = torch.ones(1, 1, 2, 2)
    assert keeps(aten.mm.default, (), {}, None)
    assert not keeps(aten.addmm.default, (), {}, None)
    assert keeps(aten._scaled_dot_product_flash_attention_for_cpu.default, (q, q, q), {}, None)
    assert all(hasattr(aten, name) for names in PRESETS.values() for name in names)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("aten.convolutoin", "there is no operation 'aten.convolutoin'; did you mean 'aten.convolution'?"),
        ("aten.mm.defualt", "there is no operation 'aten.mm.defualt'; did you mean 'aten.mm.default'?"),
        ("matmul", "there is no operation 'matmul'; did you mean 'matmuls'?"),
        ("aten.view", "the result of 'aten.view' is a view, made in place, or a mere cast"),
        ("aten.relu_", "the result of 'aten.relu_' is a view, made in place, or a mere cast"),
        ("aten._to_copy", "the result of 'aten._to_copy' is a view, made in place, or a mere cast"),
    ],
)
def test_a_wrong_name_is_told_with_the_right_one(name, told):
    with pytest.raises(ConfigError) as caught:
        keep_operations([name])
    assert told in str(caught.value)


# ---- no number changes


TOKENS = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
SMALL = {"vocabulary": 50, "width": 16, "layers": 3, "heads": 2, "feedforward": 64}


class Plain(nn.Module):
    """Convolutions whose results are changed in place, as in a VGG and in a block that adds in place."""

    def __init__(self):
        super().__init__()
        self.conv, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x):
        y = F.silu(self.conv(x), inplace=True)
        z = self.second(y)
        z += x
        z[:, 1] *= 0.5
        return z.tanh()


class Branched(nn.Module):
    """A router, two experts and tuples: names, numbers and `None` among tensors."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 2)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 8)) for _ in range(2)
        )
        self.norm, self.drop = nn.LayerNorm(8), nn.Dropout(0.2)

    def forward(self, state, *, scale=1.0, cache=None):
        x, depth = state
        gates = self.router(x).softmax(-1)
        chosen = gates.argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            out = out.index_add(0, rows, (expert(x[rows]) * gates[rows, number, None]).to(x.dtype))
        assert cache is None
        return self.norm(x + self.drop(out) * scale), depth + 1


class Chain(nn.Module):
    def __init__(self, block, times=2):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(times))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Routed(Chain):
    def forward(self, x):
        state = (x, 0)
        for block in self.blocks:
            state = block(state, scale=0.5)
        assert state[1] == len(self.blocks)
        return state[0]


class Shared(Chain):
    """One block run three times, as in ALBERT."""

    def forward(self, x):
        for _ in range(3):
            x = self.blocks[0](x)
        return self.blocks[1](x)


def stack_block():
    return StackModel(nn.BatchNorm1d, dropout=0.3).blocks[0]


MODELS = {
    "stack": (lambda: StackModel(dropout=0.3), lambda: points()[0]),
    "batch norm": (lambda: StackModel(nn.BatchNorm1d, dropout=0.3), lambda: points()[0]),
    "bert": (lambda: BertForMaskedLM(BertConfig(**SMALL, dropout=0.1)), lambda: TOKENS),
    "bert without dropout": (lambda: BertForMaskedLM(BertConfig(**SMALL, dropout=0.0)), lambda: TOKENS),
    "resnet": (lambda: build_resnet("resnet18", num_classes=3, stem="small", width=8), lambda: IMAGES),
    "results changed in place": (lambda: Chain(Plain), lambda: IMAGES),
    "experts": (lambda: Routed(Branched), lambda: points()[0]),
    "one block three times": (lambda: Shared(stack_block), lambda: points()[0]),
    "nested blocks": (lambda: Chain(lambda: Chain(stack_block)), lambda: points()[0]),
    "transformer of torch": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
        lambda: points()[0],
    ),
}


def trained(name, keeps=None, *, every=1, bf16=False, steps=2):
    make, data = MODELS[name]
    torch.manual_seed(0)
    model, x = make(), data()
    if keeps is not None:
        checkpoint_blocks(find_blocks(model), every, keeps)
    torch.manual_seed(5)
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            output = model(x)
        torch.rand(3)
        output.float().square().mean().backward()
    return {"output": output.detach(), "drawn": torch.rand(4), **gradients(model), **dict(model.named_buffers())}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MODELS)
def test_outputs_gradients_statistics_and_draws_keep_their_bits(name, rule):
    assert largest_difference(trained(name), trained(name, RULES[rule])) == 0.0


@pytest.mark.parametrize("name", ["batch norm", "bert", "resnet", "experts"])
def test_autocast_and_every_other_block_keep_the_bits_too(name):
    assert largest_difference(trained(name, bf16=True), trained(name, RULES["cost"], bf16=True)) == 0.0
    assert largest_difference(trained(name), trained(name, RULES["every product"], every=2)) == 0.0


def test_statistics_of_batch_norm_move_once():
    results = trained("batch norm", RULES["matmuls"], steps=1)
    assert results["blocks.0.norm.num_batches_tracked"].item() == 1


def test_evaluation_and_frozen_models_keep_nothing():
    model = StackModel(nn.BatchNorm1d)
    checkpoint_blocks(model.blocks, keeps=RULES["matmuls"])
    x = points()[0]
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    output_bytes = 24 * 4 * 4
    assert kept_bytes(lambda: model(x)) == output_bytes
    model.requires_grad_(True).eval()
    with torch.no_grad():
        assert kept_bytes(lambda: model(x)) == output_bytes
    model(x).sum().backward()  # an evaluation that is differentiated
    plain = StackModel(nn.BatchNorm1d).eval()
    plain.load_state_dict(model.state_dict())
    plain(x).sum().backward()
    assert largest_difference(gradients(model), gradients(plain)) == 0.0


# ---- what torch's own pair of contexts does not do


def selectively(function, keeps, *args):
    from fasttrain.nn.selective import selective_contexts

    return checkpoint(function, *args, use_reentrant=False, context_fn=lambda: selective_contexts(keeps))


def by_torch(function, operations, *args):
    contexts = functools.partial(create_selective_checkpoint_contexts, operations)
    return checkpoint(function, *args, use_reentrant=False, context_fn=contexts)


def test_a_kept_result_that_is_changed_in_place_afterwards_is_kept_as_it_was():
    def function(x):
        return F.silu(torch.mm(x, x), inplace=True) * 2

    x, plain = (torch.linspace(-1, 1, 9).view(3, 3).requires_grad_() for _ in range(2))
    with pytest.raises(RuntimeError, match="has been mutated"):
        by_torch(function, [aten.mm.default], x).sum().backward()
    selectively(function, keep_operations(["matmuls"]), x).sum().backward()
    function(plain).sum().backward()
    assert torch.equal(x.grad, plain.grad)


def test_draws_after_a_kept_draw_are_the_same_the_second_time():
    """What is kept is not drawn again, and without more what follows draws in its place: another mask, silently."""

    def function(x):
        noise = torch.ops.aten.bernoulli.p(x.detach(), 0.5)
        return F.dropout(x + noise, 0.5) * x

    differ = []
    for run, keep in ((by_torch, [aten.bernoulli.p]), (selectively, keep_operations(["aten.bernoulli.p"]))):
        torch.manual_seed(0)
        x = torch.ones(1000, requires_grad=True)
        output = run(function, keep, x)
        output.sum().backward()
        differ.append(((output == 0) != (x.grad == 0)).float().mean().item())
    assert differ[0] > 0.3
    assert differ[1] == 0.0


def test_what_the_second_forward_never_comes_to_is_not_kept():
    """The last product of a block: backward needs its input, not its result."""

    def function(x, weight):
        return x + torch.mm(torch.mm(x, weight).exp(), weight)

    x, weight = torch.randn(10, 10), torch.randn(10, 10, requires_grad=True)
    own = kept_bytes(lambda: selectively(function, keep_operations(["aten.mm"]), x, weight))
    by_torch_itself = kept_bytes(lambda: by_torch(function, [aten.mm.default], x, weight))
    assert by_torch_itself - own == 10 * 10 * 4


def test_a_retained_graph_can_be_walked_again():
    def function(x):
        return F.silu(torch.mm(x, x), inplace=True).square()

    results = []
    for run in (False, True):
        x = torch.linspace(-1, 1, 9).view(3, 3).requires_grad_()
        output = selectively(function, keep_operations(["matmuls"]), x) if run else function(x)
        output.sum().backward(retain_graph=True)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        slope.square().sum().backward()
        results.append(x.grad)
    assert torch.equal(*results)


def test_a_result_changed_in_place_outside_is_refused():
    def function(x):
        y = torch.mm(x, x)
        return y, y.exp().exp()

    x = torch.ones(3, 3, requires_grad=True)
    first, second = selectively(function, keep_operations(["matmuls"]), x)
    with torch.no_grad():
        first.add_(1)
    with pytest.raises(RuntimeError, match="was changed in place after its block was done"):
        second.sum().backward()


def test_saved_tensor_hooks_around_act_on_what_is_kept():
    moved = []

    def pack(tensor):
        moved.append(tensor.shape)
        return tensor.clone()

    x = torch.randn(3, 5, requires_grad=True)
    weight = torch.randn(5, 7, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = selectively(lambda x, w: torch.mm(x, w).exp().sin(), keep_operations(["matmuls"]), x, weight)
    # Both inputs and the product; not exp, which is run again. torch 2.11 packs an empty mark for each saved tensor, too.
    assert sorted(shape for shape in moved if 0 not in shape) == [(3, 5), (3, 7), (5, 7)]
    output.sum().backward()
    plain = x.detach().clone().requires_grad_()
    torch.mm(plain, weight.detach()).exp().sin().sum().backward()
    assert torch.equal(x.grad, plain.grad)


def test_what_is_kept_is_freed_with_the_graph():
    """No cycle holds it: with the collector off, nothing stays behind."""
    import gc

    from fasttrain.nn.activations import LiveStorages

    model, x = Chain(Plain), IMAGES
    checkpoint_blocks(model.blocks, keeps=RULES["all presets"])
    model(x).sum().backward()
    gc.collect()
    gc.disable()
    try:
        with LiveStorages() as live:
            model(x).sum().backward()
            after_backward = live.bytes()
            model(x)
            assert live.bytes() == after_backward
    finally:
        gc.enable()
    assert after_backward == 0
