"""As many spanning trees as the links hold: the trees of `packed_trees`.

Reduce up and broadcast down at once over a spanning tree take each of its links once in each
direction, wherever the root is. So trees for all-reduce are undirected spanning trees, packed into
the links; with every link split into m equal shares, floor(bound * m) trees fit, where the bound is
that of Nash-Williams and Tutte (`topology.bounds`), and carry 1/m of a link each.
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

_TREES, _PARTS, _VALUES = 32, 8, 6  # most trees; shares of a link; sizes of link tried
_ENOUGH = Fraction(99, 100)
Pair = tuple[int, int]
NumberedEdge = tuple[
    int, int, int
]  # the ranks it joins, and a number that tells parallel ones apart


def spanning_forests(
    size: int, edges: Sequence[NumberedEdge], count: int
) -> list[set[NumberedEdge]]:
    """`count` disjoint forests over `edges` with as many edges in all as there can be.

    Matroid union (Edmonds 1965): an edge that closes a circle in every forest may still go in, if
    edges of the circles can move on to other forests; the shortest such chain is carried out. Where
    there is none, every forest spans the ranks that were reached, so no edge among them can go in
    later (Roskind and Tarjan 1985: a clump).
    """
    forests = [_Forest(size) for _ in range(count)]
    home: dict[NumberedEdge, int] = {}
    clump = list(range(size))  # of each rank; ranks of one clump are spanned by every forest
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
                circle = forest.path(moving[0], moving[1])
                if circle is None:
                    end = moving, i
                    break
                for other in circle:
                    if other not in came:
                        came[other] = moving
                        queue.append(other)
        if end is None:
            reached = {clump[rank] for a, b, _ in came for rank in (a, b)}
            clump = [edge[0] + size if c in reached else c for c in clump]
        step: NumberedEdge | None
        step, to = end or (None, 0)
        while step is not None:  # each takes the place that the one before it leaves
            left = home.get(step)
            if left is not None:
                forests[left].remove(step)
            forests[to].add(step)
            home[step] = to
            step, to = came[step], left if left is not None else 0
    return [forest.edges for forest in forests]


class _Forest:
    """Its trees hang from a root each, as long as no edge comes or goes."""

    def __init__(self, size: int) -> None:
        self.edges: set[NumberedEdge] = set()
        self._near: list[dict[NumberedEdge, int]] = [{} for _ in range(size)]
        self._above: list[
            tuple[int, NumberedEdge] | None
        ] = []  # of each rank, on the way to its root
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

    def _hang(self) -> None:
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
        """The edges from b to a, or None where they are not connected."""
        if not self._root:
            self._hang()
        if self._root[a] != self._root[b]:
            return None
        above, level = self._above, self._level
        from_a: list[NumberedEdge] = []
        from_b: list[NumberedEdge] = []
        while a != b:
            at, found = (a, from_a) if level[a] > level[b] else (b, from_b)
            step = above[at]
            assert step is not None  # only a root has none, and both have the same
            found.append(step[1])
            if found is from_a:
                a = step[0]
            else:
                b = step[0]
        return from_b + from_a[::-1]


def rooted(size: int, edges: Sequence[Pair] | set[NumberedEdge]) -> Tree:
    """The tree over these edges, rooted where it is least deep (the lowest rank of equals)."""
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
    """Spanning trees over links.

    `links` tells what ranks a < b may send each other, in any unit, and the most of it that one
    tree can use. A tree gets a share that is the same for all trees; of the shares tried the one
    with the fewest trees is taken that loses no more than 1 % of the bound, else the best.
    """
    capacity = {pair: c for pair, (c, _) in links.items()}
    best = _strength(size, capacity)
    taken: tuple[Fraction, int] | None = None  # how good it is: of the bound, and fewer trees
    share = min(Fraction(c) for c in capacity.values())
    slowest = min(widest for _, widest in links.values())
    wide = sorted({min(c, widest) for c, widest in links.values()}, reverse=True)
    narrow = sorted({min(c, slowest) for c in capacity.values()}, reverse=True)
    for value in dict.fromkeys((*wide[:_VALUES], *narrow[:_VALUES])):
        for parts in range(2, _PARTS + 1):  # with two or more, start-ups hide behind others' bytes
            tried = Fraction(value, parts)
            whole = {pair: c * parts // value for pair, c in capacity.items()}
            most = sum(whole.values()) // (size - 1)  # a tree takes so many edges
            loses_little = math.ceil(_ENOUGH * best / tried)
            if taken and (min(most * tried / best, _ENOUGH), -min(most, loses_little)) <= taken:
                continue
            count = int(_strength(size, whole))
            found = min(count * tried / best, _ENOUGH), -count
            if 0 < count <= _TREES and (taken is None or found > taken):
                taken, share = found, tried
    count = -taken[1] if taken else 1
    edges = [(a, b, i) for (a, b), c in sorted(capacity.items()) for i in range(int(c / share))]
    forests = spanning_forests(size, edges, count)
    return [rooted(size, forest) for forest in forests]


def _strength(size: int, capacity: Mapping[Pair, int]) -> Fraction:
    there: dict[tuple[Vertex, Vertex], int] = {
        ends: c for (a, b), c in capacity.items() if c for ends in ((a, b), (b, a))
    }
    return narrowest_partition(FlowNetwork(range(size), there))[0]
