"""Packing of spanning trees into links, for `packed_trees`.

An overlapped all-reduce over a spanning tree uses each link of the tree once in each direction,
wherever the root is. So the trees are undirected spanning trees. If every link is split into m
equal shares, floor(bound * m) trees fit, where the bound is that of Nash-Williams and Tutte
(`topology.bounds`), and each carries 1/m of a link's bandwidth.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.algorithms.trees import Tree
from linkweave.topology import Topology, Vertex
from linkweave.topology.bounds import FlowNetwork, narrowest_partition
from linkweave.topology.symmetry import pairs_alike

_ROUNDS = 60
_MOST = 64  # GPUs, as the program has a variable for every pair
_FINE = 1 << 20  # rates are rounded down to multiples of this part of the largest


def pair_capacity(topology: Topology) -> dict[Pair, tuple[int, int]]:
    """Return the capacity of each pair of ranks a < b in each direction, and that of one message.

    The unit is one link if equal links join GPUs directly; else the capacities are rates from the
    linear program. Pairs that exchange nothing are left out. Raises PlanError if the program would
    be too large.
    """
    counts = link_counts(topology)
    backs = ((k, topology.by_ends.get((k.dst, k.src))) for k in topology.fabric)
    if counts and all(back and back.count == k.count for k, back in backs):
        return {(a, b): (n, 1) for (a, b), n in counts.items() if a < b}
    if len(topology.gpus) > _MOST:
        raise PlanError(
            f"sharing the links of {topology.name} is for at most {_MOST} GPUs, not "
            f"{len(topology.gpus)}: use hierarchical"
        )
    rates = _rates(topology)
    unit = max(1, max(rates.values()) // _FINE)
    return {
        pair: (rate // unit, _message_rate(topology, *pair) // unit)
        for pair, rate in rates.items() if rate >= unit
    }  # fmt: skip


def link_counts(topology: Topology) -> dict[Pair, int]:
    """Return the links from each rank to each other rank if equal links join GPUs directly.

    Otherwise the result is empty.
    """
    rank = {g: r for r, g in enumerate(topology.gpus)}
    fabric = topology.fabric
    if len({k.bandwidth for k in fabric}) != 1:
        return {}
    if any(v not in rank for k in fabric for v in (k.src, k.dst)):
        return {}
    return {(rank[k.src], rank[k.dst]): k.count for k in fabric}  # type: ignore[index]


def _message_rate(topology: Topology, a: int, b: int) -> int:
    """Return the bytes/s of one message between two ranks."""
    path = topology.hops[topology.gpus[a], topology.gpus[b]]
    return min(topology.by_ends[ends].bandwidth_each for ends in pairwise(path))


def _rates(topology: Topology) -> dict[Pair, int]:
    """Return the bytes/s in each direction of each pair that links join.

    Symmetric pairs get equal rates: the mean over the symmetries of a solution is a solution too.
    """
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    gpus, size = topology.gpus, len(topology.gpus)
    alike = pairs_alike(topology)
    classes: dict[int, list[Pair]] = {}
    for b in range(size):
        for a in range(b):
            if (gpus[a], gpus[b]) in topology.hops and (gpus[b], gpus[a]) in topology.hops:
                classes.setdefault(alike[gpus[a], gpus[b]], []).append((a, b))
    members = list(classes.values())
    crossing: dict[tuple[Vertex, Vertex], Counter[int]] = {}
    for i, pairs in enumerate(members):
        for a, b in pairs:
            for ends in ((gpus[a], gpus[b]), (gpus[b], gpus[a])):
                path = topology.hops[ends]
                for link in pairwise(path):
                    crossing.setdefault(link, Counter())[i] += 1
    scale = max(k.bandwidth * k.count for k in topology.fabric)
    goal = len(members)  # the column of the bound, which is the last
    rows: dict[tuple[tuple[int, float], ...], float] = {}
    for link, users in crossing.items():
        row = tuple((i, float(n)) for i, n in sorted(users.items()))
        limit = topology.by_ends[link].bandwidth * topology.by_ends[link].count / scale
        rows[row] = min(limit, rows.get(row, limit))
    parts: list[tuple[int, ...]] = [(r,) for r in range(size)]
    best: dict[Pair, int] = {}
    reached = Fraction(-1)
    for _ in range(_ROUNDS):
        known = len(rows)
        for partition in [parts, *([part] for part in parts if len(parts) > 2)]:
            # ranks in no part make up one more part
            part_of = {r: i for i, part in enumerate(partition) for r in part}
            across = [
                (i, -float(n)) for i, pairs in enumerate(members)
                if (n := sum(part_of.get(a) != part_of.get(b) for a, b in pairs))
            ]  # fmt: skip
            count = len(partition) + (len(part_of) < size)
            rows[*across, (goal, float(count - 1))] = 0.0
        if len(rows) == known:
            break
        data = [v for row in rows for _, v in row]
        columns = [c for row in rows for c, _ in row]
        starts = list(accumulate(map(len, rows), initial=0))
        matrix = csr_array((data, columns, starts), shape=(len(rows), goal + 1))
        # the small cost prefers, among optimal solutions, one that moves little
        cost = [*(1e-6 * len(pairs) / size for pairs in members), -1.0]
        solution = linprog(
            cost, A_ub=matrix, b_ub=list(rows.values()), bounds=(0, None), method="highs"
        )
        rates = {
            pair: int(x * scale)
            for pairs, x in zip(members, solution.x, strict=False) if x > 1e-9
            for pair in pairs
        }  # fmt: skip
        there: dict[tuple[Vertex, Vertex], int] = {
            ends: rate for (a, b), rate in rates.items() for ends in ((a, b), (b, a)) if rate
        }
        value, cuts = narrowest_partition(FlowNetwork(range(size), there))
        if value > reached:
            best, reached = rates, value
        if float(value) >= solution.x[goal] * scale * (1 - 1e-6):
            break
        parts = [tuple(r for r in range(size) if r in cut.side) for cut in cuts]
    return best


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
