"""Sparse all-reduce: gTop-k's tree, all-gather and sum, or dense.

gTop-k (Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for
Low Bandwidth Networks", algorithm 3, for any number of ranks): over the planner's tree ranks add
their vectors and keep the k largest; the result goes down from the root. The paper's operator
loses what a merge drops (definition 1); here the rank that merges keeps it in its residual.
16-bit values are added in float32 and rounded once a hop; the rest goes to the residual as well.

Ranks merge where the vectors lie: on the CPU (`host`) or on their GPUs (`gpu`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from linkweave.collectives.calls.host import HostCalls
from linkweave.collectives.calls.operations import CallContext
from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.planning.algorithms.trees import Tree
from linkweave.collectives.planning.goals import Pairs
from linkweave.collectives.planning.sparse_tree import merge_tree, rounds, sparse_costs
from linkweave.collectives.runtime.gpu import executor as cuda
from linkweave.collectives.sparse.wire import Wire
from linkweave.collectives.tensors import gpu_of, integer, stream_of

MODES = ("auto", "gtopk", "topk", "dense")
_OPS = ("sum", "avg")
Vector = tuple[Any, Any]
"""(values, indices), ascending; float32 values, such as the wire carries, and int32."""


class Backend(Protocol):
    """One rank's sparse vectors and residual where they lie: how they are added, and travel."""

    mine: Vector
    wire: Wire

    def size(self, vector: Vector) -> int: ...

    def merge(self, a: Vector, b: Vector | None, k: int, keeps: bool) -> Vector:
        """The k largest of a + b, not rounded; what is dropped goes to the residual, if `keeps`."""

    def settle(self, vector: Vector, keeps: bool) -> Vector:
        """With values that the wire carries; the rest goes to the residual, if `keeps`."""

    def put_back(self, found: Vector) -> None:
        """Our own entries that the result has not go to the residual, if there is one."""

    def refusal(self, context: Any, mode: str, tree: Tree, asked: Asked) -> str:
        """Why a mode lacks room, on all ranks alike; empty where it does not."""

    def send(self, context: Any, vector: Vector, pairs: Pairs, k: int) -> Vector | None:
        """Each source's vector, of k entries at most, to its target; what comes here."""

    def share(self, context: Any, vector: Vector, root: int, k: int) -> Vector:
        """The root's vector, of k entries at most, on all ranks."""

    def gather(self, context: Any, counts: list[int]) -> list[Vector]:
        """All ranks' own vectors, of so many entries."""

    def dense(self, context: Any, numel: int) -> Vector:
        """The sum of all ranks' own vectors, without zeros."""

    def result(self, vector: Vector, divisor: int) -> Vector:
        """As the caller's library has them, in the dtype of its values, which are divided in
        float32 first."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One rank's side of a call that all have agreed on. `counts`: entries of each."""

    backend: Backend
    numel: int
    k: int
    op: str
    mode: str
    conserve: bool
    counts: list[int]


def whole(calls: HostCalls, *arguments: Any) -> Vector:
    """Agree and carry out, on CPU ranks."""
    return sparse_allreduce(calls, agreed(calls, *arguments))


