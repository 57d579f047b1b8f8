"""A network of stated speed between CPU ranks: what all-reduces of training are timed against.

Data moves through shared memory; then a lane sleeps for as long as the network would take. Lanes
share the network as `overlap.timeline` has it: a communication spends its start-up, in which it
transmits nothing, and then its bytes, each slowed by the number of those that transmit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from linkweave.collectives.overlap import Communication, Network
from linkweave.collectives.overlap.communication import REDUCE_SCATTER
from linkweave.collectives.training.transport import Counts, OverCommunicator, Queue

HALF = Communication((), kind=REDUCE_SCATTER).share


class Link:
    """Bytes under way on the network of one rank."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._changed = threading.Condition()
        self._left: dict[int, float] = {}  # bytes of each transmission, as of `_then`
        self._then = 0.0
        self._made = 0

    def begin(self, nbytes: float) -> int:
        with self._changed:
            self._advance()
            self._made += 1
            self._left[self._made] = float(nbytes)
            self._changed.notify_all()
            return self._made

    def until(self, number: int, left: float) -> None:
        """Block until at most so many bytes of a transmission are left; at 0, it is over."""
        with self._changed:
            while True:
                self._advance()
                behind = self._left[number] - left
                if behind <= 1e-6:
                    break
                self._changed.wait(behind * self._pace())
            if left <= 0:
                del self._left[number]
                self._changed.notify_all()

    def _pace(self) -> float:
        return self._network.seconds_per_byte * self._network.crowding(max(1, len(self._left)))

    def _advance(self) -> None:
        now = time.perf_counter()
        if pace := self._pace():
            sent = (now - self._then) / pace
            self._left = {number: left - sent for number, left in self._left.items()}
        else:
            self._left = dict.fromkeys(self._left, 0.0)
        self._then = now


class Throttled(OverCommunicator):
    """Lanes over a communicator of one machine, slowed to a network, which others may share."""

    def __init__(
        self, communicator: Any, network: Network, link: Link | None = None, density: float = 1.0
    ) -> None:
        super().__init__(communicator)
        self._network, self._link, self._density = network, link or Link(network), density

    def average(self, lane: int, x: torch.Tensor) -> None:
        self._slowed(super().average, lane, x, 1.0)

    def scatter(self, lane: int, x: torch.Tensor) -> None:
        self._slowed(super().scatter, lane, x, HALF)

    def gather(self, lane: int, x: torch.Tensor) -> None:
        self._slowed(super().gather, lane, x, HALF)

    def _slowed(self, call: Any, lane: int, x: torch.Tensor, share: float) -> None:
        begun = time.perf_counter()
        call(lane, x)
        self._link.until(self._begin(begun, x, share), 0)

    def broadcast(self, x: torch.Tensor, source: int = 0, lane: int | None = None) -> None:
        """On a lane, the last call of a sparse exchange: for as long as the network, which is one
        of such exchanges, takes for all elements."""
        begun = time.perf_counter()
        super().broadcast(x, source, lane)
        if lane is not None:
            time.sleep(max(0.0, begun + self._network.startup_s - time.perf_counter()))
            elements = x.shape[-1] / self._density
            self._link.until(self._link.begin(4 * elements), 0)

    def alltoall(self, lane: int, x: torch.Tensor, counts: Counts) -> torch.Tensor:
        """A message to each other rank; the network is one of all-reduces, made of messages."""
        begun = time.perf_counter()
        found = super().alltoall(lane, x, counts)
        startup, pace = self._network.message
        others = self.size - 1
        time.sleep(max(0.0, begun + others * startup - time.perf_counter()))
        sends = counts[self.rank]
        sent = (sum(sends) - sends[self.rank]) * x.element_size()
        share = pace / self._network.seconds_per_byte if self._network.seconds_per_byte else 0.0
        self._link.until(self._link.begin(sent * share), 0)
        return found

    def stream(self, lane: int, x: torch.Tensor, sizes: Sequence[int]) -> Queue:
        begun = time.perf_counter()
        queue = super().stream(lane, x, sizes)
        return _Stream(queue, self._link, self._begin(begun, x), x.element_size(), sizes)

    def _begin(self, begun: float, x: torch.Tensor, share: float = 1.0) -> int:
        """Begin to transmit a share of an all-reduce once its start-up has passed."""
        time.sleep(max(0.0, begun + share * self._network.startup_s - time.perf_counter()))
        return self._link.begin(share * x.nbytes)


class _Stream:
    def __init__(
        self, queue: Queue, link: Link, number: int, item: int, sizes: Sequence[int]
    ) -> None:
        self._queue, self._link, self._number = queue, link, number
        self._behind = [item * sum(sizes[i + 1 :]) for i in range(len(sizes))]

    def dequeue(self, layer: int) -> None:
        self._queue.dequeue(layer)
        self._link.until(self._number, self._behind[layer])

    def wait(self) -> None:
        self._queue.wait()
