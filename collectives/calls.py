"""One rank's calls on CPU tensors: agreed with all others before any data moves, then made."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.choices import Choices
from collectives.errors import CollectiveError
from collectives.planning.goals import Root
from collectives.planning.plan import Plan
from collectives.planning.planner import plan_collective
from collectives.request import EXCHANGES, NOTHING, Request, difference, notice
from collectives.runtime.arena import Arena
from collectives.runtime.shm import SLOT_BYTES, Buffer, Region, ShmRuntime, place_of
from collectives.settings import Settings
from collectives.tensors import Block, as_buffer
from collectives.trace import CALLS, KERNELS, Trace
from topology import Topology

log = logging.getLogger("linkweave")

_Placed = tuple[Plan, Region, NDArray[np.int64]]


class Calls:
    """What a communicator's collectives have in common; one call at a time."""

    def __init__(self, arena: Arena, topology: Topology, settings: Settings) -> None:
        self.rank, self.size = arena.rank, arena.size
        self.choices = Choices(topology, settings.order)
        self.runtime = ShmRuntime(arena, settings.timeout)
        self.request = self.choices.request
        self.made = 0
        self.closed = False
        self.broken: str | None = None
        self._arena = arena
        self._settings = settings.checksum(topology)
        self.trace = Trace(self.rank)
        self._plans: dict[tuple[str, int, str, Root], _Placed] = {}
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raise CollectiveError unless calls can be made."""
        if self.closed:
            raise CollectiveError("this communicator is closed")
        if self.broken:
            raise CollectiveError(
                f"this communicator failed before ({self.broken}); make a new one"
            )

    def differ(self) -> bool:
        """Whether a peer is in a call that this rank has not made."""
        posted = self.runtime.posted()
        return any(call > self.made for call in posted)

    # ---- tensors -----------------------------------------------------------------------------
    def buffer(self, x: Any, written: bool = True) -> tuple[Buffer, Callable[[], None]]:
        return as_buffer(x, written)

    def block(self, nbytes: int) -> NDArray[np.uint8]:
        """Bytes of memory that all ranks share; given back with the last array over them."""
        offset, memory = self._arena.allocate(nbytes)
        block = Block(memory)
        weakref.finalize(block, self._arena.free, offset)
        return np.asarray(block)

    def offset_of(self, memory: NDArray[np.uint8]) -> int:
        """Where a `block` lies for all ranks."""
        return self._arena.offset_of(int(memory.ctypes.data), memory.nbytes)

    def bytes_at(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """What any rank's block holds there."""
        return self._arena.bytes_at(offset, nbytes)

    def scratch(self, like: Buffer, nbytes: int) -> Buffer:
        memory = self.block(nbytes)
        return Buffer(int(memory.ctypes.data), like.nbytes, like.dtype, like.itemsize, memory)

    def staged(self, whole: Buffer) -> Buffer:
        return self.scratch(whole, whole.nbytes)

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        ctypes.memmove(dst, src, nbytes)

    # ---- calls -------------------------------------------------------------------------------
    @contextmanager
    def telling(self) -> Iterator[None]:
        """Bad arguments of one rank are told to the others, whose calls must not pair up wrong."""
        try:
            yield
        except Exception as error:
            try:
                self.make(Request("refused", NOTHING))
            except CollectiveError as others:
                if self.broken:
                    raise others from error
            raise error

    def make(self, request: Request) -> None:
        with self._calling(), self.trace.call(request.label or request.kind):
            self._agree_and_run(request)

    def meet(self, request: Request) -> None:
        """Agree with all ranks on a call that is made elsewhere."""
        with self._calling():
            self._agree(request)
            self.runtime.finish(self.made)

    def gather(self, what: str, said: bytes) -> list[bytes]:
        """What every rank says of one of `EXCHANGES`, by rank; a part of a page each."""
        with self._calling():
            page = self._arena.page(self.made + 1)
            self._arena.say(said, page)
            self._agree(Request("exchange", NOTHING, root=EXCHANGES.index(what)))
            found = [self._arena.said(rank, page) for rank in range(self.size)]
            self.runtime.done(self.made)
            return found

    @contextmanager
    def _calling(self) -> Iterator[None]:
        with self._lock:
            self.check()
            try:
                yield
            except _Mismatch as error:
                raise CollectiveError(str(error)) from None
            except BaseException as error:
                self.broken = f"{type(error).__name__}: {error}"
                raise

    def _agree(self, request: Request, extra: int = 0) -> NDArray[np.int64]:
        """Wait until all ranks ask for the same; what each adds. Then `runtime.done` or `finish`
        must follow."""
        self.made += 1
        said = notice(request, self._settings if self.made == 1 else 0)
        self.runtime.post(self.made, (*said, extra))
        rows = self.runtime.await_posts(self.made)
        words = len(said)
        if (rows[:, :words] != said).any():
            theirs = [tuple(row) for row in rows[:, :words].tolist()]
            # every rank sees all notices, so every rank raises, and all may go on
            self.runtime.finish(self.made)
            raise _Mismatch(difference(self.made, theirs))
        return rows[:, words]

    def _agree_and_run(self, request: Request) -> None:
        buffer, source = request.buffer, request.source
        offset = self._arena.offset_of(buffer.address, buffer.nbytes)
        start = time.monotonic()
        with self.trace.phase("agree"):
            offsets = self._agree(request, offset)
        if source is not None and source.address != buffer.address:
            ctypes.memmove(buffer.address, source.address, source.nbytes)
        if buffer.nbytes == 0 or self.size == 1:
            if request.arrivals:
                request.arrivals.begin(None, self.rank, 0, request.layers or ())
            self.runtime.done(self.made)
            return
        plan, region, place = self._plan(request)
        if request.arrivals:
            request.arrivals.begin(plan, self.rank, buffer.nbytes, request.layers or ())
        direct = region.direct and offset >= 0 and offsets.min() >= 0
        with self.trace.phase("run"):
            where = offsets.copy() if direct else None
            self.runtime.run(plan, region, place, buffer, request.op, where, request.arrivals)
        if direct:
            with self.trace.phase("finish"):
                self.runtime.finish(self.made)
        else:
            self.runtime.done(self.made)
        if self.trace.level >= CALLS:
            took = (time.monotonic() - start) * 1e6
            self.trace.say(CALLS, f"call {self.made}: {request.label} {buffer.dtype} {request.op}, "
                           f"{took:.0f} us{', in shared memory' if direct else ''}")  # fmt: skip
            self.trace.flags(plan)

    def _plan(self, request: Request) -> _Placed:
        """The algorithm is the topology's; the number of chunks is this runtime's own tuning."""
        kind, nbytes, root = request.kind, request.buffer.nbytes, request.root
        key = (kind, nbytes, request.algorithm, root)
        if key not in self._plans:
            plan = self.choices.plan(request)
            chunks = -(-plan.volume(nbytes) // SLOT_BYTES)
            if chunks > plan.num_chunks:
                chunks = -(-chunks // plan.stride) * plan.stride
                topology = self.choices.topology
                plan = plan_collective(kind, topology, nbytes, root, plan.algorithm, chunks)
            place = place_of(plan, nbytes, self.rank)
            self._plans[key] = plan, self.runtime.prepare(plan), place
            log.info("%s: %d chunks", request.label, plan.num_chunks)
            self.trace.planned(request.label, plan, self.choices.topology, nbytes)
            self.trace.say(KERNELS, f"{request.label}: interpreter and combiners by Numba")
        return self._plans[key]


class _Mismatch(Exception):
    """Ranks asked for different things; nothing has moved."""
