"""Which process writes a run folder, and whether it still lives."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def identity() -> dict[str, Any]:
    """This process as summary.json names it: host, pid, and the start time in clock ticks where Linux tells it."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "pid_started": _start_ticks(os.getpid())}


def has_died(who: Mapping[str, Any]) -> bool | None:
    """Whether the process named by `identity` is gone; `None` where another host ran it and nobody here can tell."""
    if who.get("host") != socket.gethostname() or not isinstance(who.get("pid"), int):
        return None
    pid: int = who["pid"]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # it lives, and is someone else's
    fields = _stat(pid)
    if fields is None:
        return False
    # A number is used again after a while or a reboot: the start time tells another process of the same number.
    started = who.get("pid_started")
    return fields[0] == "Z" or (started is not None and _start_ticks(pid) != started)


def _start_ticks(pid: int) -> int | None:
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


def _stat(pid: int) -> list[str] | None:
    # The name of the program, in brackets, may hold blanks: what counts comes after its last bracket.
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
