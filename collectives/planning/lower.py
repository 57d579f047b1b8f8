"""From what moves (`Algorithm`) to who does what when (`Plan`).

The only place that invents signals and waits: an algorithm says which chunk is combined or copied
from where to where, and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.algorithms.trees import Tree
from linkweave.collectives.planning.goals import Root, start
from linkweave.collectives.planning.plan import Connection, Op, Plan, Step, Track
from linkweave.topology import Topology


@dataclass(frozen=True, slots=True)
class Reduce:
    """`dst`'s chunk becomes itself combined with those of `srcs`, in that order.

    With `ahead`, that many sources come before `dst`'s own value: ranks that all combine the same
    values then do so in the same order, and have the same bits whatever the operator.
    """

    srcs: tuple[int, ...]
    dst: int
    chunk: int
    channel: int
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class Copy:
    """The chunk of each of `dsts` becomes `src`'s."""

    src: int
    dsts: tuple[int, ...]
    chunk: int
    channel: int


MOST_SQUARED = 64
"""Ranks of an algorithm whose plan grows with their square."""

Move = Reduce | Copy
Round = tuple[Move, ...]
"""Moves that happen at once: each reads what was there before the round."""


@dataclass(frozen=True)
class Algorithm:
    """What moves, for one group of `stride` chunks; the plan repeats it for every group.

    `phases` are lists of rounds; a track finishes one phase for all chunks before it starts the
    next, and that is the whole difference between a baseline and an overlapped tree. Moves of
    different channels run at once; moves of one channel at a rank run in list order. `detours`
    maps (channel, src, dst) to the ranks that forward; other moves go straight.
    """

    name: str
    size: int
    stride: int
    phases: tuple[tuple[Round, ...], ...]
    trees: tuple[Tree, ...] = ()
    detours: Mapping[tuple[int, int, int], tuple[int, ...]] = field(default_factory=dict)
    collective: str = "allreduce"
    root: Root = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "detours", MappingProxyType(dict(self.detours)))


def few_enough(name: str, size: int) -> None:
    """Refuse, for an algorithm in which every two ranks exchange data, or as much as if."""
    if size > MOST_SQUARED:
        raise PlanError(f"a plan of {name} grows as P^2: at most {MOST_SQUARED} ranks, not {size}")


@dataclass(frozen=True, slots=True)
class Tuning:
    """What depends on the size of the message: how many chunks, and how many slots for them."""

    num_chunks: int
    slots: int = 2


_Key = tuple[int, int]  # (rank, channel): names a track


