"""Chaining communication with computation: layers of an all-reduce that is still under way."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

from linkweave.collectives.calls.work import HostWork, Work
from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.runtime.cpu.arrivals import Arrivals
from linkweave.collectives.tensors import integer

_POLL = 0.05  # s


class GradientQueue(Work, Protocol):
    """An all-reduce whose layers may be used before all of it is done (C-Cube, figure 9).

    `wait` and `done` are those of `Work`. Until `wait` has returned the tensor may be read where
    `dequeue` allows it, and must not be written: other ranks may still read it.
    """

    def dequeue(self, layer: int) -> None:
        """Make what follows wait for one layer, counted from 0, in any order, any number of times.

        On the CPU it returns once the layer's gradients are final; on a GPU it makes the current
        stream wait for them, and returns at once. Raises CollectiveError for a layer that there is
        not, and what went wrong.
        """


class HostQueue(HostWork):
    """`GradientQueue` of CPU ranks. `abort`: address of the word that is raised when a rank gives
    up."""

    def __init__(self, future: Future[Any], arrivals: Arrivals, abort: int) -> None:
        super().__init__(future)
        self._arrivals, self._abort = arrivals, abort

    def dequeue(self, layer: int) -> None:
        while not self._arrivals.begun.wait(_POLL):
            if self.done():
                self.wait()  # raises what went wrong
        at = number_of(layer, self._arrivals.layers)
        while not self.done() and not self._arrivals.wait(at, self._abort):
            pass  # (once it is done the memory at `abort` may be gone)
        if self.done():
            self.wait()


def number_of(layer: int, count: int) -> int:
    """`layer`, if it is one of that many."""
    number = integer(layer)
    if number is None or not 0 <= number < count:
        raise CollectiveError(f"layer must be an integer from 0 to {count - 1}, not {layer!r}")
    return number
