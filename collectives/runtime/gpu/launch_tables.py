"""The input of the GPU plan interpreter (`kernels/plan/plan.cu`): tables and memory layout.

Every rank computes the same data, except for addresses. The struct layouts are those of
`kernels/plan/launch.h`; a test compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.dataflow import input_reads, passed_on, pushes
from linkweave.collectives.planning.layout import ALIGN
from linkweave.collectives.planning.plan import Op, Plan, Step, Track
from linkweave.collectives.planning.verify import prove, races, shortened
from linkweave.kernels.gpu.arrays import fields

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


MAX_RANKS = 64
LINE = 128
REPORT = 4


@dataclass(frozen=True, slots=True)
class Setting:
    """How the interpreter runs chunks of up to `chunk_bytes`, which is also the size of a slot.

    At most `width` thread blocks run each track. With `low_latency` each store carries data and a
    flag (lines), which halves the bandwidth but needs no barrier or counter between ranks.
    """

    chunk_bytes: int
    width: int
    low_latency: bool


SETTINGS = (Setting(16 << 10, 4, True), Setting(512 << 10, 16, False))
"""By the size of chunks, ascending; larger chunks are divided. Not fitted to measurements yet.

Two slots of 512 KiB for each of the 28 connections of a DGX-1's double tree take 28 MB, which fits
the L2 cache of an A100 or later. Sixteen blocks a track are more than an H100 holds of eight ranks
with four tracks each (393 of 512)."""


class State(IntEnum):
    """The first word of a thread block's report."""

    NOTHING = 0
    WAITS = 1
    TIMED_OUT = 2
    ABORTED = 3
    DONE = 4


END = fields(("u8", "slot ready free"), ("u4", "peer pad"))
CURSOR = fields(("u4", "waited moved signalled slot"))
TRACK = fields(("u8", "code ends cursors chunks report"), ("u4", "rank num_ends code_words pad"))
CHECK = fields(("u8", "counters need stop abort timeout_ns"), ("u4", "tracks width"))
LAUNCH = fields(
    ("u8", "tracks stop abort finals timeout_ns"),
    ("u4", "width num_chunks stride slots stripe low_latency divisor ps_per_byte direct pad"),
    (f"({MAX_RANKS},)u8", "buffers inputs"),
)


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """`width` thread blocks run each track; each uses `stripe` data bytes of every slot.

    With `low_latency`, slots hold lines of 4 data bytes and a 4-byte flag.
    """

    width: int
    stripe: int
    low_latency: bool


