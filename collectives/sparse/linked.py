"""Sparse vectors on the CPU, sent from rank to rank as bytes over links of any kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.planning.algorithms.trees import Tree
from linkweave.collectives.planning.collective import Pairs, targets
from linkweave.collectives.planning.sparse_tree import binomial_tree
from linkweave.collectives.sparse.backend import SparseCall, Vector
from linkweave.collectives.sparse.host import HostBackend
from linkweave.collectives.sparse.modes import MODES


class Links(Protocol):
    """What carries messages of one rank to the others. Every call blocks."""

    rank: int
    size: int

    def send(self, message: NDArray[np.uint8], to: int) -> None: ...

    def receive(self, message: NDArray[np.uint8], source: int) -> None:
        """Receive a message of this size."""

    def broadcast(self, message: NDArray[np.uint8], root: int) -> None:
        """Copy rank `root`'s message to all ranks."""

    def gather(self, row: NDArray[Any]) -> NDArray[Any]:
        """The rows of all ranks, which have one shape."""

    def add(self, whole: NDArray[np.float32]) -> None:
        """Sum a dense vector over all ranks, in place."""


class LinkedBackend(HostBackend):
    """A vector whose messages travel over links."""

    def __init__(self, links: Links, values: Any, indices: Any, numel: Any, residual: Any) -> None:
        super().__init__(values, indices, numel, residual)
        self._links = links

    def counts(self) -> list[int]:
        """The number of entries of each rank."""
        rows = self._links.gather(np.array([self.size(self.mine)]))
        return [int(n) for n in rows[:, 0]]

    def total(self, numel: int, k: int, op: str, mode: str, conserve: bool, tree: Tree,
              counts: list[int]) -> Vector:  # fmt: skip
        """The result of a call; `counts` are needed by mode "topk" only."""
        call = SparseCall(self, numel, k, op, mode, conserve, counts)
        found = MODES[mode].total(self._links, call, tree)  # type: ignore[arg-type]
        return self.result(found, self._links.size if op == "avg" else 1)

    def send(self, context: Any, vector: Vector, pairs: Pairs, k: int) -> Vector | None:
        to = dict(pairs).get(self._links.rank)
        source = targets(pairs).get(self._links.rank)
        if to is not None:
            self._links.send(self.wire.message_of(vector, k), to)
        if source is None:
            return None
        message = np.zeros(self.wire.message(k), np.uint8)
        self._links.receive(message, source)
        return self.wire.read(message)

    def gather(self, context: Any, counts: Sequence[int]) -> list[Vector]:
        message = self.wire.message_of(self.mine, max(counts))
        return [self.wire.read(row) for row in self._links.gather(message)]

    def broadcast(self, context: Any, message: NDArray[np.uint8], root: int) -> None:
        self._links.broadcast(message, root)

    def add(self, context: Any, whole: NDArray[np.float32]) -> None:
        self._links.add(whole)


def linked_allreduce(
    links: Links, vector: Vector, numel: int, k: int, residual: Any, mode: str, conserve: bool
) -> Vector:
    """The sum of all ranks' vectors by mode "gtopk" or "topk"; what the residual gets is as in
    `Communicator.sparse_allreduce`.

    All ranks must pass the same `numel`, `k` and `mode`, which are not compared. Merges follow the
    binomial tree of the ranks.
    """
    backend = LinkedBackend(links, *vector, numel, residual)
    counts = backend.counts() if mode == "topk" else []
    return backend.total(numel, k, "sum", mode, conserve, binomial_tree(links.size), counts)
