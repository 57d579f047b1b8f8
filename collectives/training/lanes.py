"""What carries out programs, step after step: `HostLanes` on CPUs, `StreamLanes` on GPUs."""

from __future__ import annotations

from typing import Any, Protocol

from linkweave.collectives.errors import CollectiveError


class Lanes(Protocol):
    """One step after another of a program, on the lanes of a transport."""

    sent: list[tuple[int, Any, Any]]
    """(op, start, end) of the step, in the order of their ends: moments of the device's clock."""

    def begin(self) -> None:
        """Begin a step, once the one before it is over."""

    def ready(self, unit: int) -> None:
        """The unit's gradients are in the arena; they may be sent."""

    def wait(self, unit: int) -> None:
        """Wait until the unit has arrived. Raises CollectiveError."""

    def wait_all(self) -> None:
        """Wait until all ops are done. Raises CollectiveError."""

    def abort(self, error: CollectiveError) -> None:
        """End all lanes, here and on the other ranks, because of this error."""

    def close(self) -> None:
        """Free the lanes, once what they send has been sent."""
