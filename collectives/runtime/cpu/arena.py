"""A communicator's part of the shared memory: control words, and flags and slots of its plans.

The layout is a page of abort words, a control block for each rank (`header` says where words lie in
both), and memory that rank 0 reserves for plans. Ranks are numbered within the communicator;
`members` are their numbers in the mapping.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.runtime.cpu.cores import past_caches
from linkweave.collectives.runtime.cpu.header import (
    ABORT,
    BASE,
    CLOSED,
    GONE,
    GPU_CALL_WORDS,
    GPU_CALLS,
    LAST_WORDS,
    LEFT,
    MAX_MESSAGE,
    MESSAGES,
    NOTICE,
    NOTICE_WORDS,
    PAGE,
    PAST,
    PID,
)
from linkweave.collectives.runtime.cpu.mapping import SEGMENT, SEGMENTS, Mapping, pages
from linkweave.kernels.plan.counters import add_one

MEASURE_EVERY = 10.0  # s between two measurements of how blocks pass between cores


class Arena:
    """One rank's view. `base` is the address of the mapping's first byte."""

    def __init__(
        self, mapping: Mapping, rank: int, members: Sequence[int] = (), start: int = 0,
        whole: tuple[Arena, Sequence[int]] | None = None,
    ) -> None:  # fmt: skip
        self.mapping, self.rank, self.start = mapping, rank, start
        self._whole = whole  # (the arena that this one is a part of, its ranks there)
        self.members = tuple(members) or tuple(range(mapping.size))
        self.size, self.base = len(self.members), mapping.base
        mapping.use()
        first = PAGE * (1 + self.size)
        if start == 0:  # the mapping's table of segments follows the control blocks
            first += pages(8 * SEGMENTS)
        self._channels = start + first
        first += pages(8 * self.size * self.size)
        self._room = [(start + first, SEGMENT - first)]  # spans that rank 0 has not reserved yet
        self._segments = [(start, SEGMENT)]
        self._released: dict[int, list[int]] = {}  # size -> offsets
        self._handles: dict[int, int] = {}  # peer -> pidfd
        self._lock = threading.Lock()
        self._measuring, self._measure_at = threading.Lock(), 0.0
        self.words(self.control(rank) + BASE, 1)[0] = self.base
        self.words(self.control(rank) + PID, 1)[0] = os.getpid()

    @staticmethod
    def local(size: int) -> list[Arena]:
        """Arenas over one new mapping, for ranks that are threads of this process."""
        fd = Mapping.create(size)
        try:
            mapping = Mapping(fd, size)
        finally:
            os.close(fd)
        return [Arena(mapping, rank) for rank in range(size)]

    def part(self, ranks: Sequence[int], start: int) -> Arena:
        """The arena of a subset of our ranks, in the segment at `start` that `ranks[0]` took."""
        members = [self.members[r] for r in ranks]
        return Arena(self.mapping, list(ranks).index(self.rank), members, start, (self, ranks))

    def words(self, offset: int, count: int) -> NDArray[np.int64]:
        """`count` int64s at a byte offset of the file."""
        return self.mapping.words(offset, count)

    def control(self, rank: int) -> int:
        """Byte offset of a rank's control block."""
        return self.start + PAGE * (1 + rank)

    def notices(self, call: int) -> NDArray[np.int64]:
        """[size, NOTICE_WORDS]: the words that every rank posts for call number `call`."""
        start = self.control(0) + NOTICE + call % 2 * 8 * NOTICE_WORDS
        return self._rows(start, NOTICE_WORDS)

    def _rows(self, start: int, count: int) -> NDArray[np.int64]:
        """[size, count]: the same words of every rank's control block, from rank 0's at `start`."""
        return np.ndarray((self.size, count), np.int64, self.mapping.bytes.data, start, (PAGE, 8))

    @property
    def abort(self) -> NDArray[np.int64]:
        """[4]: 1 if set, the rank that gave up, why (an index of `diagnose.REASONS`), the rank
        that it blames."""
        return self.words(self.start + ABORT, 4)

    @property
    def abort_address(self) -> int:
        return self.base + self.start + ABORT

    @property
    def past_address(self) -> int:
        """The address of a word that is 1 if messages pass sooner past the caches."""
        return self.base + PAST

    def measure_cores(self) -> None:
        """Find that out, on rank 0 of the whole for all ranks, which must all have opened the
        arena. A virtual machine may be moved, so it may be called often, and does so every 10 s."""
        if self._whole:
            self._whole[0].measure_cores()
        elif self.rank == 0 < self.size - 1 and self._measuring.acquire(blocking=False):
            try:
                if time.monotonic() >= self._measure_at:
                    past = past_caches(self.pid(0), self.pid(self.size - 1))
                    self._measure_at = time.monotonic() + MEASURE_EVERY
                    if past is not None:
                        self.words(PAST, 1)[0] = past
            finally:
                self._measuring.release()

    # ---- messages ----------------------------------------------------------------------------
    def leave_message(self, message: bytes, where: int) -> None:
        """Leave a message of up to `MAX_MESSAGE` bytes at a call's `page` or at LAST_WORDS."""
        if len(message) > MAX_MESSAGE:
            raise CollectiveError(f"a message of {len(message)} bytes; at most {MAX_MESSAGE}")
        self.write_header(where, len(message), -1)
        at = self.control(self.rank) + where + 16
        self.mapping.at(at, len(message))[:] = np.frombuffer(message, np.uint8)

    def write_header(self, where: int, nbytes: int, offset: int) -> None:
        """Announce a message of `nbytes` at an offset of the mapping; -1: right behind it."""
        self.words(self.control(self.rank) + where, 2)[:] = nbytes, offset

    @staticmethod
    def page(call: int) -> int:
        """Offset of a call's messages in the control blocks. Even and odd calls alternate, because
        a rank may read the messages of a call until it makes the next one."""
        return MESSAGES + call % 2 * (LAST_WORDS - MESSAGES) // 2

    def message(self, rank: int, where: int) -> bytes:
        """The message that a rank has left at `where`."""
        at = self.control(rank) + where
        nbytes, offset = self.words(at, 2).tolist()
        return self.mapping.at(at + 16 if offset < 0 else offset, nbytes).tobytes()

    # ---- calls on GPUs, at which ranks do not wait for each other ----------------------------
    def log_call(self, number: int, checksum: int) -> None:
        """Log a checksum of this rank's first `number` calls on its GPU.

        The log has an entry for each power of two, which keeps the latest multiple of it: so ranks
        whose numbers of calls are far apart still have a number in common to compare.
        """
        power = (number & -number).bit_length() - 1
        log = self.words(self.control(self.rank) + GPU_CALLS, GPU_CALL_WORDS)
        log[min(power, 31)] = (number & 0x7FFFFFFF) << 32 | checksum

    def differing(self) -> int | None:
        """A rank whose calls on its GPU differ from ours, if there is one."""
        logs = self._rows(
            self.control(0) + GPU_CALLS, GPU_CALL_WORDS
        ).copy()  # reads each word only once
        mine = logs[self.rank]
        differ = (mine >> 32 != 0) & (logs >> 32 == mine >> 32) & (logs != mine)
        found = np.flatnonzero(differ.any(axis=1))
        return int(found[0]) if found.size else None

    def leave_gpus(self) -> None:
        """Tell the others that this rank has closed their GPU memory."""
        self.words(self.control(self.rank) + GONE, 1)[0] = 1

    def others_left_gpus(self) -> bool:
        """Whether all other ranks that are alive have closed our GPU memory."""
        alive = {*range(self.size)} - {self.rank, *self.dead()}
        return all(self.words(self.control(r) + GONE, 1)[0] for r in alive)

    # ---- memory ------------------------------------------------------------------------------
    def reserve(self, nbytes: int) -> int:
        """Reserve zeroed memory for a plan; returns its offset. Rank 0 does so for all ranks."""
        rounded = pages(nbytes)
        if spare := self._released.get(rounded):
            start = spare.pop()
        else:
            if self._room[-1][1] < rounded:
                self._segments.append(self.mapping.take(rounded))
                self._room.append(self._segments[-1])
            start, free = self._room[-1]
            self._room[-1] = (start + rounded, free - rounded)
        self.mapping.populate(start, rounded)
        return start

    def adopt(self, start: int, nbytes: int) -> None:
        """Note memory that rank 0 has reserved: the rank that leaves last frees it."""
        if not any(first <= start < first + room for first, room in self._segments):
            rounded = -(-nbytes // SEGMENT) * SEGMENT
            self._segments.append((start // SEGMENT * SEGMENT, rounded))

    def release(self, start: int, nbytes: int) -> None:
        """Free memory of `reserve` that no rank uses any more. Called by rank 0."""
        rounded = pages(nbytes)
        self.mapping.clear(start, rounded)
        self._released.setdefault(rounded, []).append(start)

    def allocate(self, nbytes: int) -> tuple[int, NDArray[np.uint8]]:
        """(offset, bytes) of a new block in this rank's own heap, aligned to 128 bytes."""
        return self.mapping.allocate(self.members[self.rank], nbytes)

    def free(self, offset: int, nbytes: int) -> None:
        """Free a block of `allocate`."""
        self.mapping.free(self.members[self.rank], offset, nbytes)

    # ---- peers -------------------------------------------------------------------------------
    def dead(self) -> list[int]:
        """Peers whose process has ended."""
        with self._lock:
            for peer in range(self.size):
                if peer != self.rank and peer not in self._handles and (pid := self.pid(peer)):
                    try:
                        self._handles[peer] = os.pidfd_open(pid)
                    except ProcessLookupError:
                        self._handles[peer] = -1
                    except (OSError, AttributeError):
                        continue  # pidfd is not supported: the peer's death ends in a timeout
            poll = select.poll()
            by_fd = {fd: peer for peer, fd in self._handles.items() if fd >= 0}
            for fd in by_fd:
                poll.register(fd, select.POLLIN)
            gone = [peer for peer, fd in self._handles.items() if fd < 0]
            gone += [by_fd[fd] for fd, event in poll.poll(0) if event & select.POLLIN]
            return sorted(gone)

    def pid(self, rank: int) -> int:
        """A rank's process id; 0 before the rank has opened the arena."""
        return int(self.words(self.control(rank) + PID, 1)[0])

    def readable(self) -> bool:
        """Whether this process may read the memory of all ranks' processes (`process_vm_readv`):
        Yama, a container or another PID namespace may refuse it."""
        bases = [int(self.words(self.control(rank) + BASE, 1)[0]) for rank in range(self.size)]
        return all(self.mapping.is_at(base, self.pid(rank)) for rank, base in enumerate(bases))

    def closed(self, rank: int) -> bool:
        """Whether a rank has closed this communicator or one that it is a part of."""
        if self.words(self.control(rank) + CLOSED, 1)[0]:
            return True
        return self._whole is not None and self._whole[0].closed(self._whole[1][rank])

    def expect(self) -> None:
        """Publish the process ids of a part's ranks before they open it themselves."""
        if self._whole:
            for rank, other in enumerate(self._whole[1]):
                self.words(self.control(rank) + PID, 1)[0] = self._whole[0].pid(other)

    def channel(self, src: int, dst: int) -> NDArray[np.int64]:
        """[1]: the offset of the point-to-point channel between two ranks; 0 if there is none."""
        return self.words(self._channels + 8 * (src * self.size + dst), 1)

    def close(self) -> None:
        """Leave the arena.

        The last rank of a part frees its memory. The memory of the whole communicator is freed with
        the mapping, which the last tensor in it keeps alive.
        """
        with self._lock:
            for fd in self._handles.values():
                if fd >= 0:
                    os.close(fd)
            self._handles.clear()
        left = add_one(self.base + self.start + LEFT)
        if self.start and left == self.size:
            for start, nbytes in self._segments:
                self.mapping.give(start, nbytes)
        self.mapping.leave()
