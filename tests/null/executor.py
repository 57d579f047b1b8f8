"""A literal executor of plans: real data, real counters, vector clocks; it takes nothing on trust.

It shares no code with the product but a plan's fields and the layout of its chunks, and does what
`kernels.plan.interpreter` does: whoever is not a connection's sender counts as its receiver,
counters only grow, nothing guards an access but the waits that stand there.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable, Iterator

import numpy as np

from linkweave.collectives.planning.plan import Op, Plan, Step

PER_CHUNK = 8  # elements of float64, of three kinds:
EXACT, ROUGH, ZEROS = slice(0, None, 4), slice(1, None, 2), slice(2, None, 4)
"""Sums without rounding; sums that depend on their order; the minimum of 0 and -0, of which the
first stands."""
Array = np.ndarray


def combine(a: Array, b: Array) -> Array:
    found = a + b
    found[ZEROS] = np.where(b < a, b, a)[ZEROS]
    return found


class Wrong(Exception):
    """What is wrong with a plan."""


class Executor:
    """One run of a plan, several calls in a row, in one order that the seed picks.

    The order does not matter where there is no race, and races are found by vector clocks: each
    counter is raised by one track, and its k-th wait takes its k-th signal.
    """

    def __init__(self, plan: Plan, seed: int = 0, calls: int | None = None) -> None:
        self.plan, self.rng = plan, random.Random(seed)
        # counters live on from call to call; in so many every slot is used again
        self.count = calls or plan.slots + 1
        size, n = plan.size, len(plan.connections)
        unit = {"allgather": size, "reduce_scatter": size, "alltoall": size * size}
        blocks = unit.get(plan.collective, 1)
        parts = plan.num_chunks // blocks
        self.nbytes = 8 * PER_CHUNK * parts * (1 if blocks == 1 else size)
        self.bounds = [plan.chunk_bounds(self.nbytes, rank) for rank in range(size)]
        self.slots: dict[tuple[int, int], Array] = {}
        self.done: dict[tuple[int, int], Counter[str]] = {}  # by (rank, connection)
        self.flags = {"ready": [0] * n, "free": [0] * n}
        self.told: dict[tuple[str, int, int], list[int]] = {}  # clocks of the signals
        count = len(plan.tracks) + size  # and one clock for the caller of each rank
        self.clock = [[0] * count for _ in range(count)]
        self.wrote: dict[Hashable, tuple[int, int]] = {}
        self.read: dict[Hashable, dict[int, int]] = {}

    # ---- memory ---------------------------------------------------------------------------
    def access(self, who: int, where: Hashable, write: bool) -> None:
        """Note an access; Wrong if one that it conflicts with is not known to be over."""
        clock = self.clock[who]
        clock[who] += 1
        before = [self.wrote[where]] if where in self.wrote else []
        if write:
            before += self.read.pop(where, {}).items()
        if any(at > clock[other] for other, at in before):
            raise Wrong(f"race at {where}")
        if write:
            self.wrote[where] = who, clock[who]
        else:
            self.read.setdefault(where, {})[who] = clock[who]

    def own(self, who: int, rank: int, chunk: int, write: bool) -> Array:
        first, stop = self.bounds[rank][chunk]
        if first == stop:  # passed on only: what stands at the buffer's start is taken for it
            first, stop = 0, 8 * PER_CHUNK
        self.access(who, ("own", rank, first), write)
        return self.buffers[rank][first // 8 : stop // 8]

    def slot(self, who: int, connection: int, number: int, write: bool) -> Array:
        where = connection, number % self.plan.slots
        self.access(who, ("slot", *where), write)
        return self.slots.setdefault(where, np.full(PER_CHUNK, np.nan))

    # ---- steps ----------------------------------------------------------------------------
    def cursor(self, rank: int, connection: int) -> Counter[str]:
        return self.done.setdefault((rank, connection), Counter())

    def sends(self, who: int, connection: int) -> bool:
        c, s = self.plan.connections[connection], self.plan.tracks[who]
        return (c.src, c.src_channel) == (s.rank, s.channel)

    def carry_out(self, who: int, at: int, chunk: int, step: Step) -> bool:
        """False where the step has to wait; `at` is its position in the track's code."""
        if step.op is Op.WAIT:
            return self.wait(who, step.connections[0])
        if step.op is Op.SIGNAL:
            self.signal(who, step.connections[0])
        else:
            self.move(who, at, chunk, step)
        return True

    def wait(self, who: int, i: int) -> bool:
        sends, cursor = self.sends(who, i), self.cursor(self.plan.tracks[who].rank, i)
        flag = "free" if sends else "ready"
        need = cursor["wait " + flag] + 1 - (self.plan.slots if sends else 0)
        if self.flags[flag][i] < need:
            return False
        cursor["wait " + flag] += 1
        if told := self.told.get((flag, i, need)):
            self.clock[who] = [*map(max, self.clock[who], told)]
        return True

    def signal(self, who: int, i: int) -> None:
        cursor = self.cursor(self.plan.tracks[who].rank, i)
        flag = "ready" if self.sends(who, i) else "free"
        cursor[flag] += 1
        self.flags[flag][i] = cursor[flag]
        self.clock[who][who] += 1
        self.told[flag, i, cursor[flag]] = [*self.clock[who]]

    def move(self, who: int, at: int, chunk: int, step: Step) -> None:
        rank = self.plan.tracks[who].rank
        if step.op is Op.SEND:
            if step.source is None:
                data = self.own(who, rank, chunk, write=False)
            else:
                data = self.take(who, step.source)
            for j in step.connections:
                cursor = self.cursor(rank, j)
                self.slot(who, j, cursor["sent"], write=True)[...] = data
                cursor["sent"] += 1
            return
        came = [self.take(who, j) for j in step.connections]
        if step.op is Op.REDUCE:
            self.reduce(who, chunk, step, came)
        else:
            self.own(who, rank, chunk, True)[...] = came[0]

    def reduce(self, who: int, chunk: int, step: Step, came: list[Array]) -> None:
        rank = self.plan.tracks[who].rank
        values = [*came[: step.ahead], self.own(who, rank, chunk, False), *came[step.ahead :]]
        total = values[0].copy()
        for value in values[1:]:
            total = combine(total, value)
        self.own(who, rank, chunk, True)[...] = total / (self.plan.size if step.last else 1)

    def take(self, who: int, connection: int) -> Array:
        cursor = self.cursor(self.plan.tracks[who].rank, connection)
        cursor["read"] += 1
        return self.slot(who, connection, cursor["read"] - 1, write=False)

    # ---- calls ----------------------------------------------------------------------------
    def inputs(self, call: int) -> list[Array]:
        """What each rank gives; sums of the exact elements can be divided by 1 to 8 ranks."""
        make = np.random.default_rng(call)
        numel = self.nbytes // 8 * (2 if self.plan.collective == "alltoall" else 1)
        found = []
        for _ in range(self.plan.size):
            data = make.random(numel) * 2.0 ** make.integers(-30, 30, numel)
            data[EXACT] = 840 * make.integers(1, 1 << 30, len(data[EXACT]))
            data[ZEROS] = make.choice([0.0, -0.0], len(data[ZEROS]))
            found.append(data)
        return found

    def calls(self, rank: int) -> Iterator[bool]:
        """All calls of a rank, a step at a time; yields whether something was done."""
        mine = [i for i, s in enumerate(self.plan.tracks) if s.rank == rank]
        caller = len(self.plan.tracks) + rank
        for call in range(self.count):
            self.buffers[rank] = self.given[call][rank].copy()
            for first, _ in sorted({*self.bounds[rank], (0, 0)}):
                self.access(caller, ("own", rank, first), write=True)
            for i in mine:
                self.clock[i] = [*map(max, self.clock[i], self.clock[caller])]
            work = {i: list(steps(self.plan, i))[::-1] for i in mine}
            while left := [i for i in mine if work[i]]:
                i, moved = self.rng.choice(left), False
                for other in [i, *left]:
                    if self.carry_out(other, *work[other][-1]):
                        work[other].pop()
                        moved = True
                        break
                yield moved
            for i in mine:
                self.clock[caller] = [*map(max, self.clock[i], self.clock[caller])]
            self.results[call][rank] = self.buffers[rank]
            self.give_back(rank, caller)

    def give_back(self, rank: int, caller: int) -> None:
        """The caller looks at its buffer."""
        for first, _ in sorted({*self.bounds[rank], (0, 0)}):
            self.access(caller, ("own", rank, first), write=False)

    def run(self) -> None:
        """Raise Wrong unless all calls end, with what the collective promises."""
        size = self.plan.size
        self.given = [self.inputs(call) for call in range(self.count)]
        self.buffers = [np.empty(0)] * size
        self.results: list[list[Array]] = [[np.empty(0)] * size for _ in range(self.count)]
        left = [self.calls(rank) for rank in range(size)]
        while left:
            self.rng.shuffle(left)
            told = [(rank, next(rank, None)) for rank in left]
            left = [rank for rank, moved in told if moved is not None]
            if left and not any(moved or moved is None for _, moved in told):
                raise Wrong("hangs")
        for i in range(len(self.plan.connections)):
            total: Counter[str] = Counter()
            for rank in range(size):
                total.update(self.done.get((rank, i), {}))
            for a, b in (("ready", "wait ready"), ("free", "wait free"), ("sent", "read")):
                if total[a] != total[b]:
                    raise Wrong(f"connection {i} does not come back to its first state: {total}")
        for call in range(self.count):
            self.check(self.given[call], self.results[call])

    def check(self, given: list[Array], found: list[Array]) -> None:
        plan = self.plan
        size, total = plan.size, sum(given) / plan.size
        for chunk in range(plan.num_chunks):
            bits = set()
            for rank in range(size):
                at = slice(*(n // 8 for n in self.bounds[rank][chunk]))
                got, source = found[rank][at], None
                match plan.collective:
                    case "broadcast":
                        source = plan.root
                    case "sendrecv":
                        source = {b: a for a, b in plan.root}.get(rank, rank)
                    case "allgather":
                        source = chunk % size
                    case "reduce" if rank != plan.root:
                        continue
                    case "reduce_scatter" if rank != chunk % size:
                        continue
                    case "alltoall":
                        source, target = divmod(chunk % size**2, size)
                        if rank != target:
                            continue
                if source is None:
                    right = (got[EXACT] == total[at][EXACT]).all()
                    bits.add(got.tobytes())
                else:
                    there = slice(*(n // 8 for n in self.bounds[source][chunk]))
                    right = (got == given[source][there]).all()
                if not right:
                    raise Wrong(f"chunk {chunk} of rank {rank}")
            if len(bits) > 1:
                raise Wrong(f"chunk {chunk} has other bits on other ranks")


def steps(plan: Plan, track: int) -> Iterator[tuple[int, int, Step]]:
    """(position in the track's code, chunk, step) in order."""
    base = 0
    for body in plan.tracks[track].phases:
        for group in range(-(-plan.num_chunks // plan.stride)):
            for at, step in enumerate(body, base):
                chunk = group * plan.stride + step.chunk
                if chunk < plan.num_chunks:
                    yield at, chunk, step
        base += len(body)


def is_right(plan: Plan) -> bool:
    """Whether all calls of the plan end with what the collective promises, without a race."""
    return not why_wrong(Executor(plan))


def why_wrong(executor: Executor) -> str:
    try:
        with np.errstate(all="ignore"):
            executor.run()
    except Wrong as wrong:
        return str(wrong)
    return ""
