"""The memory that the ranks of one machine share: one sparse, nameless file.

It is a memfd, so nothing ever appears in /dev/shm and nothing stays when all ranks are killed.
Peers open it as /proc/PID/fd/FD of the rank that made it; pages exist once they are touched.

Layout: one page of abort words; a control block for each rank; the plans' flags and slots, which
all ranks lay out alike, in the same order; and a heap for each rank, for `Communicator.empty`.
"""

from __future__ import annotations

import mmap
import os
import select
import threading
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from collectives.errors import CollectiveError

PAGE = 4096
PLANS = 64 << 30  # bytes of address space, not of memory
HEAP = 256 << 30
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14

# Fields of a rank's control block, byte offsets. Words that different ranks write or that several
# wait for lie 128 bytes apart: two cache lines, as adjacent ones are fetched in pairs.
BELL, POSTED, FINISHED, PID, GONE, NOTICE, GPU_CALLS, SAID, LAST_WORDS = (
    0, 128, 256, 384, 392, 512, 768, 1024, 3072
)  # fmt: skip
MOST_SAID = 1016
NOTICE_WORDS = 16  # of one notice; two are kept, for calls of even and odd number


class Arena:
    """One rank's mapping of the shared file. `base` is the address of its first byte here."""

    def __init__(self, memory: mmap.mmap, size: int, rank: int) -> None:
        self.size, self.rank, self.nbytes = size, rank, len(memory)
        self._heaps = PAGE * (1 + size) + PLANS
        self._map = memory
        self._bytes = np.frombuffer(self._map, np.uint8)
        self.base = int(self._bytes.ctypes.data)
        self._plans_used = 0
        self._heap = _Heap(HEAP)
        self._watch: dict[int, int] = {}  # peer -> pidfd
        self.words(self.control(rank) + PID, 1)[0] = os.getpid()

    @staticmethod
    def _mapped(fd: int, size: int) -> mmap.mmap:
        nbytes = PAGE * (1 + size) + PLANS + size * HEAP
        try:
            return mmap.mmap(fd, nbytes)
        except OSError as error:
            raise CollectiveError(
                f"{nbytes >> 30} GiB of address space cannot be mapped for shared memory: "
                f"{error.strerror}; is `ulimit -v` set?"
            ) from None

    @staticmethod
    def local(size: int) -> list[Arena]:
        """For ranks that are threads of this process: one mapping, seen by each."""
        fd = Arena.create(size)
        try:
            memory = Arena._mapped(fd, size)
        finally:
            os.close(fd)
        return [Arena(memory, size, rank) for rank in range(size)]

    @staticmethod
    def create(size: int) -> int:
        """A new file for `size` ranks; returns its descriptor."""
        fd = os.memfd_create("linkweave", os.MFD_CLOEXEC)
        os.ftruncate(fd, PAGE * (1 + size) + PLANS + size * HEAP)
        return fd

    @staticmethod
    def path(fd: int) -> str:
        """Where other processes of this user open the file."""
        return f"/proc/{os.getpid()}/fd/{fd}"

    @staticmethod
    def attach(path: str, size: int, rank: int) -> Arena:
        """Map the file that another process made. Raises CollectiveError where it may not."""
        try:
            fd = os.open(path, os.O_RDWR)
        except OSError as error:
            raise CollectiveError(
                f"rank {rank} cannot open the ranks' shared memory at {path}: {error.strerror}; "
                "all ranks must run under one user and in one PID namespace"
            ) from None
        try:
            return Arena(Arena._mapped(fd, size), size, rank)
        finally:
            os.close(fd)

    def words(self, offset: int, count: int) -> NDArray[np.int64]:
        """`count` int64s at a byte offset of the file."""
        return self._bytes[offset : offset + 8 * count].view(np.int64)

    def control(self, rank: int) -> int:
        """Byte offset of a rank's control block."""
        return PAGE * (1 + rank)

    def notices(self, call: int) -> NDArray[np.int64]:
        """[size, NOTICE_WORDS]: what every rank says of its call number `call`."""
        start = PAGE + NOTICE + call % 2 * 8 * NOTICE_WORDS
        shape, strides = (self.size, NOTICE_WORDS), (PAGE, 8)
        return np.ndarray(shape, np.int64, self._map, start, strides)

    @property
    def abort(self) -> NDArray[np.int64]:
        """[set, rank that gave up, why (an index of `diagnose.REASONS`), rank it blames]"""
        return self.words(0, 4)

    # ---- words -------------------------------------------------------------------------------
    def say(self, said: bytes, where: int) -> None:
        """Leave up to `MOST_SAID` bytes for the others, at a call's `page` or at LAST_WORDS."""
        if len(said) > MOST_SAID:
            raise CollectiveError(f"{len(said)} bytes for the other ranks; at most {MOST_SAID}")
        at = self.control(self.rank) + where
        self._bytes[at + 8 : at + 8 + len(said)] = np.frombuffer(said, np.uint8)
        self.words(at, 1)[0] = len(said)

    @staticmethod
    def page(call: int) -> int:
        """Where ranks speak in that call: even and odd ones have a place each, as a rank may read
        until it makes its next call."""
        return SAID + call % 2 * (LAST_WORDS - SAID) // 2

    def said(self, rank: int, where: int) -> bytes:
        """What that rank has left there."""
        at = self.control(rank) + where
        return self._bytes[at + 8 : at + 8 + int(self.words(at, 1)[0])].tobytes()

    # ---- calls on GPUs, at which ranks do not meet -------------------------------------------
    def log_call(self, number: int, checksum: int) -> None:
        """Leave a checksum of this rank's first `number` calls on its GPU.

        It goes to the place of the number's lowest bit, so that of ranks that stand far apart the
        latest common multiple of a power of two can still be compared.
        """
        place = (number & -number).bit_length() - 1
        self._logs()[self.rank, min(place, 31)] = (number & 0x7FFFFFFF) << 32 | checksum

    def differing(self) -> int | None:
        """A rank whose calls on its GPU have been others than ours."""
        logs = self._logs().copy()  # each word is read once: they change meanwhile
        mine = logs[self.rank]
        differ = (mine >> 32 != 0) & (logs >> 32 == mine >> 32) & (logs != mine)
        found = np.flatnonzero(differ.any(axis=1))
        return int(found[0]) if found.size else None

    def _logs(self) -> NDArray[np.int64]:
        start, strides = self.control(0) + GPU_CALLS, (PAGE, 8)
        return np.ndarray((self.size, 32), np.int64, self._map, start, strides)

    def leave(self) -> None:
        """Say that this rank touches no other rank's GPU memory any more."""
        self.words(self.control(self.rank) + GONE, 1)[0] = 1

    def others_left(self) -> bool:
        """Whether no other rank touches our GPU memory any more."""
        here = {*range(self.size)} - {self.rank, *self.dead()}
        return all(self.words(self.control(r) + GONE, 1)[0] for r in here)

    # ---- memory ------------------------------------------------------------------------------
    def reserve(self, nbytes: int) -> int:
        """Offset of a new region for a plan; every rank must ask for the same ones in order."""
        start = PAGE * (1 + self.size) + self._plans_used
        rounded = -(-nbytes // PAGE) * PAGE
        if self._plans_used + rounded > PLANS:
            raise CollectiveError(f"plans have used up their {PLANS >> 30} GiB of address space")
        self._plans_used += rounded
        self._populate(start, rounded)
        return start

    def _populate(self, start: int, nbytes: int) -> None:
        try:  # a first touch costs more than the transfer itself
            self._map.madvise(_POPULATE_WRITE, start, nbytes)
        except OSError:
            pass  # an older kernel: the pages come when they are touched

    def allocate(self, nbytes: int) -> tuple[int, NDArray[np.uint8]]:
        """(offset, bytes) of a block in this rank's own heap, 128-byte aligned."""
        start = self._heap.take(max(nbytes, 1))
        offset = self._heaps + self.rank * HEAP + start
        page = offset // PAGE * PAGE
        self._populate(page, offset + nbytes - page)
        return offset, self._bytes[offset : offset + nbytes]

    def bytes_at(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """The memory at an offset, whichever rank's it is."""
        return self._bytes[offset : offset + nbytes]

    def free(self, offset: int) -> None:
        """Give a block of `allocate` back."""
        self._heap.give(offset - self._heaps - self.rank * HEAP)

    def offset_of(self, address: int, nbytes: int) -> int:
        """Where in the file a local address lies, or -1 if it is not in it."""
        offset = address - self.base
        return offset if offset >= 0 and offset + nbytes <= self.nbytes else -1

    # ---- peers -------------------------------------------------------------------------------
    def watch(self) -> None:
        """Open a handle on every peer's process; call once all ranks have attached."""
        for peer in range(self.size):
            if peer != self.rank:
                pid = int(self.words(self.control(peer) + PID, 1)[0])
                try:
                    self._watch[peer] = os.pidfd_open(pid)
                except (OSError, AttributeError):
                    continue  # gone already or not supported: the deadline will tell

    def dead(self) -> Sequence[int]:
        """Peers whose process has ended."""
        poll = select.poll()
        by_fd = {fd: peer for peer, fd in self._watch.items()}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        return sorted(by_fd[fd] for fd, _ in poll.poll(0))

    def pid(self, rank: int) -> int:
        return int(self.words(self.control(rank) + PID, 1)[0])

    def close(self) -> None:
        """Drop the peers' handles. The mapping goes with the last tensor that lies in it."""
        for fd in self._watch.values():
            os.close(fd)
        self._watch.clear()
        del self._bytes
        try:
            self._map.close()
        except BufferError:
            pass  # tensors of `empty` still lie in it: it goes with the last of them


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
