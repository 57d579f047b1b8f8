"""Carry out a plan's steps in one legal order: what the verifier and the reference share."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from collectives.errors import PlanError
from collectives.planning.plan import Op, Plan, Step, Stream


@dataclass(frozen=True, slots=True)
class Visit:
    """One step as it is carried out; `slots` are the slot numbers of `step.connections`."""

    index: int  # of the stream
    stream: Stream
    at: int
    chunk: int
    step: Step
    slots: tuple[int, ...]
    source_slot: int

    def __str__(self) -> str:
        s = self.stream
        verb = self.step.op.name
        return f"rank {s.rank} channel {s.channel} step {self.at}: {verb} of chunk {self.chunk}"


def walk(plan: Plan, visit: Callable[[Visit], None], seed: int | None = None) -> None:
    """Call `visit` for every step, in an order that respects all waits.

    Each stream runs as far as it can before the next is tried; with a `seed`, runnable streams
    are picked at random one step at a time. Raises PlanError where the plan hangs (naming who
    waits for whom), touches a connection it has not waited for, or leaves counters unpaired.
    """
    ends = [((c.src, c.src_channel), (c.dst, c.dst_channel)) for c in plan.connections]
    n = len(plan.connections)
    ready, free = [0] * n, [0] * n  # signals given
    waited_free, waited_ready = [0] * n, [0] * n
    sent, read = [0] * n, [0] * n

    def may_pass(me: tuple[int, int], i: int) -> bool:
        if me == ends[i][1]:
            return ready[i] > waited_ready[i]
        if plan.connections[i].local:
            return True
        return free[i] + plan.slots > waited_free[i]

    def use(condition: bool, words: str, here: str) -> None:
        if not condition:
            raise PlanError(f"{here}: {words}")

    def carry_out(index: int, stream: Stream, at: int, chunk: int, step: Step) -> None:
        me = (stream.rank, stream.channel)
        here = f"rank {me[0]} channel {me[1]} step {at} ({step.op.name} of chunk {chunk})"
        for i in (*step.connections, *(() if step.source is None else (step.source,))):
            use(0 <= i < n and me in ends[i], f"connection {i} does not end here", here)
        slots: list[int] = []
        source_slot = -1
        if step.op is Op.WAIT or step.op is Op.SIGNAL:
            for i in step.connections:
                sender = me == ends[i][0]
                if step.op is Op.WAIT:
                    (waited_free if sender else waited_ready)[i] += 1
                elif sender:
                    use(
                        plan.connections[i].local or ready[i] < sent[i],
                        f"signals data on connection {plan.connections[i]} before sending it",
                        here,
                    )
                    ready[i] += 1
                else:
                    use(
                        free[i] < read[i],
                        f"frees a slot of connection {plan.connections[i]} before reading it",
                        here,
                    )
                    free[i] += 1
        elif step.op is Op.SEND:
            if step.source is not None:
                i = step.source
                use(me == ends[i][1], f"forwards a slot it does not receive ({i})", here)
                use(
                    waited_ready[i] > read[i],
                    f"reads connection {plan.connections[i]} without a WAIT for its data",
                    here,
                )
                source_slot = read[i] % plan.slots
                read[i] += 1
            for i in step.connections:
                use(me == ends[i][0], f"sends on connection {i}, which it receives", here)
                use(
                    waited_free[i] > sent[i],
                    f"writes connection {plan.connections[i]} without a WAIT for a free slot",
                    here,
                )
                slots.append(sent[i] % plan.slots)
                sent[i] += 1
        else:
            for i in step.connections:
                use(me == ends[i][1], f"reads connection {i}, which it sends", here)
                use(
                    waited_ready[i] > read[i],
                    f"reads connection {plan.connections[i]} without a WAIT for its data",
                    here,
                )
                slots.append(read[i] % plan.slots)
                read[i] += 1
        visit(Visit(index, stream, at, chunk, step, tuple(slots), source_slot))

    pending = [plan.steps(s) for s in plan.streams]
    heads = [next(p, None) for p in pending]
    pick = random.Random(seed) if seed is not None else None

    def advance(index: int) -> bool:
        """Carry out one step of a stream if it can; False where it waits or is done."""
        head, stream = heads[index], plan.streams[index]
        if head is None:
            return False
        at, chunk, step = head
        me = (stream.rank, stream.channel)
        if step.op is Op.WAIT and not all(
            may_pass(me, i) for i in step.connections if 0 <= i < n and me in ends[i]
        ):
            return False
        carry_out(index, stream, at, chunk, step)
        heads[index] = next(pending[index], None)
        return True

    moved = True
    while moved:
        moved = False
        order = list(range(len(plan.streams)))
        if pick:
            pick.shuffle(order)
        for index in order:
            while advance(index):
                moved = True
                if pick and pick.random() < 0.5:
                    break
    _no_one_waits(plan, heads)
    for i, connection in enumerate(plan.connections):
        pairs = [("sent", sent[i], "read", read[i]),
                 ("data-ready signals", ready[i], "waits for them", waited_ready[i])]  # fmt: skip
        if not connection.local:
            pairs += [("slot-free signals", free[i], "slots read", read[i]),
                      ("waits for a slot", waited_free[i], "sends", sent[i]),
                      ("data-ready signals", ready[i], "sends", sent[i])]  # fmt: skip
        for left, a, right, b in pairs:
            if a != b:
                raise PlanError(f"connection {connection}: {a} {left}, but {b} {right}")


def _no_one_waits(plan: Plan, heads: list[tuple[int, int, Step] | None]) -> None:
    stuck = []
    for stream, head in zip(plan.streams, heads, strict=True):
        if head is None:
            continue
        at, chunk, step = head
        connection = plan.connections[step.connections[0]]
        sender = (connection.src, connection.src_channel) == (stream.rank, stream.channel)
        peer, what = (connection.dst, "slot") if sender else (connection.src, "data")
        stuck.append(
            f"rank {stream.rank} channel {stream.channel} step {at} waits for a {what} of "
            f"chunk {chunk} from rank {peer}"
        )
    if stuck:
        shown = "; ".join(stuck[:4]) + (f"; and {len(stuck) - 4} more" if len(stuck) > 4 else "")
        raise PlanError(f"the plan hangs: {shown}")
