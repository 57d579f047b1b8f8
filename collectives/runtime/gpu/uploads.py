"""Arrays in GPUs' memory, and who gives them back."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.runtime.gpu.device import Device


class Uploads:
    """Arrays that are given back together; those of a part may go before the others."""

    def __init__(self) -> None:
        self._made: list[tuple[Device, int]] = []
        self._parts: dict[int, Uploads] = {}

    def add(self, device: Device, array: NDArray[np.generic]) -> int:
        """The address of a copy."""
        self._made.append((device, device.upload(array)))
        return self._made[-1][1]

    def part(self) -> Uploads:
        made = Uploads()
        self._parts[id(made)] = made
        return made

    def drop(self, part: Uploads) -> None:
        """Give back what is in a part; nothing may be running that reads it."""
        self._parts.pop(id(part), None)
        part.close()

    def close(self) -> None:
        with ExitStack() as last:  # all of it, whatever fails
            while self._made:
                device, address = self._made.pop()
                last.callback(device.free, address)
            while self._parts:
                last.callback(self._parts.popitem()[1].close)
