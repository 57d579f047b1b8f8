"""The alpha-beta model: the time of a plan in closed form, and the best number of chunks.

A message of N bytes crosses T trees in K chunks. A step of a chunk over an exclusive link takes
a + N/(K b) seconds, with start-up a (alpha) and bandwidth b in bytes/s. With k = K/T chunks for
each tree and depth d (a detour adds one level), the number of steps is exactly:

    reduce, or broadcast                 k + d - 1 steps
    all-reduce, one after the other      2 (k + d - 1)
    all-reduce, overlapped               k + 2d - 1
    ring over P ranks, g rounds          2 (P - 1) g

C-Cube's equations 3 to 6 have log(P) + K for k + d - 1. Its equation 7, the overlapped time, keeps
the K of equation 4, which is the best one for the baseline only.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import lru_cache

from linkweave.collectives.planning.layout import ALIGN
from linkweave.collectives.planning.plan import Op, Plan
from linkweave.collectives.planning.simulate import group_sends, seconds_within, simulate
from linkweave.topology import Topology, Vertex

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
