"""Each update rule against torch's, or against the formula of its paper written here."""

from __future__ import annotations

import copy
import math
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torchao.optim import AdamW8bit as TorchaoAdamW8bit

from fasttrain.optim.adafactor import Adafactor
from fasttrain.optim.adamw_8bit import adamw_8bit_class
from fasttrain.optim.guarded import obeys_found_inf, step_unless
from fasttrain.optim.lamb import Lamb
from fasttrain.optim.muon import Muon, orthogonalize

AdamW8bit = adamw_8bit_class()
SHAPES = [(64, 128), (128, 64), (32, 32), (16,), (8, 3, 3, 3)]


def parameters(shapes=SHAPES, dtype=torch.float32):
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(*shape, dtype=dtype)) for shape in shapes]


def give_gradients(*lists, seed):
    """The same gradients to each list of parameters."""
    generator = torch.Generator().manual_seed(seed)
    for same in zip(*lists, strict=True):
        grad = torch.randn(same[0].shape, generator=generator)
        for parameter in same:
            parameter.grad = grad.to(parameter.dtype, copy=True)


def muon(params, **settings):
    """Matrices by Muon, the rest by AdamW."""
    groups = [
        {"params": [p for p in params if p.dim() > 1], "muon": True, "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() <= 1], "muon": False, "lr": 1e-3, "weight_decay": 0.0, "fused": True},
    ]
    return Muon([group for group in groups if group["params"]], **settings)


def differences(one, other):
    return [(a - b).abs().max().item() for a, b in zip(one, other, strict=True)]


# ---- LAMB


def lamb_by_the_paper(x, grads, lr=0.01, betas=(0.9, 0.999), eps=1e-6, decay=0.1, adapt=True):
    """Algorithm 2 of the paper for one layer, the scaling function phi being the identity."""
    m = v = torch.zeros_like(x)
    for t, g in enumerate(grads, start=1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        r = (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
        u = r + decay * x
        ratio = x.norm() / u.norm() if adapt else 1.0
        x = x - lr * ratio * u
    return x


@pytest.mark.parametrize(
    ("decay", "always_adapt", "adapts"), [(0.1, False, True), (0.0, False, False), (0.0, True, True)]
)
def test_lamb_is_the_papers_formula(decay, always_adapt, adapts):
    """In float64, so that nothing but the formula can make a difference."""
    params = parameters(dtype=torch.float64)
    start = [p.detach().clone() for p in params]
    optimizer = Lamb(params, lr=0.01, weight_decay=decay, always_adapt=always_adapt)
    grads = []
    for step in range(6):
        give_gradients(params, seed=step)
        grads.append([p.grad.clone() for p in params])
        optimizer.step()
    for i, parameter in enumerate(params):
        expected = lamb_by_the_paper(start[i], [g[i] for g in grads], decay=decay, adapt=adapts)
        # Counts of steps are float32, so the corrections of the bias are, too: 6e-8 relative.
        assert (parameter - expected).abs().max().item() < 1e-7
        assert (parameter - start[i]).abs().max().item() > 1e-2


def test_the_corrections_of_lamb_keep_their_digits_in_float32():
    """1 - 0.999^1 written so in float32 is wrong by 5e-5; the first step of what does not decay is lr · sign(g)."""
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.tensor([1.0, -2.0, 3.0, -4.0])
    Lamb([parameter], lr=0.5, eps=0.0, weight_decay=0.0).step()
    assert torch.allclose(parameter, torch.tensor([-0.5, 0.5, -0.5, 0.5]), rtol=3e-7, atol=0)


def test_lamb_takes_a_ratio_of_one_where_a_norm_is_zero():
    zero = nn.Parameter(torch.zeros(2, 2))
    zero.grad = torch.ones(2, 2)
    Lamb([zero], lr=0.5, eps=0.0, weight_decay=0.1).step()
    assert torch.allclose(zero, torch.full((2, 2), -0.5))
    one = nn.Parameter(torch.ones(2, 2))
    one.grad = torch.zeros(2, 2)
    Lamb([one], lr=0.5, weight_decay=0.0, always_adapt=True).step()
    assert torch.equal(one, torch.ones(2, 2))


# ---- Muon


@pytest.mark.parametrize(("nesterov", "adjust"), [(True, "original"), (False, "original"), (True, "match_rms_adamw")])
def test_muon_is_torchs_for_matrices_and_torchs_adamw_for_the_rest_to_the_bit(nesterov, adjust):
    ours, theirs = parameters(), parameters()
    optimizer = muon(ours, lr=0.02, nesterov=nesterov, adjust=adjust)
    matrices = [nn.Parameter(p.detach().flatten(1)) for p in theirs if p.dim() > 1]
    of_torch = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn=adjust)
    adamw = torch.optim.AdamW([p for p in theirs if p.dim() <= 1], lr=1e-3, weight_decay=0.0, fused=True)
    for step in range(5):
        give_gradients(ours, theirs, seed=step)
        for matrix, parameter in zip(matrices, [p for p in theirs if p.dim() > 1], strict=True):
            matrix.grad = parameter.grad.flatten(1)
        optimizer.step()
        of_torch.step()
        adamw.step()
    expected = iter(matrices)
    for parameter, other in zip(ours, theirs, strict=True):
        other = next(expected).view_as(other) if other.dim() > 1 else other
        assert torch.equal(parameter, other)
    assert sum(v.nbytes for p in ours if p.dim() > 1 for v in optimizer.state[p].values()) == sum(
        p.nbytes for p in ours if p.dim() > 1
    )


def test_orthogonalize_gives_singular_values_near_one():
    torch.manual_seed(0)
    for shape in ((40, 100), (100, 40)):
        values = torch.linalg.svdvals(orthogonalize(torch.randn(shape), 5).float())
        assert len(values) == 40
        assert values.min() > 0.4
        assert values.max() < 1.3


# ---- Adafactor


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adafactor_is_torchs_up_to_the_last_bits_and_its_states_to_the_bit(decay):
    ours, theirs = parameters(), parameters()
    optimizer, of_torch = Adafactor(ours, weight_decay=decay), torch.optim.Adafactor(theirs, weight_decay=decay)
    for step in range(10):
        give_gradients(ours, theirs, seed=step)
        optimizer.step()
        of_torch.step()
    # Its scalars are float64 on the host in torch, and float32 on the device here: one or two roundings a step.
    assert max(differences(ours, theirs)) < 1e-6
    for one, other in zip(ours, theirs, strict=True):
        assert optimizer.state[one].keys() == of_torch.state[other].keys()
        assert all(torch.equal(v, of_torch.state[other][k]) for k, v in optimizer.state[one].items())


# ---- AdamW of 8 bits


@pytest.fixture
def compiled_on_the_cpu(monkeypatch):
    """Code as a GPU compiles it, but with torch's own kernels at the end; how many graphs were made."""
    graphs = CompileCounterWithBackend("aot_eager")
    plain = torch.compile
    monkeypatch.setattr("fasttrain.optim.adamw_8bit.COMPILED_ON", ("cpu",))
    monkeypatch.setattr(torch, "compile", lambda function, **settings: plain(function, backend=graphs, **settings))
    torch.compiler.reset()
    yield graphs
    torch.compiler.reset()


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_compiled_adamw_8bit_steps_refuses_and_keeps_its_graphs_at_new_rates(compiled_on_the_cpu, layout, refuses):
    shapes = [(64, 64, 3, 3), (64, 128), (64, 128), (16,)]
    ours, eager = parameters(shapes), parameters(shapes)
    for params in (ours, eager):
        params[0].data = params[0].data.contiguous(memory_format=layout)
    optimizer, plain = AdamW8bit(ours, 1e-2), AdamW8bit(eager, 1e-2)
    for step, lr in enumerate((1e-2, 5e-3, 2e-3, torch.tensor(1e-3), torch.tensor(5e-4))):
        give_gradients(ours, eager, seed=step)
        before = [parameter.detach().clone() for parameter in ours]
        is_refused = refuses and step in (0, 3)
        for one, on in ((optimizer, ("cpu",)), (plain, ())):
            one.param_groups[0]["lr"] = lr
            with mock.patch("fasttrain.optim.adamw_8bit.COMPILED_ON", on):
                step_unless(one, torch.tensor(float(is_refused)) if refuses else None)
        assert all(torch.equal(a, b) for a, b in zip(before, ours, strict=True)) is is_refused
    # A graph for each shape: two are alike.
    assert compiled_on_the_cpu.frame_count == 3
    # Products in another order: a moment halfway between two codes, one in thousands, may get the other.
    for a, b in zip(ours[:3], eager[:3], strict=True):
        assert ((a - b).abs() > 1e-7).float().mean() < 1e-3
        assert (a - b).abs().max() < 1e-3
        for name in ("exp_avg", "exp_avg_sq"):
            codes = [one.state[p][name].codes.int() for one, p in ((optimizer, a), (plain, b))]
            assert (codes[0] - codes[1]).abs().max() <= 1
    assert torch.allclose(ours[3], eager[3], rtol=0.0, atol=1e-7)
    assert {one.state[p]["step"].item() for one, params in ((optimizer, ours), (plain, eager)) for p in params} == {
        3.0 if refuses else 5.0
    }


def test_adamw_8bit_is_torchaos_to_the_bit():
    ours, theirs = parameters(), parameters()
    optimizer, of_torchao = AdamW8bit(ours, 1e-2), TorchaoAdamW8bit(theirs, 1e-2)
    # torchao compiles its update; the function that it compiles is compared.
    with mock.patch("torch.compile", lambda function, **_: function):
        for step in range(5):
            give_gradients(ours, theirs, seed=step)
            optimizer.step()
            of_torchao.step()
    assert differences(ours, theirs) == [0.0] * 5
    assert type(optimizer.state[ours[0]]["exp_avg"]) is type(of_torchao.state[theirs[0]]["exp_avg"])


def bytes_of(state):
    parts = []
    for value in state.values():
        parts += [value.codes, value.scale, value.qmap] if hasattr(value, "codes") else [value]
    return sum(part.nbytes for part in parts)


def test_states_of_8_bits_are_a_quarter_of_float32s_in_bytes():
    (parameter,) = parameters([(512, 512)])
    give_gradients([parameter], seed=0)
    optimizer = AdamW8bit([parameter], 1e-3)
    optimizer.step()
    # A float32 scale for each 256 elements, and a table of 256 values for each moment.
    assert bytes_of(optimizer.state[parameter]) == 2 * (512 * 512 + 4 * 512 * 512 // 256 + 4 * 256) + 4
    assert bytes_of(optimizer.state[parameter]) <= 0.27 * 2 * parameter.nbytes


def test_small_tensors_keep_float32_moments():
    small, odd, large = parameters([(4095,), (4097,), (4096,)])
    optimizer = AdamW8bit([small, odd, large], 1e-3)
    give_gradients([small, odd, large], seed=0)
    optimizer.step()
    assert [hasattr(optimizer.state[p]["exp_avg"], "codes") for p in (small, odd, large)] == [False, False, True]


# ---- all of them


MAKE = {
    "lamb": lambda params: Lamb(params, lr=0.01),
    "muon": muon,
    "adafactor": lambda params: Adafactor(params, lr=0.01, weight_decay=0.1),
    "adamw_8bit": lambda params: AdamW8bit(params, 0.01),
}


def plain_tensors(optimizer, params):
    found = {}
    for i, parameter in enumerate(params):
        for key, value in optimizer.state[parameter].items():
            parts = {"": value} if not hasattr(value, "codes") else {"codes": value.codes, "scale": value.scale}
            found |= {(i, key, part): tensor.clone() for part, tensor in parts.items()}
    return found


@pytest.mark.parametrize("first", [True, False], ids=["the first step", "the second step"])
@pytest.mark.parametrize("name", MAKE)
def test_a_refused_step_changes_nothing_and_reads_nothing(monkeypatch, name, first):
    """Also the first, before there are states, which is then as if it had not been."""
    ours, theirs = parameters([*SHAPES, (64, 64)]), parameters([*SHAPES, (64, 64)])
    optimizer, other = MAKE[name](ours), MAKE[name](theirs)
    assert obeys_found_inf(optimizer)
    seed = 0
    if not first:
        give_gradients(ours, theirs, seed=seed)
        step_unless(optimizer, torch.tensor(0.0))
        step_unless(other, torch.tensor(0.0))
    weights, states = [p.detach().clone() for p in ours], plain_tensors(optimizer, ours)
    give_gradients(ours, seed=7)
    ours[0].grad[0, 0], ours[3].grad[0] = math.nan, math.inf
    reads = []
    with monkeypatch.context() as patch:
        for method in ("item", "__bool__", "__float__"):
            patch.setattr(torch.Tensor, method, lambda self, method=method: reads.append(method))
        step_unless(optimizer, torch.tensor(1.0))
    assert reads == []
    assert all(torch.equal(p, w) for p, w in zip(ours, weights, strict=True))
    if not first:
        now = plain_tensors(optimizer, ours)
        assert len(states) >= 8
        assert all(torch.equal(now[key], value) for key, value in states.items())
    give_gradients(ours, theirs, seed=3)
    step_unless(optimizer, torch.tensor(0.0))
    step_unless(other, torch.tensor(0.0))
    assert differences(ours, theirs) == [0.0] * 6


@pytest.mark.parametrize("name", MAKE)
def test_a_rate_that_is_a_tensor_gives_the_numbers_of_a_rate_that_is_none(name):
    """A schedule keeps the rate on the device where steps can be refused; float64 on the CPU."""
    ours, theirs = parameters(), parameters()
    optimizer, other = MAKE[name](ours), MAKE[name](theirs)
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(0.003 * (step + 1), dtype=torch.float64)
        for group in other.param_groups:
            group["lr"] = 0.003 * (step + 1)
        give_gradients(ours, theirs, seed=step)
        step_unless(optimizer, torch.tensor(0.0))
        other.step()
    assert max(differences(ours, theirs)) < (1e-4 if name == "muon" else 1e-6)  # Muon multiplies in bfloat16


@pytest.mark.parametrize("name", MAKE)
def test_parameters_without_a_gradient_are_left_alone_and_get_no_state(name):
    params = parameters()
    optimizer = MAKE[name](params)
    before = [p.detach().clone() for p in params]
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert [torch.equal(p, b) for p, b in zip(params, before, strict=True)] == [False, True, True, True, True]
    assert [i for i, p in enumerate(params) if optimizer.state.get(p)] == [0]


def test_muon_goes_on_as_before_after_its_states_were_loaded():
    def make():
        matrix, vector = parameters([(8, 8), (8,)])
        groups = [
            {"params": [matrix], "muon": True, "weight_decay": 0.1},
            {"params": [vector], "muon": False, "lr": 0.1, "fused": True},
        ]
        return [matrix, vector], Muon(groups)

    (ours, straight), (theirs, loaded) = make(), make()
    give_gradients(ours, seed=1)
    straight.step()
    with torch.no_grad():
        for here, there in zip(theirs, ours, strict=True):
            here.copy_(there)
    loaded.load_state_dict(copy.deepcopy(straight.state_dict()))
    give_gradients(ours, theirs, seed=2)
    straight.step()
    loaded.step()
    assert all(torch.equal(here, there) for here, there in zip(theirs, ours, strict=True))


def test_lamb_without_a_first_moment_steps_by_the_gradient():
    (parameter,) = parameters([(4,)])
    parameter.grad = torch.ones(4)
    before = parameter.detach().clone()
    Lamb([parameter], lr=0.5, betas=(0.0, 0.999), eps=0.0, weight_decay=0.0).step()
    torch.testing.assert_close(parameter.detach(), before - 0.5)
