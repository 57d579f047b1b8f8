"""Counters of gradient queues on GPUs: of one call each, used again when no check reads them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.runtime.gpu.device import Device


@dataclass
class Counted:
    """One call's counters: for each GPU of the process the address of a word for each block.

    `users`: ranks of the process that may still ask for them.
    """

    addresses: tuple[int, ...]
    key: tuple[int, ...]
    users: int


class Counters:
    """Makes them, keeps what is given back, and frees all in the end."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self._spare: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        self._made: list[tuple[Device, int]] = []
        self._lock = threading.Lock()
        self.lent = 0
        """How many calls' counters are in use, or held by graphs."""

    def take(self, blocks: Sequence[int], users: int, captured: bool) -> Counted:
        """Counters for so many blocks on each GPU. A graph keeps its own for ever, and none can be
        made while it is captured: CollectiveError where none is left."""
        key = tuple(blocks)
        with self._lock:
            if spare := self._spare.get(key):
                self.lent += 1
                return Counted(spare.pop(), key, users)
            if captured:
                raise CollectiveError(
                    "a gradient queue in a graph keeps its counters, and none are left: make as "
                    "many queues of this size at once before, and wait for them"
                )
            made = []
            for device, count in zip(self._devices, key, strict=True):
                made.append(device.allocate(4 * max(1, count)))
                self._made.append((device, made[-1]))
            self.lent += 1
            return Counted(tuple(made), key, users)

    def give_back(self, counted: Counted) -> None:
        """One of the users needs them no more, and nothing that it enqueued does."""
        with self._lock:
            counted.users -= 1
            if not counted.users:
                self.lent -= 1
                self._spare.setdefault(counted.key, []).append(counted.addresses)

    def close(self) -> None:
        while self._made:
            device, address = self._made.pop()
            device.free(address)
