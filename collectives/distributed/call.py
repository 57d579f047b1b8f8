"""What a rank asks for, as ranks on several machines compare it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray

from linkweave.collectives.distributed.combine import combined, undivided

_LONG = 200  # characters
_NOTHING = np.zeros(0, np.uint8)


class Unequal(Exception):
    """Arguments do not fit together, as all ranks see alike: they refuse the call, and go on."""


@dataclass
class Call:
    """One rank's side of a call.

    asked: what it asks for, as text that all ranks compare; a long one ends with its checksum.
    body: carries it out.
    values, op, finish: of few bytes, which the ranks combine while they compare:
        a copy of the values, flat (None: not so few); the op; what to do with the total.
    """

    asked: str
    body: Any
    values: Any = None
    op: str = ""
    finish: Any = None

    def __post_init__(self) -> None:
        if len(self.asked) > _LONG:
            self.asked = f"{self.asked[:_LONG]}... {crc32(self.asked.encode()):08x})"

    @property
    def small(self) -> bool:
        return self.values is not None

    @cached_property
    def word(self) -> int:
        """A checksum of what is asked for."""
        return int.from_bytes(blake2b(self.asked.encode(), digest_size=7).digest(), "little")

    @cached_property
    def bytes(self) -> NDArray[np.uint8]:
        """The memory of the values."""
        found = _NOTHING if self.values is None else self.values.view(torch.uint8).numpy()
        return np.asarray(found)

    def combine(self, rows: NDArray[np.uint8]) -> None:
        """Combine rows of bytes, in their order, to the values; an average is not divided."""
        if self.values is not None:
            every = torch.from_numpy(rows).view(self.values.dtype)
            self.values.copy_(combined(every, undivided(self.op)))
