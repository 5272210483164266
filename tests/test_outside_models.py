"""Models nobody here wrote train under the strategies as they train in plain, without their help."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from fasttrain.nn.blocks import find_blocks
from fasttrain.registry import BUILT_IN
from tests.helpers import largest_difference, state
from tests.outside import OUTSIDE, SAMPLES, train
from tests.ranks import run_ranks
from tests.stack import setting

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
every = pytest.mark.parametrize("name", OUTSIDE)
# Statistics over a batch of four are another function of the weights after any change, and a sampler of regions draws
# by rank and by call: what such models learn in plain differs as much between two seeds.
PER_SAMPLE = [name for name, model in OUTSIDE.items() if not model.statistics and name != "fasterrcnn"]


@pytest.fixture(scope="module")
def plain():
    """Weights and losses of each model after two plain steps."""
    known = {}

    def of(name):
        if name not in known:
            trainer, losses = train(name)
            known[name] = (state(trainer), losses)
        return known[name]

    return of


def worst(losses, others):
    """The largest relative difference of two loss curves."""
    assert len(losses) == len(others) == 2
    return max(abs(one - other) / abs(one) for one, other in zip(losses, others, strict=True))


@every
def test_a_model_learns_and_its_blocks_are_found(plain, name):
    _, losses = plain(name)
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[0] != losses[1]
    blocks = Counter(type(block).__name__ for block in find_blocks(train(name, steps=1)[0].model))
    assert blocks[OUTSIDE[name].block] >= 2


def bits(trainer, losses, weights, expected, name):
    assert losses == expected
    assert largest_difference(state(trainer), weights) == 0.0


def roundings(trainer, losses, weights, expected, name):
    # Fifty norms over a batch of four carry a rounding ten times further.
    bound = 1e-6 if name in PER_SAMPLE else 1e-4
    assert abs(losses[0] - expected[0]) < bound * abs(expected[0])
    assert list(state(trainer)) == list(weights)
    if name in PER_SAMPLE:
        assert worst(expected, losses) < 1e-5
        assert largest_difference(state(trainer), weights) < 1e-4


def adapted(trainer, losses, weights, expected, name):
    assert all(math.isfinite(loss) for loss in losses)
    assert set(weights) - set(state(trainer)) == set(), "names of weights changed"
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    assert 0 < trained < sum(p.numel() for p in trainer.model.parameters())


# What each strategy promises of any model, and of which models; those that the registry holds are tried.
PROMISES = {
    ("activation_checkpointing", "full"): (bits, list(OUTSIDE)),
    ("activation_checkpointing", "selective"): (bits, list(OUTSIDE)),
    # Compiled code rounds elsewhere than eager code, and takes long to make.
    ("activation_checkpointing", "budget"): (roundings, ["BERT", "GPT-2"]),
    ("weight_averaging", "ema"): (bits, list(OUTSIDE)),
    ("accumulation", "microbatches"): (roundings, PER_SAMPLE),
    ("memory_format", "channels_last"): (roundings, [name for name in OUTSIDE if OUTSIDE[name].convolutional]),
    ("adapters", "lora"): (adapted, ["vit_b_16", "timm vit_tiny", "BERT", "ViT", "T5", "Llama", "Whisper"]),
}
TRIED = [
    (*way, model) for way, (_, models) in PROMISES.items() if way[1] in BUILT_IN.get(way[0], {}) for model in models
]


@pytest.mark.parametrize(("slot", "strategy", "name"), TRIED)
def test_a_strategy_keeps_its_promise(plain, slot, strategy, name):
    keeps, _ = PROMISES[slot, strategy]
    keeps(*train(name, **setting(slot, strategy)), *plain(name), name)


# bfloat16 has 8 bits: 2^-8 = 0.4 %. The first loss is a forward of equal weights.
BF16 = {"timm efficientnet_b0": 0.15, "fasterrcnn": 0.05}


@every
def test_bf16_keeps_the_first_loss(plain, name):
    _, losses = train(name, precision="bf16")
    (first, _), expected = losses, plain(name)[1]
    assert all(math.isfinite(loss) for loss in losses)
    assert abs(first - expected[0]) < BF16.get(name, 0.01) * abs(expected[0])
    if name in PER_SAMPLE:
        assert worst(expected, losses) < 0.01


def on_two_ranks(names):
    torch.set_num_threads(1)
    found = {}
    for name in names:
        extra = {"batch_norm": "sync"} if OUTSIDE[name].statistics else {}
        trainer, losses = train(name, data_parallel="ddp", **extra)
        found[name] = (losses, {key: value.numpy() for key, value in state(trainer).items()})
    return found


@pytest.mark.ranks
def test_two_ranks_learn_what_one_process_learns(plain):
    """One launch for all models; the loss of a step is the mean over ranks."""
    names = [name for name in OUTSIDE if name != "fasterrcnn"]  # regions are drawn rank by rank
    first, second = run_ranks(2, on_two_ranks, names, timeout_s=280)
    assert len(first) == len(names) == 15
    for name in names:
        (losses, weights), (_, others) = first[name], second[name]
        expected_weights, expected = plain(name)
        assert all((weights[key] == others[key]).all() for key in weights), f"{name}: ranks differ"
        weights = {key: torch.from_numpy(value) for key, value in weights.items()}
        if OUTSIDE[name].statistics:
            assert abs(losses[0] - expected[0]) < 1e-4 * expected[0], name
        else:
            assert worst(expected, losses) < 1e-6, name
            assert largest_difference(weights, expected_weights) < 1e-5, name


def test_so_much_is_tried():
    assert len(OUTSIDE) == 16
    assert len(PER_SAMPLE) == 11
    assert len(TRIED) >= 16 + 11
    assert SAMPLES % 2 == 0, "two ranks get equal shares"
