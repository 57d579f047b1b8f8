"""Why a call failed: the reasons for which ranks give up, and the steps at which tracks block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from linkweave.collectives.planning.dataflow import origins
from linkweave.collectives.planning.plan import Op, Plan
from linkweave.collectives.runtime.encoded import Encoded

REASONS = (
    "gave up waiting", "died", "raised an exception", "was interrupted",
    "has returned or was closed", "made other calls on its GPU than",
)  # fmt: skip
TIMED_OUT, DIED, RAISED, INTERRUPTED, LEFT, DIFFERED = range(len(REASONS))


@dataclass(frozen=True, slots=True)
class Blocked:
    """A track that is blocked at a WAIT for `peer`, which may only forward the data of `origin`."""

    rank: int
    peer: int
    channel: int
    step: int
    chunk: int
    what: str
    origin: int

    def __str__(self) -> str:
        source = f"rank {self.peer}"
        if self.origin != self.peer:
            source = f"rank {self.origin} through {source}"
        return (
            f"rank {self.rank} waits for {self.what} of chunk {self.chunk} on channel "
            f"{self.channel} (step {self.step}) from {source}"
        )

    def fields(self) -> dict[str, int]:
        """The keyword arguments of `CollectiveTimeout` and `CollectiveAborted`."""
        return {
            "rank": self.rank, "peer": self.peer, "channel": self.channel, "step": self.step,
            "chunk": self.chunk,
        }  # fmt: skip


def position_of(code: Sequence[int], first: int, pc: int) -> int:
    """The number of steps in `code` from offset `first` to offset `pc`."""
    position = 0
    while first < pc:
        first += 5 + int(code[first + 4])
        position += 1
    return position


def waits(
    plan: Plan, connection: int, sender: bool, rank: int, channel: int, step: int, chunk: int
) -> Blocked:
    """A track of `rank` that is blocked on a connection of which it is the sender or receiver."""
    c = plan.connections[connection]
    if sender:
        return Blocked(rank, c.dst, channel, step, chunk, "a free slot", c.dst)
    origin = origins(plan).get(connection, c.src)
    return Blocked(rank, c.src, channel, step, chunk, "the data", origin)


def blocked(encoded: Encoded, rank: int, at: NDArray[Any]) -> list[Blocked]:
    """The blocked tracks of a CPU rank; `at` [tracks, 3] is that of `interpreter.call`."""
    found = []
    code = encoded.codes[rank].tolist()
    phases = code[1]
    for row, channel in enumerate(encoded.channels[rank]):
        phase, group, pc = (int(v) for v in at[row])
        if phase >= phases:
            continue
        first = code[2 + row * (phases + 1)]
        pc = pc or code[2 + row * (phases + 1) + phase]
        if pc >= len(code) or code[pc] != Op.WAIT:
            continue
        step, chunk = position_of(code, first, pc), group * encoded.stride + code[pc + 1]
        connection, sender = code[pc + 5], bool(code[pc + 2])
        src, dst = encoded.ends[connection].tolist()
        what, peer, origin = "a free slot", dst, dst
        if not sender:
            what, peer, origin = "the data", src, int(encoded.origin[connection])
            origin = src if src == dst else origin  # the peer is another track of this rank
        found.append(Blocked(rank, peer, channel, step, chunk, what, origin))
    return found
