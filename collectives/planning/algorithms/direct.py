"""Algorithms in which every source sends straight to its targets, in one or two steps."""

from __future__ import annotations

from collections.abc import Iterable

from linkweave.collectives.planning.algorithms.embed import Edge, embed
from linkweave.collectives.planning.algorithms.shortest import shortest_trees
from linkweave.collectives.planning.algorithms.trees import Tree
from linkweave.collectives.planning.collective import Pairs
from linkweave.collectives.planning.lower import MOST_BLOCKS, Algorithm, Copy, Reduce, few_enough
from linkweave.topology import Topology

_Detours = dict[tuple[int, int, int], tuple[int, ...]]


def one_shot(topology: Topology) -> Algorithm:
    """All-reduce in one step: each rank sends its data to all others, and combines all values.

    This suits the smallest messages, as each rank sends P - 1 times its data. All ranks combine in
    the order of the ranks. Raises PlanError for more than 64 ranks.
    """
    size = len(topology.gpus)
    few_enough("one_shot", size)
    edges = [Edge(0, a, b) for b in range(size) for a in range(b)]
    detours = embed(topology, edges, size, relabel=False).detours([0])
    moves = tuple(
        Reduce(tuple(s for s in range(size) if s != r), r, 0, 0, ahead=r)
        for r in range(size) if size > 1
    )  # fmt: skip
    return Algorithm("one_shot", size, 1, ((moves,),), (), detours)


def two_shot(topology: Topology) -> Algorithm:
    """All-reduce in two steps: rank r reduces chunk r of all inputs, then sends the result to all.

    Raises PlanError for more than 64 ranks.
    """
    size = len(topology.gpus)
    few_enough("two_shot", size)
    others = [tuple((r + i) % size for i in range(1, size)) for r in range(size)]
    stars = tuple(Tree((r,) * size) for r in range(size))
    edges = [Edge(r, o, r) for r in range(size) for o in others[r]]
    embedding = embed(topology, edges, size, relabel=False)  # all positions are alike
    detours: _Detours = {}
    for (r, o, _), middle in embedding.via.items():
        detours[r, o, r] = detours[size + r, r, o] = (middle,)
    gather = tuple(Reduce(others[r], r, r, r) for r in range(size) if others[r])
    scatter = tuple(Copy(r, others[r], r, size + r) for r in range(size) if others[r])
    return Algorithm("two_shot", size, size, ((gather, scatter),), stars, detours)


def direct(topology: Topology, collective: str, root: int) -> Algorithm:
    """Send each block of an all-to-all straight to its rank, or along a shortest path.

    Chunk s P + d goes from rank s to rank d, on channel d - s (mod P), so that no two ranks send
    to the same target first. Raises PlanError for more than 256 ranks.
    """
    size = len(topology.gpus)
    few_enough("direct", size, MOST_BLOCKS)
    routes = [(far, s, (s + far) % size) for s in range(size) for far in range(1, size)]
    moves = tuple(Copy(s, (d,), s * size + d, far) for far, s, d in routes)
    detours = _detours(topology, routes, range(size))
    return Algorithm("direct", size, size * size, ((moves,),), (), detours, collective)


def pairwise(topology: Topology, collective: str, pairs: Pairs) -> Algorithm:
    """Send from each source straight to its target, or along a shortest path.

    Pair i uses channel i.
    """
    routes = [(i, source, target) for i, (source, target) in enumerate(pairs)]
    moves = tuple(Copy(source, (target,), 0, i) for i, source, target in routes)
    detours = _detours(topology, routes, [source for source, _ in pairs])
    size = len(topology.gpus)
    return Algorithm("pairwise", size, 1, ((moves,),), (), detours, collective, pairs)


def _detours(
    topology: Topology, routes: Iterable[tuple[int, int, int]], sources: Iterable[int]
) -> _Detours:
    """Return the ranks that forward along each route (channel, source, target), if there are any.

    Routes follow the shortest-path trees of the `sources`.
    """
    order = list(sources)
    before: dict[int, dict[int, tuple[int, ...]]] = {}  # the ranks before each, source included
    for source, levels in zip(
        order, shortest_trees(topology, range(len(topology.gpus)), order), strict=True
    ):
        before[source] = {source: ()}
        for level in levels:
            for parent, children in level.items():
                way = (*before[source][parent], parent)
                before[source] |= dict.fromkeys(children, way)
    return {
        (channel, source, target): before[source][target][1:]
        for channel, source, target in routes if len(before[source][target]) > 1
    }  # fmt: skip
