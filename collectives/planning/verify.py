"""`verify`: a plan is proved right before it is ever run."""

from __future__ import annotations

from collections import deque

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.access import origins, pushed, pushes, step_id
from linkweave.collectives.planning.execute_order import Visit, walk
from linkweave.collectives.planning.goals import goal, start
from linkweave.collectives.planning.plan import Op, Plan
from linkweave.collectives.planning.wellformed import MOST_WALKED, check_form, check_links, repeats
from linkweave.topology import Topology

_FEW = 8  # slots


def verify(plan: Plan, topology: Topology, expand: bool = False) -> None:
    """Raise PlanError unless the plan is right on this topology.

    1. Contributions: every rank ends with what the collective promises it (`planning.goals`), and
       nothing else in it; of an all-reduce, with every chunk combined exactly once over all ranks,
       in one order on all of them, so that they have the same bits whatever the data and operator.
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
       when its rank's tracks have ended comes after all of them, as no others touch it.

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
    prove(plan, expand)


def prove(plan: Plan, expand: bool = False) -> None:
    """`verify` of a plan whose connections are known to be right."""
    _Proof(plan if expand else shortened(plan)).run()
    if plan.num_chunks < plan.stride:  # what looks at a whole group relies on it
        _Proof(plan.with_chunks(plan.stride)).run()


def shortened(plan: Plan) -> Plan:
    """The plan on the fewest chunks that prove it for all (see `verify`).

    Raises PlanError where there is no short form and the plan is too long to be walked in full.
    """
    enough = plan.stride * (plan.slots + 2)
    if plan.num_chunks <= enough + plan.stride:
        groups, rest = divmod(plan.num_chunks, plan.stride)
        few = plan.slots <= _FEW and has_one_phase(plan)  # else a longer proof costs too much
        one_for_all = groups > 1 and not rest and few and repeats(plan)
        return plan.with_chunks(enough) if one_for_all else plan
    if not repeats(plan):
        steps = plan.groups * sum(len(body) for s in plan.tracks for body in s.phases)
        if steps > MOST_WALKED:
            raise PlanError(
                "groups whose signals and waits do not pair within each are proved one by one: "
                f"at most {MOST_WALKED} steps in all, not {steps}"
            )
        return plan
    return plan.with_chunks(enough + (plan.num_chunks - enough) % plan.stride)


def has_one_phase(plan: Plan) -> bool:
    """Whether every track does all its work in one phase."""
    return all(len(track.phases) <= 1 for track in plan.tracks)


def races(plan: Plan, direct: bool = False, pushing: bool = False) -> list[str]:
    """Unordered pairs of accesses, in words; empty if there are none.

    With `pushing`, a SEND to COPYs writes the receivers' chunks, and the COPYs do nothing (see
    `touches.pushes`), as ranks may do that see each other's buffers. Such a write is over when the
    receiver's tracks have ended, as the COPY stands behind the WAIT for it. An access to the chunk
    between the two counts as a race: it would see the new value too early.

    With `direct`, no slots are used, which is how ranks on one memory may run a plan: a REDUCE
    reads the chunks it is sent where they lie, a SEND to a COPY writes the receiver's chunk, and
    the COPY does nothing (see `plan.pushed`). Then a caller must not get its buffer back before
    the tracks of all ranks have ended.
    """
    proof = _Proof(shortened(plan), direct, pushing)
    walk(proof.plan, proof.visit, sync=proof.sync)
    return proof.races


_Cell = tuple[int, int]  # (rank, chunk)
_Access = tuple[int, Visit | str]  # its bit among the accesses to this chunk of any rank; words


class _Values:
    """What chunks and slots hold, as numbers: those of one number have the same bits.

    Number r is what rank r gives, P + r its other data. The value of a REDUCE is its operands' in
    their order: as each is rounded once, one of three operands is not two of two; and min and max
    of 0 and -0 depend on the order of even two.
    """

    def __init__(self, size: int) -> None:
        self.ranks = [1 << r for r in range(2 * size)]  # that each contains, as in `goals`
        self.known: dict[tuple[int, ...], int] = {}

    def combined(self, operands: tuple[int, ...], ranks: int) -> int:
        number = self.known.setdefault(operands, len(self.ranks))
        if number == len(self.ranks):
            self.ranks.append(ranks)
        return number


class _Proof:
    """Contributions and happens-before, moved along one walk.

    Which order the walk takes does not matter: counters only grow, each has one writer and one
    reader, and the k-th wait always takes the k-th signal, so the same is known everywhere.
    """

    def __init__(self, plan: Plan, direct: bool = False, pushing: bool = False) -> None:
        self.plan, self.direct = plan, direct
        self.pushed = pushed(plan) if direct else []
        self.origins = origins(plan) if direct else {}
        self.pushes = pushes(plan) if pushing else frozenset()
        size, n = plan.size, len(plan.connections)
        self.everyone = (1 << size) - 1
        # accesses to each chunk so far, of all ranks; the first are the callers' filling
        self.accesses = [size] * plan.num_chunks
        # for each track and chunk, the accesses known to be over, as bits
        self.known: list[dict[int, int]] = [{} for _ in plan.tracks]
        self.ready: list[deque[tuple[int, int]]] = [deque() for _ in range(n)]
        self.free: list[deque[tuple[int, int]]] = [deque() for _ in range(n)]
        self.unused = [plan.slots] * n
        self.values = _Values(size)
        self.holds: dict[_Cell, int] = {}  # that tracks have written
        self.slot: dict[tuple[int, int], tuple[int, int]] = {}  # what it holds, of which chunk
        self.wrote: dict[_Cell, _Access] = {}
        self.read: dict[_Cell, list[_Access]] = {}
        self.origin: dict[tuple[int, int], tuple[_Cell, _Access]] = {}
        self.push: dict[_Cell, _Access] = {}  # the last push into a chunk
        self.races: list[str] = []

    def run(self) -> None:
        walk(self.plan, self.visit, sync=self.sync)
        if self.races:
            more = f" (and {len(self.races) - 1} more)" if len(self.races) > 1 else ""
            raise PlanError(f"race: {self.races[0]}{more}")
        self.check_results()

    def check_results(self) -> None:
        """Of chunks that no step touches, those of the first group stand for all."""
        plan, ranks = self.plan, self.values.ranks
        touched = {chunk for _, chunk in self.holds}
        for c in sorted(touched.union(range(min(plan.stride, plan.num_chunks)))):
            first: dict[int, tuple[int, int]] = {}  # for what is wanted: who has it, and its value
            for r in range(plan.size):
                wanted = goal(plan.collective, plan.size, plan.root, r, c % plan.stride)
                if wanted is None:
                    continue
                value = self.value(r, c)
                if ranks[value] != wanted:
                    raise PlanError(
                        f"rank {r} ends with chunk {c} combined over {self.words(ranks[value])}, "
                        f"not over {self.words(wanted)}"
                    )
                other, same = first.setdefault(wanted, (r, value))
                if value != same:
                    raise PlanError(
                        f"rank {r} combines chunk {c} in another order than rank {other}, so that "
                        "their bits may differ"
                    )

    def value(self, rank: int, chunk: int) -> int:
        """The number of what a rank's chunk holds."""
        value = self.holds.get((rank, chunk))
        if value is not None:
            return value
        plan = self.plan
        held = start(plan.collective, plan.size, plan.root, rank, chunk % plan.stride)
        return held.bit_length() - 1

    def words(self, mask: int) -> str:
        size = self.plan.size
        counted = [r for r in range(size) if mask >> r & 1]
        others = [r for r in range(size) if mask >> size + r & 1]
        return f"ranks {counted}" + (f" and other data of ranks {others}" if others else "")

    def writer(self, cell: _Cell) -> _Access:
        """The last write to a chunk; at first, that of the caller who filled it."""
        rank, chunk = cell
        return self.wrote.get(cell) or (rank, f"the caller of rank {rank} fills chunk {chunk}")

    def knows(self, index: int, chunk: int) -> int:
        """What a track knows of a chunk; at first, that its own caller has filled it."""
        return self.known[index].get(chunk) or 1 << self.plan.tracks[index].rank

    def touch(self, cell: _Cell, visit: Visit, write: bool) -> None:
        chunk = cell[1]
        known = self.knows(visit.track_index, chunk)
        before = [self.writer(cell)]
        if write:
            before += self.read.get(cell, ())
        for bit, words in before:
            if not known >> bit & 1:
                self.races.append(f"{visit} is not ordered after: {words}")
        bit = self.accesses[chunk]
        self.accesses[chunk] += 1
        self.known[visit.track_index][chunk] = known | 1 << bit
        if write:
            self.wrote[cell] = bit, visit
            self.read.pop(cell, None)
        else:
            self.read.setdefault(cell, []).append((bit, visit))

    def take(self, index: int, number: int, visit: Visit) -> int:
        """What a slot that is read holds; with `direct`, its chunk is read where it was sent."""
        value, chunk = self.slot[index, number]
        if chunk != visit.chunk:
            raise PlanError(f"{visit} takes a slot that holds chunk {chunk}")
        if self.direct and self.pushed[index] >= 0 and visit.step.op is Op.REDUCE:
            self.races.append(f"{visit} combines what its sender writes over the own chunk")
        if self.direct and self.pushed[index] < 0:
            cell, version = self.origin[index, number]
            if cell[0] != self.origins[index]:
                self.races.append(f"{visit} reads {cell} over a connection of several ranks' data")
            self.touch(cell, visit, write=False)
            if (now := self.writer(cell)) != version:
                self.races.append(f"{visit} reads {cell} after it was written by: {now[1]}")
        return value

    def sync(self, index: int, chunk: int, op: Op, i: int, sender: bool) -> None:
        """A signal carries what is known of its chunk to the wait for it."""
        if op is Op.SIGNAL:
            queue = self.ready if sender else self.free
            queue[i].append((chunk, self.knows(index, chunk)))
            return
        queue = self.free if sender else self.ready
        if sender and self.unused[i]:
            self.unused[i] -= 1  # a slot that is free from the start
            return
        of, known = queue[i].popleft()
        self.known[index][of] = self.knows(index, of) | known

    def visit(self, visit: Visit) -> None:
        _, track, _, chunk, step, slots, _ = visit
        if step.op is Op.SEND:
            self.send(visit)
            return
        arrived = [self.take(i, k, visit) for i, k in zip(step.connections, slots, strict=True)]
        value = arrived[0] if step.op is Op.COPY else self.combine(visit, arrived)
        self.holds[track.rank, chunk] = value
        if self.pushes and step_id(visit) in self.pushes:
            self.take_over(visit)
        elif not (self.direct and self.pushed[step.connections[0]] >= 0):
            self.touch((track.rank, chunk), visit, write=True)

    def combine(self, visit: Visit, arrived: list[int]) -> int:
        """The value of a REDUCE."""
        step, ranks = visit.step, self.values.ranks
        own = self.value(visit.track.rank, visit.chunk)
        total = ranks[own]
        for i, value in zip(step.connections, arrived, strict=True):
            if twice := total & ranks[value] & self.everyone:
                raise PlanError(
                    f"{visit} counts {self.words(twice)} twice (connection "
                    f"{self.plan.connections[i]})"
                )
            total |= ranks[value]
        if step.last != (total == self.everyone):
            raise PlanError(
                f"{visit} covers {self.words(total)}, yet it is "
                + ("" if step.last else "not ")
                + "marked as the last one of its chunk"
            )
        return self.values.combined((*arrived[: step.ahead], own, *arrived[step.ahead :]), total)

    def take_over(self, visit: Visit) -> None:
        """A COPY whose data has been pushed: nobody may have looked at the chunk since."""
        cell = visit.track.rank, visit.chunk
        if self.writer(cell) != self.push.get(cell):
            self.races.append(f"{self.writer(cell)[1]} writes before {visit} what was pushed")
        for _, words in self.read.get(cell, ()):
            self.races.append(f"{words} reads what was pushed before {visit}")

    def send(self, visit: Visit) -> None:
        _, track, _, chunk, step, slots, source_slot = visit
        own = (track.rank, chunk)
        if step.source is None:
            value = self.value(track.rank, chunk)
            if not self.direct:
                self.touch(own, visit, write=False)
        else:
            value, of = self.slot[step.source, source_slot]
            if of != chunk:
                raise PlanError(f"{visit} takes a slot that holds chunk {of}")
        if self.direct:
            origin = (own, self.writer(own))
            if step.source is not None:
                origin = self.origin[step.source, source_slot]
        for i, number in zip(step.connections, slots, strict=True):
            self.slot[i, number] = value, chunk
            if self.direct:
                self.origin[i, number] = origin
                if self.pushed[i] >= 0:
                    self.touch(own, visit, write=False)
                    self.touch((self.pushed[i], chunk), visit, write=True)
            elif self.pushes and step_id(visit) in self.pushes:
                cell = self.plan.connections[i].dst, chunk
                self.touch(cell, visit, write=True)
                self.push[cell] = self.wrote[cell]
