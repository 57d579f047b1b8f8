"""Sparse all-reduce: checks arguments, compares them between ranks and runs a mode.

16-bit values are added in float32 and rounded once at each merge; the residual gets
the rounding errors.
Source: Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for
Low Bandwidth Networks".
"""

from __future__ import annotations

import json
from typing import Any

from linkweave.collectives.calls.host import HostCalls
from linkweave.collectives.calls.operations import CallContext
from linkweave.collectives.calls.sparse.backend import Backend, SparseCall, Vector
from linkweave.collectives.calls.sparse.host import HostBackend
from linkweave.collectives.calls.sparse.modes import MODES, check_call
from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.planning.sparse_tree import merge_tree, sparse_costs
from linkweave.collectives.runtime.gpu import device as cuda
from linkweave.collectives.runtime.tensors import gpu_of, stream_of


def host_sparse_allreduce(calls: HostCalls, *arguments: Any) -> Vector:
    """Both steps of a sparse all-reduce, for CPU tensors."""
    return sparse_allreduce(calls, agree(calls, *arguments))


def agree(
    calls: HostCalls, values: Any, indices: Any, numel: Any, k: Any, op: str, residual: Any,
    mode: str, conserve: bool,
) -> SparseCall:  # fmt: skip
    """Check arguments and compare them between ranks. Waits for a GPU. Raises CollectiveError."""
    with calls.sharing_errors():
        backend = _backend(values, indices, numel, residual)
        wanted = check_call(int(numel), k, op, residual, mode, conserve)
        device = "cpu" if gpu_of(values) is None else "gpu"
        mine = [int(numel), wanted, op, mode, bool(conserve), backend.wire.dtype, device]
    payload = json.dumps([mine, backend.size(backend.mine)]).encode()
    rows = [json.loads(row) for row in calls.gather("sparse_allreduce", payload)]
    if any(row[0] != mine for row in rows):
        asked = "; ".join(f"rank {r}: {json.dumps(row[0])}" for r, row in enumerate(rows))
        raise CollectiveError(
            f"sparse_allreduce of [numel, k, op, mode, conserve, dtype, device] differs: {asked}"
        )
    counts = [row[1] for row in rows]
    return SparseCall(backend, int(numel), wanted, op, mode, bool(conserve), counts)


def _backend(values: Any, indices: Any, numel: Any, residual: Any) -> Backend:
    try:
        return _backend_of(values, indices, numel, residual)
    except (TypeError, AttributeError) as error:  # from a library that is given another one's array
        raise CollectiveError(f"sparse_allreduce needs arrays of one library: {error}") from error


def _backend_of(values: Any, indices: Any, numel: Any, residual: Any) -> Backend:
    if (index := gpu_of(values)) is None:
        return HostBackend(values, indices, numel, residual)
    from linkweave.collectives.calls.sparse.gpu import GpuBackend  # needs the GPU's library

    if cuda.open_device(index).capturing(stream_of(values)):
        raise CollectiveError(
            "sparse_allreduce cannot be captured into a graph: the host reads its result's size"
        )
    return GpuBackend(values, indices, numel, residual)


def sparse_allreduce(context: CallContext, call: SparseCall) -> Vector:
    """Carry out a call that the ranks have agreed on."""
    backend, wire, topology = call.backend, call.backend.wire, context.planner.topology
    names = [call.mode]
    if call.mode == "auto":
        names = [row.mode for row in sparse_costs(topology, call.numel, call.k, wire.item)]
    tree = merge_tree(topology, wire.entry * call.k)
    for name in names:
        mode = MODES[name]
        if not (why := backend.refusal(context, mode.messages(context.size, call, tree))):
            break
    else:  # no residual has changed yet
        raise CollectiveError(why)
    with context.trace.call(f"sparse_allreduce/{name}/{call.k}"):
        found = mode.carry_out(context, call, tree)
        return backend.result(found, context.size if call.op == "avg" else 1)
