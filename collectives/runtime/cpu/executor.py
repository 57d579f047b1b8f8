"""Run plans on the CPU: ranks are processes with shared memory and one interpreter thread each."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from struct import Struct

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.planning.collective import COLLECTIVES, Layout
from linkweave.collectives.planning.layout import Staging, chunk_bytes
from linkweave.collectives.planning.simulate import MEMORY_CHUNK
from linkweave.collectives.runtime.buffer import Buffer
from linkweave.collectives.runtime.cpu.control import HostControl
from linkweave.collectives.runtime.cpu.layer_counters import LayerCounters
from linkweave.collectives.runtime.cpu.mapping import pages
from linkweave.collectives.runtime.diagnose import blocked
from linkweave.collectives.runtime.encoded import Encoded
from linkweave.kernels.plan import counters
from linkweave.kernels.plan import interpreter as kernel
from linkweave.kernels.plan.combine import combine_address

log = logging.getLogger("linkweave")

_LINE = 128
SLOT_BYTES = MEMORY_CHUNK
NONTEMPORAL_BYTES = 64 << 10
"""Messages of at least this size are copied with non-temporal stores where they pass sooner past
the caches (`interpreter.move`)."""
HUGE_BYTES = 64 << 20
"""Messages that nothing is combined into, of so many bytes on all ranks together, are written past
the caches, which could not hold them; so no line is fetched only to be overwritten."""
_IDLE = counters.SLEEPS * counters.SLEEP_NS * 1e-9  # s of sleep before `call` returns IDLE
_NO_BELLS, _NO_NEEDS = np.zeros(0, np.int64), np.zeros((0, 0), np.int64)
_NO_READS = np.zeros((0, 4), np.int64)
_CALLS = 256  # after so many it may be measured again how blocks pass between cores
_CALL = Struct(f"{kernel.CALL_FIELDS}q")


@dataclass(frozen=True, slots=True)
class Region:
    """A plan's flags, slots and cursors, which serve any number of chunks.

    `start` is the offset of the plan's `memory_of` bytes in the mapping. The arrays are those of
    `interpreter.call`.
    """

    encoded: Encoded
    start: int
    code: NDArray[np.int32]
    flag: NDArray[np.int64]
    slot: NDArray[np.int64]
    cursor: NDArray[np.int64]
    at: NDArray[np.int64]
    peers: NDArray[np.int64]
    table: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Ready:
    """A call that can be made any number of times.

    `notice` and `state` are arrays of `interpreter.call`, and `frames` its arguments for even and
    odd calls; `arrays` are those that they use and nobody else keeps; `choice` is what the call was
    planned for (`HostCalls._choice`); `needs` [layers, tracks] is the layer-chunk table of a
    gradient queue (`planning.dataflow.table`); `writes` says whether this rank copies or combines
    any chunk of the message, and `clean`, whether only such as lie in its result and are read by no
    other rank, so that the result may lie elsewhere.
    `span` is the bytes of the buffer if the plan may run directly in shared memory, otherwise 0;
    `pulls` says whether ranks read each other's inputs, if they can.
    """

    region: Region
    notice: NDArray[np.int64]
    state: NDArray[np.int64]
    frames: tuple[NDArray[np.int64], ...]
    arrays: tuple[NDArray[np.int64], ...]
    label: str
    staged: Staging
    choice: tuple[object, ...]
    needs: NDArray[np.int64] | None
    writes: bool
    clean: bool
    span: int
    pulls: bool

    @property
    def num_chunks(self) -> int:
        return int(self.state[kernel.NUM_CHUNKS])

    @property
    def direct(self) -> bool:
        """Whether the last call read and wrote the ranks' buffers directly, without slots."""
        return bool(self.state[kernel.DIRECT] == 1)

    @property
    def pulled(self) -> bool:
        """Whether they did so in the last call."""
        return bool(self.state[kernel.DIRECT] == kernel.PULLED)


def memory_of(encoded: Encoded) -> int:
    """Bytes of shared memory for a plan's flags and slots."""
    return _flags_of(encoded) + encoded.rings * encoded.slots * SLOT_BYTES


def _flags_of(encoded: Encoded) -> int:
    return pages(2 * _LINE * len(encoded.ends))


