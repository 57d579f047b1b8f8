"""A plan of ours as an execution plan of MSCCL++.

A track becomes a thread block. What arrives over a connection lies in scratch memory, with room for
all chunks of a message, so that no slot is used twice and signals for free slots are not needed;
instead, the receiver tells the sender when its execution begins. Groups of chunks become the
iterations of a pipeline: a chunk of MSCCL++ has all chunks of one place in a group.

    SEND            put into the receiver's scratch memory
    SIGNAL, WAIT    signal, wait; sem_release, sem_acquire between thread blocks of a rank
    REDUCE          re, which adds 16-bit floats in their own type: each addition rounds
    COPY            copy
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from linkweave.collectives.errors import PlanError
from linkweave.collectives.foreign.mscclpp import (
    FORMS,
    MOST_AT_ONCE,
    MOST_BYTES,
    MOST_ITERATIONS,
    NAMES,
    SIGNALS,
    WAITS,
    ExecutionPlan,
    Gpu,
    Op,
    Region,
)
from linkweave.collectives.foreign.mscclpp_proof import verify
from linkweave.collectives.planning.layout import ALIGN
from linkweave.collectives.planning.plan import Op as Verb
from linkweave.collectives.planning.plan import Plan, Step, Track
from linkweave.topology import Topology


def exported(plan: Plan, nbytes: int, topology: Topology | None = None) -> ExecutionPlan:
    """The plan for messages of about `nbytes`, verified.

    A message must divide into whole chunks of 16 bytes. In place: "allreduce" and "reduce_scatter"
    overwrite their input, and "allgather" has its input in its output.
    Raises PlanError for a collective or a size that MSCCL++ does not have.
    """
    if plan.collective not in NAMES:
        raise PlanError(f"MSCCL++ takes plans of {', '.join(NAMES)}, not of a {plan.collective}")
    made = _Export(plan, nbytes).plan()
    verify(made, topology)
    check_size(made, nbytes)
    return made


def check_size(plan: ExecutionPlan, nbytes: int) -> None:
    """Raise PlanError unless MSCCL++ takes a message of so many bytes."""
    if nbytes % plan.least or not plan.least <= nbytes <= plan.most:
        below = min(nbytes // plan.least * plan.least, plan.most)
        near = " or ".join(str(n) for n in (below, below + plan.least) if 0 < n <= plan.most)
        raise PlanError(
            f"MSCCL++ takes messages of whole chunks of {ALIGN} bytes, here multiples of "
            f"{plan.least} up to {plan.most}, not {nbytes}: pad it to {near}"
        )


class _Export:
    def __init__(self, plan: Plan, nbytes: int) -> None:
        self.source = plan
        self.blocks = plan.definition.layout.blocks(plan.size)
        self.each = plan.stride // self.blocks  # chunks of a block in a group
        self.unit = plan.chunk_bytes(nbytes) if plan.groups > 1 else 0
        tracks = {(t.rank, t.channel): t for t in plan.tracks}
        self.peers: list[list[int]] = [[] for _ in range(plan.size)]
        self.semaphores = [0] * plan.size
        self.scratch = [0] * plan.size
        self.numbers: list[tuple[int, int]] = []  # of each connection's channel at its two ends
        self.rooms: list[dict[tuple[int, int], int]] = []  # scratch, by (phase, step)
        self.taken: list[dict[tuple[int, int], int]] = []
        for index, connection in enumerate(plan.connections):
            a, b = connection.src, connection.dst
            if connection.local:
                self.numbers.append((self.semaphores[a],) * 2)
                self.semaphores[a] += 1
                self.rooms.append({})
                self.taken.append({})
                continue
            self.numbers.append((len(self.peers[a]), len(self.peers[b])))
            self.peers[a].append(b)
            self.peers[b].append(a)
            sends = _steps_over(tracks.get((a, connection.src_channel)), index, (Verb.SEND,))
            takes = _steps_over(
                tracks.get((b, connection.dst_channel)), index, (Verb.REDUCE, Verb.COPY), True
            )
            if [len(phase) for phase in sends] != [len(phase) for phase in takes]:
                raise PlanError(
                    f"connection {connection}: its chunks are taken in other groups than they are "
                    "sent in"
                )
            numbers = range(self.scratch[b], self.scratch[b] + sum(map(len, sends)))
            self.scratch[b] += len(numbers)
            self.rooms.append(dict(zip(_flat(sends), numbers, strict=True)))
            self.taken.append(dict(zip(_flat(takes), numbers, strict=True)))

    def plan(self) -> ExecutionPlan:
        plan, size = self.source, self.source.size
        blocks: list[list[tuple[Op, ...]]] = [[] for _ in range(size)]
        for track in plan.tracks:
            blocks[track.rank].append(self.block(track))
        own = plan.stride if plan.collective != "alltoall" else plan.stride // size
        if plan.collective == "alltoall":  # what a rank sends to itself is in no plan
            for rank in range(size):
                first = rank * self.each
                src, dst = (Region((rank,), b, first, self.each) for b in "io")
                keeps = Op("copy", (src,), (dst,))
                if not blocks[rank]:
                    blocks[rank].append(())
                blocks[rank][0] = (keeps, *blocks[rank][0])
        chunks = {"i": own, "o": own}
        if plan.collective == "allgather":
            chunks["i"] = own // size
        if plan.collective == "reduce_scatter":
            chunks["o"] = own // size
        gpus = tuple(
            Gpu({**chunks, "s": self.scratch[rank]}, tuple(blocks[rank]), tuple(self.peers[rank]),
                semaphores=(0,) * self.semaphores[rank])
            for rank in range(size)
        )  # fmt: skip
        largest = max(*chunks.values(), *self.scratch, 1)
        whole = MOST_BYTES // largest // ALIGN * ALIGN
        if self.unit:
            whole = min(whole, self.unit * MOST_ITERATIONS)
        message = chunks["o"] if plan.collective == "allgather" else chunks["i"]
        return ExecutionPlan(
            f"linkweave_{plan.algorithm}_{size}", NAMES[plan.collective],
            plan.collective != "alltoall", gpus, least=ALIGN * message, most=whole * message,
        )  # fmt: skip

    def block(self, track: Track) -> tuple[Op, ...]:
        plan, rank = self.source, track.rank
        mine = [
            (c, (c.src, c.src_channel) == (rank, track.channel), numbers)
            for c, numbers in zip(plan.connections, self.numbers, strict=True)
            if not c.local and (rank, track.channel) in ((c.src, c.src_channel),
                                                         (c.dst, c.dst_channel))
        ]  # fmt: skip
        tells = [numbers[1] for _, sends, numbers in mine if not sends]
        hears = [numbers[0] for _, sends, numbers in mine if sends]
        ops = [*_at_once("rlxsignal", tells), *_at_once("rlxwait", hears)]
        for phase, body in enumerate(track.phases):
            made = [op for at, step in enumerate(body) for op in self.ops(track, phase, at, step)]
            if not self.unit:
                ops += made
            elif made:
                inner = _with_nops(_merged(made), loops=True)
                ops.append(Op("pipeline", unit=self.unit, chunks=1, body=tuple(inner)))
        return tuple(_with_nops(_merged(ops)))

    def ops(self, track: Track, phase: int, at: int, step: Step) -> Iterable[Op]:
        plan, rank = self.source, track.rank
        connections = step.connections
        first = plan.connections[connections[0]]
        if step.op in (Verb.SIGNAL, Verb.WAIT):
            number = self.numbers[connections[0]]
            sends = plan.sends_on(track, connections[0])
            if first.local:
                name = "sem_release" if step.op is Verb.SIGNAL else "sem_acquire"
                return [Op(name, semaphores=(number[0],))]
            if sends != (step.op is Verb.SIGNAL):
                return []  # for a free slot
            name = "signal" if sends else "wait"
            return [Op(name, channel_type="memory", channels=(number[0 if sends else 1],))]
        own = Region((rank,), *self.whereabouts(rank, step.chunk), 1)
        if step.op is Verb.SEND:
            src = own
            if step.source is not None:
                src = self.slot(rank, self.taken[step.source], phase, at)
            dst = [
                self.slot(plan.connections[c].dst, self.rooms[c], phase, at) for c in connections
            ]
            parts = range(0, len(dst), MOST_AT_ONCE)
            several = [dst[first : first + MOST_AT_ONCE] for first in parts]
            return [
                Op("put", (src,) * len(some), tuple(some), channel_type="memory")
                for some in several
            ]
        slots = [self.slot(rank, self.taken[c], phase, at) for c in connections]
        if step.op is Verb.COPY:
            return [Op("copy", (slots[0],), (own,))]
        operands = (*slots[: step.ahead], own, *slots[step.ahead :])
        if step.ahead == 1:  # the sum of two values does not depend on their order
            operands = own, *slots
        return [Op("re", operands, (own,))]

    def slot(self, rank: int, rooms: dict[tuple[int, int], int], phase: int, at: int) -> Region:
        return Region((rank,), "s", rooms[phase, at], 1)

    def whereabouts(self, rank: int, chunk: int) -> tuple[str, int]:
        """Where a rank has a chunk of a group: buffer and number."""
        plan, size = self.source, self.source.size
        part, block = divmod(chunk, self.blocks)
        if plan.collective == "alltoall":
            source, target = divmod(block, size)
            if rank == source:
                return "i", target * self.each + part
            return "o", source * self.each + part
        buffer = "o" if plan.collective == "allgather" else "i"
        return buffer, block * self.each + part


def _steps_over(
    track: Track | None, connection: int, verbs: tuple[Verb, ...], forwards: bool = False
) -> list[list[tuple[int, int]]]:
    """The steps (phase, position) of a track that use the connection, phase by phase."""
    found = [
        [
            (phase, at) for at, step in enumerate(body)
            if (step.op in verbs and connection in step.connections)
            or (forwards and step.op is Verb.SEND and step.source == connection)
        ]
        for phase, body in enumerate(track.phases if track else ())
    ]  # fmt: skip
    return [phase for phase in found if phase]


def _flat(phases: Sequence[Sequence[tuple[int, int]]]) -> list[tuple[int, int]]:
    return [step for phase in phases for step in phase]


def _at_once(name: str, channels: Sequence[int]) -> list[Op]:
    parts = range(0, len(channels), MOST_AT_ONCE)
    several = [channels[first : first + MOST_AT_ONCE] for first in parts]
    return [Op(name, channel_type="memory", channels=tuple(some)) for some in several]


def _merged(ops: Sequence[Op]) -> list[Op]:
    """The ops, in which signals or waits that follow one another are one op."""
    made: list[Op] = []
    for op in ops:
        last = made[-1] if made else None
        if last and last.name == op.name and op.name not in FORMS and not op.body:
            channels, semaphores = last.channels + op.channels, last.semaphores + op.semaphores
            every = channels or semaphores
            if len(every) <= MOST_AT_ONCE and len(set(every)) == len(every):
                made[-1] = replace(last, channels=channels, semaphores=semaphores)
                continue
        made.append(op)
    return made


def _with_nops(ops: Sequence[Op], loops: bool = False) -> list[Op]:
    """The ops, with a nop wherever all threads of a block must have come so far: between a wait and
    what it is for, and between data and the signal for it."""
    made: list[Op] = []
    moved = heard = False
    for _ in range(2 if loops else 1):  # what an iteration leaves, the next one finds
        made = []
        for op in ops:
            tells = op.name in (*SIGNALS, "sem_release")
            if (moved and tells) or (heard and (tells or op.name in FORMS or op.body)):
                made.append(Op("nop"))
                moved = heard = False
            made.append(op)
            moved = moved or op.name in FORMS
            heard = heard or op.name in (*WAITS, "sem_acquire")
            if op.body:  # which ends with anything
                moved = heard = True
    return made
