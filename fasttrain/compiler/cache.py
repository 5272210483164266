"""Where torch's compiler keeps what it made, so that the next process takes it from there.

torch has three caches on disk, and this module only says in which folder they lie:

- AOTAutograd's (`aotautograd/`): forward and backward of a traced graph. Its key: the graph as dynamo traced it, what is
  known of the inputs (shapes, strides, dtypes, devices, which of them are symbols), the autocast state, whether gradients
  are on, the hash of each checkpoint's context (`cache_hash`; a context without one is not cached), and all that follows.
- inductor's (`fxgraph/`): the code of one graph. Its key: the graph's operations, inductor's settings, a hash of torch's
  own source files, for GPUs their name, the versions of CUDA (or HIP) and Triton, determinism, default dtype, threads.
- the compiled code itself: shared objects of the C++ compiler by their source and command line, and Triton's.

So fasttrain's code is in these keys where it changes the graph. `cache_key` adds what they lack. C++ is compiled with
`-march=native`, and a folder that two kinds of machine share would hand one of them instructions it has not: so the CPU's
instruction sets, with the system and Python's version (entries are pickles). Of a checkpoint's policy torch sees the name
alone: so a hash of the code that decides what is kept. Tracing itself (dynamo) is cached by nobody: it is what a warm start
still takes.
torch's precompiled C++ headers (150 MB each) stay in its own folder under /tmp: a machine that has none makes them once.

Shapes that were seen to change are not remembered (torch's `job_id`): a resumed run would take other graphs than one that
was not stopped, and round differently.

Entries are pickles and shared objects: whoever can write to the folder can run code as whoever trains. So only folders are
taken that belong to the user (or to root) and that nobody else can write to.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import stat
import struct
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from fasttrain import nn
from fasttrain.lazy import torch

INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
# What torch knows by its `cache_hash` only: code that chooses what a compiled graph keeps for backward.
POLICIES = ("selective.py", "budget.py")
# Changed at each use of a folder; what was not used for this long is dropped.
USED, KEPT_DAYS = ".used", 30
# https://bford.info/cachedir: programs that back up files leave such a folder out.
TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# Code that torch.compile generated. Can be deleted at any time.\n"


class CacheError(Exception):
    """A folder cannot be the compiler's cache. A run goes on without; the message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class Cache:
    """Where the compiler keeps what it makes. `entries`: graphs that were there at the start; `of_user`: set outside."""

    path: Path
    entries: int
    of_user: bool = False

    def __str__(self) -> str:
        found = f"{self.entries} graphs" if self.entries else "empty"
        return f"{self.path} ({found}{f', from {INDUCTOR}' if self.of_user else ''})"


def cache_key(device: torch.device) -> str:
    """What compiled code depends on outside of the graph, as the name of a folder.

    Versions of torch and Python, system, kind of device (an accelerator's name and capability), the instruction sets of
    the CPU; and the code of checkpointing policies.
    """
    return "-".join(
        [
            f"torch{torch.__version__}",
            f"py{sys.version_info.major}.{sys.version_info.minor}",
            sys.platform,
            platform.machine() or "cpu",
            _cpu(),
            *_accelerator(device),
            _policies(),
        ]
    )


def _cpu() -> str:
    told = torch.backends.cpu.get_cpu_capability()  # what torch's own kernels use: AVX512, AVX2, DEFAULT ...
    return f"{told.lower().replace(' ', '')}.{_digest(_instruction_sets())}"


def _instruction_sets() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # no Linux
        return platform.processor()
    flags = next((line for line in lines if line.lower().startswith(("flags", "features", "isa"))), "")
    return " ".join(sorted(flags.partition(":")[2].split())) or platform.processor()


def _accelerator(device: torch.device) -> list[str]:
    if device.type == "cuda":
        of = torch.cuda.get_device_properties(device)
        name = "".join(c if c.isalnum() else "_" for c in of.name)
        version = f"hip{torch.version.hip}" if torch.version.hip else f"cuda{torch.version.cuda}"
        return [f"{name}.sm{of.major}{of.minor}", version]
    return [] if device.type == "cpu" else [device.type]


@functools.cache
def _policies() -> str:
    folder = Path(nn.__file__).parent
    return _digest("".join((folder / name).read_text() for name in POLICIES))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


# ---- the place of this process

# The two variables as they were before `use_cache`. None: there is nothing to take back.
_found: tuple[str | None, str | None] | None = None
_ours: Path | None = None


def use_cache(folder: Path, device: torch.device) -> Cache:
    """Let torch keep what it compiles in `folder/<key>/`, from now on, in this process and in those it starts.

    A place that the user set (`TORCHINDUCTOR_CACHE_DIR`) stays. Of several calls the last counts; `own_cache` takes it
    back. What was compiled before stays usable.

    Raises:
        CacheError: the folder cannot be made or written to, or others could plant code in it; torch's place stays.
    """
    global _found, _ours
    own_cache()
    key = cache_key(device)
    given = os.environ.get(INDUCTOR)
    if (
        given is not None and given != _torchs_own() and Path(given).name != key
    ):  # that: from the process that began this
        return Cache(path=Path(given), entries=_entries(Path(given)), of_user=True)
    path = _prepared(Path(folder).absolute(), key)
    drop_unused(path.parent, keep=key)
    drop_damaged(path)
    _found = (given, os.environ.get(TRITON))
    _ours = path
    if _follows(given):
        os.environ.pop(TRITON)
    os.environ[INDUCTOR] = str(path)
    _forget_files()
    return Cache(path=path, entries=_entries(path))


