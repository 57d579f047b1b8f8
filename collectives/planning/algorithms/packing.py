"""Packing of spanning trees into links, for `packed_trees`.

An overlapped all-reduce over a spanning tree uses each link of the tree once in each direction,
wherever the root is. So the trees are undirected spanning trees. If every link is split into m
equal shares, floor(bound * m) trees fit, where the bound is that of Nash-Williams and Tutte
(`topology.bounds`), and each carries 1/m of a link's bandwidth.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from fractions import Fraction

from linkweave.collectives.planning.algorithms.trees import Tree
from linkweave.topology import Vertex
from linkweave.topology.bounds import narrowest_partition
from linkweave.topology.cuts import FlowNetwork

_TREES, _PARTS, _VALUES = 32, 8, 6  # limits: trees, shares of a link, link bandwidths tried
_ENOUGH = Fraction(99, 100)
Pair = tuple[int, int]
NumberedEdge = tuple[int, int, int]
"""The ranks that an edge joins, and a number that distinguishes parallel edges."""


def spanning_forests(
    size: int, edges: Sequence[NumberedEdge], count: int
) -> list[set[NumberedEdge]]:
    """Return `count` disjoint forests over `edges` with the largest possible number of edges.

    Matroid union (Edmonds 1965): an edge that closes a cycle in every forest can still enter if
    edges of those cycles can move on to other forests; the shortest such chain of moves is applied.
    If there is none, every forest spans the ranks that the search has reached, so no later edge
    among them can enter (the clumps of Roskind and Tarjan 1985).
    """
    forests = [_Forest(size) for _ in range(count)]
    home: dict[NumberedEdge, int] = {}
    clump = list(range(size))  # of each rank; every forest spans the ranks of a clump
    for edge in edges:
        if clump[edge[0]] == clump[edge[1]]:
            continue
        came: dict[NumberedEdge, NumberedEdge | None] = {edge: None}
        queue = deque([edge])
        end: tuple[NumberedEdge, int] | None = None
        while queue and end is None:
            moving = queue.popleft()
            for i, forest in enumerate(forests):
                if home.get(moving) == i:
                    continue
                cycle = forest.path(moving[0], moving[1])
                if cycle is None:
                    end = moving, i
                    break
                for other in cycle:
                    if other not in came:
                        came[other] = moving
                        queue.append(other)
        if end is None:
            reached = {clump[rank] for a, b, _ in came for rank in (a, b)}
            clump = [edge[0] + size if c in reached else c for c in clump]
        step: NumberedEdge | None
        step, to = end or (None, 0)
        while step is not None:  # each edge moves to the forest that the one before it leaves
            left = home.get(step)
            if left is not None:
                forests[left].remove(step)
            forests[to].add(step)
            home[step] = to
            step, to = came[step], left if left is not None else 0
    return [forest.edges for forest in forests]


class _Forest:
    """A set of edges without a cycle. The roots of its trees are found again after a change."""

    def __init__(self, size: int) -> None:
        self.edges: set[NumberedEdge] = set()
        self._near: list[dict[NumberedEdge, int]] = [{} for _ in range(size)]
        self._above: list[tuple[int, NumberedEdge] | None] = []  # each rank's parent
        self._level: list[int] = []
        self._root: list[int] = []

    def add(self, edge: NumberedEdge) -> None:
        self.edges.add(edge)
        self._near[edge[0]][edge] = edge[1]
        self._near[edge[1]][edge] = edge[0]
        self._root = []

    def remove(self, edge: NumberedEdge) -> None:
        self.edges.remove(edge)
        del self._near[edge[0]][edge], self._near[edge[1]][edge]
        self._root = []

    def _find_roots(self) -> None:
        size = len(self._near)
        self._above, self._level, self._root = [None] * size, [0] * size, [-1] * size
        for root in range(size):
            if self._root[root] >= 0:
                continue
            self._root[root] = root
            order = [root]
            for at in order:
                for edge, other in self._near[at].items():
                    if self._root[other] < 0:
                        self._root[other] = root
                        self._above[other] = at, edge
                        self._level[other] = self._level[at] + 1
                        order.append(other)

    def path(self, a: int, b: int) -> list[NumberedEdge] | None:
        """Return the edges of the path from b to a, or None if there is no path."""
        if not self._root:
            self._find_roots()
        if self._root[a] != self._root[b]:
            return None
        above, level = self._above, self._level
        from_a: list[NumberedEdge] = []
        from_b: list[NumberedEdge] = []
        while a != b:
            at, found = (a, from_a) if level[a] > level[b] else (b, from_b)
            step = above[at]
            assert step is not None  # only the common root has none
            found.append(step[1])
            if found is from_a:
                a = step[0]
            else:
                b = step[0]
        return from_b + from_a[::-1]


def rooted(size: int, edges: Sequence[Pair] | set[NumberedEdge]) -> Tree:
    """Return the tree over these edges, with the lowest root of those of least depth."""
    near: list[list[int]] = [[] for _ in range(size)]
    for a, b, *_ in edges:
        near[a].append(b)
        near[b].append(a)

    def hang(root: int) -> Tree:
        parent = [-1] * size
        parent[root] = root
        order = [root]
        for at in order:
            for other in near[at]:
                if parent[other] < 0:
                    parent[other] = at
                    order.append(other)
        return Tree(tuple(parent))

    return min(map(hang, range(size)), key=lambda tree: (tree.depth, tree.root))


def pack(size: int, links: Mapping[Pair, tuple[int, int]]) -> list[Tree]:
    """Return spanning trees that share the links.

    `links` gives the bandwidth between ranks a < b, in any unit, and how much of it one tree can
    use. All trees get equal shares. Of the shares tried, the result uses the one with the fewest
    trees that loses at most 1 % of the bound, or else the one that loses least.
    """
    capacity = {pair: c for pair, (c, _) in links.items()}
    best = _strength(size, capacity)
    taken: tuple[Fraction, int] | None = None  # (part of the bound, -trees)
    share = min(Fraction(c) for c in capacity.values())
    slowest = min(widest for _, widest in links.values())
    wide = sorted({min(c, widest) for c, widest in links.values()}, reverse=True)
    narrow = sorted({min(c, slowest) for c in capacity.values()}, reverse=True)
    for value in dict.fromkeys((*wide[:_VALUES], *narrow[:_VALUES])):
        for parts in range(2, _PARTS + 1):  # two or more trees hide one another's start-ups
            tried = Fraction(value, parts)
            shares = {pair: c * parts // value for pair, c in capacity.items()}
            most = sum(shares.values()) // (size - 1)
            loses_little = math.ceil(_ENOUGH * best / tried)
            if taken and (min(most * tried / best, _ENOUGH), -min(most, loses_little)) <= taken:
                continue
            count = int(_strength(size, shares))
            found = min(count * tried / best, _ENOUGH), -count
            if 0 < count <= _TREES and (taken is None or found > taken):
                taken, share = found, tried
    count = -taken[1] if taken else 1
    edges = [(a, b, i) for (a, b), c in sorted(capacity.items()) for i in range(int(c / share))]
    forests = spanning_forests(size, edges, count)
    return [rooted(size, forest) for forest in forests]


def _strength(size: int, capacity: Mapping[Pair, int]) -> Fraction:
    """Return the bound of Nash-Williams and Tutte."""
    there: dict[tuple[Vertex, Vertex], int] = {
        ends: c for (a, b), c in capacity.items() if c for ends in ((a, b), (b, a))
    }
    return narrowest_partition(FlowNetwork(range(size), there))[0]