def fit(
    plan: Plan, nbytes: int, width: int, settings: Sequence[Setting] = SETTINGS
) -> tuple[Plan, LaunchConfig]:
    """The plan as the kernel runs it (`fused`), and its launch config, for a message of `nbytes`.

    Chunks larger than the largest slot are divided: the plan's proof covers any number of whole
    groups, so a plan of fewer chunks than one group raises PlanError instead. Over lines a WAIT
    orders nothing until the data is read, so they require that each WAIT for data comes just before
    the step that reads it. The config is one of as many as there are settings, so all messages of
    a plan share that many regions of memory.
    """
    plan, most = fused(plan), settings[-1].chunk_bytes
    if plan.chunk_bytes(nbytes) > most:
        if plan.num_chunks < plan.stride:
            raise PlanError(
                f"{plan.algorithm}: {plan.num_chunks} chunks of {plan.chunk_bytes(nbytes)} bytes; "
                f"GPU slots take {most}, and fewer chunks than the {plan.stride} of a group "
                "cannot be divided"
            )
        chunks = -(-plan.volume(nbytes) // most)
        plan = plan.with_chunks(-(-chunks // plan.stride) * plan.stride)
        while plan.chunk_bytes(nbytes) > most:  # if the chunks cover only part of the data
            plan = plan.with_chunks(2 * plan.num_chunks)
    fitting = (s for s in settings if plan.chunk_bytes(nbytes) <= s.chunk_bytes)
    chosen = next(s for s in fitting if not s.low_latency or _read_at_once(plan))
    width = min(width, chosen.width)
    stripe = -(-chosen.chunk_bytes // (width * ALIGN)) * ALIGN
    return plan, LaunchConfig(width, stripe, chosen.low_latency)


def _read_at_once(plan: Plan) -> bool:
    """Whether only WAITs lie between each WAIT for data and the step that reads the data."""
    for track in plan.tracks:
        for body in track.phases:
            waited: set[int] = set()
            for step in body:
                if step.op is not Op.WAIT:
                    if not waited <= {*step.connections, step.source}:
                        return False
                    waited.clear()
                elif not plan.sends_on(track, step.connections[0]):
                    waited |= {i for i in step.connections if not plan.connections[i].local}
    return True


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Byte offsets of a plan's counters and slots in the ranks' memory, by connection.

    `nbytes` is the size of each rank's memory. Data-ready counters and slots are in the receiver's
    memory, slot-free counters in the sender's. `free` and `slot` are -1 for a connection that
    carries no data.
    """

    nbytes: tuple[int, ...]
    ready: tuple[int, ...]
    free: tuple[int, ...]
    slot: tuple[int, ...]


def lay_out(plan: Plan, config: LaunchConfig) -> SlotLayout:
    """Counters first, then slots, in connection order. The memory must be zeroed."""
    used = [0] * plan.size
    ready, free, slot = [], [], []
    counters = config.width * LINE
    for c in plan.connections:
        ready.append(used[c.dst])
        used[c.dst] += counters
        free.append(-1 if c.local else used[c.src])
        used[c.src] += 0 if c.local else counters
    ring = plan.slots * config.width * config.stripe * (2 if config.low_latency else 1)
    for c in plan.connections:
        slot.append(-1 if c.local else used[c.dst])
        used[c.dst] += 0 if c.local else ring
    return SlotLayout(tuple(used), tuple(ready), tuple(free), tuple(slot))


def may_push(plan: Plan) -> bool:
    """Whether ranks that see each other's buffers may push results into them; equal on all ranks.

    Not where chunks have different offsets on different ranks, as in an all-to-all.
    """
    if not plan.definition.same_offsets or plan.size > MAX_RANKS:
        return False
    return _may_push(shortened(plan))


@lru_cache(maxsize=64)
def _may_push(plan: Plan) -> bool:
    return bool(pushes(plan)) and not races(plan, pushing=True)


def receivers(plan: Plan, ranks: Sequence[int]) -> list[int]:
    """The other ranks whose buffers these ranks write when they push."""
    return sorted({c.dst for c in plan.connections if c.src in ranks} - {*ranks})


def ends(
    plan: Plan, layout: SlotLayout, program: TrackCode, base: Callable[[int, int], int],
    order: Sequence[int],
) -> NDArray[np.void]:  # fmt: skip
    """A program's table of ends: [ends] of END.

    `base(a, b)` is the address in this process of rank a's memory, as it shares it with rank b;
    `order` lists the ranks of the launch's buffers.
    """
    table = np.zeros(len(program.ends), END)
    for row, index in zip(table, program.ends, strict=True):
        c = plan.connections[index]
        if c.src == program.track.rank:
            row["peer"] = order.index(c.dst)
        row["ready"] = base(c.dst, c.src) + layout.ready[index]
        if not c.local:
            row["free"] = base(c.src, c.dst) + layout.free[index]
            row["slot"] = base(c.dst, c.src) + layout.slot[index]
    return table


def launch(
    plan: Plan, config: LaunchConfig, tracks: int, stop: int, abort: int,
    buffers: Sequence[tuple[int, int]], timeout: float, average: bool, ps_per_byte: int = 0,
    finals: int = 0, peers: Sequence[int] | None = None,
) -> NDArray[np.void]:  # fmt: skip
    """The argument of a launch: [1] of LAUNCH.

    `tracks`, `stop`, `abort` and `finals` are addresses; `timeout` is in seconds. `buffers` holds
    the (result, input) addresses of each rank in the launch, equal for a call in place; with
    `average` results are divided by the number of ranks. `peers` holds the buffers of `receivers`,
    into which results are pushed; None disables pushing.
    """
    if len(buffers) > MAX_RANKS:
        raise PlanError(f"{len(buffers)} ranks in one launch; at most {MAX_RANKS}")
    made = np.zeros(1, LAUNCH)
    row = made[0]
    row["tracks"], row["stop"], row["abort"] = tracks, stop, abort
    row["timeout_ns"] = int(timeout * 1e9)
    row["finals"], row["low_latency"] = finals, config.low_latency
    row["width"], row["stripe"] = config.width, config.stripe
    row["num_chunks"], row["stride"], row["slots"] = plan.num_chunks, plan.stride, plan.slots
    row["divisor"], row["ps_per_byte"] = plan.size if average else 0, ps_per_byte
    row["buffers"][: len(buffers)], row["inputs"][: len(buffers)] = zip(*buffers, strict=True)
    if peers is not None:
        row["direct"] = 1
        row["buffers"][len(buffers) : len(buffers) + len(peers)] = peers
    return made


def chunk_extents(plan: Plan, nbytes: int, rank: int) -> NDArray[np.int64]:
    """[chunks, 2]: offset and size in bytes of every chunk in a rank's buffer of `nbytes`.

    A chunk that the rank only passes on has a size, but its offset means nothing.
    """
    extents = np.array(plan.chunk_bounds(nbytes, rank), np.int64).reshape(-1, 2)
    extents[:, 1] = plan.chunk_sizes(nbytes)
    return extents


def fused(plan: Plan) -> Plan:
    """A verified plan with each REDUCE or COPY of `passed_on` just before the SEND of its result.

    Waits between the two steps move before them, signals behind them. A slot is then freed only
    after its content has been sent on, which might deadlock: the new order is proved like any
    plan, for these chunks and for any number of whole groups. If the proof fails, the plan is
    returned unchanged. The requirements of `shortened` do not depend on the order of a phase's
    steps, so one proof serves all long messages.
    """
    made = _reordered(shortened(plan))
    return made.with_chunks(plan.num_chunks) if made else plan


@lru_cache(maxsize=64)
def _reordered(plan: Plan) -> Plan | None:
    """The reordered plan; None if nothing changes or the new order is not proved."""
    made = replace(plan, tracks=tuple(_track(plan, s) for s in plan.tracks))
    if made == plan:
        return None
    try:
        for one in {made, made.with_chunks(plan.stride * (plan.slots + 2))}:
            prove(one)
    except PlanError:
        return None
    return made


def _track(plan: Plan, track: Track) -> Track:
    together, base, phases = passed_on(plan), 0, []
    for body in track.phases:
        order: list[Step] = []
        held: list[Step] = []  # the steps from one that is passed on up to its SEND
        for at, step in enumerate(body, base):
            if held:
                held.append(step)
                if step.op is Op.SEND:
                    order += _beside(held)
                    held = []
            elif (track.rank, track.channel, at) in together:
                held = [step]
            else:
                order.append(step)
        phases.append(tuple(order))
        base += len(body)
    return replace(track, phases=tuple(phases))


def _beside(held: list[Step]) -> list[Step]:
    first, *between, send = held
    waits = [s for s in between if s.op is Op.WAIT]
    return [*waits, first, send, *(s for s in between if s.op is Op.SIGNAL)]
