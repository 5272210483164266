"""activation_offload as a strategy: settings, microbatches, ranks of slots it stands between, evaluation."""

from __future__ import annotations

import pytest
import torch

from fasttrain import ConfigError, Data
from fasttrain.core.strategy import Context
from fasttrain.strategies.activation_offload import Cpu, CpuConfig
from tests.helpers import QUIET, largest_difference, points, state
from tests.ranks import run_ranks
from tests.stack import Restless, Stack, StackModel, gradients

EVERYTHING = {"name": "cpu", "min_bytes": 0, "in_flight": 3}
COMPANY = {
    "alone": {},
    "microbatches": {"accumulation": {"name": "microbatches", "num": 2}},
    "full": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": {"name": "selective", "keep": "matmuls"}},
    "fp16": {"precision": {"name": "fp16", "init_scale": 1024.0}},
    "bf16": {"precision": "bf16"},
}


@pytest.mark.parametrize("company", COMPANY)
def test_training_keeps_its_bits(company):
    results = []
    for offload in (None, EVERYTHING):
        trainer = Restless(batch_size=8, steps=5, activation_offload=offload, **COMPANY[company], **QUIET)
        trainer.fit()
        results.append(state(trainer))
    assert largest_difference(*results) == 0.0
    assert trainer.plan.strategies["activation_offload"].offloader.sent > 0


def test_small_tensors_stay_by_default():
    trainer = Stack(batch_size=8, steps=2, activation_offload="cpu", **QUIET)
    trainer.fit()
    assert trainer.plan.strategies["activation_offload"].offloader.sent == 0
    assert CpuConfig() == CpuConfig(min_bytes=2**20, in_flight=4, pin=True)


def test_an_evaluation_moves_nothing():
    class Evaluated(Stack):
        def build_data(self):
            return Data(train=points(), evaluation=points(16, seed=4))

    trainer = Evaluated(batch_size=8, steps=1, activation_offload=EVERYTHING, **QUIET)
    trainer.fit()
    before = trainer.plan.strategies["activation_offload"].offloader.sent
    trainer.evaluate()
    assert trainer.plan.strategies["activation_offload"].offloader.sent == before > 0


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"min_bytes": -1}, "activation_offload.min_bytes=-1 must be 0 or more; 0 moves every tensor."),
        ({"in_flight": 0}, "activation_offload.in_flight=0 must be 1 or more; usually 4."),
    ],
)
def test_wrong_settings_are_refused(wrong, told):
    with pytest.raises(ConfigError) as caught:
        CpuConfig(**wrong)
    assert str(caught.value) == told


def test_the_strategy_can_be_used_without_a_trainer():
    model, plain = StackModel(), StackModel()
    plain.load_state_dict(model.state_dict())
    strategy = Cpu(CpuConfig(min_bytes=0), Context(device=torch.device("cpu")))
    strategy.started(model, None, 0)
    with strategy.forward():
        loss = model(points()[0]).square().mean()
    loss.backward()
    plain(points()[0]).square().mean().backward()
    assert largest_difference(gradients(model), gradients(plain)) == 0.0


def on_two_ranks():
    results = []
    for offload in (None, EVERYTHING):
        trainer = Restless(
            batch_size=8, steps=4, activation_offload=offload, activation_checkpointing="selective", **QUIET
        )
        trainer.fit()
        results.append(state(trainer))
    return largest_difference(*results)


@pytest.mark.ranks
def test_training_on_ranks_keeps_its_bits():
    assert run_ranks(2, on_two_ranks) == [0.0, 0.0]
