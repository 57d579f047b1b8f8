"""Sparse all-reduce over several machines: gTop-k's tree with its last edges over machines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.calls.sparse.backend import SparseCall, Vector
from linkweave.collectives.calls.sparse.host import HostBackend
from linkweave.collectives.calls.sparse.modes import MODES, check_call
from linkweave.collectives.cluster.connections import Connections
from linkweave.collectives.cluster.machines import Machines
from linkweave.collectives.cluster.pieces import flat
from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.planning.algorithms.trees import Tree
from linkweave.collectives.planning.collective import Pairs, targets
from linkweave.collectives.planning.sparse_tree import binomial_tree


def tree_over(machines: Machines) -> Tree:
    """Binomial trees over the ranks of each machine, and one over the machines' first ranks."""
    parent = [0] * machines.size
    for ranks in machines.ranks:
        for at, above in enumerate(binomial_tree(len(ranks)).parent):
            parent[ranks[at]] = ranks[above]
    for m, above in enumerate(binomial_tree(machines.count).parent):
        parent[machines.ranks[m][0]] = machines.ranks[above][0]
    return Tree(tuple(parent))


class SparseCluster(HostBackend):
    """One call, whose messages travel from rank to rank as bytes. Raises CollectiveError if an
    argument is bad."""

    def __init__(
        self, comm: Connections, values: Any, indices: Any, numel: Any, k: Any, op: Any,
        residual: Any, mode: Any, conserve: Any,
    ) -> None:  # fmt: skip
        super().__init__(values, indices, numel, residual)
        self._comm, self._machines, self._op, self._mode = comm, comm.machines, op, mode
        self._numel, self._conserve = int(numel), bool(conserve)
        self._k = check_call(self._numel, k, op, residual, mode, conserve)
        self.asked = (
            f"sparse_allreduce({numel}, k {k}, {op}, {mode}, {conserve}, {self.wire.dtype})"
        )

    def carry_out(self) -> Vector:
        counts = [int(n) for n in self._rows(np.array([self.size(self.mine)]))[:, 0]]
        mode = self._cheapest(max(counts)) if self._mode == "auto" else self._mode
        call = SparseCall(self, self._numel, self._k, self._op, mode, self._conserve, counts)
        tree = tree_over(self._machines)
        found = MODES[mode].carry_out(self._comm, call, tree)  # type: ignore[arg-type]
        return self.result(found, self._comm.size if self._op == "avg" else 1)

    # ---- messages ----------------------------------------------------------------------------
    def send(self, context: Any, vector: Vector, pairs: Pairs, k: int) -> Vector | None:
        to = dict(pairs).get(self._comm.rank)
        source = targets(pairs).get(self._comm.rank)
        try:
            if to is not None:
                self._comm.send(self.wire.message_of(vector, k), to)
            if source is None:
                return None
            message = np.zeros(self.wire.message(k), np.uint8)
            self._comm.recv(message, source)
        except CollectiveError as error:  # of which this machine's other ranks do not know
            raise RuntimeError(str(error)) from error
        return self.wire.read(message)

    def gather(self, context: Any, counts: Sequence[int]) -> list[Vector]:
        return [self.wire.read(r) for r in self._rows(self.wire.message_of(self.mine, max(counts)))]

    def broadcast(self, context: Any, message: NDArray[np.uint8], root: int) -> None:
        self._comm.pieces.broadcast(flat(message)[0], root)

    def add(self, context: Any, whole: NDArray[np.float32]) -> None:
        self._comm.allreduce(flat(whole)[0], "sum")

    def _rows(self, row: NDArray[Any]) -> NDArray[Any]:
        """The rows of all ranks, which have one shape."""
        every = np.zeros((self._comm.size, row.size), row.dtype)
        self._comm.rows.allgather(flat(row)[0], flat(every)[0], [row.size] * self._comm.size)
        return every

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
