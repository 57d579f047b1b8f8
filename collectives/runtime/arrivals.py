"""Gradients as they arrive on a CPU rank: which of a message's layers are final while its
all-reduce is under way (C-Cube, section III-D: gradient queuing).

The gradient buffer is the queue itself: a chunk is final where it lies. The interpreter counts the
chunks that each stream has made final; a layer is there once the counters are where the
layer-chunk table says.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from collectives.planning.finals import layer_chunk_table
from collectives.planning.plan import Plan
from kernels import interpret as kernel

_YIELDS = 8  # rounds before sleeping: the core is the interpreter's


class Arrivals:
    """One call's counters."""

    def __init__(self) -> None:
        self.begun = threading.Event()  # the counters count from zero
        self.layers = 0  # how many
        self.counters = np.zeros(0, np.int64)  # by stream
        self.bell = np.zeros(1, np.int64)  # who waits sleeps on it
        self._addresses = np.zeros(0, np.int64)
        self._table = np.zeros((0, 0), np.int64)

    def begin(self, plan: Plan | None, rank: int, nbytes: int, layers: Sequence[int]) -> None:
        """To be called before anything moves; without a plan nothing will, and all is there.

        `layers`: bytes of each, in the order in which they lie.
        """
        self.layers = len(layers)
        self._table = np.zeros((len(layers), 0), np.int64)
        if plan is not None:
            self._table = layer_chunk_table(plan, rank, nbytes, layers)
            self.counters = np.zeros(self._table.shape[1], np.int64)
            first, item = self.counters.ctypes.data, self.counters.itemsize
            self._addresses = first + item * np.arange(self.counters.size)
        self.begun.set()

    def wait(self, layer: int, abort: int) -> bool:
        """Wait until that layer is final: True; or for about a tenth of a second, or until the
        word at the address `abort` is raised. `begun` must be set."""
        status = kernel.await_counters(
            self._addresses, self._table[layer], self.bell.ctypes.data, abort, _YIELDS
        )
        return bool(status == kernel.DONE)
