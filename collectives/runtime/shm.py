"""The CPU runtime: a plan run by processes on shared memory, one interpreter thread a rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from collectives.errors import CollectiveAborted, CollectiveTimeout
from collectives.planning.cost import MEMORY_CHUNK
from collectives.planning.plan import Op, Plan
from collectives.planning.touches import origins, pushed
from collectives.planning.verify import races
from collectives.runtime.arena import BELL, FINISHED, POSTED, Arena
from collectives.runtime.arrivals import Arrivals
from collectives.runtime.diagnose import DIED, DIFFERED, INTERRUPTED, REASONS, TIMED_OUT, blocked
from kernels import interpret as kernel
from kernels.combine import combine_address

_LINE = 128
SLOT_BYTES = MEMORY_CHUNK
DIRECT_SLOTS = 16
"""How far a sender may run ahead where no slot is used: memory does not limit it then."""
STREAM_BYTES = 4 << 20
"""A message from which on copies go past the caches (see `kernels.interpret.move`)."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A contiguous piece of memory, as the runtimes see it; `owner` keeps it."""

    address: int
    nbytes: int
    dtype: str
    itemsize: int
    owner: object = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Region:
    """One plan's flags, slots and cursors; it serves all numbers of chunks of that plan.

    `direct`: ranks may read one another's chunks where they lie (proved by `races`).
    """

    code: NDArray[np.int32]
    flag: NDArray[np.int64]
    slot: NDArray[np.int64]
    origin: NDArray[np.int64]
    pushed: NDArray[np.int64]
    cursor: NDArray[np.int64]
    streams: int
    direct: bool


