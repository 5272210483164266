"""Whatever a data set raises reaches the user with the name of the sample, from this process or from a worker."""

import subprocess
import sys
import textwrap
import traceback

import pytest
import torch
from torch.utils.data import Dataset, Subset

from fasttrain import ConfigError, Data
from fasttrain.data.by_order import ByOrder
from fasttrain.data.order import Order
from fasttrain.data.reading import Position
from fasttrain.data.suspects import ranges
from fasttrain.errors import BatchError, BrokenSample
from tests.helpers import QUIET, Mlp, points

WORKERS = [0, 1]


class Odd(ValueError):
    """An error that cannot be made from its text."""

    def __init__(self, code, text):
        super().__init__(f"{code}: {text}")


class Photos(Dataset):
    """24 points with paths; the sample of one number does what `fault` does."""

    def __init__(self, fault=None, at=17, n=24):
        self.x, self.y = points(n)
        self.samples = [(f"photos/{i}.jpg", 0) for i in range(n)]
        self.fault, self.at = fault, at

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        if index == self.at and self.fault is not None:
            return self.fault()
        return self.x[index], self.y[index]


def truncated():
    raise ValueError("it ends after 312 bytes")


def of_another_shape():
    return torch.zeros(3), torch.tensor(0)


def with_what_cannot_travel():
    return lambda: 3, torch.tensor(0)


def kept_together(samples):
    return samples


def odd():
    raise Odd(7, "planted")


def broken():
    raise BrokenSample("shard 3, entry 9", "no such key: jpg")


def wrongly_set():
    raise ConfigError("data.vocabulary=3 leaves no room; use 256 or more.")


def read_all(train, workers, **more):
    data = Data(train=train, num_workers=workers, shuffle=False, **more)
    reader = ByOrder(data, train, Order(size=len(train), batch_size=8, shuffle=False), 0, 1)
    for number, _ in enumerate(reader.portions(Position())):
        assert number < 3


def error_of(train, workers, kind=BrokenSample, **more):
    with pytest.raises(kind) as told:
        read_all(train, workers, **more)
    return told.value


@pytest.mark.parametrize("workers", WORKERS)
def test_the_sample_its_number_and_the_error_with_its_traceback_are_told(workers):
    error = error_of(Photos(truncated), workers)
    assert str(error) == (
        "sample 17 (photos/17.jpg) of the training data could not be read: ValueError: it ends after 312 bytes; "
        "mend it, or leave it out of the data."
    )
    assert type(error.__cause__) is ValueError
    assert 'raise ValueError("it ends after 312 bytes")' in "".join(traceback.format_exception(error))


@pytest.mark.parametrize("workers", WORKERS)
def test_an_error_that_cannot_be_sent_from_a_worker_is_told_by_its_kind_and_text(workers):
    error = error_of(Photos(odd), workers)
    assert error.reason == "Odd: 7: planted"
    assert 'raise Odd(7, "planted")' in "".join(traceback.format_exception(error))


@pytest.mark.parametrize("workers", WORKERS)
def test_what_a_data_set_itself_says_of_a_broken_sample_is_the_reason(workers):
    error = error_of(Photos(broken), workers)
    assert (error.name, error.reason) == ("sample 17 (photos/17.jpg) of the training data", "no such key: jpg")


@pytest.mark.parametrize("workers", WORKERS)
def test_a_wrong_request_that_a_data_set_finds_stays_one(workers):
    error = error_of(Photos(wrongly_set), workers, ConfigError)
    assert str(error).startswith("data.vocabulary=3")
    told = "".join(traceback.format_exception(error))
    assert "Raised by sample 17 (photos/17.jpg) of the training data." in told


@pytest.mark.parametrize("workers", WORKERS)
def test_samples_that_do_not_go_together_are_named(workers):
    error = error_of(Photos(of_another_shape), workers, BatchError)
    assert str(error).startswith("sample 16 (photos/16.jpg), sample 17 (photos/17.jpg), sample 18 ")
    assert (
        "and 4 more of the training data cannot be put together: of shapes, sample 16 (photos/16.jpg) has (8,), () and "
        "sample 17 (photos/17.jpg) has (3,), ();"
    ) in str(error)


def test_a_sample_that_cannot_be_sent_to_the_trainer_is_an_error_and_no_wait_without_end():
    error = error_of(Photos(with_what_cannot_travel), 1, Exception, collate=kept_together)
    told = "".join(traceback.format_exception(error))
    assert "pickle" in told
    assert "A batch of the training data could not be handed over by its worker." in told


