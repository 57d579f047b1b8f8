"""The merge tree of gTop-k on a machine, and the predicted times of sparse all-reduces.

Source: Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for
Low Bandwidth Networks", algorithm 3 (its pairs of ranks 1, 2, 4, ... apart form a binomial tree)
and equations 5 to 7.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.algorithms.shortest import shortest_trees, tree_of
from linkweave.collectives.planning.algorithms.trees import Tree
from linkweave.collectives.planning.equations import dense_seconds, gtopk_seconds, topk_seconds
from linkweave.collectives.planning.planner import plan_allreduce, predict, ranked
from linkweave.collectives.planning.simulate import pipeline_of
from linkweave.topology import Topology

INDEX = 4
"""Bytes of an entry's index in a message."""

MOST_ROOTS = 64
"""The most ranks for which every rank is tried as the root."""

Round = tuple[tuple[int, int], ...]


def binomial_tree(size: int) -> Tree:
    """Return the tree, for any size, in which the parent of r is r without its lowest set bit."""
    return Tree(tuple(r & (r - 1) for r in range(size)))


@lru_cache(maxsize=256)
def rounds(tree: Tree) -> tuple[Round, ...]:
    """Return the (child, parent) pairs of each round.

    A rank merges one child at a time, in the order in which they are complete, and sends to its
    parent when it has merged all.
    """
    ready: dict[int, int] = {}
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for rank in reversed(tree.top_down):
        at = 0
        for child in sorted(tree.children(rank), key=lambda c: (ready[c], c)):
            at = max(at, ready[child])
            found[at].append((child, rank))
            at += 1
        ready[rank] = at
    return tuple(tuple(sorted(found[i])) for i in range(ready[tree.root]))


@lru_cache(maxsize=256)
def merge_tree(topology: Topology, nbytes: int) -> Tree:
    """Return the tree over which ranks merge vectors of `nbytes` fastest.

    That is the binomial tree, which has the fewest rounds, or if its hops are slow, one of the
    planner's trees of shortest paths. Raises PlanError if the links do not connect the ranks.
    """
    size = len(topology.gpus)
    trees = [binomial_tree(size)]
    if not topology.on_memory and size > 2:  # on one memory all hops are equal
        roots = range(size if size <= MOST_ROOTS else 1)
        trees += [tree_of(levels, size) for levels in shortest_trees(topology, range(size), roots)]
    return min(trees, key=lambda tree: _up(topology, tree, nbytes))


def _up(topology: Topology, tree: Tree, nbytes: int) -> float:
    """Return the seconds from the leaves to the root."""
    return sum(max(_hop(topology, *pair, nbytes) for pair in pairs) for pairs in rounds(tree))


def _hop(topology: Topology, child: int, parent: int, nbytes: int) -> float:
    """Return the seconds of a hop over switches, or if there is none, over one other rank."""
    a, b = topology.gpus[child], topology.gpus[parent]
    over = (_direct(topology, a, v, nbytes) + _direct(topology, v, b, nbytes)
            for v in topology.gpus if v not in (a, b))  # fmt: skip
    direct = _direct(topology, a, b, nbytes)
    return direct if direct < math.inf else min(over, default=math.inf)


def _direct(topology: Topology, a: int, b: int, nbytes: int) -> float:
    if not (path := topology.hops.get((a, b))):
        return math.inf
    links = [topology.by_ends[ends] for ends in pairwise(path)]
    slowest = min(link.count * link.bandwidth for link in links)
    return max(link.latency_us for link in links) * 1e-6 + nbytes / slowest


def _best(topology: Topology, nbytes: int, kind: str, root: int = 0) -> float:
    """Return the predicted seconds of a collective; infinity if there is no plan."""
    try:
        return predict(topology, nbytes, ranked(topology, nbytes, kind, root)[0], kind, root)[0]
    except PlanError:
        return math.inf


@dataclass(frozen=True, slots=True)
class Sparse:
    """One mode of a sparse all-reduce: its seconds as planned on this machine, and by the paper's
    equation with the start-up and the bandwidth of the links that the dense plan uses."""

    mode: str
    seconds: float
    equation: int
    equation_seconds: float


@lru_cache(maxsize=256)
def sparse_costs(topology: Topology, numel: int, k: int, item: int = 4) -> tuple[Sparse, ...]:
    """Return the cost of gTop-k, top-k by all-gather and dense, in the order of their times.

    Each rank has k entries of `numel` elements, with values of `item` bytes in messages (4 for
    dense). The time to merge is left out. A mode without a plan takes infinitely long.
    """
    size = len(topology.gpus)
    if size == 1:
        return tuple(Sparse(m, 0.0, e, 0.0) for m, e in (("gtopk", 7), ("topk", 6), ("dense", 5)))
    sparse, dense = (item + INDEX) * k, 4 * numel
    tree = merge_tree(topology, sparse)
    up, down = _up(topology, tree, sparse), _best(topology, sparse, "broadcast", tree.root)
    shape = pipeline_of(plan_allreduce(topology, dense), topology)
    a, levels = shape.alpha_s, math.log2(size)
    one, whole = sparse / shape.bandwidth, dense / shape.bandwidth
    found = [
        Sparse("gtopk", up + down, 7, gtopk_seconds(levels, a, one)),
        Sparse("topk", _best(topology, sparse * size, "allgather"), 6,
               topk_seconds(size, levels, a, one)),
        Sparse("dense", _best(topology, dense, "allreduce"), 5, dense_seconds(size, a, whole)),
    ]  # fmt: skip
    return tuple(sorted(found, key=lambda row: row.seconds))
