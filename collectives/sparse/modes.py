"""Modes of the sparse all-reduce: gTop-k's tree, all-gather and sum, and dense.

Each mode is one entry of `MODES`. `planning.sparse_tree` predicts their times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from linkweave.collectives.calls.operations import CallContext
from linkweave.collectives.planning.algorithms.trees import Tree
from linkweave.collectives.planning.collective import SENDRECV
from linkweave.collectives.planning.sparse_tree import rounds
from linkweave.collectives.sparse.backend import Backend, Message, SparseCall, Vector


@dataclass(frozen=True, slots=True)
class Mode:
    """One mode. `total` sums the vectors; `messages` lists the collectives that this takes."""

    total: Callable[[CallContext, SparseCall, Tree], Vector]
    messages: Callable[[int, SparseCall, Tree], list[Message]]


def gtopk(
    context: CallContext, backend: Backend, tree: Tree, k: int, conserve: bool
) -> tuple[Vector, int]:
    """At most k entries of the sum, and the number of entries that this rank received.

    Ranks add their vectors up the planner's tree, keep the k largest entries at each merge, and
    broadcast the result from the root. So an entry that is large only in the sum over all ranks may
    be dropped on the way: the result need not be the k largest entries of the sum. The paper loses
    the entries that a merge drops (definition 1); with `conserve` the rank that merges adds them to
    its residual. Source: Shi et al., algorithm 3, extended to any number of ranks.
    """
    mine, received = backend.mine, 0
    if backend.size(mine) > k:
        mine = backend.round_values(backend.merge(mine, None, k, conserve), conserve)
    for pairs in rounds(tree):
        if (other := backend.send(context, mine, pairs, k)) is not None:
            mine = backend.round_values(backend.merge(mine, other, k, conserve), conserve)
            received += backend.size(other)
    return backend.share(context, mine, tree.root, k), received


def _gtopk_total(context: CallContext, call: SparseCall, tree: Tree) -> Vector:
    found, _ = gtopk(context, call.backend, tree, call.k, call.conserve)
    if not call.conserve:
        call.backend.put_back(found)  # the paper's algorithm 4, line 10
    return found


def _gtopk_messages(size: int, call: SparseCall, tree: Tree) -> list[Message]:
    nbytes = call.backend.wire.message(call.k)
    sends: list[Message] = [(SENDRECV, nbytes, "uint8", pairs) for pairs in rounds(tree)]
    return [*sends, ("broadcast", nbytes, "uint8", tree.root)]


def _topk_total(context: CallContext, call: SparseCall, tree: Tree) -> Vector:
    """The sum of all ranks' vectors, in the order of the ranks."""
    backend = call.backend
    total, *others = backend.gather(context, call.counts)
    for other in others:
        total = backend.merge(total, other, backend.size(total) + backend.size(other), False)
    return _rounded(context, call, total)


def _topk_messages(size: int, call: SparseCall, tree: Tree) -> list[Message]:
    return [("allgather", call.backend.wire.part(call.counts) * size, "uint8", 0)]


def _dense_total(context: CallContext, call: SparseCall, tree: Tree) -> Vector:
    return _rounded(context, call, call.backend.dense(context, call.numel))


def _dense_messages(size: int, call: SparseCall, tree: Tree) -> list[Message]:
    return [("allreduce", 4 * call.numel, "float32", 0)]


def _rounded(context: CallContext, call: SparseCall, total: Vector) -> Vector:
    """Round the total. All ranks round alike, so only rank 0 keeps the rounding errors."""
    return call.backend.round_values(total, call.conserve and context.rank == 0)


MODES = {
    "gtopk": Mode(_gtopk_total, _gtopk_messages),
    "topk": Mode(_topk_total, _topk_messages),
    "dense": Mode(_dense_total, _dense_messages),
}
