"""Paths through links, connectivity, and dead ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

Vertex = int | str  # GPUs and CPU ranks are ints; switches, CPUs, NICs and buses are strings

Ends = tuple[Vertex, Vertex]
V = TypeVar("V", bound=Hashable)


def routes(
    links: Iterable[Ends], gpus: Collection[int]
) -> dict[tuple[int, int], tuple[Vertex, ...]]:
    """Return a shortest path for each ordered pair of these GPUs that has one.

    Paths cross switches but no other GPU. Vertex names decide between paths of equal length.
    """
    out = {v: sorted(near, key=str) for v, near in neighbours(links).items()}
    wanted = set(gpus)
    found: dict[tuple[int, int], tuple[Vertex, ...]] = {}
    for src in gpus:
        queue: deque[tuple[Vertex, ...]] = deque([(src,)])
        seen: set[Vertex] = {src}
        while queue:
            path = queue.popleft()
            for nxt in out.get(path[-1], ()):
                if nxt in seen:
                    continue
                seen.add(nxt)
                if isinstance(nxt, str):
                    queue.append((*path, nxt))
                elif nxt in wanted:
                    found[src, nxt] = (*path, nxt)
    return found


def connects(links: Sequence[Ends], gpus: Sequence[int]) -> bool:
    """Whether every GPU can send to every other, through switches and GPUs."""
    ways = (links, [(b, a) for a, b in links])
    return all(set(gpus) <= reach(neighbours(way), gpus[0]) for way in ways)


def neighbours(links: Iterable[tuple[V, V]]) -> dict[V, list[V]]:
    """The successors of each vertex."""
    out: dict[V, list[V]] = {}
    for src, dst in links:
        out.setdefault(src, []).append(dst)
    return out


def reach(near: Mapping[V, Iterable[V]], start: V) -> set[V]:
    """The vertices that can be reached from `start`, with `start` itself."""
    seen, todo = {start}, [start]
    while todo:
        fresh = set(near.get(todo.pop(), ())) - seen
        seen |= fresh
        todo += fresh
    return seen


def groups(members: Iterable[V], joined: Iterable[tuple[V, V]]) -> list[list[V]]:
    """Connected components of the undirected graph with edges `joined`, in member order."""
    near = neighbours(ends for a, b in joined for ends in ((a, b), (b, a)))
    found: list[list[V]] = []
    component_of: dict[V, list[V]] = {}
    for member in members:
        if member not in component_of:
            found.append([])
            component_of |= dict.fromkeys(reach(near, member), found[-1])
        component_of[member].append(member)
    return found


def between(links: Sequence[Ends], gpus: Collection[int]) -> set[Ends]:
    """Drop links to switches with one neighbour until no such switch is left."""
    left = set(links)
    near: dict[Vertex, set[Vertex]] = {}
    for src, dst in left:
        near.setdefault(src, set()).add(dst)
        near.setdefault(dst, set()).add(src)
    ends = [v for v in near if isinstance(v, str) and len(near[v]) < 2]
    while ends:
        v = ends.pop()
        for other in near.pop(v, ()):
            left -= {(v, other), (other, v)}
            near[other].discard(v)
            if isinstance(other, str) and len(near[other]) == 1:
                ends.append(other)
    return left
