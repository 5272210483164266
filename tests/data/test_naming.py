"""Samples are named in messages as their data set names them."""

import pickle
from pathlib import Path

import pytest
from torch.utils.data import ConcatDataset, Subset

from fasttrain.data.naming import described, listed, name_of
from fasttrain.errors import BrokenSample


class Photos:
    """As torchvision's folders keep their files."""

    def __init__(self, folder, n):
        self.samples = [(f"{folder}/{i}.jpg", 0) for i in range(n)]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return index


class Named(Photos):
    def name_of(self, index):
        return f"row {index} of table.parquet"


def test_a_data_set_names_its_samples_itself_or_by_their_paths_or_they_have_a_number():
    assert name_of(Named("a", 3), 2) == "row 2 of table.parquet"
    assert name_of(Photos("a", 3), 2) == "a/2.jpg"
    assert name_of([5, 6, 7], 2) == "sample 2"
    assert described(Photos("a", 3), 2) == "sample 2 (a/2.jpg)"
    assert described([5, 6, 7], 2) == "sample 2"
    photos = Photos("a", 2)
    photos.samples[1] = (Path("b/x.jpg"), 0)
    assert described(photos, 1) == "sample 1 (b/x.jpg)"


def test_the_name_is_found_within_subsets_and_concatenations():
    both = ConcatDataset([Photos("a", 3), Subset(Photos("b", 9), [8, 2])])
    assert [name_of(both, i) for i in (0, 2, 3, 4)] == ["a/0.jpg", "a/2.jpg", "b/8.jpg", "b/2.jpg"]


class Raises(Photos):
    def name_of(self, index):
        raise ValueError("planted")


@pytest.mark.parametrize(("source", "index"), [(Raises("a", 3), 1), (Photos("a", 3), 7)])
def test_a_data_set_that_cannot_say_a_name_does_not_hide_the_error_that_is_being_told(source, index):
    assert name_of(source, index) == f"sample {index}"


def test_the_samples_of_a_batch_are_named_a_few_of_them():
    assert listed(Photos("a", 9), [4, 2], most=2) == "sample 4 (a/4.jpg), sample 2 (a/2.jpg)"
    assert listed(Photos("a", 9), list(range(9)), most=1) == "sample 0 (a/0.jpg) and 8 more"


def test_a_broken_sample_comes_out_of_a_pickle_as_it_was():
    error = BrokenSample("photos/a/7.jpg", "it ends after 312 of 4,096 bytes")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.name, copy.reason, str(copy)) == (error.name, error.reason, str(error))
    assert str(error).startswith("photos/a/7.jpg could not be read: it ends after 312 of 4,096 bytes; ")
