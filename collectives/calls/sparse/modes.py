"""Modes of the sparse all-reduce: gTop-k's tree, all-gather and sum, and dense.

Each mode is one entry of `MODES`. `planning.sparse_tree` predicts their times.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from linkweave.collectives.calls.operations import CallContext
from linkweave.collectives.calls.sparse.backend import Backend, Message, SparseCall, Vector
from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.planning.algorithms.trees import Tree
from linkweave.collectives.planning.collective import SENDRECV
from linkweave.collectives.planning.sparse_tree import rounds
from linkweave.collectives.runtime.tensors import dtype_name, gpu_of, is_contiguous
from linkweave.kernels.merge.cpu import PAD
from linkweave.kernels.validate import FLOATS, is_torch
from linkweave.topology.checks import integer


@dataclass(frozen=True, slots=True)
class Mode:
    """One mode.

    total: returns the sum of the ranks' vectors, which may still be under way, and what this rank
        has cut. It must not change the residual, as a collective may have failed.
    keep: called when all has arrived: adds to the residual, and returns the result.
    messages: the collectives that this takes.
    """

    total: Callable[[CallContext, SparseCall, Tree], tuple[Vector, list[Vector]]]
    keep: Callable[[CallContext, SparseCall, Vector, list[Vector]], Vector]
    messages: Callable[[int, SparseCall, Tree], list[Message]]

    def carry_out(self, context: CallContext, call: SparseCall, tree: Tree) -> Vector:
        found, cut = self.total(context, call, tree)
        return self.keep(context, call, call.backend.arrived(context, found), cut)


def gtopk(
    context: CallContext, backend: Backend, tree: Tree, k: int
) -> tuple[Vector, list[Vector], int]:
    """At most k entries of the sum, what this rank's merges have cut, and how many entries at most
    it has received.

    The result and what was received may still be under way. Ranks add their vectors up the
    planner's tree, keep the k largest entries at each merge, and broadcast the result from the
    root. So an entry that is large only in the sum over all ranks may be cut on the way: the result
    need not be the k largest entries of the sum.
    Source: Shi et al., algorithm 3 and definition 1, extended to any number of ranks.
    """
    mine, received = backend.mine, 0
    cut: list[Vector] = []

    def merged(other: Vector | None) -> Vector:
        kept, dropped = backend.merge(mine, other, k)
        kept, error = backend.rounded(kept)
        cut.extend([dropped] if error is None else [dropped, error])
        return kept

    if backend.size(mine) > k:
        mine = merged(None)
    for pairs in rounds(tree):
        if (other := backend.send(context, mine, pairs, k)) is not None:
            mine = merged(other)
            received += backend.size(other)
    return backend.share(context, mine, tree.root, k), cut, received


def _gtopk_total(context: CallContext, call: SparseCall, tree: Tree) -> tuple[Vector, list[Vector]]:
    found, cut, _ = gtopk(context, call.backend, tree, call.k)
    return found, cut


def _gtopk_keep(context: CallContext, call: SparseCall, found: Vector, cut: list[Vector]) -> Vector:
    """The result. Entries of this rank whose indices are not in it go back to its residual
    (algorithm 4, line 10). The paper loses what is cut of an index that arrives from elsewhere;
    with `conserve`, it goes to the residual of the rank that has cut it."""
    call.backend.put_back(found)
    for part in cut if call.conserve else ():
        call.backend.keep(part, among=found)
    return found


def _gtopk_messages(size: int, call: SparseCall, tree: Tree) -> list[Message]:
    nbytes = call.backend.wire.message(call.k)
    sends: list[Message] = [(SENDRECV, nbytes, "uint8", pairs) for pairs in rounds(tree)]
    return [*sends, ("broadcast", nbytes, "uint8", tree.root)]


def _topk_total(context: CallContext, call: SparseCall, tree: Tree) -> tuple[Vector, list[Vector]]:
    """The sum of all ranks' vectors, in the order of the ranks."""
    backend = call.backend
    total, *others = backend.gather(context, call.counts)
    for other in others:
        total, _ = backend.merge(total, other, backend.size(total) + backend.size(other))
    return total, []


