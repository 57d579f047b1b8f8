"""`verify`: the proof that a plan is right, before it runs."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from functools import lru_cache

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.dataflow import Visit, origins, pushed, pushes, step_id, walk
from linkweave.collectives.planning.plan import MOST_CHANNELS, Op, Plan, Step
from linkweave.topology import Topology, load
from linkweave.topology.text import ranks

_FEW = 8  # slots


def verify(plan: Plan, topology: Topology | str, expand: bool = False) -> None:
    """Raise PlanError unless the plan is right on this topology.

    1. Contributions: every rank ends with exactly what the collective promises it
       (`planning.collective`). In an all-reduce every chunk is combined exactly once over all
       ranks, and in the same order on all ranks, so that they get the same bits with any data and
       operator.
    2. Links: every connection runs over one existing hop, through switches only. If the plan claims
       exclusive links, no link carries more connections than it has physical links.
    3. Pairing and progress: every access has the WAIT that guards it, every signal is waited for,
       and the plan does not deadlock with its number of slots.
    4. Happens-before: if two tracks access a chunk of a rank, or a slot, and one of them writes,
       signals order the accesses. For slots this follows from 3: the k-th write comes after as many
       waits for a free slot, the k-th read after as many waits for data, and each signal after the
       access that it announces. For chunks, each signal carries what has been done to its chunk so
       far, and each access checks that its track knows of the access before. (Order that only a
       signal for another chunk provides does not count, which is stricter than necessary.) The
       caller's filling of the buffer is the first access; the caller gets the buffer back when the
       tracks of its rank have ended, and no other tracks access it.

    Of a long plan only a few groups of chunks are walked (all of them with `expand`). Every group
    repeats the same steps. A step of group g waits only for signals of group g (data, order within
    a rank) and of group g - slots (a free slot), so the order of two accesses depends on the
    difference of their groups, not on g. `slots + 2` groups contain every such difference up to the
    reuse of a slot; from there on everything repeats. The walk keeps the number of chunks modulo
    the stride, and so a last group that is incomplete. A plan whose groups do not pair signals with
    waits of the same group, or that signals in a later phase than it waits, is walked in full
    (`repeats`).
    """
    check_form(plan)
    check_links(plan, load(topology))
    prove(plan, expand)


def prove(plan: Plan, expand: bool = False) -> None:
    """Do the part of `verify` that depends neither on the form nor on the topology."""
    _Proof(plan if expand else shortened(plan)).run()
    if plan.num_chunks < plan.stride:  # the analyses in `dataflow` rely on a whole group
        _Proof(plan.with_chunks(plan.stride)).run()


def shortened(plan: Plan) -> Plan:
    """Return the plan on the fewest chunks that prove it for all (see `verify`).

    Raises PlanError if there is no short form and the plan is too long to be walked in full.
    """
    enough = plan.stride * (plan.slots + 2)
    if plan.num_chunks <= enough + plan.stride:
        groups, rest = divmod(plan.num_chunks, plan.stride)
        few = plan.slots <= _FEW and has_one_phase(plan)  # else the longer proof costs too much
        one_for_all = groups > 1 and not rest and few and repeats(plan)
        return plan.with_chunks(enough) if one_for_all else plan
    if not repeats(plan):
        steps = plan.groups * sum(len(body) for s in plan.tracks for body in s.phases)
        if steps > MOST_WALKED:
            raise PlanError(
                "the signals and waits of a group do not pair, so all groups must be walked: "
                f"at most {MOST_WALKED} steps, not {steps}"
            )
        return plan
    return plan.with_chunks(enough + (plan.num_chunks - enough) % plan.stride)


def has_one_phase(plan: Plan) -> bool:
    """Return whether every track has at most one phase."""
    return all(len(track.phases) <= 1 for track in plan.tracks)


def races(plan: Plan, direct: bool = False, pushing: bool = False) -> list[str]:
    """Return descriptions of all unordered pairs of accesses.

    With `pushing`, a SEND to COPYs writes the receivers' chunks, and the COPYs do nothing (see
    `dataflow.pushes`), as on ranks that can access each other's buffers. The write is over when the
    receiver's tracks have ended, because the COPY comes after the WAIT for it. An access to the
    chunk between the SEND and the COPY is a race: it would see the new value too early.

    With `direct`, no slots are used, as on ranks that share one memory: a REDUCE reads its
    operands in their senders' buffers, a SEND to a COPY writes the receiver's chunk, and the COPY
    does nothing (see `dataflow.pushed`). The caller must then not get its buffer back before the
    tracks of all ranks have ended.
    """
    proof = _Proof(shortened(plan), direct, pushing)
    walk(proof.plan, proof.visit, sync=proof.sync)
    return proof.races


_Cell = tuple[int, int]  # (rank, chunk)
_Access = tuple[int, Visit | str]  # its bit among the accesses to this chunk; a description


class _Values:
    """The values of chunks and slots, numbered so that equal numbers mean equal bits.

    Number r is what rank r contributes, P + r its other data. The value of a REDUCE is the tuple of
    its operands: a REDUCE rounds once, so one with three operands differs from two with two, and
    the min and max of 0 and -0 depend on the order even of two operands.
    """

    def __init__(self, size: int) -> None:
        self.ranks = [1 << r for r in range(2 * size)]  # the contributions in each value
        self.known: dict[tuple[int, ...], int] = {}

    def combined(self, operands: tuple[int, ...], ranks: int) -> int:
        number = self.known.setdefault(operands, len(self.ranks))
        if number == len(self.ranks):
            self.ranks.append(ranks)
        return number


class _Proof:
    """Contributions and happens-before, tracked along one walk.

    The order of the walk does not matter: counters only grow, each has one writer and one reader,
    and the k-th wait always takes the k-th signal.
    """

    def __init__(self, plan: Plan, direct: bool = False, pushing: bool = False) -> None:
        self.plan, self.direct = plan, direct
        self.pushed = pushed(plan) if direct else []
        self.origins = origins(plan) if direct else {}
        self.pushes = pushes(plan) if pushing else frozenset()
        size, n = plan.size, len(plan.connections)
        self.everyone = (1 << size) - 1
        # accesses to each chunk so far, on all ranks; the first are those of the callers
        self.accesses = [size] * plan.num_chunks
        # for each track and chunk, the accesses known to be over, as a set of bits
        self.known: list[dict[int, int]] = [{} for _ in plan.tracks]
        self.ready: list[deque[tuple[int, int]]] = [deque() for _ in range(n)]
        self.free: list[deque[tuple[int, int]]] = [deque() for _ in range(n)]
        self.unused = [plan.slots] * n
        self.values = _Values(size)
        self.holds: dict[_Cell, int] = {}  # the values that tracks have written
        self.slot: dict[tuple[int, int], tuple[int, int]] = {}  # value and chunk in each slot
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
            first: dict[int, tuple[int, int]] = {}  # by goal: a rank that has it, and its value
            for r in range(plan.size):
                wanted = plan.definition.goal(plan.size, plan.root, r, c % plan.stride)
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
        """Return the number of the value in a rank's chunk."""
        value = self.holds.get((rank, chunk))
        if value is not None:
            return value
        plan = self.plan
        start = plan.definition.start(plan.size, plan.root, rank, chunk % plan.stride)
        return start.bit_length() - 1

    def words(self, mask: int) -> str:
        size = self.plan.size
        counted = [r for r in range(size) if mask >> r & 1]
        others = [r for r in range(size) if mask >> size + r & 1]
        return f"ranks {counted}" + (f" and other data of ranks {others}" if others else "")

    def writer(self, cell: _Cell) -> _Access:
        """Return the last write to a chunk, at first by its caller."""
        rank, chunk = cell
        return self.wrote.get(cell) or (rank, f"the caller of rank {rank} fills chunk {chunk}")

    def knows(self, index: int, chunk: int) -> int:
        """Return the accesses to a chunk that a track knows of, at first that of its caller."""
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
        """Return the value that is read from a slot, or with `direct` from the sender's chunk."""
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
        """Pass what a track knows of a chunk from a signal to the wait for it."""
        if op is Op.SIGNAL:
            queue = self.ready if sender else self.free
            queue[i].append((chunk, self.knows(index, chunk)))
            return
        queue = self.free if sender else self.ready
        if sender and self.unused[i]:
            self.unused[i] -= 1  # this slot has been free from the start
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
        """Return the value of a REDUCE."""
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
        """Check a COPY of pushed data: no other access to the chunk may come in between."""
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


