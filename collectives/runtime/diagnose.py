"""Who waits for whom: words for a rank that could not go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from collectives.planning.plan import Op, Plan

REASONS = ("gave up waiting", "died", "raised an exception", "was interrupted", "was closed")
TIMED_OUT, DIED, RAISED, INTERRUPTED, CLOSED = range(len(REASONS))


@dataclass(frozen=True, slots=True)
class Blocked:
    """One stream's unfulfilled WAIT."""

    rank: int
    peer: int
    channel: int
    step: int
    chunk: int
    what: str

    def __str__(self) -> str:
        return (
            f"rank {self.rank} waits for {self.what} of chunk {self.chunk} on channel "
            f"{self.channel} (step {self.step}) from rank {self.peer}"
        )

    def fields(self) -> dict[str, int]:
        """What `CollectiveTimeout` and `CollectiveAborted` carry."""
        return {
            "rank": self.rank, "peer": self.peer, "channel": self.channel, "step": self.step,
            "chunk": self.chunk,
        }  # fmt: skip


def position_of(code: Sequence[int], first: int, pc: int) -> int:
    """How many steps lie in `code` between two places; they have different lengths."""
    position = 0
    while first < pc:
        first += 5 + int(code[first + 4])
        position += 1
    return position


def blocked(plan: Plan, rank: int, at: NDArray[Any]) -> list[Blocked]:
    """Where each unfinished stream of `rank` stands; `at` is the interpreter's state."""
    found = []
    code = plan.encode(rank).tolist()
    phases = int(code[1])
    for row, stream in enumerate(s for s in plan.streams if s.rank == rank):
        phase, group, pc = (int(v) for v in at[row])
        if phase >= phases:
            continue
        first = int(code[2 + row * (phases + 1)])
        pc = pc or int(code[2 + row * (phases + 1) + phase])
        if pc >= len(code) or code[pc] != Op.WAIT:
            continue
        connection = plan.connections[int(code[pc + 5])]
        sender = bool(code[pc + 2])
        found.append(
            Blocked(
                rank,
                connection.dst if sender else connection.src,
                stream.channel,
                position_of(code, first, pc),
                group * plan.stride + int(code[pc + 1]),
                "a free slot" if sender else "the data",
            )
        )
    return found
