"""WebDataset tars: samples are runs of members that share a key, `photo-1.jpg`, `photo-1.cls`.

Uncompressed tars on this machine are indexed once and read like any data set, each sample by its number (`TarSamples`).
Anything that the package `webdataset` opens (compressed tars, pipes, URLs) is read from the start to the end (`tar_shards`).
"""

from __future__ import annotations

import hashlib
import itertools
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fasttrain.data.packed import PackedStrings
from fasttrain.data.shards import Shards
from fasttrain.data.text import cache_folder
from fasttrain.data.whole import made_beside
from fasttrain.errors import BrokenSample, ConfigError
from fasttrain.lazy import np, require

# Part of the name of a kept index; another number makes all of them anew.
_LAYOUT = 1


class TarSamples:
    """Samples of local tars by their number: a dict of `__key__` and the bytes of each member by its extension.

    `decode`: a function of such a dict, or a word that webdataset's decoder knows (`pil`, `rgb8`, `torchrgb`, ...): then
    members are decoded by their extensions. The index (24 bytes a member) is made by reading the headers alone, and kept in
    the cache folder until the tar changes; `index=None` makes it in memory.

    Raises:
        ConfigError: there is no such tar, it is compressed or damaged, or holds no sample.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        decode: str | Callable[[dict[str, Any]], Any] | None = None,
        index: str | Path | None = "cache",
    ) -> None:
        self.paths = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
        self._decode = decoder(decode)
        folder = None if index is None else cache_folder() / "tars" if index == "cache" else Path(index)
        self._indices = [_index_of(path, folder) for path in self.paths]
        self._ends = np.cumsum([0, *(len(index["keys"]) for index in self._indices)])
        self._open: dict[int, int] = {}
        self._process = 0
        if not self._ends[-1]:
            raise ConfigError(
                f"there is no sample in {', '.join(map(str, self.paths)) or 'no tar'}; look at the paths."
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, number: int) -> Any:
        shard, place = self._place(range(len(self))[number])
        index = self._indices[shard]
        sample: dict[str, Any] = {"__key__": index["keys"][place]}
        for member in range(*index["members"][place : place + 2].tolist()):
            offset, size = index["spans"][member].tolist()
            sample[index["extensions"][index["extension"][member]]] = os.pread(self._file(shard), size, offset)
            if len(sample[index["extensions"][index["extension"][member]]]) != size:
                raise BrokenSample(self.name_of(number), "the tar ends within it")
        try:
            return sample if self._decode is None else self._decode(sample)
        except Exception as error:
            raise BrokenSample(self.name_of(number), f"{type(error).__name__}: {error}") from error

    def name_of(self, number: int) -> str:
        """Tar and key of a sample."""
        shard, place = self._place(number)
        return f"{self.paths[shard]}: {self._indices[shard]['keys'][place]}"

    def _place(self, number: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._ends, number, side="right")) - 1
        return shard, number - int(self._ends[shard])

    def _file(self, shard: int) -> int:
        if self._process != os.getpid():  # a worker opens the files itself
            self._open, self._process = {}, os.getpid()
        if shard not in self._open:
            self._open[shard] = os.open(self.paths[shard], os.O_RDONLY)
        return self._open[shard]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}, "_process": 0}

    def __del__(self) -> None:
        if getattr(self, "_process", 0) == os.getpid():
            for file in self._open.values():
                os.close(file)


def tar_shards(
    urls: Sequence[str | Path],
    decode: str | Callable[[dict[str, Any]], Any] | None = None,
    shuffle_buffer: int = 1000,
    length: int | None = None,
) -> Shards:
    """Tars read from start to end, each by one worker of one rank: what `webdataset` opens (`pipe:...`, URLs, `.tar.gz`).

    `decode` as for `TarSamples`. webdataset's own splitters of nodes and workers are not used: `Shards` deals the tars.

    Raises:
        MissingPackage: webdataset is not installed.
    """
    _webdataset()
    return Shards([str(url) for url in urls], _read_tar, decoder(decode), shuffle_buffer, length)


def _read_tar(url: str) -> Iterator[dict[str, Any]]:
    tariterators = _webdataset("webdataset.tariterators")
    opened = tariterators.url_opener([{"url": url}])
    return iter(tariterators.group_by_keys(tariterators.tar_file_expander(opened)))


def decoder(decode: str | Callable[[dict[str, Any]], Any] | None) -> Callable[[dict[str, Any]], Any] | None:
    """A function from members to a sample; a word stands for webdataset's decoder of images of that kind."""
    if not isinstance(decode, str):
        return decode
    autodecode = _webdataset("webdataset.autodecode")
    return autodecode.Decoder([autodecode.imagehandler(decode)])


def _webdataset(module: str = "webdataset") -> Any:
    return require(module, needed_by="reading tars as webdataset does", install="pip install 'fasttrain[webdataset]'")


def _index_of(path: Path, folder: Path | None) -> dict[str, Any]:
    """Keys, spans and extensions of the members of a tar; from the cache folder where it is kept."""
    if not path.is_file():
        raise ConfigError(f"{path} is no file; give the paths of tars.")
    if folder is None:
        return _packed(_made(path))
    stat = path.stat()
    name = f"{_LAYOUT}\n{path.resolve()}\n{stat.st_size}\n{stat.st_mtime_ns}"
    kept = folder / f"{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}.npz"
    if not kept.is_file():
        with made_beside(kept) as making:
            np.savez(making, **_made(path))
    with np.load(kept, allow_pickle=False) as arrays:
        return _packed({name: arrays[name] for name in arrays.files})


def _packed(arrays: dict[str, Any]) -> dict[str, Any]:
    keys = PackedStrings(arrays["keys"].tobytes().decode().split("\n")[:-1])
    extensions = arrays["extensions"].tobytes().decode().split("\n")[:-1]
    return {**arrays, "keys": keys, "extensions": extensions}


def _made(path: Path) -> dict[str, Any]:
    """Read the headers of a tar; arrays alone."""
    keys: list[str] = []
    members, spans, extension = [], [], []
    extensions: dict[str, int] = {}
    try:
        with tarfile.open(path, "r:") as tar:
            for key, group in itertools.groupby(_named(tar), key=lambda named: named[0]):
                keys.append(key)
                members.append(len(spans))
                for _, kind, member in group:
                    spans.append((member.offset_data, member.size))
                    extension.append(extensions.setdefault(kind, len(extensions)))
    except tarfile.TarError as error:
        raise ConfigError(
            f"{path} cannot be indexed ({error}); give an uncompressed tar, or read it with fasttrain.data.tar_shards."
        ) from error
    return {
        "keys": np.frombuffer("".join(f"{key}\n" for key in keys).encode(), dtype="uint8"),
        "extensions": np.frombuffer("".join(f"{kind}\n" for kind in extensions).encode(), dtype="uint8"),
        "members": np.array([*members, len(spans)], dtype="int64"),
        "spans": np.array(spans, dtype="int64").reshape(-1, 2),
        "extension": np.array(extension, dtype="int16"),
    }


def _named(tar: tarfile.TarFile) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    """Key, extension and header of each member that is a file of a sample, as webdataset names them."""
    for member in tar:
        folder, slash, name = member.name.rpartition("/")
        key, dot, kind = name.partition(".")
        if member.isfile() and dot and key and not name.startswith("__"):
            yield folder + slash + key, kind.lower(), member