def check_form(plan: Plan) -> None:
    """Raise PlanError unless every rank, channel, chunk and connection number is valid."""
    for c in plan.connections:
        ends = (c.src, c.src_channel), (c.dst, c.dst_channel)
        if not all(_is_track(plan, *end) for end in ends):
            raise PlanError(f"connection {c} does not join ranks of the plan's {plan.size}")
        if ends[0] == ends[1]:
            raise PlanError(f"connection {c} joins a track to itself")
        if not all(isinstance(v, int | str) for v in c.path) or (c.local and c.path):
            raise PlanError(f"connection {c} runs over {c.path}, which is not a path")
    keys = [(s.rank, s.channel) for s in plan.tracks]
    for rank, channel in keys:
        if not _is_track(plan, rank, channel):
            raise PlanError(
                f"a track has rank {rank}, channel {channel}; the plan has {plan.size} ranks "
                f"of at most {MOST_CHANNELS} channels"
            )
    if len(set(keys)) != len(keys):
        raise PlanError("two tracks share a rank and a channel")
    if wrong_tree := [tree for tree in plan.trees if len(tree.parent) != plan.size]:
        raise PlanError(
            f"a tree of {len(wrong_tree[0].parent)} ranks in a plan for {plan.size} ranks"
        )
    for track in plan.tracks:
        at = 0
        for body in track.phases:
            for step in body:
                if wrong := _wrong(plan, track.rank, step):
                    raise PlanError(
                        f"rank {track.rank} channel {track.channel} step {at}: {step.op.name} "
                        f"{wrong}"
                    )
                at += 1


