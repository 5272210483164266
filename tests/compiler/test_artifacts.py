"""Compiled code as one file: taken where it fits, and refused before anything of it is read where it does not."""

import json
import subprocess
import sys

import pytest
import torch

from fasttrain.compiler import artifacts
from fasttrain.compiler.artifacts import MAGIC, load_artifacts, save_artifacts
from fasttrain.compiler.cache import CacheError
from tests.commands import ROOT

CPU = torch.device("cpu")


class Info:
    """What torch says is in its bytes."""

    def __init__(self, **artifacts):
        self.artifacts = artifacts


@pytest.fixture
def compiled(monkeypatch):
    """Stands for what torch compiled: bytes, and a list of what torch was given to read."""
    state = {"saved": (b"generated code", Info(inductor=["a"], aot_autograd=["b"])), "read": []}
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: state["saved"])

    def load(payload):
        state["read"].append(payload)
        return state["saved"][1]

    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", load)
    return state


def test_what_was_written_is_read_again(tmp_path, compiled):
    path = tmp_path / "new" / "graphs.bin"
    written = save_artifacts(path, CPU)
    assert written is not None
    assert str(written) == f"{path} (2 entries, 0.0 MB)"
    assert load_artifacts(path, CPU) == written
    assert compiled["read"] == [b"generated code"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["graphs.bin"]


def test_nothing_is_written_where_nothing_new_was_compiled(tmp_path, compiled):
    path = tmp_path / "graphs.bin"
    known = save_artifacts(path, CPU)
    path.unlink()
    assert save_artifacts(path, CPU, known) is None
    assert not path.exists()
    compiled["saved"] = (b"more", Info(inductor=["a", "c"]))
    assert save_artifacts(path, CPU, known) is not None
    compiled["saved"] = None  # no compiled code at all
    assert save_artifacts(path, CPU) is None


def test_without_a_file_there_is_nothing_to_load(tmp_path):
    assert load_artifacts(tmp_path / "none", CPU) is None


def damage(path, change):
    path.write_bytes(change(path.read_bytes()))


DAMAGES = {
    "of something else": (
        lambda data: data.replace(json.dumps(artifacts.cache_key(CPU)).encode(), b'"torch1"'),
        "made for torch1, and",
    ),
    "cut short": (lambda data: data[:-3], "damaged or was cut short"),
    "changed": (lambda data: data[:-1] + b"!", "damaged or was cut short"),
    "without a header": (lambda data: MAGIC + b"{}\n", "damaged or was cut short"),
    "no header": (lambda data: MAGIC + b"\x80\x04", "damaged or was cut short"),
    "another format": (lambda data: b"PK" + data, "no file of compile artifacts"),
    "empty": (lambda data: b"", "no file of compile artifacts"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_file_that_does_not_fit_is_refused_before_torch_sees_it(tmp_path, compiled, kind):
    change, message = DAMAGES[kind]
    path = tmp_path / "graphs.bin"
    save_artifacts(path, CPU)
    damage(path, change)
    with pytest.raises(CacheError, match=message):
        load_artifacts(path, CPU)
    assert compiled["read"] == []


def test_a_file_that_others_can_change_is_refused(tmp_path, compiled):
    path = tmp_path / "graphs.bin"
    save_artifacts(path, CPU)
    path.chmod(0o666)
    with pytest.raises(CacheError, match="chmod go-w"):
        load_artifacts(path, CPU)
    assert compiled["read"] == []


def test_a_path_that_cannot_be_written_is_told(tmp_path, compiled):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match=r"compile\.artifacts=.* cannot be written"):
        save_artifacts(tmp_path / "file" / "graphs.bin", CPU)


PROCESS = """
import sys, torch
from pathlib import Path
from torch._dynamo.utils import counters
from fasttrain.compiler.artifacts import load_artifacts, save_artifacts
from fasttrain.compiler.cache import use_cache
cpu = torch.device("cpu")
use_cache(Path(sys.argv[1]), cpu)
loaded = load_artifacts(Path(sys.argv[2]), cpu)
torch.compile(lambda x: (x * 2).relu().sum())(torch.randn(9, requires_grad=True)).backward()
written = save_artifacts(Path(sys.argv[2]), cpu, loaded)
print(loaded is not None, written is not None, counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.slow
def test_another_machine_takes_its_graphs_from_the_file(tmp_path):
    """Each process has a cache folder of its own, as hosts without a shared disk have."""
    told = []
    for host in ("a", "b"):
        command = [sys.executable, "-c", PROCESS, str(tmp_path / host), str(tmp_path / "graphs.bin")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        told.append(done.stdout.split()[-3:])
    assert told == [["False", "True", "0"], ["True", "False", "1"]]
