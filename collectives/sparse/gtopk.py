"""Sparse all-reduce on CPU ranks: gTop-k's tree, all-gather and sum, or dense.

gTop-k (Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for
Low Bandwidth Networks", algorithm 3, for any number of ranks): pairs of ranks 1, 2, 4, ... apart
add their vectors and keep the k largest; the result goes down from rank 0. The paper's operator
loses what a merge drops (definition 1); here the rank that merges keeps it in its residual.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.bodies import allgather, in_place
from collectives.calls import Calls
from collectives.errors import CollectiveError, PlanError
from collectives.planning.planner import predict, ranked
from collectives.tensors import is_torch
from kernels import merge_topk
from topology import Topology

MODES = ("auto", "gtopk", "topk", "dense")
ENTRY = 8  # bytes on the wire: a float32 and an int32

Vector = tuple[NDArray[np.float32], NDArray[np.int32]]


def predicted_seconds(topology: Topology, numel: int, k: int) -> dict[str, float]:
    """Of each mode, for k entries a rank of `numel` float32 (the paper's equations 5, 6 and 7).

    Dense and all-gather as planned on this map, infinite where there is no plan; gTop-k as
    2 ceil(log2 P) hops of k entries, up and down between rank 0 and ranks 1, 2, 4, ...
    """
    size = len(topology.gpus)

    def best(kind: str, on: Topology, nbytes: int) -> float:
        try:
            return predict(on, nbytes, ranked(on, nbytes, kind)[0], kind)[0]
        except PlanError:
            return math.inf

    if size == 1:
        return dict.fromkeys(MODES[1:], 0.0)
    pairs = [topology.subset((topology.gpus[0], topology.gpus[step])) for step in _steps(size)]
    return {
        "gtopk": sum(2 * best("broadcast", pair, ENTRY * k) for pair in pairs),
        "topk": best("allgather", topology, ENTRY * k * size),
        "dense": best("allreduce", topology, 4 * numel),
    }


def sparse_allreduce(
    calls: Any, values: Any, indices: Any, numel: int, k: int, residual: Any, mode: str,
    conserve: bool,
) -> tuple[Any, Any]:  # fmt: skip
    """The body of `Communicator.sparse_allreduce`."""
    if not isinstance(calls, Calls):
        raise CollectiveError("sparse_allreduce takes CPU tensors")
    with calls.telling():
        mine = _vector(values, indices, numel)
        rest = _residual(residual, numel, conserve)
        if mode not in MODES:
            raise CollectiveError(f"unknown mode {mode!r}; choose from {', '.join(MODES)}")
        if isinstance(k, bool) or not isinstance(k, int) or not 0 <= k <= numel:
            raise CollectiveError(f"k must be an integer from 0 to {numel}, not {k!r}")
    if mode == "auto":
        costs = predicted_seconds(calls.choices.topology, numel, k)
        mode = min(costs, key=lambda name: costs[name])
    said = json.dumps([numel, k, mode, conserve])
    rows = [row.decode() for row in calls.gather(said.encode())]
    if len(set(rows)) > 1:
        asked = "; ".join(f"rank {r}: {row}" for r, row in enumerate(rows))
        raise CollectiveError(f"sparse_allreduce of [numel, k, mode, conserve] differs: {asked}")
    if mode == "gtopk":
        found, _ = gtopk(calls, mine, k, rest if conserve else None)
        if not conserve and rest is not None:  # the paper's algorithm 4, line 10
            lost = ~np.isin(mine[1], found[1])
            rest[mine[1][lost]] += mine[0][lost]
    elif mode == "topk":
        found = _gathered(calls, mine)
    else:
        found = _dense(calls, mine, numel)
    if is_torch(values):
        import torch

        return torch.from_numpy(found[0]), torch.from_numpy(found[1])
    return found


def gtopk(
    calls: Calls, mine: Vector, k: int, residual: NDArray[np.float32] | None
) -> tuple[Vector, int]:
    """(the k largest of the sum of all ranks' vectors, entries that came here on the way up).

    What a merge drops is added to the `residual` of the rank that merges.
    """

    def keep(vector: Vector, other: Vector) -> Vector:
        kept: Vector
        kept, dropped = merge_topk(vector, other, k)
        if residual is not None:
            residual[dropped[1]] += dropped[0]
        return kept

    if mine[0].size > k:
        mine = keep(mine, (np.empty(0, np.float32), np.empty(0, np.int32)))
    received, sent = 0, []
    for step in _steps(calls.size):
        sends = calls.rank % (2 * step) == step
        said = (-1, 0)
        if sends:
            sent.append(calls.block(ENTRY * mine[0].size))
            _pack(sent[-1], mine)
            said = calls.offset_of(sent[-1]), mine[0].size
        rows = calls.gather(json.dumps(said).encode())
        other = calls.rank + step
        if calls.rank % (2 * step) == 0 and other < calls.size:
            offset, size = json.loads(rows[other])
            mine = keep(mine, _unpack(calls.bytes_at(offset, ENTRY * size)))
            received += size
    whole = np.zeros(ENTRY * (k + 1), np.uint8)
    if calls.rank == 0:
        whole[:ENTRY].view(np.int64)[0] = mine[0].size
        _pack(whole[ENTRY : ENTRY * (mine[0].size + 1)], mine)
    # what comes down has been made of what was sent, which need not be kept afterwards
    in_place(calls, "broadcast", whole, "sum", 0)
    size = int(whole[:ENTRY].view(np.int64)[0])
    return _unpack(whole[ENTRY : ENTRY * (size + 1)]), received


def _steps(size: int) -> Iterator[int]:
    step = 1
    while step < size:
        yield step
        step *= 2


def _gathered(calls: Calls, mine: Vector) -> Vector:
    """The sum of all vectors, in the order of the ranks."""
    counts = [int(row) for row in calls.gather(str(mine[0].size).encode())]
    most = max(counts)
    packed = np.zeros(ENTRY * most, np.uint8)
    _pack(packed[: ENTRY * mine[0].size], mine)
    everything = allgather(calls, packed, None)
    total: Vector = np.empty(0, np.float32), np.empty(0, np.int32)
    for row, count in zip(everything, counts, strict=True):
        total, _ = merge_topk(total, _unpack(row[: ENTRY * count]), total[0].size + count)
    return total


def _dense(calls: Calls, mine: Vector, numel: int) -> Vector:
    dense = np.zeros(numel, np.float32)
    dense[mine[1]] = mine[0]
    in_place(calls, "allreduce", dense, "sum")
    where = np.flatnonzero(dense).astype(np.int32)
    return dense[where], where


def _pack(room: NDArray[np.uint8], vector: Vector) -> None:
    half = room.size // 2
    room[:half].view(np.float32)[:] = vector[0]
    room[half:].view(np.int32)[:] = vector[1]


def _unpack(room: NDArray[np.uint8]) -> Vector:
    half = room.size // 2
    return room[:half].view(np.float32).copy(), room[half:].view(np.int32).copy()


def _vector(values: Any, indices: Any, numel: Any) -> Vector:
    if isinstance(numel, bool) or not isinstance(numel, int) or not 0 <= numel <= 1 << 31:
        raise CollectiveError(f"numel must be an integer from 0 to 2^31, not {numel!r}")
    pair = [x.detach().numpy() if is_torch(x) else np.asarray(x) for x in (values, indices)]
    if pair[0].dtype != np.float32 or pair[0].ndim != 1 or pair[0].shape != pair[1].shape:
        raise CollectiveError(
            f"values must be float32 in one dimension, one for each index, not {pair[0].dtype} of "
            f"shape {pair[0].shape} for indices of shape {pair[1].shape}"
        )
    if pair[1].dtype != np.int32:
        raise CollectiveError(f"indices must be int32, not {pair[1].dtype}")
    where = pair[1]
    if where.size and (where[0] < 0 or where[-1] >= numel or (np.diff(where) <= 0).any()):
        raise CollectiveError(f"indices must ascend from 0 to {numel - 1} at most, all different")
    return pair[0], where


def _residual(residual: Any, numel: int, conserve: bool) -> NDArray[np.float32] | None:
    if residual is None:
        if conserve:
            raise CollectiveError("conserve=True needs a residual to keep what a merge drops")
        return None
    dense: NDArray[np.float32] = residual.detach().numpy() if is_torch(residual) else residual
    wrong = not isinstance(dense, np.ndarray) or dense.dtype != np.float32
    if wrong or dense.size != numel or not dense.flags.c_contiguous or not dense.flags.writeable:
        raise CollectiveError(
            f"residual must be a contiguous, writable float32 array of {numel} elements"
        )
    return dense.reshape(-1)
