"""How the ranks of a communicator coordinate: agree on a call, exchange messages, give up.

`Control` is the protocol, which `cpu.control.HostControl` implements for the ranks of one machine.
`Health` says whether a communicator can still be used.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.errors import CollectiveError

Where = Callable[[], tuple[str, dict[str, int]]]
"""Returns what a rank waits for, as words and as the fields of `CollectiveTimeout`."""

PLANNING = 300.0
"""Seconds that rank 0 may plan, as long as it shows signs of life; the others notice at once if it
dies, and after their timeout if it is stopped."""


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


class Control(Protocol):
    """One rank's side. Every rank makes the same calls in the same order, numbered from 1.

    A call is a `gather`, or an `agree` that is followed by `done` or `finish`. Every wait raises
    CollectiveTimeout after `timeout` seconds, or CollectiveAborted once a rank dies, leaves or
    gives up.
    """

    rank: int
    size: int
    timeout: float
    health: Health
    number: int

    def agree(self, words: Sequence[int]) -> NDArray[np.int64]:
        """Begin a call and wait for all ranks to begin it; returns [size, len(words)], every
        rank's words."""

    def done(self) -> None:
        """End the call without waiting for the other ranks."""

    def finish(self) -> None:
        """End the call and wait until every rank has ended it."""

    def gather(
        self, words: Sequence[int], message: bytes, planning: float = 0.0
    ) -> tuple[NDArray[np.int64], list[bytes]]:
        """A whole call: like `agree`; also gathers every rank's `message`. Rank 0 may be `alive`
        for so many seconds before it comes."""

    def alive(self) -> AbstractContextManager[None]:
        """Inside, this rank shows signs of life to those that wait for it."""

    def give_up(self, why: int, blamed: int | None = None, who: int | None = None) -> None:
        """Abort all ranks: every wait, now or later, raises CollectiveAborted.

        `why` is one of the reasons in `diagnose`; `who` is the rank that gives up (None: this
        rank), `blamed` the rank that it blames (None: itself).
        """

    def aborted(self) -> bool:
        """Whether a rank has given up."""

    def patience(self, start: float, where: Where) -> None:
        """To be polled while something else has been waiting since `start` (`time.monotonic`).

        Raises CollectiveTimeout or CollectiveAborted.
        """

    def raise_aborted(self, where: Where | None = None) -> NoReturn:
        """Raise CollectiveAborted with the reason of the rank that gave up first."""
