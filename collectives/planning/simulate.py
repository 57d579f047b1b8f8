"""The simulator: when each step of a plan happens on the modelled links."""

from __future__ import annotations

import json
import math
import os
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.plan import MOST_BYTES, Op, Plan
from linkweave.kernels.plan.timeline import compiled_play, play
from linkweave.topology import Topology, Vertex, load
from linkweave.topology.checks import integer
from linkweave.topology.text import html_table

_MOST_SENDS = 1 << 25  # which fill a gigabyte with results
_ROUNDING = 1e-9
_SHORT = 40_000  # steps; for more, importing Numba to compile the loop pays off


@dataclass(frozen=True, slots=True)
class Send:
    """One chunk on one connection: it occupies its track until `end`, its links until `free`."""

    connection: int
    chunk: int
    start: float
    free: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated run; all times are in seconds."""

    plan: Plan
    nbytes: int
    seconds: float
    first_chunk_by_rank: tuple[float, ...]
    busy: dict[tuple[Vertex, Vertex], float] = field(repr=False)
    rows: tuple[NDArray[Any], ...] = field(repr=False, compare=False)
    """One array for each field of `Send`, in the order in which the sends start."""

    def __repr__(self) -> str:
        return (
            f"<Timeline: {self.plan.collective} of {self.nbytes} bytes by {self.plan.algorithm} on "
            f"{self.plan.size} ranks, {self.seconds * 1e6:.1f} us, {self.algbw / 1e9:.2f} GB/s>"
        )

    def _repr_html_(self) -> str:
        """For notebooks: the figures, and the links that are busy longest."""
        links = sorted(self.utilisation.items(), key=lambda link: -link[1])[:5]
        return html_table(repr(self)[1:-1], {
            "first chunk ready": f"{self.first_chunk_seconds * 1e6:.1f} us",
            **{f"link {a} to {b}": f"busy {share:.0%}" for (a, b), share in links},
        })  # fmt: skip

    @cached_property
    def sends(self) -> tuple[Send, ...]:
        return tuple(map(Send, *(row.tolist() for row in self.rows)))

    @property
    def algbw(self) -> float:
        """The message's bytes divided by the time, in bytes/s (0 if nothing moves)."""
        return self.nbytes / self.seconds if self.seconds else 0.0

    @property
    def first_chunk_seconds(self) -> float:
        """When chunk 0 is final on all ranks: the gradient turnaround time."""
        return max(self.first_chunk_by_rank)

    @property
    def chunk_seconds(self) -> NDArray[np.float64]:
        """[num_chunks]: when each chunk is final on all ranks, which is when the last of its sends
        has arrived. Zeros if nothing moves."""
        found = np.zeros(self.plan.num_chunks)
        _, chunk, _, _, end = self.rows
        np.maximum.at(found, chunk, end)
        return found

    @property
    def utilisation(self) -> dict[tuple[Vertex, Vertex], float]:
        """For each directed link, the share of the time in which its physical links carry bytes."""
        return {k: (b / self.seconds if self.seconds else 0.0) for k, b in self.busy.items()}

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write Chrome trace JSON (chrome://tracing, Perfetto) with one row for each connection."""
        rows = {index: row for row, index in enumerate(sorted({s.connection for s in self.sends}))}
        title = f"{self.plan.algorithm}, {self.nbytes} bytes"
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": title}},
            *({"ph": "M", "name": "thread_name", "pid": 0, "tid": row,
               "args": {"name": str(self.plan.connections[index])}} for index, row in rows.items()),
            *({"ph": "X", "name": f"chunk {s.chunk}", "pid": 0, "tid": rows[s.connection],
               "ts": s.start * 1e6, "dur": (s.free - s.start) * 1e6,
               "args": {"chunk": s.chunk, "seen_us": s.end * 1e6}} for s in self.sends),
        ]  # fmt: skip
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))


def simulate(
    plan: Plan, topology: Topology | str, nbytes: int, alpha_s: float | None = None
) -> Timeline:
    """Simulate a verified plan for a message of `nbytes`.

    A send starts when its track and one strand (`Link.parallel`) of every link on its path are
    free. It occupies the track for alpha + bytes/bandwidth seconds, and each strand for
    bytes/bandwidth. If a link has enough strands, each connection has its own; otherwise connection
    i of the link takes strand i mod strands, first come first served. The port of a switch is one
    strand with the bandwidth of all its links.

    A send to several connections starts on each of them as it becomes free, and occupies its track
    until the last ends; it crosses a link into common memory (`Link.stores`) once, and any other
    link once for each connection. Signals and arithmetic take no time. The result is deterministic:
    compiled code, which runs long plans and all plans once Numba is loaded, gives the same bits.
    `alpha_s` (s) replaces the latencies of the links. Raises PlanError if the plan hangs or has too
    many sends, or if the topology lacks a link.
    """
    nbytes = integer(nbytes, "nbytes", 0, MOST_BYTES, PlanError)
    return _simulate(plan, load(topology), nbytes, alpha_s)


def group_sends(plan: Plan, topology: Topology) -> int:
    """Return the number of sends of one group, counted for each connection."""
    return _layout(plan.with_chunks(plan.stride), topology).sends


def seconds_within(plan: Plan, topology: Topology, nbytes: int, limit: float) -> float:
    """Return the simulated time in s; if that is above `limit`, a time between `limit` and it."""
    return _simulate(plan, topology, nbytes, None, limit * (1 + _ROUNDING)).seconds


def _compiled(steps: int) -> bool:
    """Return whether to run compiled code: for long plans, and always once Numba is loaded."""
    return steps > _SHORT or "numba" in sys.modules


