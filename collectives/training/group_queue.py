"""A gradient queue of a process group of torch.distributed, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from linkweave.collectives.distributed import pieces


class GroupQueue:
    """Averages a flat tensor in place, in pieces that the group's threads send one after another.

    A layer arrives with the piece that has its end. One thread uses it, and waits for all of it.
    """

    def __init__(self, x: torch.Tensor, sizes: Sequence[int], group: Any, size: int) -> None:
        self._ends, self._size = [*accumulate(sizes)], size
        if x.dtype == torch.float16:  # whose sum may overflow
            x.div_(size)
            self._size = 1
        self._parts = torch.split(x, pieces.QUEUED // x.element_size())
        self._works: list[Any] = [
            dist.all_reduce(part, group=group, async_op=True) for part in self._parts
        ]
        self._final = self._done = 0  # elements, and pieces

    def dequeue(self, layer: int) -> None:
        self._wait(self._ends[layer])

    def wait(self) -> None:
        self._wait(self._ends[-1])

    def _wait(self, end: int) -> None:
        while self._final < end:
            self._works[self._done].wait()
            self._final += self._parts[self._done].div_(self._size).numel()
            self._done += 1
