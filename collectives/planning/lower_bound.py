"""A lower bound on the time of an algorithm, from its moves alone, before there is a plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.lower import Algorithm
from linkweave.topology import Topology, Vertex

_ROUNDING = 1e-9
_Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class LowerBound:
    """The alpha and beta terms of the bound."""

    start_s: float
    """Seconds of latency on the longest chain of dependent sends."""
    load: float
    """Seconds that the busiest link needs for each byte of all chunks together."""

    def seconds(self, volume: int) -> float:
        """Return a time that no plan beats for chunks of `volume` bytes together."""
        return max(self.start_s, self.load * volume) * (1 - _ROUNDING)

    def guess(self, volume: int) -> float:
        """Return a rough estimate of what a good plan takes."""
        return self.start_s + self.load * volume


def lower_bound(algorithm: Algorithm, topology: Topology) -> LowerBound:
    """Return the bound. Raises PlanError if a move has neither link nor detour."""
    sends: Counter[_Pair] = Counter()
    latency: dict[_Pair, float] = {}
    arrived: dict[_Pair, float] = {}  # (rank, chunk): when the rank has the value, if not at 0
    for rnd in (rnd for phase in algorithm.phases for rnd in phase):
        arrivals: list[tuple[_Pair, float]] = []
        for move in rnd:
            for src, dst in move.pairs:
                then = arrived.get((src, move.chunk), 0.0)
                stops = (src, *algorithm.detours.get((move.channel, src, dst), ()), dst)
                for hop in pairwise(stops):
                    if hop not in latency:
                        links = (topology.by_ends[ends] for ends in _links(topology, hop))
                        latency[hop] = max(link.latency_us for link in links) * 1e-6
                    sends[hop] += 1
                    then += latency[hop]
                arrivals.append(((dst, move.chunk), then))
        for cell, then in arrivals:
            arrived[cell] = max(then, arrived.get(cell, 0.0))
    bytes_over: Counter[tuple[Vertex, Vertex]] = Counter()
    for hop, times in sends.items():
        for ends in _links(topology, hop):
            bytes_over[ends] += times
    used = ((topology.by_ends[ends], times) for ends, times in bytes_over.items())
    # several ranks may read what one stores in common memory, so those links count for nothing
    loads = [n / (algorithm.stride * k.bandwidth * k.count) for k, n in used if not k.stores]
    return LowerBound(max(arrived.values(), default=0.0), max(loads, default=0.0))


def _links(topology: Topology, hop: _Pair) -> list[tuple[Vertex, Vertex]]:
    a, b = (topology.gpus[rank] for rank in hop)
    path = topology.hops.get((a, b), ())
    if not path:
        raise PlanError(f"{topology.name} has no link from GPU {a} to GPU {b}")
    return list(pairwise(path))
