"""The protocol of everything that carries out plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from linkweave.collectives.planning.plan import Plan
from linkweave.collectives.runtime.buffer import Buffer


class Executor(Protocol):
    """Carries out plans: `Reference` for all ranks, `CpuExecutor` for one, `GpuRanks` for those of
    a process. How ranks communicate apart from plans is `control.Control`.
    """

    @property
    def ranks(self) -> Sequence[int]:
        """Its ranks, in the order of `execute`'s buffers."""

    def execute(self, plan: Plan, buffers: Sequence[Buffer], op: str = "sum") -> None:
        """Carry out a verified plan in place and return when it is done.

        `buffers` has one for each of `ranks`, all of one size and dtype. The executors of the
        other ranks must be given the same plans in the same order. With equal chunks, all executors
        compute the same bits; for chunks that do not fit a slot, GPUs divide them and CPUs raise
        CollectiveError. Raises CollectiveTimeout or CollectiveAborted if another rank does not
        take part.
        """
