"""Trees of shortest paths from given ranks to all others, which share the links evenly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.algorithms.trees import Tree
from linkweave.topology import Topology, Vertex
from linkweave.topology.graph import connects, neighbours

Levels = list[dict[int, tuple[int, ...]]]
"""For each level from the root on: the children of each rank."""

_Link = tuple[Vertex, Vertex]


def shortest_trees(
    topology: Topology, ranks: Sequence[int], roots: Sequence[int] | None = None
) -> list[Levels]:
    """Return the trees over `ranks` whose roots are `roots` (by default all ranks), in that order.

    A hop may pass switches, but no other GPU. If NVLinks connect the ranks, the trees use no other
    links. Raises PlanError if the links do not connect the ranks.
    """
    gpus = topology.gpus
    links = {
        (a, b): tuple(pairwise(path))
        for a in ranks for b in ranks if (path := topology.hops.get((gpus[a], gpus[b])))
    }  # fmt: skip
    fast = [
        ends for ends, way in links.items()
        if all(topology.by_ends[link].kind == "nvlink" for link in way)
    ]  # fmt: skip
    near = neighbours(fast if connects(fast, ranks) else links)
    load: dict[_Link, Fraction] = {}
    order = ranks if roots is None else roots
    return [_shortest(topology, root, ranks, near, links, load) for root in order]


def tree_of(levels: Levels, size: int) -> Tree:
    """Return the same tree by the parent of each rank."""
    above = {child: up for level in levels for up, children in level.items() for child in children}
    return Tree(tuple(above.get(rank, rank) for rank in range(size)))


def _shortest(
    topology: Topology, root: int, ranks: Sequence[int], near: Mapping[int, list[int]],
    links: Mapping[tuple[int, int], tuple[_Link, ...]], load: dict[_Link, Fraction],
) -> Levels:  # fmt: skip
    """Return one tree. Among possible parents it takes the one whose busiest link has the least
    `load` (seconds a byte) so far, and adds to that load."""
    tree: Levels = []
    seen, level = {root}, [root]
    while below := sorted({b for a in level for b in near.get(a, ())} - seen):
        children: dict[int, list[int]] = {}
        for child in below:
            over = {a: (*links[a, child], *links.get((child, a), ())) for a in level
                    if child in near[a]}  # fmt: skip
            parent = min(over, key=lambda a: max(load.get(k, Fraction(0)) for k in over[a]))
            for link in over[parent]:
                wire = topology.by_ends[link]
                load[link] = load.get(link, Fraction(0)) + Fraction(1, wire.bandwidth * wire.count)
            children.setdefault(parent, []).append(child)
        tree.append({a: tuple(kids) for a, kids in children.items()})
        seen |= set(below)
        level = below
    if lost := set(ranks) - seen:
        raise PlanError(
            f"{topology.name}: GPUs {topology.gpus[root]} and {topology.gpus[min(lost)]} are not "
            "joined by any links"
        )
    return tree
