"""Encode a rank's tracks for the GPU plan interpreter (`kernels/plan/plan.cu`) as actions.

An action is a run of WAITs, at most one step that moves data (fused with the SEND of its result),
and a run of SIGNALs, with a barrier of the thread block between. The waits of a run take one thread
each, and so do its signals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.dataflow import input_reads, passed_on, pushes
from linkweave.collectives.planning.plan import Op, Plan, Step, Track

MAX_PEERS = 64
LENGTH, CHUNK, FLAGS, NUM_WAITS, NUM_OPERANDS, NUM_OUTPUTS, NUM_SIGNALS, HEADER = range(8)
"""The words of an action's header; see `kernels/plan/launch.h`."""
OWN, INPUT = -1, -2
"""Operands and outputs that are the rank's own chunk: of the result, of the call's input."""
SENDER, DATA = 1, 2
"""Flags of a wait or a signal."""
AVERAGES, COMPLETES, PUSHED, PUSHES, KEEPS = 1, 2, 4, 8, 16
"""Flags of an action."""


@dataclass(frozen=True, slots=True)
class Wait:
    """What a thread block that waits at an offset of the code waits for."""

    step: int
    """The position of the step in the track."""
    chunk: int
    connection: int
    sender: bool


@dataclass(frozen=True, slots=True)
class TrackCode:
    """A track's code for the device; `ends[i]` is the connection that the code calls i.

    `waits` maps each offset in the code at which a thread block can wait to what it waits for.
    """

    track: Track
    code: NDArray[np.int32]
    ends: tuple[int, ...]
    waits: Mapping[int, Wait]


Placed = tuple[int, Step]
"""A step, and its position in the track."""


@dataclass(slots=True)
class Action:
    """The steps of an action. `move` moves data; `send` is a SEND, of its result if there is one
    (`move` is then a REDUCE or COPY)."""

    waits: list[Placed] = field(default_factory=list)
    move: Placed | None = None
    send: Placed | None = None
    signals: list[Placed] = field(default_factory=list)


def actions(plan: Plan, track: Track, phase: int) -> list[Action]:
    """Divide a phase of a track into actions.

    Only neighbouring steps share an action. The counters of a run are awaited or raised in any
    order, so a run names a connection once.
    """
    together, found = passed_on(plan), [Action()]
    base = sum(len(body) for body in track.phases[:phase])
    for at, step in enumerate(track.phases[phase], base):
        last = found[-1]
        if step.op is Op.SIGNAL:
            if named(last.signals, step):
                found.append(last := Action())
            last.signals.append((at, step))
            continue
        fused = last.move and not last.signals and (
            last.move[0] == at - 1 and (track.rank, track.channel, at - 1) in together
        )  # fmt: skip
        again = step.op is Op.WAIT and named(last.waits, step)
        if (last.signals or last.move or last.send or again) and not (step.op is Op.SEND and fused):
            found.append(last := Action())
        if step.op is Op.WAIT:
            last.waits.append((at, step))
        elif step.op is Op.SEND:
            last.send = at, step
        else:
            last.move = at, step
    return [a for a in found if a.waits or a.move or a.send or a.signals]


def named(steps: Sequence[Placed], step: Step) -> bool:
    """Whether one of the WAITs or SIGNALs has the step's connection."""
    return any(other.connections == step.connections for _, other in steps)


def programs(plan: Plan, rank: int) -> list[TrackCode]:
    """The programs of a rank's tracks.

    `code` is `[phases, phases + 1 offsets, actions]`. Raises PlanError if a step has more than
    MAX_PEERS peers.
    """
    tracks = [s for s in plan.tracks if s.rank == rank]
    for step in (step for s in tracks for body in s.phases for step in body):
        if (n := len(step.connections)) > MAX_PEERS:
            raise PlanError(
                f"{plan.algorithm}: rank {rank} has a {step.op.name} with {n} peers; GPU "
                f"kernels take at most {MAX_PEERS} in one step"
            )
    return [_Encoder(plan, track).program() for track in tracks]


class _Encoder:
    """Encodes one track."""

    def __init__(self, plan: Plan, track: Track) -> None:
        self.plan, self.track = plan, track
        self.given, self.pushed, self.together = input_reads(plan), pushes(plan), passed_on(plan)
        self.number: dict[int, int] = {}  # of each connection
        self.code: list[int] = []
        self.waits: dict[int, Wait] = {}

    def program(self) -> TrackCode:
        phases = len(self.track.phases)
        self.code = [phases, *[0] * (phases + 1)]
        for phase in range(phases):
            self.code[1 + phase] = len(self.code)
            for action in actions(self.plan, self.track, phase):
                self._add(action)
        self.code[1 + phases] = len(self.code)
        code = np.array(self.code, np.int32)
        return TrackCode(self.track, code, tuple(self.number), self.waits)

    def _end(self, connection: int) -> int:
        return self.number.setdefault(connection, len(self.number))

    def _add(self, action: Action) -> None:
        start, flags, chunk = len(self.code), 0, 0
        operands: list[int] = []
        outputs: list[int] = []
        if placed := action.move or action.send:
            at, step = placed
            flags, chunk, operands = self._flags(action), step.chunk, self._operands(at, step)
        if action.send:
            outputs += map(self._end, action.send[1].connections)
            # where a block waits until an emulated link has sent lines
            self.waits[start] = Wait(action.send[0], chunk, action.send[1].connections[0], True)
        if flags & KEEPS:
            outputs.append(OWN)
        counts = len(action.waits), len(operands), len(outputs), len(action.signals)
        self.code += [0, chunk, flags, *counts]
        for at, step in action.waits:
            self._counter(at, step)
        if placed:
            self._polls(*placed, operands)
        self.code += operands + outputs
        for at, step in action.signals:
            self._counter(at, step)
        self.code[start] = len(self.code) - start

    def _counter(self, at: int, step: Step) -> None:
        """Add a WAIT or SIGNAL. (A SIGNAL waits until an emulated link has sent the data.)"""
        connection = step.connections[0]
        sender = self.plan.sends_on(self.track, connection)
        flags = SENDER * sender | DATA * (not self.plan.connections[connection].local)
        self.waits[len(self.code)] = Wait(at, step.chunk, connection, sender)
        self.code += [step.chunk, 4 * self._end(connection) + flags]

    def _polls(self, at: int, step: Step, operands: Sequence[int]) -> None:
        """Note that over lines the block waits at each operand, which comes next in the code."""
        connections = tuple(self.number)
        for i, operand in enumerate(operands, len(self.code)):
            if operand >= 0:
                self.waits[i] = Wait(at, step.chunk, connections[operand], False)

    def _flags(self, action: Action) -> int:
        found = 0
        if action.send:
            found |= PUSHES * (self._here(action.send[0]) in self.pushed)
        if action.move:
            at, step = action.move
            dropped = action.send and not self.together[self._here(at)]
            found |= AVERAGES * step.last | COMPLETES * (step.last or step.op is Op.COPY)
            found |= PUSHED * (step.op is Op.COPY and self._here(at) in self.pushed)
            found |= KEEPS * (not dropped)
        return found

    def _operands(self, at: int, step: Step) -> list[int]:
        """The operands of a step in the order in which they are combined."""
        own = INPUT if self._here(at) in self.given else OWN
        if step.op is Op.SEND:
            return [own if step.source is None else self._end(step.source)]
        found = [self._end(connection) for connection in step.connections]
        if step.op is Op.REDUCE:
            found.insert(step.ahead, own)
        return found

    def _here(self, at: int) -> tuple[int, int, int]:
        return self.track.rank, self.track.channel, at
