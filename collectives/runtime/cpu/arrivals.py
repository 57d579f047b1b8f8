"""Gradients as they arrive on a CPU rank: which of a message's layers are final while its
all-reduce is under way (C-Cube, section III-D: gradient queuing).

The gradient buffer is the queue itself: a chunk is final where it lies. The interpreter counts the
chunks that each track has made final; a layer is there once the counters are where the
layer-chunk table says. Then it wakes who waits for that layer.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from linkweave.kernels.plan import counters as kernel

_YIELDS = 8  # rounds before sleeping: the core is the interpreter's


class Arrivals:
    """One call's counters."""

    def __init__(self) -> None:
        self.begun = threading.Event()  # the counters count from zero
        self.layers = 0  # how many
        self.counters = np.zeros(1, np.int64)  # by track
        self.bells = np.zeros(0, np.int64)  # addresses, one a layer: who waits for it sleeps there
        self.needs = np.zeros((0, 0), np.int64)

    def begin(self, needs: NDArray[np.int64]) -> None:
        """To be called before anything moves. `needs` [layers, tracks]: chunks that each track
        makes final for a layer (`planning.finals.table`)."""
        self.layers, tracks = needs.shape
        self.counters = np.zeros(max(1, tracks), np.int64)
        self._words = np.zeros(self.layers, np.int64)
        self.bells = self._words.ctypes.data + 8 * np.arange(self.layers)
        self._addresses = self.counters.ctypes.data + 8 * np.arange(tracks)
        self.needs = needs
        self.begun.set()

    def wait(self, layer: int, abort: int) -> bool:
        """Wait until that layer is final: True; or for about a tenth of a second, or until the
        word at the address `abort` is raised. `begun` must be set."""
        status = kernel.await_counters(
            self._addresses, self.needs[layer], int(self.bells[layer]), abort, _YIELDS
        )
        return bool(status == kernel.DONE)
