"""The parts of algorithms for clusters: moves inside nodes, and around rings of nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.algorithms.shortest import shortest_trees
from linkweave.collectives.planning.lower import Copy, Move, Reduce, Round
from linkweave.topology import Topology
from linkweave.topology.clusters import nodes_of

Node = list[int]
"""The ranks of a node."""
Hop = tuple[int, Node, Node]
"""A chunk of every slice goes from one node to another."""

DOWN = 200_000
"""The first channel of the way back inside nodes."""


def equal_nodes(name: str, topology: Topology) -> list[Node]:
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


def gates(topology: Topology, nodes: Sequence[Node]) -> list[Node]:
    """Return of each node the ranks that are the nearest to the network, in the same places.

    Where a node has a NIC for all its GPUs, those beyond the link between its CPUs leave it to the
    others to communicate with other nodes. Any GPUs that no path connects count as near.
    """
    one, other = ([topology.gpus[rank] for rank in node] for node in nodes[:2])
    hops = [len(topology.hops.get(ends, ())) for ends in zip(one, other, strict=True)]
    return [[node[g] for g, far in enumerate(hops) if far == min(hops)] for node in nodes]


def inside(
    topology: Topology, nodes: Sequence[Node], roots: Sequence[Node],
    chunks: Callable[[int], Iterable[int]],
) -> tuple[list[Round], list[Round]]:  # fmt: skip
    """Return the rounds that reduce `chunks(g)` to root g of each node, and those that copy them
    back to all its GPUs, over trees of shortest paths that share the links evenly."""
    up: list[list[Move]] = []  # by depth
    down: list[list[Move]] = []
    for node, ends in zip(nodes, roots, strict=True):
        for g, tree in enumerate(shortest_trees(topology, node, ends)):
            for depth, level in enumerate(tree):
                if depth == len(up):
                    up.append([])
                    down.append([])
                for chunk in chunks(g):
                    for r, children in level.items():
                        up[depth].append(Reduce(children, r, chunk, chunk))
                        down[depth].append(Copy(r, children, chunk, DOWN + chunk))
    return [tuple(moves) for moves in reversed(up)], [tuple(moves) for moves in down]


def around(rings: Sequence[Sequence[Node]], parts: int, step: int, first: int) -> list[Hop]:
    """Return the hops of a step around all rings; at first each chunk is `first` places after its
    owner. The chunks beyond a ring's length have the same owners as its first ones."""
    found = []
    for ring in rings:
        for chunk in range(parts if step < len(ring) - 1 else 0):
            at = chunk + first + step
            found.append((chunk, ring[at % len(ring)], ring[(at + 1) % len(ring)]))
    return found
