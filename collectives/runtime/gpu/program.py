"""What the GPU plan interpreter (`kernels/plan/plan.cu`) is given: programs, tables, memory layout.

Pure data, made alike by every rank; addresses come from whoever has the memory. The layouts are
those of `kernels/plan/launch.h`, and a test compares them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.access import input_reads, passed_on, pushes
from linkweave.collectives.planning.plan import ALIGN, Op, Plan, Track
from linkweave.collectives.planning.verify import races, shortened
from linkweave.collectives.runtime.gpu.fuse import fused

MOST_RANKS = 64
MOST_PEERS = 64
LINE = 128
REPORT = 4
INPUT = -2
"""A step's source: its own chunk, as the caller gave it."""
SENDER, DATA = 1, 2
PUSHES = 1
LAST, PASSES_ON, DROPS, AHEAD = 1, 2, 4, 3
"""A step's flags; see `kernels/plan/launch.h`."""

SLOT_BYTES = 512 << 10
"""Data of one slot. With two slots for each of the 28 connections of a DGX-1's double tree that is
28 MB, which the L2 cache of an A100 or later holds."""
LINES_BYTES = 16 << 10
"""A chunk up to which data and flags travel in one store: half the bandwidth, and no barrier or
counter between the data and its reader. To be fitted on GPUs."""


class State(IntEnum):
    """First word of a block's report."""

    NOTHING = 0
    WAITS = 1
    TIMED_OUT = 2
    ABORTED = 3
    DONE = 4


END = np.dtype([("slot", "u8"), ("ready", "u8"), ("free", "u8"), ("peer", "u4"), ("pad", "u4")])
CURSOR = np.dtype([(name, "u4") for name in ("waited", "moved", "signalled", "slot")])
GROUP = np.dtype(
    [(name, "u8") for name in ("code", "ends", "cursors", "place", "report")]
    + [(name, "u4") for name in ("rank", "num_ends", "code_words", "pad")]
)
LAUNCH = np.dtype(
    [(name, "u8") for name in ("groups", "abort", "finals", "timeout_ns")]
    + [
        (name, "u4")
        for name in ("width", "num_chunks", "stride", "slots", "stripe", "low_latency", "divisor",
                     "ps_per_byte", "direct", "pad")
    ]
    + [(name, "u8", (MOST_RANKS,)) for name in ("buffers", "inputs")]
)  # fmt: skip


CHECK = np.dtype(
    [(name, "u8") for name in ("counters", "need", "abort", "timeout_ns")]
    + [(name, "u4") for name in ("tracks", "width")]
)


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """How a plan lies in memory: `width` blocks a track, each with `stripe` bytes of every slot.

    With `low_latency` slots hold lines of 4 bytes of data and 4 of flag.
    """

    width: int
    stripe: int
    low_latency: bool