class ShmRuntime:
    """Runs plans for one rank. All ranks must run the same plans in the same order."""

    def __init__(self, arena: Arena, timeout: float) -> None:
        self.arena, self.timeout = arena, timeout
        self.rank, self.size = arena.rank, arena.size
        self._regions: dict[Plan, Region] = {}
        self._notices = [arena.notices(0), arena.notices(1)]
        control = [arena.base + arena.control(r) for r in range(self.size)]
        self._bells = [c + BELL for c in control]
        peers = [r for r in range(self.size) if r != self.rank]
        self._peer_bells = np.array([self._bells[r] for r in peers], np.int64)
        self._posted = np.array([control[r] + POSTED for r in peers], np.int64)
        self._finished = np.array([control[r] + FINISHED for r in peers], np.int64)
        self._values = np.zeros(len(peers), np.int64)  # that counters are to reach
        self._peers = peers
        self._mine = control[self.rank]
        self._call = np.zeros(kernel.CALL_FIELDS, np.int64)
        self._current = 0  # number of the call that is under way
        self._table = np.zeros(max(self.size, 1), np.int64)

    # ---- meeting -----------------------------------------------------------------------------
    def post(self, call: int, words: Sequence[int]) -> None:
        """Say what this rank's call number `call` is."""
        self._current = call
        self._notices[call % 2][self.rank, : len(words)] = words
        kernel.raise_counter(self._mine + POSTED, call, self._peer_bells)

    def await_posts(self, call: int) -> NDArray[np.int64]:
        """Wait until every rank has posted its call number `call`; a row of words for each."""
        self._await(self._posted, call, "to make its call")
        return self._notices[call % 2]

    def posted(self) -> list[int]:
        """How far each peer's calls have come."""
        return [int(kernel.read_counter(a)) for a in self._posted]

    def done(self, call: int) -> None:
        """This rank needs nothing more for its call number `call`, and nobody needs it."""
        kernel.raise_counter(self._mine + FINISHED, call, self._peer_bells[:0])

    def finish(self, call: int) -> None:
        """Wait until every rank has finished its call number `call` as well."""
        kernel.raise_counter(self._mine + FINISHED, call, self._peer_bells)
        self._await(self._finished, call, "to finish its call")

    def _await(self, counters: NDArray[np.int64], call: int, what: str) -> None:
        start = time.monotonic()

        def late() -> tuple[str, dict[str, int]]:
            i = next((i for i, a in enumerate(counters) if kernel.read_counter(a) < call), 0)
            peer = self._peers[i]
            words = f"rank {self.rank} waits for rank {peer} {what} number {call}"
            return words, {"rank": self.rank, "peer": peer}

        bell, abort = self._bells[self.rank], self.arena.base
        self._values.fill(call)
        while True:
            status = self._interruptible(
                kernel.await_counters, counters, self._values, bell, abort, kernel.YIELDS
            )
            if status == kernel.DONE:
                return
            self._check(status, start, late)

    # ---- running -----------------------------------------------------------------------------
    def run(
        self, plan: Plan, region: Region, place: NDArray[np.int64], buffer: Buffer, op: str,
        direct: NDArray[np.int64] | None = None, arrivals: Arrivals | None = None,
    ) -> None:  # fmt: skip
        """Carry out a verified plan in place on `buffer`; `region` is what `prepare` made for it.

        `place` [chunks, 2] tells where each chunk lies (`place_of`).
        `direct` gives every rank's buffer as an offset into the arena: then chunks are read
        where they lie, nothing is staged, and the caller must `finish` afterwards. `arrivals`,
        which have begun, count the chunks that become final. Raises CollectiveTimeout or
        CollectiveAborted.
        """
        call = self._call
        call[kernel.OWN] = buffer.address
        call[kernel.NUM_CHUNKS] = plan.num_chunks
        call[kernel.STRIDE] = plan.stride
        call[kernel.SLOTS] = plan.slots if direct is None else DIRECT_SLOTS
        call[kernel.SLOT_BYTES] = SLOT_BYTES
        call[kernel.ITEM] = buffer.itemsize
        call[kernel.COMBINE] = combine_address(buffer.dtype, op)
        call[kernel.DIVISOR] = self.size
        call[kernel.DIRECT] = direct is not None
        call[kernel.ABORT] = self.arena.base
        call[kernel.BELL] = self._bells[self.rank]
        call[kernel.STREAMING] = direct is None and buffer.nbytes >= STREAM_BYTES
        call[kernel.FINALS] = 0 if arrivals is None else arrivals.counters.ctypes.data
        call[kernel.QUEUE] = 0 if arrivals is None else arrivals.bell.ctypes.data
        peers = self._table if direct is None else direct + self.arena.base
        at = np.zeros((region.streams, 3), np.int64)
        before, start = -1, time.monotonic()

        def stuck() -> tuple[str, dict[str, int]]:
            waits = blocked(plan, self.rank, at)
            if not waits:
                return f"rank {self.rank} was inside a step", {"rank": self.rank}
            dead = self._dead()
            first = next((w for w in waits if w.peer in dead), waits[0])
            return str(first), first.fields()

        while True:
            status = self._interruptible(
                kernel.interpret, region.code, call, place, region.flag, self._peer_bells,
                region.slot, region.origin, region.pushed, region.cursor, at, peers, self._table,
            )  # fmt: skip
            if status == kernel.DONE:
                return
            if (progress := int(region.cursor.sum())) != before:
                before, start = progress, time.monotonic()
            self._check(status, start, stuck)

    def prepare(self, plan: Plan) -> Region:
        """Flags and slots for a plan, made once for all its numbers of chunks."""
        template = plan.with_chunks(plan.stride)
        if template not in self._regions:
            self._regions[template] = self._lay_out(plan)
        return self._regions[template]

    def _lay_out(self, plan: Plan) -> Region:
        n = len(plan.connections)
        widest = max(
            (len(step.connections) for s in plan.streams for body in s.phases for step in body),
            default=0,
        )
        if widest > len(self._table):
            self._table = np.zeros(widest, np.int64)
        shared = _shared_slots(plan)
        flags = 2 * _LINE * n
        start = self.arena.reserve(flags + len(set(shared)) * plan.slots * SLOT_BYTES + SLOT_BYTES)
        base = self.arena.base + start
        first_slot = base + -(-flags // 4096) * 4096
        code = plan.encode(self.rank)
        origin = origins(plan)
        return Region(
            code,
            np.array([(base + 2 * i * _LINE, base + (2 * i + 1) * _LINE) for i in range(n)],
                     np.int64).reshape(n, 2),
            np.array([first_slot + g * plan.slots * SLOT_BYTES for g in shared], np.int64),
            np.array([origin.get(i, 0) for i in range(n)], np.int64),
            np.array(pushed(plan), np.int64),
            np.zeros((n, 6), np.int64),
            int(code[0]),
            plan.collective != "alltoall"  # whose chunks lie elsewhere on every rank
            and not races(replace(plan, slots=DIRECT_SLOTS), direct=True),
        )  # fmt: skip

    # ---- not hanging -------------------------------------------------------------------------
    def _interruptible(self, function: Any, *args: Any) -> int:
        try:
            return int(function(*args))
        except KeyboardInterrupt:
            self.give_up(INTERRUPTED)
            raise

    def give_up(self, why: int, blamed: int | None = None, who: int | None = None) -> None:
        """Stop all ranks: whoever waits, now or later, raises CollectiveAborted. `who` gave up:
        this rank if None."""
        abort, who = self.arena.abort, self.rank if who is None else who
        if not abort[0]:
            abort[1:4] = who, why, who if blamed is None else blamed
        kernel.raise_counter(self.arena.base, 1, self._peer_bells)

    def _check(self, status: int, start: float, where: Any) -> None:
        """Raise if someone gave up, a peer died or the deadline has passed."""
        if status == kernel.IDLE:
            if dead := self._dead():
                self.give_up(DIED, dead[0])
            elif time.monotonic() - start < self.timeout:
                return
            else:
                words, fields = where()
                self.give_up(TIMED_OUT, fields.get("peer"))
                raise CollectiveTimeout(f"{words} for {self.timeout:g} s", **fields)
        self.raise_aborted(where)

    def patience(self, start: float, where: Any) -> None:
        """To be called again and again while something else than the interpreter waits, since
        `start`. Raises CollectiveTimeout or CollectiveAborted."""
        self._check(kernel.DONE if self.arena.abort[0] else kernel.IDLE, start, where)

    def _dead(self) -> list[int]:
        """Peers that ended before they were done with this call; later they may."""
        finished = dict(zip(self._peers, self._finished, strict=True))
        return [p for p in self.arena.dead() if kernel.read_counter(finished[p]) < self._current]

    def close(self) -> None:
        """Let go of the shared memory."""
        self._notices.clear()

    def raise_aborted(self, where: Any = None) -> NoReturn:
        """Raise CollectiveAborted in the words of whoever gave up first."""
        _, who, why, blamed = (int(v) for v in self.arena.abort)
        words, fields = where() if where else (f"rank {self.rank} cannot go on", {})
        culprit = (
            f"rank {blamed} (process {self.arena.pid(blamed)})" if why == DIED else (f"rank {who}")
        )
        reason = f"{culprit} {REASONS[why]}"
        if why == TIMED_OUT:
            reason += f" for rank {blamed}"
        elif why == DIFFERED:
            reason += f" rank {blamed}"
        raise CollectiveAborted(f"{reason}; {words}", **fields)


def _shared_slots(plan: Plan) -> list[int]:
    """For each connection the number of its slot ring: those always sent together share one."""
    sends: dict[int, list[tuple[int, ...]]] = {i: [] for i in range(len(plan.connections))}
    place = 0
    for stream in plan.streams:
        for body in stream.phases:
            for step in body:
                place += 1
                if step.op is Op.SEND:
                    for i in step.connections:
                        sends[i].append((place,))
    rings: dict[tuple[tuple[int, ...], ...], int] = {}
    return [rings.setdefault(tuple(sends[i]) or ((-i - 1,),), len(rings)) for i in sends]


def place_of(plan: Plan, nbytes: int, rank: int) -> NDArray[np.int64]:
    """First byte and number of bytes of every chunk of a message of `nbytes`.

    A chunk that a rank only passes on has a size there too, and no place.
    """
    place = np.array(plan.chunk_bounds(nbytes, rank), np.int64).reshape(-1, 2)
    place[:, 1] = plan.chunk_sizes(nbytes)
    return place


def compile_kernels() -> None:
    """Load (at the very first time: compile) the machine code of the common case."""
    combine_address("float32", "sum")
    none = np.zeros((0, 2), np.int64)
    word = np.zeros(1, np.int64)
    kernel.interpret(
        np.array([0, 1], np.int32), np.ones(kernel.CALL_FIELDS, np.int64), none, none, word[:0],
        word[:0], word[:0], word[:0], np.zeros((0, 6), np.int64), np.zeros((0, 3), np.int64),
        word, word,
    )  # fmt: skip
    kernel.await_counters(word[:0], word[:0], 0, 0, 0)
    kernel.raise_counter(int(word.ctypes.data), 1, word[:0])
    kernel.read_counter(int(word.ctypes.data))