@dataclass
class _Value:
    """Who last touched one rank's chunk while the moves are walked in order."""

    writer: _Key | None = None  # the track that produced the value; None: the caller
    readers: list[_Key] = field(default_factory=list)  # tracks that sent it since
    holds: int = 0  # bit r: rank r's contribution is in it


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
        """The connection between two tracks, made at its first use."""
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
            self.values[rank, chunk] = _Value(
                holds=start(a.collective, a.size, a.root, rank, chunk)
            )
        return self.values[rank, chunk]

    def way(self, src: _Key, dst: _Key, channel: int) -> list[int]:
        """The connections from the sender over its forwarders to the receiver."""
        via = self.algorithm.detours.get((channel, src[0], dst[0]), ())
        route = (src, dst, via)
        if not via:
            return [self.connect(src, dst)]
        if route not in self.forwarders:
            keys = [src, *((rank, self.next_channel + i) for i, rank in enumerate(via)), dst]
            self.next_channel += len(via)
            self.forwarders[route] = [
                self.connect(a, b) for a, b in zip(keys, keys[1:], strict=False)
            ]
        return self.forwarders[route]

    def send(self, src: int, dsts: tuple[_Key, ...], chunk: int, channel: int) -> list[int]:
        """Emit one send to all of `dsts`; returns the connection that each receiver reads."""
        value = self.value(src, chunk)
        key = value.writer or (src, channel)  # where the value was made: no signal needed
        ways = [self.way(key, dst, channel) for dst in dsts]
        for first, *_ in ways:
            self.emit(key, Op.WAIT, (first,), chunk)
        self.emit(key, Op.SEND, tuple(way[0] for way in ways), chunk)
        for first, *_ in ways:
            self.emit(key, Op.SIGNAL, (first,), chunk)
        value.readers.append(key)
        for way in ways:
            for into, out in zip(way, way[1:], strict=False):  # a forwarder passes its slot on
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
        """Make `dst`, about to write a chunk, wait for this rank's other tracks that touched it.

        One that sent the value once needs no wait if what arrives now contains the contribution
        it sent: then the arrival itself proves that the send is over.
        """
        rank = dst[0]
        others = [k for k in dict.fromkeys([*value.readers, value.writer]) if k and k != dst]
        proven = len(value.readers) == 1 and holds >> rank & 1 == 1
        if proven:
            return  # its writer is its only reader: `send` puts both into one track
        for other in others:
            index = self.connect(other, dst)
            self.emit(other, Op.SIGNAL, (index,), chunk)
            self.emit(dst, Op.WAIT, (index,), chunk)

    def run(self) -> None:
        for phase, rounds in enumerate(self.algorithm.phases):
            self.phase = phase
            for rnd in rounds:
                arrivals = []
                sent = self.send_all(rnd)
                for move in rnd:
                    c, ch = move.chunk, move.channel
                    if isinstance(move, Reduce):
                        total = 0
                        for s in move.srcs:
                            total |= self.value(s, c).holds
                        incoming = [sent[s, c, (move.dst, ch)] for s in move.srcs]
                        arrivals.append(((move.dst, ch), incoming, c, Op.REDUCE, total, move.ahead))
                    else:
                        held = self.value(move.src, c).holds
                        for d in move.dsts:
                            incoming = [sent[move.src, c, (d, ch)]]
                            arrivals.append(((d, ch), incoming, c, Op.COPY, held, 0))
                for arrival in arrivals:
                    self.receive(*arrival)

    def send_all(self, rnd: Round) -> dict[tuple[int, int, _Key], int]:
        """Send all that a round moves; a value that goes to several ranks on one channel, once.

        Returns the connection on which each (source, chunk, receiving track) gets it.
        """
        wanted: dict[tuple[int, int, int], list[_Key]] = {}
        for move in rnd:
            srcs, dsts = (
                (move.srcs, (move.dst,)) if isinstance(move, Reduce) else ((move.src,), move.dsts)
            )
            for src in srcs:
                keys = wanted.setdefault((src, move.chunk, move.channel), [])
                keys += [(dst, move.channel) for dst in dsts]
        return {
            (src, chunk, key): index
            for (src, chunk, channel), keys in wanted.items()
            for key, index in zip(keys, self.send(src, tuple(keys), chunk, channel), strict=True)
        }


def lower(algorithm: Algorithm, topology: Topology, tuning: Tuning) -> Plan:
    """The plan of an algorithm on a topology.

    Rank r is `topology.gpus[r]`. A send runs in the track that produced the value it sends (in
    its move's channel where that is the caller's), so that most order needs no signal; where two
    tracks of one rank touch a chunk, the later waits for the earlier. The tracks follow one
    global order, chunk group by chunk group and round by round, in which every wait comes after
    the signal it waits for; each track keeps that order, so with one slot or more no cycle of
    waits can arise. `verify` checks the result all the same. Raises PlanError where a move has no
    link and no detour, or the topology has another number of GPUs.
    """
    if algorithm.size != len(topology.gpus):
        raise PlanError(
            f"{algorithm.name} is for {algorithm.size} ranks; {topology.name} has "
            f"{len(topology.gpus)} GPUs"
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
    """The link with the most connections for its number of physical links, if these are fewer."""
    use = Counter(link for connection in connections for link in connection.links)
    if not use:
        return ""
    crowd = {link: n / topology.by_ends[link].count for link, n in use.items()}
    worst = max(use, key=lambda link: (crowd[link], str(link)))
    if crowd[worst] <= 1:
        return ""
    a, b = worst
    return (
        f"puts {use[worst]} connections on link {a}->{b}, which has {topology.by_ends[worst].count}"
    )
