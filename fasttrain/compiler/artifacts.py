"""What a process compiled as one file, for machines that share no disk (`torch.compiler.save_cache_artifacts`).

The file begins with a header: what it was made for (`cache_key`), how long it is, its checksum. They are compared before
anything else is read. On GPUs the file holds everything; on the CPU it spares tracing by autograd and the generation of
code, and the C++ compiler runs once more.

The file becomes entries of the cache, which are code: take it only from whom you would take a script.
Source: https://docs.pytorch.org/tutorials/recipes/torch_compile_caching_tutorial.html
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasttrain.compiler.cache import CacheError, cache_key, refuse_foreign
from fasttrain.lazy import torch

MAGIC = b"fasttrain compile artifacts 1\n"
LONGEST_HEADER = 4096


@dataclass(frozen=True, kw_only=True)
class Artifacts:
    """Graphs and kernels in a file, by torch's names of them; `size` in bytes."""

    path: Path
    size: int
    names: frozenset[tuple[str, str]]

    def __str__(self) -> str:
        return f"{self.path} ({len(self.names)} entries, {self.size / 1e6:.1f} MB)"


def save_artifacts(path: Path, device: torch.device, known: Artifacts | None = None) -> Artifacts | None:
    """Write what this process compiled, or took from its cache, to a file. One process of a run does so.

    `known`: what was loaded at the start; where nothing new was compiled since, nothing is written. Returns what was
    written. The file is written beside its place and renamed, so that nobody reads half of it.

    Raises:
        CacheError: it cannot be written.
    """
    saved = torch.compiler.save_cache_artifacts()
    if saved is None:
        return None
    payload, info = saved
    names = _names(info)
    if known is not None and names <= known.names:
        return None
    header = {"key": cache_key(device), "bytes": len(payload), "sha256": hashlib.sha256(payload).hexdigest()}
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # mode 0600
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(MAGIC + json.dumps(header).encode() + b"\n" + payload)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise CacheError(
            f"compile.artifacts={path} cannot be written ({error.strerror or error}); give another path."
        ) from error
    return Artifacts(path=path, size=len(payload), names=names)


def load_artifacts(path: Path, device: torch.device) -> Artifacts | None:
    """Put what a file holds into the compiler's cache of this process; `None`: there is no file.

    Raises:
        CacheError: it was made for something else, or is damaged, or others could have changed it. Nothing was taken.
    """
    path = Path(path)
    if not path.exists():
        return None
    refuse_foreign(path)
    payload = _checked(path, cache_key(device))
    info = torch.compiler.load_cache_artifacts(payload)
    if info is None:
        raise CacheError(f"{path}: torch {torch.__version__} cannot read what is in it; remove it.")
    return Artifacts(path=path, size=len(payload), names=_names(info))


def _checked(path: Path, key: str) -> bytes:
    damaged = f"{path} is damaged or was cut short, so nothing is taken from it; remove it, or copy it once more."
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise CacheError(f"{path} is no file of compile artifacts; remove it, or give another path.")
            try:
                header = json.loads(file.readline(LONGEST_HEADER))
                made_for, size, digest = header["key"], header["bytes"], header["sha256"]
            except (ValueError, KeyError, TypeError) as error:
                raise CacheError(damaged) from error
            if made_for != key:
                raise CacheError(
                    f"{path} was made for {made_for}, and this is {key}, so nothing is taken from it; remove it to have "
                    "it made anew, or give another path to each kind of machine."
                )
            payload = file.read()
    except OSError as error:
        raise CacheError(f"{path} cannot be read ({error.strerror or error}); give another path.") from error
    if len(payload) != size or hashlib.sha256(payload).hexdigest() != digest:
        raise CacheError(damaged)
    return payload


def _names(info: Any) -> frozenset[tuple[str, str]]:
    return frozenset((kind, name) for kind, names in info.artifacts.items() for name in names)
