"""Where ranks on GPUs stand, read from what their kernels report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.planning.plan import Op, Plan
from linkweave.collectives.runtime.diagnose import Blocked, position_of, waits
from linkweave.collectives.runtime.gpu import program
from linkweave.collectives.runtime.gpu.program import REPORT, Program, State


def standing(
    plan: Plan, width: int, programs: Sequence[tuple[int, Program]], report: NDArray[np.uint32]
) -> Iterator[tuple[State, Blocked]]:
    """Where each block of the ranks of one GPU stands that had to stop or has waited long."""
    rows = report[: len(programs) * width * REPORT].reshape(-1, width, REPORT)
    for (rank, p), row in zip(programs, rows, strict=True):
        for state, _, group, pc in row.tolist():
            if state in (State.WAITS, State.TIMED_OUT, State.ABORTED):
                yield State(state), _blocked(plan, rank, p, group, pc)


def _blocked(plan: Plan, rank: int, p: Program, group: int, pc: int) -> Blocked:
    """The step at which a program stands: a WAIT, or one that polls its slots' lines."""
    code = p.code.tolist()
    op, chunk, flag, source, n = code[pc : pc + 5]
    ends = code[pc + 5 : pc + 5 + n]
    # of a REDUCE over lines, which of its peers is missing is not known: the first is named
    connection = p.ends[source if op == Op.SEND and source >= 0 else ends[0]]
    sender = op == Op.WAIT and bool(flag & program.SENDER)
    step, chunk = position_of(code, code[1], pc), group * plan.stride + chunk
    return waits(plan, connection, sender, rank, p.track.channel, step, chunk)


def others(found: Sequence[tuple[State, Blocked]], first: Blocked | None) -> str:
    """One line for each rank beside the first one's."""
    seen = set() if first is None else {first.rank}
    words = ""
    for _, blocked in found:
        if blocked.rank not in seen:
            seen.add(blocked.rank)
            words += f"; {blocked}"
    return words
