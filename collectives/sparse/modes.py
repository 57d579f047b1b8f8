"""The ways to sum sparse vectors of all ranks: gTop-k's tree, all-gather and sum, dense.

A mode is one entry of `MODES`; `planning.sparse_tree` predicts how long each takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from linkweave.collectives.calls.context import CallContext
from linkweave.collectives.planning.algorithms.trees import Tree
from linkweave.collectives.planning.goals import SENDRECV
from linkweave.collectives.planning.sparse_tree import rounds
from linkweave.collectives.sparse.backend import Asked, Backend, Message, Vector


@dataclass(frozen=True, slots=True)
class Mode:
    """`total(context, asked, tree)` is the sum on this rank; `messages(size, asked, tree)` are the
    collectives that it makes on `size` ranks."""

    total: Callable[[CallContext, Asked, Tree], Vector]
    messages: Callable[[int, Asked, Tree], list[Message]]


def gtopk(
    context: CallContext, backend: Backend, tree: Tree, k: int, conserve: bool
) -> tuple[Vector, int]:
    """(the k largest of the sum of all ranks' vectors, entries that this rank received going up).

    Shi et al., algorithm 3, for any number of ranks: over the planner's tree ranks add their
    vectors and keep the k largest; the result goes down from the root. The paper's operator loses
    what a merge drops (definition 1); with `conserve` the rank that merges adds it to its residual.
    """
    mine, received = backend.mine, 0
    if backend.size(mine) > k:
        mine = backend.settle(backend.merge(mine, None, k, conserve), conserve)
    for pairs in rounds(tree):
        if (other := backend.send(context, mine, pairs, k)) is not None:
            mine = backend.settle(backend.merge(mine, other, k, conserve), conserve)
            received += backend.size(other)
    return backend.share(context, mine, tree.root, k), received


def _gtopk_total(context: CallContext, asked: Asked, tree: Tree) -> Vector:
    found, _ = gtopk(context, asked.backend, tree, asked.k, asked.conserve)
    if not asked.conserve:
        asked.backend.put_back(found)  # the paper's algorithm 4, line 10
    return found


def _gtopk_messages(size: int, asked: Asked, tree: Tree) -> list[Message]:
    nbytes = asked.backend.wire.message(asked.k)
    sends: list[Message] = [(SENDRECV, nbytes, "uint8", pairs) for pairs in rounds(tree)]
    return [*sends, ("broadcast", nbytes, "uint8", tree.root)]


def _topk_total(context: CallContext, asked: Asked, tree: Tree) -> Vector:
    """The sum of all ranks' vectors, in the order of the ranks."""
    backend = asked.backend
    total, *others = backend.gather(context, asked.counts)
    for other in others:
        total = backend.merge(total, other, backend.size(total) + backend.size(other), False)
    return _settled(context, asked, total)


def _topk_messages(size: int, asked: Asked, tree: Tree) -> list[Message]:
    return [("allgather", asked.backend.wire.part(asked.counts) * size, "uint8", 0)]


def _dense_total(context: CallContext, asked: Asked, tree: Tree) -> Vector:
    return _settled(context, asked, asked.backend.dense(context, asked.numel))


def _dense_messages(size: int, asked: Asked, tree: Tree) -> list[Message]:
    return [("allreduce", 4 * asked.numel, "float32", 0)]


def _settled(context: CallContext, asked: Asked, total: Vector) -> Vector:
    """All ranks round the same total alike, so rank 0 alone keeps the rest."""
    return asked.backend.settle(total, asked.conserve and context.rank == 0)


MODES = {
    "gtopk": Mode(_gtopk_total, _gtopk_messages),
    "topk": Mode(_topk_total, _topk_messages),
    "dense": Mode(_dense_total, _dense_messages),
}
