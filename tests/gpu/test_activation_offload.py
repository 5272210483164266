"""Activations in the memory of the host: equal bits, few bytes on the device, no wait of the host."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import models
from tests.gpu.models import BLOCKS, BySgd, Rows, by_hand, fitted, initial, step_bytes, step_without_waiting
from tests.helpers import largest_difference, state

EVERYTHING = {"name": "cpu", "min_bytes": 1024}


def test_activations_on_the_host_leave_those_of_two_blocks_on_the_device():
    plain, offloaded = step_bytes(), step_bytes(activation_offload="cpu")
    assert offloaded < plain * 2 / BLOCKS + step_bytes(activation_checkpointing="full") / 2


@pytest.mark.parametrize("more", [{}, {"activation_checkpointing": "full"}], ids=["alone", "what is recomputed"])
def test_offloaded_activations_give_the_same_bits(more):
    model = initial()
    expected = by_hand(model, steps=8)
    trainer, losses = fitted(activation_offload=EVERYTHING, steps=8, **more)
    assert losses == expected
    assert largest_difference(state(trainer), model.state_dict()) == 0.0
    offloader = trainer.plan.strategies["activation_offload"].offloader
    assert offloader.sent > 0
    assert offloader.fetched > 0


def test_a_graph_that_is_dropped_while_copies_are_under_way_harms_nothing():
    """Tensors that were fetched ahead of a backward pass that ends early; the memory is taken by others at once."""
    trainer = BySgd(**{**models.SETTINGS, "device": models.DEVICE}, activation_offload=EVERYTHING)
    batch = next(trainer.feed.training(trainer.task, trainer.plan))
    trainer.plan.started_with(trainer.model, [trainer.optimizer], 0)
    seen = []
    for _ in range(20):
        with trainer.plan.forward():
            loss = trainer.compute_loss(batch)
        torch.autograd.grad(loss, [trainer.model.head.weight])
        del loss
        taken = [torch.full((512, 4 * models.WIDTH), 7.0, device=models.DEVICE) for _ in range(4 * BLOCKS)]
        seen += [tensor.eq(7.0).all() for tensor in taken]
    assert torch.stack(seen).all()


def test_offloading_never_waits_for_the_device():
    settings = {**models.SETTINGS, "deterministic": False, "device": models.DEVICE, "steps": 9}
    assert step_without_waiting(Rows(**settings, activation_offload=EVERYTHING)).step == 3
