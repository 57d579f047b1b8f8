"""The simulator: when each step of a plan happens on the modelled wires."""

from __future__ import annotations

import heapq
import json
import os
from collections import defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path

from collectives.errors import PlanError
from collectives.planning.plan import Op, Plan
from topology import Link, Topology, Vertex


@dataclass(frozen=True, slots=True)
class Send:
    """One chunk crossing one connection: it holds its stream to `end`, its links to `free`."""

    connection: int
    chunk: int
    start: float
    free: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated run; times in seconds."""

    plan: Plan
    nbytes: int
    seconds: float
    first_chunk_by_rank: tuple[float, ...]
    busy: dict[tuple[Vertex, Vertex], float] = field(repr=False)
    sends: tuple[Send, ...] = field(repr=False)

    @property
    def algbw(self) -> float:
        """Bytes of the message over the time, bytes/s (0 where nothing moves)."""
        return self.nbytes / self.seconds if self.seconds else 0.0

    @property
    def first_chunk_seconds(self) -> float:
        """When chunk 0 is final on the last rank: the gradient turnaround time."""
        return max(self.first_chunk_by_rank)

    @property
    def utilisation(self) -> dict[tuple[Vertex, Vertex], float]:
        """For each directed link, the share of its physical links' time that carries bytes."""
        return {k: (b / self.seconds if self.seconds else 0.0) for k, b in self.busy.items()}

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Chrome trace JSON (chrome://tracing, Perfetto): a row for each connection's wire time."""
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "process_name", "pid": 0,
             "args": {"name": f"{self.plan.algorithm}, {self.nbytes} bytes"}},
        ]  # fmt: skip
        used = sorted({s.connection for s in self.sends})
        for row, index in enumerate(used):
            events.append(
                {"ph": "M", "name": "thread_name", "pid": 0, "tid": row,
                 "args": {"name": str(self.plan.connections[index])}}
            )  # fmt: skip
        rows = {index: row for row, index in enumerate(used)}
        for s in self.sends:
            events.append(
                {"ph": "X", "name": f"chunk {s.chunk}", "pid": 0, "tid": rows[s.connection],
                 "ts": s.start * 1e6, "dur": (s.free - s.start) * 1e6,
                 "args": {"chunk": s.chunk, "seen_us": s.end * 1e6}}
            )  # fmt: skip
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))


@dataclass(frozen=True, slots=True)
class _Wire:
    """What a connection's sends cost: the lanes they hold, and how long."""

    lanes: tuple[tuple[tuple[Vertex, Vertex], int, float, bool], ...]
    """(link, lane, seconds a byte, whether it is memory) for each link passed."""
    alpha: float
    per_byte: float


@dataclass(slots=True)
class _Going:
    """A send under way: the connections it has yet to begin, and when the begun ones are over."""

    left: list[int]
    done: float
    stored: set[tuple[Vertex, Vertex]] = field(default_factory=set)


