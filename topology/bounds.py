"""The best that any collective can do on a machine's links, whatever its algorithm.

Switches pass messages on and, but for `reducing_bound`, neither reduce nor copy them. N is the
size in bytes of a rank's input to all-reduce, reduce-scatter and broadcast, and of all-gather's
output; algbw is N over the time. kappa(S) is a minimum cut: the least capacity that separates the
ranks S from the other ranks, with switches and forwarders on either side.

All-reduce: split the ranks into r parts. At least 2 (r - 1) N bytes must pass between parts, and no
routing carries more than the sum of kappa over the parts (twice what the theorem of Lovasz and
Cherkassky on free multiflows allows, since links have two directions), so

    algbw <= sum of kappa(P_i) / (2 (r - 1))        for every partition P_1 ... P_r.

If links join GPUs directly, the sum is twice the number of links between parts, and the right side
is the bound of Nash-Williams and Tutte on packing spanning trees, which packed trees reach. Since
kappa is submodular, Dinkelbach's iteration on the Dilworth truncation of kappa (Frank; Cunningham
1985) finds the smallest right side with minimum cuts alone, exactly, in integers and Fractions. For
links that are wider in one direction, both directions are tried and the lower bound is taken.

All-gather (and reduce-scatter with all links reversed): the data of S must leave S, so
algbw <= P kappa(S) / |S| for every proper subset S of the ranks (Zhao et al., ForestColl, 2024).
Broadcast: algbw <= kappa(S) for every S with the root (Edmonds 1973).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from math import lcm

import numpy as np

from linkweave.topology.checks import TopologyError
from linkweave.topology.graph import KINDS, Link, Vertex, neighbours, reach
from linkweave.topology.loading import load
from linkweave.topology.symmetry import Wiring, colour_of
from linkweave.topology.text import gpu_list, number, vertex
from linkweave.topology.topology import Topology

_UNLIMITED = 1 << 60
BOUNDED = ("allreduce", "allgather", "reduce_scatter", "broadcast")


@dataclass(frozen=True, slots=True)
class Bound:
    """A lower bound on time: every algorithm takes at least `seconds_per_byte` * N on this machine.

    `parts` are the sets of GPUs between which traffic is slowest, `bottleneck` describes them in
    words, and `over` names the kinds of link that were counted. If these links are all equal,
    `links` is algbw in units of one link (24/7 on a DGX-1 with V100). `assumed` is set if the
    bandwidth of a link is a guess; the topology's `assumptions` say which.

    On CPU ranks (`over` is "memory") it is not a bound but an estimate of the cost model, because a
    rank may add up what it reads without copying it first.
    """

    collective: str
    seconds_per_byte: Fraction
    parts: tuple[tuple[int, ...], ...]
    bottleneck: str
    over: str
    links: Fraction | None
    assumed: bool = False
    reduced: bool = False  # whether switches may reduce and multicast what passes

    @property
    def algbw(self) -> float:
        """Bytes/s; infinite where nothing has to move."""
        return float(1 / self.seconds_per_byte) if self.seconds_per_byte else float("inf")

    def __str__(self) -> str:
        if not self.seconds_per_byte:
            return f"{self.collective}: {self.bottleneck}"
        if self.over == "memory":
            return (
                f"{self.collective}: about {self.algbw / 1e9:.4g} GB/s by the model of one memory"
            )
        units = f" = {self.links} link{'s'[: self.links != 1]}" if self.links else ""
        how = ", reduced by the switches (NVLS)" if self.reduced else ""
        return (
            f"{self.collective}{how}: at most {self.algbw / 1e9:.4g} GB/s on the wires{units} over "
            f"{self.over}"
            f"{' (speed assumed)' * self.assumed}; bottleneck: {self.bottleneck}"
            f"{'; only plans for MSCCL++ use them' * self.reduced}"
        )


def allreduce_bound(topology: Topology | str) -> float:
    """The highest algbw that an all-reduce can reach, in bytes/s; arguments as of `bound`."""
    return bound(topology, "allreduce").algbw


def reducing_bound(topology: Topology | str) -> Bound | None:
    """Bound the time of an all-reduce in which the topology's `reducing` switches take part.

    All N bytes of the result depend on every rank, so that N bytes must leave each proper subset of
    the ranks, and N enter it, whoever adds them: algbw <= kappa(S). Where every GPU has one port
    into such a switch, and sends and receives each byte once, this is reached. Between nodes of a
    cluster, whose switches do not reduce, the bound of an all-reduce of nodes holds as well.
    Multicast does not change the bounds of the other collectives. None if no switch of the fabric
    reduces; raises as `bound`. `topology` is a `Topology` or what `topology.load` takes.
    """
    return _reducing_bound(load(topology))


@lru_cache(maxsize=64)
def _reducing_bound(topology: Topology) -> Bound | None:
    plain = bound(topology)
    reducing = {*topology.reducing}
    ends = {end for link in topology.fabric for end in (link.src, link.dst)}
    if not ends & reducing or not plain.seconds_per_byte:
        return None
    ranks = topology.gpus
    there, back = _capacities(topology), _capacities(topology, reverse=True)

    def between(capacities: Mapping[tuple[Vertex, Vertex], int]) -> Found:
        """Ranks at one such switch are like one rank to those that do not reduce."""
        glued = {k: _UNLIMITED if reducing.intersection(k) else n for k, n in capacities.items()}
        return narrowest_partition(FlowNetwork(ranks, glued))

    found = [_rooted(ranks, there, ranks[0]), _inward(_rooted(ranks, back, ranks[0]))]
    found.append(between(there))
    if there != back:
        found.append(_inward(between(back)))
    return _least(topology, "allreduce", found, reduced=True)


def bound(
    topology: Topology | str, collective: str = "allreduce", root: int | None = None
) -> Bound:
    """Bound the time of a collective on the topology's fabric.

    `root` is the rank that a broadcast starts from; without one, the bound holds for every root.
    `topology` is a `Topology` or what `topology.load` takes, such as a machine's name. Raises
    TopologyError for an unknown collective, a wrong root, or GPUs that are not connected.
    """
    return _bound(load(topology), collective, root)


@lru_cache(maxsize=1024)
def _bound(topology: Topology, collective: str, root: int | None) -> Bound:
    if collective not in BOUNDED:
        raise TopologyError(f"no bound for {collective!r}; choose from {', '.join(BOUNDED)}")
    ranks = topology.gpus
    if root is not None and (
        collective != "broadcast" or isinstance(root, bool) or not 0 <= root < len(ranks)
    ):
        raise TopologyError(
            f"root {root}: only a broadcast has one, a rank from 0 to {len(ranks) - 1}"
        )
    over = _kinds(topology.fabric)
    if len(ranks) == 1:
        return Bound(collective, Fraction(0), (), "nothing: one rank has all", over, None)
    if topology.on_memory:
        return _memory_bound(topology, collective, over)
    there, back = _capacities(topology), _capacities(topology, reverse=True)
    if collective == "allreduce":
        found = [narrowest_partition(_network(topology))]
        if there != back:
            found.append(_inward(narrowest_partition(_network(topology, reverse=True))))
            found.append(_rooted(ranks, there, ranks[0]))
            found.append(_inward(_rooted(ranks, back, ranks[0])))
    elif collective == "broadcast":
        roots = ranks if root is None else (ranks[root],)
        if root is None and there == back:  # then a cut that spares one root is one for another
            roots = ranks[:1]
        found = [_rooted(ranks, there, r) for r in roots]
    elif collective == "allgather":
        found = [_gathered(_network(topology))]
    else:
        found = [_inward(_gathered(_network(topology, reverse=True)))]
    return _least(topology, collective, found)


def _least(
    topology: Topology, collective: str, found: Sequence[Found], reduced: bool = False
) -> Bound:
    """The bound by the narrowest of what was found."""
    ranks = topology.gpus
    algbw, cuts = min(found, key=lambda pair: pair[0])
    if not algbw:
        lost, inward = _ranks_of(cuts[0], ranks), cuts[0].inward
        if 2 * len(lost) > len(ranks):  # the others are easier to name
            lost, inward = tuple(g for g in ranks if g not in lost), not inward
        way = "to GPU {} from" if inward else "from GPU {} to"
        raise TopologyError(
            f"{topology.name}: no link leads {way.format(gpu_list(lost))} the other GPUs"
        )
    widths = {({"host": "pcie"}.get(k.kind, k.kind), k.bandwidth) for k in topology.fabric}
    return Bound(
        collective, 1 / algbw, tuple(_ranks_of(cut, ranks) for cut in cuts),
        _words(topology, cuts), _kinds(topology.fabric),
        algbw / widths.pop()[1] if len(widths) == 1 else None,
        any(k.assumed for k in topology.fabric), reduced,
    )  # fmt: skip


def _capacities(topology: Topology, reverse: bool = False) -> dict[tuple[Vertex, Vertex], int]:
    return {
        (k.dst, k.src) if reverse else (k.src, k.dst): k.bandwidth * k.count
        for k in topology.fabric
    }


@lru_cache(maxsize=16)
def _network(topology: Topology, reverse: bool = False) -> FlowNetwork:
    """Cached, because finding ranks that are alike is slow and several collectives need it."""
    capacities = _capacities(topology, reverse)
    if reverse and capacities == _capacities(topology):
        return _network(topology)
    return FlowNetwork(topology.gpus, capacities)


def _inward(found: Found) -> Found:
    """Turn cuts that were found with all links reversed back into cuts of the real links."""
    return found[0], [replace(cut, inward=True) for cut in found[1]]


def narrowest_partition(network: FlowNetwork) -> Found:
    """The smallest sum of kappa(P_i) / (2 (r - 1)) over all partitions, and its parts."""
    ranks = network.ranks
    low: dict[Vertex, Fraction | int] = dict.fromkeys(ranks, -network.everything)
    cuts = [
        network.least(members[0], low, inside=members[:1])
        for members in network.alike
        for _ in members
    ]
    while True:
        best = Fraction(sum(cut.capacity for cut in cuts), 2 * (len(cuts) - 1))
        finer = _truncation(network, 2 * best)
        if len(finer) == 1 or sum(cut.capacity for cut in finer) >= 2 * best * (len(finer) - 1):
            if len(cuts) == len(ranks):
                cuts = [network.least(rank, low, inside=[rank]) for rank in ranks]
            return best, cuts
        cuts = finer


def _truncation(network: FlowNetwork, price: Fraction) -> list[Cut]:
    """The coarsest partition with the smallest sum of kappa(P_i) - price.

    That sum equals the largest total weight of the ranks if no set S may weigh more than
    kappa(S) - price. The weights are raised for one set of like ranks after the other, as far as
    possible; the parts are the sets that then weigh exactly as much as they may.
    """
    low: dict[Vertex, Fraction | int] = dict.fromkeys(network.ranks, -network.everything)
    weights = dict(low)
    for members in network.alike:
        one, like = members[0], set(members)
        level = Fraction(network.least(one, low, inside=[one]).capacity) - price  # if alone
        while True:
            weights.update(dict.fromkeys(members, level))
            cut = network.least(one, weights, inside=[one])
            inside = cut.side.intersection(network.ranks)
            excess = sum((weights[r] for r in inside), price) - cut.capacity
            if excess <= 0:
                break
            level -= Fraction(excess) / len(inside & like)
    parts: list[Cut] = []
    left = list(network.ranks)
    while left:
        parts.append(network.least(left[0], weights, inside=left[:1]))
        left = [rank for rank in left if rank not in parts[-1].side]
    return parts


def _gathered(network: FlowNetwork) -> Found:
    """P times the smallest kappa(S) / |S| over proper subsets S of the ranks."""
    ranks, size = set(network.ranks), len(network.ranks)
    heads = [members[0] for members in network.alike]
    full: dict[Vertex, Fraction | int] = dict.fromkeys(network.ranks, network.everything)
    cuts = [network.least(head, full, outside=[head]) for head in heads]
    cut = min(cuts, key=lambda c: c.capacity)
    share = Fraction(cut.capacity, size - 1)
    while True:
        tried = [network.least(h, dict.fromkeys(ranks, share), outside=[h]) for h in heads]
        better = [(Fraction(c.capacity, held), c) for c in tried if (held := len(ranks & c.side))]
        least, found = min(better, key=lambda pair: pair[0], default=(share, cut))
        if least >= share:
            return size * share, [cut]
        share, cut = least, found


def _rooted(
    ranks: Sequence[int], capacities: Mapping[tuple[Vertex, Vertex], int], root: int
) -> Found:
    """The smallest kappa(S) over proper subsets S of the ranks that contain the root."""
    network = FlowNetwork(ranks, capacities, apart=[root])
    heads = [members[0] for members in network.alike if root not in members]
    cuts = [network.least(head, {}, inside=[root], outside=[head]) for head in heads]
    cut = min(cuts, key=lambda c: c.capacity)
    return Fraction(cut.capacity), [cut]


def _memory_bound(topology: Topology, collective: str, over: str) -> Bound:
    """Estimate for ranks that share one memory, from which each loads what the others wrote.

    To combine P inputs, ranks load P - 1 of them from others; a result is loaded by P - 1 others.
    """
    size = len(topology.gpus)
    bus = min(link.bandwidth * link.count for link in topology.fabric)
    times = (size - 1) * (2 if collective == "allreduce" else 1)
    words = "the memory that all ranks share"
    return Bound(collective, Fraction(times, bus), (topology.gpus,), words, over, None)


def _ranks_of(cut: Cut, ranks: Sequence[int]) -> tuple[int, ...]:
    return tuple(rank for rank in ranks if rank in cut.side)


def _kinds(links: Sequence[Link]) -> str:
    kinds = {link.kind for link in links}
    pcie = kinds & {"pcie", "host", "socket"}
    named = [
        word
        for word, there in (
            ("NVLink", "nvlink" in kinds), ("xGMI", "xgmi" in kinds), ("PCIe", bool(pcie)),
            ("the network", "network" in kinds), ("memory", "memory" in kinds),
        ) if there
    ]  # fmt: skip
    return _and(named)


def _words(topology: Topology, cuts: Sequence[Cut]) -> str:
    """The bottleneck: "each GPU's six links", "the three links between 0-3 and 4-7"."""
    ranks = topology.gpus
    groups = [_ranks_of(cut, ranks) for cut in cuts]
    crossing = [[k for k in topology.fabric if _crosses(k, cut)] for cut in cuts]
    links = [_links(of) for of in crossing]
    direct = all(isinstance(v, int) for of in crossing for k in of for v in (k.src, k.dst))
    if len(cuts) > 2:
        facts = {(len(g), n, c.capacity) for g, n, c in zip(groups, links, cuts, strict=True)}
        own = all(
            len(group) == 1 and all(group[0] in (k.src, k.dst) for k in of)
            for group, of in zip(groups, crossing, strict=True)
        )
        if len(facts) == 1 and own:
            return f"each GPU's {links[0]}"
        if len(facts) == 1 and len(groups[0]) == 1:
            return f"the {links[0]} by which each GPU is reached"
        if len(facts) == 1:
            return f"the {links[0]} of each of {len(groups)} groups: {_some(groups)}"
        across = {(k.src, k.dst): k for of in crossing for k in of}
        once = [k for (a, b), k in across.items() if (b, a) not in across or str(a) < str(b)]
        if direct:
            return f"the {_links(once)} between {_some(groups)}"
        return f"what leads out of {_some(groups)} ({_some([*map(_ends, once)], most=4)})"
    side = min(groups[0], tuple(g for g in ranks if g not in groups[0]), key=len)
    rest = [g for g in ranks if g not in side]
    if len(side) == 1 and all(side[0] in (k.src, k.dst) for k in crossing[0]):
        ports: dict[Vertex, list[tuple[int, int]]] = {}
        for k in topology.fabric:
            ports.setdefault(k.src, []).append((k.bandwidth, k.count))
        alike = len({tuple(sorted(ports.get(g, ()))) for g in ranks}) == 1
        return f"{'each GPU' if alike else f'GPU {side[0]}'}'s {links[0]}"
    between = f"the {links[0]} between {gpu_list(side)} and {gpu_list(rest)}"
    return between if direct else f"{between} ({_some([*map(_ends, crossing[0])], most=2)})"


def _ends(link: Link) -> str:
    """A link's ends, a GPU first; how many such links there are if more than one."""
    a, b = sorted((link.src, link.dst), key=lambda v: isinstance(v, str))
    return f"{link.count} x " * (link.count > 1) + f"{vertex(a)}-{vertex(b)}"


