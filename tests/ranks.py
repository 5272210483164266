"""Run a function on several ranks: fresh processes that talk over gloo."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# A rank that failed breaks the connections of the others; this long they may still tell what they saw.
GRACE_S = 2.0


class RankError(RuntimeError):
    """A rank failed. `rank`: which one failed first; the message has its traceback."""

    def __init__(self, rank: int, message: str) -> None:
        self.rank = rank
        super().__init__(f"rank {rank} {message}")


def run_ranks(n: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """`[function(*args) on rank 0, on rank 1, ...]`, each rank a fresh process in one gloo group.

    `function` must be importable; it asks torch.distributed for its rank. Ranks meet through a file, so no
    port is used. All processes have ended when this returns or raises.

    Raises:
        RankError: a rank raised, died without a word, or was not done after `timeout_s`.
    """
    context = multiprocessing.get_context("spawn")
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the children while they import torch
    processes, pipes = [], []
    with tempfile.TemporaryDirectory(prefix="ranks") as folder:
        try:
            for rank in range(n):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank, args=(rank, n, folder, timeout_s, theirs, function, args), daemon=True
                )
                process.start()
                theirs.close()  # so that reading ours ends when the process does
                processes.append(process)
                pipes.append(ours)
            return _collect(pipes, timeout_s)
        finally:
            for process in processes:
                process.join(GRACE_S if process.exitcode is None else None)
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
                process.close()
            for pipe in pipes:
                pipe.close()
            if threads is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = threads


def _collect(pipes: list[Connection], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    ranks = {pipe: rank for rank, pipe in enumerate(pipes)}
    results: list[Any] = [None] * len(pipes)
    while ranks:
        ready = wait(list(ranks), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(min(ranks.values()), f"was not done after {timeout_s} s, nor were {sorted(ranks.values())}")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = ranks.pop(pipe)
            try:
                is_done, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise RankError(rank, "died without a word") from None
            if not is_done:
                raise RankError(rank, f"failed:\n{value}")
            results[rank] = value
    return results


def _rank(
    rank: int, n: int, folder: str, timeout_s: float, pipe: Connection, function: Callable[..., Any], args: Any
) -> None:
    import torch
    import torch.distributed as dist

    # A daemon may have no children, and loader workers are some; whoever started this rank ends it anyhow.
    multiprocessing.current_process()._config["daemon"] = False
    torch.set_num_threads(1)
    store = Path(folder, "store").as_uri()
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=n, timeout=datetime.timedelta(seconds=timeout_s)
    )
    try:
        pipe.send_bytes(pickle.dumps((True, function(*args))))
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
        # At once, without leaving the group: the others must not wait for this rank.
        os._exit(1)
    # Leave together, or a rank that is done early would look to the others as if it had died.
    dist.barrier()
    dist.destroy_process_group()
