"""Lowering: from which data moves (`Algorithm`) to what each rank does when (`Plan`).

Signals and waits are made here only: an algorithm says which chunk is combined or copied from where
to where, and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from operator import or_
from types import MappingProxyType

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.algorithms.trees import Tree
from linkweave.collectives.planning.collective import ALLREDUCE, COLLECTIVES, Root, check
from linkweave.collectives.planning.plan import Connection, Op, Plan, Step, Track
from linkweave.topology import Topology, Vertex
from linkweave.topology.text import counted, ranks


@dataclass(frozen=True, slots=True)
class Reduce:
    """Combine `dst`'s chunk with those of `srcs`, in that order.

    The first `ahead` sources come before `dst`'s own value. So ranks that combine the same values
    can do so in the same order, and get the same bits with every operator.
    """

    srcs: tuple[int, ...]
    dst: int
    chunk: int
    channel: int
    ahead: int = 0

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(source, target) of each send."""
        return [(src, self.dst) for src in self.srcs]


@dataclass(frozen=True, slots=True)
class Copy:
    """Overwrite the chunk of each of `dsts` with that of `src`."""

    src: int
    dsts: tuple[int, ...]
    chunk: int
    channel: int

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(source, target) of each send."""
        return [(self.src, dst) for dst in self.dsts]


MOST_SQUARED = 64
"""The most ranks of an algorithm whose plan grows with their square."""

MOST_BLOCKS = 256
"""The most ranks of an algorithm that moves a block of each rank to all others, or from all, where
no other algorithm does: planning takes about 20 s."""

Move = Reduce | Copy
Round = tuple[Move, ...]
"""Simultaneous moves: each reads the values from before the round."""


@dataclass(frozen=True)
class Algorithm:
    """The moves of one group of `stride` chunks, which the plan repeats for every group.

    `phases` are lists of rounds. A track finishes one phase for all chunks before it starts the
    next; a baseline tree differs from an overlapped one only in that. Moves on different channels
    run simultaneously; the moves of a rank on one channel run in order. `detours` maps (channel,
    src, dst) to the ranks that forward; other moves go straight. Raises PlanError for an unknown
    collective or a root that is not one.
    """

    name: str
    size: int
    stride: int
    phases: tuple[tuple[Round, ...], ...]
    trees: tuple[Tree, ...] = ()
    detours: Mapping[tuple[int, int, int], tuple[int, ...]] = field(default_factory=dict)
    collective: str = ALLREDUCE
    root: Root = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", check(self.collective, self.size, self.root))
        object.__setattr__(self, "detours", MappingProxyType(dict(self.detours)))


def few_enough(name: str, size: int, most: int = MOST_SQUARED) -> None:
    """Raise PlanError if there are too many ranks for a plan that grows with their square."""
    if size > most:
        raise PlanError(f"a plan of {name} grows as P^2: at most {most} ranks, not {size}")


@dataclass(frozen=True, slots=True)
class Tuning:
    """The number of chunks, and of slots for each connection."""

    num_chunks: int
    slots: int = 2


_Key = tuple[int, int]  # (rank, channel): names a track


@dataclass
class _Value:
    """The accesses to one rank's chunk so far."""

    writer: _Key | None = None  # the track that wrote the value; None: the caller
    readers: list[_Key] = field(default_factory=list)  # the tracks that have sent it since
    holds: int = 0  # its contributions (`planning.collective`)


