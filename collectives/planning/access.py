"""What steps touch besides their own buffer: what callers gave, and the results of other ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType

from linkweave.collectives.planning.execute_order import Visit, walk
from linkweave.collectives.planning.plan import Op, Plan, Step

StepId = tuple[int, int, int]  # rank, channel, position in the track's code


@lru_cache(maxsize=16)
def input_reads(plan: Plan) -> frozenset[StepId]:
    """The SENDs and REDUCEs that take their own chunk before anything at their rank has written it.

    All other accesses to own chunks are to results. In a verified plan every two accesses to a
    chunk of which one writes are ordered, so any legal order of steps tells; and as each group of
    chunks repeats the steps, one group tells for all.
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
    """The SENDs of which every receiver makes a COPY, and these COPYs.

    A rank that sees the receivers' buffers may write there at once, and the COPY has nothing to do:
    if `verify.races` finds no race in that. Connections are queues and a COPY is of the chunk that
    was sent (`verify`), so again one group tells for all.
    """
    under_way: dict[int, deque[StepId]] = {}
    came: dict[StepId, StepId] = {}  # from a COPY to the SEND that it takes
    others: set[StepId] = set()  # SENDs into slots that are needed

    def visit(v: Visit) -> None:
        step = v.step
        if step.op in (Op.SIGNAL, Op.WAIT):
            return
        if step.op is not Op.SEND:
            sent = [under_way[i].popleft() for i in step.connections]
            if step.op is Op.COPY:
                came[step_id(v)] = sent[0]
            else:
                others.update(sent)
            return
        if step.source is not None:
            others.add(under_way[step.source].popleft())
        for i in step.connections:
            under_way.setdefault(i, deque()).append(step_id(v))

    walk(plan.with_chunks(plan.stride), visit)
    return frozenset({p for pair in came.items() if pair[1] not in others for p in pair})


@lru_cache(maxsize=16)
def passed_on(plan: Plan) -> Mapping[StepId, bool]:
    """The REDUCEs and COPYs whose result the track's next step but for signals and waits sends
    on, so that one pass over the data may do both; and whether the own chunk needs the result.

    It does not where a COPY overwrites it and only that SEND has read it before. Where others read
    it and it is overwritten, the two stay apart: a result that came back over lines, whose stores
    are not ordered, could be overtaken by the store of what it was made of.
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
            places, ops = zip(*accesses[i + 1 :], strict=True)  # its SEND among them
            if {*ops} == {Op.SEND}:
                found[at] = True
            elif ops[:2] == (Op.SEND, Op.COPY) and places[0] == sender[at]:
                found[at] = False
    return MappingProxyType(found)


def origins(plan: Plan) -> Mapping[int, int]:
    """For each connection that carries data, the rank whose own chunk it carries.

    Differs from the connection's `src` on detours, where a slot is passed on. Of a connection that
    carries several ranks' chunks it is `src`.
    """
    passed = {
        i: source
        for i, (source, *more) in _sources(plan).items()
        if source is not None and not more
    }
    found = {}
    for index, connection in enumerate(plan.connections):
        at, left = index, len(passed)  # no more hops, though an unverified plan may go in circles
        while at in passed and left:
            at, left = passed[at], left - 1
        if not connection.local:
            found[index] = plan.connections[at].src
    return found


def pushed(plan: Plan) -> list[int]:
    """For each connection, the rank that copies from it if its sender sends own chunks only on it,
    else -1.

    On one memory such a sender may write the receiver's chunk itself.
    """
    own = {i for i, sources in _sources(plan).items() if sources == {None}}
    copies = {i for step in _steps(plan) if step.op is Op.COPY for i in step.connections}
    return [c.dst if i in copies & own else -1 for i, c in enumerate(plan.connections)]


def _sources(plan: Plan) -> dict[int, set[int | None]]:
    """For each connection, the connections whose slots are sent over it; None for own chunks."""
    found: dict[int, set[int | None]] = {}
    for step in _steps(plan):
        if step.op is Op.SEND:
            for i in step.connections:
                found.setdefault(i, set()).add(step.source)
    return found


def _steps(plan: Plan) -> Iterator[Step]:
    return (step for track in plan.tracks for body in track.phases for step in body)


def _next_sends(plan: Plan) -> dict[StepId, StepId]:
    """For each REDUCE and COPY the SEND of the same chunk that follows in its track's phase."""
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
    return visit.track.rank, visit.track.channel, visit.at
