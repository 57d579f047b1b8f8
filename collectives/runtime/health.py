"""Whether a communicator can still be used, and what a rank says of a wait."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable

from linkweave.collectives.errors import CollectiveError

Where = Callable[[], tuple[str, dict[str, int]]]
"""Returns what a rank waits for, as words and as the fields of `CollectiveTimeout`."""

PLANNING = 300.0
"""Timeout for the rank that plans, in seconds; the others notice at once if it dies."""


class Health:
    """Whether a communicator can be used. A process forked from a rank cannot use it."""

    def __init__(self, rank: int) -> None:
        self.rank, self._pid = rank, os.getpid()
        self.closed = False
        self.broken: str | None = None  # what went wrong
        self.usable = True
        self.family: list[Callable[[BaseException], None]] = []  # tell the other lanes of a failure
        _alive.add(self)

    @property
    def foreign(self) -> bool:
        """Whether this process was forked from the rank's process."""
        return os.getpid() != self._pid

    def fail(self, error: BaseException) -> None:
        """Refuse all further calls, on the other lanes of the communicator as well."""
        if self.broken is None:
            self.broken, self.usable = f"{type(error).__name__}: {error}", False
            for other in self.family:
                other(error)

    def close(self) -> None:
        self.closed, self.usable = True, False
        self.family.clear()

    def check(self) -> None:
        """Raise CollectiveError unless calls can be made."""
        if self.usable:
            return
        if self.foreign:
            raise CollectiveError(
                f"process {os.getpid()} was forked from rank {self.rank} (process {self._pid}) and "
                "is not a rank itself: it cannot take part in the ranks' calls; start ranks of its "
                "own with linkweave.spawn() or linkweave.init()"
            )
        if self.closed:
            raise CollectiveError("this communicator is closed")
        raise CollectiveError(f"this communicator failed before ({self.broken}); make a new one")


_alive: weakref.WeakSet[Health] = weakref.WeakSet()


def _after_fork() -> None:
    for health in list(_alive):
        health.usable = False


os.register_at_fork(after_in_child=_after_fork)
