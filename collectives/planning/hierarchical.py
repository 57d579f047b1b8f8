"""All-reduce on clusters: inside each node first, then between nodes, then inside again."""

from __future__ import annotations

from itertools import zip_longest

from collectives.errors import PlanError
from collectives.planning.lower import Algorithm, Copy, Move, Reduce, Round
from collectives.planning.trees import Tree, two_trees
from topology import Topology
from topology.clusters import nodes_of


def hierarchical(topology: Topology) -> Algorithm:
    """Each GPU reduces its slice of its node's data, slices go between nodes, and back.

    Between nodes each slice is two chunks, one for each tree of an overlapped double tree over the
    nodes, so every NIC sends and receives about twice its slice; GPU g talks to GPU g of the other
    nodes only, over its own rail where there are rails. Raises PlanError unless the machine is a
    cluster of equal nodes in which every two GPUs have a way that crosses no third.
    """
    nodes = nodes_of(topology)
    sizes = {len(node) for node in nodes}
    if not any(link.kind == "network" for link in topology.links):
        nodes = nodes[:1]
    if len(nodes) < 2 or len(sizes) > 1:
        raise PlanError(
            f"hierarchical is for clusters of equal nodes; {topology.name} has "
            + ("one node" if len(nodes) < 2 else f"nodes of {sorted(sizes)} GPUs")
        )
    rank = {g: r for r, g in enumerate(topology.gpus)}
    at = [[rank[g] for g in node] for node in nodes]
    trees, slices = two_trees(len(nodes)), range(len(at[0]))
    stride = 2 * len(slices)
    gather: list[Move] = []
    spread: list[Move] = []
    for node in at:
        for g in slices:
            others = tuple(node[(g + i) % len(node)] for i in range(1, len(node)))
            for t in range(2) if others else ():
                chunk = 2 * g + t
                gather.append(Reduce(others, node[g], chunk, chunk))
                spread.append(Copy(node[g], others, chunk, 3 * stride + chunk))
    ways = [_between(at, tree, t, stride) for t, tree in enumerate(trees)]
    middle = [
        tuple(m for part in parts for m in part) for parts in zip_longest(*ways, fillvalue=())
    ]
    rounds = (tuple(gather), *middle, tuple(spread))
    return Algorithm(
        "hierarchical", len(topology.gpus), stride, (tuple(r for r in rounds if r),)
    )  # fmt: skip


def _between(at: list[list[int]], tree: Tree, t: int, stride: int) -> list[Round]:
    """Tree t over the nodes, for chunk t of every slice: up, deepest level first, and down."""
    up: list[Round] = []
    down: list[Round] = []
    for level in tree.levels[:-1]:
        reduces, copies = [], []
        for n in filter(tree.children, level):
            for g, mine in enumerate(at[n]):
                chunk, children = 2 * g + t, tuple(at[c][g] for c in tree.children(n))
                reduces.append(Reduce(children, mine, chunk, stride + chunk))
                copies.append(Copy(mine, children, chunk, 2 * stride + chunk))
        up.insert(0, tuple(reduces))
        down.append(tuple(copies))
    return [*up, *down]
