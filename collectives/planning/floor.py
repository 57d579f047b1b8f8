"""A time that no plan of an algorithm beats, counted on what it moves: before there is a plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.lower import Algorithm, Reduce
from linkweave.topology import Topology, Vertex

_ROUNDING = 1e-9
_Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Floor:
    """`start_s`: the latencies of the longest chain of sends that wait for each other; `load`:
    seconds that the busiest link needs for one byte of all chunks."""

    start_s: float
    load: float

    def seconds(self, volume: int) -> float:
        """No plan takes less for chunks of `volume` bytes together, however many they are."""
        return max(self.start_s, self.load * volume) * (1 - _ROUNDING)

    def guess(self, volume: int) -> float:
        """What a good plan takes, roughly."""
        return self.start_s + self.load * volume


def floor_of(algorithm: Algorithm, topology: Topology) -> Floor:
    """Raises PlanError where two ranks exchange data that no link joins."""
    sends: Counter[_Pair] = Counter()
    latency: dict[_Pair, float] = {}
    seen: dict[_Pair, float] = {}  # (rank, chunk): when the rank has its value, if not at once
    for rnd in (rnd for phase in algorithm.phases for rnd in phase):
        arrivals: list[tuple[_Pair, float]] = []
        for move in rnd:
            if isinstance(move, Reduce):
                pairs = [(src, move.dst) for src in move.srcs]
            else:
                pairs = [(move.src, dst) for dst in move.dsts]
            for src, dst in pairs:
                then = seen.get((src, move.chunk), 0.0)
                stops = (src, *algorithm.detours.get((move.channel, src, dst), ()), dst)
                for hop in zip(stops, stops[1:], strict=False):
                    if hop not in latency:
                        links = (topology.by_ends[ends] for ends in _links(topology, hop))
                        latency[hop] = max(link.latency_us for link in links) * 1e-6
                    sends[hop] += 1
                    then += latency[hop]
                arrivals.append(((dst, move.chunk), then))
        for cell, then in arrivals:
            seen[cell] = max(then, seen.get(cell, 0.0))
    bytes_over: Counter[tuple[Vertex, Vertex]] = Counter()
    for hop, times in sends.items():
        for ends in _links(topology, hop):
            bytes_over[ends] += times
    used = ((topology.by_ends[ends], times) for ends, times in bytes_over.items())
    # what ranks put into common memory, several may read
    loads = [n / (algorithm.stride * k.bandwidth * k.count) for k, n in used if not k.stores]
    return Floor(max(seen.values(), default=0.0), max(loads, default=0.0))


def _links(topology: Topology, hop: _Pair) -> list[tuple[Vertex, Vertex]]:
    a, b = (topology.gpus[rank] for rank in hop)
    path = topology.hops.get((a, b), ())
    if not path:
        raise PlanError(f"{topology.name} has no link from GPU {a} to GPU {b}")
    return list(zip(path, path[1:], strict=False))
