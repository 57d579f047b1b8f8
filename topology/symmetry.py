"""Which vertices of a machine are alike: colour refinement, isomorphisms, automorphisms."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from topology.graph import Topology
    from topology.routes import Vertex

Colours = NDArray[np.uint64]
_ODD = np.uint64(0x9E3779B97F4A7C15)


def _mix(words: Colours) -> Colours:
    """A hash of each word (the finaliser of SplitMix64; overflow is meant)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


class Wiring:
    """Vertices and labelled arcs as arrays, to be coloured.

    Colours are 64-bit hashes of what is seen from a vertex, so they do not depend on names or on
    order, and colours of two wirings compare. Two vertices that differ share one with a chance of
    about n^2 / 2^64.
    """

    def __init__(
        self, vertices: Sequence[Vertex], arcs: Iterable[tuple[Vertex, Vertex, Hashable]]
    ) -> None:
        self.index = {v: i for i, v in enumerate(vertices)}
        listed = list(arcs)
        self.src = np.array([self.index[a] for a, _, _ in listed], np.int64)
        self.dst = np.array([self.index[b] for _, b, _ in listed], np.int64)
        # hash() of a tuple with text in it differs from process to process; repr() does not
        self.label = colour_of(repr(label) for _, _, label in listed)

    def refine(self, colours: Colours) -> Colours:
        """The coarsest refinement in which vertices of a colour see the same colours (1-WL)."""
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
        """The refinement once this vertex has a colour of its own."""
        changed = colours.copy()
        i = self.index[vertex]
        changed[i] = _mix(changed[i : i + 1] + _ODD)[0]
        return self.refine(changed)


def colour_of(marks: Iterable[str]) -> Colours:
    """A colour for each mark, the same wherever the mark is."""
    import hashlib

    return np.array(
        [int.from_bytes(hashlib.blake2b(m.encode(), digest_size=8).digest()) for m in marks],
        np.uint64,
    )


def _coloured(topology: Topology) -> tuple[dict[Vertex, int], Any]:
    """Each vertex of the fabric with its colour, and the fabric as a networkx graph."""
    import networkx as nx  # only here: planning and loading stay free of it

    links = topology.fabric
    ends = (end for link in links for end in (link.src, link.dst))
    vertices = list(dict.fromkeys((*topology.gpus, *ends)))
    wiring = Wiring(vertices, [(k.src, k.dst, (k.kind, k.count, k.bandwidth)) for k in links])
    ranks = set(topology.gpus)
    start = colour_of(
        "rank" if v in ranks else "forwarder" if isinstance(v, int) else "switch" for v in vertices
    )
    colours = dict(zip(vertices, map(int, wiring.refine(start)), strict=True))
    graph = nx.DiGraph()
    graph.add_nodes_from((v, {"colour": colours[v]}) for v in vertices)
    for link in links:
        graph.add_edge(link.src, link.dst, wire=(link.kind, link.count, link.bandwidth))
    return colours, graph


def mappings(one: Topology, other: Topology) -> Iterator[Mapping[int, int]]:
    """Every renumbering of `one`'s GPUs that turns its fabric into `other`'s, once each."""
    import networkx as nx

    mine, graph = _coloured(one)
    theirs, wanted = _coloured(other)
    if sorted(mine.values()) != sorted(theirs.values()):
        return
    matcher = nx.algorithms.isomorphism.DiGraphMatcher(
        graph,
        wanted,
        node_match=lambda a, b: a["colour"] == b["colour"],
        edge_match=lambda a, b: a["wire"] == b["wire"],
    )
    seen: set[tuple[int, ...]] = set()
    for found in matcher.isomorphisms_iter():
        mapping = {g: found[g] for g in one.gpus}
        images = tuple(mapping.values())
        if images not in seen:  # switches may be exchanged while the GPUs stay
            yield mapping
        seen.add(images)
