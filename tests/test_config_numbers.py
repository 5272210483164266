"""Numbers that a strategy cannot work with are told when its config is made, with what to give in their place."""

from __future__ import annotations

import math

import pytest

from fasttrain.errors import ConfigError
from fasttrain.optim.groups import Group
from fasttrain.registry import find

WRONG = [
    ("optimizer", "lamb", {"lr": -1.0}, "optimizer.lr=-1.0 is out of its range; give 0 or more"),
    ("optimizer", "adamw", {"lr": math.nan}, "optimizer.lr=nan"),
    ("optimizer", "adamw_8bit", {"lr": -1.0}, "optimizer.lr=-1.0"),
    ("optimizer", "adamw", {"betas": (0.9, 1.0)}, "at least 0 and below 1"),
    ("optimizer", "adamw", {"eps": -1e-8}, "optimizer.eps"),
    ("optimizer", "sgd", {"weight_decay": -0.1}, "optimizer.weight_decay"),
    ("optimizer", "sgd", {"momentum": 1.5}, "optimizer.momentum"),
    ("optimizer", "sgd", {"momentum": 0.0, "nesterov": True}, "nesterov=true needs a momentum"),
    ("optimizer", "muon", {"momentum": 1.5}, "optimizer.momentum"),
    ("optimizer", "muon", {"ns_steps": 0}, "optimizer.ns_steps=0 .* give 1 or more"),
    ("optimizer", "adafactor", {"d": 0.0}, "optimizer.d=0.0 .* give 1 or more"),
    ("optimizer", "adafactor", {"beta2_decay": 1.0}, "optimizer.beta2_decay"),
    ("optimizer", "adafactor", {"eps": (None, -1.0)}, "optimizer.eps"),
    ("optimizer", "sgd", {"groups": (Group(match="a"), Group(match="b", lr=-1.0))}, r"optimizer.groups\[1\].lr=-1.0"),
    ("precision", "fp16", {"init_scale": 0.0}, "precision.init_scale=0.0 .* more than 0"),
    ("precision", "fp16", {"init_scale": -1.0}, "precision.init_scale"),
    ("precision", "fp16", {"growth_interval": 0}, "precision.growth_interval"),
    ("precision", "fp16", {"growth_factor": 0.5}, "precision.growth_factor"),
    ("precision", "fp16", {"backoff_factor": 2.0}, "precision.backoff_factor"),
    ("schedule", "cosine", {"final": -1.0}, "schedule.final=-1.0 is no factor of a rate"),
    ("schedule", "cosine", {"warmup": math.nan}, "schedule.warmup=nan"),
    ("schedule", "wsd", {"decay": -1.0}, "schedule.decay=-1.0"),
    ("schedule", "wsd", {"decay": 2.5}, "schedule.decay=2.5"),
    ("schedule", "one_cycle", {"start_divisor": 0.0}, "schedule.start_divisor=0.0 divides the rate"),
    ("schedule", "one_cycle", {"end_divisor": 0.0}, "schedule.end_divisor"),
    ("gradient_clipping", "norm", {"norm_type": 0.0}, "gradient_clipping.norm_type=0.0 is no norm"),
    ("weight_averaging", "ema", {"start": math.nan}, "weight_averaging.start=nan"),
]


@pytest.mark.parametrize(("slot", "name", "given", "message"), WRONG)
def test_a_number_out_of_its_range_is_refused_by_the_config(slot, name, given, message):
    with pytest.raises(ConfigError, match=message):
        find(slot, name).Config(**given)


def test_the_rate_of_muons_other_weights_is_looked_at_too():
    from fasttrain.strategies.optimizer import Rest

    with pytest.raises(ConfigError, match=r"optimizer\.adamw\.lr=-1\.0 is out of its range"):
        Rest(lr=-1.0)


@pytest.mark.parametrize("given", [{"lr": 0.0}, {"weight_decay": 0.0}, {"betas": (0.0, 0.0)}, {"eps": 0.0}])
def test_the_ends_of_the_ranges_are_taken(given):
    assert find("optimizer", "lamb").Config(**given)