class _Lowering:
    def __init__(self, algorithm: Algorithm, topology: Topology) -> None:
        self.algorithm, self.topology = algorithm, topology
        self.bodies: dict[_Key, list[list[Step]]] = {}
        self.connections: list[Connection] = []
        self.number: dict[Connection, int] = {}
        self.values: dict[tuple[int, int], _Value] = {}
        moves = (m for phase in algorithm.phases for rnd in phase for m in rnd)
        self.next_channel = 1 + max((m.channel for m in moves), default=-1)
        self.forwarders: dict[tuple[_Key, _Key, tuple[int, ...]], list[int]] = {}
        self.phase = 0

    def emit(
        self, key: _Key, op: Op, connections: tuple[int, ...], chunk: int,
        source: int | None = None, last: bool = False, ahead: int = 0,
    ) -> None:  # fmt: skip
        phases = self.bodies.setdefault(key, [[] for _ in self.algorithm.phases])
        phases[self.phase].append(Step(op, connections, chunk, source, last, ahead))

    def connect(self, src: _Key, dst: _Key) -> int:
        """Return the connection between two tracks, which is made at its first use."""
        hop: tuple[int | str, ...] = ()
        if src[0] != dst[0]:
            gpus = self.topology.gpus
            a, b = gpus[src[0]], gpus[dst[0]]
            hop = self.topology.hops.get((a, b), ())
            if not hop:
                raise PlanError(
                    f"{self.algorithm.name} moves data from GPU {a} to GPU {b}, but "
                    f"{self.topology.name} has no link between them and the algorithm no detour"
                )
        connection = Connection(*src, *dst, hop)
        index = self.number.setdefault(connection, len(self.connections))
        if index == len(self.connections):
            self.connections.append(connection)
        return index

    def value(self, rank: int, chunk: int) -> _Value:
        if (rank, chunk) not in self.values:
            a = self.algorithm
            start = COLLECTIVES[a.collective].start(a.size, a.root, rank, chunk)
            self.values[rank, chunk] = _Value(holds=start)
        return self.values[rank, chunk]

    def way(self, src: _Key, dst: _Key, channel: int) -> list[int]:
        """Return the connections from the sender over its forwarders to the receiver."""
        via = self.algorithm.detours.get((channel, src[0], dst[0]), ())
        route = (src, dst, via)
        if not via:
            return [self.connect(src, dst)]
        if route not in self.forwarders:
            keys = [src, *((rank, self.next_channel + i) for i, rank in enumerate(via)), dst]
            self.next_channel += len(via)
            self.forwarders[route] = [self.connect(a, b) for a, b in pairwise(keys)]
        return self.forwarders[route]

    def send(self, src: int, dsts: tuple[_Key, ...], chunk: int, channel: int) -> list[int]:
        """Emit one send to all of `dsts`, and return the connection that each receiver reads."""
        value = self.value(src, chunk)
        key = value.writer or (src, channel)  # the writer needs no signal
        ways = [self.way(key, dst, channel) for dst in dsts]
        for first, *_ in ways:
            self.emit(key, Op.WAIT, (first,), chunk)
        self.emit(key, Op.SEND, tuple(way[0] for way in ways), chunk)
        for first, *_ in ways:
            self.emit(key, Op.SIGNAL, (first,), chunk)
        value.readers.append(key)
        for way in ways:
            for into, out in pairwise(way):  # a rank that forwards
                middle = self.connections[into]
                via = (middle.dst, middle.dst_channel)
                self.emit(via, Op.WAIT, (into,), chunk)
                self.emit(via, Op.WAIT, (out,), chunk)
                self.emit(via, Op.SEND, (out,), chunk, source=into)
                self.emit(via, Op.SIGNAL, (out,), chunk)
                self.emit(via, Op.SIGNAL, (into,), chunk)
        return [way[-1] for way in ways]

    def receive(
        self, dst: _Key, incoming: list[int], chunk: int, op: Op, holds: int, ahead: int = 0
    ) -> None:
        """Emit the waits, the REDUCE or COPY, and the slot-free signals."""
        value = self.value(dst[0], chunk)
        for index in incoming:
            self.emit(dst, Op.WAIT, (index,), chunk)
        self.order(value, dst, chunk, holds)
        everyone = (1 << self.algorithm.size) - 1
        held = value.holds | holds if op is Op.REDUCE else holds
        last = op is Op.REDUCE and held == everyone
        self.emit(dst, op, tuple(incoming), chunk, last=last, ahead=ahead)
        for index in incoming:
            self.emit(dst, Op.SIGNAL, (index,), chunk)
        self.values[dst[0], chunk] = _Value(dst, [], held)

    def order(self, value: _Value, dst: _Key, chunk: int, holds: int) -> None:
        """Make `dst`, about to write a chunk, wait for the other tracks of its rank that used it.

        A single send of the value needs no wait if the data that arrives contains the contribution
        sent: its arrival proves that the send is over.
        """
        rank = dst[0]
        others = [k for k in dict.fromkeys([*value.readers, value.writer]) if k and k != dst]
        proven = len(value.readers) == 1 and holds >> rank & 1 == 1
        if proven:
            return  # its only reader is also its writer, as `send` uses the writer's track
        for other in others:
            index = self.connect(other, dst)
            self.emit(other, Op.SIGNAL, (index,), chunk)
            self.emit(dst, Op.WAIT, (index,), chunk)

    def run(self) -> None:
        for phase, rounds in enumerate(self.algorithm.phases):
            self.phase = phase
            for rnd in rounds:
                sent = self.send_all(rnd)
                holds = {
                    (s, m.chunk): self.value(s, m.chunk).holds for m in rnd for s, _ in m.pairs
                }
                for m in rnd:
                    c, pairs = m.chunk, [(s, (d, m.channel)) for s, d in m.pairs]
                    if isinstance(m, Copy):
                        for s, key in pairs:
                            self.receive(key, [sent[s, c, key]], c, Op.COPY, holds[s, c])
                        continue
                    incoming = [sent[s, c, key] for s, key in pairs]
                    total = reduce(or_, (holds[s, c] for s in m.srcs), 0)
                    self.receive((m.dst, m.channel), incoming, c, Op.REDUCE, total, m.ahead)

    def send_all(self, rnd: Round) -> dict[tuple[int, int, _Key], int]:
        """Emit the sends of a round: one for a value that goes to several ranks on one channel.

        Returns the connection for each (source, chunk, receiving track).
        """
        wanted: dict[tuple[int, int, int], list[_Key]] = {}
        for move in rnd:
            for src, dst in move.pairs:
                keys = wanted.setdefault((src, move.chunk, move.channel), [])
                keys.append((dst, move.channel))
        return {
            (src, chunk, key): index
            for (src, chunk, channel), keys in wanted.items()
            for key, index in zip(keys, self.send(src, tuple(keys), chunk, channel), strict=True)
        }


