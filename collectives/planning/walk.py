"""Carry out a plan's steps in one legal order: what the verifier and the reference share."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from collectives.errors import PlanError
from collectives.planning.plan import Op, Plan, Step, Stream


class Visit(NamedTuple):
    """One step as it is carried out; `slots` are the slot numbers of `step.connections`."""

    stream_index: int
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


class _Walk:
    """The counters of all connections, and how far each stream has come."""

    def __init__(self, plan: Plan, visit: Callable[[Visit], None]) -> None:
        self.plan, self.visit = plan, visit
        number = {(s.rank, s.channel): i for i, s in enumerate(plan.streams)}
        self.src = [number.get((c.src, c.src_channel), -1) for c in plan.connections]
        self.dst = [number.get((c.dst, c.dst_channel), -1) for c in plan.connections]
        self.local = [c.local for c in plan.connections]  # which have no slots
        n = len(plan.connections)
        self.ready, self.free = [0] * n, [0] * n  # signals given
        self.waited_free, self.waited_ready = [0] * n, [0] * n
        self.sent, self.read = [0] * n, [0] * n
        self.pending = [plan.steps(s) for s in plan.streams]
        self.heads = [next(p, None) for p in self.pending]

    def advance(self, index: int) -> bool:
        """Carry out one step of a stream if it can; False where it waits or is done."""
        head = self.heads[index]
        if head is None:
            return False
        at, chunk, step = head
        op, connections = step.op, step.connections
        slots: tuple[int, ...] = ()
        source_slot = -1
        if op is Op.WAIT:
            i = connections[0]
            if index == self.dst[i]:
                if self.ready[i] == self.waited_ready[i]:
                    return False
                self.waited_ready[i] += 1
            elif index == self.src[i]:
                if self.local[i]:
                    self.refuse(index, head, f"waits for a slot of {i}, which is only for order")
                if self.free[i] + self.plan.slots == self.waited_free[i]:
                    return False
                self.waited_free[i] += 1
            else:
                self.refuse(index, head, f"connection {i} does not end here")
        elif op is Op.SIGNAL:
            self.signal(index, head, connections[0])
        elif op is Op.SEND:
            if step.source is not None:
                source_slot = self.take(index, head, step.source)
            slots = tuple([self.put(index, head, i) for i in connections])
        else:
            slots = tuple([self.take(index, head, i) for i in connections])
        self.visit(Visit(index, self.plan.streams[index], at, chunk, step, slots, source_slot))
        self.heads[index] = next(self.pending[index], None)
        return True

    def signal(self, index: int, head: tuple[int, int, Step], i: int) -> None:
        if index == self.dst[i]:
            if self.free[i] == self.read[i]:
                self.refuse(
                    index, head,
                    f"frees a slot of connection {self.plan.connections[i]} before reading it",
                )  # fmt: skip
            self.free[i] += 1
        elif index == self.src[i]:
            if not self.local[i] and self.ready[i] == self.sent[i]:
                self.refuse(
                    index, head,
                    f"signals data on connection {self.plan.connections[i]} before sending it",
                )  # fmt: skip
            self.ready[i] += 1
        else:
            self.refuse(index, head, f"connection {i} does not end here")

    def put(self, index: int, head: tuple[int, int, Step], i: int) -> int:
        """The slot that is written next."""
        if index != self.src[i]:
            self.refuse(index, head, f"sends on connection {i}, which does not begin here")
        if self.waited_free[i] == self.sent[i]:
            self.refuse(
                index, head,
                f"writes connection {self.plan.connections[i]} without a WAIT for a free slot",
            )  # fmt: skip
        self.sent[i] += 1
        return (self.sent[i] - 1) % self.plan.slots

    def take(self, index: int, head: tuple[int, int, Step], i: int) -> int:
        """The slot that is read next."""
        if index != self.dst[i]:
            self.refuse(index, head, f"reads connection {i}, which does not end here")
        if self.waited_ready[i] == self.read[i]:
            self.refuse(
                index, head,
                f"reads connection {self.plan.connections[i]} without a WAIT for its data",
            )  # fmt: skip
        self.read[i] += 1
        return (self.read[i] - 1) % self.plan.slots

    def refuse(self, index: int, head: tuple[int, int, Step], words: str) -> None:
        at, chunk, step = head
        s = self.plan.streams[index]
        raise PlanError(
            f"rank {s.rank} channel {s.channel} step {at} ({step.op.name} of chunk {chunk}): "
            f"{words}"
        )

    def finish(self) -> None:
        """Raise PlanError where a stream still waits, or counters do not pair."""
        self.no_one_waits()
        for i, connection in enumerate(self.plan.connections):
            pairs = [("sent", self.sent[i], "read", self.read[i]),
                     ("data-ready signals", self.ready[i],
                      "waits for them", self.waited_ready[i])]  # fmt: skip
            if not connection.local:
                pairs += [("slot-free signals", self.free[i], "slots read", self.read[i]),
                          ("waits for a slot", self.waited_free[i], "sends", self.sent[i]),
                          ("data-ready signals", self.ready[i], "sends", self.sent[i])]  # fmt: skip
            for left, a, right, b in pairs:
                if a != b:
                    raise PlanError(f"connection {connection}: {a} {left}, but {b} {right}")

    def no_one_waits(self) -> None:
        stuck = []
        for index, (stream, head) in enumerate(zip(self.plan.streams, self.heads, strict=True)):
            if head is None:
                continue
            at, chunk, step = head
            i = step.connections[0]
            connection = self.plan.connections[i]
            sender = index == self.src[i]
            peer, what = (connection.dst, "slot") if sender else (connection.src, "data")
            stuck.append(
                f"rank {stream.rank} channel {stream.channel} step {at} waits for a {what} of "
                f"chunk {chunk} from rank {peer}"
            )
        if stuck:
            more = f"; and {len(stuck) - 4} more" if len(stuck) > 4 else ""
            raise PlanError(f"the plan hangs: {'; '.join(stuck[:4])}{more}")


def walk(plan: Plan, visit: Callable[[Visit], None], seed: int | None = None) -> None:
    """Call `visit` for every step, in an order that respects all waits.

    Each stream runs as far as it can before the next is tried; with a `seed`, runnable streams
    are picked at random one step at a time. Raises PlanError where the plan hangs (naming who
    waits for whom), touches a connection it has not waited for, or leaves counters unpaired.
    """
    state = _Walk(plan, visit)
    pick = random.Random(seed) if seed is not None else None
    left = list(range(len(plan.streams)))
    moved = True
    while moved:
        moved = False
        if pick:
            pick.shuffle(left)
        for index in left:
            while state.advance(index):
                moved = True
                if pick and pick.random() < 0.5:
                    break
        left = [index for index in left if state.heads[index] is not None]
    state.finish()
