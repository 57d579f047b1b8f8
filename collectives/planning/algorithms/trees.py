"""Spanning trees over ranks, and the two-tree construction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from linkweave.collectives.errors import PlanError


@dataclass(frozen=True)
class Tree:
    """`parent[r]` is r's parent; the root is its own, so every rank has one.

    Raises PlanError unless there is one root and every rank reaches it.
    """

    parent: tuple[int, ...]

    def __post_init__(self) -> None:
        size = len(self.parent)
        if outside := [p for p in self.parent if not 0 <= p < size]:
            raise PlanError(f"a tree over {size} ranks names parent {outside[0]}")
        roots = [r for r, p in enumerate(self.parent) if r == p]
        if len(roots) != 1:
            raise PlanError(f"a tree has one root, this one has {roots}")
        if len(self.top_down) != size:
            lost = min(set(range(size)) - set(self.top_down))
            raise PlanError(f"rank {lost} does not reach the root {roots[0]}")

    @cached_property
    def root(self) -> int:
        return next(r for r, p in enumerate(self.parent) if r == p)

    @cached_property
    def _children(self) -> tuple[tuple[int, ...], ...]:
        below: list[list[int]] = [[] for _ in self.parent]
        for rank, parent in enumerate(self.parent):
            if rank != parent:
                below[parent].append(rank)
        return tuple(map(tuple, below))

    def children(self, rank: int) -> tuple[int, ...]:
        """In rank order, which is also the order in which a reduction adds them."""
        return self._children[rank]

    @cached_property
    def top_down(self) -> tuple[int, ...]:
        """Ranks level by level from the root: every parent stands before its children."""
        order = [self.root]
        for rank in order:  # grows while it is walked
            order.extend(self.children(rank))
        return tuple(order)

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """(child, parent) pairs, from the root down."""
        return tuple((r, self.parent[r]) for r in self.top_down[1:])

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Ranks by their distance from the root, nearest first."""
        found: list[tuple[int, ...]] = [(self.root,)]
        while below := tuple(c for r in found[-1] for c in self.children(r)):
            found.append(below)
        return tuple(found)

    @property
    def depth(self) -> int:
        """Edges on the longest way to the root."""
        return len(self.levels) - 1

    def rerooted(self, root: int) -> Tree:
        """The same edges, hung from another rank."""
        parent = list(self.parent)
        at, above = root, root
        while True:
            parent[at], above, at = above, at, parent[at]
            if above == at:
                return Tree(tuple(parent))

    def relabel(self, rank_of: Sequence[int]) -> Tree:
        """The same tree with position i held by rank `rank_of[i]`."""
        parent = [0] * len(self.parent)
        for position, above in enumerate(self.parent):
            parent[rank_of[position]] = rank_of[above]
        return Tree(tuple(parent))


def chain(size: int) -> Tree:
    """0 <- 1 <- 2 <- ..., rooted at its end."""
    return Tree(tuple(max(r - 1, 0) for r in range(size)))


def binary_tree(size: int) -> Tree:
    """The in-order binary tree in which odd positions are leaves.

    A rank with lowest set bit b hangs under (r ^ b) | 2b, or under r ^ b where that does not
    exist; rank 0 is the root. Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth
    broadcast, reduction and scan", Parallel Computing 35 (2009), section 3.
    """

    def parent(rank: int) -> int:
        if rank == 0:
            return 0
        bit = rank & -rank
        above = (rank ^ bit) | (bit << 1)
        return above if above < size else rank ^ bit

    return Tree(tuple(parent(r) for r in range(size)))


def two_trees(size: int) -> tuple[Tree, Tree]:
    """Two binary trees such that (for even sizes) each rank is interior in exactly one.

    The second is the mirror of the first (even size) or its shift by one (odd size; there rank 0
    is interior in both). Same source as `binary_tree`.
    """
    first = binary_tree(size)
    if size % 2:
        return first, first.relabel([(r + 1) % size for r in range(size)])
    return first, first.relabel([size - 1 - r for r in range(size)])
