"""What carries out programs, step after step: `HostLanes` on CPUs, `StreamLanes` on GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.training.arena import Arena
from linkweave.collectives.training.embeddings import Embeddings
from linkweave.collectives.training.exchange import Exchange
from linkweave.collectives.training.host_lanes import HostLanes
from linkweave.collectives.training.program import Program
from linkweave.collectives.training.stream_lanes import StreamLanes
from linkweave.collectives.training.transport import Transport


class Lanes(Protocol):
    """One step after another of a program, on the lanes of a transport."""

    sent: list[tuple[int, Any, Any]]
    """(op, start, end) of the step, in the order of their ends: moments of the device's clock."""

    def begin(self) -> None:
        """Begin a step, once the one before it is over."""

    def ready(self, unit: int) -> None:
        """The unit's gradients are in the arena; they may be sent."""

    def arrivals(self, unit: int) -> Iterator[int]:
        """Wait for a unit: yields how many of its first bytes have arrived, as more do, and at last
        all. Raises CollectiveError."""

    def wait_all(self) -> None:
        """Wait until all ops are done. Raises CollectiveError."""

    def abort(self, error: CollectiveError) -> None:
        """End all lanes, here and on the other ranks, because of this error."""

    def close(self) -> None:
        """Free the lanes, once what they send has been sent."""


def lanes_of(
    transport: Transport, arena: Arena, program: Program, exchange: Exchange,
    embeddings: Embeddings,
) -> Lanes:  # fmt: skip
    """The lanes of a program, on the arena's device."""
    if arena.units[0].device.type == "cuda":
        if embeddings.named:
            names = ", ".join(embeddings.named)
            raise CollectiveError(
                f"ShardedEmbedding {names} is on the CPU: the other parameters must be as well"
            )
        return StreamLanes(transport, arena, program, exchange.dtype)
    return HostLanes(transport, arena, program, exchange, embeddings)
