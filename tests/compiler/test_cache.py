"""The compiler's cache on disk: where it lies, whose it is, and that a second process compiles nothing."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fasttrain import lazy
from fasttrain.compiler import cache
from fasttrain.compiler.cache import (
    CacheError,
    cache_key,
    drop_damaged,
    drop_unused,
    own_cache,
    refuse_foreign,
    use_cache,
)
from tests.commands import ROOT
from tests.compiler.warm_start import VARIANTS, cached
from tests.ranks import run_ranks

CPU = torch.device("cpu")
INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"


@pytest.fixture(autouse=True)
def torchs_own_place(monkeypatch):
    own_cache()
    for variable in (INDUCTOR, TRITON):
        monkeypatch.setenv(variable, "removed below, put back afterwards")
        monkeypatch.delenv(variable)
    yield
    own_cache()


def where_torch_looks():
    from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

    return Path(cache_dir()), Path(triton_cache_dir(0))


def test_torch_keeps_everything_in_a_folder_of_the_key(tmp_path):
    used = use_cache(tmp_path / "kept", CPU)
    assert used.path == tmp_path / "kept" / cache_key(CPU)
    assert (used.entries, used.of_user) == (0, False)
    assert where_torch_looks() == (used.path, used.path / "triton" / "0")
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "kept" / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55")


def test_the_former_place_is_put_back(tmp_path):
    before = where_torch_looks()[0]  # after which torch has written its own place into the environment
    use_cache(tmp_path / "a", CPU)
    second = use_cache(tmp_path / "b", CPU)
    assert where_torch_looks()[0] == second.path  # the last one that asked
    os.environ[TRITON] = str(second.path / "triton" / "0")  # as torch does at its first kernel
    own_cache()
    assert where_torch_looks()[0] == before
    assert TRITON not in os.environ
    own_cache()
    assert where_torch_looks()[0] == before


def test_a_place_that_torch_derived_for_triton_does_not_stay_behind(tmp_path, monkeypatch):
    before = where_torch_looks()[0]
    monkeypatch.setenv(TRITON, str(before / "triton" / "0"))
    used = use_cache(tmp_path, CPU)
    assert where_torch_looks()[1] == used.path / "triton" / "0"
    own_cache()
    assert os.environ[TRITON] == str(before / "triton" / "0")


def test_a_place_that_the_user_set_stays(tmp_path, monkeypatch):
    monkeypatch.setenv(INDUCTOR, str(tmp_path / "theirs"))
    monkeypatch.setenv(TRITON, str(tmp_path / "kernels"))
    used = use_cache(tmp_path / "ours", CPU)
    assert (used.path, used.of_user) == (tmp_path / "theirs", True)
    assert str(used).endswith("theirs (empty, from TORCHINDUCTOR_CACHE_DIR)")
    assert not (tmp_path / "ours").exists()
    own_cache()
    assert os.environ[INDUCTOR] == str(tmp_path / "theirs")
    monkeypatch.delenv(INDUCTOR)
    use_cache(tmp_path / "ours", CPU)
    assert where_torch_looks()[1] == tmp_path / "kernels"


def test_a_place_that_somebody_set_meanwhile_is_left_to_them(tmp_path, monkeypatch):
    use_cache(tmp_path, CPU)
    monkeypatch.setenv(INDUCTOR, str(tmp_path / "theirs"))
    own_cache()
    assert os.environ[INDUCTOR] == str(tmp_path / "theirs")


def test_a_process_that_a_run_began_has_its_own_cache(tmp_path, monkeypatch):
    """Not that of its parent, whose place it finds in the environment."""
    monkeypatch.setenv(INDUCTOR, str(tmp_path / "parent" / cache_key(CPU)))
    assert use_cache(tmp_path / "child", CPU).path.parent == tmp_path / "child"


# ---- the key


def test_the_key_names_what_code_depends_on(monkeypatch):
    key = cache_key(CPU)
    assert key == cache_key(CPU)
    assert key.startswith(
        f"torch{torch.__version__}-py{sys.version_info.major}.{sys.version_info.minor}-{sys.platform}-"
    )
    others = []
    for name, value in {"_instruction_sets": "sse avx", "_policies": "other"}.items():
        with monkeypatch.context() as patched:
            patched.setattr(cache, name, lambda value=value: value)
            others.append(cache_key(CPU))
    with monkeypatch.context() as patched:
        patched.setattr(lazy.torch, "__version__", "9.9")
        others.append(cache_key(CPU))
    others.append(cache_key(torch.device("mps")))
    assert len({key, *others}) == 5
    assert not any(c in key for c in "/\\ :")


def test_the_instruction_sets_are_those_of_this_machine():
    if not Path("/proc/cpuinfo").exists():
        pytest.skip("no Linux")
    told = cache._instruction_sets().split()
    assert len(told) > 3
    assert told == sorted(told)


def test_an_accelerator_is_named_with_its_capability(monkeypatch):
    class Properties:
        name, major, minor = "NVIDIA H200 (SXM)", 9, 0

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    assert "-NVIDIA_H200__SXM_.sm90-cuda13.0-" in cache_key(torch.device("cuda", 0))


# ---- whose it is


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path, mode):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(
        CacheError, match=r"others can write to .*open, and what .* is run as code; close it with `chmod go-w"
    ):
        use_cache(folder, CPU)
    assert INDUCTOR not in os.environ
    folder.chmod(0o755)
    assert use_cache(folder, CPU).path.parent == folder


def test_a_folder_of_another_user_is_refused_and_one_of_root_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    if tmp_path.stat().st_uid == 0:
        refuse_foreign(tmp_path)
        os.chown(tmp_path, 1234, -1)
        monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(CacheError, match=r"belongs to user \d+"):
        refuse_foreign(tmp_path)


def test_a_link_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CacheError, match=r"link is no folder, or a link to one; remove it"):
        use_cache(tmp_path / "link", CPU)


def test_a_place_that_cannot_be_written_to_is_told_with_what_to_do(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match=r"nothing can be written to .*; give another place with compile\.cache=PATH"):
        use_cache(tmp_path / "file" / "under", CPU)
    assert INDUCTOR not in os.environ


# ---- how long it is kept


def test_caches_of_other_machines_and_versions_go_when_unused_for_long(tmp_path):
    month = 30 * 86400
    for name, age in {"old": 2 * month, "recent": month / 2, "mine": 3 * month}.items():
        (tmp_path / name / "fxgraph").mkdir(parents=True)
        stamp = tmp_path / name / ".used"
        stamp.touch()
        os.utime(stamp, (time.time() - age,) * 2)
    (tmp_path / "no cache").mkdir()
    assert drop_unused(tmp_path, keep="mine") == ["old"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "no cache", "recent"]


@pytest.mark.skipif(sys.platform != "linux", reason="ELF files are what Linux has")
def test_compiled_code_that_was_cut_short_is_dropped_unless_somebody_compiles(tmp_path):
    import _ctypes

    from torch.utils._filelock import FileLock

    path = use_cache(tmp_path, CPU).path
    whole = Path(_ctypes.__file__).read_bytes()
    (path / "ab").mkdir()
    (path / "locks").mkdir()
    contents = {
        "whole.so": whole,
        "cut.so": whole[:-1],
        "short.o": whole[:50],
        "empty.so": b"",
        "zeros.so": bytes(9999),
    }
    for name, content in contents.items():
        (path / "ab" / name).write_bytes(content)
    with FileLock(path / "locks" / "a.lock"):
        assert drop_damaged(path) == []
    own_cache()
    use_cache(tmp_path, CPU)  # the next run
    assert [file.name for file in (path / "ab").iterdir()] == ["whole.so"]


def test_using_a_cache_is_what_keeps_it(tmp_path):
    used = use_cache(tmp_path, CPU)
    os.utime(used.path / ".used", (0, 0))
    own_cache()
    use_cache(tmp_path, CPU)
    assert time.time() - (used.path / ".used").stat().st_mtime < 60


# ---- warm starts


def processes(folder, *names):
    command = [sys.executable, "-m", "tests.compiler.warm_start", str(folder), *names]
    environment = {k: v for k, v in os.environ.items() if k not in (INDUCTOR, TRITON)} | {"PYTHONPATH": str(ROOT)}
    for _ in range(2):
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        yield json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_second_process_takes_every_graph_from_the_cache(tmp_path):
    cold, warm = processes(tmp_path)
    assert list(cold) == list(VARIANTS)
    for name, first in cold.items():
        second = warm[name]
        assert first["hits"] + first["misses"] == first["graphs"] > 0, name
        assert (second["hits"], second["graphs"]) == (first["graphs"], first["graphs"]), name
        for kind in ("misses", "bypassed", "inductor_misses", "inductor_bypassed"):
            assert second[kind] == 0, (name, kind)
        assert second["weights"] == first["weights"], name
    made = sum(first["misses"] for first in cold.values())
    assert made >= len(VARIANTS)  # those of `optimizer` have the block of `plain`, and two more
    assert sum(1 for _ in tmp_path.glob(f"{cache_key(CPU)}/aotautograd/*")) == made


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_share_a_cache_and_their_second_start_compiles_nothing(tmp_path):
    cold = run_ranks(2, cached, str(tmp_path), {"data_parallel": "ddp"}, timeout_s=300.0)
    warm = run_ranks(2, cached, str(tmp_path), {"data_parallel": "ddp"}, timeout_s=300.0)
    for before, after in zip(cold, warm, strict=True):
        assert (after["hits"], after["misses"], after["bypassed"]) == (before["graphs"], 0, 0)
        assert after["weights"] == before["weights"]
    assert sum(1 for _ in tmp_path.glob(f"{cache_key(CPU)}/aotautograd/*")) == cold[0]["graphs"]
