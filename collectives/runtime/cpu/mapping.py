"""The shared memory of the ranks of one machine: one sparse, anonymous file that each rank maps.

The file is a memfd: it does not appear in /dev/shm, and it vanishes with the ranks even if they
are killed. Other processes open it as /proc/PID/fd/FD of the process that created it. Pages are
allocated when they are first touched.

Layout: `SEGMENTS` segments, each held by one communicator for its control words, flags and slots;
then one heap per rank, for tensors. A communicator and its parts (splits, lanes) share a mapping,
so each part can access the tensors of all of them.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import threading
from collections import deque

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.runtime.cpu.header import PAGE, TAG
from linkweave.kernels.plan.counters import claim, read_counter
from linkweave.kernels.plan.interpreter import pull

SEGMENT = 64 << 20  # bytes of address space, not of memory
SEGMENTS = 4096
MAX_HEAPS = 16 << 40  # bytes of address space of all heaps
LOCATION = re.compile(r"/proc/\d+/fd/\d+")
_NAME = "linkweave"
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_REMOVE = 9  # MADV_REMOVE: gives the pages of a shared file back
_FREE, _HELD, _RETURNED = 0, 1, 2  # states of a segment


def pages(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def heap_bytes(size: int) -> int:
    """Address space of one rank's heap: as large as the machine's memory, up to MAX_HEAPS."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    whole = -(-memory // (1 << 30)) << 30
    return int(min(whole, MAX_HEAPS // size // PAGE * PAGE))


def _nbytes(size: int) -> int:
    return SEGMENTS * SEGMENT + size * heap_bytes(size)


def _hash(job: str) -> bytes:
    return hashlib.sha256(job.encode()).digest()


class Mapping:
    """One process's view of the file. `base` is the address of its first byte here."""

    def __init__(self, fd: int, size: int) -> None:
        self.size, self.heap = size, heap_bytes(size)
        self.nbytes = _nbytes(size)
        try:
            self._map = mmap.mmap(fd, self.nbytes)
        except (OSError, ValueError) as error:
            raise CollectiveError(
                f"{self.nbytes >> 30} GiB of address space cannot be mapped for shared memory: "
                f"{error}; is `ulimit -v` or `ulimit -n` too low?"
            ) from None
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.base = int(self.bytes.ctypes.data)
        self._heaps: dict[int, _Heap] = {}
        self._lock = threading.Lock()
        self._users, self._pid = 0, os.getpid()
        claim(self._segment(0), _FREE, _HELD)  # for the communicator of all ranks

    @staticmethod
    def create(size: int, job: str = "") -> int:
        """Create the file for `size` ranks of a job, which has a name; returns its descriptor."""
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.ftruncate(fd, _nbytes(size))
        os.pwrite(fd, _hash(job), TAG)
        return fd

    @staticmethod
    def location(fd: int) -> str:
        """The path at which other processes of this user open the file."""
        return f"/proc/{os.getpid()}/fd/{fd}"

    @staticmethod
    def open(location: str, size: int, rank: int, job: str = "") -> Mapping:
        """Map the file of another process of this user. Raises CollectiveError."""
        if not LOCATION.fullmatch(location):
            raise CollectiveError(f"rank {rank}: {location!r} is not where ranks share memory")
        try:
            fd = os.open(location, os.O_RDWR)
        except OSError as error:
            raise CollectiveError(
                f"rank {rank} cannot open the ranks' shared memory at {location}: "
                f"{error.strerror}; all ranks must run under one user and in one PID namespace"
            ) from None
        try:
            # the location may come from anyone: accept only what `create` made for this user and
            # for this job, and no other job of the same user
            ours, state = os.readlink(f"/proc/self/fd/{fd}"), os.fstat(fd)
            if not ours.startswith(f"/memfd:{_NAME}") or state.st_uid != os.geteuid():
                raise CollectiveError(
                    f"rank {rank}: {location} is not shared memory that a rank of this user made"
                )
            if state.st_size != _nbytes(size) or os.pread(fd, 32, TAG) != _hash(job):
                raise CollectiveError(
                    f"rank {rank}: {location} is the shared memory of another job, not of these "
                    f"{size} ranks"
                )
            return Mapping(fd, size)
        finally:
            os.close(fd)

    def words(self, offset: int, count: int) -> NDArray[np.int64]:
        """`count` int64s at a byte offset of the file."""
        return self.bytes[offset : offset + 8 * count].view(np.int64)

    def at(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """`nbytes` bytes at an offset of the file."""
        return self.bytes[offset : offset + nbytes]

    def offset_of(self, address: int, nbytes: int) -> int:
        """The offset in the file of `nbytes` at a local address; -1 if they are not in it."""
        offset = address - self.base
        return offset if offset >= 0 and offset + nbytes <= self.nbytes else -1

    def is_at(self, base: int, pid: int) -> bool:
        """Whether this process can read the file where another one has mapped it."""
        found = np.zeros(32, np.uint8)
        read = pull(int(found.ctypes.data), pid, base + TAG, found.nbytes, 0)
        return bool(read) and bool((found == self.at(TAG, found.nbytes)).all())

    def populate(self, start: int, nbytes: int) -> None:
        """Allocate a range of whole pages now: page faults cost more than a transfer."""
        try:
            self._map.madvise(_POPULATE_WRITE, start, nbytes)
        except OSError:
            pass  # on older kernels the pages are allocated when they are touched

    def clear(self, start: int, nbytes: int) -> None:
        """Free the whole pages of a range, which then read as zeros."""
        first, stop = pages(start), (start + nbytes) // PAGE * PAGE
        if first < stop and os.getpid() == self._pid:  # a forked child must not clear ranks' memory
            self._map.madvise(_REMOVE, first, stop - first)

    # ---- segments ----------------------------------------------------------------------------
    def _segment(self, number: int) -> int:
        """The address of a segment's state word, behind the control blocks of segment 0."""
        return self.base + PAGE * (1 + self.size) + 8 * number

    def take(self, nbytes: int) -> tuple[int, int]:
        """Hold enough adjacent free segments, zeroed; returns their (offset, bytes).

        One rank of a communicator takes them for all. Raises CollectiveError if none are left.
        """
        count = -(-nbytes // SEGMENT)
        first = 0
        while first + count <= SEGMENTS:
            got = 0
            while got < count and claim(self._segment(first + got), _FREE, _HELD):
                got += 1
            if got == count:
                return first * SEGMENT, count * SEGMENT
            for number in range(first, first + got):
                claim(self._segment(number), _HELD, _FREE)
            first += got + 1
        raise CollectiveError(
            f"no {nbytes >> 20} MiB of shared address space are left for plans: communicators "
            f"hold all of its {SEGMENTS} segments; close those that are not needed"
        )

    def give(self, offset: int, nbytes: int) -> None:
        """Free held segments; several ranks may free the same ones."""
        for number in range(offset // SEGMENT, (offset + nbytes) // SEGMENT):
            if claim(self._segment(number), _HELD, _RETURNED):
                self.clear(number * SEGMENT, SEGMENT)
                claim(self._segment(number), _RETURNED, _FREE)

    def held(self) -> int:
        """The number of segments that are held."""
        return sum(int(read_counter(self._segment(n))) == _HELD for n in range(SEGMENTS))

    # ---- heaps -------------------------------------------------------------------------------
    def allocate(self, rank: int, nbytes: int) -> tuple[int, NDArray[np.uint8]]:
        """(offset, bytes) of a new block in a rank's heap, aligned to 128 bytes.

        Only the process of that rank may call it.
        """
        with self._lock:
            heap = self._heaps.setdefault(rank, _Heap(self.heap))
        offset = SEGMENTS * SEGMENT + rank * self.heap + heap.take(max(nbytes, 1))
        page = offset // PAGE * PAGE
        self.populate(page, offset + nbytes - page)
        return offset, self.at(offset, nbytes)

    def free(self, rank: int, offset: int, nbytes: int) -> None:
        """Free a block of `allocate`. Safe in the garbage collector."""
        try:
            self.clear(offset, nbytes)
        except ValueError:
            return  # already unmapped
        self._heaps[rank].give(offset - SEGMENTS * SEGMENT - rank * self.heap)

    # ---- lifetime ----------------------------------------------------------------------------
    def use(self) -> None:
        """Count one more communicator in the mapping."""
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """Count one communicator less; the last communicator or tensor unmaps the file."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
        del self.bytes
        try:
            self._map.close()
        except BufferError:
            pass  # tensors still use it; the last of them unmaps it


class _Heap:
    """A first-fit allocator over a list of free spans (start, length), in units of 128 bytes."""

    def __init__(self, nbytes: int) -> None:
        self._free: list[tuple[int, int]] = [(0, nbytes)]
        self._used: dict[int, int] = {}
        self._returned: deque[int] = deque()  # lock-free, as finalizers may run anywhere
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> int:
        need = -(-nbytes // 128) * 128
        with self._lock:
            while self._returned:
                self._merge(self._returned.popleft())
            for i, (start, length) in enumerate(self._free):
                if length >= need:
                    self._free[i : i + 1] = [(start + need, length - need)] if length > need else []
                    self._used[start] = need
                    return start
        raise CollectiveError(f"no {nbytes} bytes left in this rank's shared heap")

    def give(self, start: int) -> None:
        self._returned.append(start)

    def _merge(self, start: int) -> None:
        spans = sorted([*self._free, (start, self._used.pop(start))])
        merged: list[tuple[int, int]] = []
        for begin, length in spans:
            if merged and sum(merged[-1]) == begin:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((begin, length))
        self._free = merged
