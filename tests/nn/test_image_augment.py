"""Images changed on their device: each sample's change follows from the seed and its place in the step."""

import itertools

import pytest
import torch

from fasttrain.nn.augment import Normalise, drawn, mirrored, moved, resized, shifted
from tests.test_device_step import META, Sides

IMAGES = torch.arange(7 * 3 * 6 * 6, dtype=torch.int64).remainder(251).to(torch.uint8).reshape(7, 3, 6, 6)

CHANGES = {
    "mirrored": mirrored,
    "shifted": lambda images, seed, offset: shifted(images, 2, seed, offset, fill=9),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("cuts", [(0, 7), (0, 3, 7), (0, 2, 4, 7), (0, 1, 1, 7)])
def test_a_step_is_changed_alike_however_it_is_spread_over_ranks(name, cuts):
    change = CHANGES[name]
    whole = change(IMAGES, 5, 0)
    parts = [change(IMAGES[a:b], 5, a) for a, b in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat(parts), whole)
    assert whole.dtype is torch.uint8
    assert not torch.equal(whole, IMAGES)
    assert not torch.equal(change(IMAGES, 6, 0), whole)


def test_half_of_the_images_are_mirrored_and_the_others_stay():
    images = IMAGES[:1].expand(400, -1, -1, -1)
    result = mirrored(images, 3)
    flips = [torch.equal(one, IMAGES[0].flip(-1)) for one in result]
    assert all(flip or torch.equal(one, IMAGES[0]) for flip, one in zip(flips, result, strict=True))
    assert 160 < sum(flips) < 240


def test_images_are_moved_by_all_distances_up_to_the_one_given():
    images = torch.zeros(600, 1, 7, 7)
    images[:, 0, 3, 3] = 1
    result = shifted(images, 2, 1, fill=0)
    places = {tuple(place.tolist()) for place in result.nonzero()[:, 2:]}
    assert places == {(row, column) for row in range(1, 6) for column in range(1, 6)}
    assert result.sum() == 600


def test_what_comes_in_is_filled():
    result = moved(torch.ones(1, 1, 3, 3), 1, torch.tensor([0]), torch.tensor([2]), fill=-1.0)
    assert result[0, 0].tolist() == [[-1, -1, -1], [1, 1, -1], [1, 1, -1]]


def test_resizing_keeps_the_type_and_the_picture():
    smooth = torch.linspace(0, 255, 64).expand(2, 3, 64, 64).to(torch.uint8)
    small = resized(smooth, 32)
    assert (small.shape, small.dtype) == ((2, 3, 32, 32), torch.uint8)
    pairs = smooth.float().reshape(2, 3, 32, 2, 32, 2).mean((3, 5))
    assert (small.float() - pairs)[..., 1:-1].abs().max() <= 1
    assert resized(smooth, 64) is smooth
    assert resized(smooth.double(), 32).dtype is torch.float32
    assert resized(torch.full((1, 1, 8, 8), 255, dtype=torch.uint8), 5).eq(255).all()


def test_bytes_are_normalised_as_torchvision_does_and_numbers_stay():
    from torchvision.transforms import v2

    mean, deviation = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    reference = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, deviation)])
    ours = Normalise(mean, deviation)(IMAGES)
    assert torch.allclose(ours, reference(IMAGES), atol=1e-6)
    assert Normalise(mean, deviation)(ours) is ours


def test_a_step_of_augmentation_waits_for_no_device():
    images = torch.zeros(8, 3, 16, 16, dtype=torch.uint8, device=META)
    normalise = Normalise((0.5,) * 3, (0.2,) * 3, device=META)
    with Sides() as seen:
        changed = normalise(resized(mirrored(shifted(images, 2, 1), 2), 8))
    assert seen.reads == []
    # What was drawn goes over: a number for each image, two for where it is moved.
    assert seen.mixed == ["_to_copy.default"] * 2
    assert changed.shape == (8, 3, 8, 8)


def test_draws_are_evenly_spread():
    numbers = drawn(1, 5000, 0, 5).flatten()
    assert torch.bincount(numbers, minlength=5).min() > 900
    assert drawn(1, 3, -2, 3, each=2).shape == (3, 2)
