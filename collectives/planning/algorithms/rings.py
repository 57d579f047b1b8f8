"""Rings through all GPUs that share no link, and the collectives that run around them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.algorithms.embed import Edge, embed
from linkweave.collectives.planning.algorithms.hierarchical import equal_nodes, near_nics
from linkweave.collectives.planning.algorithms.packing import link_counts
from linkweave.collectives.planning.lower import Algorithm, Copy, Reduce, Round, few_enough
from linkweave.topology import Topology

Ring = tuple[int, ...]
"""The ranks in the order in which data passes them."""

_TRIALS = 200
_NODES = 2_000  # visited by one search for one more ring
_SENDS = 20_000  # of a plan, which limits the number of long rings


def ring(topology: Topology) -> Algorithm:
    """Reduce-scatter, then all-gather, around R rings: 2(P - 1) steps of N/(R P) bytes.

    Chunk c runs around ring c mod R. It starts at the rank after its owner, rank c // R of the
    ring, and is complete at the owner. A rank has one track for each ring, so its sends there
    follow one another. The plan grows as P^2: PlanError for more than 64 ranks.
    """
    size = len(topology.gpus)
    few_enough("ring", size)
    found, detours = rings(topology)
    return ring_of("ring", size, found, detours)


def ring_of(
    name: str, size: int, found: Sequence[Ring],
    detours: Mapping[tuple[int, int, int], tuple[int, ...]] | None = None,
) -> Algorithm:  # fmt: skip
    """Return the all-reduce around these rings."""
    count = len(found)
    scatter, gather = around(found, lambda r, i: i * count + r)
    return Algorithm(name, size, size * count, ((*scatter, *gather),), (), detours or {})


def half_ring(topology: Topology, collective: str, root: int) -> Algorithm:
    """All-gather or reduce-scatter around R rings: P - 1 steps of N/(R P) bytes.

    Chunk r P + b of a group is a part of block b and runs around ring r.
    """
    size = len(topology.gpus)
    few_enough("ring", size)
    found, detours = rings(topology)
    scatter, gather = around(found, lambda r, i: r * size + found[r][i])
    phases = (tuple(gather if collective == "allgather" else scatter),)
    return Algorithm("ring", size, size * len(found), phases, (), detours, collective)


def rings(topology: Topology) -> tuple[list[Ring], Mapping[tuple[int, int, int], tuple[int, ...]]]:
    """Return rings, and the forwarders of each hop (ring, src, dst) that detours.

    If equal links join GPUs directly, a search with fixed random seeds adds rings, at first in both
    directions, until some GPU has no link left. In a cluster there are those of `over_nics`.
    Otherwise, or if there are none, the result is the ring of least congestion that `embed` finds.
    A long ring has many sends, so that a plan has as many rings as keep it small: on eight nodes of
    eight GPUs two, and with them two NICs of each node.
    """
    size, links = len(topology.gpus), link_counts(topology)
    most = _most(size)
    if found := _disjoint(size, links) if links else over_nics(topology)[: max(2, most)]:
        return found, {}
    edges = [Edge(0, i, (i + 1) % size, one_way=True) for i in range(size)]
    embedding = embed(topology, edges, size)
    at = embedding.rank_of
    return [at], {(0, at[a], at[b]): (via,) for (_, a, b), via in embedding.via.items()}


def around(
    found: Sequence[Ring], chunk: Callable[[int, int], int]
) -> tuple[list[Round], list[Round]]:
    """Return the rounds of a reduce-scatter, in which chunk(r, i) ends at position i of ring r, and
    those of an all-gather, in which it begins there."""
    size = len(found[0])
    hops = [(r, i, at[i], at[(i + 1) % size]) for r, at in enumerate(found) for i in range(size)]
    scatter: list[Round] = []
    gather: list[Round] = []
    for step in range(size - 1):
        scatter.append(
            tuple(Reduce((a,), b, chunk(r, (i - step - 1) % size), r) for r, i, a, b in hops)
        )
        gather.append(tuple(Copy(a, (b,), chunk(r, (i - step) % size), r) for r, i, a, b in hops))
    return scatter, gather


def _most(size: int) -> int:
    """The most rings of a plan."""
    return max(1, _SENDS // max(1, 2 * size * (size - 1)))


def over_nics(topology: Topology) -> list[Ring]:
    """Return rings through all nodes of a cluster, two for each NIC of a node; none if the nodes
    differ, or no path joins them so.

    Inside each node a ring is a path, which is a ring of the node cut open. It begins and ends at
    GPUs near one NIC; or, where a NIC has one GPU, near two NICs. Of these, every second node has
    the path backwards, so that data never changes rails: that takes an even number of nodes, and
    leaves out a NIC that has no other beside it. Rings 2 c and 2 c + 1 are each other backwards
    inside the nodes.
    """
    try:
        nodes = equal_nodes("ring", topology)
        near = near_nics(topology, nodes)
    except PlanError:
        return []
    nic_of = {g: nic for nic, positions in enumerate(near) for g in positions}
    cut: list[Ring] = [(0,)]
    if len(nodes[0]) > 1:
        inner, detours = rings(topology.subset(topology.gpus[r] for r in nodes[0]))
        cut = [] if detours else _cut(inner, nic_of)
    alternate = any(nic_of.get(path[0]) != nic_of.get(path[-1]) for path in cut)
    found = []
    for path in cut:
        for first, second in ((path, path[::-1]), (path[::-1], path))[: len(path)]:
            ways = [second if alternate and i % 2 else first for i in range(len(nodes))]
            found.append(tuple(node[g] for node, way in zip(nodes, ways, strict=True) for g in way))
    hops = {(ring[i - 1], at) for ring in found for i, at in enumerate(ring)}
    there = all((topology.gpus[a], topology.gpus[b]) in topology.hops for a, b in hops)
    return found if there and not (alternate and len(nodes) % 2) else []


def _cut(inner: Sequence[Ring], nic_of: Mapping[int, int]) -> list[Ring]:
    """Return paths through a node, as positions, whose ends are all NICs, each of one path."""
    found: list[Ring] = []
    left = set(nic_of.values())
    cuts = [(*order[i:], *order[:i]) for i in range(len(inner[0])) for order in inner]
    for shared in (True, False):
        for path in cuts:
            ends = {nic_of.get(path[0], -1), nic_of.get(path[-1], -1)}
            if ends <= left and (len(ends) == 1) == shared:
                found.append(path)
                left -= ends
    return found


def _disjoint(size: int, links: Mapping[tuple[int, int], int]) -> list[Ring]:
    degrees = [[sum(n for ends, n in links.items() if ends[side] == r) for r in range(size)]
            for side in (0, 1)]  # fmt: skip
    most = min(map(min, degrees))
    wanted = min(most, _most(size))
    best: list[Ring] = []
    for trial in range(_TRIALS):
        left = dict(links)
        found: list[Ring] = []
        both = trial % 2 == 0 and size > 2
        while len(found) < wanted:
            ring = _one(size, left, random.Random(1000 * trial + len(found)), both)
            if ring is None and not both:
                break
            if ring is None:
                both = False
                continue
            for way in (ring, ring[::-1]) if both else (ring,):
                for i, a in enumerate(way):
                    left[a, way[(i + 1) % size]] -= 1
                found.append(way)
        best = max(best, found[:wanted], key=len)
        if len(best) == wanted:
            break
    return best


def _one(
    size: int, left: Mapping[tuple[int, int], int], rng: random.Random, both: bool
) -> Ring | None:
    """Return a ring over the links that are left (with `both`, in both directions), or None.

    Depth-first search that prefers the rank with the fewest next hops, then the most links.
    """

    def free(a: int, b: int) -> bool:
        return left.get((a, b), 0) > 0 and (not both or left.get((b, a), 0) > 0)

    out = [[b for b in range(size) if b != a and free(a, b)] for a in range(size)]
    path, seen, nodes = [0], {0}, 0
    stack: list[list[int]] = []

    def next_hops() -> list[int]:
        here = path[-1]
        choices = [b for b in out[here] if b not in seen]
        rng.shuffle(choices)
        choices.sort(key=lambda b: (sum(c not in seen for c in out[b]), -left[here, b]))
        return choices[::-1]  # the best last, where pop takes it

    stack.append(next_hops())
    while stack:
        nodes += 1
        if nodes > _NODES + size:
            return None
        if len(path) == size and free(path[-1], path[0]):
            return tuple(path)
        if stack[-1] and len(path) < size:
            nxt = stack[-1].pop()
            path.append(nxt)
            seen.add(nxt)
            stack.append(next_hops())
        else:
            stack.pop()
            seen.discard(path.pop())
    return None
