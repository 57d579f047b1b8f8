"""Symmetries of machines: colour refinement, isomorphisms, automorphisms."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from linkweave.topology.graph import Graph, Vertex

Colours = NDArray[np.uint64]
_ODD = np.uint64(0x9E3779B97F4A7C15)


def _mix(words: Colours) -> Colours:
    """Hash each word with the finaliser of SplitMix64, which relies on overflow."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


class Wiring:
    """Vertices and labelled arcs as arrays, for colour refinement.

    Colours are 64-bit hashes of what a vertex sees. They depend on neither names nor order, so the
    colours of two wirings can be compared. Different vertices get the same colour with a
    probability of about n^2 / 2^64.
    """

    def __init__(
        self, vertices: Sequence[Vertex], arcs: Iterable[tuple[Vertex, Vertex, Hashable]]
    ) -> None:
        self.index = {v: i for i, v in enumerate(vertices)}
        self.size = len(self.index)
        listed = list(arcs)
        self.src = np.array([self.index[a] for a, _, _ in listed], np.int64)
        self.dst = np.array([self.index[b] for _, b, _ in listed], np.int64)
        # hash() of a tuple with text in it differs from process to process; repr() does not
        self.label = colour_of(repr(label) for _, _, label in listed)

    def refine(self, colours: Colours) -> Colours:
        """Refine until vertices of one colour see the same colours (1-WL)."""
        count = len(np.unique(colours))
        while count < len(colours):
            out, into = np.zeros_like(colours), np.zeros_like(colours)
            np.add.at(out, self.src, _mix(self.label + _ODD * colours[self.dst]))
            np.add.at(into, self.dst, _mix(self.label ^ _mix(colours[self.src])))
            finer = _mix(colours + _ODD * _mix(out + _ODD * _mix(into)))
            found = len(np.unique(finer))
            if found == count:
                return colours
            colours, count = finer, found
        return colours

    def single_out(self, colours: Colours, vertex: Vertex) -> Colours:
        changed = colours.copy()
        i = self.index[vertex]
        serial = np.array([len(np.unique(colours))], np.uint64)  # no two choices give one colour
        changed[i] = _mix(changed[i : i + 1] + _ODD * serial)[0]
        return self.refine(changed)


def colour_of(marks: Iterable[str]) -> Colours:
    """A colour for each mark; equal marks get equal colours."""
    return np.array(
        [int.from_bytes(hashlib.blake2b(m.encode(), digest_size=8).digest()) for m in marks],
        np.uint64,
    )


@dataclass(frozen=True)
class _Coloured:
    """A fabric to match: its wiring, its arcs by their ends, and its ranks."""

    wiring: Wiring
    arcs: Mapping[tuple[Vertex, Vertex], Hashable]
    ranks: frozenset[int]

    @staticmethod
    def of(topology: Graph) -> tuple[_Coloured, Colours]:
        ranks = frozenset(topology.gpus)
        arcs = {(k.src, k.dst): (k.kind, k.count, k.bandwidth) for k in topology.fabric}
        vertices = list(dict.fromkeys((*topology.gpus, *(v for ends in arcs for v in ends))))
        wiring = Wiring(vertices, [(a, b, wire) for (a, b), wire in arcs.items()])
        start = colour_of(
            "rank" if v in ranks else "forwarder" if isinstance(v, int) else "switch"
            for v in vertices
        )
        return _Coloured(wiring, arcs, ranks), wiring.refine(start)


def mappings(one: Graph, other: Graph) -> Iterator[Mapping[int, int]]:
    """Yield every renumbering of `one`'s GPUs that turns its fabric into `other`'s, once each.

    This is individualisation and refinement: take a GPU from the smallest set that still look
    alike, and match it in turn with each GPU of `other` that has its colour.
    """
    mine, colours = _Coloured.of(one)
    theirs, wanted = _Coloured.of(other)
    if mine.wiring.size != theirs.wiring.size or len(mine.arcs) != len(theirs.arcs):
        return
    # a stack, not a recursion: a cluster needs more choices than Python has frames
    todo = [(colours, wanted)]
    while todo:
        here, there = todo.pop()
        if not np.array_equal(np.sort(here), np.sort(there)):
            continue
        chosen = _undecided(mine, here)
        if chosen is None:
            if (found := _matched(mine, here, theirs, there)) is not None:
                yield found
            continue
        like = here[mine.wiring.index[chosen]]
        mates = [v for v, i in theirs.wiring.index.items() if there[i] == like]
        if chosen not in mine.ranks:
            mates = mates[:1]  # the ranks are settled: any match of what is left will do
        next_here = mine.wiring.single_out(here, chosen)
        todo += [(next_here, theirs.wiring.single_out(there, v)) for v in reversed(mates)]


def pairs_alike(topology: Graph) -> dict[tuple[int, int], int]:
    """Number the unordered pairs of GPUs so that pairs that look alike have the same number.

    The GPU that comes first in `gpus` is the pair's first. Two pairs look alike if colour
    refinement cannot tell them apart after one GPU of each is singled out. Pairs that a symmetry
    exchanges always look alike.
    """
    side, colours = _Coloured.of(topology)
    gpus = topology.gpus
    at = np.array([side.wiring.index[g] for g in gpus])
    seen = [side.wiring.single_out(colours, g)[at].tolist() for g in gpus]
    number: dict[tuple[int, ...], int] = {}
    found = {}
    for j, b in enumerate(gpus):
        for i, a in enumerate(gpus[:j]):
            key = tuple(sorted((seen[i][j], seen[j][i])))
            found[a, b] = number.setdefault(key, len(number))
    return found


def _undecided(side: _Coloured, colours: Colours) -> Vertex | None:
    """A vertex of the smallest colour that several vertices have; ranks come first."""
    unique, inverse, counts = np.unique(colours, return_inverse=True, return_counts=True)
    if len(unique) == len(colours):
        return None
    size = counts[inverse]
    candidates = [(v not in side.ranks, int(size[i]), i) for v, i in side.wiring.index.items()
                  if size[i] > 1]  # fmt: skip
    return list(side.wiring.index)[min(candidates)[2]]


def _matched(
    one: _Coloured, here: Colours, other: _Coloured, there: Colours
) -> Mapping[int, int] | None:
    """The mapping that the colours, all different, define, if it keeps every link."""
    by_colour = {int(there[i]): v for v, i in other.wiring.index.items()}
    to = {v: by_colour[int(here[i])] for v, i in one.wiring.index.items()}
    if any(other.arcs.get((to[a], to[b])) != wire for (a, b), wire in one.arcs.items()):
        return None
    return {v: w for v, w in to.items() if v in one.ranks and isinstance(v, int)
            and isinstance(w, int)}  # fmt: skip
