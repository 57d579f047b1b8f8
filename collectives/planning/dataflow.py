"""Data-flow analyses: which inputs steps read, and which results they could write directly."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, pairwise
from operator import itemgetter
from types import MappingProxyType
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.plan import Op, Plan, Step, Track


class Visit(NamedTuple):
    """One execution of a SEND, REDUCE or COPY; `slots` has the slot for each connection."""

    track_index: int
    track: Track
    at: int
    chunk: int
    step: Step
    slots: tuple[int, ...]
    source_slot: int

    def __str__(self) -> str:
        s = self.track
        verb = self.step.op.name
        return f"rank {s.rank} channel {s.channel} step {self.at}: {verb} of chunk {self.chunk}"


_OnMove = Callable[[Visit], None]
_OnSync = Callable[[int, int, Op, int, bool], None]


class _Walk:
    """The counters of all connections, and the current step of each track."""

    def __init__(
        self, plan: Plan, visit: _OnMove, sync: _OnSync | None, pick: random.Random | None
    ) -> None:
        self.plan, self.visit, self.sync, self.pick = plan, visit, sync, pick
        number = {(s.rank, s.channel): i for i, s in enumerate(plan.tracks)}
        self.src = [number.get((c.src, c.src_channel), -1) for c in plan.connections]
        self.dst = [number.get((c.dst, c.dst_channel), -1) for c in plan.connections]
        self.local = [c.local for c in plan.connections]  # those have no slots
        n = len(plan.connections)
        self.ready, self.free = [0] * n, [0] * n  # signals raised
        self.waited_free, self.waited_ready = [0] * n, [0] * n
        self.sent, self.read = [0] * n, [0] * n
        self.moved = True
        self.heads: dict[int, tuple[int, int, Step]] = {}  # the step of each unfinished track

    def run(self) -> None:
        left = [self.track(index) for index in range(len(self.plan.tracks))]
        while self.moved:
            self.moved = False
            if self.pick:
                self.pick.shuffle(left)
            left = [track for track in left if next(track, True) is None]

    def track(self, index: int) -> Iterator[None]:
        """Run a track; yields while it waits, and with a seed also at random."""
        plan, sync, pick = self.plan, self.sync, self.pick
        track = plan.tracks[index]
        ready, waited_ready = self.ready, self.waited_ready
        free, waited_free = self.free, self.waited_free
        for at, chunk, step in plan.steps(track):
            op, i = step.op, step.connections[0]
            self.heads[index] = at, chunk, step
            if op is Op.WAIT:
                sender = index != self.dst[i]
                if not sender:
                    while ready[i] == waited_ready[i]:
                        yield
                    waited_ready[i] += 1
                else:
                    self.may_wait(index, i)
                    while free[i] + plan.slots == waited_free[i]:
                        yield
                    waited_free[i] += 1
                if sync:
                    sync(index, chunk, op, i, sender)
            elif op is Op.SIGNAL:
                sender = self.signal(index, i)
                if sync:
                    sync(index, chunk, op, i, sender)
            else:
                taken = -1 if step.source is None else self.take(index, step.source)
                use = self.put if op is Op.SEND else self.take
                numbers = tuple([use(index, i) for i in step.connections])
                self.visit(Visit(index, track, at, chunk, step, numbers, taken))
            self.moved = True
            if pick and pick.random() < 0.5:
                yield
        self.heads.pop(index, None)

    def may_wait(self, index: int, i: int) -> None:
        if index != self.src[i]:
            self.refuse(index, f"connection {i} does not end here")
        if self.local[i]:
            self.refuse(index, f"waits for a free slot of {i}, which only orders steps")

    def signal(self, index: int, i: int) -> bool:
        """Raise a counter, and return whether the track is the connection's sender."""
        if index == self.dst[i]:
            if self.free[i] == self.read[i]:
                self.refuse(index, f"frees a slot of connection {self.name(i)} before reading it")
            self.free[i] += 1
            return False
        if index != self.src[i]:
            self.refuse(index, f"connection {i} does not end here")
        if not self.local[i] and self.ready[i] == self.sent[i]:
            self.refuse(index, f"signals data on connection {self.name(i)} before sending it")
        self.ready[i] += 1
        return True

    def put(self, index: int, i: int) -> int:
        """Return the slot that is written next."""
        if index != self.src[i]:
            self.refuse(index, f"sends on connection {i}, which does not begin here")
        if self.waited_free[i] == self.sent[i]:
            self.refuse(index, f"writes connection {self.name(i)} without a WAIT for a free slot")
        self.sent[i] += 1
        return (self.sent[i] - 1) % self.plan.slots

    def take(self, index: int, i: int) -> int:
        """Return the slot that is read next."""
        if index != self.dst[i]:
            self.refuse(index, f"reads connection {i}, which does not end here")
        if self.waited_ready[i] == self.read[i]:
            self.refuse(index, f"reads connection {self.name(i)} without a WAIT for its data")
        self.read[i] += 1
        return (self.read[i] - 1) % self.plan.slots

    def name(self, i: int) -> str:
        return str(self.plan.connections[i])

    def refuse(self, index: int, words: str) -> NoReturn:
        at, chunk, step = self.heads[index]
        s = self.plan.tracks[index]
        raise PlanError(
            f"rank {s.rank} channel {s.channel} step {at} ({step.op.name} of chunk {chunk}): "
            f"{words}"
        )

    def finish(self) -> None:
        """Raise PlanError if a track still waits, or if counters do not pair."""
        self.check_hangs()
        for i, connection in enumerate(self.plan.connections):
            pairs = [("sent", self.sent[i], "read", self.read[i]),
                     ("data-ready signals", self.ready[i],
                      "waits for them", self.waited_ready[i])]  # fmt: skip
            if not connection.local:
                pairs += [("slot-free signals", self.free[i], "slots read", self.read[i]),
                          ("waits for a free slot", self.waited_free[i], "sends", self.sent[i]),
                          ("data-ready signals", self.ready[i], "sends", self.sent[i])]  # fmt: skip
            for left, a, right, b in pairs:
                if a != b:
                    raise PlanError(f"connection {connection}: {a} {left}, but {b} {right}")

    def check_hangs(self) -> None:
        stuck = []
        for index, (at, chunk, step) in sorted(self.heads.items()):
            track = self.plan.tracks[index]
            i = step.connections[0]
            connection = self.plan.connections[i]
            sender = index == self.src[i]
            peer, what = (connection.dst, "a free slot") if sender else (connection.src, "data")
            stuck.append(
                f"rank {track.rank} channel {track.channel} step {at} waits for {what} of "
                f"chunk {chunk} from rank {peer}"
            )
        if stuck:
            more = f"; and {len(stuck) - 4} more" if len(stuck) > 4 else ""
            raise PlanError(f"the plan hangs: {'; '.join(stuck[:4])}{more}")


