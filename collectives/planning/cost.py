"""How long a plan takes, in closed form, and how many chunks make it shortest.

N bytes over T trees in K chunks; alpha a s a step; b bytes/s of one link. A chunk step over an
exclusive link takes a + s/b with s = N/K bytes. With k = K/T chunks a tree and depth d (a detour
counts as one level more), exactly:

    reduce, or broadcast                 k + d - 1 steps
    all-reduce, one after the other      2 (k + d - 1)
    all-reduce, overlapped               k + 2d - 1
    ring over P ranks, g rounds          2 (P - 1) g

C-Cube's equations 3 to 6 write log(P) + K for k + d - 1; its equation 7, the overlapped time, keeps
the K that is best for the baseline (equation 4), which is not the best one for it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import lru_cache

from linkweave.collectives.planning.plan import ALIGN, Op, Plan
from linkweave.collectives.planning.simulate import simulate
from linkweave.topology import Topology, Vertex

MEMORY_CHUNK = 64 << 10
"""Bytes: a chunk that ranks on one memory hand on stays in a core's own cache."""
MAX_CHUNKS = 8192
_SENDS = 40_000  # simulated to tell how long a group takes, over at most so many groups:
_GROUPS = 128
LARGE = 10_000
"""Connections of a plan of which a group takes a good part of a second to simulate."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """All that the closed forms need: `fill + per_group * g` chunk steps for g groups of chunks.

    `alpha_s` and `bandwidth` (bytes/s) are the slowest link's; `load` is the time in s the busiest
    link needs for one byte of the message (summed over phases), however well it is pipelined.
    """

    stride: int
    fill: float
    per_group: float
    alpha_s: float
    bandwidth: float
    load: float
    exact: bool = True
    """Whether `seconds` is: every connection has a lane of its own, all lanes are alike, and every
    group of chunks takes as many steps more."""

    def seconds(self, nbytes: int, num_chunks: int) -> float:
        """Exact for exclusive, equal links and full groups; an estimate where links are shared.

        (f + p g)(a + N / (S g b)) for g groups is N p / (S b) + (f + p g) a + f N / (S g b): the
        whole message at the pipeline's rate, the start-ups, and the bytes that fill and drain it.
        Where a link is shared, its load sets the rate instead.
        """
        groups = -(-num_chunks // self.stride)
        rate = max(self.load, self.per_group / (self.stride * self.bandwidth))
        startups = (self.fill + self.per_group * groups) * self.alpha_s
        return rate * nbytes + startups + self.fill * nbytes / num_chunks / self.bandwidth

    def best_chunks(self, nbytes: int, largest: int | None = None) -> int:
        """The number of chunks, in whole groups, with the least `seconds`.

        g groups take (f + p g)(a + N / (S g b)), least at g = sqrt(f N / (p S b a)): for the
        overlapped tree K = sqrt((2d - 1) b N / a) in the paper's b = 1/bandwidth.
        `largest` (bytes of a chunk) asks for more where small chunks are better for other reasons.
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
    """The most chunks, in whole groups, that a message is cut into."""
    return stride * max(1, min(MAX_CHUNKS, -(-nbytes // ALIGN)) // stride)


@lru_cache(maxsize=65536)
def simulated_seconds(template: Plan, topology: Topology, nbytes: int, num_chunks: int) -> float:
    """The simulated time, of many groups extrapolated from few with chunks of the same size.

    Where links are shared, groups do not repeat exactly: the estimate is good to about 1 %.
    """
    stride = template.stride
    groups = -(-num_chunks // stride)
    sends = sum(
        len(step.connections)
        for track in template.tracks for body in track.phases for step in body
        if step.op is Op.SEND
    )  # fmt: skip
    more = max(6, min(_GROUPS, _SENDS // max(1, sends)))
    few = more // 3
    if groups <= more * 2:
        return simulate(template.with_chunks(num_chunks), topology, nbytes).seconds

    def seconds(of: int) -> float:
        part = -(-nbytes * of // groups)
        return simulate(template.with_chunks(of * stride), topology, part).seconds

    start, end = seconds(few), seconds(more)
    return end + (groups - more) * (end - start) / (more - few)


def pipeline_of(plan: Plan, topology: Topology) -> Pipeline:
    """A plan's shape, counted on the plan itself: simulated with steps of 1 s and no bytes."""
    if not plan.connections:
        return Pipeline(plan.stride, 0, 1, 0.0, math.inf, 0.0)

    def steps(groups: int) -> int:
        return round(simulate(plan.with_chunks(groups * plan.stride), topology, 0, 1.0).seconds)

    first = steps(1)
    per_group = (steps(4) - first) / 3
    uneven = steps(2) - first != per_group  # then groups repeat every 2, 3 or 4
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
    """Seconds a byte of the message that the phase's busiest link needs."""
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
    """The largest chunk in bytes that suits the machine, or None where only the model decides."""
    return MEMORY_CHUNK if topology.on_memory else None
