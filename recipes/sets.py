"""Real data sets: where they lie, and readers that give plain arrays and lists. `scripts/fetch_data` gets them.

docs/data_sets.md tells what each set is, what it is not, where it comes from and under which licence.
"""

from __future__ import annotations

import gzip
import os
import re
from pathlib import Path
from typing import Any

from fasttrain.errors import ConfigError, did_you_mean
from fasttrain.lazy import np

# Where each set lies in the data folder.
PATHS: dict[str, str] = {
    "fashion": "fashion-mnist",
    "mnist5k": "mnist_5k.csv.gz",
    "photos": "photos",
    "patches": "patches.npz",
    "emoji": "emoji.npz",
    "gcide": "gcide.dict.dz",
    "movie": "movie",
    "minilm": "minilm",
}
MOVIE = "movieReviewSnippets_GroundTruth.txt"
ROOT = Path(__file__).resolve().parent.parent

Labelled = tuple[Any, Any]  # images or sentences, and their labels


def data_folder() -> Path:
    """The folder of all sets: `$FASTTRAIN_DATA`, or `data/` of the repository."""
    given = os.environ.get("FASTTRAIN_DATA")
    return Path(given).expanduser() if given else ROOT / "data"


def path_of(name: str) -> Path:
    """Where a set lies.

    Raises:
        ConfigError: there is no such set, or it has not been fetched.
    """
    if name not in PATHS:
        raise ConfigError(f"there is no data set '{name}'; {did_you_mean(name, PATHS)}")
    path = data_folder() / PATHS[name]
    if not path.exists():
        raise ConfigError(
            f"the data set '{name}' is not at {path}; get it with scripts/fetch_data {name}, or say where the sets lie "
            "with the environment variable FASTTRAIN_DATA."
        )
    return path


def idx(path: Path) -> Any:
    """The array of an IDX file (LeCun's format for MNIST), gzipped or not: uint8, of any number of dims.

    Raises:
        ConfigError: it is no IDX file of bytes, or was cut off.
    """
    raw = path.read_bytes()
    raw = gzip.decompress(raw) if path.suffix == ".gz" else raw
    kind, dims = raw[:3], raw[3] if len(raw) > 3 else 0
    start = 4 + 4 * dims
    if kind != b"\x00\x00\x08" or len(raw) < start:
        raise ConfigError(f"{path} is no IDX file of bytes; fetch it anew.")
    shape = np.frombuffer(raw, ">u4", dims, offset=4).astype(int).tolist()
    if len(raw) - start != np.prod(shape):
        raise ConfigError(f"{path} says that it holds {shape}, and holds {len(raw) - start} bytes; fetch it anew.")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def fashion_mnist(train: bool, folder: Path | None = None) -> Labelled:
    """Fashion-MNIST (Xiao et al. 2017, arXiv:1708.07747): uint8 `[60000 or 10000, 28, 28]`, int64 labels of 10 classes.

    `folder`: where the four IDX files lie, if not where `scripts/fetch_data` puts them; torchvision's `FashionMNIST/raw`.

    Raises:
        ConfigError: a file is missing.
    """
    start = "train" if train else "t10k"
    folder = path_of("fashion") if folder is None else folder
    images, labels = (idx(_plain_or_gz(folder / f"{start}-{part}-ubyte")) for part in ("images-idx3", "labels-idx1"))
    return images, labels.astype(np.int64)


def _plain_or_gz(path: Path) -> Path:
    packed = path.with_name(path.name + ".gz")
    if not path.exists() and not packed.exists():
        raise ConfigError(
            f"neither {path} nor {packed.name} beside it is there; get them with scripts/fetch_data fashion, or by "
            "torchvision.datasets.FashionMNIST(root, download=True), which puts them in root/FashionMNIST/raw."
        )
    return path if path.exists() else packed


def mnist_5k() -> Labelled:
    """500 images of each MNIST digit, sorted by digit (shuffle before cutting): uint8 `[5000, 28, 28]`, int64 labels."""
    with gzip.open(path_of("mnist5k"), "rt") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.int16)
    return table[:, :-1].astype(np.uint8).reshape(-1, 28, 28), table[:, -1].astype(np.int64)


def patches(train: bool) -> Labelled:
    """Patches of 100 photos, labelled by the photo: uint8 `[50000 or 10000, 32, 32, 3]`, int64 labels."""
    return _arrays("patches", train)


def emoji(train: bool) -> Labelled:
    """Pictures of emoji, labelled by one of 9 groups; no emoji is in both parts: uint8 `[n, 32, 32, 3]`, int64 labels."""
    return _arrays("emoji", train)


def _arrays(name: str, train: bool) -> Labelled:
    part = "train" if train else "test"
    with np.load(path_of(name)) as file:
        return file[f"{part}_images"], file[f"{part}_labels"]


def gcide_entries() -> list[str]:
    """The entries of the GNU Collaborative International Dictionary of English, with its marks of origin taken out."""
    raw = gzip.decompress(path_of("gcide").read_bytes())  # dictzip is gzip, with a table of chunks in its header
    text = re.sub(r"\[[^\]]{0,40}\]", " ", raw.decode("utf-8", errors="replace"))
    return [entry for entry in text.split("\n\n") if len(entry) > 40]


def movie_sentences(least: float = 0.5) -> tuple[list[str], list[int]]:
    """Sentences of movie reviews that people rated, with 1 where they are positive and 0 where negative.

    Ratings go from -4 to 4 (Hutto and Gilbert 2014); those nearer to 0 than `least` are left out.
    """
    lines = (path_of("movie") / MOVIE).read_text(encoding="latin-1").splitlines()
    rows = [row for line in lines if len(row := line.split("\t", 2)) == 3]
    rated = [(sentence.strip(), float(score)) for _, score, sentence in rows]
    kept = [(sentence, int(score > 0)) for sentence, score in rated if abs(score) >= least]
    return [sentence for sentence, _ in kept], [label for _, label in kept]