def simulate(plan: Plan, topology: Topology, nbytes: int) -> Timeline:
    """The time of a verified plan for a message of `nbytes`.

    A send starts when its stream and one lane (`Link.lanes`) on every link of its path are free;
    it holds the stream for alpha + bytes/bandwidth and each lane for bytes/bandwidth. Where a link
    has a lane for every connection, each has its own; otherwise connection i of a link takes lane
    i mod lanes, first come first served (a switch's port is one lane, as wide as all its links).
    A send to several connections starts on each as that one is free and holds its stream until the
    last is over; it crosses a memory link that they share once (all read what is stored once) and
    any other link once for each. Signals and arithmetic take no time. Deterministic.
    Raises PlanError where the plan hangs or the topology lacks a link.
    """
    if nbytes < 0:
        raise PlanError(f"a message has 0 bytes or more, not {nbytes}")
    wires = _wires(plan, topology)
    bounds = plan.chunk_bounds(nbytes)
    size_of = [stop - start for start, stop in bounds]
    ends = [((c.src, c.src_channel), (c.dst, c.dst_channel)) for c in plan.connections]
    n = len(plan.connections)
    free = [[0.0] * plan.slots if not c.local else None for c in plan.connections]
    tokens: list[tuple[deque[float], deque[float]]] = [
        (deque(f) if (f := free[i]) else deque(), deque()) for i in range(n)
    ]  # (slot-free times for the sender, data-ready times for the receiver)
    waiting: dict[tuple[int, int], int] = {}  # (connection, side) -> stream parked there
    lane_free: dict[tuple[tuple[Vertex, Vertex], int], float] = defaultdict(float)
    busy: dict[tuple[Vertex, Vertex], float] = {
        link: 0.0 for c in plan.connections for link in c.links
    }
    first = [0.0] * plan.size
    sends: list[Send] = []
    sending: dict[int, _Going] = {}  # streams within a send that has not begun on all its ways
    programs = [plan.steps(s) for s in plan.streams]
    heads = [next(p, None) for p in programs]
    heap = [(0.0, i) for i in range(len(programs)) if heads[i] is not None]
    serial = len(heap)
    queue = [(time, i, i) for time, i in heap]  # (time, serial, stream): a total order
    end = 0.0
    while queue:
        now, _, index = heapq.heappop(queue)
        stream = plan.streams[index]
        me = (stream.rank, stream.channel)
        while (head := heads[index]) is not None:
            _, chunk, step = head
            if step.op is Op.WAIT:
                side = 0 if me == ends[step.connections[0]][0] else 1
                token = tokens[step.connections[0]][side]
                if not token:
                    waiting[step.connections[0], side] = index
                    break
                now = max(now, token.popleft())
            elif step.op is Op.SIGNAL:
                i = step.connections[0]
                side = 1 if me == ends[i][0] else 0
                tokens[i][side].append(now)
                if (parked := waiting.pop((i, side), None)) is not None:
                    serial += 1
                    heapq.heappush(queue, (now, serial, parked))
            elif step.op is Op.SEND:
                going = sending.pop(index, None) or _Going(list(step.connections), now)
                waits: list[float] = []
                for i in list(going.left):
                    wire, nb = wires[i], size_of[chunk]
                    fresh = [k for k in wire.lanes if not (k[3] and k[0] in going.stored)]
                    begin = max([now, *(lane_free[k[:2]] for k in fresh)])
                    if begin > now:  # others may ask for the lane before it is free: ask again
                        waits.append(begin)
                        continue
                    going.left.remove(i)
                    for link, lane, per_byte, memory in fresh:
                        if memory:
                            going.stored.add(link)
                        lane_free[link, lane] = begin + nb * per_byte
                        busy[link] += nb * per_byte
                    spent = nb * wire.per_byte
                    sends.append(Send(i, chunk, begin, begin + spent, begin + spent + wire.alpha))
                    going.done = max(going.done, begin + spent + wire.alpha)
                if waits:
                    sending[index] = going
                    serial += 1
                    heapq.heappush(queue, (min(waits), serial, index))
                    break
                done = going.done
                heads[index] = next(programs[index], None)
                serial += 1
                heapq.heappush(queue, (done, serial, index))
                break
            elif chunk == 0:
                first[stream.rank] = now
            heads[index] = next(programs[index], None)
        end = max(end, now)
    if any(head is not None for head in heads):
        raise PlanError("the plan hangs in the simulator; verify(plan, topology) says where")
    for link in busy:
        busy[link] /= topology.by_ends[link].lanes
    return Timeline(plan, nbytes, end, tuple(first), busy, tuple(sends))


def _wires(plan: Plan, topology: Topology) -> list[_Wire]:
    taken: dict[tuple[Vertex, Vertex], int] = defaultdict(int)
    wires = []
    for connection in plan.connections:
        links: list[Link] = []
        lanes = []
        for ends in connection.links:
            if ends not in topology.by_ends:
                raise PlanError(f"{topology.name} has no link {ends[0]}->{ends[1]}")
            link = topology.by_ends[ends]
            lanes.append(
                (ends, taken[ends] % link.lanes, 1 / link.lane_bandwidth, link.kind == "memory")
            )
            taken[ends] += 1
            links.append(link)
        wires.append(
            _Wire(
                tuple(lanes),
                max((k.latency_us for k in links), default=0.0) * 1e-6,
                max((1 / k.lane_bandwidth for k in links), default=0.0),
            )
        )
    return wires
