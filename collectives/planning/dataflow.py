"""Data-flow analyses: which inputs steps read, and which results they could write directly."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType

from linkweave.collectives.planning.plan import Op, Plan, Step
from linkweave.collectives.planning.walk import Visit, walk

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
