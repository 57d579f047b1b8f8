"""Messages between the ranks of a process group of torch.distributed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray


class GroupLinks:
    """`sparse.linked.Links` over a process group that takes CPU tensors."""

    def __init__(self, group: Any) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._group = group

    def send(self, message: NDArray[np.uint8], to: int) -> None:
        dist.send(torch.from_numpy(message), group=self._group, group_dst=to)

    def receive(self, message: NDArray[np.uint8], source: int) -> None:
        dist.recv(torch.from_numpy(message), group=self._group, group_src=source)

    def broadcast(self, message: NDArray[np.uint8], root: int) -> None:
        dist.broadcast(torch.from_numpy(message), group=self._group, group_src=root)

    def gather(self, row: NDArray[Any]) -> NDArray[Any]:
        mine = torch.from_numpy(row)
        every = mine.new_empty((self.size, *mine.shape))
        dist.all_gather(list(every), mine, self._group)
        return every.numpy()

    def add(self, whole: NDArray[np.float32]) -> None:
        dist.all_reduce(torch.from_numpy(whole), group=self._group)
