"""What is kept for backward on CUDA: less of it, the same numbers, and tensors that travel beside the computation."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.models import ROWS, WIDTH, Rows
from tests.helpers import largest_difference, state
from tests.stack import Restless

QUIET = {"run": {"dir": None}, "log": {"every": 1000}, "device": "cuda"}
OFFLOAD = {"name": "cpu", "min_bytes": 0, "in_flight": 2}
SLOTS = {
    "offload": {"activation_offload": OFFLOAD},
    "offload of what full keeps": {"activation_offload": OFFLOAD, "activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
    "offload of what selective keeps": {"activation_offload": OFFLOAD, "activation_checkpointing": "selective"},
    "attention kept": {"activation_checkpointing": {"name": "selective", "keep": ["attention", "matmuls"]}},
}


def peak_of(**slots):
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    trainer = Rows(batch_size=ROWS, steps=3, optimizer="sgd", **slots, **QUIET)
    trainer.fit()
    return torch.cuda.max_memory_allocated(), trainer


@pytest.mark.parametrize("name", SLOTS)
def test_training_keeps_its_bits(name):
    results = []
    for slots in ({}, SLOTS[name]):
        trainer = Restless(batch_size=8, steps=6, optimizer="sgd", **slots, **QUIET, deterministic=True)
        trainer.fit()
        results.append(state(trainer))
    assert largest_difference(*results) == 0.0


@pytest.mark.parametrize("name", ["offload", "selective", "offload of what full keeps"])
def test_the_peak_is_lower_and_the_weights_are_the_same(name):
    plain, without = peak_of(deterministic=True)
    less, trainer = peak_of(deterministic=True, **SLOTS[name])
    assert largest_difference(state(without), state(trainer)) == 0.0
    block = ROWS * WIDTH * 4 * (1 + 1 + 4 + 4)
    assert plain - less > 4 * block


def test_the_mask_after_a_kept_attention_with_dropout_is_the_same_the_second_time():
    """Attention draws its mask by itself, is kept, and the dropout after it must go on from there."""
    from torch.nn import functional as F
    from torch.utils.checkpoint import checkpoint

    from fasttrain.nn.selective import keep_operations, selective_contexts

    def function(q):
        return F.dropout(F.scaled_dot_product_attention(q, q, q, dropout_p=0.5), 0.5) * q

    gradients, keeps = [], keep_operations(["attention"])
    for kept in (False, True):
        torch.manual_seed(0)
        q = torch.ones(2, 4, 64, 64, device="cuda", dtype=torch.float16).requires_grad_()
        if kept:
            output = checkpoint(function, q, use_reentrant=False, context_fn=lambda: selective_contexts(keeps))
        else:
            output = function(q)
        output.float().sum().backward()
        gradients.append(q.grad)
    assert torch.equal(*gradients)
