"""Sparse all-reduce over several machines: gTop-k's tree with its last edges over machines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.distributed.connections import Connections
from linkweave.collectives.distributed.flat import Flat
from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.launch.machines import Machines
from linkweave.collectives.planning.algorithms.trees import Tree
from linkweave.collectives.planning.collective import Pairs, targets
from linkweave.collectives.planning.sparse_tree import binomial_tree
from linkweave.collectives.sparse.backend import SparseCall, Vector
from linkweave.collectives.sparse.host import HostBackend
from linkweave.collectives.sparse.modes import MODES
from linkweave.collectives.sparse.wire import HEAD
from linkweave.topology.checks import integer


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
    """One call. Raises CollectiveError if an argument is bad."""

    def __init__(
        self, comm: Connections, values: Any, indices: Any, numel: Any, k: Any, op: Any,
        residual: Any, mode: Any, conserve: Any,
    ) -> None:  # fmt: skip
        super().__init__(values, indices, numel, residual)
        if mode not in ("auto", *MODES):
            raise CollectiveError(f"unknown mode {mode!r}; choose from auto, {', '.join(MODES)}")
        if op not in ("sum", "avg"):
            raise CollectiveError(f"a sparse_allreduce has op sum or avg, not {op!r}")
        if residual is None and conserve:
            raise CollectiveError("conserve=True needs a residual to keep what a merge drops")
        self._comm, self._op, self._mode = comm, op, mode
        self._numel, self._k = int(numel), integer(k, "k", 0, int(numel))
        self._conserve = bool(conserve)
        self.asked = (
            f"sparse_allreduce({numel}, k {k}, {op}, {mode}, {conserve}, {self.wire.dtype})"
        )

    def total(self) -> Vector:
        comm = self._comm
        counts = np.zeros((comm.size, 1), np.int64)
        mine = np.array([self.size(self.mine)])
        comm.rows.allgather(Flat(mine).tensor, Flat(counts).tensor.view(comm.size, 1))
        each = [int(n) for n in counts[:, 0]]
        mode = self._cheapest(max(each)) if self._mode == "auto" else self._mode
        call = SparseCall(self, self._numel, self._k, self._op, mode, self._conserve, each)
        found = MODES[mode].total(comm, call, tree_over(comm.machines))  # type: ignore[arg-type]
        return self.result(found, comm.size if self._op == "avg" else 1)

    def _cheapest(self, longest: int) -> str:
        """The mode with the fewest bytes over a machine's link."""
        machines = self._comm.machines
        rounds = (machines.count - 1).bit_length()
        nbytes = {
            "gtopk": 2 * rounds * self.wire.message(self._k),
            "topk": (machines.count - 1) * machines.most * self.wire.message(longest),
            "dense": 2 * 4 * self._numel * (machines.count - 1) // machines.count,
        }
        return min(nbytes, key=lambda name: nbytes[name])

    def send(self, context: Any, vector: Vector, pairs: Pairs, k: int) -> Vector | None:
        whole = np.zeros(self.wire.message(k), np.uint8)
        to, source = dict(pairs).get(self._comm.rank), targets(pairs).get(self._comm.rank)
        try:
            if to is not None:
                self._comm.send(self._message(vector, whole), to)
            elif source is not None:
                self._comm.recv(whole, source)
        except CollectiveError as error:  # of which this machine's other ranks do not know
            raise RuntimeError(str(error)) from error
        return None if source is None else self._read(whole)

    def share(self, context: Any, vector: Vector, root: int, k: int) -> Vector:
        whole = np.zeros(self.wire.message(k), np.uint8)
        if self._comm.rank == root:
            self._message(vector, whole)
        self._comm.pieces.broadcast(Flat(whole).tensor, root)
        return self._read(whole)

    def gather(self, context: Any, counts: Sequence[int]) -> list[Vector]:
        whole = self._message(self.mine, np.zeros(self.wire.message(max(counts)), np.uint8))
        every = np.zeros((self._comm.size, whole.size), np.uint8)
        self._comm.rows.allgather(Flat(whole).tensor, Flat(every).tensor.view(self._comm.size, -1))
        return [self._read(row) for row in every]

    def dense(self, context: Any, numel: int) -> Vector:
        whole = np.zeros(numel, np.float32)
        whole[self.mine[1]] = self.mine[0]
        self._comm.pieces.allreduce(Flat(whole).tensor, "sum")
        where = np.flatnonzero(whole).astype(np.int32)
        return whole[where], where

    def _message(self, vector: Vector, whole: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Write a vector into `whole`, behind the number of its entries."""
        size = self.size(vector)
        whole[:HEAD].view(np.int64)[0] = size
        self.wire.pack(vector, whole[HEAD : HEAD + self.wire.entry * size])
        return whole

    def _read(self, whole: NDArray[np.uint8]) -> Vector:
        size = int(whole[:HEAD].view(np.int64)[0])
        return self.wire.unpack(whole[HEAD : HEAD + self.wire.entry * size])
