"""What all machines that carry out plans have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.runtime.buffer import Buffer


class Executor(Protocol):
    """Carries out plans for some ranks: `Reference` for all of them, `CpuExecutor` for one,
    `GpuRanks` for those of its process.

    The simulator is none: it moves no bytes. What ranks say to each other beside a plan's own
    signals is `control.Control`.
    """

    @property
    def ranks(self) -> Sequence[int]:
        """The plan's ranks that it has, in the order of `execute`'s buffers."""

    def execute(self, plan: Plan, buffers: Sequence[Buffer], op: str = "sum") -> None:
        """Carry out a verified plan in place, on a buffer of one size and dtype for each of
        `ranks`; return when it is done.

        The executors of all other ranks must be given the same plans in the same order. With the
        same chunks all give the same bits; GPUs cut chunks that do not fit their slots, a CPU
        refuses them (CollectiveError). Raises CollectiveTimeout or CollectiveAborted where another
        rank does not come.
        """