def _is_track(plan: Plan, rank: object, channel: object) -> bool:
    """Return whether the plan may have a track of this rank and channel."""
    return all(
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value < end
        for value, end in ((rank, plan.size), (channel, MOST_CHANNELS))
    )


def _wrong(plan: Plan, rank: int, step: Step) -> str:
    """Return what is wrong with a step, or an empty string."""
    named = step.connections if step.source is None else (*step.connections, step.source)
    if {*map(type, named), type(step.chunk), type(step.ahead)} != {int}:
        return "needs integers"
    if not 0 <= step.chunk < plan.stride or not step.connections:
        return f"needs a connection and a chunk below the stride {plan.stride}, not {step.chunk}"
    if bad := [i for i in named if not 0 <= i < len(plan.connections)]:
        return f"names connection {bad[0]}; the plan has {len(plan.connections)}"
    if len(named) > 1:
        if len(set(named)) != len(named):
            return "names a connection twice"
        if step.op in (Op.WAIT, Op.SIGNAL, Op.COPY):
            return f"takes only one connection, not {len(named)}"
    if step.op in (Op.WAIT, Op.SIGNAL):
        return ""
    if any(plan.connections[i].local for i in named):
        return "moves data over a connection that only orders steps"
    if not 0 <= step.ahead <= len(named) * (step.op is Op.REDUCE):
        return f"puts {step.ahead} of its connections before the rank's own value"
    if step.op is not Op.SEND and step.source is not None:
        return "has a source, which only a SEND may have"
    if step.source is None and not plan.definition.has_chunk(plan.size, rank, step.chunk):
        return f"uses chunk {step.chunk}, which rank {rank} can only forward: it is not its own"
    return ""


def check_links(plan: Plan, topology: Topology) -> None:
    """Raise PlanError unless every connection runs over existing links, and where the plan claims
    exclusive links, over links of its own."""
    if plan.size != len(topology.gpus):
        raise PlanError(f"the plan is for {plan.size} ranks; {topology.name} has {ranks(topology)}")
    for connection in plan.connections:
        if connection.local:
            continue
        ends = (topology.gpus[connection.src], topology.gpus[connection.dst])
        if (*connection.path[:1], *connection.path[-1:]) != ends:
            raise PlanError(
                f"connection {connection} runs over {connection.path}, which does not lead from "
                f"GPU {ends[0]} to GPU {ends[1]}"
            )
        for link in connection.links:
            if link not in topology.by_ends:
                raise PlanError(
                    f"connection {connection}: {topology.name} has no link {link[0]}->{link[1]}"
                )
        if passed := [v for v in connection.path[1:-1] if isinstance(v, int)]:
            raise PlanError(f"connection {connection}: hardware does not route through {passed}")
    if plan.exclusive:
        for (a, b), used in sorted(plan.link_use.items(), key=str):
            has = topology.by_ends[a, b].count
            if used > has:
                raise PlanError(
                    f"the plan claims exclusive links, but {used} connections take link {a}->{b}, "
                    f"which has {has}"
                )


MOST_WALKED = 1 << 18
"""The most steps of a plan whose groups differ, so that all groups must be walked."""


def repeats(plan: Plan) -> bool:
    """Return whether every group of chunks is like the one before, so that a few groups prove all.

    That holds if each group raises each counter of each connection for the same chunks for which it
    waits for that counter, and no WAIT is in an earlier phase than a SIGNAL it waits for.
    """
    return _repeats(plan.with_chunks(plan.stride))  # the same for any number of chunks


@lru_cache(maxsize=64)
def _repeats(plan: Plan) -> bool:
    raised: dict[tuple[int, bool], Counter[int]] = defaultdict(Counter)
    waited: dict[tuple[int, bool], Counter[int]] = defaultdict(Counter)
    last: dict[tuple[int, bool], int] = {}
    first: dict[tuple[int, bool], int] = {}
    for track in plan.tracks:
        for phase, body in enumerate(track.phases):
            for step in body:
                if step.op not in (Op.SIGNAL, Op.WAIT):
                    continue
                i = step.connections[0]
                sender = plan.sends_on(track, i)
                if step.op is Op.SIGNAL:
                    raised[i, sender][step.chunk] += 1
                    last[i, sender] = max(last.get((i, sender), 0), phase)
                else:
                    waited[i, not sender][step.chunk] += 1
                    first[i, not sender] = min(first.get((i, not sender), phase), phase)
    return raised == waited and all(last[key] <= phase for key, phase in first.items())