def walk(plan: Plan, visit: _OnMove, seed: int | None = None, sync: _OnSync | None = None) -> None:
    """Call `visit` for every SEND, REDUCE and COPY, in an order that respects all waits.

    `sync` is called for every SIGNAL and WAIT in between, with the track's index, the chunk, the
    op, the connection, and whether the track is its sender. Each track runs until it waits before
    the next one runs; with a `seed`, tracks alternate at random. Raises PlanError if the plan hangs
    (saying who waits for whom), accesses a connection without waiting for it, or leaves counters
    unpaired.
    """
    state = _Walk(plan, visit, sync, random.Random(seed) if seed is not None else None)
    state.run()
    state.finish()


StepId = tuple[int, int, int]  # rank, channel, position in the track's code


@lru_cache(maxsize=16)
def input_reads(plan: Plan) -> frozenset[StepId]:
    """Return the SENDs and REDUCEs that read their own chunk before a step of their rank writes it.

    All other accesses to own chunks are to results. In a verified plan the accesses to a chunk are
    ordered if one of them writes, so any legal order of steps gives the same answer; and as every
    group repeats the same steps, one group suffices.
    """
    written: set[tuple[int, int]] = set()
    found: set[StepId] = set()

    def visit(v: Visit) -> None:
        own = v.track.rank, v.chunk
        reads = v.step.op is Op.REDUCE or (v.step.op is Op.SEND and v.step.source is None)
        if reads and own not in written:
            found.add(step_id(v))
        if v.step.op in (Op.REDUCE, Op.COPY):
            written.add(own)

    walk(plan.with_chunks(plan.stride), visit)
    return frozenset(found)


