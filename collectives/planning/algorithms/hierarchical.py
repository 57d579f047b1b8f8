"""All-reduce on clusters: inside each node, then between nodes, then inside each node again."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.algorithms.rings import around
from linkweave.collectives.planning.algorithms.shortest import shortest_trees
from linkweave.collectives.planning.algorithms.trees import Tree, two_trees
from linkweave.collectives.planning.lower import Algorithm, Copy, Move, Reduce, Round
from linkweave.topology import Topology
from linkweave.topology.clusters import nodes_of

_RING_NODES = 32
_MIDDLE, _GATHER, _DOWN = 100_000, 150_000, 200_000
"""The first channels between nodes, of a ring's way back there, and of the way back in nodes."""


def hierarchical(topology: Topology) -> Algorithm:
    """Reduce a slice on each GPU of a node, all-reduce slices between nodes, broadcast in nodes.

    Inside a node a slice moves over a tree of shortest paths (a star behind a switch), over NVLinks
    alone if they connect the node; the trees share the links evenly. Between nodes each slice is
    two chunks, one for each tree of an overlapped double tree over the nodes, so every NIC sends
    and receives about twice its slice. GPU g communicates with GPU g of other nodes only, over its
    own rail if there are rails. Raises PlanError unless the machine is a cluster of equal nodes.
    """
    nodes = _nodes("hierarchical", topology)
    trees = [_over_tree(nodes, tree, t, 2) for t, tree in enumerate(two_trees(len(nodes)))]
    middle = [
        tuple(m for part in parts for m in part) for parts in zip_longest(*trees, fillvalue=())
    ]
    return _wrapped("hierarchical", topology, nodes, 2, middle)


def hierarchical_ring(topology: Topology) -> Algorithm:
    """All-reduce as `hierarchical` does, with a ring of n nodes: a NIC sends 2(n - 1)/n slices.

    This takes more start-ups than trees and moves fewer bytes. Each chunk of a slice has channels
    of its own, one for the reduce-scatter and one for the all-gather between nodes. So a NIC has
    other chunks to send while one waits, and groups of chunks overlap: a single channel for the
    whole ring would leave a quarter of a NIC's time unused. Raises PlanError also for more than
    32 nodes: planning those, 256 GPUs, takes half a minute.
    """
    nodes = _nodes("hierarchical_ring", topology)
    n = len(nodes)
    if n > _RING_NODES:
        raise PlanError(f"hierarchical_ring is for at most {_RING_NODES} nodes, not {n}")
    scatter, gather = around(list(zip(*nodes, strict=True)), lambda g, i: g * n + i)
    middle = [*_apart(scatter, _MIDDLE), *_apart(gather, _GATHER)]
    return _wrapped("hierarchical_ring", topology, nodes, n, middle)


def _apart(rounds: list[Round], first: int) -> list[Round]:
    """The rounds with a channel for each chunk."""
    return [tuple(replace(m, channel=first + m.chunk) for m in moves) for moves in rounds]


def _nodes(name: str, topology: Topology) -> list[list[int]]:
    """Return the ranks of each node. Raises PlanError unless there are several equal nodes."""
    nodes = nodes_of(topology)
    sizes = {len(node) for node in nodes}
    if not any(link.kind == "network" for link in topology.links):
        nodes = nodes[:1]
    if len(nodes) < 2 or len(sizes) > 1:
        raise PlanError(
            f"{name} is for clusters of equal nodes; {topology.name} has "
            + ("one node" if len(nodes) < 2 else f"nodes of {sorted(sizes)} GPUs")
        )
    rank = {g: r for r, g in enumerate(topology.gpus)}
    return [[rank[g] for g in node] for node in nodes]


def _wrapped(
    name: str, topology: Topology, nodes: list[list[int]], parts: int, middle: list[Round]
) -> Algorithm:
    """Return an algorithm with the rounds inside nodes around the `middle` ones between nodes, for
    slices of `parts` chunks."""
    up: list[list[Move]] = []  # by depth
    down: list[list[Move]] = []
    for node in nodes:
        for g, tree in enumerate(shortest_trees(topology, node)):
            for depth, level in enumerate(tree):
                if depth == len(up):
                    up.append([])
                    down.append([])
                for chunk in range(g * parts, (g + 1) * parts):
                    for r, children in level.items():
                        up[depth].append(Reduce(children, r, chunk, chunk))
                        down[depth].append(Copy(r, children, chunk, _DOWN + chunk))
    rounds = (*map(tuple, reversed(up)), *middle, *map(tuple, down))
    return Algorithm(
        name, len(topology.gpus), parts * len(nodes[0]), (tuple(r for r in rounds if r),)
    )  # fmt: skip


def _over_tree(nodes: list[list[int]], tree: Tree, t: int, parts: int) -> list[Round]:
    """Return the rounds of tree t over the nodes, which all-reduces chunk t of every slice."""
    up: list[Round] = []
    down: list[Round] = []
    for level in tree.levels[:-1]:
        reduces, copies = [], []
        for n in filter(tree.children, level):
            for g, mine in enumerate(nodes[n]):
                chunk, children = parts * g + t, tuple(nodes[c][g] for c in tree.children(n))
                reduces.append(Reduce(children, mine, chunk, _MIDDLE + 2 * chunk))
                copies.append(Copy(mine, children, chunk, _MIDDLE + 2 * chunk + 1))
        up.insert(0, tuple(reduces))
        down.append(tuple(copies))
    return [*up, *down]
