"""Spanning trees: the two-tree construction for every size, and what is no tree."""

from __future__ import annotations

import math
import random

import pytest

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.algorithms.trees import Tree, binary_tree, chain, two_trees
from tests.null.helpers import random_tree

SIZES = range(1, 65)


def hops_to_root(parent: tuple[int, ...], rank: int) -> int:
    hops = 0
    while parent[rank] != rank:
        rank, hops = parent[rank], hops + 1
        assert hops <= len(parent), "a cycle"
    return hops


def interior(tree: Tree) -> set[int]:
    return {p for r, p in enumerate(tree.parent) if p != r}


@pytest.mark.parametrize("size", SIZES)
def test_both_trees_span_and_are_binary_and_low(size: int) -> None:
    for tree in two_trees(size):
        assert len(tree.parent) == size
        depths = [hops_to_root(tree.parent, r) for r in range(size)]
        assert depths.count(0) == 1
        assert tree.depth == max(depths) <= math.ceil(math.log2(size)) + 1
        assert all(len(tree.children(r)) <= 2 for r in range(size))


@pytest.mark.parametrize("size", [n for n in SIZES if n > 1])
def test_every_rank_is_interior_once_but_rank_0_of_odd_sizes(size: int) -> None:
    first, second = map(interior, two_trees(size))
    assert first & second == ({0} if size % 2 else set())
    assert first | second == set(range(size))


def test_trees_of_eight_are_nccls() -> None:
    """As in NCCL, src/graph/trees.cc."""
    one = {1: 2, 2: 4, 3: 2, 4: 0, 5: 6, 6: 4, 7: 6}
    two = {0: 1, 1: 3, 2: 1, 3: 7, 4: 5, 5: 3, 6: 5}
    first, second = two_trees(8)
    assert dict(enumerate(first.parent)) == {0: 0, **one}
    assert dict(enumerate(second.parent)) == {7: 7, **two}
    assert first.depth == second.depth == 3


@pytest.mark.parametrize("size", SIZES)
def test_the_second_tree_mirrors_or_shifts_the_first(size: int) -> None:
    first, second = (tree.parent for tree in two_trees(size))
    for rank in range(size):
        moved = (rank + 1) % size if size % 2 else size - 1 - rank
        above = (first[rank] + 1) % size if size % 2 else size - 1 - first[rank]
        assert second[moved] == above


@pytest.mark.parametrize("size", SIZES)
def test_binary_tree_has_odd_ranks_as_leaves(size: int) -> None:
    tree = binary_tree(size)
    assert tree.root == 0
    assert not any(tree.children(r) for r in range(1, size, 2))
    for rank in range(1, size):  # a parent is as far away as the lowest set bit says
        assert abs(tree.parent[rank] - rank) == rank & -rank


@pytest.mark.parametrize("size", [1, 2, 3, 9, 64])
def test_chain_is_one_path(size: int) -> None:
    tree = chain(size)
    assert tree.parent == (0, *range(size - 1))
    assert tree.depth == size - 1
    assert tree.edges == tuple((r, r - 1) for r in range(1, size))


@pytest.mark.parametrize("seed", range(50))
def test_what_a_tree_says_of_itself(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(1, 20)
    tree = random_tree(size, rng)
    depths = [hops_to_root(tree.parent, r) for r in range(size)]
    assert tree.depth == max(depths)
    assert depths[tree.root] == 0
    assert sorted(tree.top_down) == list(range(size))
    assert [depths[r] for r in tree.top_down] == sorted(depths)
    assert sorted(tree.edges) == [(r, p) for r, p in enumerate(tree.parent) if r != p]
    for rank in range(size):
        below = [r for r, p in enumerate(tree.parent) if p == rank != r]
        assert list(tree.children(rank)) == below
    to = rng.sample(range(size), size)
    moved = tree.relabel(to)
    assert all(moved.parent[to[r]] == to[tree.parent[r]] for r in range(size))
    assert (moved.root, moved.depth) == (to[tree.root], tree.depth)


BAD = [
    ((1, 0), r"one root, this one has \[\]"),
    ((0, 1), r"one root, this one has \[0, 1\]"),
    ((), r"one root, this one has \[\]"),
    ((0, 2, 1), "rank 1 does not reach the root 0"),
    ((1, 1, 3, 4, 2), "rank 2 does not reach the root 1"),
    ((0, 2), "a tree over 2 ranks names parent 2"),
    ((0, -1), "a tree over 2 ranks names parent -1"),
]


@pytest.mark.parametrize(("parent", "words"), BAD)
def test_what_is_no_tree_is_refused(parent: tuple[int, ...], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Tree(parent)
