"""Mixup and CutMix against torchvision's where pairs agree, against the papers' formulas, and over many draws."""

import random
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms import v2

from fasttrain.errors import BatchError, ConfigError
from fasttrain.nn.mixing import Mixing, cutmix, draw_box, mixup, partners, soft_targets


def images(n=2, height=6, width=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, height, width, generator=g), torch.randint(5, (n,), generator=g)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.9, 1.0])
def test_mixup_of_a_pair_is_that_of_torchvision(share):
    x, labels = images()
    params = {"labels": labels, "batch_size": 2, "lam": share}
    theirs = v2.MixUp(num_classes=5)
    mixed, targets = mixup(x, labels, share, 5)
    assert torch.allclose(mixed, theirs.transform(x, params), rtol=0, atol=3e-7)
    assert torch.allclose(targets, theirs.transform(labels, params), rtol=0, atol=1e-7)


@pytest.mark.parametrize("box", [(0, 3, 2, 8), (1, 1, 0, 8), (0, 6, 0, 8)])
def test_cutmix_of_a_pair_is_that_of_torchvision_bit_for_bit(box):
    x, labels = images()
    top, bottom, left, right = box
    share = 1 - (bottom - top) * (right - left) / 48
    params = {"labels": labels, "batch_size": 2, "lam_adjusted": share, "box": (left, top, right, bottom)}
    theirs = v2.CutMix(num_classes=5)
    mixed, targets = cutmix(x, labels, box, 5)
    assert torch.equal(mixed, theirs.transform(x, params))
    assert torch.allclose(targets, theirs.transform(labels, params), rtol=0, atol=1e-7)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(0, 9), low=st.integers(0, 3), seed=st.integers(0, 999), both=st.booleans())
def test_a_share_of_the_batch_mixes_as_the_whole_does(n, low, seed, both):
    """What two ranks, or one, make of samples: equal bits wherever a share begins at an even place."""
    x, labels = images(10 + n)
    mixing = Mixing(classes=5, mixup=0.7, cutmix=1.0 if both else None)
    whole = mixing(x, labels, seed)
    even = slice(2 * low, 2 * low + 4)
    part = mixing(x[even], labels[even], seed)
    assert all(torch.equal(a[even], b) for a, b in zip(whole, part, strict=True))
    for targets in (whole[1], part[1]):
        assert torch.allclose(targets.sum(1), torch.ones(len(targets)))
        assert (targets >= 0).all()


def test_pairs_are_neighbours_and_none_is_left_out():
    for n in range(10):
        partner = partners(n)
        assert torch.equal(partner[partner], torch.arange(n))
        assert (partner != torch.arange(n)).sum() == n - n % 2


def test_an_odd_last_sample_stays_itself():
    x, labels = images(5)
    mixed, targets = mixup(x, labels, 0.25, 5)
    assert torch.allclose(mixed[4], x[4])
    assert targets[4].tolist() == [float(i == labels[4]) for i in range(5)]


def test_soft_labels_are_mixed_as_they_are():
    labels = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
    mixed = soft_targets(labels, partners(2), 0.75, 3)
    assert mixed.tolist() == [[0.375, 0.375, 0.25], [0.125, 0.125, 0.75]]


def test_what_is_given_stays():
    x, labels = images(4)
    before = x.clone(), labels.clone()
    for seed in range(20):
        Mixing(classes=5, mixup=0.2, cutmix=1.0, probability=0.5)(x, labels, seed)
    assert torch.equal(x, before[0])
    assert torch.equal(labels, before[1])


def test_neither_draw_touches_the_generators_of_the_run():
    x, labels = images(4)
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    Mixing(classes=5, mixup=0.2, cutmix=1.0)(x, labels, 3)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state


def own_shares(mixing, draws, n=2, side=64):
    """The share of the own class of the first sample, over many batches."""
    x, labels = torch.zeros(n, 1, side, side), torch.arange(n)
    return [mixing(x, labels, seed)[1][0, 0].item() for seed in range(draws)]


@pytest.mark.parametrize("alpha", [0.2, 1.0, 3.0])
def test_shares_are_beta_distributed(alpha):
    shares = own_shares(Mixing(classes=2, mixup=alpha), 2000, side=1)
    # Mean 1/2; variance 1 / (4 (2 alpha + 1)). Bounds: 4 standard errors of 2,000 draws.
    variance = 1 / (4 * (2 * alpha + 1))
    assert abs(statistics.fmean(shares) - 0.5) < 4 * (variance / 2000) ** 0.5
    assert statistics.pvariance(shares) == pytest.approx(variance, rel=0.13)


def test_boxes_take_the_area_they_should_where_they_fit():
    numbers = random.Random(0)
    for _ in range(500):
        share = numbers.random()
        top, bottom, left, right = draw_box(numbers, share, 200, 100)
        assert 0 <= top <= bottom <= 200
        assert 0 <= left <= right <= 100
        area = (bottom - top) * (right - left) / 20000
        assert area <= 1 - share + 1e-9
        if top > 0 and bottom < 200 and left > 0 and right < 100:
            assert area == pytest.approx(1 - share, abs=0.03)


def test_both_are_taken_equally_often_and_probability_leaves_batches_as_they_are():
    x, labels = torch.randn(2, 1, 16, 16), torch.arange(2)
    kinds = {"none": 0, "mixup": 0, "cutmix": 0}
    mixing = Mixing(classes=2, mixup=1.0, cutmix=1.0, probability=0.8)
    for seed in range(1000):
        mixed, targets = mixing(x, labels, seed)
        assert targets.shape == (2, 2)
        assert targets.dtype is torch.float32
        own, other = (mixed[0] == x[0]), (mixed[0] == x[1])
        if mixed is x:
            kinds["none"] += 1
            assert torch.equal(targets, torch.eye(2))
        else:
            kinds["cutmix" if (own | other).all() else "mixup"] += 1
    # Shares that round to 1 look like CutMix without a box; bounds: 4 standard deviations.
    assert abs(kinds["none"] - 200) < 51
    assert abs(kinds["mixup"] - 400) < 62
    assert abs(kinds["cutmix"] - 400) < 62


@pytest.mark.parametrize(
    ("given_", "words"),
    [
        ({}, "use mixup=0.2 or cutmix=1.0"),
        ({"mixup": 0.0}, "use a number above 0, or null"),
        ({"cutmix": -1.0}, "cutmix=-1.0"),
        ({"mixup": 1.0, "probability": 0.0}, "use 1.0 for every batch"),
    ],
)
def test_what_cannot_be_is_refused(given_, words):
    with pytest.raises(ConfigError) as error:
        Mixing(classes=5, **given_)
    assert words in str(error.value)


def test_images_of_whole_numbers_are_refused():
    with pytest.raises(BatchError, match="convert them to float32"):
        Mixing(classes=5, mixup=0.2)(torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), 0)