def _crosses(link: Link, cut: Cut) -> bool:
    src, dst = (link.dst, link.src) if cut.inward else (link.src, link.dst)
    return src in cut.side and dst not in cut.side


def _links(links: Sequence[Link]) -> str:
    """How many links there are; of several kinds, how many of each."""
    counts: dict[str, int] = {}
    for link in links:
        counts[link.kind] = counts.get(link.kind, 0) + link.count
    words = [
        f"{number(n)} {KINDS[kind][n != 1] if len(counts) > 1 else 'links'[: 4 + (n != 1)]}"
        for kind in KINDS
        if (n := counts.get(kind))
    ]
    return _and(words)


def _some(things: Sequence[tuple[int, ...] | str], most: int = 8) -> str:
    """Join a few things by commas; of many, name the first and count the rest."""
    words = [t if isinstance(t, str) else gpu_list(t) for t in things]
    if len(words) > most:
        words = [*words[: min(most, 3)], f"{len(words) - min(most, 3)} more"]
    return _and(words)


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


_S, _T = -1, -2  # source and sink, beside the merged vertices 0, 1, ...


@dataclass(frozen=True, slots=True)
class Cut:
    """A set of vertices and the capacity out of it (into it if `inward`), in bytes/s."""

    side: frozenset[Vertex]
    capacity: int
    inward: bool = False