def _simulate(
    plan: Plan, topology: Topology, nbytes: int, alpha_s: float | None, limit: float = math.inf
) -> Timeline:
    layout = _layout(plan.with_chunks(plan.stride), topology)
    sends = layout.sends * plan.groups
    if sends > _MOST_SENDS:
        raise PlanError(
            f"{plan.num_chunks} chunks take {sends} sends, too many to simulate: at most "
            f"{_MOST_SENDS}"
        )
    alpha = layout.alpha if alpha_s is None else np.full_like(layout.alpha, alpha_s)
    first, busy = np.zeros(plan.size), np.zeros(len(layout.links))
    rows = (np.zeros(sends, np.int32), np.zeros(sends, np.int32), *np.zeros((3, sends)))
    sizes = plan.chunk_sizes(nbytes)
    totals = np.bincount(np.arange(plan.num_chunks) % plan.stride, sizes, plan.stride)
    users, index = layout.uses[:, :2].T.astype(np.int64)
    work = np.bincount(users, totals[index] * layout.uses[:, 2], layout.strands)
    arrays = (
        sizes, layout.ready.copy(),
        _starts(layout.stored), np.zeros(layout.stored.sum(), np.int64), *layout.wires, alpha,
        np.zeros(layout.strands), work, busy, first, *rows,
    )  # fmt: skip
    numbers = (plan.num_chunks, plan.stride, limit)
    if _compiled(layout.steps * plan.groups):
        end, written, hangs = compiled_play()(layout.code, layout.ranks, *numbers, *arrays)
    else:
        lists = [array.tolist() for array in arrays]
        start = (layout.code.tolist(), layout.ranks.tolist())
        end, written, hangs = play(*start, *numbers, *lists)
        results = (busy, first, *rows)  # the last arrays
        for array, values in zip(results, lists[-len(results) :], strict=True):
            array[:] = values
    if hangs:
        raise PlanError("the plan hangs in the simulator; verify(plan, topology) says where")
    strands = (topology.by_ends[ends].parallel for ends in layout.links)
    return Timeline(
        plan, nbytes, end, tuple(first.tolist()),
        {ends: b / n for ends, b, n in zip(layout.links, busy.tolist(), strands, strict=True)},
        tuple(row[:written] for row in rows),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Layout:
    """What a simulation needs to know of a plan and its links, for any number of groups."""

    code: NDArray[Any]
    ranks: NDArray[Any]
    steps: int
    sends: int
    ready: NDArray[Any]
    """For each connection, the slots that are free and filled at the start."""
    stored: NDArray[Any]
    """For each track, the largest number of links into common memory of one send."""
    links: tuple[tuple[Vertex, Vertex], ...]
    strands: int
    uses: NDArray[Any]
    """[uses, 3]: strand, chunk of the group, and s/byte, but for links into memory."""
    wires: tuple[NDArray[Any], ...]
    """The arguments of `kernels.plan.timeline.play` from `strand_at` to `per_byte`."""
    alpha: NDArray[Any]


@lru_cache(maxsize=64)
def _layout(plan: Plan, topology: Topology) -> _Layout:
    number: dict[tuple[Vertex, Vertex], int] = {}
    known: list[tuple[int, bool, float, float]] = []  # strands, stores, s/byte, alpha of links
    strand_number: dict[tuple[int, int], int] = {}
    taken: dict[int, int] = defaultdict(int)
    count, stores = [], []
    strand, link, is_store, strand_per_byte = [], [], [], []
    per_byte, alpha = [], []
    for connection in plan.connections:
        slowest = latency = 0.0
        stored = 0
        links = connection.links
        for ends in links:
            at = number.setdefault(ends, len(number))
            if at == len(known):
                if ends not in topology.by_ends:
                    raise PlanError(f"{topology.name} has no link {ends[0]}->{ends[1]}")
                wire = topology.by_ends[ends]
                known.append(
                    (wire.parallel, wire.stores, 1 / wire.bandwidth_each, wire.latency_us * 1e-6)
                )
            strands, into_memory, seconds, start = known[at]
            strand.append(strand_number.setdefault((at, taken[at] % strands), len(strand_number)))
            taken[at] += 1
            link.append(at)
            is_store.append(into_memory)
            strand_per_byte.append(seconds)
            stored += into_memory
            slowest, latency = max(slowest, seconds), max(latency, start)
        count.append(len(links))
        stores.append(stored)
        per_byte.append(slowest)
        alpha.append(latency)
    steps, sends, most_stored = 0, 0, []
    first = _starts(np.array(count))
    uses: list[tuple[int, int, float]] = []
    for track in plan.tracks:
        widest = 0
        for step in (step for body in track.phases for step in body):
            steps += 1
            if step.op is Op.SEND:
                sends += len(step.connections)
                widest = max(widest, sum(stores[i] for i in step.connections))
                uses += [
                    (strand[k], step.chunk, strand_per_byte[k])
                    for i in step.connections for k in range(first[i], first[i + 1])
                    if not is_store[k]
                ]  # fmt: skip
        most_stored.append(widest)
    return _Layout(
        plan.encode().astype(np.int64),
        np.array([s.rank for s in plan.tracks], np.int64), steps, sends,
        np.array([(0 if c.local else plan.slots, 0) for c in plan.connections], np.int64).ravel(),
        np.array(most_stored, np.int64), tuple(number), len(strand_number),
        np.array(uses, float).reshape(-1, 3),
        (
            first, np.array(strand, np.int64), np.array(link, np.int64),
            np.array(is_store, np.bool_), np.array(strand_per_byte, float),
            np.array(per_byte, float),
        ),
        np.array(alpha, float),
    )  # fmt: skip


def _starts(counts: NDArray[Any]) -> NDArray[np.int64]:
    """Return the offsets of consecutive parts, and the end of the last one."""
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
