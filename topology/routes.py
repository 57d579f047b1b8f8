"""Ways through links: which pairs of GPUs they join, over what, and which links lead nowhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence

Vertex = int | str
"""A GPU (or CPU rank) is an int; what only passes traffic on (a switch, a bus) is a str."""

Ends = tuple[Vertex, Vertex]


def _out(links: Iterable[Ends]) -> dict[Vertex, list[Vertex]]:
    out: dict[Vertex, list[Vertex]] = {}
    for src, dst in links:
        out.setdefault(src, []).append(dst)
    for reached in out.values():
        reached.sort(key=str)
    return out


def routes(
    links: Iterable[Ends], gpus: Collection[int]
) -> dict[tuple[int, int], tuple[Vertex, ...]]:
    """For each ordered pair of these GPUs: the vertices from one to the other, fewest first.

    A way crosses switches but no other GPU. Ties go by the vertices' names, so it is stable.
    """
    out, wanted = _out(links), set(gpus)
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
    """Whether every one of the GPUs can send to every other, through switches and GPUs alike."""
    return all(set(gpus) <= _reach(way, gpus[0]) for way in (links, [(b, a) for a, b in links]))


def _reach(links: Iterable[Ends], start: Vertex) -> set[Vertex]:
    out = _out(links)
    seen, todo = {start}, [start]
    while todo:
        fresh = [v for v in out.get(todo.pop(), ()) if v not in seen]
        seen.update(fresh)
        todo += fresh
    return seen


def between(links: Sequence[Ends], gpus: Collection[int]) -> set[Ends]:
    """The links without those that lead to dead ends: switches with one neighbour, repeatedly."""
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
