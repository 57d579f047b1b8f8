"""Gradient queuing on a CPU rank (C-Cube, section III-D): which layers of a message are final.

The interpreter counts the chunks that each track has completed. A layer is final once every counter
has reached its entry in the layer-chunk table; the interpreter then wakes the thread that waits for
this layer. The gradient buffer itself is the queue: no data is copied.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from linkweave.kernels.plan import counters as kernel

_YIELDS = 8  # rounds before sleeping: few, to leave the core to the interpreter


class LayerCounters:
    """The counters of one call."""

    def __init__(self) -> None:
        self.begun = threading.Event()  # set once the counters are zero and `needs` is known
        self.layers = 0
        self.counters = np.zeros(1, np.int64)  # [tracks]
        self.bells = np.zeros(0, np.int64)  # [layers]: addresses that waiting threads sleep on
        self.needs = np.zeros((0, 0), np.int64)

    def begin(self, needs: NDArray[np.int64]) -> None:
        """Reset the counters; to be called before the call moves any data.

        `needs` [layers, tracks] is the number of chunks that each track must have completed for
        each layer (`planning.dataflow.table`).
        """
        self.layers, tracks = needs.shape
        self.counters = np.zeros(max(1, tracks), np.int64)
        self._words = np.zeros(self.layers, np.int64)
        self.bells = self._words.ctypes.data + 8 * np.arange(self.layers)
        self._addresses = self.counters.ctypes.data + 8 * np.arange(tracks)
        self.needs = needs
        self.begun.set()

    def reach(self, count: int) -> None:
        """The only track has completed so much."""
        kernel.raise_counter(int(self._addresses[0]), count, self.bells)

    def wait(self, layer: int, abort: int) -> bool:
        """Wait until a layer is final; False after about 0.1 s or once the word at the address
        `abort` is set. `begun` must be set."""
        status = kernel.await_counters(
            self._addresses, self.needs[layer], int(self.bells[layer]), abort, _YIELDS
        )
        return bool(status == kernel.DONE)
