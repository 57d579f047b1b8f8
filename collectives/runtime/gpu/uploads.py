"""Arrays uploaded to GPUs, which are freed together."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.runtime.gpu.device import Device


class Uploads:
    """Uploaded arrays. `close` frees all of them; a `part` can be dropped earlier."""

    def __init__(self) -> None:
        self._made: list[tuple[Device, int]] = []
        self._parts: dict[int, Uploads] = {}

    def add(self, device: Device, array: NDArray[np.generic]) -> int:
        """Upload an array; returns its device address."""
        self._made.append((device, device.upload(array)))
        return self._made[-1][1]

    def part(self) -> Uploads:
        made = Uploads()
        self._parts[id(made)] = made
        return made

    def drop(self, part: Uploads) -> None:
        """Free a part; no kernel may be running that reads it."""
        self._parts.pop(id(part), None)
        part.close()

    def close(self) -> None:
        with ExitStack() as last:  # runs every callback even if one raises
            while self._made:
                device, address = self._made.pop()
                last.callback(device.free, address)
            while self._parts:
                last.callback(self._parts.popitem()[1].close)
