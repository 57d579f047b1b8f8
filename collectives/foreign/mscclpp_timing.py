"""When the ops of an execution plan of MSCCL++ happen on a machine's links, and which they use.

As in our simulator, an op that moves data over a link holds its thread block for the link's latency
and the time of its bytes, and a strand of the link for the latter; thread blocks take their turns
on a link in the order in which they come. What stays on a GPU takes no time, and signals none.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from linkweave.collectives.errors import PlanError
from linkweave.collectives.foreign.mscclpp import FORMS, SIGNALS, WAITS, ExecutionPlan, Op
from linkweave.collectives.foreign.mscclpp_proof import verify
from linkweave.collectives.foreign.mscclpp_rules import reducing_switch, regions
from linkweave.topology import Topology, Vertex

Ends = tuple[Vertex, Vertex]
Calls = Iterator[tuple[Op, int]]


@dataclass(frozen=True)
class Simulated:
    """A simulated execution: seconds, and for each link the share of them in which it is busy."""

    seconds: float
    utilisation: dict[Ends, float]


@dataclass(order=True)
class _Block:
    time: float
    number: int
    rank: int = field(compare=False)
    calls: Calls = field(compare=False)
    ahead: tuple[Op, int] | None = field(compare=False, default=None)


def simulate(plan: ExecutionPlan, topology: Topology, nbytes: int) -> Simulated:
    """Simulate one execution for messages of `nbytes`, after verifying the plan. Raises PlanError
    for a size that the plan does not take."""
    verify(plan, topology)
    whole = plan.chunks * plan.alignment
    if nbytes <= 0 or nbytes % whole or not plan.least <= nbytes <= plan.most:
        raise PlanError(
            f"{plan.name} takes messages of {plan.least} to {plan.most} bytes that are multiples "
            f"of {whole}, not {nbytes}"
        )
    return _Run(plan, topology, nbytes // plan.chunks).run()


class _Run:
    def __init__(self, plan: ExecutionPlan, topology: Topology, chunk: int) -> None:
        self.plan, self.topology, self.chunk = plan, topology, chunk
        self.free: dict[Ends, list[float]] = {}  # when each strand of a link is
        self.busy: dict[Ends, float] = defaultdict(float)
        self.events: dict[Any, list[float]] = defaultdict(list)  # times of signals, packets, ...
        self.taken: dict[Any, int] = defaultdict(int)
        self.waiting: dict[Any, list[_Block]] = defaultdict(list)
        self.ready: list[_Block] = []
        self.partners = plan.partners()

    def run(self) -> Simulated:
        for rank, gpu in enumerate(self.plan.gpus):
            for ops in gpu.blocks:
                block = _Block(0.0, len(self.ready), rank, self.calls(ops))
                self.ready.append(block)
            for number, value in enumerate(gpu.semaphores):
                self.events["semaphore", rank, number] = [0.0] * value
        last = 0.0
        while self.ready:
            block = heapq.heappop(self.ready)
            block.ahead = block.ahead or next(block.calls, None)
            if block.ahead is None:
                last = max(last, block.time)
                continue
            missing = self.step(block, *block.ahead)
            if missing is None:
                block.ahead = None
                heapq.heappush(self.ready, block)
            else:
                self.waiting[missing].append(block)
        shares = {ends: busy / last if last else 0.0 for ends, busy in self.busy.items()}
        return Simulated(last, shares)

    def calls(self, ops: tuple[Op, ...]) -> Calls:
        """Each op that is carried out, with the bytes of its regions."""
        for op in ops:
            if not op.body:
                yield op, self.bytes_of(op)
                continue
            total = op.chunks * self.chunk
            for first in range(0, total, op.unit):
                for inner in op.body:
                    yield inner, max(0, min(self.bytes_of(inner) - first, op.unit))

    def bytes_of(self, op: Op) -> int:
        size = max((region.size for region in (*op.src, *op.dst)), default=0)
        return size * self.chunk // op.share[1]

    def happen(self, key: Any, time: float) -> None:
        self.events[key].append(time)
        for block in self.waiting.pop(key, ()):
            heapq.heappush(self.ready, block)

    def step(self, block: _Block, op: Op, nbytes: int) -> Any:
        """Carry out an op; returns what it waits for, if anything."""
        rank = block.rank
        if op.name in SIGNALS:
            for number in op.channels:
                other = self.partners.get((rank, op.channel_type, number))
                self.happen(("signal", other), block.time)
        elif op.name in WAITS:
            return self.wait(block, [("signal", (rank, op.channel_type, n)) for n in op.channels])
        elif op.name == "sem_release":
            for number in op.semaphores:
                self.happen(("semaphore", rank, number), block.time)
        elif op.name == "sem_acquire":
            return self.wait(block, [("semaphore", rank, n) for n in op.semaphores])
        elif op.name == "barrier" and op.blocks > 1:
            return self.meet(block, op)
        elif op.name in FORMS:
            return self.move(block, op, nbytes)
        return None

    def wait(self, block: _Block, keys: list[Any]) -> Any:
        for key in keys:
            if len(self.events[key]) <= self.taken[key]:
                return key
        for key in keys:
            block.time = max(block.time, self.events[key][self.taken[key]])
            self.taken[key] += 1
        return None

    def meet(self, block: _Block, op: Op) -> Any:
        mine = "barrier", block.rank, op.barrier, block.number
        key = "barrier", block.rank, op.barrier
        if self.taken[mine] == self.taken[mine, "came"]:
            self.taken[mine, "came"] += 1
            self.happen(key, block.time)
        needed = op.blocks * self.taken[mine, "came"]
        if len(self.events[key]) < needed:
            return key
        self.taken[mine] += 1
        block.time = max(block.time, *self.events[key][needed - op.blocks : needed])
        return None

    def move(self, block: _Block, op: Op, nbytes: int) -> Any:
        """Move data: read packets as soon as they are there, then send all at the same time."""
        sides = list(regions(op))
        read, written = sides[: len(op.src)], sides[len(op.src) :]
        for region, what in read:
            for index in range(region.index, region.index + region.size) if what == "p" else ():
                key = "packet", block.rank, index
                if not self.events[key]:
                    return key
                block.time = max(block.time, self.events[key][0])
        over = block.time
        for side, reads in ((read, True), (written, False)):
            for region, what in side:
                for path in self.paths(block.rank, region, what, reads):
                    over = max(over, self.send(block.time, path, nbytes))
        for region, what in written:
            for owner in region.ranks if what in "pqn" else ():
                for index in range(region.index, region.index + region.size):
                    self.happen(("packet", owner, index), over)
        if op.name in ("pws", "pwsf"):
            for number in op.channels:
                self.happen(("signal", self.partners.get((block.rank, "port", number))), over)
        block.time = over
        return None

    def paths(self, rank: int, region: Any, what: str, read: bool) -> Iterator[tuple[Ends, ...]]:
        gpus, hops = self.topology.gpus, self.topology.hops
        if what in "rq":
            a, b = (region.ranks[0], rank) if read else (rank, region.ranks[0])
            yield from (tuple(pairwise(hops[gpus[a], gpus[b]])) for _ in range(a != b))
        if what in "mn":  # once between the switch and this GPU, and each of the others
            switch = reducing_switch(self.topology, region.ranks)
            for owner in region.ranks:
                yield ((gpus[owner], switch),) if read else ((switch, gpus[owner]),)
            yield ((switch, gpus[rank]),) if read else ((gpus[rank], switch),)

    def send(self, time: float, path: tuple[Ends, ...], nbytes: int) -> float:
        links = [self.topology.by_ends[ends] for ends in path]
        start, strands = time, []
        for ends, link in zip(path, links, strict=True):
            free = self.free.setdefault(ends, [0.0] * link.parallel)
            strands.append((free, free.index(min(free))))
            start = max(start, min(free))
        seconds = max(nbytes / link.bandwidth_each for link in links)
        for (free, at), ends, link in zip(strands, path, links, strict=True):
            free[at] = start + seconds
            self.busy[ends] += nbytes / link.bandwidth_each / link.parallel
        return start + seconds + max(link.latency_us for link in links) * 1e-6


def as_drawn(plan: ExecutionPlan) -> Any:
    """What `topology.draw` takes for a plan: the ranks between which data moves."""
    pairs: dict[tuple[int, int], None] = {}
    for rank, _, op in plan.ops():
        for k, (region, what) in enumerate(regions(op)):
            for peer in region.ranks if what in "rqmn" else ():
                ends = (peer, rank) if k < len(op.src) else (rank, peer)
                pairs.update({ends: None} if peer != rank else {})
    connections = [
        SimpleNamespace(src=a, dst=b, src_channel=0, dst_channel=0) for a, b in sorted(pairs)
    ]
    copy = SimpleNamespace(name="COPY")
    steps = [SimpleNamespace(op=copy, connections=(i,), source=None) for i in range(len(pairs))]
    tracks = [SimpleNamespace(rank=0, channel=0, phases=[steps])]
    return SimpleNamespace(
        algorithm=plan.name, size=len(plan.gpus), trees=(), connections=connections, tracks=tracks
    )