Found = tuple[Fraction, list[Cut]]  # an algbw, and the cuts that hold it up


@dataclass(frozen=True, slots=True)
class _View:
    """The network with the vertices merged that look alike to one rank."""

    members: tuple[tuple[Vertex, ...], ...]
    arcs: Mapping[tuple[int, int], int]


class FlowNetwork:
    """Directed integer capacities between vertices, some of which are ranks.

    Ranks of one set in `alike` see equal networks: if weights are equal within each set, their
    minimum cuts have equal capacities. Each rank in `apart` is a set of its own.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        capacities: Mapping[tuple[Vertex, Vertex], int],
        apart: Collection[int] = (),
    ) -> None:
        self.ranks = tuple(ranks)
        ends = (v for arc in capacities for v in arc)
        self.vertices: tuple[Vertex, ...] = tuple(dict.fromkeys((*self.ranks, *ends)))
        self._out: dict[Vertex, list[tuple[Vertex, int]]] = {v: [] for v in self.vertices}
        for (a, b), capacity in capacities.items():
            self._out[a].append((b, capacity))
        self._wiring = Wiring(self.vertices, [(a, b, c) for (a, b), c in capacities.items()])
        marks: dict[Vertex, str] = dict.fromkeys(self.ranks, "rank")
        marks |= {g: f"rank {g}" for g in apart}
        self._colours = self._wiring.refine(colour_of(marks.get(v, "") for v in self.vertices))
        self._views: dict[int, _View] = {}
        self.everything = 1 + sum(capacities.values())  # more than any cut

    @cached_property
    def alike(self) -> list[tuple[int, ...]]:
        while True:
            sets: dict[tuple[int, bytes, bytes], list[int]] = {}
            for rank in self.ranks:
                seen = self._wiring.single_out(self._colours, rank)
                colours, counts = np.unique(seen, return_counts=True)
                own = int(self._colours[self._wiring.index[rank]])
                sets.setdefault((own, colours.tobytes(), counts.tobytes()), []).append(rank)
            if len(sets) == len({own for own, _, _ in sets}):
                return [tuple(members) for members in sets.values()]
            marks: dict[Vertex, str] = {
                rank: repr(key) for key, members in sets.items() for rank in members
            }
            self._colours = self._wiring.refine(
                colour_of(marks.get(v, repr(c)) for v, c in zip(self.vertices, self._colours,
                                                                strict=True))
            )  # fmt: skip

    def _view(self, rank: int) -> _View:
        if rank not in self._views:
            assert self.alike  # which settles the colours
            groups: dict[int, list[Vertex]] = {}
            colours = self._wiring.single_out(self._colours, rank)
            for v, colour in zip(self.vertices, colours, strict=True):
                groups.setdefault(int(colour), []).append(v)
            index = {v: i for i, members in enumerate(groups.values()) for v in members}
            arcs: dict[tuple[int, int], int] = {}
            for i, members in enumerate(groups.values()):
                for v, capacity in self._out[members[0]]:  # every member has the same
                    if index[v] != i:
                        arcs[i, index[v]] = arcs.get((i, index[v]), 0) + capacity * len(members)
            self._views[rank] = _View(tuple(map(tuple, groups.values())), arcs)
        return self._views[rank]

    def least(
        self,
        rank: int,
        weights: Mapping[Vertex, Fraction | int],
        inside: Collection[int] = (),
        outside: Collection[int] = (),
    ) -> Cut:
        """Return the largest set S that minimises the capacity out of S minus the weight of S.

        S contains `inside` and nothing of `outside`; both may name `rank` and the ranks that are
        `apart`. Weights must be equal within each set of `alike`.
        """
        view = self._view(rank)
        found = [Fraction(w) for w in {*weights.values()}]
        scale = lcm(*(w.denominator for w in found))
        heavy = len(weights) * max(map(abs, found), default=Fraction(0))  # no less than all
        endless = int((self.everything + heavy) * scale) + 1
        residual: dict[int, dict[int, int]] = {_S: {}, _T: {}}
        for i, members in enumerate(view.members):
            residual[i] = {}
            first = members[0]
            if first not in self._ranks:
                continue
            gain = int(weights.get(first, 0) * scale) * len(members)
            if first in inside:
                residual[_S][i] = endless
            elif gain > 0:
                residual[_S][i] = gain
            if first in outside:
                residual[i][_T] = endless
            elif gain < 0:
                residual[i][_T] = -gain
        for (i, j), capacity in view.arcs.items():
            residual[i][j] = capacity * scale
        _saturate(residual)
        open_ = ((j, i) for i, out in residual.items() for j, left in out.items() if left)
        beyond = reach(neighbours(open_), _T)  # what can still reach the sink
        kept = [i for i in range(len(view.members)) if i not in beyond]
        leaving = sum(c for (i, j), c in view.arcs.items() if i not in beyond and j in beyond)
        return Cut(frozenset(v for i in kept for v in view.members[i]), leaving)

    @cached_property
    def _ranks(self) -> frozenset[int]:
        return frozenset(self.ranks)


def _saturate(residual: dict[int, dict[int, int]]) -> None:
    """Push a maximum flow from source to sink along shortest paths (Edmonds and Karp)."""
    while True:
        came: dict[int, int] = {_S: _S}
        queue = deque([_S])
        while queue and _T not in came:
            i = queue.popleft()
            for j, left in residual[i].items():
                if left and j not in came:
                    came[j] = i
                    queue.append(j)
        if _T not in came:
            return
        way = [_T]
        while way[-1] != _S:
            way.append(came[way[-1]])
        steps = list(zip(way[1:], way, strict=False))
        flow = min(residual[i][j] for i, j in steps)
        for i, j in steps:
            residual[i][j] -= flow
            residual[j][i] = residual[j].get(i, 0) + flow
