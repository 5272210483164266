"""Steps in chunks: equal to steps in one go, narrow between them, on the host, and inside the backward pass."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fasttrain.errors import SyncError
from fasttrain.models.bert import BertForMaskedLM
from fasttrain.models.bert_config import BertConfig
from fasttrain.optim.adafactor import Adafactor
from fasttrain.optim.chunks import step_in_backward, step_in_chunks
from fasttrain.optim.fused import give_momentum_buffers
from fasttrain.optim.guarded import step_unless
from fasttrain.optim.lamb import Lamb
from fasttrain.optim.muon import Muon
from tests.helpers import by_dimension
from tests.stack import StackModel, batches_of


def fused_sgd(model):
    optimizer = torch.optim.SGD(by_dimension(model), lr=0.1, momentum=0.9, fused=True)
    give_momentum_buffers(optimizer)
    return optimizer


def muon(model):
    (matrices, rest) = by_dimension(model)
    return Muon([{**matrices, "muon": True}, {**rest, "muon": False, "lr": 1e-3, "fused": True}], lr=0.02)


MAKE = {
    "sgd": fused_sgd,
    "adamw": lambda model: torch.optim.AdamW(by_dimension(model), lr=0.01, fused=True),
    "adamw, not fused": lambda model: torch.optim.AdamW(by_dimension(model), lr=0.01, foreach=True),
    "lamb": lambda model: Lamb(by_dimension(model), lr=0.01),
    "muon": muon,
    "adafactor": lambda model: Adafactor(by_dimension(model), lr=0.01),
    "rmsprop": lambda model: torch.optim.RMSprop(by_dimension(model), lr=0.01),
}


def made(name, prepare=lambda optimizer: None, dtype=torch.float32):
    torch.manual_seed(0)
    model = StackModel().to(dtype)
    optimizer = MAKE[name](model)
    return model, optimizer, prepare(optimizer)


def train(model, optimizer, steps=5, update=lambda optimizer: optimizer.step()):
    dtype = next(model.parameters()).dtype
    for x, y in (batches_of() * steps)[:steps]:
        F.cross_entropy(model(x.to(dtype)), y).backward()
        update(optimizer)
        optimizer.zero_grad()


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(one, other):
    return all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("settings", [{}, {"offload": True}, {"state_dtype": torch.float32}, {"narrow": True}], ids=str)
@pytest.mark.parametrize("name", MAKE)
def test_steps_in_chunks_equal_a_step_in_one_go_to_the_bit(name, settings):
    """With float32 weights and states, whatever way the chunks take."""
    plain, optimizer, _ = made(name)
    train(plain, optimizer)
    model, chunked, step = made(name, lambda optimizer: step_in_chunks(optimizer, chunk=100, **settings))
    train(model, chunked)
    assert same(model, plain)
    assert len(step.chunks()) == 6
    assert [len(group["params"]) for group in chunked.param_groups] == [
        len(g["params"]) for g in optimizer.param_groups
    ]
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert chunked.state[ours].keys() == optimizer.state[theirs].keys()
    assert len(chunked.state) == len(optimizer.state) == 16


def test_each_parameter_is_in_one_chunk_and_no_chunk_is_larger_than_asked_but_for_one_large_parameter():
    model, _, step = made("adamw", lambda optimizer: step_in_chunks(optimizer, chunk=100))
    chunks = step.chunks()
    sizes = [[p.numel() for _, params in chunk for p in params] for chunk in chunks]
    assert sum(len(chunk) for chunk in sizes) == len(list(model.parameters())) == 16
    assert all(sum(chunk) <= 100 or len(chunk) == 1 for chunk in sizes)
    assert max(max(chunk) for chunk in sizes) == 128
    assert step.chunks() is chunks


def test_a_group_that_is_added_later_is_stepped_too():
    model, optimizer, step = made("adamw", step_in_chunks)
    train(model, optimizer, steps=1)
    late = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [late]})
    late.grad = torch.ones(2)
    optimizer.step()
    assert (late < 1).all()
    assert sum(len(params) for chunk in step.chunks() for _, params in chunk) == 17


def test_bfloat16_weights_move_by_updates_that_rounding_to_the_nearest_loses():
    """The right answer is that of float32 weights; plain bfloat16 stays where it was."""
    x, rate = torch.ones(1, 4096), 2**-12

    def run(dtype, narrow):
        weight = nn.Parameter(torch.ones(4096, dtype=dtype))
        optimizer = torch.optim.SGD([weight], lr=rate)
        if narrow:
            step_in_chunks(optimizer, narrow=True, generator=torch.Generator().manual_seed(0))
        for _ in range(64):
            (weight.float() * x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return weight.detach().float()

    assert torch.equal(run(torch.float32, False), torch.full((4096,), 1 - 64 * rate))
    assert torch.equal(run(torch.bfloat16, False), torch.ones(4096))
    assert run(torch.bfloat16, True).mean().item() == pytest.approx(1 - 64 * rate, abs=2e-4)


@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb", "muon"])
def test_bfloat16_weights_and_states_take_half_of_float32s_bytes(name):
    def held(dtype, **settings):
        model, optimizer, _ = made(name, lambda optimizer: step_in_chunks(optimizer, **settings), dtype)
        train(model, optimizer)
        of_states = [value for state in optimizer.state.values() for value in state.values() if value.dim() > 0]
        assert {tensor.dtype for tensor in of_states} == {dtype}
        assert all(torch.isfinite(p).all() for p in model.parameters())
        return sum(tensor.nbytes for tensor in [*model.parameters(), *of_states])

    assert 2 * held(torch.bfloat16, narrow=True) == held(torch.float32)


def test_a_refused_step_of_bfloat16_weights_changes_nothing():
    model, optimizer, _ = made("adamw", lambda optimizer: step_in_chunks(optimizer, narrow=True), torch.bfloat16)
    train(model, optimizer, steps=2)
    before, states = weights(model), copy.deepcopy({k: optimizer.state[p] for k, p in model.named_parameters()})
    train(model, optimizer, steps=1, update=lambda optimizer: step_unless(optimizer, torch.tensor(1.0)))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    for name, p in model.named_parameters():
        assert all(torch.equal(value, states[name][key]) for key, value in optimizer.state[p].items())
    train(model, optimizer, steps=1, update=lambda optimizer: step_unless(optimizer, torch.tensor(0.0)))
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_bfloat16_moments_beside_float32_weights_are_half_the_bytes_and_near_the_numbers():
    plain, optimizer, _ = made("adamw")
    train(plain, optimizer, steps=20)
    generator = torch.Generator().manual_seed(0)
    model, narrow, _ = made("adamw", lambda o: step_in_chunks(o, state_dtype=torch.bfloat16, generator=generator))
    train(model, narrow, steps=20)
    bytes_of = [
        sum(s["exp_avg"].nbytes + s["exp_avg_sq"].nbytes for s in o.state.values()) for o in (optimizer, narrow)
    ]
    assert bytes_of[0] == 2 * bytes_of[1] > 0
    differences = [(p - q).abs().max().item() for p, q in zip(model.parameters(), plain.parameters(), strict=True)]
    assert 0 < max(differences) < 0.02  # of 20 steps of 0.01


def test_moments_in_float32_of_bfloat16_weights_are_kept_if_asked():
    model, optimizer, _ = made(
        "adamw", lambda o: step_in_chunks(o, narrow=True, state_dtype=torch.float32), torch.bfloat16
    )
    train(model, optimizer)
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.float32}


# ---- in the backward pass


def count_alive(model):
    """Bytes of gradients alive at each moment that a gradient is complete; before it is used."""
    alive = []

    def count(_):
        alive.append(sum(p.grad.nbytes for p in model.parameters() if p.grad is not None))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    return alive


@pytest.mark.parametrize("name", MAKE)
def test_steps_in_the_backward_pass_equal_steps_after_it_to_the_bit(name):
    plain, optimizer, _ = made(name)
    train(plain, optimizer)
    torch.manual_seed(0)
    model = StackModel()
    alive = count_alive(model)  # its hooks come first
    stepping = step_in_backward(inner := MAKE[name](model))
    for x, y in (batches_of() * 5)[:5]:
        with stepping.last():
            F.cross_entropy(model(x), y).backward()
        assert all(p.grad is None for p in model.parameters())
        inner.step()
    assert same(model, plain)
    assert len(alive) == 5 * 16
    # The largest weight alone: no two gradients were there at a time.
    assert max(alive) == max(p.nbytes for p in model.parameters()) == 512


def test_a_bert_never_holds_more_gradients_than_its_largest_weight():
    torch.manual_seed(0)
    sizes = {"vocabulary": 512, "width": 64, "layers": 3, "heads": 2, "feedforward": 256, "positions": 16}
    model = BertForMaskedLM(BertConfig(**sizes))
    alive = count_alive(model)
    stepping = step_in_backward(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    tokens = torch.randint(512, (2, 16))
    with stepping.last():
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    largest = max(p.nbytes for p in model.parameters())
    assert len(alive) == len(list(model.parameters())) == len(stepping.step.optimizer.state)
    assert max(alive) == largest < sum(p.nbytes for p in model.parameters()) / 5


def test_gradients_of_earlier_microbatches_are_kept_until_the_last():
    plain, optimizer, _ = made("adamw")
    model, inner, stepping = made("adamw", step_in_backward)
    (x, y), (x2, y2) = batches_of()[:2]
    for _ in range(3):
        (F.cross_entropy(plain(x), y) / 2).backward()
        (F.cross_entropy(plain(x2), y2) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) / 2).backward()
        assert all(p.grad is not None for p in model.parameters())
        with stepping.last():
            (F.cross_entropy(model(x2), y2) / 2).backward()
        inner.step()
    assert same(model, plain)


def test_what_the_last_microbatch_does_not_use_is_stepped_when_it_ends():
    plain, optimizer, _ = made("adamw")
    model, inner, stepping = made("adamw", step_in_backward)
    for net, context in ((plain, None), (model, stepping.last())):
        net(torch.ones(2, 8)).sum().backward()
        loss = net.head(torch.ones(2, 8)).sum()
        if context is None:
            loss.backward()
            optimizer.step()
        else:
            with context:
                loss.backward()
            assert all(p.grad is None for p in net.parameters())
            inner.step()
    assert same(model, plain)


class Tied(nn.Module):
    """A weight with two uses, and a block that is run twice."""

    def __init__(self):
        super().__init__()
        self.word, self.block, self.head = nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.word.weight

    def forward(self, tokens):
        return self.head(self.block(self.block(self.word(tokens)).relu()))


def test_shared_parameters_step_once_after_their_last_use():
    models = []
    for in_backward in (False, True):
        torch.manual_seed(0)
        model = Tied()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        stepping = step_in_backward(optimizer) if in_backward else None
        for _ in range(3):
            if stepping is None:
                F.cross_entropy(model(torch.arange(10)), torch.arange(10)).backward()
            else:
                with stepping.last():
                    F.cross_entropy(model(torch.arange(10)), torch.arange(10)).backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
        assert {state["step"].item() for state in optimizer.state.values()} == {3.0}
        assert len(optimizer.state) == 3
    assert same(*models)


def test_two_backward_passes_within_one_step_are_refused():
    model, _, stepping = made("adamw", step_in_backward)
    x, y = batches_of()[0]
    told = r"two backward passes of one step reached .*in_backward=true had stepped it"
    with pytest.raises(SyncError, match=told), stepping.last():
        F.cross_entropy(model(x), y).backward()
        F.cross_entropy(model(x), y).backward()


def test_an_error_in_the_forward_leaves_the_weights_alone():
    model, _, stepping = made("adamw", step_in_backward)
    before = weights(model)
    x, y = batches_of()[0]
    F.cross_entropy(model(x), y).backward()  # of an earlier microbatch
    with pytest.raises(RuntimeError, match="on purpose"), stepping.last():
        raise RuntimeError("on purpose")
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert not stepping.armed


def test_the_order_in_which_states_were_restored_moves_no_random_number():
    def stepped(reverse):
        torch.manual_seed(0)
        model = StackModel()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        step_in_chunks(optimizer, state_dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))
        for x, y in batches_of():
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if reverse:
                for parameter, held in optimizer.state.items():
                    optimizer.state[parameter] = dict(reversed(held.items()))
        return list(model.parameters())

    assert all(torch.equal(one, other) for one, other in zip(stepped(False), stepped(True), strict=True))
