"""A rank whose tensors have no memory: what its transport is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from linkweave.collectives.planning.algorithms.trees import Tree
from linkweave.collectives.planning.collective import Pairs, targets
from linkweave.collectives.planning.sparse_tree import binomial_tree


class FakeTransport:
    """`training.transport.Transport` of one of several ranks, which sends nothing. Subclasses are
    told each call."""

    device = ""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def told(self, name: str, x: torch.Tensor) -> None:
        raise NotImplementedError

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, device=device)

    def before_close(self, method: Any) -> None: ...

    def open(self, lanes: int) -> None: ...

    def close(self) -> None: ...

    def stream(self, lane: int, x: torch.Tensor, sizes: Sequence[int]) -> Any:
        raise NotImplementedError

    def share(self, payload: bytes) -> list[bytes]:
        return [payload] * self.size

    def average(self, lane: int, x: torch.Tensor) -> None:
        self.told("average", x)

    def tree(self, x: torch.Tensor) -> Tree:
        return binomial_tree(self.size)

    def pairwise(self, lane: int, x: torch.Tensor, pairs: Pairs) -> torch.Tensor | None:
        self.told("pairwise", x)
        return torch.empty_like(x) if self.rank in targets(pairs) else None

    def allgather(self, lane: int, x: torch.Tensor) -> torch.Tensor:
        self.told("allgather", x)
        return x.new_empty((self.size, *x.shape))

    def broadcast(self, x: torch.Tensor, source: int = 0, lane: int | None = None) -> None:
        self.told("broadcast", x)

    def total(self, x: torch.Tensor) -> None:
        self.told("total", x)

    def alltoall(self, lane: int, x: torch.Tensor, counts: Sequence[Sequence[int]]) -> torch.Tensor:
        self.told("alltoall", x)
        assert x.numel() == sum(counts[self.rank])
        return x.new_empty(sum(row[self.rank] for row in counts))
