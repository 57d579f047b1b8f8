"""Counters of gradient queues on GPUs: a set for each call, reused after the call's last check."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from linkweave.collectives.runtime.gpu.device import Device


@dataclass
class CallCounters:
    """One call's counters.

    `addresses` has one device address for each GPU of the process, of one uint32 per thread block.
    `users` is the number of ranks of the process that may still read them.
    """

    addresses: tuple[int, ...]
    key: tuple[int, ...]
    users: int


class CounterPool:
    """Allocates counters, reuses those that are given back, and frees all of them in `close`."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self._spare: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        self._made: list[tuple[Device, int]] = []
        self._lock = threading.Lock()
        self.lent = 0
        """How many calls' counters are in use or held by CUDA graphs."""

    def take(self, blocks: Sequence[int], users: int) -> CallCounters:
        """Counters for a call with this many thread blocks on each GPU; a CUDA graph keeps its
        own."""
        key = tuple(blocks)
        with self._lock:
            if spare := self._spare.get(key):
                self.lent += 1
                return CallCounters(spare.pop(), key, users)
            made = []
            for device, count in zip(self._devices, key, strict=True):
                made.append(device.allocate(4 * max(1, count)))
                self._made.append((device, made[-1]))
            self.lent += 1
            return CallCounters(tuple(made), key, users)

    def give_back(self, counted: CallCounters) -> None:
        """Called by each user once nothing that it enqueued reads the counters any more."""
        with self._lock:
            counted.users -= 1
            if not counted.users:
                self.lent -= 1
                self._spare.setdefault(counted.key, []).append(counted.addresses)

    def close(self) -> None:
        while self._made:
            device, address = self._made.pop()
            device.free(address)