@pytest.mark.parametrize("workers", WORKERS)
def test_a_transform_that_raises_names_the_samples_of_its_batch(workers):
    def transform(batch):
        if (batch[0] == points(24)[0][9]).all(1).any():
            raise ZeroDivisionError("planted")
        return batch

    error = error_of(Photos(), workers, BatchError, transform=transform)
    assert "sample 8 (photos/8.jpg), sample 9 (photos/9.jpg)" in str(error)
    assert "ZeroDivisionError: planted" in str(error)


def test_the_samples_of_a_subset_are_named_by_the_data_set_below():
    error = error_of(Subset(Photos(truncated), range(10, 20)), 0)
    assert error.name == "sample 7 (photos/17.jpg) of the training data"


class Whole(Photos):
    """Gives the samples of a batch at once."""

    def __getitems__(self, indices):
        return [self[i] for i in indices]


def test_a_batch_that_is_fetched_whole_is_named_by_its_samples():
    error = error_of(Whole(truncated), 0)
    assert error.name.startswith("sample 16 (photos/16.jpg), sample 17 (photos/17.jpg)")
    assert "could not be read: ValueError: it ends after 312 bytes" in str(error)


class Trained(Mlp):
    """Classes of the points; the label of one sample is out of bounds."""

    workers, evaluates = 0, False

    def build_data(self):
        good, bad = Photos(), Photos()
        bad.y[17] = 10
        return Data(
            train=good if self.evaluates else bad,
            evaluation=bad if self.evaluates else None,
            shuffle=False,
            num_workers=self.workers,
        )


@pytest.mark.parametrize("evaluates", [False, True])
def test_an_error_of_a_step_names_the_samples_of_its_batch(evaluates):
    cls = type("Trained", (Trained,), {"evaluates": evaluates})
    with pytest.raises(IndexError, match="Target 10 is out of bounds") as told:
        cls(batch_size=8, epochs=1, **QUIET).fit()
    which = "evaluation" if evaluates else "training"
    assert told.value.__notes__ == [
        f"Label 10 is that of sample 17 (photos/17.jpg) of the {which} data; mend it, or give more classes.",
        "The batch of this step: sample 16 (photos/16.jpg), sample 17 (photos/17.jpg), sample 18 (photos/18.jpg), "
        f"sample 19 (photos/19.jpg) and 4 more of the {which} data.",
    ]


def test_a_bad_label_in_a_batch_of_a_loader_is_told_by_its_row():
    x, y = points(24)
    y[9] = 10
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
    cls = type("Loaded", (Mlp,), {"build_data": lambda self: Data(train=loader)})
    with pytest.raises(IndexError) as told:
        cls(batch_size=8, epochs=1, **QUIET).fit()
    assert told.value.__notes__[0].startswith("Label 10 is that of sample 1 of batch 1 of epoch 0 of the training data")


def test_what_a_device_refused_without_a_name_is_told_by_the_range_of_the_whole_numbers():
    batch = {"x": torch.rand(3, 2), "label": torch.tensor([0, 12, 4]), "tokens": torch.tensor([[5, 6]])}
    assert ranges(RuntimeError("CUDA error: device-side assert triggered"), batch) == "0 to 12, 5 to 6"
    assert ranges(RuntimeError("out of memory"), batch) is None


def test_the_thousandth_sample_of_an_evaluation_is_told_as_one_of_the_evaluation():
    class Evaluated(Mlp):
        def build_data(self):
            return Data(train=points(24), evaluation=Photos(truncated, at=1000, n=1001), num_workers=1)

    with pytest.raises(BrokenSample, match=r"^sample 1000 \(photos/1000.jpg\) of the evaluation data could not"):
        Evaluated(batch_size=8, epochs=1, **QUIET).fit()


def test_the_command_line_prints_the_traceback_of_the_users_code_and_one_clear_line(tmp_path):
    (tmp_path / "planted.py").write_text(
        textwrap.dedent(
            """
            from fasttrain import Data
            from tests.data.test_broken_samples import Photos, truncated
            from tests.helpers import Mlp


            class Planted(Mlp):
                def build_data(self):
                    return Data(train=Photos(truncated), num_workers=1)
            """
        )
    )
    (tmp_path / "planted.yaml").write_text("trainer: planted:Planted\nbatch_size: 8\nsteps: 9\nrun: {dir: null}\n")
    command = [sys.executable, "-m", "fasttrain", "--config", str(tmp_path / "planted.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert 'raise ValueError("it ends after 312 bytes")' in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("BrokenSample: sample 17 (photos/17.jpg)")]
    assert len(lines) == 1, done.stderr
