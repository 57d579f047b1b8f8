"""Who waits for whom: words for a rank that could not go on."""

from __future__ import annotations

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


def blocked(plan: Plan, rank: int, at: NDArray[Any]) -> list[Blocked]:
    """Where each unfinished stream of `rank` stands; `at` is the interpreter's state."""
    found = []
    code = plan.encode(rank)
    phases = int(code[1])
    for row, stream in enumerate(s for s in plan.streams if s.rank == rank):
        phase, group, pc = (int(v) for v in at[row])
        if phase >= phases:
            continue
        first = int(code[2 + row * (phases + 1)])
        pc = pc or int(code[2 + row * (phases + 1) + phase])
        position, here = 0, first
        while here < pc:  # steps have different lengths in the code
            here += 5 + int(code[here + 4])
            position += 1
        if here >= len(code) or code[here] != Op.WAIT:
            continue
        connection = plan.connections[int(code[here + 5])]
        sender = bool(code[here + 2])
        found.append(
            Blocked(
                rank,
                connection.dst if sender else connection.src,
                stream.channel,
                position,
                group * plan.stride + int(code[here + 1]),
                "a free slot" if sender else "the data",
            )
        )
    return found
