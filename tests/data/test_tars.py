"""WebDataset tars, by number and as shards."""

import gzip
import io
import itertools
import json
import tarfile

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image

from fasttrain import ConfigError, Data, RunError
from fasttrain.data import TarSamples, tar_shards
from fasttrain.errors import BrokenSample
from tests.helpers import QUIET, Weight

# webdataset leaves the file of a tar to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


def image(number):
    held = io.BytesIO()
    Image.fromarray(np.full((4, 4, 3), number, dtype=np.uint8)).save(held, "png")
    return held.getvalue()


@pytest.fixture
def tars(tmp_path, monkeypatch):
    """Two tars of three and of two pictures, written by webdataset."""
    monkeypatch.setenv("FASTTRAIN_CACHE", str(tmp_path / "cache"))
    paths = [tmp_path / "a.tar", tmp_path / "b.tar"]
    for path, numbers in zip(paths, ((0, 1, 2), (3, 4)), strict=True):
        with webdataset.TarWriter(str(path)) as tar:
            for number in numbers:
                tar.write({"__key__": f"photos/p{number}", "png": image(number), "cls": number})
    return paths


def as_webdataset(paths):
    return list(webdataset.WebDataset([str(path) for path in paths], shardshuffle=False, empty_check=False))


def test_samples_by_number_are_those_that_webdataset_reads(tars):
    samples, expected = TarSamples(tars), as_webdataset(tars)
    assert len(samples) == len(expected) == 5
    for number in (4, 0, 3, 1, 2):
        held = samples[number]
        assert held == {key: expected[number][key] for key in ("__key__", "png", "cls")}
    assert samples.name_of(3) == f"{tars[1]}: photos/p3"


def test_the_index_is_kept_until_the_tar_changes(tars, tmp_path, monkeypatch):
    TarSamples(tars)
    kept = list((tmp_path / "cache" / "tars").iterdir())
    assert len(kept) == 2
    with monkeypatch.context() as context:
        context.setattr(tarfile, "open", None)
        assert len(TarSamples(tars)) == 5
    with webdataset.TarWriter(str(tars[1])) as tar:
        tar.write({"__key__": "another", "cls": 9})
    samples = TarSamples(tars)
    assert [samples[number]["__key__"] for number in range(len(samples))][3:] == ["another"]
    assert len(TarSamples(tars, index=None)) == 4


def test_webdatasets_own_decoder_makes_pictures(tars):
    decoded = TarSamples(tars, decode="rgb8")[4]
    assert decoded["png"].shape == (4, 4, 3)
    assert decoded["png"].max() == decoded["cls"] == 4
    assert json.dumps(decoded["__key__"]) == '"photos/p4"'


def test_a_damaged_member_is_named(tars):
    with webdataset.TarWriter(str(tars[0])) as tar:
        tar.write({"__key__": "good", "png": image(1)})
        tar.write({"__key__": "bad", "png": b"no picture"})
    samples = TarSamples(tars, decode="rgb8")
    assert samples[0]["__key__"] == "good"
    with pytest.raises(BrokenSample, match=r"a\.tar: bad could not be read"):
        samples[1]


def test_what_cannot_be_indexed_says_what_to_do(tars, tmp_path):
    with tarfile.open(tmp_path / "c.tar.gz", "w:gz"):
        pass
    with pytest.raises(ConfigError, match=r"c\.tar\.gz cannot be indexed .*tar_shards"):
        TarSamples([tmp_path / "c.tar.gz"])
    with pytest.raises(ConfigError, match="is no file"):
        TarSamples([tmp_path / "none.tar"])


def pixel(sample):
    """The number that a picture shows."""
    return torch.from_numpy(np.asarray(Image.open(io.BytesIO(sample["png"]))).copy())[0, 0, 0].float()


@pytest.mark.parametrize("kind", ["file", "pipe", "gz"])
def test_shards_of_tars_give_each_sample_once_through_a_trainer(tars, tmp_path, kind):
    urls = [str(path) for path in tars]
    if kind == "pipe":
        urls = [f"pipe:cat {path}" for path in tars]
    if kind == "gz":
        urls = []
        for path in tars:
            urls.append(str(path) + ".gz")
            (tmp_path / urls[-1]).write_bytes(gzip.compress(path.read_bytes()))

    class Tars(Weight):
        def build_data(self):
            return Data(train=tar_shards(urls, pixel), num_workers=2 if kind == "file" else 0)

    trainer = Tars(batch_size=2, epochs=2, **QUIET)
    found = [batch.tolist() for batch in trainer.feed.training(trainer.task, trainer.plan)]
    assert [len(batch) for batch in found] == [2, 2, 1] * 2
    assert sorted(itertools.chain(*found[:3])) == sorted(itertools.chain(*found[3:])) == [0, 1, 2, 3, 4]


def test_a_damaged_sample_of_a_stream_is_named(tars):
    with webdataset.TarWriter(str(tars[0])) as tar:
        tar.write({"__key__": "bad", "png": b"no picture"})

    class Tars(Weight):
        def build_data(self):
            return Data(train=tar_shards(tars[:1], "rgb8"))

    trainer = Tars(batch_size=2, epochs=1, **QUIET)
    with pytest.raises(RunError, match=r"a\.tar, sample 0 \(bad\): decoding failed"):
        next(trainer.feed.training(trainer.task, trainer.plan))
