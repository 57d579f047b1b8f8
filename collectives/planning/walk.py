"""Walks of a plan: its steps in a legal order, for the verifier and the reference executor."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple, NoReturn

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.plan import Op, Plan, Step, Track


class Visit(NamedTuple):
    """One execution of a SEND, REDUCE or COPY; `slots` has the slot for each connection."""

    track_index: int
    track: Track
    at: int
    chunk: int
    step: Step
    slots: tuple[int, ...]
    source_slot: int

    def __str__(self) -> str:
        s = self.track
        verb = self.step.op.name
        return f"rank {s.rank} channel {s.channel} step {self.at}: {verb} of chunk {self.chunk}"


_OnMove = Callable[[Visit], None]
_OnSync = Callable[[int, int, Op, int, bool], None]


class _Walk:
    """The counters of all connections, and the current step of each track."""

    def __init__(
        self, plan: Plan, visit: _OnMove, sync: _OnSync | None, pick: random.Random | None
    ) -> None:
        self.plan, self.visit, self.sync, self.pick = plan, visit, sync, pick
        number = {(s.rank, s.channel): i for i, s in enumerate(plan.tracks)}
        self.src = [number.get((c.src, c.src_channel), -1) for c in plan.connections]
        self.dst = [number.get((c.dst, c.dst_channel), -1) for c in plan.connections]
        self.local = [c.local for c in plan.connections]  # those have no slots
        n = len(plan.connections)
        self.ready, self.free = [0] * n, [0] * n  # signals raised
        self.waited_free, self.waited_ready = [0] * n, [0] * n
        self.sent, self.read = [0] * n, [0] * n
        self.moved = True
        self.heads: dict[int, tuple[int, int, Step]] = {}  # the step of each unfinished track

    def run(self) -> None:
        left = [self.track(index) for index in range(len(self.plan.tracks))]
        while self.moved:
            self.moved = False
            if self.pick:
                self.pick.shuffle(left)
            left = [track for track in left if next(track, True) is None]

    def track(self, index: int) -> Iterator[None]:
        """Run a track; yields while it waits, and with a seed also at random."""
        plan, sync, pick = self.plan, self.sync, self.pick
        track = plan.tracks[index]
        ready, waited_ready = self.ready, self.waited_ready
        free, waited_free = self.free, self.waited_free
        for at, chunk, step in plan.steps(track):
            op, i = step.op, step.connections[0]
            self.heads[index] = at, chunk, step
            if op is Op.WAIT:
                sender = index != self.dst[i]
                if not sender:
                    while ready[i] == waited_ready[i]:
                        yield
                    waited_ready[i] += 1
                else:
                    self.may_wait(index, i)
                    while free[i] + plan.slots == waited_free[i]:
                        yield
                    waited_free[i] += 1
                if sync:
                    sync(index, chunk, op, i, sender)
            elif op is Op.SIGNAL:
                sender = self.signal(index, i)
                if sync:
                    sync(index, chunk, op, i, sender)
            else:
                taken = -1 if step.source is None else self.take(index, step.source)
                use = self.put if op is Op.SEND else self.take
                numbers = tuple([use(index, i) for i in step.connections])
                self.visit(Visit(index, track, at, chunk, step, numbers, taken))
            self.moved = True
            if pick and pick.random() < 0.5:
                yield
        self.heads.pop(index, None)

    def may_wait(self, index: int, i: int) -> None:
        if index != self.src[i]:
            self.refuse(index, f"connection {i} does not end here")
        if self.local[i]:
            self.refuse(index, f"waits for a slot of {i}, which only orders steps")

    def signal(self, index: int, i: int) -> bool:
        """Raise a counter, and return whether the track is the connection's sender."""
        if index == self.dst[i]:
            if self.free[i] == self.read[i]:
                self.refuse(index, f"frees a slot of connection {self.name(i)} before reading it")
            self.free[i] += 1
            return False
        if index != self.src[i]:
            self.refuse(index, f"connection {i} does not end here")
        if not self.local[i] and self.ready[i] == self.sent[i]:
            self.refuse(index, f"signals data on connection {self.name(i)} before sending it")
        self.ready[i] += 1
        return True

    def put(self, index: int, i: int) -> int:
        """Return the slot that is written next."""
        if index != self.src[i]:
            self.refuse(index, f"sends on connection {i}, which does not begin here")
        if self.waited_free[i] == self.sent[i]:
            self.refuse(index, f"writes connection {self.name(i)} without a WAIT for a free slot")
        self.sent[i] += 1
        return (self.sent[i] - 1) % self.plan.slots

    def take(self, index: int, i: int) -> int:
        """Return the slot that is read next."""
        if index != self.dst[i]:
            self.refuse(index, f"reads connection {i}, which does not end here")
        if self.waited_ready[i] == self.read[i]:
            self.refuse(index, f"reads connection {self.name(i)} without a WAIT for its data")
        self.read[i] += 1
        return (self.read[i] - 1) % self.plan.slots

    def name(self, i: int) -> str:
        return str(self.plan.connections[i])

    def refuse(self, index: int, words: str) -> NoReturn:
        at, chunk, step = self.heads[index]
        s = self.plan.tracks[index]
        raise PlanError(
            f"rank {s.rank} channel {s.channel} step {at} ({step.op.name} of chunk {chunk}): "
            f"{words}"
        )

    def finish(self) -> None:
        """Raise PlanError if a track still waits, or if counters do not pair."""
        self.check_hangs()
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

    def check_hangs(self) -> None:
        stuck = []
        for index, (at, chunk, step) in sorted(self.heads.items()):
            track = self.plan.tracks[index]
            i = step.connections[0]
            connection = self.plan.connections[i]
            sender = index == self.src[i]
            peer, what = (connection.dst, "a slot") if sender else (connection.src, "data")
            stuck.append(
                f"rank {track.rank} channel {track.channel} step {at} waits for {what} of "
                f"chunk {chunk} from rank {peer}"
            )
        if stuck:
            more = f"; and {len(stuck) - 4} more" if len(stuck) > 4 else ""
            raise PlanError(f"the plan hangs: {'; '.join(stuck[:4])}{more}")


def walk(plan: Plan, visit: _OnMove, seed: int | None = None, sync: _OnSync | None = None) -> None:
    """Call `visit` for every SEND, REDUCE and COPY, in an order that respects all waits.

    `sync` is called for every SIGNAL and WAIT in between, with the track's index, the chunk, the
    op, the connection, and whether the track is its sender. Each track runs until it waits before
    the next one runs; with a `seed`, tracks alternate at random. Raises PlanError if the plan hangs
    (saying who waits for whom), accesses a connection without waiting for it, or leaves counters
    unpaired.
    """
    state = _Walk(plan, visit, sync, random.Random(seed) if seed is not None else None)
    state.run()
    state.finish()