def own_cache() -> None:
    """Take back what `use_cache` set: torch keeps its caches where it did before."""
    global _found, _ours
    if _found is None:
        return
    inductor, triton = _found
    moved = os.environ.get(INDUCTOR) == str(_ours)  # else someone else moved it meanwhile, and that is theirs
    if moved and (TRITON not in os.environ or _follows(str(_ours))):
        _restore(TRITON, triton)
    if moved:
        _restore(INDUCTOR, inductor)
        _forget_files()
    _found = _ours = None


def _restore(variable: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(variable, None)
    else:
        os.environ[variable] = value


def _follows(inductor: str | None) -> bool:
    """Whether Triton's place was derived by torch from inductor's, at its first kernel, and not set by the user."""
    triton = os.environ.get(TRITON)
    return triton is not None and inductor is not None and Path(triton).parent == Path(inductor) / "triton"


def _torchs_own() -> str:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return os.path.abspath(default_cache_dir())


def _forget_files() -> None:
    """Forget which files this process wrote or read already: they lie at the former place."""
    if "torch._inductor.codecache" in sys.modules:
        from torch._inductor.utils import clear_caches

        clear_caches()


# ---- the folder


def _prepared(folder: Path, key: str) -> Path:
    path = folder / key
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for part in (folder, path):
            try:
                part.mkdir(mode=0o700)
            except FileExistsError:
                if not stat.S_ISDIR(part.lstat().st_mode):
                    raise CacheError(
                        f"{part} is no folder, or a link to one; remove it, or give another with compile.cache=PATH."
                    ) from None
                refuse_foreign(part)
        tag = folder / "CACHEDIR.TAG"
        if not tag.exists():
            tag.write_text(TAG)
        # Writing is the one proof that it can be done (read-only mounts, quotas); the file is the stamp of the last use.
        with tempfile.TemporaryFile(dir=path):
            (path / USED).touch()
    except OSError as error:
        raise CacheError(
            f"nothing can be written to {path} ({error.strerror or error}), so the next start will compile anew; give "
            "another place with compile.cache=PATH, or leave it to torch with compile.cache=null."
        ) from error
    return path


def refuse_foreign(path: Path) -> None:
    """Refuse a folder or file into which somebody else could put code. Owner and mode say nothing on Windows.

    Raises:
        CacheError: it is of another user than this one and root, or others may write to it.
    """
    if os.name != "posix":
        return
    status, instead = path.stat(), "give one of your own (compile.cache=PATH, compile.artifacts=PATH)."
    if status.st_uid not in (os.geteuid(), 0):
        raise CacheError(
            f"{path} belongs to user {status.st_uid}, and what a compiler's cache holds is run as code; {instead}"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CacheError(
            f"others can write to {path}, and what a compiler's cache holds is run as code; close it with "
            f"`chmod go-w {path}`, or {instead}"
        )


def drop_unused(folder: Path, keep: str, days: float = KEPT_DAYS) -> list[str]:
    """Remove the caches of other keys that no run used for so many days; returns their names.

    What stays grows with the models that were compiled: some MB each. Deleting the whole folder is always safe.
    """
    dropped, oldest = [], time.time() - days * 86400.0
    for used in folder.glob(f"*/{USED}"):
        path = used.parent
        try:
            if path.name == keep or path.is_symlink() or used.stat().st_mtime > oldest:
                continue
            going = folder / f".dropped-{os.getpid()}-{path.name}"
            path.rename(going)  # at once, so that of several ranks one alone removes it
        except OSError:  # another rank was first, or it may not be removed
            continue
        shutil.rmtree(going, ignore_errors=True)
        dropped.append(path.name)
    return dropped


def drop_damaged(path: Path) -> list[str]:
    """Remove compiled code of C++ that was cut short (a run that was killed meanwhile, a full disk); returns the names.

    torch takes any file of the right name, and every run after that would end in an ImportError. Nothing is removed while
    another process compiles into the folder. ELF alone, as on Linux.
    """
    damaged = [file for kind in ("so", "o") for file in path.glob(f"??/*.{kind}") if not _is_whole(file)]
    if not damaged or _is_compiling(path):
        return []
    for file in damaged:
        file.unlink(missing_ok=True)
    return [file.name for file in damaged]


def _is_whole(file: Path) -> bool:
    """Whether an ELF file of 64 bits reaches to the end of its table of sections, which is written last."""
    if sys.platform != "linux":
        return True
    try:
        with file.open("rb") as opened:
            head = opened.read(64)
        size = file.stat().st_size
    except OSError:  # gone meanwhile
        return True
    if len(head) < 64 or head[:4] != b"\x7fELF":
        return False
    if head[4] != 2:  # 32 bits
        return True
    (offset,) = struct.unpack_from("@Q", head, 40)
    entry, number = struct.unpack_from("@HH", head, 58)
    return offset > 0 and offset + entry * number <= size


def _is_compiling(path: Path) -> bool:
    """Whether a process holds one of the locks under which torch writes compiled code."""
    from torch.utils._filelock import FileLock

    for lock in path.glob("locks/*.lock"):
        try:
            with FileLock(lock, timeout=0):
                pass
        except TimeoutError:
            return True
    return False


def _entries(path: Path) -> int:
    """How many compiled graphs (forward with backward) a cache holds."""
    return sum(1 for _ in path.glob("aotautograd/*"))
