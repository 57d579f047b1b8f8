"""The proof that an execution plan of MSCCL++ is right, by the semantics of its executor.

A plan is carried out op by op, on values that are sets of contributions. Four things are shown, for
several executions one after another, in which ranks begin and end at different times:

1. Result: each output chunk is the sum of each rank's contribution once, or that of one rank.
2. Progress: no wait is in vain, and an execution leaves all counters as it has found them.
3. Order: of two accesses to the same memory, one of which writes, one is known to be over when the
   other begins. So the memory of no buffer is overwritten before it is read, and scratch memory is
   not used again too early, within an execution or from one to the next.
4. Links: ranks that reach one another have a link, if a topology is given.

What an access knows of is kept as a set of accesses. Threads of a block go on independently: thread
t does what has offset t modulo their number, in each op, and the first ones also raise and await
signals. So an op knows what its own threads did at the same offset, what was over at the last nop,
and what signals brought that a nop has handed on. Packets have no release: they hand on what was
over when the execution began, what other packets brought, and that what they were made of has been
read. Relaxed signals hand on reads, of what came before a nop, and no writes. A put over a port
channel reads its source at any later time; only a put that flushes tells when.

Memory is divided into units, of which iterations of pipelines, and slices that thread blocks share,
take some each: chunks of several lengths are walked, with parts that are left over. What holds for
some iterations holds for more, because each has the same ops; where scratch memory is used again
after so many, as many and two more are walked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import gcd, lcm
from typing import NoReturn

from linkweave.collectives.errors import PlanError
from linkweave.collectives.foreign import mscclpp
from linkweave.collectives.foreign.mscclpp import (
    FORMS,
    SIGNALS,
    WAITS,
    Channel,
    ExecutionPlan,
    Op,
    Region,
    letter,
)
from linkweave.collectives.foreign.mscclpp_rules import PUTS, check_rules, regions, reused_after
from linkweave.topology import Topology

MOST_STEPS = 1 << 20  # the most units that are moved
MOST_LENGTHS = 64  # the longest chunk, in units, up to which all lengths are walked
MOST_UNITS = 1 << 16
_WIDE, _PACKET = 16, 8
"""Bytes that a thread handles at once: threads of packets divide memory otherwise."""

Cell = tuple[int, str, int]
"""A unit of memory: rank, buffer, number. Packets have a buffer of their own, "p"."""


def verify(plan: ExecutionPlan, topology: Topology | None = None) -> str:
    """Returns what is remarkable about a plan that is right. Raises PlanError with the first fault.

    topology: rank r is its r-th GPU.
    """
    mscclpp.check(plan)
    check_rules(plan, topology)
    per, lengths = _lengths(plan)
    alike = True
    for units in lengths:
        alike = _Proof(plan, per, units).run() and alike
    return "" if alike else "ranks add in different orders, so their results may differ in bits"


def _lengths(plan: ExecutionPlan) -> tuple[dict[int, int], list[int]]:
    """The units of an iteration, by its bytes, and the lengths of chunks that are walked: of those
    that shares divide with all remainders, one each."""
    slices = lcm(*(op.share[1] for _, _, op in plan.ops()), 1)
    sizes = [op.unit for _, _, op in plan.ops() if op.body]
    each = gcd(*sizes) if sizes else 1
    per = {unit: 2 * unit // each for unit in sizes}
    largest = max(per.values(), default=0)
    if max(slices, 2 * largest) > MOST_LENGTHS:
        raise PlanError(
            f"verify walks chunks of up to {MOST_LENGTHS} units: shares of {slices} parts, and "
            f"pipelines of {largest} units, are too fine"
        )
    every = {*range(1, max(slices, 2 * largest + 1 if sizes else 1) + 1)}
    if sizes:
        first = max((value for gpu in plan.gpus for value in gpu.semaphores), default=0)
        again = reused_after(plan)
        last = largest * (again + 2)
        every |= {largest * (3 + first), last, last - 1}
    lengths = sorted(every)
    chunks = sum(sum(gpu.chunks.values()) for gpu in plan.gpus)
    times = max((op.chunks for _, _, op in plan.ops()), default=1)
    if max(chunks, times) * lengths[-1] > MOST_UNITS:
        raise PlanError(f"verify walks at most {MOST_UNITS} units of memory and of pipelines")
    return per, lengths


@dataclass
class _Channel:
    """One direction of a channel: what each signal knows, and what its rank did as it began."""

    name: str
    sent: list[tuple[int, int]] = field(default_factory=list)
    taken: int = 0


@dataclass
class _Block:
    """A thread block: what its threads know of, as sets of accesses.

    common: all of them. lanes: the first threads, by number, which raise and await signals.
    threads: those that handle an offset (offset, bytes at once): all, and what their packets may
    hand on; `packets` is that of all threads.
    """

    rank: int
    number: int
    common: int = 0
    packets: int = 0
    lanes: dict[int, int] = field(default_factory=dict)
    threads: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    used: dict[tuple[str, str, int], int] = field(default_factory=dict)
    at: str = ""
    waits: str = ""

    def lane(self, number: int) -> int:
        return self.lanes.get(number, self.common)

    def join(self) -> int:
        for known in self.lanes.values():
            self.common |= known
        for known, handed in self.threads.values():
            self.common |= known
            self.packets |= handed
        self.lanes.clear()
        self.threads.clear()
        self.used.clear()
        return self.common

    def use(self, way: str, kind: str, number: int, lane: int) -> None:
        """A channel or a semaphore is used by a thread: another one must have met it before."""
        if self.used.setdefault((way, kind, number), lane) != lane:
            raise PlanError(
                f"{self}: two threads use {kind} {number} without a nop between: which of them "
                "comes first is not fixed"
            )

    def __str__(self) -> str:
        return f"rank {self.rank}, thread block {self.number}, {self.at}"


def _fail(block: _Block, why: str) -> NoReturn:
    raise PlanError(f"{block}: {why}")


class _Values:
    """Values, numbered: the contributions in each, and the order in which they were added."""

    def __init__(self) -> None:
        self.holds: list[tuple[Cell, ...]] = []
        self._known: dict[tuple[object, ...], int] = {}

    def of(self, cell: Cell) -> int:
        return self._number(("of", cell), (cell,))

    def total(self, operands: tuple[int, ...]) -> int:
        if len(operands) == 1:
            return operands[0]
        if len(operands) == 2:  # whose sum does not depend on their order
            operands = min(operands), max(operands)
        holds = tuple(sorted(c for value in operands for c in self.holds[value]))
        return self._number(operands, holds)

    def _number(self, key: tuple[object, ...], holds: tuple[Cell, ...]) -> int:
        number = self._known.setdefault(key, len(self.holds))
        if number == len(self.holds):
            self.holds.append(holds)
        return number


class _Proof:
    """One walk of a plan, with chunks of so many units."""

    def __init__(self, plan: ExecutionPlan, per: dict[int, int], units: int) -> None:
        self.plan, self.size, self.per = plan, len(plan.gpus), per
        self.units = units
        """Units of a chunk."""
        reused = reused_after(plan) * max(per.values(), default=1)
        self.scratch_units = min(reused or units, units)
        self.values = _Values()
        self.cells: dict[Cell, int] = {}
        self.packets: dict[Cell, tuple[int, int, int]] = {}  # execution, value, known
        self.wrote: dict[Cell, int] = {}  # the bit of the last write
        self.reads: dict[Cell, int] = {}  # those since
        self.names: list[str] = []  # of accesses, by bit
        self.loads = 0  # the accesses that only read
        self.steps = 0
        self.channels = self._connect()
        self.proxies: dict[tuple[int, int], int] = defaultdict(int)  # of port channels
        self.semaphores = [list(gpu.semaphores) for gpu in plan.gpus]
        self.released: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(dict)
        self.acquired: dict[tuple[int, int], int] = defaultdict(int)
        self.most = self._most_released()
        self.met: dict[tuple[int, int], list[_Block]] = defaultdict(list)
        self.moved = False

    def _connect(self) -> dict[Channel, tuple[_Channel, _Channel]]:
        """For each channel of a rank, what it sends and what it receives."""
        found: dict[Channel, tuple[_Channel, _Channel]] = {}
        for mine, other in self.plan.partners().items():
            rank, kind, number = mine
            peer = self.plan.gpus[rank].peers(kind)[number]
            there = _Channel(f"{kind} channel {number} of rank {rank} to rank {peer}")
            if other is None:  # nobody listens
                found[mine] = there, _Channel(f"a {kind} channel of rank {peer} to rank {rank}")
            elif rank < peer:
                back = _Channel(f"{kind} channel {other[2]} of rank {peer} to rank {rank}")
                found[mine], found[other] = (there, back), (back, there)
        return found

    def _most_released(self) -> dict[tuple[int, int, int], int]:
        """How often a thread block releases a semaphore in an execution."""
        found: dict[tuple[int, int, int], int] = defaultdict(int)
        for rank, gpu in enumerate(self.plan.gpus):
            for number, ops in enumerate(gpu.blocks):
                for _, op, _ in self._calls(ops):
                    if op.name == "sem_release":
                        for semaphore in op.semaphores:
                            found[rank, semaphore, number] += 1
        return found

    # ---- executions --------------------------------------------------------------------------
    def run(self) -> bool:
        """Whether all ranks add in the same order."""
        ended = [0] * self.size  # what is known when the last execution of a rank ends
        alike = True
        for execution in range(3 if self.plan.double_scratch else 2):
            self.execution = execution
            self.begun = [self._fill(rank, known) for rank, known in enumerate(ended)]
            ended = self._execute()
            alike = self._results(ended) and alike
        return alike

    def _fill(self, rank: int, known: int) -> int:
        """The caller has its buffers: it fills the input, and may write to the output."""
        bit = self._event(f"rank {rank}'s caller fills its buffers")
        for buffer in "io":
            for unit in range(self.plan.gpus[rank].chunks[buffer] * self.units):
                cell = self._cell(rank, buffer, unit)
                self._write(cell, bit, known, self.values.of((rank, "?", -1)))
        for unit in range(self.plan.gpus[rank].chunks["i"] * self.units):
            self.cells[self._cell(rank, "i", unit)] = self.values.of((rank, "i", unit))
        return known | bit

    def _execute(self) -> list[int]:
        blocks = [
            _Block(rank, number, self.begun[rank])
            for rank, gpu in enumerate(self.plan.gpus) for number in range(len(gpu.blocks))
        ]  # fmt: skip
        running = [(block, self._run(block)) for block in blocks]
        self.moved = True
        while running and self.moved:
            self.moved = False
            running = [(block, steps) for block, steps in running if next(steps, "over") != "over"]
        if running:
            waiting = [f"{block} waits {block.waits}" for block, _ in running]
            more = f"; and {len(waiting) - 8} more" if len(waiting) > 8 else ""
            words = "; ".join(waiting[:8]) + more
            raise PlanError(f"deadlock in execution {self.execution + 1}: {words}")
        self._balanced()
        ended = list(self.begun)
        for block in blocks:
            ended[block.rank] |= block.join()
        return ended

    def _run(self, block: _Block) -> Iterator[str]:
        for at, op, offset in self._calls(self.plan.gpus[block.rank].blocks[block.number]):
            block.at = at
            for _ in self._carry_out(block, op, offset):
                yield "waits"
            self.moved = True

    def _calls(self, ops: tuple[Op, ...]) -> Iterator[tuple[str, Op, tuple[int, int]]]:
        """Each op that is carried out, with its place, and of a pipeline (first unit, units)."""
        for at, op in enumerate(ops):
            if not op.body:
                yield f"op {at}", op, (0, -1)
                continue
            per = self.per[op.unit]
            for i in range(-(-op.chunks * self.units // per)):
                for k, inner in enumerate(op.body):
                    yield f"op {at}.{k} of iteration {i}", inner, (i * per, per)

    def _carry_out(self, block: _Block, op: Op, offset: tuple[int, int]) -> Iterator[str]:
        if op.name in FORMS:
            yield from self._move(block, op, offset)
            if op.name in ("pws", "pwsf"):
                self._signal(block, op)
            for lane, number in enumerate(op.channels if op.name == "pwsf" else ()):
                block.lanes[lane] = block.lane(lane) | self.proxies[block.rank, number]
        elif op.name == "nop":
            block.join()
        elif op.name in SIGNALS:
            self._signal(block, op)
        elif op.name in WAITS:
            for lane, number in enumerate(op.channels):
                yield from self._wait(block, op, lane, number)
        elif op.name == "sem_release":
            for lane, number in enumerate(op.semaphores):
                block.use("releases", "semaphore", number, lane)
                self.semaphores[block.rank][number] += 1
                known = self.released[block.rank, number]
                known.setdefault(block.number, []).append(block.lane(lane))
        elif op.name == "sem_acquire":
            for lane, number in enumerate(op.semaphores):
                yield from self._acquire(block, lane, number)
        elif op.name == "barrier":
            yield from self._meet(block, op)

    # ---- signals -----------------------------------------------------------------------------
    def _signal(self, block: _Block, op: Op) -> None:
        for lane, number in enumerate(op.channels):
            block.use("sends over", f"{op.channel_type} channel", number, lane)
            known = block.lane(lane)
            relaxed = self.begun[block.rank] | (known & self.loads)
            if op.channel_type == "port":
                known |= self.proxies[block.rank, number]
            known = relaxed if op.name == "rlxsignal" else known
            self._channel(block, op, number)[0].sent.append((known, relaxed))

    def _channel(self, block: _Block, op: Op, number: int) -> tuple[_Channel, _Channel]:
        found = self.channels.get((block.rank, op.channel_type, number))
        if found is None:
            raise PlanError(f"{block}: {op} has no {op.channel_type} channel {number}")
        return found

    def _wait(self, block: _Block, op: Op, lane: int, number: int) -> Iterator[str]:
        block.use("waits on", f"{op.channel_type} channel", number, lane)
        channel = self._channel(block, op, number)[1]
        while channel.taken == len(channel.sent):
            block.waits = f"for a signal over {channel.name}"
            yield "waits"
        known = channel.sent[channel.taken][op.name == "rlxwait"]
        channel.taken += 1
        block.lanes[lane] = block.lane(lane) | known

    def _acquire(self, block: _Block, lane: int, number: int) -> Iterator[str]:
        """The k-th acquisition follows k releases, less the first value: of each block as many as
        others cannot have made instead."""
        block.use("acquires", "semaphore", number, lane)
        values, key = self.semaphores[block.rank], (block.rank, number)
        while values[number] <= 0:
            block.waits = f"for semaphore {number}"
            yield "waits"
        values[number] -= 1
        self.acquired[key] += 1
        least = self.acquired[key] - self.plan.gpus[block.rank].semaphores[number]
        rounds = self.execution + 1
        most = {b: n * rounds for (r, s, b), n in self.most.items() if (r, s) == key}
        for other, known in self.released[key].items():
            sure = least - (sum(most.values()) - most[other])
            if sure > 0:
                block.lanes[lane] = block.lane(lane) | known[min(sure, len(known)) - 1]

    def _meet(self, block: _Block, op: Op) -> Iterator[str]:
        """The barrier of so many thread blocks of a rank; of one, it is a nop."""
        if op.blocks == 1:
            block.join()
            return
        here = self.met[block.rank, op.barrier]
        if block in here:
            raise PlanError(f"{block} is at barrier {op.barrier} twice before {op.blocks} are")
        here.append(block)
        while len(here) < op.blocks:
            block.waits = f"at barrier {op.barrier} for {op.blocks - len(here)} more thread blocks"
            yield "waits"
        if block is here[-1]:
            known = handed = 0
            for other in here:
                known, handed = known | other.join(), handed | other.packets
            for other in here:
                other.common, other.packets = known, handed
            self.met[block.rank, op.barrier] = []

    def _balanced(self) -> None:
        for channel, _ in self.channels.values():
            if left := len(channel.sent) - channel.taken:
                raise PlanError(
                    f"{left} signals over {channel.name} are not waited for: the next execution "
                    "would take them for its own"
                )
        for rank, (values, gpu) in enumerate(zip(self.semaphores, self.plan.gpus, strict=True)):
            for number, (value, first) in enumerate(zip(values, gpu.semaphores, strict=True)):
                if value != first:
                    raise PlanError(
                        f"semaphore {number} of rank {rank} begins with {first} and ends with "
                        f"{value}: the next execution would go wrong"
                    )

    # ---- data --------------------------------------------------------------------------------
    def _move(self, block: _Block, op: Op, offset: tuple[int, int]) -> Iterator[str]:
        form = FORMS[op.name]
        port = op.channel_type == "port" and op.name in PUTS
        groups = [((a,), (b,)) for a, b in zip(op.src, op.dst, strict=True)] if form.pairs else [
            (op.src, op.dst)
        ]  # fmt: skip
        for k, (src, dst) in enumerate(groups):
            first = k if form.pairs else 0
            what = [letter(form.src, first + i) for i in range(len(src))]
            into = [letter(form.dst, first + i) for i in range(len(dst))]
            wide = _PACKET if set("pqn").intersection(what + into) else _WIDE
            sources = [self._units(block, r, w, op, offset) for r, w in zip(src, what, strict=True)]
            targets = [self._units(block, r, w, op, offset) for r, w in zip(dst, into, strict=True)]
            if len({len(cells) for cells in (*sources, *targets)}) > 1:
                _fail(block, "divides memory of different lengths")
            for j in range(len(sources[0])):
                read = [cell for cells in sources for cell in cells[j]]
                written = [cell for cells in targets for cell in cells[j]]
                yield from self._element(block, op, (j, wide), read, written, k if port else -1)

    def _units(
        self, block: _Block, region: Region, what: str, op: Op, offset: tuple[int, int]
    ) -> list[tuple[Cell, ...]]:
        """Each unit of a region that an op handles now, on all ranks of a switch's group."""
        share, of = op.share
        whole = region.size * self.units
        starts = [k * (whole // of) + min(k, whole % of) for k in (share, share + 1)]
        total = starts[1] - starts[0]
        first, count = offset if offset[1] >= 0 else (0, total)
        if first > total:
            _fail(block, f"{op} begins behind its chunks: they are shorter than the pipeline")
        start, stop = starts[0] + first, starts[0] + min(first + count, total)
        units: Iterable[int] = range(start, stop)
        per, ranks = self.units, region.ranks
        if region.buffer == "s" and self.scratch_units < self.units and what not in "pqn":
            if region.size > 1:
                _fail(block, f"{op} has several chunks of reused scratch memory")
            per = self.scratch_units
            units = (unit % per for unit in units)
        buffer = region.buffer
        if what in "pqn":
            buffer = f"p{self.execution % 2 if self.plan.double_scratch else 0}"
        return [
            tuple(self._cell(rank, buffer, region.index * per + unit) for rank in ranks)
            for unit in units
        ]

    def _element(
        self, block: _Block, op: Op, thread: tuple[int, int], read: list[Cell],
        written: list[Cell], lane: int,
    ) -> Iterator[str]:  # fmt: skip
        """Move one unit. Over a port channel the proxy of the lane does it."""
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise PlanError(f"verify moves at most {MOST_STEPS} units")
        if lane >= 0:
            block.use("sends over", "port channel", op.channels[lane], lane)
            proxy = block.rank, op.channels[lane]
            known, handed = block.lane(lane) | self.proxies[proxy], 0
        else:
            # by way of a switch, threads divide memory otherwise, and see it by another address
            by_switch = any(what in "mn" for _, what in regions(op))
            thread = (-1 - self.steps, 0) if by_switch else thread
            known, handed = block.threads.get(thread, (0, 0))
            known, handed = known | block.common, handed | block.packets | self.begun[block.rank]
        packets: list[int] = []
        for cell in read:
            if cell[1][0] == "p":
                while (got := self.packets.get(cell, (-1, 0, 0)))[0] != self.execution:
                    block.waits = f"for packets in {self._words(cell)}"
                    yield "waits"
                known, handed = known | got[2], handed | got[2]
                packets.append(got[1])
        words = f"{block}: {op}"
        loaded, stored = self._event(words), self._event(words)
        self.loads |= loaded
        values = [(cell[1][0], self._read(cell, loaded, known)) for cell in read]
        plain = [value for buffer, value in values if buffer != "p"]
        value = self.values.total((*packets, *plain))
        known, handed = known | loaded, handed | loaded
        for cell in written:
            if cell[1][0] == "p":
                known |= self._send(block, op, cell, known, handed, value)
            else:
                self._write(cell, stored, known, value)
        known |= stored
        if lane >= 0:
            self.proxies[proxy] = known
        else:
            block.threads[thread] = known, handed

    def _send(
        self, block: _Block, op: Op, packet: Cell, known: int, handed: int, value: int
    ) -> int:
        """Write packets, which carry the number of the execution. Returns the access."""
        bit = self._event(f"{block}: {op}")
        before = self.packets.get(packet, (-1, 0, 0))
        if before[:2] == (self.execution, value) and self.wrote[packet] & known:
            # the same once more changes nothing, but must be over before what comes later
            self.reads[packet] = self.reads.get(packet, 0) | bit
            return bit
        if before[0] == self.execution:
            where = f"{op} writes other packets to {self._words(packet)}"
            _fail(block, f"{where}, where readers cannot tell them apart")
        self._write(packet, bit, known, value)
        self.packets[packet] = self.execution, value, handed | bit
        return bit

    def _cell(self, rank: int, buffer: str, unit: int) -> Cell:
        """The memory: in place, input and output are one."""
        plan = self.plan
        if plan.inplace and buffer == "o":
            if plan.collective == "reducescatter":
                unit += rank * plan.gpus[rank].chunks["o"] * self.units
            if plan.collective == "allgather":  # whose output is the larger one
                unit -= rank * plan.gpus[rank].chunks["i"] * self.units
            return rank, "i", unit
        if buffer == "s" and plan.double_scratch:
            return rank, f"s{self.execution % 2}", unit
        return rank, buffer, unit

    def _event(self, name: str) -> int:
        self.names.append(name)
        return 1 << len(self.names) - 1

    def _read(self, cell: Cell, bit: int, known: int) -> int:
        self._ordered(cell, bit, known, self.wrote.get(cell, 0))
        self.reads[cell] = self.reads.get(cell, 0) | bit
        value = self.cells.get(cell)
        return self.values.of((cell[0], "?", -1)) if value is None else value

    def _write(self, cell: Cell, bit: int, known: int, value: int) -> None:
        self._ordered(cell, bit, known, self.wrote.get(cell, 0) | self.reads.get(cell, 0))
        self.wrote[cell], self.cells[cell] = bit, value
        self.reads.pop(cell, None)

    def _ordered(self, cell: Cell, bit: int, known: int, before: int) -> None:
        if unknown := before & ~known & ~bit:
            other = self.names[unknown.bit_length() - 1]
            raise PlanError(
                f"race for {self._words(cell)}, execution {self.execution + 1}: "
                f"{self.names[bit.bit_length() - 1]}, is not ordered after: {other}"
            )

    def _words(self, cell: Cell) -> str:
        rank, buffer, unit = cell
        per = self.scratch_units if buffer[0] == "s" else self.units
        words = {"i": "input", "o": "output", "s": "scratch", "p": "packets of scratch"}
        return f"{words[buffer[0]]} chunk {unit // per} of rank {rank}"

    # ---- results -----------------------------------------------------------------------------
    def _results(self, ended: list[int]) -> bool:
        alike = True
        for rank in range(self.size):
            bit = self._event(f"rank {rank}'s caller reads its result")
            ended[rank] |= bit
            for unit in range(self.plan.gpus[rank].chunks["o"] * self.units):
                cell = self._cell(rank, "o", unit)
                value = self._read(cell, bit, ended[rank])
                wanted = self._wanted(rank, unit)
                if (found := self.values.holds[value]) != wanted:
                    raise PlanError(
                        f"rank {rank} ends with output chunk {unit // self.units} = "
                        f"{self._sum(found)}, not {self._sum(wanted)}"
                    )
                if self.plan.collective == "allreduce":
                    first = self.cells[self._cell(0, "o", unit)]
                    alike = alike and value == first
        return alike

    def _wanted(self, rank: int, unit: int) -> tuple[Cell, ...]:
        """The contributions to a unit of a rank's output."""
        plan, ranks = self.plan, range(self.size)
        own, result = (plan.gpus[rank].chunks[b] * self.units for b in "io")
        if plan.collective == "allreduce":
            return tuple((r, "i", unit) for r in ranks)
        if plan.collective == "reducescatter":
            return tuple((r, "i", rank * result + unit) for r in ranks)
        if plan.collective == "allgather":
            return ((unit // own, "i", unit % own),)
        block = own // self.size
        return ((unit // block, "i", rank * block + unit % block),)

    def _sum(self, holds: tuple[Cell, ...]) -> str:
        words = ("other data" if b == "?" else f"{r}:{unit // self.units}" for r, b, unit in holds)
        return " + ".join(words) + " (rank:input chunk)"
