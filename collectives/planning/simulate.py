"""The simulator: when each step of a plan happens on the modelled links."""

from __future__ import annotations

import json
import math
import os
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.layout import ALIGN
from linkweave.collectives.planning.plan import MOST_BYTES, Op, Plan
from linkweave.kernels.plan.timeline import compiled_play, play
from linkweave.topology import Topology, Vertex, load
from linkweave.topology.checks import integer
from linkweave.topology.text import html_table

MEMORY_CHUNK = 64 << 10
"""Bytes: chunks of this size stay in a core's own cache when ranks share one memory."""
MAX_CHUNKS = 8192
_SENDS, _GROUPS = 40_000, 128  # limits of a simulation to find the time of a group
_DEEP = 1 << 20  # the limit of sends where a deep pipeline must fill first
LARGE = 10_000
"""Connections: simulating one group of a larger plan takes a large part of a second."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The parameters of the closed forms: g groups of chunks take `fill + per_group * g` steps.

    `alpha_s` (s) and `bandwidth` (bytes/s) are those of the slowest link. `load` is the time in s
    that the busiest link needs for one byte of the message, summed over phases, at best.
    """

    stride: int
    fill: float
    per_group: float
    alpha_s: float
    bandwidth: float
    load: float
    exact: bool = True
    """Whether `seconds` is exact: every connection has its own physical link, all links are equal,
    and every further group adds the same number of steps."""

    def seconds(self, nbytes: int, num_chunks: int) -> float:
        """Return the predicted time; exact for exclusive, equal links and full groups.

        (f + p g)(a + N / (S g b)) for g groups is N p / (S b) + (f + p g) a + f N / (S g b): the
        whole message at the pipeline's rate, the start-ups, and the bytes that fill and drain the
        pipeline. If a link is shared, its load may limit the rate.
        """
        groups = -(-num_chunks // self.stride)
        rate = max(self.load, self.per_group / (self.stride * self.bandwidth))
        startups = (self.fill + self.per_group * groups) * self.alpha_s
        return rate * nbytes + startups + self.fill * nbytes / num_chunks / self.bandwidth

    def best_chunks(self, nbytes: int, largest: int | None = None) -> int:
        """Return the number of chunks, in whole groups, with the least `seconds`.

        (f + p g)(a + N / (S g b)) is least at g = sqrt(f N / (p S b a)); for the overlapped tree
        that is K = sqrt((2d - 1) b N / a) with C-Cube's b = 1/bandwidth. `largest` limits the bytes
        of a chunk.
        """
        most = most_chunks(nbytes, self.stride) // self.stride
        ideal = float(most)
        if self.alpha_s > 0:
            per_step = self.per_group * self.stride * self.bandwidth * self.alpha_s
            ideal = math.sqrt(self.fill * nbytes / per_step)
        near = {min(most, max(1, g)) for g in (math.floor(ideal), math.ceil(ideal))}
        groups = min(near, key=lambda g: (self.seconds(nbytes, g * self.stride), g))
        if largest:
            groups = min(most, max(groups, -(-nbytes // (largest * self.stride))))
        return groups * self.stride


def most_chunks(nbytes: int, stride: int) -> int:
    """Return the largest number of chunks, in whole groups, for a message."""
    return stride * max(1, min(MAX_CHUNKS, -(-nbytes // ALIGN)) // stride)


@lru_cache(maxsize=65536)
def _known(template: Plan, topology: Topology, nbytes: int, num_chunks: int) -> list[float]:
    """Return what `simulated_seconds` found so far: nothing, or a time and its limit."""
    return []


def simulated_seconds(
    template: Plan, topology: Topology, nbytes: int, num_chunks: int, limit: float = math.inf
) -> float:
    """Return the simulated time in s, extrapolated from a few groups if there are many; or if that
    is above `limit`, a time between `limit` and it.

    On shared links groups do not repeat exactly; there the error is about 1 %.
    """
    known = _known(template, topology, nbytes, num_chunks)
    found = tuple(known)
    if not found or found[1] < found[0] <= limit:
        known[:] = found = _simulated(template, topology, nbytes, num_chunks, limit), limit
    return found[0]


def _simulated(
    template: Plan, topology: Topology, nbytes: int, num_chunks: int, limit: float
) -> float:
    stride = template.stride
    groups = -(-num_chunks // stride)
    sends = max(1, group_sends(template, topology))
    more = max(6, min(_GROUPS, _SENDS // sends))
    shape = pipeline_of(template, topology)
    if shape.per_group:  # further groups take as long as each other once so many are under way
        filled = math.ceil(shape.fill / shape.per_group)
        more = max(more, min(3 * filled, _DEEP // sends))
    few = more // 3
    if groups <= more * 2:
        return seconds_within(template.with_chunks(num_chunks), topology, nbytes, limit)

    def seconds(of: int, limit: float) -> float:
        part = -(-nbytes * of // groups)
        return seconds_within(template.with_chunks(of * stride), topology, part, limit)

    rest = (groups - more) / (more - few)
    start = seconds(few, limit)
    if start > limit:
        return start
    end = seconds(more, (limit + rest * start) / (1 + rest))
    return end + (groups - more) * (end - start) / (more - few)


@lru_cache(maxsize=512)
def pipeline_of(plan: Plan, topology: Topology) -> Pipeline:
    """Return the parameters of a plan, counted by simulating it with steps of 1 s and no bytes."""
    if not plan.connections:
        return Pipeline(plan.stride, 0, 1, 0.0, math.inf, 0.0)

    def steps(groups: int) -> int:
        return round(simulate(plan.with_chunks(groups * plan.stride), topology, 0, 1.0).seconds)

    first = steps(1)
    per_group = (steps(4) - first) / 3
    uneven = steps(2) - first != per_group  # the pattern then has a period of 2, 3 or 4 groups
    if uneven and len(plan.connections) < LARGE:
        per_group = (steps(13) - first) / 12
    used = [topology.by_ends[ends] for c in plan.connections for ends in c.links]
    phases = max(len(track.phases) for track in plan.tracks)
    return Pipeline(
        plan.stride,
        max(0.0, first - per_group),
        per_group,
        max(link.latency_us for link in used) * 1e-6,
        min(link.bandwidth_each for link in used),
        sum(_load(plan, topology, phase) for phase in range(phases)),
        not uneven
        and len({(link.latency_us, link.bandwidth_each) for link in used}) == 1
        and all(n <= topology.by_ends[ends].parallel for ends, n in plan.link_use.items()),
    )


def _load(plan: Plan, topology: Topology, phase: int) -> float:
    """Return the seconds that the phase's busiest link needs for a byte of the message."""
    load: dict[tuple[Vertex, Vertex], float] = defaultdict(float)
    for step in (s for track in plan.tracks for body in track.phases[phase:][:1] for s in body):
        if step.op is not Op.SEND:
            continue
        crossed = [ends for i in step.connections for ends in plan.connections[i].links]
        for ends, times in Counter(crossed).items():
            link = topology.by_ends[ends]
            copies = 1 if link.stores else times
            load[ends] += copies / (plan.stride * link.bandwidth * link.count)
    return max(load.values(), default=0.0)


def largest_chunk(topology: Topology) -> int | None:
    """Return the largest useful chunk in bytes, or None if only the model decides."""
    return MEMORY_CHUNK if topology.on_memory else None


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
