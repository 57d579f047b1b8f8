"""All-reduce over trees that reduce towards the root and broadcast back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.algorithms.embed import Edge, Embedding, embed
from linkweave.collectives.planning.algorithms.packing import pack, pair_capacity
from linkweave.collectives.planning.algorithms.trees import Tree, binary_tree, two_trees
from linkweave.collectives.planning.algorithms.trees import chain as chain_tree
from linkweave.collectives.planning.lower import Algorithm, Copy, Reduce, Round
from linkweave.topology import Topology, load
from linkweave.topology.graph import connects


def _interior(tree: Tree) -> list[list[int]]:
    """Return the ranks that have children, level by level from the root."""
    return [[r for r in level if tree.children(r)] for level in tree.levels[:-1]]


def reduce_up(trees: Sequence[Tree]) -> tuple[Round, ...]:
    """Return the rounds in which tree t reduces chunk t on channel 2t, deepest level first."""
    return tuple(
        tuple(Reduce(tree.children(r), r, t, 2 * t) for r in level)
        for t, tree in enumerate(trees)
        for level in reversed(_interior(tree))
    )


def broadcast_down(trees: Sequence[Tree]) -> tuple[Round, ...]:
    """Return the rounds in which tree t broadcasts chunk t on channel 2t + 1 from its root."""
    return tuple(
        tuple(Copy(r, tree.children(r), t, 2 * t + 1) for r in level)
        for t, tree in enumerate(trees)
        for level in _interior(tree)
    )


def over_trees(
    name: str, topology: Topology, trees: Sequence[Tree], overlap: bool,
    embedding: Embedding | None = None,
) -> Algorithm:  # fmt: skip
    """Return an all-reduce over T trees, in which chunk c belongs to tree c mod T.

    With `overlap` the root broadcasts each chunk as soon as it has it, while later chunks are still
    being reduced (C-Cube, section III-C). Without, every tree finishes all its reduces before its
    first broadcast (figure 6(b)). Without an `embedding`, `embed` finds one. Raises PlanError.
    """
    if embedding is None:
        edges = [Edge(t, a, b) for t, tree in enumerate(trees) for a, b in tree.edges]
        embedding = embed(topology, edges, len(topology.gpus))
    mapped = tuple(tree.relabel(embedding.rank_of) for tree in trees)
    detours = {}
    for (t, a, b), middle in embedding.via.items():
        child, parent = embedding.rank_of[a], embedding.rank_of[b]
        detours[2 * t, child, parent] = detours[2 * t + 1, parent, child] = (middle,)
    up, down = reduce_up(mapped), broadcast_down(mapped)
    phases = (up + down,) if overlap else (up, down)
    return Algorithm(name, len(topology.gpus), len(mapped), phases, mapped, detours)


def chain(topology: Topology) -> Algorithm:
    """All-reduce over one path through all GPUs, with overlap, as NCCL does inside a node."""
    return over_trees("chain", topology, [chain_tree(len(topology.gpus))], overlap=True)


def tree(topology: Topology) -> Algorithm:
    """Reduce over one binary tree, then broadcast over it (C-Cube, figure 6(a))."""
    return over_trees("tree", topology, [binary_tree(len(topology.gpus))], overlap=False)


def overlapped_tree(topology: Topology) -> Algorithm:
    """Reduce and broadcast over one binary tree, with overlap (C-Cube, figure 6(c))."""
    return over_trees("overlapped_tree", topology, [binary_tree(len(topology.gpus))], overlap=True)


def double_tree(topology: Topology) -> Algorithm:
    """Reduce over two binary trees, then broadcast (C-Cube, figure 6(b))."""
    return over_trees("double_tree", topology, two_trees(len(topology.gpus)), overlap=False)


def overlapped_double_tree(topology: Topology) -> Algorithm:
    """All-reduce over two trees on separate links, with overlap (C-Cube, figure 6(d), its C1)."""
    trees = two_trees(len(topology.gpus))
    return over_trees("overlapped_double_tree", topology, trees, overlap=True)


def packed_trees(topology: Topology) -> Algorithm:
    """All-reduce over as many spanning trees as the links hold, up to the bound for large messages.

    With overlap, an all-reduce uses each link of its tree once in each direction. Matroid union
    packs the trees into links split into equal shares (Nash-Williams 1961, Edmonds 1965).
    """
    identity = Embedding(tuple(range(len(topology.gpus))))
    return over_trees("packed_trees", topology, packed(topology), True, identity)


@lru_cache(maxsize=64)
def packed(topology: Topology) -> tuple[Tree, ...]:
    """Return the trees of `packed_trees`. Raises PlanError if the ranks share one memory, or if
    links do not connect all GPUs."""
    size, gpus = len(topology.gpus), topology.gpus
    if size == 1:
        return (chain_tree(1),)
    if topology.on_memory:
        raise PlanError(
            f"packed_trees packs links, but the ranks of {topology.name} share one memory: use "
            "two_shot"
        )
    ends = [(link.src, link.dst) for link in topology.fabric]
    if not connects(ends, gpus):
        lost = next(g for g in gpus if not connects(ends, (gpus[0], g)))
        raise PlanError(f"{topology.name}: GPUs {gpus[0]} and {lost} are not joined by any links")
    return tuple(pack(size, pair_capacity(topology)))


_CCUBE_TREES = (
    Tree((0, 2, 4, 2, 0, 6, 4, 6)),  # 0 - 4 - {2 - {1, 3}, 6 - {5, 7}}
    Tree((3, 1, 3, 5, 7, 1, 7, 5)),  # the same with 0/1, 2/3, 4/5 and 6/7 exchanged
)
_CCUBE_DETOURS = {(0, 2, 4): 0, (1, 3, 5): 1}  # (tree, child, parent): forwarder


def ccube_dgx1(topology: Topology) -> Algorithm:
    """All-reduce over the C-Cube paper's double tree on the DGX-1 with V100 (IV-A, figure 10).

    The roots are GPU 0 and GPU 1; 2 - 4 detours over GPU 0, and 3 - 5 over GPU 1; the double links
    2 - 3 and 6 - 7 carry both trees in opposite directions. On a DGX-1 whose GPUs have other
    numbers, an isomorphism maps the trees. Raises PlanError on any other machine.
    """
    paper = load("dgx1-v100")
    if paper.links == topology.links and paper.gpus == topology.gpus:
        rank_of = list(range(8))
    else:
        mapping = paper.isomorphic_to(topology) if len(topology.gpus) == 8 else None
        if mapping is None:
            raise PlanError(
                f"ccube_dgx1 is the C-Cube paper's plan for dgx1-v100; {topology.name} is wired "
                "differently: use overlapped_double_tree"
            )
        rank_of = [topology.gpus.index(mapping[g]) for g in range(8)]
    via = {key: rank_of[middle] for key, middle in _CCUBE_DETOURS.items()}
    embedding = Embedding(tuple(rank_of), via)
    return over_trees("ccube_dgx1", topology, _CCUBE_TREES, overlap=True, embedding=embedding)
