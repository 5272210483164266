"""Starting the command line as a user does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
DIGITS = "configs/resnet_digits.yaml"


def environment(**more: str) -> dict[str, str]:
    """One thread a process, and no launcher's variables."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "MASTER_"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        inherited.pop(name, None)
    return {**inherited, "OMP_NUM_THREADS": "1", **more}


def command(*words: str, ranks: int = 1) -> list[str]:
    """The command line of fasttrain, under torchrun for several ranks."""
    if ranks == 1:
        return [sys.executable, "-m", "fasttrain", *words]
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "-m", "fasttrain", *words]


def run(
    *words: str, ranks: int = 1, timeout: float = 200, cwd: Path = ROOT, **more: str
) -> subprocess.CompletedProcess:
    """Run to the end; output as text."""
    return subprocess.run(
        command(*words, ranks=ranks), cwd=cwd, env=environment(**more), capture_output=True, text=True, timeout=timeout
    )


def start(*words: str, ranks: int = 1, cwd: Path = ROOT, **more: str) -> subprocess.Popen:
    """Start in a session of its own; standard output and error in one pipe."""
    return subprocess.Popen(
        command(*words, ranks=ranks),
        cwd=cwd,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def last_step(run_dir: Path) -> int:
    """The newest step in a run's metrics."""
    try:
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        return max((json.loads(line)["step"] for line in lines), default=0)
    except (OSError, ValueError):
        return 0


def wait_for_step(process: subprocess.Popen, run_dir: Path, step: int, timeout: float = 120) -> None:
    """Wait until a run has logged a step."""
    deadline = time.monotonic() + timeout
    while last_step(run_dir) < step:
        if process.poll() is not None:
            raise AssertionError(f"ended early with {process.returncode}:\n{process.communicate()[0]}")
        if time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"step {step} was not reached:\n{process.communicate()[0]}")
        time.sleep(0.02)


def end(process: subprocess.Popen, number: int | None = None, timeout: float = 60) -> tuple[int, str]:
    """Send a signal to one process and wait for its end: exit code and output."""
    if number is not None:
        process.send_signal(number)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, output


def descendants(pid: int) -> list[int]:
    """Process ids of all descendants that live now."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, queue = [], [pid]
    while queue:
        queue.extend(new := children.get(queue.pop(), []))
        found.extend(new)
    return found


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def weights(run_dir: Path) -> dict:
    """All tensors of the newest checkpoint of a run."""
    import torch

    from fasttrain.checkpoint import load_tensors, newest, stored_tensors

    checkpoint = newest(run_dir)
    assert checkpoint is not None, f"no checkpoint in {run_dir}"
    tensors = {
        name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in stored_tensors(checkpoint.path).items()
    }
    load_tensors(checkpoint.path, tensors)
    return tensors