@lru_cache(maxsize=16)
def pushes(plan: Plan) -> frozenset[StepId]:
    """Return the SENDs that every receiver takes by a COPY, and these COPYs.

    A rank that can access the receivers' buffers may write there directly, and the COPY does
    nothing, if `verify.races` finds no race. Connections are queues, and a COPY takes the chunk
    that was sent (`verify`), so again one group suffices.
    """
    under_way: dict[int, deque[StepId]] = {}
    sent_by: dict[StepId, StepId] = {}  # the SEND that each COPY takes
    others: set[StepId] = set()  # SENDs whose slots are needed

    def visit(v: Visit) -> None:
        step = v.step
        if step.op in (Op.SIGNAL, Op.WAIT):
            return
        if step.op is not Op.SEND:
            sent = [under_way[i].popleft() for i in step.connections]
            if step.op is Op.COPY:
                sent_by[step_id(v)] = sent[0]
            else:
                others.update(sent)
            return
        if step.source is not None:
            others.add(under_way[step.source].popleft())
        for i in step.connections:
            under_way.setdefault(i, deque()).append(step_id(v))

    walk(plan.with_chunks(plan.stride), visit)
    return frozenset({p for pair in sent_by.items() if pair[1] not in others for p in pair})


@lru_cache(maxsize=16)
def passed_on(plan: Plan) -> Mapping[StepId, bool]:
    """Return the REDUCEs and COPYs that may be fused with the SEND after them, and for each whether
    the own chunk needs the result.

    The SEND is the next step of the track apart from signals and waits, and sends the result. The
    own chunk does not need it if a COPY overwrites the chunk and only that SEND reads it before. If
    others read it and it is overwritten, the two steps are not fused: over the low-latency
    protocol, whose stores are not ordered, a result that comes back could be overtaken by the store
    of the value it was made of.
    """
    touched: dict[tuple[int, int], list[tuple[StepId, Op]]] = {}  # by (rank, chunk)

    def visit(v: Visit) -> None:
        if v.step.op < Op.SIGNAL and v.step.source is None:
            touched.setdefault((v.track.rank, v.chunk), []).append((step_id(v), v.step.op))

    walk(plan.with_chunks(plan.stride), visit)
    sender = _next_sends(plan)
    found = {}
    for accesses in touched.values():
        for i, (at, op) in enumerate(accesses):
            if op is Op.SEND or at not in sender:
                continue
            ids, ops = zip(*accesses[i + 1 :], strict=True)  # its SEND is among them
            if {*ops} == {Op.SEND}:
                found[at] = True
            elif ops[:2] == (Op.SEND, Op.COPY) and ids[0] == sender[at]:
                found[at] = False
    return MappingProxyType(found)


def origins(plan: Plan) -> Mapping[int, int]:
    """Return, for each connection that carries data, the rank whose own chunk it carries.

    On detours, where ranks forward slots, that is not the connection's `src`. If a connection
    carries chunks of several ranks, it is `src`.
    """
    passed = {
        i: source
        for i, (source, *more) in _sources(plan).items()
        if source is not None and not more
    }
    found = {}
    for index, connection in enumerate(plan.connections):
        at, left = index, len(passed)  # bounds the hops, as an unverified plan may have cycles
        while at in passed and left:
            at, left = passed[at], left - 1
        if not connection.local:
            found[index] = plan.connections[at].src
    return found


