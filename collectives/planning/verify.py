"""`verify`: a plan is proved right before it is ever run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from collectives.errors import PlanError
from collectives.planning.form import check_form, check_links, in_step
from collectives.planning.plan import Op, Plan, pushed
from collectives.planning.walk import Visit, walk
from topology import Topology


def verify(plan: Plan, topology: Topology, expand: bool = False) -> None:
    """Raise PlanError unless the plan is right on this topology.

    1. Contributions: every rank ends with every chunk combined exactly once over all ranks (of a
       broadcast: the root's chunk).
    2. Links: every connection runs over an existing hop, through switches only; where the plan
       claims exclusive links, none carries more connections than it has physical links.
    3. Pairing and progress: no access without the WAIT that guards it, every signal waited for,
       no deadlock with the plan's number of slots.
    4. Happens-before, by vector clocks over the streams: of two accesses to one chunk or one slot
       of which one writes, one is ordered before the other by signals. That the caller fills the
       buffer before the call and reuses it after are events like any other.

    **Long plans** are walked for a few groups of chunks only (all of them with `expand`). Every
    group repeats the same steps, and a step of group g waits for signals of group g (data, order
    within a rank) or of group g - slots (a free slot) and for nothing else: so the order between
    two accesses depends on the difference of their groups, not on g. `slots + 2` groups contain
    every such difference up to the reuse of a slot, after which slots, counters and waits are
    those of a group before, shifted. The walk keeps the number of chunks modulo the stride, so a
    last group that is cut short is walked as it is. Across phases the difference of groups is not
    bounded, so a plan that signals in a later phase than it waits is walked in full.
    """
    check_form(plan)
    check_links(plan, topology)
    _Proof(plan if expand else shortened(plan)).run()


def shortened(plan: Plan) -> Plan:
    """The plan on the fewest chunks that prove it for all (see `verify`)."""
    enough = plan.stride * (plan.slots + 2)
    if plan.num_chunks <= enough + plan.stride or not in_step(plan):
        return plan
    return plan.with_chunks(enough + (plan.num_chunks - enough) % plan.stride)


def races(plan: Plan, direct: bool = False) -> list[str]:
    """Unordered pairs of accesses, in words; empty if there are none.

    With `direct`, no slots are used, which is how ranks on one memory may run a plan: a REDUCE
    reads the chunks it is sent where they lie, a SEND to a COPY writes the receiver's chunk, and
    the COPY does nothing (see `plan.pushed`). Then a caller must not reuse its buffer before all
    ranks are done, so the reuse is ordered after the end of every stream.
    """
    proof = _Proof(shortened(plan), direct)
    walk(proof.plan, proof.visit)
    proof.caller_reuses()
    return proof.races


_Access = tuple[int, int, str]  # (clock index, time, words)


class _Proof:
    """Contributions and vector clocks, moved along one walk.

    Which order the walk takes does not matter: counters only grow, each has one writer and one
    reader, and the k-th wait always takes the k-th signal, so the clocks come out the same.
    """

    def __init__(self, plan: Plan, direct: bool = False) -> None:
        self.plan, self.direct = plan, direct
        self.pushed = pushed(plan) if direct else []
        streams = len(plan.streams)
        self.clock: NDArray[np.int32] = np.zeros((streams, streams + plan.size), np.int32)
        for i, stream in enumerate(plan.streams):
            self.clock[i, streams + stream.rank] = 1  # the caller has filled its buffer
        n = len(plan.connections)
        self.ready: list[list[NDArray[np.int32]]] = [[] for _ in range(n)]
        self.free: list[list[NDArray[np.int32]]] = [[] for _ in range(n)]
        self.taken_ready, self.taken_free = [0] * n, [0] * n
        self.holds: dict[tuple[object, ...], int] = {}
        self.chunk_in: dict[tuple[object, ...], int] = {}
        self.wrote: dict[tuple[object, ...], _Access] = {}
        self.read: dict[tuple[object, ...], list[_Access]] = {}
        self.origin: dict[tuple[int, int], tuple[tuple[object, ...], _Access]] = {}
        self.races: list[str] = []
        for r in range(plan.size):
            for c in range(plan.num_chunks):
                own = ("chunk", r, c)
                start = plan.collective != "broadcast" or r == plan.root
                self.holds[own] = 1 << r if start else 0
                self.wrote[own] = (streams + r, 1, f"the caller of rank {r} fills chunk {c}")

    def run(self) -> None:
        walk(self.plan, self.visit)
        self.caller_reuses()
        if self.races:
            more = f" (and {len(self.races) - 1} more)" if len(self.races) > 1 else ""
            raise PlanError(f"race: {self.races[0]}{more}")
        everyone = (1 << self.plan.size) - 1
        if self.plan.collective == "broadcast":
            everyone = 1 << self.plan.root
        for r in range(self.plan.size):
            for c in range(self.plan.num_chunks):
                if (held := self.holds["chunk", r, c]) != everyone:
                    raise PlanError(
                        f"rank {r} ends with chunk {c} combined over ranks {_ranks(held)}, "
                        f"not over {_ranks(everyone)}"
                    )

    def touch(self, cell: tuple[object, ...], visit: Visit, write: bool) -> None:
        me = self.clock[visit.index]
        before = self.read.get(cell, []) if write else []
        for other in (self.wrote.get(cell), *before):
            if other and me[other[0]] < other[1]:
                self.races.append(f"{visit} is not ordered after: {other[2]}")
        access = (visit.index, int(me[visit.index]), str(visit))
        if write:
            self.wrote[cell], self.read[cell] = access, []
        else:
            self.read.setdefault(cell, []).append(access)

    def same_chunk(self, slot: tuple[object, ...], visit: Visit) -> None:
        if (found := self.chunk_in[slot]) != visit.chunk:
            raise PlanError(f"{visit} takes a slot that holds chunk {found}")

    def take(self, index: int, number: int, visit: Visit) -> None:
        """A receiver reads a slot; with `direct`, the chunk it was sent from, as it was then."""
        if not self.direct:
            self.touch(("slot", index, number), visit, write=False)
            return
        if self.pushed[index] >= 0:
            return
        cell, version = self.origin[index, number]
        self.touch(cell, visit, write=False)
        if self.wrote[cell] != version:
            self.races.append(
                f"{visit} reads {cell} after it was written by: {self.wrote[cell][2]}"
            )

    def visit(self, visit: Visit) -> None:
        step, plan, i = visit.step, self.plan, visit.index
        clock = self.clock[i]
        clock[i] += 1
        own: tuple[object, ...] = ("chunk", visit.stream.rank, visit.chunk)
        cell: tuple[object, ...]
        me = (visit.stream.rank, visit.stream.channel)
        match step.op:
            case Op.SIGNAL | Op.WAIT:
                for index in step.connections:
                    c = plan.connections[index]
                    sender = me == (c.src, c.src_channel)
                    if step.op is Op.SIGNAL:
                        (self.ready if sender else self.free)[index].append(clock.copy())
                    elif not sender:
                        np.maximum(clock, self.ready[index][self.taken_ready[index]], out=clock)
                        self.taken_ready[index] += 1
                    else:
                        nth = self.taken_free[index] - plan.slots  # the first `slots` are free
                        self.taken_free[index] += 1
                        if nth >= 0 and not c.local:
                            np.maximum(clock, self.free[index][nth], out=clock)
            case Op.SEND:
                if step.source is None:
                    cell = own
                    origin = (own, self.wrote[own])
                else:
                    cell = ("slot", step.source, visit.source_slot)
                    origin = self.origin[step.source, visit.source_slot]
                held = self.holds[cell]
                if step.source is not None:
                    self.same_chunk(cell, visit)
                if not self.direct:
                    self.touch(cell, visit, write=False)
                for index, number in zip(step.connections, visit.slots, strict=True):
                    self.origin[index, number] = origin
                    self.holds["slot", index, number] = held
                    self.chunk_in["slot", index, number] = visit.chunk
                    if not self.direct:
                        self.touch(("slot", index, number), visit, write=True)
                    elif self.pushed[index] >= 0:
                        self.touch(own, visit, write=False)
                        self.touch(("chunk", self.pushed[index], visit.chunk), visit, write=True)
            case Op.REDUCE | Op.COPY:
                total = self.holds[own] if step.op is Op.REDUCE else 0
                for index, number in zip(step.connections, visit.slots, strict=True):
                    self.take(index, number, visit)
                    held = self.holds["slot", index, number]
                    self.same_chunk(("slot", index, number), visit)
                    if total & held:
                        raise PlanError(
                            f"{visit} counts ranks {_ranks(total & held)} twice (connection "
                            f"{plan.connections[index]})"
                        )
                    total |= held
                everyone = (1 << plan.size) - 1
                if step.op is Op.REDUCE and step.last != (total == everyone):
                    raise PlanError(
                        f"{visit} covers ranks {_ranks(total)}, yet it is "
                        + ("" if step.last else "not ")
                        + "marked as the last one of its chunk"
                    )
                self.holds[own] = total
                if not (self.direct and self.pushed[step.connections[0]] >= 0):
                    self.touch(own, visit, write=True)

    def caller_reuses(self) -> None:
        """The call returns on a rank when its own streams (direct: all streams) are done."""
        for rank in range(self.plan.size):
            home = [i for i, s in enumerate(self.plan.streams) if self.direct or s.rank == rank]
            end = self.clock[home].max(axis=0) if home else self.clock.max(axis=0, initial=0)
            if not home:
                end = np.ones_like(end)
            for c in range(self.plan.num_chunks):
                cell = ("chunk", rank, c)
                for other in (self.wrote[cell], *self.read.get(cell, [])):
                    if end[other[0]] < other[1]:
                        self.races.append(
                            f"the caller of rank {rank} reuses chunk {c}, not ordered after: "
                            f"{other[2]}"
                        )


def _ranks(mask: int) -> Sequence[int]:
    return [r for r in range(mask.bit_length()) if mask >> r & 1]
