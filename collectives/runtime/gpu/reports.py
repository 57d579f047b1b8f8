"""Read what the plan interpreter reports from GPUs: which tracks are blocked, and at which step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.runtime.diagnose import Blocked, waits
from linkweave.collectives.runtime.gpu.actions import Program
from linkweave.collectives.runtime.gpu.program import REPORT, State


def blocked_tracks(
    plan: Plan, width: int, programs: Sequence[tuple[int, Program]], report: NDArray[np.uint32]
) -> Iterator[tuple[State, Blocked]]:
    """Each thread block of one GPU that gave up or has been waiting for long, and its step."""
    rows = report[: len(programs) * width * REPORT].reshape(-1, width, REPORT)
    for (rank, p), row in zip(programs, rows, strict=True):
        for state, _, group, pc in row.tolist():
            if state in (State.WAITS, State.TIMED_OUT, State.ABORTED):
                w = p.waits[pc]
                chunk = group * plan.stride + w.chunk
                yield (
                    State(state),
                    waits(plan, w.connection, w.sender, rank, p.track.channel, w.step, chunk),
                )


def describe(found: Sequence[tuple[State, Blocked]], skip: int | None = None) -> str:
    """`; ` and what it waits for, for each rank but `skip`."""
    first = {blocked.rank: blocked for _, blocked in reversed(found)}  # of a rank, its first track
    ranks = dict.fromkeys(blocked.rank for _, blocked in found)
    return "".join(f"; {first[rank]}" for rank in ranks if rank != skip)
