"""All-reduce algorithms: which chunk is combined or copied from where to where.

Each takes a topology and returns an `Algorithm`; none knows of bytes, signals or devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from linkweave.collectives.errors import CollectiveError, PlanError
from linkweave.collectives.planning.algorithms.embed import Edge, Embedding, embed
from linkweave.collectives.planning.algorithms.exchange import halving_doubling, recursive_doubling
from linkweave.collectives.planning.algorithms.hierarchical import hierarchical, hierarchical_ring
from linkweave.collectives.planning.algorithms.packing import pack
from linkweave.collectives.planning.algorithms.rings import around, rings
from linkweave.collectives.planning.algorithms.shares import pair_capacity
from linkweave.collectives.planning.algorithms.trees import Tree, binary_tree, two_trees
from linkweave.collectives.planning.algorithms.trees import chain as chain_tree
from linkweave.collectives.planning.lower import Algorithm, Copy, Reduce, Round, few_enough
from linkweave.topology import Topology, load
from linkweave.topology.routes import connects


def _interior(tree: Tree) -> list[list[int]]:
    """Ranks with children, level by level from the root."""
    return [[r for r in level if tree.children(r)] for level in tree.levels[:-1]]


def reduce_up(trees: Sequence[Tree]) -> tuple[Round, ...]:
    """Tree t reduces chunk t on channel 2t, deepest level first."""
    return tuple(
        tuple(Reduce(tree.children(r), r, t, 2 * t) for r in level)
        for t, tree in enumerate(trees)
        for level in reversed(_interior(tree))
    )


def broadcast_down(trees: Sequence[Tree]) -> tuple[Round, ...]:
    """Tree t hands chunk t down on channel 2t + 1, from the root."""
    return tuple(
        tuple(Copy(r, tree.children(r), t, 2 * t + 1) for r in level)
        for t, tree in enumerate(trees)
        for level in _interior(tree)
    )


def over_trees(
    name: str, topology: Topology, trees: Sequence[Tree], overlap: bool,
    embedding: Embedding | None = None,
) -> Algorithm:  # fmt: skip
    """All-reduce over trees; chunk c belongs to tree c mod T.

    With `overlap` a chunk goes down as soon as its root has it, while later chunks still rise
    (C-Cube, section III-C); without, every tree finishes all its reduces before its first
    broadcast (figure 6(b)).
    """
    size = len(topology.gpus)
    if embedding is None:
        edges = [Edge(t, a, b) for t, tree in enumerate(trees) for a, b in tree.edges]
        embedding = embed(topology, edges, size)
    placed = tuple(tree.relabel(embedding.rank_of) for tree in trees)
    detours = {}
    for (t, a, b), middle in embedding.via.items():
        child, parent = embedding.rank_of[a], embedding.rank_of[b]
        detours[2 * t, child, parent] = detours[2 * t + 1, parent, child] = (middle,)
    up, down = reduce_up(placed), broadcast_down(placed)
    return Algorithm(
        name,
        size,
        len(placed),
        (up + down,) if overlap else (up, down),
        placed,
        detours,
    )


def chain(topology: Topology) -> Algorithm:
    """One path through all GPUs, up and down at once (what NCCL runs inside a node)."""
    return over_trees("chain", topology, [chain_tree(len(topology.gpus))], overlap=True)


def tree(topology: Topology) -> Algorithm:
    """One binary tree: reduce, then broadcast (C-Cube figure 6(a))."""
    return over_trees("tree", topology, [binary_tree(len(topology.gpus))], overlap=False)


def overlapped_tree(topology: Topology) -> Algorithm:
    """One binary tree, reduce and broadcast overlapped (C-Cube figure 6(c))."""
    return over_trees("overlapped_tree", topology, [binary_tree(len(topology.gpus))], overlap=True)


def double_tree(topology: Topology) -> Algorithm:
    """Two binary trees: reduce, then broadcast (C-Cube figure 6(b), its baseline B)."""
    return over_trees("double_tree", topology, two_trees(len(topology.gpus)), overlap=False)


def overlapped_double_tree(topology: Topology) -> Algorithm:
    """Two binary trees on links of their own, overlapped (C-Cube figure 6(d), its C1)."""
    trees = two_trees(len(topology.gpus))
    return over_trees("overlapped_double_tree", topology, trees, overlap=True)


def packed_trees(topology: Topology) -> Algorithm:
    """As many overlapped spanning trees as the links hold: the bound, for large messages.

    Reduce up and broadcast down at once take each link of a tree once in each direction; packing is
    by matroid union, on links split into equal shares (Nash-Williams 1961, Edmonds 1965).
    """
    trees = packed(topology)
    placed = Embedding(tuple(range(len(topology.gpus))))
    return over_trees("packed_trees", topology, trees, overlap=True, embedding=placed)


@lru_cache(maxsize=64)
def packed(topology: Topology) -> tuple[Tree, ...]:
    """The trees of `packed_trees`. Raises PlanError on one memory, or where GPUs are not joined."""
    size, gpus = len(topology.gpus), topology.gpus
    if size == 1:
        return (chain_tree(1),)
    if topology.on_memory:
        raise PlanError(
            f"packed_trees packs links, and the ranks of {topology.name} share one memory: use "
            "two_shot"
        )
    ends = [(link.src, link.dst) for link in topology.fabric]
    if not connects(ends, gpus):
        lost = next(g for g in gpus if not connects(ends, (gpus[0], g)))
        raise PlanError(f"{topology.name}: GPUs {gpus[0]} and {lost} are not joined by any links")
    return tuple(pack(size, pair_capacity(topology)))


# C-Cube figure 10: the trees and detours it uses on the DGX-1's numbering.
_CCUBE_TREES = (
    Tree((0, 2, 4, 2, 0, 6, 4, 6)),  # 0 - 4 - {2 - {1, 3}, 6 - {5, 7}}
    Tree((3, 1, 3, 5, 7, 1, 7, 5)),  # the same with 0/1, 2/3, 4/5 and 6/7 exchanged
)
_CCUBE_DETOURS = {(0, 2, 4): 0, (1, 3, 5): 1}  # (tree, child, parent): forwarder


def ccube_dgx1(topology: Topology) -> Algorithm:
    """The double tree of the C-Cube paper on the DGX-1 with V100 (its section IV-A, figure 10).

    Rooted at GPU 0 and GPU 1; 2 - 4 goes over GPU 0 and 3 - 5 over GPU 1; the double links 2 - 3
    and 6 - 7 carry both trees in opposite roles. On a DGX-1 whose GPUs are numbered otherwise the
    trees are carried over by isomorphism. Raises PlanError on any other machine.
    """
    paper = load("dgx1-v100")
    # `mine[g]` is this machine's rank of the paper's GPU g
    if paper.links == topology.links and paper.gpus == topology.gpus:
        mine = list(range(8))
    else:
        mapping = paper.isomorphic_to(topology) if len(topology.gpus) == 8 else None
        if mapping is None:
            raise PlanError(
                f"ccube_dgx1 is the C-Cube paper's plan for dgx1-v100; {topology.name} is wired "
                "differently: use overlapped_double_tree"
            )
        mine = [topology.gpus.index(mapping[g]) for g in range(8)]
    via = {key: mine[middle] for key, middle in _CCUBE_DETOURS.items()}
    embedding = Embedding(tuple(mine), via)
    return over_trees("ccube_dgx1", topology, _CCUBE_TREES, overlap=True, embedding=embedding)


def ring(topology: Topology) -> Algorithm:
    """Reduce-scatter and all-gather round R rings at once: 2(P - 1) steps of N/(R P).

    R is the number of rings found that share no link, each in one direction. Chunk c goes round
    ring c mod R; it starts on the rank after its owner and is complete on the owner, rank c // R
    of the ring. A rank keeps one track a ring, so its sends there follow one another. The plan
    grows as P^2: PlanError for more than 64 ranks.
    """
    size = len(topology.gpus)
    few_enough("ring", size)
    found, detours = rings(topology)
    count = len(found)
    scatter, gather = around(found, lambda r, i: i * count + r)
    return Algorithm("ring", size, size * count, ((*scatter, *gather),), (), detours)


def one_shot(topology: Topology) -> Algorithm:
    """Everyone sends all it has to everyone, and combines all values in the order of the ranks.

    One step deep, for the smallest messages; P - 1 times the bytes. PlanError for more than 64
    ranks.
    """
    size = len(topology.gpus)
    few_enough("one_shot", size)
    edges = [Edge(0, a, b) for b in range(size) for a in range(b)]
    embedding = embed(topology, edges, size, relabel=False)
    detours = {}
    for (_, a, b), middle in embedding.via.items():
        detours[0, a, b] = detours[0, b, a] = (middle,)
    moves = tuple(
        Reduce(tuple(s for s in range(size) if s != r), r, 0, 0, ahead=r)
        for r in range(size) if size > 1
    )  # fmt: skip
    return Algorithm("one_shot", size, 1, ((moves,),), (), detours)


def two_shot(topology: Topology) -> Algorithm:
    """Rank r reduces chunk r of everyone's input, then hands the result to everyone.

    P stars, in effect: two steps deep. Every pair of ranks exchanges data; PlanError for more
    than 64 ranks.
    """
    size = len(topology.gpus)
    few_enough("two_shot", size)
    others = [tuple((r + i) % size for i in range(1, size)) for r in range(size)]
    stars = tuple(Tree((r,) * size) for r in range(size))
    edges = [Edge(r, o, r) for r in range(size) for o in others[r]]
    embedding = embed(topology, edges, size, relabel=False)  # all positions are alike
    detours = {}
    for (r, o, _), middle in embedding.via.items():
        detours[r, o, r] = detours[size + r, r, o] = (middle,)
    gather = tuple(Reduce(others[r], r, r, r) for r in range(size) if others[r])
    scatter = tuple(Copy(r, others[r], r, size + r) for r in range(size) if others[r])
    return Algorithm(
        "two_shot", size, size, ((gather, scatter),), stars, detours,
    )  # fmt: skip


ALGORITHMS: dict[str, Callable[[Topology], Algorithm]] = {
    "two_shot": two_shot,
    "packed_trees": packed_trees,
    "overlapped_double_tree": overlapped_double_tree,
    "double_tree": double_tree,
    "overlapped_tree": overlapped_tree,
    "tree": tree,
    "chain": chain,
    "ring": ring,
    "one_shot": one_shot,
    "recursive_doubling": recursive_doubling,
    "halving_doubling": halving_doubling,
    "hierarchical": hierarchical,
    "hierarchical_ring": hierarchical_ring,
    "ccube_dgx1": ccube_dgx1,
}
"""By name. Where the cost model sees no difference, `auto` takes the first."""


Named = str | Callable[[Topology], Algorithm]
"""An algorithm: by name, or a function that makes it for a topology."""


@lru_cache(maxsize=512)
def algorithm_for(name: Named, topology: Topology) -> Algorithm:
    """An all-reduce algorithm on this topology; the searches are done once. Raises PlanError."""
    if not isinstance(name, str):
        try:
            made = name(topology)
        except CollectiveError:
            raise
        except Exception as error:  # a user's own: all ranks are told, and may go on
            text = f"{name.__name__} on {topology.name}: {type(error).__name__}: {error}"
            raise PlanError(text) from error
        if not isinstance(made, Algorithm):
            raise PlanError(f"{name!r} must return an Algorithm, not {type(made).__name__}")
        return made
    if name not in ALGORITHMS:
        raise PlanError(f"unknown algorithm {name!r}; choose from auto, {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name](topology)