def lower(algorithm: Algorithm, topology: Topology, tuning: Tuning) -> Plan:
    """Return the plan of an algorithm on a topology, in which rank r is `topology.gpus[r]`.

    A send runs in the track that wrote the value (for the caller's data, on its move's channel), so
    most order needs no signal; if two tracks of a rank use one chunk, the later waits for the
    earlier. All tracks follow one global order, group by group and round by round, in which every
    signal comes before the wait for it. So no cycle of waits can arise, even with one slot; still,
    `verify` checks the result. Raises PlanError if a move has neither link nor detour, or if the
    topology has another number of GPUs.
    """
    if algorithm.size != len(topology.gpus):
        raise PlanError(
            f"{algorithm.name} is for {algorithm.size} ranks; {topology.name} has {ranks(topology)}"
        )
    lowering = _Lowering(algorithm, topology)
    lowering.run()
    order = sorted(lowering.bodies)
    shared = _most_shared(lowering.connections, topology)
    paths = [(a, *via, b) for (_, a, b), via in algorithm.detours.items()]
    once = {min(path, path[::-1]) for path in paths}
    return Plan(
        algorithm=algorithm.name,
        collective=algorithm.collective,
        size=algorithm.size,
        num_chunks=tuning.num_chunks,
        stride=algorithm.stride,
        slots=tuning.slots,
        connections=tuple(lowering.connections),
        tracks=tuple(
            Track(rank, channel, tuple(map(tuple, lowering.bodies[rank, channel])))
            for rank, channel in order
        ),
        trees=algorithm.trees,
        detours=tuple(sorted(once)),
        exclusive=not shared,
        root=algorithm.root,
        notes=(f"{algorithm.name} {shared}",) if shared else (),
    )


def _most_shared(connections: Iterable[Connection], topology: Topology) -> str:
    """Describe the link with the most connections per physical link, if these are more than 1."""
    use = Counter(link for connection in connections for link in connection.links)
    if not use:
        return ""
    crowd = {link: n / topology.by_ends[link].count for link, n in use.items()}
    worst = max(use, key=lambda link: (crowd[link], str(link)))
    if crowd[worst] <= 1:
        return ""
    a, b = worst
    links = counted(topology.by_ends[worst].count, "link")
    return f"puts {use[worst]} connections on {links} {a}->{b}"


_ROUNDING = 1e-9
_Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class LowerBound:
    """The alpha and beta terms of the bound."""

    start_s: float
    """Seconds of latency on the longest chain of dependent sends."""
    load: float
    """Seconds that the busiest link needs for each byte of all chunks together."""

    def seconds(self, volume: int) -> float:
        """Return a time that no plan beats for chunks of `volume` bytes together."""
        return max(self.start_s, self.load * volume) * (1 - _ROUNDING)

    def guess(self, volume: int) -> float:
        """Return a rough estimate of what a good plan takes."""
        return self.start_s + self.load * volume


def lower_bound(algorithm: Algorithm, topology: Topology) -> LowerBound:
    """Return the bound. Raises PlanError if a move has neither link nor detour."""
    sends: Counter[_Pair] = Counter()
    latency: dict[_Pair, float] = {}
    arrived: dict[_Pair, float] = {}  # (rank, chunk): when the rank has the value, if not at 0
    for rnd in (rnd for phase in algorithm.phases for rnd in phase):
        arrivals: list[tuple[_Pair, float]] = []
        for move in rnd:
            for src, dst in move.pairs:
                then = arrived.get((src, move.chunk), 0.0)
                stops = (src, *algorithm.detours.get((move.channel, src, dst), ()), dst)
                for hop in pairwise(stops):
                    if hop not in latency:
                        links = (topology.by_ends[ends] for ends in _links(topology, hop))
                        latency[hop] = max(link.latency_us for link in links) * 1e-6
                    sends[hop] += 1
                    then += latency[hop]
                arrivals.append(((dst, move.chunk), then))
        for cell, then in arrivals:
            arrived[cell] = max(then, arrived.get(cell, 0.0))
    bytes_over: Counter[tuple[Vertex, Vertex]] = Counter()
    for hop, times in sends.items():
        for ends in _links(topology, hop):
            bytes_over[ends] += times
    used = ((topology.by_ends[ends], times) for ends, times in bytes_over.items())
    # several ranks may read what one stores in common memory, so those links count for nothing
    loads = [n / (algorithm.stride * k.bandwidth * k.count) for k, n in used if not k.stores]
    return LowerBound(max(arrived.values(), default=0.0), max(loads, default=0.0))


def _links(topology: Topology, hop: _Pair) -> list[tuple[Vertex, Vertex]]:
    a, b = (topology.gpus[rank] for rank in hop)
    path = topology.hops.get((a, b), ())
    if not path:
        raise PlanError(f"{topology.name} has no link from GPU {a} to GPU {b}")
    return list(pairwise(path))
