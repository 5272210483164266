"""Byte strings in memory that all processes of a host share: workers of a rank, and ranks.

The memory is a file without a name (memfd): it is gone with the last process that holds it, however that one ended, and it
is not bound by the size of /dev/shm. What is passed to another process is where to find it, never the bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fasttrain.errors import ConfigError, RunError
from fasttrain.lazy import np

if TYPE_CHECKING:
    from fasttrain.distributed.world import World

# Where the memory lies: the process that holds it, the number of the file there, and what tells the file from others.
Place = tuple[int, int, int]


class SharedBytes:
    """`count` byte strings, each kept once it was put, as long as all together stay within `max_bytes`.

    Any process may put and take; a process that is killed in the middle leaves its string out and nothing locked. Memory
    is taken as it is filled. 16 bytes a string go to the table of places.

    Raises:
        ConfigError: the table alone is larger than `max_bytes`, or the machine's memory is smaller.
    """

    def __init__(self, count: int, max_bytes: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise ConfigError("a cache shared by processes needs Linux; set cache=null.")
        self.count, self.max_bytes = count, max_bytes
        if max_bytes < self._table_bytes:
            raise ConfigError(
                f"a cache of {max_bytes:,} bytes does not hold the table of {count:,} places; use "
                f"{self._table_bytes:,} bytes and as much more as the data takes."
            )
        if max_bytes > (memory := host_memory()):
            raise ConfigError(
                f"a cache of up to {max_bytes / 1e9:.1f} GB was asked for, and this machine or container has "
                f"{memory / 1e9:.1f} GB of memory; give a bound that leaves room for the training."
            )
        self._fd = os.memfd_create("fasttrain-cache")
        os.ftruncate(self._fd, max_bytes)
        self._map()
        self._header[0] = self._table_bytes

    @property
    def _table_bytes(self) -> int:
        return 8 + 16 * self.count

    def _map(self) -> None:
        self._memory = mmap.mmap(self._fd, self.max_bytes)
        # The end of what is taken; then the beginning and the end of each string, 0 as long as it is not there.
        self._header = np.frombuffer(self._memory, np.int64, 1)
        self._places = np.frombuffer(self._memory, np.int64, 2 * self.count, offset=8).reshape(self.count, 2)
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self._thread_lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes taken so far, the table with them; never above `max_bytes`."""
        return int(self._header[0])

    def __len__(self) -> int:
        """How many strings are there."""
        return int(np.count_nonzero(self._places[:, 1]))

    def get(self, index: int) -> Any:
        """String number `index` as a uint8 array in the shared memory, or None if it is not there. Don't write to it."""
        first, end = self._places[index].tolist()
        return self._bytes[first:end] if end else None

    def put(self, index: int, data: Any) -> bool:
        """Keep a string (any bytes-like object); whether it is there now. One that does not fit is left out."""
        size = memoryview(data).nbytes
        # Looked at without the lock first: a full cache is asked for every sample of every epoch.
        if self._header[0] + size > self.max_bytes:
            return bool(self._places[index, 1])
        with self._lock():
            if self._places[index, 1]:
                return True
            first = int(self._header[0])
            if first + size > self.max_bytes:
                return False
            self._header[0] = first + size
        # Written as to a file: where memory is short that is an error here, and not the end of the process.
        try:
            os.pwrite(self._fd, data, first)
        except OSError:
            return False
        with self._lock():  # whoever sees the place sees the bytes
            self._places[index, 0] = first
            self._places[index, 1] = first + size
        return True

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        # The kernel takes a lock of a file from a process that dies.
        with self._thread_lock:
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)

    @property
    def place(self) -> Place:
        """Where another process of this host finds the memory, as long as this process lives."""
        return os.getpid(), self._fd, os.fstat(self._fd).st_ino

    @classmethod
    def at(cls, place: Place, count: int, max_bytes: int) -> SharedBytes:
        """The memory that another process of this host holds.

        Raises:
            RunError: the process is gone.
        """
        pid, number, inode = place
        self = cls.__new__(cls)
        self.count, self.max_bytes = count, max_bytes
        try:
            self._fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise RunError(f"the cache that process {pid} holds cannot be opened ({error.strerror}).") from error
        if os.fstat(self._fd).st_ino != inode:
            os.close(self._fd)
            raise RunError(f"the cache that process {pid} held is gone with it.")
        self._map()
        return self

    def __reduce__(self) -> Any:
        return SharedBytes.at, (self.place, self.count, self.max_bytes)

    def __del__(self) -> None:
        # The memory itself is freed with the last view of it.
        if (number := self.__dict__.get("_fd")) is not None:
            os.close(number)


def shared_on_host(count: int, max_bytes: int, world: World) -> SharedBytes:
    """One `SharedBytes` for all ranks of a host: the bound is that of the host. Called on every rank.

    Raises:
        ConfigError: on all ranks, where they want to keep other numbers of strings.
    """
    mine = _host()
    told = world.gather((mine, count, max_bytes))
    for rank, (_, *other) in enumerate(told):
        if other != [told[0][1], told[0][2]]:
            raise ConfigError(
                f"a cache for {told[0][1]} samples in {told[0][2]} bytes on rank 0, and for {other[0]} in {other[1]} on "
                f"rank {rank}: give all ranks the same data and settings."
            )
    owner = [host for host, *_ in told].index(mine)
    made = SharedBytes(count, max_bytes) if owner == world.rank else None
    places = world.gather(None if made is None else made.place)
    shared = SharedBytes.at(places[owner], count, max_bytes) if made is None else made
    world.barrier()  # the owner lives until all have opened it
    return shared


def _host() -> tuple[str, int]:
    """What processes have in common that see each other under /proc: the host and its (container's) table of processes."""
    return socket.gethostname(), os.stat("/proc/self/ns/pid").st_ino if os.path.exists("/proc/self/ns/pid") else 0


def host_memory() -> int:
    """Bytes of memory of this machine, or of this container where it has less."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError), open(name) as file:
            found.append(int(file.read()))
    return min(found)
