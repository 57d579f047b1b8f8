"""Sparse all-reduce over several machines: gTop-k's tree with its last edges over machines."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.cluster.connections import Connections
from linkweave.collectives.cluster.machines import Machines
from linkweave.collectives.cluster.pieces import flat
from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.planning.algorithms.trees import Tree
from linkweave.collectives.planning.sparse_tree import binomial_tree
from linkweave.collectives.sparse.backend import Vector
from linkweave.collectives.sparse.linked import LinkedBackend
from linkweave.collectives.sparse.modes import check_call


def tree_over(machines: Machines) -> Tree:
    """Binomial trees over the ranks of each machine, and one over the machines' first ranks."""
    parent = [0] * machines.size
    for ranks in machines.ranks:
        for at, above in enumerate(binomial_tree(len(ranks)).parent):
            parent[ranks[at]] = ranks[above]
    for m, above in enumerate(binomial_tree(machines.count).parent):
        parent[machines.ranks[m][0]] = machines.ranks[above][0]
    return Tree(tuple(parent))


class ClusterLinks:
    """`Links` between the ranks of several machines."""

    def __init__(self, comm: Connections) -> None:
        self.rank, self.size = comm.rank, comm.size
        self._comm = comm

    def send(self, message: NDArray[np.uint8], to: int) -> None:
        try:
            self._comm.send(message, to)
        except CollectiveError as error:  # of which this machine's other ranks do not know
            raise RuntimeError(str(error)) from error

    def receive(self, message: NDArray[np.uint8], source: int) -> None:
        try:
            self._comm.recv(message, source)
        except CollectiveError as error:
            raise RuntimeError(str(error)) from error

    def broadcast(self, message: NDArray[np.uint8], root: int) -> None:
        self._comm.pieces.broadcast(flat(message)[0], root)

    def gather(self, row: NDArray[Any]) -> NDArray[Any]:
        every = np.zeros((self.size, row.size), row.dtype)
        self._comm.rows.allgather(flat(row)[0], flat(every)[0], [row.size] * self.size)
        return every

    def add(self, whole: NDArray[np.float32]) -> None:
        self._comm.allreduce(flat(whole)[0], "sum")


class SparseCluster(LinkedBackend):
    """One call. Raises CollectiveError if an argument is bad."""

    def __init__(
        self, comm: Connections, values: Any, indices: Any, numel: Any, k: Any, op: Any,
        residual: Any, mode: Any, conserve: Any,
    ) -> None:  # fmt: skip
        super().__init__(ClusterLinks(comm), values, indices, numel, residual)
        self._machines, self._op, self._mode = comm.machines, op, mode
        self._numel, self._conserve = int(numel), bool(conserve)
        self._k = check_call(self._numel, k, op, residual, mode, conserve)
        self.asked = (
            f"sparse_allreduce({numel}, k {k}, {op}, {mode}, {conserve}, {self.wire.dtype})"
        )

    def carry_out(self) -> Vector:
        counts = self.counts()
        mode = self._cheapest(max(counts)) if self._mode == "auto" else self._mode
        return self.total(
            self._numel, self._k, self._op, mode, self._conserve, tree_over(self._machines), counts
        )

    def _cheapest(self, longest: int) -> str:
        """The mode with the fewest bytes over a machine's link."""
        machines = self._machines
        rounds = (machines.count - 1).bit_length()
        nbytes = {
            "gtopk": 2 * rounds * self.wire.message(self._k),
            "topk": (machines.count - 1) * machines.most * self.wire.message(longest),
            "dense": 2 * 4 * self._numel * (machines.count - 1) // machines.count,
        }
        return min(nbytes, key=lambda name: nbytes[name])
