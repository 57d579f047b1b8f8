"""What one communicator has of the shared memory: control words, flags and slots of its plans.

A page of abort words, a control block for each rank, and behind them memory that rank 0 deals out
for plans. Ranks are numbered within the communicator; `members` are their numbers in the mapping.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.runtime.cpu.mapping import PAGE, SEGMENT, SEGMENTS, Mapping, pages
from linkweave.kernels.plan.counters import add_one

# Fields of a rank's control block, byte offsets. Words that different ranks write or that several
# wait for lie 128 bytes apart: two cache lines, as adjacent ones are fetched in pairs.
BELL, POSTED, FINISHED, PID, GONE, CLOSED, WAITS, NOTICE, GPU_CALLS, SAID, LAST_WORDS = (
    0, 128, 256, 384, 392, 400, 408, 512, 768, 1024, 3072
)  # fmt: skip
_LEFT = 64  # in the page of abort words: how many ranks have left
MOST_SAID = 1008
"""Bytes that fit into a control block; what is longer lies in the rank's heap."""
NOTICE_WORDS = 16  # of one notice; two are kept, for calls of even and odd number


class Arena:
    """One rank's side of it. `base` is the address of the mapping's first byte."""

    def __init__(
        self, mapping: Mapping, rank: int, members: Sequence[int] = (), start: int = 0,
        whole: tuple[Arena, Sequence[int]] | None = None,
    ) -> None:  # fmt: skip
        self.mapping, self.rank, self.start = mapping, rank, start
        self._whole = whole  # of which it is a part, and its ranks there
        self.members = tuple(members) or tuple(range(mapping.size))
        self.size, self.base = len(self.members), mapping.base
        mapping.use()
        first = PAGE * (1 + self.size)
        if start == 0:  # the mapping's own table of segments lies behind the control blocks
            first += pages(8 * SEGMENTS)
        self._channels = start + first
        first += pages(8 * self.size * self.size)
        self._room = [(start + first, SEGMENT - first)]  # free, by rank 0
        self._segments = [(start, SEGMENT)]
        self._given_back: dict[int, list[int]] = {}  # offsets, by size
        self._handles: dict[int, int] = {}  # peer -> pidfd
        self._lock = threading.Lock()
        self.words(self.control(rank) + PID, 1)[0] = os.getpid()

    @staticmethod
    def local(size: int) -> list[Arena]:
        """For ranks that are threads of this process: one mapping, seen by each."""
        fd = Mapping.create(size)
        try:
            mapping = Mapping(fd, size)
        finally:
            os.close(fd)
        return [Arena(mapping, rank) for rank in range(size)]

    def part(self, ranks: Sequence[int], start: int) -> Arena:
        """That of some of our ranks, in a segment that `ranks[0]` has taken."""
        members = [self.members[r] for r in ranks]
        return Arena(self.mapping, list(ranks).index(self.rank), members, start, (self, ranks))

    def words(self, offset: int, count: int) -> NDArray[np.int64]:
        """`count` int64s at a byte offset of the file."""
        return self.mapping.words(offset, count)

    def control(self, rank: int) -> int:
        """Byte offset of a rank's control block."""
        return self.start + PAGE * (1 + rank)

    def notices(self, call: int) -> NDArray[np.int64]:
        """[size, NOTICE_WORDS]: what every rank says of its call number `call`."""
        start = self.control(0) + NOTICE + call % 2 * 8 * NOTICE_WORDS
        return self._rows(start, NOTICE_WORDS)

    def _rows(self, start: int, count: int) -> NDArray[np.int64]:
        """[size, count]: words at the same place of every rank's control block."""
        return np.ndarray(
            (self.size, count), np.int64, self.mapping.bytes.data, start, (PAGE, 8)
        )  # fmt: skip

    @property
    def abort(self) -> NDArray[np.int64]:
        """[set, rank that gave up, why (an index of `diagnose.REASONS`), rank it blames]"""
        return self.words(self.start, 4)

    @property
    def abort_address(self) -> int:
        return self.base + self.start

    # ---- words -------------------------------------------------------------------------------
    def say(self, said: bytes, where: int) -> None:
        """Leave up to `MOST_SAID` bytes for the others, at a call's `page` or at LAST_WORDS."""
        if len(said) > MOST_SAID:
            raise CollectiveError(f"{len(said)} bytes for the other ranks; at most {MOST_SAID}")
        self.tell(where, len(said), -1)
        at = self.control(self.rank) + where + 16
        self.mapping.at(at, len(said))[:] = np.frombuffer(said, np.uint8)

    def tell(self, where: int, nbytes: int, offset: int) -> None:
        """Say that so many bytes lie elsewhere in the mapping."""
        self.words(self.control(self.rank) + where, 2)[:] = nbytes, offset

    @staticmethod
    def page(call: int) -> int:
        """Where ranks speak in that call: even and odd ones have a place each, as a rank may read
        until it makes its next call."""
        return SAID + call % 2 * (LAST_WORDS - SAID) // 2

    def said(self, rank: int, where: int) -> bytes:
        """What that rank has left there."""
        at = self.control(rank) + where
        nbytes, offset = self.words(at, 2).tolist()
        return self.mapping.at(at + 16 if offset < 0 else offset, nbytes).tobytes()

    # ---- calls on GPUs, at which ranks do not meet -------------------------------------------
    def log_call(self, number: int, checksum: int) -> None:
        """Leave a checksum of this rank's first `number` calls on its GPU.

        It goes to the place of the number's lowest bit, so that of ranks that stand far apart the
        latest common multiple of a power of two can still be compared.
        """
        place = (number & -number).bit_length() - 1
        logs = self._rows(self.control(0) + GPU_CALLS, 32)
        logs[self.rank, min(place, 31)] = (number & 0x7FFFFFFF) << 32 | checksum

    def differing(self) -> int | None:
        """A rank whose calls on its GPU have been others than ours."""
        logs = self._rows(self.control(0) + GPU_CALLS, 32).copy()  # each word is read once
        mine = logs[self.rank]
        differ = (mine >> 32 != 0) & (logs >> 32 == mine >> 32) & (logs != mine)
        found = np.flatnonzero(differ.any(axis=1))
        return int(found[0]) if found.size else None

    def leave_gpus(self) -> None:
        """Say that this rank touches no other rank's GPU memory any more."""
        self.words(self.control(self.rank) + GONE, 1)[0] = 1

    def others_left_gpus(self) -> bool:
        """Whether no other rank touches our GPU memory any more."""
        here = {*range(self.size)} - {self.rank, *self.dead()}
        return all(self.words(self.control(r) + GONE, 1)[0] for r in here)

    # ---- memory ------------------------------------------------------------------------------
    def reserve(self, nbytes: int) -> int:
        """Offset of zeroed memory for a plan. Rank 0 reserves it and tells the others."""
        rounded = pages(nbytes)
        if spare := self._given_back.get(rounded):
            start = spare.pop()
        else:
            start = self._room[-1][0] if self._room[-1][1] >= rounded else self._grow(rounded)
            self._room[-1] = (start + rounded, self._room[-1][1] - rounded)
        self.mapping.populate(start, rounded)
        return start

    def _grow(self, nbytes: int) -> int:
        self._segments.append(self.mapping.take(nbytes))
        self._room.append(self._segments[-1])
        return self._room[-1][0]

    def adopt(self, start: int, nbytes: int) -> None:
        """Memory that rank 0 has reserved for a plan: we give it back if we leave last."""
        if not any(first <= start < first + room for first, room in self._segments):
            rounded = -(-nbytes // SEGMENT) * SEGMENT
            self._segments.append((start // SEGMENT * SEGMENT, rounded))

    def release(self, start: int, nbytes: int) -> None:
        """Give memory of `reserve` back, when no rank uses it any more. By rank 0."""
        rounded = pages(nbytes)
        self.mapping.clear(start, rounded)
        self._given_back.setdefault(rounded, []).append(start)

    def allocate(self, nbytes: int) -> tuple[int, NDArray[np.uint8]]:
        """(offset, bytes) of a block in this rank's own heap, 128-byte aligned."""
        return self.mapping.allocate(self.members[self.rank], nbytes)

    def free(self, offset: int, nbytes: int) -> None:
        """Give a block of `allocate` back."""
        self.mapping.free(self.members[self.rank], offset, nbytes)

    # ---- peers -------------------------------------------------------------------------------
    def dead(self) -> list[int]:
        """Peers whose process has ended."""
        with self._lock:  # another thread may look as well
            return self._dead()

    def _dead(self) -> list[int]:
        for peer in range(self.size):
            if peer != self.rank and peer not in self._handles and (pid := self.pid(peer)):
                try:
                    self._handles[peer] = os.pidfd_open(pid)
                except ProcessLookupError:
                    self._handles[peer] = -1
                except (OSError, AttributeError):
                    continue  # not supported: the deadline will tell
        poll = select.poll()
        by_fd = {fd: peer for peer, fd in self._handles.items() if fd >= 0}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        gone = [peer for peer, fd in self._handles.items() if fd < 0]
        return sorted([*gone, *(by_fd[fd] for fd, what in poll.poll(0) if what & select.POLLIN)])

    def pid(self, rank: int) -> int:
        """A rank's process; 0 before it has come."""
        return int(self.words(self.control(rank) + PID, 1)[0])

    def closed(self, rank: int) -> bool:
        """Whether a rank has closed this communicator, or the one that it is a part of."""
        if self.words(self.control(rank) + CLOSED, 1)[0]:
            return True
        return self._whole is not None and self._whole[0].closed(self._whole[1][rank])

    def expect(self) -> None:
        """Make it known who the ranks are, though some may not have come yet."""
        if self._whole:
            for rank, other in enumerate(self._whole[1]):
                self.words(self.control(rank) + PID, 1)[0] = self._whole[0].pid(other)

    def channel(self, src: int, dst: int) -> NDArray[np.int64]:
        """The word that says where the memory of a channel between two ranks begins, or 0."""
        return self.words(self._channels + 8 * (src * self.size + dst), 1)

    def close(self) -> None:
        """Leave it. The memory of a part goes back with its last rank; that of the whole with the
        mapping, and this with the last tensor that lies in it."""
        with self._lock:
            for fd in self._handles.values():
                if fd >= 0:
                    os.close(fd)
            self._handles.clear()
        left = add_one(self.base + self.start + _LEFT)
        if self.start and left == self.size:
            for start, nbytes in self._segments:
                self.mapping.give(start, nbytes)
        self.mapping.leave()
