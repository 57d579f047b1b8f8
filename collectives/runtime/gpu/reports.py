"""Read what the plan interpreter reports from GPUs: which tracks are blocked, and at which step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.planning.plan import Op, Plan
from linkweave.collectives.runtime.diagnose import Blocked, position_of, waits
from linkweave.collectives.runtime.gpu import program
from linkweave.collectives.runtime.gpu.program import REPORT, Program, State


def blocked_tracks(
    plan: Plan, width: int, programs: Sequence[tuple[int, Program]], report: NDArray[np.uint32]
) -> Iterator[tuple[State, Blocked]]:
    """Each thread block of one GPU that gave up or has been waiting for long, and its step."""
    rows = report[: len(programs) * width * REPORT].reshape(-1, width, REPORT)
    for (rank, p), row in zip(programs, rows, strict=True):
        for state, _, group, pc in row.tolist():
            if state in (State.WAITS, State.TIMED_OUT, State.ABORTED):
                yield State(state), _blocked(plan, rank, p, group, pc)


def _blocked(plan: Plan, rank: int, p: Program, group: int, pc: int) -> Blocked:
    """The step at `pc`: a WAIT, or a step that polls the flags of its slots' lines."""
    code = p.code.tolist()
    op, chunk, flag, source, n = code[pc : pc + 5]
    ends = code[pc + 5 : pc + 5 + n]
    # a REDUCE over lines does not report which peer's data is missing: name the first
    connection = p.ends[source if op == Op.SEND and source >= 0 else ends[0]]
    sender = op == Op.WAIT and bool(flag & program.SENDER)
    step, chunk = position_of(code, code[1], pc), group * plan.stride + chunk
    return waits(plan, connection, sender, rank, p.track.channel, step, chunk)


def describe(found: Sequence[tuple[State, Blocked]], skip: int | None = None) -> str:
    """`; ` and what it waits for, for each rank but `skip`."""
    first = {blocked.rank: blocked for _, blocked in reversed(found)}  # of a rank, its first track
    ranks = dict.fromkeys(blocked.rank for _, blocked in found)
    return "".join(f"; {first[rank]}" for rank in ranks if rank != skip)
