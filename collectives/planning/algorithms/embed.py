"""Embedding of logical shapes: which GPU takes each position, and which edges detour.

The search prefers exclusive directed links, then the fewest detours, then the least depth. An edge
may detour because its GPUs have no link, or because their links are taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

from linkweave.collectives.errors import PlanError
from linkweave.topology import Topology
from linkweave.topology.graph import neighbours

_NODES, _ROUTED = 20_000, 100_000  # limits of a search: a fraction of a second
_EXTRA_DETOURS = 3  # tried beyond the lower bound
_SWAPS, _EDGES = 1_500, 50_000  # limits of the local search for shared links

_Link = int  # index in `Topology.by_ends`
_Use = dict[_Link, int]
_Key = tuple[int, int, int]  # (shape, position a, position b): names an edge


@dataclass(frozen=True, slots=True)
class Edge:
    """Positions a and b of a shape send data: a -> b, and b -> a unless `one_way`."""

    shape: int
    a: int
    b: int
    one_way: bool = False


@dataclass(frozen=True)
class Embedding:
    """The rank of each position, and the forwarder of each edge (shape, a, b) that detours."""

    rank_of: tuple[int, ...]
    via: dict[_Key, int] = field(default_factory=dict)

    def detours(self, channels: Iterable[int]) -> dict[tuple[int, int, int], tuple[int, ...]]:
        """Return the forwarders of (channel, src, dst), in both directions on all channels."""
        found: dict[tuple[int, int, int], tuple[int, ...]] = {}
        for channel in channels:
            for (_, p, q), middle in self.via.items():
                a, b = self.rank_of[p], self.rank_of[q]
                found[channel, a, b] = found[channel, b, a] = (middle,)
        return found


@lru_cache(maxsize=8)
def _hops(
    topology: Topology,
) -> tuple[dict[tuple[int, int], tuple[_Link, ...]], dict[int, list[int]], dict[int, list[int]]]:
    """Return the links of each hop between two ranks, each rank's successors, and its
    predecessors."""
    rank = {g: r for r, g in enumerate(topology.gpus)}
    number = {ends: i for i, ends in enumerate(topology.by_ends)}
    links = {
        (rank[a], rank[b]): tuple(number[ends] for ends in pairwise(path))
        for (a, b), path in topology.hops.items()
    }
    return links, neighbours(links), neighbours((b, a) for a, b in links)


class _Search:
    """The state of one embedding search."""

    def __init__(self, topology: Topology, edges: Sequence[Edge], size: int) -> None:
        self.topology, self.size = topology, size
        self.edges = tuple(e for e in edges if e.a != e.b)
        self.capacity = [link.count for link in topology.by_ends.values()]
        self.most = min(_NODES, _ROUTED // max(1, len(self.edges)))
        self.order = self._connected_order()
        step = {p: i for i, p in enumerate(self.order)}
        self.closing: list[list[Edge]] = [[] for _ in range(size)]  # the edges complete at a step
        for edge in self.edges:
            self.closing[max(step[edge.a], step[edge.b])].append(edge)
        self.links, self.near, self.behind = _hops(topology)
        self.paths_up = self._paths_up()
        self.routes: dict[tuple[int, int, int | None, bool], list[_Link] | None] = {}

    def _connected_order(self) -> list[int]:
        """Return the positions so that each has an edge to an earlier one, if the shape allows."""
        near: list[list[int]] = [[] for _ in range(self.size)]
        for e in self.edges:
            near[e.a].append(e.b)
            near[e.b].append(e.a)
        order: list[int] = []
        seen: set[int] = set()
        for start in sorted(range(self.size), key=lambda p: -len(near[p])):
            if start in seen:
                continue
            seen.add(start)
            order.append(start)
            for p in order:
                for q in near[p]:
                    if q not in seen:
                        seen.add(q)
                        order.append(q)
        return order

    def route(self, edge: Edge, rank_of: Sequence[int], via: int | None) -> list[_Link] | None:
        """Return the directed links that the edge takes, or None if some hop has no link."""
        key = rank_of[edge.a], rank_of[edge.b], via, edge.one_way
        if key not in self.routes:
            self.routes[key] = self._find_route(*key)
        return self.routes[key]

    def _find_route(self, a: int, b: int, via: int | None, one_way: bool) -> list[_Link] | None:
        stops = [a, b] if via is None else [a, via, b]
        hops = list(pairwise(stops))
        if not one_way:
            hops += [(y, x) for x, y in hops]
        if any(hop not in self.links for hop in hops):
            return None
        return [link for hop in hops for link in self.links[hop]]

    def middles(self, a: int, b: int) -> list[int]:
        """Return the ranks that could forward from a to b, in ascending order."""
        return sorted(set(self.near.get(a, ())) & set(self.behind.get(b, ())) - {a, b})

    def claim(self, use: _Use, route: list[_Link] | None) -> bool:
        """Take the links and return True if all are free; else leave `use` as it is."""
        if route is None:
            return False
        for i, link in enumerate(route):
            use[link] = use.get(link, 0) + 1
            if use[link] > self.capacity[link]:
                self.release(use, route[: i + 1])
                return False
        return True

    @staticmethod
    def release(use: _Use, route: list[_Link]) -> None:
        for link in route:
            use[link] -= 1

    # ---- exclusive ---------------------------------------------------------------------------
    def least_detours(self) -> int:
        """Return a lower bound: parallel edges beyond the widest link must detour."""
        if not self.links:
            return 0
        widest = max(min(self.capacity[k] for k in links) for links in self.links.values())
        parallel: dict[tuple[int, int], int] = {}
        for e in self.edges:
            pair = (min(e.a, e.b), max(e.a, e.b))
            parallel[pair] = parallel.get(pair, 0) + 1
        return sum(max(0, n - widest) for n in parallel.values())

    def exclusive(self) -> Embedding | None:
        """Return an embedding without shared links, or None if the search finds none."""
        fewest = self.least_detours()
        for detours in range(fewest, fewest + _EXTRA_DETOURS + 1):
            self.best: tuple[int, Embedding] | None = None
            self.nodes = 0
            self.assign(0, [-1] * self.size, set(), {}, [], detours)
            if self.best:
                return self.best[1]
        return None

    def assign(
        self, at: int, rank_of: list[int], taken: set[int], use: _Use, pending: list[Edge],
        detours: int,
    ) -> bool:  # fmt: skip
        """Assign ranks to the positions from step `at` on, depth first.

        Returns True to end the search: its budget is spent, or no embedding is better.
        """
        self.nodes += 1
        if self.nodes > self.most:
            return True
        if at == self.size:
            return self.detour(rank_of, use, pending, {})
        position = self.order[at]
        able: Iterable[int] = range(self.size)
        if len(pending) + len(self.closing[at]) > detours:  # some edge must go straight
            ends = {rank_of[e.a + e.b - position] for e in self.closing[at]}
            able = sorted({r for end in ends for r in self.near.get(end, ())})
        for rank in able:
            if rank in taken:
                continue
            rank_of[position] = rank
            claimed: list[_Link] = []
            waiting = list(pending)
            for edge in self.closing[at]:
                route = self.route(edge, rank_of, None)
                if self.claim(use, route):
                    claimed += route or []
                else:
                    waiting.append(edge)
            taken.add(rank)
            done = len(waiting) <= detours and self.assign(
                at + 1, rank_of, taken, use, waiting, detours
            )
            taken.discard(rank)
            self.release(use, claimed)
            if done:
                return True
        rank_of[position] = -1
        return False

    def detour(
        self, rank_of: list[int], use: _Use, pending: list[Edge], via: dict[_Key, int]
    ) -> bool:
        """Find forwarders for the pending edges on the links that are left; returns as `assign`."""
        self.nodes += 1
        if self.nodes > self.most:
            return True
        if not pending:
            depth = self.depth(via)
            if self.best is None or depth < self.best[0]:
                self.best = depth, Embedding(tuple(rank_of), dict(via))
            return depth <= self.depth(())
        edge = pending[0]
        for middle in self.middles(rank_of[edge.a], rank_of[edge.b]):
            route = self.route(edge, rank_of, middle)
            if route is None or not self.claim(use, route):
                continue
            key = (edge.shape, edge.a, edge.b)
            via[key] = middle
            done = self.detour(rank_of, use, pending[1:], via)
            del via[key]
            self.release(use, route)
            if done:
                return True
        return False

    def _paths_up(self) -> tuple[list[int], dict[_Key, list[int]]]:
        """Return the length of the path from each position to its root, in every shape, and for
        each edge, from a child `a` to its parent `b`, the paths that contain it."""
        above = {(e.shape, e.a): e for e in self.edges if not e.one_way}
        lengths: list[int] = []
        on: dict[_Key, list[int]] = {}
        for shape, start in above:
            hops, at = 0, start
            while edge := above.get((shape, at)):
                on.setdefault((shape, edge.a, edge.b), []).append(len(lengths))
                hops, at = hops + 1, edge.b
            lengths.append(hops)
        return lengths, on

    def depth(self, via: Iterable[_Key]) -> int:
        """Return the hops of the longest path to a root in any shape if these edges detour."""
        lengths, on = self.paths_up[0].copy(), self.paths_up[1]
        for key in via:
            for path in on.get(key, ()):
                lengths[path] += 1
        return max(lengths, default=0)

    # ---- shared ------------------------------------------------------------------------------
    def load(self, rank_of: Sequence[int]) -> tuple[_Use, dict[_Key, int]] | None:
        """Return how often each link is used, and the detours, or None if an edge has no route.

        An edge without a direct route takes its least loaded forwarder.
        """
        use: _Use = {}
        via: dict[_Key, int] = {}
        for edge in self.edges:
            route = self.route(edge, rank_of, None)
            if route is None:
                middles = self.middles(rank_of[edge.a], rank_of[edge.b])
                routes = ((m, self.route(edge, rank_of, m)) for m in middles)
                choices = [(m, over) for m, over in routes if over is not None]
                if not choices:
                    return None
                middle, route = min(choices, key=lambda c: max(use.get(k, 0) for k in c[1]))
                via[edge.shape, edge.a, edge.b] = middle
            for link in route:
                use[link] = use.get(link, 0) + 1
        return use, via

    def cost(self, rank_of: Sequence[int]) -> tuple[float, float, int]:
        """Return the congestion: of the busiest link, of all links (squared), and the detours."""
        loaded = self.load(rank_of)
        if loaded is None:
            return (float("inf"), 0.0, 0)
        use, via = loaded
        share = [n / self.capacity[link] for link, n in use.items()]
        return (max(share, default=0.0), sum(s * s for s in share), len(via))

    def least_congested(self, swaps: int) -> Embedding:
        """Swap two positions while that lowers the congestion, in at most `swaps` trials."""
        best = list(range(self.size))
        cost, tried, improved = self.cost(best), 0, True
        while improved and tried < swaps:
            improved = False
            for i in range(self.size):
                for j in range(i + 1, self.size):
                    if tried >= swaps:
                        break
                    tried += 1
                    trial = list(best)
                    trial[i], trial[j] = trial[j], trial[i]
                    if (trial_cost := self.cost(trial)) < cost:
                        best, cost, improved = trial, trial_cost, True
        loaded = self.load(best)
        if loaded is None:
            gpus = self.topology.gpus
            edge = next(
                e
                for e in self.edges
                if not self.route(e, best, None)
                and not any(self.route(e, best, m) for m in self.middles(best[e.a], best[e.b]))
            )
            raise PlanError(
                f"{self.topology.name}: GPUs {gpus[best[edge.a]]} and {gpus[best[edge.b]]} are "
                "not joined, and no GPU next to both can forward between them; try ring or chain"
            )
        _, via = loaded
        return Embedding(tuple(best), via)


def embed(topology: Topology, edges: Sequence[Edge], size: int, relabel: bool = True) -> Embedding:
    """Assign the positions of shapes to the ranks of the topology, and choose detours.

    Without `relabel` position i stays on rank i. The result is deterministic. The search is
    complete for 8 GPUs and up to two detours, and bounded beyond. Raises PlanError if an edge has
    no route, not even over one other GPU.
    """
    return _embed(topology, tuple(edges), size, relabel)


@lru_cache(maxsize=64)
def _embed(topology: Topology, edges: tuple[Edge, ...], size: int, relabel: bool) -> Embedding:
    if size != len(topology.gpus):
        raise PlanError(f"a shape of {size} positions does not fit {len(topology.gpus)} GPUs")
    search = _Search(topology, edges, size)
    identity = list(range(size))
    use: _Use = {}
    if all(search.claim(use, search.route(e, identity, None)) for e in search.edges):
        return Embedding(tuple(identity))
    # on one memory all assignments are alike
    relabel = relabel and not topology.on_memory
    if relabel and size <= 64 and (found := search.exclusive()):
        return found
    swaps = min(_SWAPS, _EDGES // max(1, len(edges)))
    return search.least_congested(swaps if relabel else 0)
