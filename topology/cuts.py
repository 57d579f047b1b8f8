"""Exact minimum cuts of a network, computed after merging vertices that symmetry makes alike.

Give one rank a colour of its own and refine the colouring until it is stable; then merge all
vertices of one colour and add up the arcs between two colours. This keeps minimum cuts. Every cut
of the merged network is a cut of the whole. Conversely, every vertex of a colour has the same
capacity to and from every other colour, so a flow through the merged network, split over the
original arcs in proportion to their capacities, is a flow through the whole. A cluster of a
thousand GPUs thus shrinks to a dozen vertices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import lcm

import numpy as np

from linkweave.topology.routes import Vertex, neighbours, reach
from linkweave.topology.symmetry import Wiring, colour_of

_S, _T = -1, -2  # source and sink, beside the merged vertices 0, 1, ...


@dataclass(frozen=True, slots=True)
class Cut:
    """A set of vertices and the capacity out of it (into it if `inward`), in bytes/s."""

    side: frozenset[Vertex]
    capacity: int
    inward: bool = False


@dataclass(frozen=True, slots=True)
class _View:
    """The network with the vertices merged that look alike to one rank."""

    members: tuple[tuple[Vertex, ...], ...]
    arcs: Mapping[tuple[int, int], int]


class FlowNetwork:
    """Directed integer capacities between vertices, some of which are ranks.

    Ranks of one set in `alike` see equal networks: if weights are equal within each set, their
    minimum cuts have equal capacities. Each rank in `apart` is a set of its own.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        capacities: Mapping[tuple[Vertex, Vertex], int],
        apart: Collection[int] = (),
    ) -> None:
        self.ranks = tuple(ranks)
        ends = (v for arc in capacities for v in arc)
        self.vertices: tuple[Vertex, ...] = tuple(dict.fromkeys((*self.ranks, *ends)))
        self._out: dict[Vertex, list[tuple[Vertex, int]]] = {v: [] for v in self.vertices}
        for (a, b), capacity in capacities.items():
            self._out[a].append((b, capacity))
        self._wiring = Wiring(self.vertices, [(a, b, c) for (a, b), c in capacities.items()])
        marks: dict[Vertex, str] = dict.fromkeys(self.ranks, "rank")
        marks |= {g: f"rank {g}" for g in apart}
        self._colours = self._wiring.refine(colour_of(marks.get(v, "") for v in self.vertices))
        self._views: dict[int, _View] = {}
        self.everything = 1 + sum(capacities.values())  # more than any cut

    @cached_property
    def alike(self) -> list[tuple[int, ...]]:
        while True:
            sets: dict[tuple[int, bytes, bytes], list[int]] = {}
            for rank in self.ranks:
                seen = self._wiring.single_out(self._colours, rank)
                colours, counts = np.unique(seen, return_counts=True)
                own = int(self._colours[self._wiring.index[rank]])
                sets.setdefault((own, colours.tobytes(), counts.tobytes()), []).append(rank)
            if len(sets) == len({own for own, _, _ in sets}):
                return [tuple(members) for members in sets.values()]
            marks: dict[Vertex, str] = {
                rank: repr(key) for key, members in sets.items() for rank in members
            }
            self._colours = self._wiring.refine(
                colour_of(marks.get(v, repr(c)) for v, c in zip(self.vertices, self._colours,
                                                                strict=True))
            )  # fmt: skip

    def _view(self, rank: int) -> _View:
        if rank not in self._views:
            assert self.alike  # which settles the colours
            groups: dict[int, list[Vertex]] = {}
            colours = self._wiring.single_out(self._colours, rank)
            for v, colour in zip(self.vertices, colours, strict=True):
                groups.setdefault(int(colour), []).append(v)
            index = {v: i for i, members in enumerate(groups.values()) for v in members}
            arcs: dict[tuple[int, int], int] = {}
            for i, members in enumerate(groups.values()):
                for v, capacity in self._out[members[0]]:  # every member has the same
                    if index[v] != i:
                        arcs[i, index[v]] = arcs.get((i, index[v]), 0) + capacity * len(members)
            self._views[rank] = _View(tuple(map(tuple, groups.values())), arcs)
        return self._views[rank]

    def least(
        self,
        rank: int,
        weights: Mapping[Vertex, Fraction | int],
        inside: Collection[int] = (),
        outside: Collection[int] = (),
    ) -> Cut:
        """Return the largest set S that minimises the capacity out of S minus the weight of S.

        S contains `inside` and nothing of `outside`; both may name `rank` and the ranks that are
        `apart`. Weights must be equal within each set of `alike`.
        """
        view = self._view(rank)
        found = [Fraction(w) for w in {*weights.values()}]
        scale = lcm(*(w.denominator for w in found))
        heavy = len(weights) * max(map(abs, found), default=Fraction(0))  # no less than all
        endless = int((self.everything + heavy) * scale) + 1
        residual: dict[int, dict[int, int]] = {_S: {}, _T: {}}
        for i, members in enumerate(view.members):
            residual[i] = {}
            first = members[0]
            if first not in self._ranks:
                continue
            gain = int(weights.get(first, 0) * scale) * len(members)
            if first in inside:
                residual[_S][i] = endless
            elif gain > 0:
                residual[_S][i] = gain
            if first in outside:
                residual[i][_T] = endless
            elif gain < 0:
                residual[i][_T] = -gain
        for (i, j), capacity in view.arcs.items():
            residual[i][j] = capacity * scale
        _saturate(residual)
        open_ = ((j, i) for i, out in residual.items() for j, left in out.items() if left)
        beyond = reach(neighbours(open_), _T)  # what can still reach the sink
        kept = [i for i in range(len(view.members)) if i not in beyond]
        leaving = sum(c for (i, j), c in view.arcs.items() if i not in beyond and j in beyond)
        return Cut(frozenset(v for i in kept for v in view.members[i]), leaving)

    @cached_property
    def _ranks(self) -> frozenset[int]:
        return frozenset(self.ranks)


def _saturate(residual: dict[int, dict[int, int]]) -> None:
    """Push a maximum flow from source to sink along shortest paths (Edmonds and Karp)."""
    while True:
        came: dict[int, int] = {_S: _S}
        queue = deque([_S])
        while queue and _T not in came:
            i = queue.popleft()
            for j, left in residual[i].items():
                if left and j not in came:
                    came[j] = i
                    queue.append(j)
        if _T not in came:
            return
        way = [_T]
        while way[-1] != _S:
            way.append(came[way[-1]])
        steps = list(zip(way[1:], way, strict=False))
        flow = min(residual[i][j] for i, j in steps)
        for i, j in steps:
            residual[i][j] -= flow
            residual[j][i] = residual[j].get(i, 0) + flow
