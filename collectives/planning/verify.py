"""`verify`: a plan is proved right before it is ever run."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from collectives.errors import PlanError
from collectives.planning.form import check_form, check_links, repeats
from collectives.planning.goals import goal, start
from collectives.planning.plan import Op, Plan, pushed
from collectives.planning.touches import place, pushes
from collectives.planning.walk import Visit, walk
from topology import Topology


def verify(plan: Plan, topology: Topology, expand: bool = False) -> None:
    """Raise PlanError unless the plan is right on this topology.

    1. Contributions: every rank ends with what the collective promises it (`planning.goals`); of
       an all-reduce, with every chunk combined exactly once over all ranks.
    2. Links: every connection runs over an existing hop, through switches only; where the plan
       claims exclusive links, none carries more connections than it has physical links.
    3. Pairing and progress: no access without the WAIT that guards it, every signal waited for,
       no deadlock with the plan's number of slots.
    4. Happens-before: of two accesses to one chunk of a rank, or to one slot, of which one writes,
       one is ordered before the other by signals. Of slots this follows from 3: the k-th write
       comes after as many waits for a free slot, the k-th read after as many for data, and each
       signal after the access it tells of. Of chunks, every signal carries what has been done to
       its chunk so far, and every access asks whether it knows of the one before. (So order that
       only a signal of another chunk gives does not count: stricter than need be.) That the
       caller fills the buffer first is an access like any other; that it gets the buffer back
       when its rank's streams have ended comes after all of them, as no others touch it.

    **Long plans** are walked for a few groups of chunks only (all of them with `expand`). Every
    group repeats the same steps, and a step of group g waits for signals of group g (data, order
    within a rank) or of group g - slots (a free slot) and for nothing else: so the order between
    two accesses depends on the difference of their groups, not on g. `slots + 2` groups contain
    every such difference up to the reuse of a slot, after which slots, counters and waits are
    those of a group before, shifted. The walk keeps the number of chunks modulo the stride, so a
    last group that is cut short is walked as it is. A plan whose groups do not pair their signals
    with waits of the same group, or that signals in a later phase than it waits, is walked in full
    (`form.repeats`).
    """
    check_form(plan)
    check_links(plan, topology)
    _Proof(plan if expand else shortened(plan)).run()


def prove(plan: Plan) -> None:
    """`verify` of a plan whose connections are known to be right."""
    _Proof(shortened(plan)).run()


def shortened(plan: Plan) -> Plan:
    """The plan on the fewest chunks that prove it for all (see `verify`)."""
    enough = plan.stride * (plan.slots + 2)
    if plan.num_chunks <= enough + plan.stride or not repeats(plan):
        return plan
    return plan.with_chunks(enough + (plan.num_chunks - enough) % plan.stride)


def races(plan: Plan, direct: bool = False, pushing: bool = False) -> list[str]:
    """Unordered pairs of accesses, in words; empty if there are none.

    With `pushing`, a SEND to COPYs writes the receivers' chunks, and the COPYs do nothing (see
    `touches.pushes`), as ranks may do that see each other's buffers. Such a write is over when the
    receiver's streams have ended, as the COPY stands behind the WAIT for it. An access to the chunk
    between the two counts as a race: it would see the new value too early.

    With `direct`, no slots are used, which is how ranks on one memory may run a plan: a REDUCE
    reads the chunks it is sent where they lie, a SEND to a COPY writes the receiver's chunk, and
    the COPY does nothing (see `plan.pushed`). Then a caller must not get its buffer back before
    the streams of all ranks have ended.
    """
    proof = _Proof(shortened(plan), direct, pushing)
    walk(proof.plan, proof.visit)
    return proof.races


_Cell = tuple[int, int]  # (rank, chunk)
_Access = tuple[int, Visit | str]  # its bit among the accesses to this chunk of any rank; words


class _Proof:
    """Contributions and happens-before, moved along one walk.

    Which order the walk takes does not matter: counters only grow, each has one writer and one
    reader, and the k-th wait always takes the k-th signal, so the same is known everywhere.
    """

    def __init__(self, plan: Plan, direct: bool = False, pushing: bool = False) -> None:
        self.plan, self.direct = plan, direct
        self.pushed = pushed(plan) if direct else []
        self.pushes = pushes(plan) if pushing else frozenset()
        size, n = plan.size, len(plan.connections)
        self.everyone = (1 << size) - 1
        # accesses to each chunk so far, of all ranks; the first are the callers' filling
        self.accesses = [size] * plan.num_chunks
        # for each stream and chunk, the accesses known to be over, as bits
        self.known: list[dict[int, int]] = [{} for _ in plan.streams]
        self.ready: list[deque[tuple[int, int]]] = [deque() for _ in range(n)]
        self.free: list[deque[tuple[int, int]]] = [deque([(0, 0)] * plan.slots) for _ in range(n)]
        self.holds = [
            [
                start(plan.collective, size, plan.root, r, c % plan.stride)
                for c in range(plan.num_chunks)
            ]
            for r in range(size)
        ]
        self.slot: list[list[tuple[int, int]]] = [[(0, 0)] * plan.slots for _ in range(n)]
        self.wrote: dict[_Cell, _Access] = {}
        self.read: dict[_Cell, list[_Access]] = {}
        self.origin: dict[tuple[int, int], tuple[_Cell, _Access]] = {}
        self.push: dict[_Cell, _Access] = {}  # the last push into a chunk
        self.races: list[str] = []

    def run(self) -> None:
        walk(self.plan, self.visit)
        if self.races:
            more = f" (and {len(self.races) - 1} more)" if len(self.races) > 1 else ""
            raise PlanError(f"race: {self.races[0]}{more}")
        plan = self.plan
        for r, row in enumerate(self.holds):
            for c, held in enumerate(row):
                wanted = goal(plan.collective, plan.size, plan.root, r, c % plan.stride)
                if wanted is not None and held != wanted:
                    raise PlanError(
                        f"rank {r} ends with chunk {c} combined over ranks {_ranks(held)}, "
                        f"not over {_ranks(wanted)}"
                    )

    def writer(self, cell: _Cell) -> _Access:
        """The last write to a chunk; at first, that of the caller who filled it."""
        rank, chunk = cell
        return self.wrote.get(cell) or (rank, f"the caller of rank {rank} fills chunk {chunk}")

    def knows(self, index: int, chunk: int) -> int:
        """What a stream knows of a chunk; at first, that its own caller has filled it."""
        return self.known[index].get(chunk) or 1 << self.plan.streams[index].rank

    def touch(self, cell: _Cell, visit: Visit, write: bool) -> None:
        chunk = cell[1]
        known = self.knows(visit.stream_index, chunk)
        before = [self.writer(cell)]
        if write:
            before += self.read.get(cell, ())
        for bit, words in before:
            if not known >> bit & 1:
                self.races.append(f"{visit} is not ordered after: {words}")
        bit = self.accesses[chunk]
        self.accesses[chunk] += 1
        self.known[visit.stream_index][chunk] = known | 1 << bit
        if write:
            self.wrote[cell] = bit, visit
            self.read.pop(cell, None)
        else:
            self.read.setdefault(cell, []).append((bit, visit))

    def take(self, index: int, number: int, visit: Visit) -> int:
        """What a slot that is read holds; with `direct`, its chunk is read where it was sent."""
        held, chunk = self.slot[index][number]
        if chunk != visit.chunk:
            raise PlanError(f"{visit} takes a slot that holds chunk {chunk}")
        if self.direct and self.pushed[index] >= 0 and visit.step.op is Op.REDUCE:
            self.races.append(f"{visit} combines what its sender writes over the own chunk")
        if self.direct and self.pushed[index] < 0:
            cell, version = self.origin[index, number]
            self.touch(cell, visit, write=False)
            if (now := self.writer(cell)) != version:
                self.races.append(f"{visit} reads {cell} after it was written by: {now[1]}")
        return held

    def visit(self, visit: Visit) -> None:
        index, stream, _, chunk, step, slots, _ = visit
        match step.op:
            case Op.SIGNAL:
                i = step.connections[0]
                queue = self.ready if self.plan.sends_on(stream, i) else self.free
                queue[i].append((chunk, self.knows(index, chunk)))
            case Op.WAIT:
                i = step.connections[0]
                if not self.plan.sends_on(stream, i):
                    of, known = self.ready[i].popleft()
                else:
                    of, known = self.free[i].popleft()
                if known:
                    self.known[index][of] = self.knows(index, of) | known
            case Op.SEND:
                self.send(visit)
            case Op.REDUCE | Op.COPY:
                own = self.holds[stream.rank]
                total = own[chunk] if step.op is Op.REDUCE else 0
                for i, number in zip(step.connections, slots, strict=True):
                    held = self.take(i, number, visit)
                    if total & held:
                        raise PlanError(
                            f"{visit} counts ranks {_ranks(total & held)} twice (connection "
                            f"{self.plan.connections[i]})"
                        )
                    total |= held
                if step.op is Op.REDUCE and step.last != (total == self.everyone):
                    raise PlanError(
                        f"{visit} covers ranks {_ranks(total)}, yet it is "
                        + ("" if step.last else "not ")
                        + "marked as the last one of its chunk"
                    )
                own[chunk] = total
                written = self.direct and self.pushed[step.connections[0]] >= 0
                if place(visit) in self.pushes:
                    self.take_over(visit)
                elif not written:
                    self.touch((stream.rank, chunk), visit, write=True)

    def take_over(self, visit: Visit) -> None:
        """A COPY whose data has been pushed: nobody may have looked at the chunk since."""
        cell = visit.stream.rank, visit.chunk
        if self.writer(cell) != self.push.get(cell):
            self.races.append(f"{self.writer(cell)[1]} writes before {visit} what was pushed")
        for _, words in self.read.get(cell, ()):
            self.races.append(f"{words} reads what was pushed before {visit}")

    def send(self, visit: Visit) -> None:
        _, stream, _, chunk, step, slots, source_slot = visit
        own = (stream.rank, chunk)
        if step.source is None:
            held = self.holds[stream.rank][chunk]
            if not self.direct:
                self.touch(own, visit, write=False)
        else:
            held, of = self.slot[step.source][source_slot]
            if of != chunk:
                raise PlanError(f"{visit} takes a slot that holds chunk {of}")
        if self.direct:
            origin = (own, self.writer(own))
            if step.source is not None:
                origin = self.origin[step.source, source_slot]
        for i, number in zip(step.connections, slots, strict=True):
            self.slot[i][number] = held, chunk
            if self.direct:
                self.origin[i, number] = origin
                if self.pushed[i] >= 0:
                    self.touch(own, visit, write=False)
                    self.touch((self.pushed[i], chunk), visit, write=True)
            elif place(visit) in self.pushes:
                cell = self.plan.connections[i].dst, chunk
                self.touch(cell, visit, write=True)
                self.push[cell] = self.wrote[cell]


def _ranks(mask: int) -> Sequence[int]:
    return [r for r in range(mask.bit_length()) if mask >> r & 1]
