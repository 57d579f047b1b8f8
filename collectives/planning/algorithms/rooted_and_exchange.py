"""Reduce, broadcast, all-gather, reduce-scatter, all-to-all and sendrecv, from the same trees and
rings.

What they start from and end with is in `planning.goals`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.algorithms.embed import Edge, embed
from linkweave.collectives.planning.algorithms.registry import broadcast_down, packed, reduce_up
from linkweave.collectives.planning.algorithms.rings import around, rings
from linkweave.collectives.planning.algorithms.shortest import Levels, shortest_trees
from linkweave.collectives.planning.algorithms.trees import Tree, binary_tree
from linkweave.collectives.planning.goals import SENDRECV, Pairs, Root, check
from linkweave.collectives.planning.lower import Algorithm, Copy, Move, Reduce, few_enough
from linkweave.topology import Topology


def _rooted(
    name: str, collective: str, trees: tuple[Tree, ...], root: int,
    detours: Mapping[tuple[int, int], tuple[int, ...]],
) -> Algorithm:  # fmt: skip
    """Up or down over trees that hang from the root; `detours` by (child, parent)."""
    size, down = len(trees[0].parent), collective == "broadcast"
    ends = {
        (2 * t + down, *((parent, child) if down else (child, parent))): via
        for t in range(len(trees)) for (child, parent), via in detours.items()
    }  # fmt: skip
    rounds = broadcast_down(trees) if down else reduce_up(trees)
    return Algorithm(
        name, size, len(trees), (rounds,), trees, ends, collective=collective, root=root,
    )  # fmt: skip


def tree(topology: Topology, collective: str, root: int) -> Algorithm:
    """One binary tree that hangs from the root, chunks pipelined over it."""
    size = len(topology.gpus)
    hung = binary_tree(size).relabel([(r + root) % size for r in range(size)])
    edges = [Edge(0, child, parent) for child, parent in hung.edges]
    embedding = embed(topology, edges, size, relabel=False)  # the root is the caller's choice
    detours = {(child, parent): (via,) for (_, child, parent), via in embedding.via.items()}
    return _rooted("tree", collective, (hung,), root, detours)


def packed_trees(topology: Topology, collective: str, root: int) -> Algorithm:
    """The trees that carry an all-reduce at its bound, hung from the root: on any machine."""
    trees = tuple(tree.rerooted(root) for tree in packed(topology))
    return _rooted("packed_trees", collective, trees, root, {})


def shortest_tree(topology: Topology, collective: str, root: int) -> Algorithm:
    """One tree of shortest ways: a star where every two GPUs are joined, so the fewest steps."""
    size = len(topology.gpus)
    levels = shortest_trees(topology, range(size))[root]
    return _rooted("shortest_tree", collective, (_tree_of(levels, root, size),), root, {})


def chains(topology: Topology, collective: str, root: int) -> Algorithm:
    """Every ring that shares no link, cut open at the root: as many bytes as its links carry."""
    size = len(topology.gpus)
    few_enough("ring", size)
    found, over = rings(topology)
    trees, detours = [], {}
    for at in found:
        parent = [root] * size
        for here, after in zip(at, (*at[1:], at[0]), strict=True):
            if collective == "broadcast":
                here, after = after, here  # data comes from the parent, not to it
            if here != root:
                parent[here] = after
        trees.append(Tree(tuple(parent)))
    for (_, a, b), via in over.items():
        detours[(b, a) if collective == "broadcast" else (a, b)] = via
    return _rooted("ring", collective, tuple(trees), root, detours)


def shortest(topology: Topology, collective: str, root: int) -> Algorithm:
    """Each block over a tree of shortest ways between its rank and the others, on any machine.

    Where every two GPUs are joined these are stars: one step. PlanError for more than 64 ranks.
    """
    size = len(topology.gpus)
    few_enough("shortest_trees", size)
    trees = shortest_trees(topology, range(size))
    rounds: list[list[Move]] = [[] for _ in range(max(map(len, trees)))]
    for r, levels in enumerate(trees):
        for depth, level in enumerate(levels):
            for parent, children in level.items():
                move: Move = Copy(parent, children, r, r)
                if collective == "reduce_scatter":
                    move = Reduce(children, parent, r, r)
                rounds[depth].append(move)
    if collective == "reduce_scatter":
        rounds.reverse()
    shape = tuple(_tree_of(levels, r, size) for r, levels in enumerate(trees))
    return Algorithm(
        "shortest_trees", size, size, (tuple(map(tuple, rounds)),), shape, collective=collective
    )


def _tree_of(levels: Levels, root: int, size: int) -> Tree:
    parent = [root] * size
    for level in levels:
        for above, children in level.items():
            for child in children:
                parent[child] = above
    return Tree(tuple(parent))


def ring(topology: Topology, collective: str, root: int) -> Algorithm:
    """Half of the all-reduce round all rings that share no link: P - 1 steps of N/(R P).

    Chunk r P + b of a group is a part of block b and goes round ring r.
    """
    size = len(topology.gpus)
    few_enough("ring", size)
    found, detours = rings(topology)
    scatter, gather = around(found, lambda r, i: r * size + found[r][i])
    rounds = scatter if collective == "reduce_scatter" else gather
    return Algorithm(
        "ring", size, size * len(found), (tuple(rounds),), (), detours, collective=collective
    )


def direct(topology: Topology, collective: str, root: int) -> Algorithm:
    """All-to-all: every block straight to its rank, or over the ranks on a shortest way.

    Chunk s P + d goes from rank s to rank d, on channel d - s (mod P). PlanError for more than 64
    ranks.
    """
    size = len(topology.gpus)
    few_enough("direct", size)
    detours: dict[tuple[int, int, int], tuple[int, ...]] = {}
    moves: list[Move] = []
    for source, levels in enumerate(shortest_trees(topology, range(size))):
        way = _ways(levels, source)
        for far in range(1, size):  # each rank begins with another
            target = (source + far) % size
            if len(way[target]) > 1:
                detours[far, source, target] = way[target][1:]
            moves.append(Copy(source, (target,), source * size + target, far))
    return Algorithm(
        "direct", size, size * size, ((tuple(moves),),), (), detours, collective="alltoall"
    )


def pairwise(topology: Topology, collective: str, pairs: Pairs) -> Algorithm:
    """Sendrecv: straight, or over the ranks on a shortest way. Pair i has channel i."""
    size, detours = len(topology.gpus), dict[tuple[int, int, int], tuple[int, ...]]()
    trees = shortest_trees(topology, range(size), [source for source, _ in pairs])
    for i, ((source, target), levels) in enumerate(zip(pairs, trees, strict=True)):
        way = _ways(levels, source)
        if len(way[target]) > 1:
            detours[i, source, target] = way[target][1:]
    moves = tuple(Copy(source, (target,), 0, i) for i, (source, target) in enumerate(pairs))
    return Algorithm(
        "pairwise", size, 1, ((moves,),), (), detours, collective=collective, root=pairs
    )


def _ways(levels: Levels, source: int) -> dict[int, tuple[int, ...]]:
    """The ranks passed before each, source included."""
    way: dict[int, tuple[int, ...]] = {source: ()}
    for level in levels:
        for parent, children in level.items():
            for child in children:
                way[child] = (*way[parent], parent)
    return way


Maker = Callable[[Topology, str, Any], Algorithm]  # the machine, the collective, its root
_ROOTED: dict[str, Maker] = {
    "tree": tree, "shortest_tree": shortest_tree, "packed_trees": packed_trees, "ring": chains,
}  # fmt: skip
OTHERS: dict[str, dict[str, Maker]] = {
    "broadcast": _ROOTED,
    "reduce": _ROOTED,
    "allgather": {"shortest_trees": shortest, "ring": ring},
    "reduce_scatter": {"shortest_trees": shortest, "ring": ring},
    "alltoall": {"direct": direct},
    SENDRECV: {"pairwise": pairwise},
}
"""By collective and name. Where the cost model sees no difference, `auto` takes the first."""


def other_algorithm(topology: Topology, collective: str, name: str, root: Root) -> Algorithm:
    """The named algorithm of a collective other than all-reduce. Raises PlanError."""
    check(collective, len(topology.gpus), root)
    if name not in OTHERS[collective]:
        raise PlanError(
            f"unknown algorithm {name!r} of {collective}; choose from auto, "
            + ", ".join(OTHERS[collective])
        )
    return OTHERS[collective][name](topology, collective, root)