class CpuExecutor:
    """Carries out plans for one rank: load a plan, prepare a call once, and run it often."""

    def __init__(self, control: HostControl) -> None:
        self.control = control
        self.rank, self.size, self.arena = control.rank, control.size, control.arena
        self._pids = np.zeros(self.size, np.int64)
        self._readable: bool | None = None  # None: not tried yet
        self._look_at = _CALLS  # the call from which on cores may be measured again

    def readable(self) -> bool:
        """Whether this rank may read the other ranks' memory. All ranks have opened the arena."""
        if self._readable is None:
            self._pids[:] = [self.arena.pid(r) for r in range(self.size)]
            self._readable = self.arena.readable()
        return self._readable

    def load(self, encoded: Encoded, start: int) -> Region:
        """The region of a plan whose memory rank 0 has reserved at offset `start`."""
        self.arena.adopt(start, memory_of(encoded))
        n, code = len(encoded.ends), encoded.codes[self.rank]
        first = self.arena.base + start
        flags = first + 2 * _LINE * np.arange(n)
        slots = first + _flags_of(encoded) + encoded.ring * encoded.slots * SLOT_BYTES
        most_peers = max(self.size, n)  # of one step
        return Region(
            encoded, start, code, np.stack([flags, flags + _LINE], axis=1), slots,
            np.zeros((n, 6), np.int64), np.zeros((int(code[0]), 3), np.int64),
            np.zeros(self.size, np.int64), np.zeros(most_peers, np.int64),
        )  # fmt: skip

    def reset(self, region: Region) -> None:
        """Clear the region after a call that was not carried out.

        No rank may use it meanwhile, and all ranks must agree on another call before one does.
        """
        region.cursor.fill(0)
        if self.rank == 0:  # the flags are shared
            self.arena.words(region.start, _flags_of(region.encoded) // 8).fill(0)

    def prepare(
        self, region: Region, notice: NDArray[np.int64], table: NDArray[np.int64], num_chunks: int,
        buffer: Buffer, op: str, label: str, staged: Staging,
        needs: NDArray[np.int64] | None = None, choice: tuple[object, ...] = (),
        reads: NDArray[np.int64] | None = None,
    ) -> Ready:  # fmt: skip
        """Prepare a call of `num_chunks` chunks; `table` is its `block_table`, `staged` says where
        its input and result lie, and `reads` what to read from other ranks' inputs, if they allow
        it.

        Raises CollectiveError if a chunk does not fit a slot.
        """
        control, encoded = self.control, region.encoded
        largest = chunk_bytes(table, num_chunks)
        if encoded.rings and largest > SLOT_BYTES:
            raise CollectiveError(f"chunks of {largest} bytes do not fit slots of {SLOT_BYTES}")
        state = np.zeros(kernel.STATE_FIELDS, np.int64)
        state[kernel.NUM_CHUNKS] = num_chunks
        state[kernel.STRIDE], state[kernel.SLOTS] = encoded.stride, encoded.slots
        state[kernel.UNITS], state[kernel.CHUNK_BYTES] = len(table), largest
        state[kernel.SLOT_BYTES], state[kernel.ITEM] = SLOT_BYTES, buffer.itemsize
        state[kernel.COMBINE] = combine_address(buffer.dtype, op)
        state[kernel.DIVISOR] = self.size
        state[kernel.LARGE] = buffer.nbytes >= NONTEMPORAL_BYTES
        state[kernel.PAST] = self.arena.past_address
        collective = COLLECTIVES[encoded.collective]
        rooted = collective.layout is Layout.PER_RANK and collective.root == "rank"
        nbytes = (1 if rooted else self.size) * buffer.nbytes  # rooted: other ranks have only rows
        state[kernel.HUGE] = not collective.combines and nbytes >= HUGE_BYTES
        state[kernel.ABORT], state[kernel.BELL] = self.arena.abort_address, control.bell
        state[kernel.BASE], state[kernel.RANK] = self.arena.base, self.rank
        state[kernel.POSTED], state[kernel.FINISHED] = control.posted, control.finished
        state[kernel.PUT], state[kernel.NBYTES] = staged.put, staged.given
        state[kernel.KEEP_FROM], state[kernel.KEEP_TO] = staged.keep_from, staged.keep_to
        state[kernel.KEEP_NBYTES] = staged.kept
        state[kernel.GET], state[kernel.OUT_NBYTES] = staged.get, staged.result
        state[kernel.PULL] = reads is not None
        written, sent = (
            {chunk % len(table) for chunk in chunks} for chunks in encoded.accesses(self.rank)
        )
        stop = staged.get + staged.result
        clean = not written & sent and self.rank not in encoded.pushed and all(
            staged.get <= first and first + nbytes <= stop
            for first, nbytes in table[sorted(written)].tolist() if nbytes
        )  # fmt: skip
        pulls = reads is not None
        reads = _NO_READS if reads is None else reads
        frames = tuple(
            kernel.frame_of([
                state, notice, posted, control.others, control.bells, _NO_BELLS, _NO_NEEDS, reads,
                self._pids, region.code, table, region.flag, region.slot, encoded.origin,
                encoded.pushed, region.cursor, region.at, region.peers, region.table,
            ])
            for posted in control.notices
        )  # fmt: skip
        return Ready(
            region, notice, state, frames, (table, reads, *control.notices), label, staged, choice,
            needs, bool(written), clean, buffer.nbytes if encoded.direct else 0, pulls,
        )  # fmt: skip

    def run(
        self, ready: Ready, address: int, source: int = 0, shift: int = 0, out: int = 0,
        given: int = 0, result: int = 0, layer_counters: LayerCounters | None = None,
    ) -> bool:  # fmt: skip
        """Agree with all ranks on a call and carry it out; False if the ranks' calls differ.

        Works on the message at `address`, to which the input at `source` is copied first, if there
        is one. Chunks are copied and combined `shift` bytes from where they lie in the message. In
        the end, the result is copied to `out`, if that is given. If the calls differ, nothing is
        written. `ready.notice` ends with an address at which other ranks may read this rank's
        input, and the message's offset in shared memory; -1 stands for none. If all ranks have an
        offset and the plan allows it, they read each other's messages directly. In a call that
        pulls, they read the inputs, each its `result` from those at `given`, if all can be read:
        the offset is then the input's.
        Final chunks are counted in `layer_counters`, which must have begun.
        Raises CollectiveTimeout or CollectiveAborted.
        """
        control, region, state = self.control, ready.region, ready.state
        encoded = region.encoded
        if not ready.staged.nbytes and control.aborted():  # else a barrier would end: all have come
            control.raise_aborted()
        control.number += 1
        if control.number >= self._look_at:
            self._look_at = control.number + _CALLS
            self.arena.measure_cores()
        frame, finals = ready.frames[control.number % 2], 0
        if layer_counters is not None:
            finals = layer_counters.counters.ctypes.data
            queue = kernel.frame_of([layer_counters.bells, layer_counters.needs])
            frame[[kernel.WAITERS, kernel.NEEDS]] = queue
        _CALL.pack_into(  # much faster than to set the fields one by one
            state,  # type: ignore[arg-type]
            0, control.number, kernel.POST, address, source, shift, out, given, result,
            encoded.direct, control.yields, finals,
        )  # fmt: skip
        before, start = -1, 0.0  # the progress at the last IDLE, and when it was reached

        def where() -> tuple[str, dict[str, int]]:
            if state[kernel.STAGE] == kernel.AGREE:
                return control.late(0, "make its call")
            if state[kernel.STAGE] == kernel.FINISH:
                return control.late(1, "finish its call")
            waits = blocked(encoded, self.rank, region.at)
            if not waits:
                return f"{control.name(self.rank)} was inside a step", {"rank": self.rank}
            dead = self.arena.dead()
            first = next((w for w in waits if w.peer in dead), waits[0])
            return str(first), first.fields()

        while True:
            status = control.interruptible(kernel.call, frame)
            if status == counters.DONE:
                return True
            if status == kernel.DIFFERS:
                return False
            if status == kernel.UNREADABLE:  # all ranks see it, and make the call anew by the plan
                log.info("rank %d: not all memory can be read; slots are used", self.rank)
                self._readable, ready.notice[-2:] = False, -1
                return self.run(ready, address, source, shift, out, given, result, layer_counters)
            if control.health.closed:  # by another thread, meanwhile
                control.health.check()
            progress = int(region.cursor.sum()) + int(state[kernel.STAGE])
            if progress != before:
                before, start = progress, time.monotonic() - _IDLE
            control.check(status, start, where)


def compile_kernels() -> None:
    """Load the machine code of the common case, or compile it if it is not cached yet."""
    combine_address("float32", "sum")
    word, pairs = np.zeros(2, np.int64), np.zeros((0, 2), np.int64)
    none, state = word[:0], np.zeros(kernel.STATE_FIELDS, np.int64)
    notices = np.full((2, 4), -1, np.int64)[:, :3]  # rows apart, as several ranks have them
    finished = np.zeros(1, np.int64)
    state[kernel.STRIDE] = state[kernel.UNITS] = 1
    state[kernel.FINISHED] = state[kernel.POSTED] = finished.ctypes.data
    rows, blocks = np.zeros((2, 0), np.int64), np.zeros((0, 0), np.int64)
    arrays = (
        state, np.full(2, -1, np.int64), notices, rows, none, none, blocks, _NO_READS, none,
        np.array([0, 1], np.int32), pairs, pairs, none, none, none,
        np.zeros((0, 6), np.int64), np.zeros((0, 3), np.int64), word, word,
    )  # fmt: skip
    kernel.call(kernel.frame_of(arrays))
    counters.await_counters(none, none, 0, 0, 0)
    counters.raise_counter(int(word.ctypes.data), 1, none)
    counters.read_counter(int(word.ctypes.data))
    counters.claim(int(word.ctypes.data), 0, 1)
    counters.add_one(int(word.ctypes.data))