def fit(plan: Plan, nbytes: int, width: int) -> tuple[Plan, LaunchConfig]:
    """The plan as the kernel runs it (`fused`), in as many chunks as fit its slots, and its config,
    for a message of `nbytes`.

    More chunks are proved with the plan's own where these are whole groups; fewer than one group
    raises PlanError. A short message takes one block and lines, which order nothing until they are
    read: so only where each wait for data comes just before the step that reads it. The config
    takes one of two values for each `width`, so one piece of memory serves all messages of a plan
    and a protocol.
    """
    plan = fused(plan)
    if plan.chunk_bytes(nbytes) > SLOT_BYTES:
        if plan.num_chunks < plan.stride:
            raise PlanError(
                f"{plan.algorithm}: {plan.num_chunks} chunks of {plan.chunk_bytes(nbytes)} bytes; "
                f"GPU slots take {SLOT_BYTES}, and fewer chunks than the {plan.stride} of a group "
                "cannot be divided"
            )
        chunks = -(-plan.volume(nbytes) // SLOT_BYTES)
        plan = plan.with_chunks(-(-chunks // plan.stride) * plan.stride)
        while plan.chunk_bytes(nbytes) > SLOT_BYTES:  # chunks of a part of the data only
            plan = plan.with_chunks(2 * plan.num_chunks)
    if plan.chunk_bytes(nbytes) <= LINES_BYTES and _read_at_once(plan):
        return plan, LaunchConfig(1, LINES_BYTES, True)
    return plan, LaunchConfig(width, -(-SLOT_BYTES // (width * ALIGN)) * ALIGN, False)


def _read_at_once(plan: Plan) -> bool:
    """Whether nothing but waits stands between each wait for data and the step that reads it."""
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
    """Where a plan's counters and slots lie in each rank's memory (byte offsets).

    Data-ready counters and slots lie at the receiver, slot-free counters at the sender; -1 where a
    connection carries no data.
    """

    nbytes: tuple[int, ...]
    ready: tuple[int, ...]
    free: tuple[int, ...]
    slot: tuple[int, ...]


def lay_out(plan: Plan, config: LaunchConfig) -> SlotLayout:
    """Counters first, then slots, in the order of the connections; all must be zero at first."""
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


@dataclass(frozen=True, slots=True)
class Program:
    """One track's code for the device, and the connections that its numbers of ends stand for."""

    track: Track
    code: NDArray[np.int32]
    ends: tuple[int, ...]


def programs(plan: Plan, rank: int) -> list[Program]:
    """The tracks of a rank.

    `code` is `[phases, phases + 1 offsets, steps]` with the steps of `Plan.encode`, in which
    connections are numbers into `ends`, the source of a SEND or REDUCE is `INPUT` where it takes
    what the caller gave (`input_reads`), and flags are those of the device: which steps push
    (`pushes`), and which are one with the SEND behind them (`passed_on`). Raises PlanError where a
    step has more peers than the kernel admits.
    """
    tracks = [s for s in plan.tracks if s.rank == rank]
    for step in (step for s in tracks for body in s.phases for step in body):
        if (n := len(step.connections)) > MOST_PEERS:
            raise PlanError(
                f"{plan.algorithm}: rank {rank} has a {step.op.name} with {n} peers; GPU "
                f"kernels take at most {MOST_PEERS} in one step"
            )
    whole, given, pushed = plan.encode(rank).tolist(), input_reads(plan), pushes(plan)
    together = passed_on(plan)
    phases = whole[1]
    found = []
    for i, track in enumerate(tracks):
        row = 2 + i * (phases + 1)
        first, stop = whole[row], whole[row + phases]
        shift = phases + 2 - first
        code = [phases, *(offset + shift for offset in whole[row : row + phases + 1])]
        number: dict[int, int] = {}
        at, position = first, 0
        while at < stop:
            op, chunk, flag, source, n = whole[at : at + 5]
            connections = whole[at + 5 : at + 5 + n]
            here = rank, track.channel, position
            if op in (Op.SIGNAL, Op.WAIT):
                flag = SENDER * flag | DATA * (not plan.connections[connections[0]].local)
            elif op == Op.REDUCE:
                flag = LAST * (flag & 1) | flag >> 1 << AHEAD
            else:
                flag = PUSHES * (here in pushed)
            if here in together and whole[at + 5 + n] == Op.SEND:
                flag |= PASSES_ON | DROPS * (not together[here])
            if here in given:
                source = INPUT
            elif source >= 0:
                source = number.setdefault(source, len(number))
            numbers = [number.setdefault(c, len(number)) for c in connections]
            code += [op, chunk, flag, source, n, *numbers]
            at, position = at + 5 + n, position + 1
        found.append(Program(track, np.array(code, np.int32), tuple(number)))
    return found


def may_push(plan: Plan) -> bool:
    """Whether ranks that see each other's buffers write results there; the same on all ranks."""
    if plan.collective == "alltoall" or plan.size > MOST_RANKS:  # chunks lie elsewhere; no room
        return False
    return _may_push(shortened(plan))


@lru_cache(maxsize=64)
def _may_push(plan: Plan) -> bool:
    return bool(pushes(plan)) and not races(plan, pushing=True)


def receivers(plan: Plan, ranks: Sequence[int]) -> list[int]:
    """Other ranks whose buffers these may write, where they push."""
    return sorted({c.dst for c in plan.connections if c.src in ranks} - {*ranks})


def ends(
    plan: Plan, layout: SlotLayout, program: Program, bases: Sequence[int], order: Sequence[int]
) -> NDArray[np.void]:
    """[ends] of END: the addresses at which one process sees them, with each rank's memory at
    `bases[rank]`; `order`: the ranks of the launch's buffers."""
    table = np.zeros(len(program.ends), END)
    for row, index in zip(table, program.ends, strict=True):
        c = plan.connections[index]
        if c.src == program.track.rank:
            row["peer"] = order.index(c.dst)
        row["ready"] = bases[c.dst] + layout.ready[index]
        if not c.local:
            row["free"] = bases[c.src] + layout.free[index]
            row["slot"] = bases[c.dst] + layout.slot[index]
    return table


def launch(
    plan: Plan, config: LaunchConfig, groups: int, abort: int, buffers: Sequence[tuple[int, int]],
    timeout: float, average: bool, ps_per_byte: int = 0, finals: int = 0,
    peers: Sequence[int] | None = None,
) -> NDArray[np.void]:  # fmt: skip
    """[1] of LAUNCH. `groups`, `abort`, `finals` are addresses, `timeout` is in seconds; `average`
    divides by the number of ranks. For each rank that this launch runs, in the groups' order, the
    buffer in which results go and that in which its values lie: the same one in place. `peers`: the
    buffers of `receivers`, to push into; None: nothing is pushed."""
    if len(buffers) > MOST_RANKS:
        raise PlanError(f"{len(buffers)} ranks in one launch; at most {MOST_RANKS}")
    made = np.zeros(1, LAUNCH)
    row = made[0]
    row["groups"], row["abort"], row["timeout_ns"] = groups, abort, int(timeout * 1e9)
    row["finals"] = finals
    row["width"], row["stripe"], row["low_latency"] = (
        config.width,
        config.stripe,
        config.low_latency,
    )
    row["num_chunks"], row["stride"], row["slots"] = plan.num_chunks, plan.stride, plan.slots
    row["divisor"], row["ps_per_byte"] = plan.size if average else 0, ps_per_byte
    row["buffers"][: len(buffers)], row["inputs"][: len(buffers)] = zip(*buffers, strict=True)
    if peers is not None:
        row["direct"] = 1
        row["buffers"][len(buffers) : len(buffers) + len(peers)] = peers
    return made


def chunk_places(plan: Plan, nbytes: int, rank: int) -> NDArray[np.int64]:
    """[chunks, 2]: first byte and bytes of every chunk of a message of `nbytes`.

    A chunk that a rank only passes on has a size there too, and no place.
    """
    place = np.array(plan.chunk_bounds(nbytes, rank), np.int64).reshape(-1, 2)
    place[:, 1] = plan.chunk_sizes(nbytes)
    return place
