"""One rank's calls: agreed with all others before any data moves, then carried out."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from collectives.errors import CollectiveError
from collectives.planning.plan import Plan
from collectives.planning.planner import plan_collective
from collectives.request import KINDS, NAMES, NOTHING, Request, difference
from collectives.runtime.arena import Arena
from collectives.runtime.reference import DTYPES, OPS
from collectives.runtime.shm import SLOT_BYTES, Buffer, Region, ShmRuntime, place_of
from topology import Topology

log = logging.getLogger("linkweave")

# one tree, or the ranks' own: every element is combined in the same order, whatever the size
_FIXED = {
    "allreduce": "overlapped_tree",
    "reduce": "shortest_tree",
    "reduce_scatter": "shortest_trees",
}
_Placed = tuple[Plan, Region, NDArray[np.int64]]


class Calls:
    """What a communicator's collectives have in common; one call at a time."""

    def __init__(self, arena: Arena, topology: Topology, timeout: float, order: str) -> None:
        self.rank, self.size = arena.rank, arena.size
        self.topology, self.order = topology, order
        self.runtime = ShmRuntime(arena, timeout)
        self.made = 0
        self.closed = False
        self.broken: str | None = None
        self._arena = arena
        self._plans: dict[tuple[str, int, str, int], _Placed] = {}
        self._algorithms: dict[tuple[int, str], str] = {}
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

    def request(
        self, kind: str, buffer: Buffer, op: str, root: int = 0, algorithm: str = "auto",
        layout: int = 0,
    ) -> Request:  # fmt: skip
        """What this rank is about to ask for. Raises CollectiveError where that is no sense."""
        if op not in OPS:
            raise CollectiveError(f"unknown op {op!r}; choose from {', '.join(OPS)}")
        if op == "avg" and "int" in buffer.dtype:
            raise CollectiveError(f"avg is not defined for {buffer.dtype}; use sum")
        if kind == "allreduce":
            algorithm = self._algorithm(buffer.nbytes, algorithm)
        else:  # what cannot be planned is refused before any rank waits for it
            self._planned(kind, buffer.nbytes, root)
        return Request(kind, buffer, op, root, algorithm, layout)

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
        with self._lock:
            self.check()
            try:
                self._agree_and_run(request)
            except _Mismatch as error:
                raise CollectiveError(str(error)) from None
            except BaseException as error:
                self.broken = f"{type(error).__name__}: {error}"
                raise

    def _agree_and_run(self, request: Request) -> None:
        kind, buffer, op, root = request.kind, request.buffer, request.op, request.root
        self.made += 1
        call = self.made
        settings = crc32(f"{self.topology.to_json()}{self.order}".encode()) if call == 1 else 0
        algorithm = request.algorithm
        said = (
            KINDS.index(kind), OPS.index(op), DTYPES.index(buffer.dtype),
            buffer.nbytes // buffer.itemsize, root, NAMES.index(algorithm), settings,
            request.layout,
        )  # fmt: skip
        offset = self._arena.offset_of(buffer.address, buffer.nbytes)
        self.runtime.post(call, (*said, offset))
        rows = self.runtime.await_posts(call)
        words = len(said)
        if (rows[:, :words] != said).any():
            theirs = [tuple(row) for row in rows[:, :words].tolist()]
            # every rank sees all notices, so every rank raises, and all may go on
            self.runtime.finish(call)
            raise _Mismatch(difference(call, theirs))
        if buffer.nbytes == 0 or self.size == 1:
            self.runtime.done(call)
            return
        plan, region, place = self._plan(kind, buffer.nbytes, algorithm, root)
        offsets = rows[:, words]
        if region.direct and offset >= 0 and offsets.min() >= 0:
            self.runtime.run(plan, region, place, buffer, op, offsets.copy())
            self.runtime.finish(call)
        else:
            self.runtime.run(plan, region, place, buffer, op)
            self.runtime.done(call)

    def _algorithm(self, nbytes: int, name: str) -> str:
        """What `name` stands for; one that cannot run is refused before any rank waits for it."""
        key = (nbytes, name)
        if key not in self._algorithms:
            if name != "auto" and self.order == "fixed":
                raise CollectiveError(f"order='fixed' chooses the algorithm: do not ask for {name}")
            self._algorithms[key] = self._planned("allreduce", nbytes, 0, name).algorithm
        return self._algorithms[key]

    def _planned(self, kind: str, nbytes: int, root: int, algorithm: str = "auto") -> Plan:
        """The plan by that algorithm, or by the one that the order of combining asks for."""
        if algorithm == "auto" and self.order == "fixed":
            algorithm = _FIXED.get(kind, "auto")
        return plan_collective(kind, self.topology, nbytes, root, algorithm)

    def _plan(self, kind: str, nbytes: int, algorithm: str, root: int) -> _Placed:
        """The algorithm is the topology's; the number of chunks is this runtime's own tuning."""
        key = (kind, nbytes, algorithm, root)
        if key not in self._plans:
            plan = self._planned(kind, nbytes, root, algorithm)
            chunks = -(-plan.volume(nbytes) // SLOT_BYTES)
            if chunks > plan.num_chunks:
                chunks = -(-chunks // plan.stride) * plan.stride
                plan = plan_collective(kind, self.topology, nbytes, root, plan.algorithm, chunks)
            place = place_of(plan, nbytes, self.rank)
            self._plans[key] = plan, self.runtime.prepare(plan), place
            log.info(
                "%s of %d bytes: %s", kind, nbytes, f"{plan.algorithm}, {plan.num_chunks} chunks"
            )
        return self._plans[key]


class _Mismatch(Exception):
    """Ranks asked for different things; nothing has moved."""
