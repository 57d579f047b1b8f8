"""Collectives over trees with given roots: broadcast, reduce, gather, scatter, all-gather and
reduce-scatter."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from linkweave.collectives.planning.algorithms.embed import Edge, embed
from linkweave.collectives.planning.algorithms.over_trees import broadcast_down, packed, reduce_up
from linkweave.collectives.planning.algorithms.rings import rings
from linkweave.collectives.planning.algorithms.shortest import shortest_trees, tree_of
from linkweave.collectives.planning.algorithms.trees import Tree, binary_tree
from linkweave.collectives.planning.lower import (
    MOST_BLOCKS,
    Algorithm,
    Copy,
    Move,
    Reduce,
    few_enough,
)
from linkweave.topology import Topology


def _rooted(
    name: str, collective: str, trees: tuple[Tree, ...], root: int,
    detours: Mapping[tuple[int, int], tuple[int, ...]],
) -> Algorithm:  # fmt: skip
    """Return a broadcast or a reduce over trees that share a root; `detours` by (child, parent)."""
    size, down = len(trees[0].parent), collective == "broadcast"
    ends = {
        (2 * t + down, *((parent, child) if down else (child, parent))): via
        for t in range(len(trees)) for (child, parent), via in detours.items()
    }  # fmt: skip
    rounds = broadcast_down(trees) if down else reduce_up(trees)
    return Algorithm(name, size, len(trees), (rounds,), trees, ends, collective, root)


def tree(topology: Topology, collective: str, root: int) -> Algorithm:
    """Broadcast or reduce over one binary tree, in a pipeline of chunks."""
    size = len(topology.gpus)
    rooted = binary_tree(size).relabel([(r + root) % size for r in range(size)])
    edges = [Edge(0, child, parent) for child, parent in rooted.edges]
    embedding = embed(topology, edges, size, relabel=False)  # the caller has chosen the root
    detours = {(child, parent): (via,) for (_, child, parent), via in embedding.via.items()}
    return _rooted("tree", collective, (rooted,), root, detours)


def packed_trees(topology: Topology, collective: str, root: int) -> Algorithm:
    """Broadcast or reduce over the trees of the all-reduce `packed_trees`."""
    trees = tuple(tree.rerooted(root) for tree in packed(topology))
    return _rooted("packed_trees", collective, trees, root, {})


def shortest_tree(topology: Topology, collective: str, root: int) -> Algorithm:
    """Broadcast or reduce over one tree of shortest paths, in the fewest steps."""
    size = len(topology.gpus)
    levels = shortest_trees(topology, range(size))[root]
    return _rooted("shortest_tree", collective, (tree_of(levels, size),), root, {})


def chains(topology: Topology, collective: str, root: int) -> Algorithm:
    """Broadcast or reduce over all rings that share no link, each cut open at the root."""
    size, down = len(topology.gpus), collective == "broadcast"
    few_enough("ring", size)
    found, over = rings(topology)
    trees = []
    for order in found:
        parent = [root] * size
        for here, after in zip(order, (*order[1:], order[0]), strict=True):
            child, above = (after, here) if down else (here, after)
            if child != root:
                parent[child] = above
        trees.append(Tree(tuple(parent)))
    detours = {((b, a) if down else (a, b)): via for (_, a, b), via in over.items()}
    return _rooted("ring", collective, tuple(trees), root, detours)


def shortest(topology: Topology, collective: str, root: int) -> Algorithm:
    """All-gather or reduce-scatter each block over its rank's tree of shortest paths.

    This takes one step if links join all pairs of GPUs. Raises PlanError for more than 64
    ranks.
    """
    size, gather = len(topology.gpus), collective == "allgather"
    few_enough("shortest_trees", size)
    trees = shortest_trees(topology, range(size))
    rounds: list[list[Move]] = [[] for _ in range(max(map(len, trees)))]
    for r, levels in enumerate(trees):
        for depth, level in enumerate(levels):
            for parent, children in level.items():
                rounds[depth].append(
                    Copy(parent, children, r, r) if gather else Reduce(children, parent, r, r)
                )
    if not gather:
        rounds.reverse()
    shape = tuple(tree_of(levels, size) for levels in trees)
    phases = (tuple(map(tuple, rounds)),)
    return Algorithm("shortest_trees", size, size, phases, shape, collective=collective)


def shortest_paths(topology: Topology, collective: str, root: int) -> Algorithm:
    """Gather or scatter each block over its rank's path in the root's tree of shortest paths.

    Block r uses channel r. This takes one step if links join all pairs of GPUs. Raises PlanError
    for more than 256 ranks.
    """
    size = len(topology.gpus)
    few_enough("shortest_paths", size, MOST_BLOCKS)
    tree = tree_of(shortest_trees(topology, range(size), [root])[0], size)
    rounds: dict[int, list[Move]] = {}
    for r in range(size):
        path = [r]
        while path[-1] != root:
            path.append(tree.parent[path[-1]])
        hops = list(pairwise(path if collective == "gather" else path[::-1]))
        for depth, (src, dst) in enumerate(hops):
            rounds.setdefault(depth, []).append(Copy(src, (dst,), r, r))
    phases = (tuple(tuple(rounds[depth]) for depth in sorted(rounds)),)
    return Algorithm("shortest_paths", size, size, phases, (tree,), {}, collective, root)
