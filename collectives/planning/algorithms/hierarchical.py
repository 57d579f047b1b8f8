"""All-reduce on clusters: inside each node first, then between nodes, then inside again."""

from __future__ import annotations

from itertools import zip_longest

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.algorithms.rings import around
from linkweave.collectives.planning.algorithms.shortest import shortest_trees
from linkweave.collectives.planning.algorithms.trees import Tree, two_trees
from linkweave.collectives.planning.lower import Algorithm, Copy, Move, Reduce, Round
from linkweave.topology import Topology
from linkweave.topology.clusters import nodes_of

_RING_NODES = 8
_MIDDLE, _DOWN = 100_000, 200_000  # first channels between the nodes, and back inside them


def hierarchical(topology: Topology) -> Algorithm:
    """Each GPU reduces its slice of its node's data, slices go between nodes, and back.

    Inside a node a slice comes and goes over a tree of shortest ways (a star behind a switch),
    over NVLinks alone where they connect the node; the trees share the links out evenly. Between
    nodes each slice is two chunks, one for each tree of an overlapped double tree over the nodes,
    so every NIC sends and receives about twice its slice; GPU g talks to GPU g of the other nodes
    only, over its own rail where there are rails. Raises PlanError unless the machine is a cluster
    of equal nodes.
    """
    at = _nodes("hierarchical", topology)
    ways = [_over_tree(at, tree, t, 2) for t, tree in enumerate(two_trees(len(at)))]
    middle = [
        tuple(m for part in parts for m in part) for parts in zip_longest(*ways, fillvalue=())
    ]
    return _wrapped("hierarchical", topology, at, 2, middle)


def hierarchical_ring(topology: Topology) -> Algorithm:
    """As `hierarchical`, with a ring over the nodes: a NIC sends 2(n - 1)/n of its slice.

    More start-ups than trees have, and fewer bytes. PlanError for more than 8 nodes as well.
    """
    at = _nodes("hierarchical_ring", topology)
    n = len(at)
    if n > _RING_NODES:
        raise PlanError(f"hierarchical_ring is for at most {_RING_NODES} nodes, not {n}")
    scatter, gather = around(list(zip(*at, strict=True)), lambda g, i: g * n + i, _MIDDLE)
    return _wrapped("hierarchical_ring", topology, at, n, [*scatter, *gather])


def _nodes(name: str, topology: Topology) -> list[list[int]]:
    """The ranks of each node. Raises PlanError unless there are several nodes of one size."""
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
    name: str, topology: Topology, at: list[list[int]], parts: int, middle: list[Round]
) -> Algorithm:
    """The rounds inside the nodes before and after those between them, `parts` chunks a slice."""
    up: list[list[Move]] = []  # by the depth from which data comes
    down: list[list[Move]] = []
    for node in at:
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
        name, len(topology.gpus), parts * len(at[0]), (tuple(r for r in rounds if r),)
    )  # fmt: skip


def _over_tree(at: list[list[int]], tree: Tree, t: int, parts: int) -> list[Round]:
    """Tree t over the nodes, for chunk t of every slice: up, deepest level first, and down."""
    up: list[Round] = []
    down: list[Round] = []
    for level in tree.levels[:-1]:
        reduces, copies = [], []
        for n in filter(tree.children, level):
            for g, mine in enumerate(at[n]):
                chunk, children = parts * g + t, tuple(at[c][g] for c in tree.children(n))
                reduces.append(Reduce(children, mine, chunk, _MIDDLE + 2 * chunk))
                copies.append(Copy(mine, children, chunk, _MIDDLE + 2 * chunk + 1))
        up.insert(0, tuple(reduces))
        down.append(tuple(copies))
    return [*up, *down]
