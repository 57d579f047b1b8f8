"""What a rank asks for, as ranks on several machines compare it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch

from linkweave.collectives.distributed.combine import combined

_LONG = 200  # characters


class Unequal(Exception):
    """Arguments do not fit together, as all ranks see alike: they refuse the call, and go on."""


@dataclass
class Call:
    """One rank's side of a call.

    asked: what it asks for, as text that all ranks compare; a long one ends with its checksum.
    body: carries it out.
    values, op, finish: of an all-reduce of few bytes, which the ranks carry out while they compare:
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

    def written(self) -> bytes:
        return bytes(self.values.view(torch.uint8).numpy())

    def read(self, data: bytes) -> Any:
        return torch.frombuffer(bytearray(data), dtype=self.values.dtype)

    def combined(self, every: Sequence[bytes], size: int) -> bytes:
        """The total of the machines' values, combined in their order, as bytes."""
        total = combined(torch.stack([self.read(data) for data in every]), self.op)
        if self.op == "avg":
            total = total.div_(size)
        return bytes(total.view(torch.uint8).numpy())
