"""Sparse all-reduce: checks arguments, compares them between ranks and runs a mode.

16-bit values are added in float32 and rounded once at each merge; the residual gets
the rounding errors.
Source: Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for
Low Bandwidth Networks".
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from linkweave.collectives.calls.host import HostCalls
from linkweave.collectives.calls.operations import CallContext
from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.planning.sparse_tree import merge_tree, sparse_costs
from linkweave.collectives.runtime.gpu import device as cuda
from linkweave.collectives.sparse.backend import Backend, SparseCall, Vector
from linkweave.collectives.sparse.host import HostBackend
from linkweave.collectives.sparse.modes import MODES
from linkweave.collectives.tensors import gpu_of, stream_of
from linkweave.topology.checks import integer

_OPS = ("sum", "avg")


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
        if not isinstance(mode, str) or mode not in ("auto", *MODES):
            raise CollectiveError(f"unknown mode {mode!r}; choose from auto, {', '.join(MODES)}")
        if op not in _OPS:
            raise CollectiveError(f"a sparse_allreduce has op {' or '.join(_OPS)}, not {op!r}")
        wanted = integer(k, "k", 0, int(numel))
        if not isinstance(conserve, bool | np.bool_):
            raise CollectiveError(f"conserve must be True or False, not {conserve!r}")
        if residual is None and conserve:
            raise CollectiveError("conserve=True needs a residual to keep what a merge drops")
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
    from linkweave.collectives.sparse.gpu import GpuBackend  # needs the GPU's library

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
        found = mode.total(context, call, tree)
        return backend.result(found, context.size if call.op == "avg" else 1)
