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
    context: CallContext, backend: Backend, tree: Tree, k: int
) -> tuple[Vector, list[Vector], int]:
    """At most k entries of the sum, what this rank's merges have cut, and how many entries it has
    received.

    Ranks add their vectors up the planner's tree, keep the k largest entries at each merge, and
    broadcast the result from the root. So an entry that is large only in the sum over all ranks may
    be cut on the way: the result need not be the k largest entries of the sum.
    Source: Shi et al., algorithm 3 and definition 1, extended to any number of ranks.
    """
    mine, received = backend.mine, 0
    cut: list[Vector] = []

    def merged(other: Vector | None) -> Vector:
        kept, dropped = backend.merge(mine, other, k)
        kept, error = backend.rounded(kept)
        cut.extend(part for part in (dropped, error) if part is not None)
        return kept

    if backend.size(mine) > k:
        mine = merged(None)
    for pairs in rounds(tree):
        if (other := backend.send(context, mine, pairs, k)) is not None:
            mine = merged(other)
            received += backend.size(other)
    return backend.share(context, mine, tree.root, k), cut, received


def _gtopk_total(context: CallContext, call: SparseCall, tree: Tree) -> Vector:
    """The result. Entries of this rank whose indices are not in it go back to its residual
    (algorithm 4, line 10). The paper loses what is cut of an index that arrives from elsewhere;
    with `conserve`, it goes to the residual of the rank that has cut it."""
    backend = call.backend
    found, cut, _ = gtopk(context, backend, tree, call.k)
    backend.put_back(found)
    for part in cut if call.conserve else ():
        backend.keep(part, among=found)
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
        total, _ = backend.merge(total, other, backend.size(total) + backend.size(other))
    return _rounded(context, call, total)


def _topk_messages(size: int, call: SparseCall, tree: Tree) -> list[Message]:
    return [("allgather", call.backend.wire.part(call.counts) * size, "uint8", 0)]


def _dense_total(context: CallContext, call: SparseCall, tree: Tree) -> Vector:
    return _rounded(context, call, call.backend.dense(context, call.numel))


def _dense_messages(size: int, call: SparseCall, tree: Tree) -> list[Message]:
    return [("allreduce", 4 * call.numel, "float32", 0)]


def _rounded(context: CallContext, call: SparseCall, total: Vector) -> Vector:
    """Round the total. All ranks round alike, so only rank 0 keeps the rounding errors."""
    total, error = call.backend.rounded(total)
    if error is not None and call.conserve and context.rank == 0:
        call.backend.keep(error)
    return total


MODES = {
    "gtopk": Mode(_gtopk_total, _gtopk_messages),
    "topk": Mode(_topk_total, _topk_messages),
    "dense": Mode(_dense_total, _dense_messages),
}
