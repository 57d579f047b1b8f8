"""The parts of algorithms for clusters: moves inside nodes, and around rings of nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.algorithms.shortest import shortest_trees
from linkweave.collectives.planning.lower import Copy, Move, Reduce, Round
from linkweave.topology import Topology, Vertex
from linkweave.topology.clusters import nodes_of

Node = list[int]
"""The ranks of a node."""
Hop = tuple[int, Node, Node]
"""A chunk of every slice goes from one node to another."""

MIDDLE, BACK, DOWN = 100_000, 150_000, 200_000
"""The first channels between nodes, of the way back there, and of the way back inside nodes."""


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
    """Return the ranks of each node that communicate with other nodes: the same positions of all.

    Raises PlanError as `near_nics` does.
    """
    positions = sorted(g for near in near_nics(topology, nodes) for g in near)
    return [[node[position] for position in positions] for node in nodes]


def near_nics(topology: Topology, nodes: Sequence[Node]) -> list[list[int]]:
    """Return for each NIC of a node the positions of the GPUs that communicate by it.

    Of GPUs that share a NIC, the nearest to it do: those beyond the link between a node's CPUs
    leave its only NIC to the others. GPUs with no path to the next node do not. Raises PlanError if
    no position has a path in every node.
    """
    gpus = [[topology.gpus[rank] for rank in node] for node in nodes]
    paths = [
        [list(pairwise(topology.hops.get(ends, ()))) for ends in zip(node, following, strict=True)]
        for node, following in zip(gpus, [*gpus[1:], gpus[0]], strict=True)
    ]
    positions = {position for position in range(len(gpus[0])) if all(at[position] for at in paths)}
    if not positions:
        raise PlanError(f"no position has a path to the next node in every node of {topology.name}")
    for node_paths in paths:
        nics: dict[Vertex, dict[int, int]] = {}  # by NIC: the hops to it from each position
        for position in positions:
            path = node_paths[position]
            hops = [topology.by_ends[link].kind for link in path].index("network")
            nics.setdefault(path[hops][0], {})[position] = hops
        nearest = {nic: min(known.values()) for nic, known in nics.items()}
        positions = {g for nic in nics for g, hops in nics[nic].items() if hops == nearest[nic]}
    return [sorted(positions & known.keys()) for known in nics.values() if positions & known.keys()]


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


def hops_around(rings: Sequence[Sequence[Node]], parts: int, step: int, first: int) -> list[Hop]:
    """Return the hops of a step around all rings; at first each chunk is `first` places after its
    owner. The chunks beyond a ring's length have the same owners as its first ones."""
    found = []
    for ring in rings:
        for chunk in range(parts if step < len(ring) - 1 else 0):
            at = chunk + first + step
            found.append((chunk, ring[at % len(ring)], ring[(at + 1) % len(ring)]))
    return found