def pushed(plan: Plan) -> list[int]:
    """Return, for each connection, the receiver if it copies and the sender sends only own chunks,
    else -1. On one memory such a sender may write the receiver's chunk directly."""
    own = {i for i, sources in _sources(plan).items() if sources == {None}}
    copies = {i for step in _steps(plan) if step.op is Op.COPY for i in step.connections}
    return [c.dst if i in copies & own else -1 for i, c in enumerate(plan.connections)]


def _sources(plan: Plan) -> dict[int, set[int | None]]:
    """Return, for each connection, the connections whose slots it carries; None for own chunks."""
    found: dict[int, set[int | None]] = {}
    for step in _steps(plan):
        if step.op is Op.SEND:
            for i in step.connections:
                found.setdefault(i, set()).add(step.source)
    return found


def _steps(plan: Plan) -> Iterator[Step]:
    return (step for track in plan.tracks for body in track.phases for step in body)


def _next_sends(plan: Plan) -> dict[StepId, StepId]:
    """Return, for each REDUCE and COPY, the SEND of the same chunk that follows in its phase."""
    found = {}
    for track in plan.tracks:
        base = 0
        for body in track.phases:
            moves = [(at, s) for at, s in enumerate(body, base) if s.op < Op.SIGNAL]
            for (at, step), (then, send) in pairwise(moves):
                same = send.chunk == step.chunk and send.source is None
                if step.op is not Op.SEND and send.op is Op.SEND and same:
                    here = track.rank, track.channel
                    found[*here, at] = *here, then
            base += len(body)
    return found


def step_id(visit: Visit) -> StepId:
    """Return the step's rank, channel and position in its track's code."""
    return visit.track.rank, visit.track.channel, visit.at


def finals(plan: Plan, rank: int) -> list[list[int]]:
    """Return, for each track of `rank` in the plan's order, the chunks that it makes final.

    Raises PlanError if the collective is not symmetric, or if the rank copies a chunk more than
    once, as the first copy need not be final.
    """
    if not plan.definition.symmetric:
        raise PlanError(f"a gradient queue belongs to an allreduce, not to {plan.collective}")
    found = [
        [
            chunk
            for _, chunk, step in plan.steps(track)
            if step.op is Op.COPY or (step.op is Op.REDUCE and step.last)
        ]
        for track in plan.tracks
        if track.rank == rank
    ]
    chunk, times = max(Counter(chain(*found)).items(), key=itemgetter(1), default=(0, 0))
    if times > 1:
        raise PlanError(
            f"a gradient queue needs a plan that completes every chunk once; rank {rank} completes "
            f"chunk {chunk} {times} times"
        )
    return found


def layer_chunk_table(
    plan: Plan, rank: int, nbytes: int, layers: Sequence[int]
) -> NDArray[np.int64]:
    """Return [layers, tracks]: how many chunks each track must complete for each layer (C-Cube,
    figure 9: the layer-chunk table).

    `layers` gives the bytes of each layer, in the order in which they lie in the message of
    `nbytes`.
    """
    made = [np.array(chunks, np.int64) for chunks in finals(plan, rank)]
    return chunk_counts(made, plan.num_chunks, plan.chunk_bytes(nbytes), layers)


def chunk_counts(
    finals: Sequence[NDArray[np.int64]], num_chunks: int, chunk_bytes: int, layers: Sequence[int]
) -> NDArray[np.int64]:
    """Return `layer_chunk_table` from the chunks that each track makes final, in that order."""
    sizes = np.array(layers, np.int64)
    stops = np.cumsum(sizes)
    found = np.zeros((len(sizes), len(finals)), np.int64)
    some = np.flatnonzero(sizes)  # an empty layer needs nothing
    if not some.size:
        return found
    first = (stops - sizes)[some] // chunk_bytes
    last = (stops[some] - 1) // chunk_bytes
    spans = np.stack([first, last + 1], axis=1).reshape(-1)
    for column, chunks in enumerate(finals):
        counts = np.zeros(num_chunks + 1, np.int64)
        counts[chunks] = np.arange(1, len(chunks) + 1)
        found[some, column] = np.maximum.reduceat(counts, spans)[::2]
    return found
