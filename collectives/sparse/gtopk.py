"""Sparse all-reduce: gTop-k's tree, all-gather and sum, or dense.

gTop-k (Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for
Low Bandwidth Networks", algorithm 3, for any number of ranks): over the planner's tree ranks add
their vectors and keep the k largest; the result goes down from the root. The paper's operator
loses what a merge drops (definition 1); here the rank that merges keeps it in its residual.
16-bit values are added in float32 and rounded once a hop; the rest goes to the residual as well.

Ranks merge on the CPU, through shared memory; vectors of GPU tensors pass through the host.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from collectives.bodies import allgather, in_place
from collectives.calls import Calls
from collectives.errors import CollectiveError
from collectives.planning.merging import merge_tree, rounds, sparse_costs
from collectives.sparse.tensors import Residual, result, vector
from collectives.sparse.wire import ITEMS, Vector, Wire
from collectives.tensors import integer
from kernels import merge_topk

MODES = ("auto", "gtopk", "topk", "dense")
HEAD = 8  # bytes before a vector that comes down: its number of entries


def sparse_allreduce(
    calls: Calls, values: Any, indices: Any, numel: int, k: int, residual: Any, mode: str,
    conserve: bool,
) -> tuple[Any, Any]:  # fmt: skip
    """The body of `Communicator.sparse_allreduce`."""
    with calls.telling():
        mine, wire = vector(values, indices, numel)
        if residual is None and conserve:
            raise CollectiveError("conserve=True needs a residual to keep what a merge drops")
        rest = None if residual is None else Residual(residual, numel, values)
        if mode not in MODES:
            raise CollectiveError(f"unknown mode {mode!r}; choose from {', '.join(MODES)}")
        if (wanted := integer(k)) is None or not 0 <= wanted <= numel:
            raise CollectiveError(f"k must be an integer from 0 to {numel}, not {k!r}")
        numel, k = int(numel), wanted
    if mode == "auto":
        item = ITEMS[wire.dtype]
        mode = sparse_costs(calls.choices.topology, numel, k, item)[0].mode
    said = json.dumps([numel, k, mode, conserve, wire.dtype])
    rows = [row.decode() for row in calls.gather(said.encode())]
    if len(set(rows)) > 1:
        asked = "; ".join(f"rank {r}: {row}" for r, row in enumerate(rows))
        raise CollectiveError(
            f"sparse_allreduce of [numel, k, mode, conserve, dtype] differs: {asked}"
        )
    kept = rest if conserve else None
    if mode == "gtopk":
        found, _ = gtopk(calls, mine, k, kept, wire)
        if not conserve and rest is not None:  # the paper's algorithm 4, line 10
            lost = ~np.isin(mine[1], found[1])
            rest.add(mine[1][lost], mine[0][lost])
    else:
        found = _gathered(calls, mine, wire) if mode == "topk" else _dense(calls, mine, numel)
        found = _round(found, kept if calls.rank == 0 else None, wire)
    if rest is not None:
        rest.finish()
    return result(found, values, wire)


def gtopk(
    calls: Calls, mine: Vector, k: int, residual: Residual | None, wire: Wire
) -> tuple[Vector, int]:
    """(the k largest of the sum of all ranks' vectors, entries that came here on the way up).

    What a merge drops is added to the `residual` of the rank that merges.
    """

    def keep(vector: Vector, other: Vector) -> Vector:
        kept: Vector
        kept, dropped = merge_topk(vector, other, k)
        if residual is not None:
            residual.add(dropped[1], dropped[0])
        return _round(kept, residual, wire)

    if mine[0].size > k:
        mine = keep(mine, (np.empty(0, np.float32), np.empty(0, np.int32)))
    tree = merge_tree(calls.choices.topology, wire.entry * k)
    received, sent = 0, []
    for pairs in rounds(tree):
        target, source = dict(pairs), {parent: child for child, parent in pairs}
        said = (-1, 0)
        if calls.rank in target:
            sent.append(calls.block(wire.entry * mine[0].size))
            wire.pack(mine, sent[-1])
            said = calls.offset_of(sent[-1]), mine[0].size
        rows = calls.gather(json.dumps(said).encode())
        if calls.rank in source:
            offset, size = json.loads(rows[source[calls.rank]])
            mine = keep(mine, wire.unpack(calls.bytes_at(offset, wire.entry * size)))
            received += size
    whole = np.zeros(HEAD + wire.entry * k, np.uint8)
    if calls.rank == tree.root:
        whole[:HEAD].view(np.int64)[0] = mine[0].size
        wire.pack(mine, whole[HEAD : HEAD + wire.entry * mine[0].size])
    # what comes down has been made of what was sent, which need not be kept afterwards
    in_place(calls, "broadcast", whole, "sum", tree.root)
    size = int(whole[:HEAD].view(np.int64)[0])
    return wire.unpack(whole[HEAD : HEAD + wire.entry * size]), received


def _round(vector: Vector, residual: Residual | None, wire: Wire) -> Vector:
    """With values that the wire carries; the rest goes to the residual."""
    values = wire.rounded(vector[0])
    if residual is not None and values is not vector[0]:
        fine = np.isfinite(vector[0])
        lost = np.where(fine, vector[0], 0) - np.where(fine, values, 0)
        residual.add(vector[1][fine], lost[fine])
    return values, vector[1]


def _gathered(calls: Calls, mine: Vector, wire: Wire) -> Vector:
    """The sum of all vectors, in the order of the ranks."""
    counts = [int(row) for row in calls.gather(str(mine[0].size).encode())]
    packed = np.zeros(wire.entry * max(counts), np.uint8)
    wire.pack(mine, packed[: wire.entry * mine[0].size])
    everything = allgather(calls, packed, None)
    total: Vector = np.empty(0, np.float32), np.empty(0, np.int32)
    for row, count in zip(everything, counts, strict=True):
        other = wire.unpack(row[: wire.entry * count])
        total, _ = merge_topk(total, other, total[0].size + count)
    return total


def _dense(calls: Calls, mine: Vector, numel: int) -> Vector:
    dense = np.zeros(numel, np.float32)
    dense[mine[1]] = mine[0]
    in_place(calls, "allreduce", dense, "sum")
    where = np.flatnonzero(dense).astype(np.int32)
    return dense[where], where
