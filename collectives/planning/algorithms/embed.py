"""Where on the machine a logical shape goes: which GPU holds each position, which pairs detour.

The search wants exclusive directed links, then fewest detours, then least depth; a pair whose
link is taken may detour as well as one that has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from linkweave.collectives.errors import PlanError
from linkweave.topology import Topology
from linkweave.topology.routes import neighbours

_NODES, _LAID = 20_000, 100_000  # nodes, and edges laid, of a search: a fraction of a second
_EXTRA_DETOURS = 3  # how many more than the least conceivable are tried
_SWAPS, _EDGES = 1_500, 50_000  # labellings, and edges laid, where no exclusive one was found

_Link = int  # its place in `Topology.by_ends`
_Use = dict[_Link, int]


@dataclass(frozen=True, slots=True)
class Edge:
    """Positions a and b of shape `shape` exchange data: a -> b, and b -> a unless `one_way`."""

    shape: int
    a: int
    b: int
    one_way: bool = False


@dataclass(frozen=True)
class Embedding:
    """`rank_of[position]`; `via[(shape, position a, position b)]` for each edge that detours."""

    rank_of: tuple[int, ...]
    via: dict[tuple[int, int, int], int] = field(default_factory=dict)


@lru_cache(maxsize=8)
def _ways(
    topology: Topology,
) -> tuple[dict[tuple[int, int], tuple[_Link, ...]], dict[int, list[int]], dict[int, list[int]]]:
    """For each two ranks that hardware joins, the links; whom each leads to, and who to it."""
    rank = {g: r for r, g in enumerate(topology.gpus)}
    number = {ends: i for i, ends in enumerate(topology.by_ends)}
    links = {
        (rank[a], rank[b]): tuple(number[ends] for ends in zip(path, path[1:], strict=False))
        for (a, b), path in topology.hops.items()
    }
    return links, neighbours(links), neighbours((b, a) for a, b in links)


class _Search:
    def __init__(self, topology: Topology, edges: Sequence[Edge], size: int) -> None:
        self.topology, self.size = topology, size
        self.edges = tuple(e for e in edges if e.a != e.b)
        self.capacity = [link.count for link in topology.by_ends.values()]
        self.most = min(_NODES, _LAID // max(1, len(self.edges)))
        self.order = self._connected_order()
        place = {p: i for i, p in enumerate(self.order)}
        self.closing: list[list[Edge]] = [[] for _ in range(size)]  # edges complete at a position
        for edge in self.edges:
            self.closing[max(place[edge.a], place[edge.b])].append(edge)
        self.links, self.near, self.behind = _ways(topology)
        self.ways_up = self._ways_up()
        self.laid: dict[tuple[int, int, int | None, bool], list[_Link] | None] = {}

    def _connected_order(self) -> list[int]:
        """Positions such that each (after the first) has an edge to one before it, if it can."""
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

    def wires(self, edge: Edge, rank_of: Sequence[int], via: int | None) -> list[_Link] | None:
        """Every directed link the edge takes, or None where hardware has no such way."""
        key = rank_of[edge.a], rank_of[edge.b], via, edge.one_way
        if key not in self.laid:
            self.laid[key] = self._lay(*key)
        return self.laid[key]

    def _lay(self, a: int, b: int, via: int | None, one_way: bool) -> list[_Link] | None:
        stops = [a, b] if via is None else [a, via, b]
        ways = list(zip(stops, stops[1:], strict=False))
        if not one_way:
            ways += [(y, x) for x, y in ways]
        found: list[_Link] = []
        for way in ways:
            if way not in self.links:
                return None
            found += self.links[way]
        return found

    def middles(self, a: int, b: int) -> list[int]:
        """Who could forward from a to b, in the order of the ranks."""
        return sorted(set(self.near.get(a, ())) & set(self.behind.get(b, ())) - {a, b})

    def claim(self, use: _Use, wires: list[_Link] | None) -> bool:
        """Take the links if all are free; leaves `use` as it was if not."""
        if wires is None:
            return False
        for i, link in enumerate(wires):
            use[link] = use.get(link, 0) + 1
            if use[link] > self.capacity[link]:
                self.release(use, wires[: i + 1])
                return False
        return True

    @staticmethod
    def release(use: _Use, wires: list[_Link]) -> None:
        for link in wires:
            use[link] -= 1

    # ---- exclusive ---------------------------------------------------------------------------
    def least_detours(self) -> int:
        """A lower bound: edges beyond the widest link between any one pair must detour."""
        if not self.links:
            return 0
        widest = max(min(self.capacity[k] for k in links) for links in self.links.values())
        parallel: dict[tuple[int, int], int] = {}
        for e in self.edges:
            pair = (min(e.a, e.b), max(e.a, e.b))
            parallel[pair] = parallel.get(pair, 0) + 1
        return sum(max(0, n - widest) for n in parallel.values())

    def exclusive(self) -> Embedding | None:
        fewest = self.least_detours()
        for detours in range(fewest, fewest + _EXTRA_DETOURS + 1):
            self.best: tuple[int, Embedding] | None = None
            self.nodes = 0
            self.place(0, [-1] * self.size, set(), {}, [], detours)
            if self.best:
                return self.best[1]
        return None

    def place(
        self, at: int, rank_of: list[int], taken: set[int], use: _Use, pending: list[Edge],
        detours: int,
    ) -> bool:  # fmt: skip
        """Depth-first over labellings; True ends the search (budget spent or none better)."""
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
                wires = self.wires(edge, rank_of, None)
                if self.claim(use, wires):
                    claimed += wires or []
                else:
                    waiting.append(edge)
            taken.add(rank)
            done = len(waiting) <= detours and self.place(
                at + 1, rank_of, taken, use, waiting, detours
            )
            taken.discard(rank)
            self.release(use, claimed)
            if done:
                return True
        rank_of[position] = -1
        return False

    def detour(
        self, rank_of: list[int], use: _Use, pending: list[Edge],
        via: dict[tuple[int, int, int], int],
    ) -> bool:  # fmt: skip
        """Find forwarders for the pending edges on the links that are left."""
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
            wires = self.wires(edge, rank_of, middle)
            if wires is None or not self.claim(use, wires):
                continue
            key = (edge.shape, edge.a, edge.b)
            via[key] = middle
            done = self.detour(rank_of, use, pending[1:], via)
            del via[key]
            self.release(use, wires)
            if done:
                return True
        return False

    def _ways_up(self) -> tuple[list[int], dict[tuple[int, int, int], list[int]]]:
        """Of the way from each position to its root, in every shape: the edges, and for each edge
        the ways that it is on; edges run from a child `a` to its parent `b`."""
        above = {(e.shape, e.a): e for e in self.edges if not e.one_way}
        lengths: list[int] = []
        on: dict[tuple[int, int, int], list[int]] = {}
        for shape, start in above:
            hops, at = 0, start
            while edge := above.get((shape, at)):
                on.setdefault((shape, edge.a, edge.b), []).append(len(lengths))
                hops, at = hops + 1, edge.b
            lengths.append(hops)
        return lengths, on

    def depth(self, via: Iterable[tuple[int, int, int]]) -> int:
        """Hops on the longest way to a root in any shape, where those edges detour."""
        lengths, on = self.ways_up[0].copy(), self.ways_up[1]
        for key in via:
            for way in on.get(key, ()):
                lengths[way] += 1
        return max(lengths, default=0)

    # ---- shared ------------------------------------------------------------------------------
    def load(self, rank_of: Sequence[int]) -> tuple[_Use, dict[tuple[int, int, int], int]] | None:
        """Links used with this labelling, each edge straight or over its least loaded forwarder."""
        use: _Use = {}
        via: dict[tuple[int, int, int], int] = {}
        for edge in self.edges:
            wires, middle = self.wires(edge, rank_of, None), None
            if wires is None:
                middles = self.middles(rank_of[edge.a], rank_of[edge.b])
                ways = ((m, self.wires(edge, rank_of, m)) for m in middles)
                choices = [(m, over) for m, over in ways if over is not None]
                if not choices:
                    return None
                middle, wires = min(choices, key=lambda c: max(use.get(k, 0) for k in c[1]))
            if middle is not None:
                via[edge.shape, edge.a, edge.b] = middle
            for link in wires:
                use[link] = use.get(link, 0) + 1
        return use, via

    def cost(self, rank_of: Sequence[int]) -> tuple[float, float, int]:
        """How congested a labelling is: worst link, all links' excess, detours."""
        loaded = self.load(rank_of)
        if loaded is None:
            return (float("inf"), 0.0, 0)
        use, via = loaded
        share = [n / self.capacity[link] for link, n in use.items()]
        return (max(share, default=0.0), sum(s * s for s in share), len(via))

    def least_congested(self, swaps: int) -> Embedding:
        """Swap two positions while that lowers the congestion, `swaps` trials at most."""
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
                if not self.wires(e, best, None)
                and not any(self.wires(e, best, m) for m in self.middles(best[e.a], best[e.b]))
            )
            raise PlanError(
                f"{self.topology.name}: GPUs {gpus[best[edge.a]]} and {gpus[best[edge.b]]} are "
                "not joined, and no GPU next to both can forward between them; try ring or chain"
            )
        _, via = loaded
        return Embedding(tuple(best), via)


def embed(topology: Topology, edges: Sequence[Edge], size: int, relabel: bool = True) -> Embedding:
    """Positions 0..size-1 on ranks 0..size-1 of the topology.

    Without `relabel` position i stays on rank i and only ways are chosen. Deterministic. Complete
    for the machines that matter (8 GPUs, up to two detours), a bounded search beyond. Raises
    PlanError where some edge has no way at all.
    """
    return _embed(topology, tuple(edges), size, relabel)


@lru_cache(maxsize=64)
def _embed(topology: Topology, edges: tuple[Edge, ...], size: int, relabel: bool) -> Embedding:
    if size != len(topology.gpus):
        raise PlanError(f"a shape of {size} positions does not fit {len(topology.gpus)} GPUs")
    search = _Search(topology, edges, size)
    identity = list(range(size))
    use: _Use = {}
    if all(search.claim(use, search.wires(e, identity, None)) for e in search.edges):
        return Embedding(tuple(identity))
    # every labelling of a bus is the same, so where one is not exclusive, none is
    relabel = relabel and not topology.on_memory
    if relabel and size <= 64 and (found := search.exclusive()):
        return found
    swaps = min(_SWAPS, _EDGES // max(1, len(edges)))
    return search.least_congested(swaps if relabel else 0)
