"""Gradient queues of ranks on several machines."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import accumulate
from typing import Any

from linkweave.collectives.calls.work import HostWork
from linkweave.topology.checks import integer


class Arrivals:
    """How much of a tensor is final: told by the thread that makes the call, awaited by others."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ends: list[int] | None = None  # of layers, in elements; None until the call begins
        self._final = 0

    def begin(self, sizes: Sequence[int]) -> None:
        """The call is for layers of so many elements."""
        with self._changed:
            self._ends = [*accumulate(sizes)]
            self._changed.notify_all()

    def reach(self, final: int) -> None:
        """So many elements are final."""
        with self._changed:
            self._final = final
            self._changed.notify_all()

    def wait(self, layer: int, future: Future[Any]) -> None:
        """Block until the layer is final or the call is done. Raises CollectiveError if there is
        no such layer."""
        with self._changed:
            self._changed.wait_for(lambda: future.done() or self._ends is not None)
            if self._ends is None:
                return
            end = self._ends[integer(layer, "layer", 0, len(self._ends) - 1)]
            self._changed.wait_for(lambda: future.done() or self._final >= end)

    def wake(self, _: Future[Any]) -> None:
        """The call is done."""
        with self._changed:
            self._changed.notify_all()


class ClusterQueue(HostWork):
    """`GradientQueue` of a call on several machines."""

    def __init__(self, future: Future[Any], arrivals: Arrivals) -> None:
        super().__init__(future)
        self._arrivals = arrivals
        future.add_done_callback(arrivals.wake)

    def dequeue(self, layer: int) -> None:
        self._arrivals.wait(layer, self._future)
        if self.done():
            self.wait()  # raises the call's error
