"""Schedules of image sizes: functions of the place in the run."""

import pytest

from fasttrain import ConfigError
from fasttrain.data.sizes import Sizes


def test_images_grow_in_steps_of_a_multiple_and_are_whole_at_the_end():
    sizes = Sizes(smallest=96, grow_from=0.2, grow_until=0.6)
    seen = [sizes.at(224, step / 1000) for step in range(1000)]
    assert seen == sorted(seen)
    assert list(dict.fromkeys(seen)) == sizes.sides(224) == [96, 128, 160, 192, 224]
    assert set(seen[:300]) == {96}
    assert seen[600:] == [224] * 400


def test_a_full_side_that_is_no_multiple_comes_at_the_end():
    sizes = Sizes(smallest=16, multiple=8)
    assert sizes.sides(28) == [16, 24, 28]
    assert [sizes.at(28, progress) for progress in (0.0, 0.5, 0.7, 0.8, 1.0, 1.7)] == [16, 16, 24, 28, 28, 28]


def test_mixed_sizes_follow_from_the_place_alone():
    sizes = Sizes(smallest=128, mixed=True)
    seen = [sizes.at(224, 0.3, 0, 1, position) for position in range(400)]
    assert seen == [sizes.at(224, 0.5, 0, 1, position) for position in range(400)]
    assert seen != [sizes.at(224, 0.3, 1, 1, position) for position in range(400)]
    assert all(60 < seen.count(side) < 140 for side in (128, 160, 192, 224))
    assert {sizes.at(224, 0.9, 0, 1, position) for position in range(50)} == {224}


@pytest.mark.parametrize(
    "wrong", [{"smallest": 0}, {"multiple": 0}, {"grow_from": -0.1}, {"grow_from": 0.9}, {"grow_until": 1.1}]
)
def test_numbers_out_of_their_range_are_refused(wrong):
    with pytest.raises(ConfigError, match="sizes"):
        Sizes(**{"smallest": 128, **wrong})


def test_a_smallest_side_above_the_full_one_is_refused():
    with pytest.raises(ConfigError, match=r"smallest=256 is more than the images' side of 224"):
        Sizes(smallest=256).sides(224)
