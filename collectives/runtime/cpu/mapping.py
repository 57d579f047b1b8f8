"""The memory that the ranks of one machine share: one sparse, nameless file, mapped whole.

It is a memfd, so nothing ever appears in /dev/shm and nothing stays when all ranks are killed.
Other processes open it as /proc/PID/fd/FD of the process that made it; pages exist once they are
touched.

Layout: `SEGMENTS` segments, each held by one communicator for its control words, flags and slots;
then a heap for each rank, for tensors. A communicator and its parts (splits, lanes) share one
mapping, so each part sees the tensors of all of them.
"""

from __future__ import annotations

import mmap
import os
import re
import threading
from collections import deque

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.errors import CollectiveError
from linkweave.kernels.plan.counters import claim, read_counter

PAGE = 4096
SEGMENT = 64 << 20  # bytes of address space, not of memory
SEGMENTS = 4096
MOST_HEAPS = 16 << 40  # bytes of address space of all heaps
LOCATION = re.compile(r"/proc/\d+/fd/\d+")
_NAME = "linkweave"
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_REMOVE = 9  # MADV_REMOVE: gives the pages of a shared file back
_FREE, _HELD, _RETURNED = 0, 1, 2  # what a segment's word says


def pages(nbytes: int) -> int:
    """As bytes of whole pages."""
    return -(-nbytes // PAGE) * PAGE


def heap_bytes(size: int) -> int:
    """Address space of one rank's heap: all of the machine's memory, where so much fits."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    whole = -(-memory // (1 << 30)) << 30
    return int(min(whole, MOST_HEAPS // size // PAGE * PAGE))


class Mapping:
    """One process's view of the file. `base` is the address of its first byte here."""

    def __init__(self, fd: int, size: int) -> None:
        self.size, self.heap = size, heap_bytes(size)
        self.nbytes = SEGMENTS * SEGMENT + size * self.heap
        try:
            self._map = mmap.mmap(fd, self.nbytes)
        except (OSError, ValueError) as error:
            raise CollectiveError(
                f"{self.nbytes >> 30} GiB of address space cannot be mapped for shared memory: "
                f"{error}; is `ulimit -v` set?"
            ) from None
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.base = int(self.bytes.ctypes.data)
        self._heaps: dict[int, _Heap] = {}
        self._lock = threading.Lock()
        self._users, self._pid = 0, os.getpid()
        claim(self._segment(0), _FREE, _HELD)  # the whole communicator's

    @staticmethod
    def create(size: int) -> int:
        """Make the file for `size` ranks; returns its descriptor."""
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.ftruncate(fd, SEGMENTS * SEGMENT + size * heap_bytes(size))
        return fd

    @staticmethod
    def location(fd: int) -> str:
        """Where other processes of this user open the file."""
        return f"/proc/{os.getpid()}/fd/{fd}"

    @staticmethod
    def open(location: str, size: int, rank: int) -> Mapping:
        """Map the file that another process of this user made. Raises CollectiveError."""
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
            # whoever told the location may have named another file of this user's
            ours = os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{_NAME}")
            if not ours or os.fstat(fd).st_uid != os.geteuid():
                raise CollectiveError(
                    f"rank {rank}: {location} is not shared memory that a rank of this user made"
                )
            return Mapping(fd, size)
        finally:
            os.close(fd)

    def words(self, offset: int, count: int) -> NDArray[np.int64]:
        """`count` int64s at a byte offset of the file."""
        return self.bytes[offset : offset + 8 * count].view(np.int64)

    def at(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """The bytes at an offset."""
        return self.bytes[offset : offset + nbytes]

    def offset_of(self, address: int, nbytes: int) -> int:
        """Where in the file a local address lies, or -1 if it is not in it."""
        offset = address - self.base
        return offset if offset >= 0 and offset + nbytes <= self.nbytes else -1

    def populate(self, start: int, nbytes: int) -> None:
        """Give memory to a range of whole pages: a first touch costs more than a transfer."""
        try:
            self._map.madvise(_POPULATE_WRITE, start, nbytes)
        except OSError:
            pass  # an older kernel: the pages come when they are touched

    def clear(self, start: int, nbytes: int) -> None:
        """Give the memory of the whole pages of a range back; they then read as zeros."""
        first, stop = -(-start // PAGE) * PAGE, (start + nbytes) // PAGE * PAGE
        if first < stop and os.getpid() == self._pid:  # a forked child's copies are not the ranks'
            self._map.madvise(_REMOVE, first, stop - first)

    # ---- segments ----------------------------------------------------------------------------
    def _segment(self, number: int) -> int:
        """The address of the word that says who holds a segment; behind segment 0's control."""
        return self.base + PAGE * (1 + self.size) + 8 * number

    def take(self, nbytes: int) -> tuple[int, int]:
        """(offset, bytes) of free segments side by side, zeroed, now held. One rank of a
        communicator takes them for all. Raises CollectiveError."""
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
        """Give held segments back; several ranks may ask for the same ones."""
        for number in range(offset // SEGMENT, (offset + nbytes) // SEGMENT):
            if claim(self._segment(number), _HELD, _RETURNED):
                self.clear(number * SEGMENT, SEGMENT)
                claim(self._segment(number), _RETURNED, _FREE)

    def held(self) -> int:
        """How many segments are held."""
        return sum(int(read_counter(self._segment(n))) == _HELD for n in range(SEGMENTS))

    # ---- heaps -------------------------------------------------------------------------------
    def allocate(self, rank: int, nbytes: int) -> tuple[int, NDArray[np.uint8]]:
        """(offset, bytes) of a block in that rank's heap, 128-byte aligned. The rank runs here."""
        with self._lock:
            heap = self._heaps.setdefault(rank, _Heap(self.heap))
        offset = SEGMENTS * SEGMENT + rank * self.heap + heap.take(max(nbytes, 1))
        page = offset // PAGE * PAGE
        self.populate(page, offset + nbytes - page)
        return offset, self.at(offset, nbytes)

    def free(self, rank: int, offset: int, nbytes: int) -> None:
        """Give a block of `allocate` back, with its memory. A collector may call it anywhere."""
        try:
            self.clear(offset, nbytes)
        except ValueError:
            return  # unmapped: the last tensor has gone
        self._heaps[rank].give(offset - SEGMENTS * SEGMENT - rank * self.heap)

    # ---- lifetime ----------------------------------------------------------------------------
    def use(self) -> None:
        """One communicator more lies in it."""
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """One communicator less; with the last one, and the last tensor, it is unmapped."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
        del self.bytes
        try:
            self._map.close()
        except BufferError:
            pass  # tensors still lie in it: it goes with the last of them


class _Heap:
    """First fit over a list of free spans (start, length), in units of 128 bytes."""

    def __init__(self, nbytes: int) -> None:
        self._free: list[tuple[int, int]] = [(0, nbytes)]
        self._used: dict[int, int] = {}
        self._returned: deque[int] = deque()  # by finalizers, which run anywhere
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