def agreed(
    calls: HostCalls, values: Any, indices: Any, numel: Any, k: Any, op: str, residual: Any,
    mode: str, conserve: bool,
) -> Asked:  # fmt: skip
    """Arguments, checked here and compared with all ranks'. Waits for a GPU. Raises
    CollectiveError."""
    with calls.telling():
        backend = _backend(values, indices, numel, residual)
        if not isinstance(mode, str) or mode not in MODES:
            raise CollectiveError(f"unknown mode {mode!r}; choose from {', '.join(MODES)}")
        if op not in _OPS:
            raise CollectiveError(f"a sparse_allreduce has op {' or '.join(_OPS)}, not {op!r}")
        if (wanted := integer(k)) is None or not 0 <= wanted <= numel:
            raise CollectiveError(f"k must be an integer from 0 to {numel}, not {k!r}")
        if not isinstance(conserve, bool | np.bool_):
            raise CollectiveError(f"conserve must be True or False, not {conserve!r}")
        if residual is None and conserve:
            raise CollectiveError("conserve=True needs a residual to keep what a merge drops")
        device = "cpu" if gpu_of(values) is None else "gpu"
        mine = [int(numel), wanted, op, mode, bool(conserve), backend.wire.dtype, device]
    said = json.dumps([mine, backend.size(backend.mine)])
    rows = [json.loads(row) for row in calls.gather("sparse_allreduce", said.encode())]
    if any(row[0] != mine for row in rows):
        asked = "; ".join(f"rank {r}: {json.dumps(row[0])}" for r, row in enumerate(rows))
        raise CollectiveError(
            f"sparse_allreduce of [numel, k, op, mode, conserve, dtype, device] differs: {asked}"
        )
    counts = [row[1] for row in rows]
    return Asked(backend, int(numel), wanted, op, mode, bool(conserve), counts)


def _backend(values: Any, indices: Any, numel: Any, residual: Any) -> Backend:
    try:
        return _backend_of(values, indices, numel, residual)
    except (TypeError, AttributeError) as error:  # from a library, of what is no array of its own
        raise CollectiveError(f"sparse_allreduce needs arrays of one library: {error}") from error


def _backend_of(values: Any, indices: Any, numel: Any, residual: Any) -> Backend:
    if (index := gpu_of(values)) is None:
        from linkweave.collectives.sparse.host import HostBackend

        return HostBackend(values, indices, numel, residual)
    from linkweave.collectives.sparse.gpu import GpuBackend

    if cuda.open_device(index).capturing(stream_of(values)):
        raise CollectiveError(
            "sparse_allreduce cannot be captured into a graph: the size of its result is the GPU's "
            "to tell"
        )
    return GpuBackend(values, indices, numel, residual)


def sparse_allreduce(context: CallContext, asked: Asked) -> Vector:
    """The body of `Communicator.sparse_allreduce`."""
    backend, wire, topology = asked.backend, asked.backend.wire, context.choices.topology
    modes = [asked.mode]
    if asked.mode == "auto":
        modes = [row.mode for row in sparse_costs(topology, asked.numel, asked.k, wire.item)]
    tree = merge_tree(topology, wire.entry * asked.k)
    for mode in modes:
        if not (why := backend.refusal(context, mode, tree, asked)):
            break
    else:  # before any residual is changed
        raise CollectiveError(why)
    with context.trace.call(f"sparse_allreduce/{mode}/{asked.k}"):
        if mode == "gtopk":
            found, _ = gtopk(context, backend, tree, asked.k, asked.conserve)
            if not asked.conserve:
                backend.put_back(found)  # the paper's algorithm 4, line 10
        else:
            total = backend.dense(context, asked.numel) if mode == "dense" else _sum(context, asked)
            # what all ranks round away alike, the first one keeps
            found = backend.settle(total, asked.conserve and context.rank == 0)
        return backend.result(found, context.size if asked.op == "avg" else 1)


def gtopk(
    context: CallContext, backend: Backend, tree: Tree, k: int, conserve: bool
) -> tuple[Vector, int]:
    """(the k largest of the sum of all ranks' vectors, entries that came here on the way up).

    What a merge drops is added to the residual of the rank that merges.
    """
    mine, received = backend.mine, 0
    if backend.size(mine) > k:
        mine = backend.settle(backend.merge(mine, None, k, conserve), conserve)
    for pairs in rounds(tree):
        if (other := backend.send(context, mine, pairs, k)) is not None:
            mine = backend.settle(backend.merge(mine, other, k, conserve), conserve)
            received += backend.size(other)
    return backend.share(context, mine, tree.root, k), received


def _sum(context: CallContext, asked: Asked) -> Vector:
    """Of all ranks' vectors, in the order of the ranks."""
    backend = asked.backend
    total, *others = backend.gather(context, asked.counts)
    for other in others:
        total = backend.merge(total, other, backend.size(total) + backend.size(other), False)
    return total
