"""Stopping on purpose: a signal or a time limit on any one rank ends all ranks after the same step.

No device is asked and no collective is sent. A rank that wants to stop writes a key into the launcher's store; a thread
of every rank looks for that key about once a second. Whoever sees it publishes, under a lock shared with the training
thread, the next step boundary at which its rank can stop. As threads publish even while the training thread waits in a
collective, every rank's answer arrives; all then stop at the largest boundary published, which none has passed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import Counter
from types import FrameType
from typing import Any

from fasttrain.errors import EXIT_FAILED, RunError
from fasttrain.lazy import dist

SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1")
LOOK_EVERY_S = 1.0
# Answers come from threads that no step holds up, within about a second.
ANSWER_S = 300.0
# Signals closer than this come from one key press or one scheduler.
AGAIN_S = 1.0


class Stopper:
    """Asks for a stop, and says after which step all ranks stop.

    `boundary(step)` is called by the training thread after each step; it returns the reason once this rank must stop.
    Ctrl-C once more, a second later or more, ends the process at once, whatever it does.
    """

    def __init__(
        self, rank: int, size: int, deadline_s: float | None = None, store: Any = None, answer_s: float = ANSWER_S
    ) -> None:
        self.rank, self.size, self.answer_s = rank, size, answer_s
        self.reason: str | None = None
        self._deadline = None if deadline_s is None else time.monotonic() + deadline_s
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._pending = False
        self._stop_at: int | None = None
        self._next_boundary = 0
        self._store = store
        self._thread: threading.Thread | None = None
        self._former: dict[int, Any] = {}
        self._signalled_at: float | None = None

    def start(self, step: int) -> None:
        """Begin to listen; `step` steps are done. Signal handlers only where this is the main thread."""
        self._next_boundary = step + 1
        if threading.current_thread() is threading.main_thread():
            for name in SIGNALS:
                number = getattr(signal, name, None)
                if number is not None:
                    self._former[number] = signal.signal(number, self._signalled)
        if self.size > 1:
            self._store = dist.PrefixStore(next_round("stop"), self._store or own_store())
            self._thread = threading.Thread(target=self._look, name="fasttrain-stop", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Stop listening; the former signal handlers are back."""
        self._ended.set()
        for number, handler in self._former.items():
            # None: a handler from outside of Python, which cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._former.clear()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def ask(self, reason: str) -> None:
        """Ask for a stop of all ranks after the current step."""
        self.reason = self.reason or reason

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        # Only a person who asks again means "at once". Schedulers signal every process, and launchers pass on what they
        # get; Slurm sends SIGUSR1 and then SIGTERM. Whoever sends these has SIGKILL, and the save may be half done.
        now = time.monotonic()
        if number == signal.SIGINT and self._signalled_at is not None and now - self._signalled_at >= AGAIN_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._signalled_at = self._signalled_at or now
        self.ask(signal.Signals(number).name)

    def _wants(self) -> bool:
        if self.reason is None and self._deadline is not None and time.monotonic() >= self._deadline:
            self.reason = "max_time"
        return self.reason is not None

    def boundary(self, step: int) -> str | None:
        """After step number `step`: the reason to stop now, or None."""
        if self.size == 1:
            return self.reason if self._wants() else None
        with self._lock:
            self._next_boundary = step + 1
            if not self._pending:
                return None
        if self._stop_at is None:
            self._stop_at = self._agreed()
        return (self.reason or "another rank") if step >= self._stop_at else None

    def _publish(self, boundary: int) -> None:
        self._store.set(f"rank/{self.rank}", str(boundary))

    def _agreed(self) -> int:
        keys = [f"rank/{rank}" for rank in range(self.size)]
        until = time.monotonic() + self.answer_s
        while not self._store.check(keys):
            if time.monotonic() > until:
                silent = ", ".join(f"rank {rank}" for rank, key in enumerate(keys) if not self._store.check([key]))
                raise RunError(
                    f"{silent} did not answer within {self.answer_s:.0f} s that all ranks stop ({self.reason}), so it is "
                    "gone or hangs; end all ranks and start again with resume=auto."
                )
            time.sleep(0.01)
        if self.reason is None:
            self.reason = self._store.get("reason").decode()
        return max(int(self._store.get(key)) for key in keys)

    def _look(self) -> None:
        try:
            while not self._ended.wait(LOOK_EVERY_S):
                if self._wants() and not self._store.check(["reason"]):
                    self._store.set("reason", self.reason or "asked")
                if self._store.check(["reason"]):
                    with self._lock:
                        self._pending = True
                        self._publish(self._next_boundary)
                    return
        except dist.DistError:
            # The store lives in the launcher: without it nobody would ever end this process.
            if not self._ended.is_set() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                sys.stderr.write(f"rank {self.rank}: the launcher is gone; this process ends.\n")
                os._exit(EXIT_FAILED)


def own_store() -> Any:
    """A connection of its own to the launcher's store, so that no waiting call of others stands in the way.

    Ranks that met in another way (`init_process_group` by a file or a store) have no address in the environment: they
    get a second connection to whatever they met in.
    """
    if "MASTER_ADDR" in os.environ:
        return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return dist.distributed_c10d._get_default_store().clone()


_rounds: Counter[str] = Counter()


def next_round(kind: str) -> str:
    """A name for what ranks do together in the store, the same on each that does so equally often.

    Several runs in one process group, and restarts by the launcher, must not see each other's keys.
    """
    _rounds[kind] += 1
    return f"{kind}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{_rounds[kind]}"