def _topk_messages(size: int, call: SparseCall, tree: Tree) -> list[Message]:
    return [("allgather", call.backend.wire.part(call.counts) * size, "uint8", 0)]


def _dense_total(context: CallContext, call: SparseCall, tree: Tree) -> tuple[Vector, list[Vector]]:
    return call.backend.dense(context, call.numel), []


def _dense_messages(size: int, call: SparseCall, tree: Tree) -> list[Message]:
    return [("allreduce", 4 * call.numel, "float32", 0)]


def _rounded(context: CallContext, call: SparseCall, total: Vector, cut: list[Vector]) -> Vector:
    """Round the total. All ranks round alike, so only rank 0 keeps the rounding errors."""
    total, error = call.backend.rounded(total)
    if error is not None and call.conserve and context.rank == 0:
        call.backend.keep(error)
    return total


MODES = {
    "gtopk": Mode(_gtopk_total, _gtopk_keep, _gtopk_messages),
    "topk": Mode(_topk_total, _rounded, _topk_messages),
    "dense": Mode(_dense_total, _rounded, _dense_messages),
}


_OPS = ("sum", "avg")


def check_vector(values: Any, indices: Any, numel: Any) -> int:
    """`numel` as an int. Raises CollectiveError for errors visible without reading entries."""
    number = integer(numel, "numel", 0, PAD)
    if gpu_of(values) != gpu_of(indices) or is_torch(values) != is_torch(indices):
        raise CollectiveError("values and indices must be of one library and on one device")
    name, shapes = dtype_name(values), (tuple(values.shape), tuple(indices.shape))
    if name not in FLOATS or len(shapes[0]) != 1 or shapes[0] != shapes[1]:
        raise CollectiveError(
            f"values must be {', '.join(FLOATS)} in one dimension, one for each index, not {name} "
            f"of shape {shapes[0]} for indices of shape {shapes[1]}"
        )
    if (kind := dtype_name(indices)) != "int32":
        raise CollectiveError(f"indices must be int32, not {kind}")
    return number


def check_call(numel: int, k: Any, op: Any, residual: Any, mode: Any, conserve: Any) -> int:
    """`k` as an int. Raises CollectiveError for arguments of a call that are bad."""
    if not isinstance(mode, str) or mode not in ("auto", *MODES):
        raise CollectiveError(f"unknown mode {mode!r}; choose from auto, {', '.join(MODES)}")
    if op not in _OPS:
        raise CollectiveError(f"a sparse_allreduce has op {' or '.join(_OPS)}, not {op!r}")
    wanted = integer(k, "k", 0, numel)
    if not isinstance(conserve, bool | np.bool_):
        raise CollectiveError(f"conserve must be True or False, not {conserve!r}")
    if residual is None and conserve:
        raise CollectiveError("conserve=True needs a residual to keep what a merge drops")
    return wanted


def wrong_indices(numel: int) -> CollectiveError:
    return CollectiveError(f"indices must ascend from 0 to {numel - 1} at most, all different")


def flat_residual(x: Any, numel: int, like: Any) -> Any:
    """A one-dimensional view of a residual. Raises CollectiveError."""
    array = is_torch(x) or isinstance(x, np.ndarray) or gpu_of(x) is not None
    if (
        not array
        or gpu_of(x) != gpu_of(like)
        or dtype_name(x) != "float32"
        or math.prod(x.shape) != numel
        or not is_contiguous(x)
        or (isinstance(x, np.ndarray) and not x.flags.writeable)
    ):
        raise CollectiveError(
            f"residual must be a contiguous, writable float32 array of {numel} elements, on the "
            "values' device"
        )
    return (x.detach() if is_torch(x) else x).reshape(-1)
