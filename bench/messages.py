"""What ranks give to a collective and get from it, the same for every library that is measured.

A size is that of the whole message, as in nccl-tests: of the result of an all-gather and a gather,
of the input of the others. The root is rank 0. Two kinds, named as in MPI, move the bytes of an
all-gather and an all-to-all in parts of unequal sizes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from linkweave.collectives.planning.collective import COLLECTIVES, PUBLIC, Collective, Layout

KINDS = (*PUBLIC, "allgatherv", "alltoallv")
IN_PLACE = tuple(kind for kind in PUBLIC if COLLECTIVES[kind].layout is Layout.WHOLE)
"""Those that work in place."""

Array = np.ndarray[Any, Any]


def pattern(rank: int, count: int) -> Array:
    """Small integers, whose sums are exact."""
    return (np.arange(count) % 251).astype(np.float32) + np.float32(rank)


def collective(kind: str) -> Collective:
    return COLLECTIVES[kind.removesuffix("v")]


def splits(rank: int, size: int, count: int) -> list[int]:
    """Unequal parts of `count` elements: what a rank sends to each rank in an alltoallv; rank 0's
    are what the ranks give in an allgatherv. So many come to each rank as it sends."""
    each = count // size
    found = [each + (1 - 2 * (r % 2)) * (each // 2) for r in range(size - size % 2)]
    found += [each] * (size % 2)
    return found[rank:] + found[:rank]


def given(kind: str, rank: int, size: int, count: int) -> Array:
    """What a rank gives, for a message of `count` float32. Rows, where these are dealt out."""
    if kind == "allgatherv":
        return pattern(rank, splits(0, size, count)[rank])
    if kind == "alltoallv":
        return pattern(rank, sum(splits(rank, size, count)))
    if kind in ("allgather", "gather"):
        return pattern(rank, count // size)
    x = pattern(rank, count)
    return x if kind in IN_PLACE else x.reshape(size, -1)


def room(kind: str, size: int, count: int) -> tuple[int, ...]:
    """The shape of the output; of nothing where a call works in place."""
    if kind in IN_PLACE:
        return (0,)
    if kind.endswith("v"):
        return (sum(splits(0, size, count)),)
    rows = 1 if kind in ("reduce_scatter", "scatter") else size
    return rows, count // size


def wanted(kind: str, rank: int, size: int, count: int, op: str = "sum") -> Array | None:
    """What a rank gets, by "sum" or "max"; None if that is nobody's business."""
    if kind in ("reduce", "gather") and rank:
        return None
    every = [given(kind, r, size, count) for r in range(size)]
    found: Array = every[0]
    if kind == "alltoallv":
        parts = [np.split(x, np.cumsum(splits(r, size, count))) for r, x in enumerate(every)]
        return np.concatenate([of[rank] for of in parts])
    if kind == "allgatherv":
        return np.concatenate(every)
    if COLLECTIVES[kind].combines:
        found = (np.sum if op == "sum" else np.max)(every, axis=0)
    elif kind == "alltoall":
        found = np.stack([x[rank] for x in every])
    elif kind in ("allgather", "gather"):
        found = np.stack(every)
    return found[rank : rank + 1] if kind in ("reduce_scatter", "scatter") else found


def busbw(kind: str, size: int) -> float:
    """The bytes on the busiest link, as a share of the message (nccl-tests, PERFORMANCE.md)."""
    if kind in ("broadcast", "reduce"):
        return 1.0
    return (2 if kind == "allreduce" else 1) * (size - 1) / size
