"""What the ranks of a communicator say to each other, apart from what moves data.

`Control` is the protocol: begin a call together, tell each other things, give up.
`cpu.control.HostControl` implements it for the ranks of one machine. `Health` says whether a
communicator can still be used.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.errors import CollectiveError

Where = Callable[[], tuple[str, dict[str, int]]]
"""Where a rank stands: in words, and as the fields of `CollectiveTimeout`."""

PLANNING = 300.0
"""Seconds that the other ranks wait for the one that plans; they notice at once if it dies."""


class Health:
    """Whether a communicator can be used. A process that is forked from a rank is not the rank."""

    def __init__(self, rank: int) -> None:
        self.rank, self._pid = rank, os.getpid()
        self.closed = False
        self.broken: str | None = None  # what went wrong
        self.usable = True
        self.family: list[Callable[[BaseException], None]] = []  # tells the other lanes
        _alive.add(self)

    @property
    def foreign(self) -> bool:
        """Whether this process was forked from the rank's."""
        return os.getpid() != self._pid

    def fail(self, error: BaseException) -> None:
        """No call can be made any more, nor on other lanes of the family."""
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
                "own with collectives.spawn() or collectives.init()"
            )
        if self.closed:
            raise CollectiveError("this communicator is closed")
        raise CollectiveError(f"this communicator failed before ({self.broken}); make a new one")


_alive: weakref.WeakSet[Health] = weakref.WeakSet()


def _after_fork() -> None:
    for health in list(_alive):
        health.usable = False


os.register_at_fork(after_in_child=_after_fork)


class Control(Protocol):
    """One rank's side; every rank makes the same calls in the same order, numbered from 1.

    `agree` or `gather` begins a call; `done` or `finish` ends one that `agree` began. A wait ends
    after `timeout` seconds, or when a rank dies, leaves or gives up.
    """

    rank: int
    size: int
    timeout: float
    health: Health
    number: int

    def agree(self, words: Sequence[int]) -> NDArray[np.int64]:
        """Begin a call and wait until all ranks have: [size, len(words)], what each says."""

    def done(self) -> None:
        """This rank needs nothing more for its call, and no rank needs it."""

    def finish(self) -> None:
        """Wait until every rank has finished its call as well."""

    def gather(
        self, words: Sequence[int], said: bytes, timeout: float | None = None
    ) -> tuple[NDArray[np.int64], list[bytes]]:
        """A whole call: as `agree`, and what every rank tells beside it, by rank."""

    def give_up(self, why: int, blamed: int | None = None, who: int | None = None) -> None:
        """Stop all ranks: whoever waits, now or later, raises CollectiveAborted. `why` is one of
        `diagnose`; `who` gave up (None: this rank), and blames a rank (None: itself)."""

    def aborted(self) -> bool:
        """Whether a rank has given up."""

    def patience(self, start: float, where: Where) -> None:
        """To be called again and again while something else waits, since `start`. Raises
        CollectiveTimeout or CollectiveAborted."""

    def raise_aborted(self, where: Where | None = None) -> NoReturn:
        """Raise CollectiveAborted in the words of whoever gave up first."""
