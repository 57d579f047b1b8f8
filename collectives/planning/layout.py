"""Where the blocks of a collective lie in a rank's buffer; they may be of unequal sizes.

Every block is cut into the same number of chunks, so the largest block determines how large a
chunk is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.planning.collective import COLLECTIVES, Layout, Root

ALIGN = 16
"""Chunks begin at multiples of so many bytes in their blocks: a GPU moves 16 bytes at once."""

Sizes = Sequence[Sequence[int]] | Sequence[int]


def block_table(
    collective: str, size: int, rank: int, nbytes: int, sizes: Sizes | None = None
) -> NDArray[np.int64]:
    """Return [blocks, 2]: first byte and bytes of each block in a rank's buffer.

    `nbytes` is the rank's message. `sizes` gives the bytes of unequal blocks: one for each rank, or
    for each pair of ranks [source][target]. A block that the rank only passes on lies at 0.
    """
    layout = COLLECTIVES[collective].layout
    if layout is Layout.WHOLE:
        return np.array([(0, nbytes)], np.int64)
    if layout is Layout.PER_RANK:
        of_ranks = np.array([nbytes // size] * size if sizes is None else sizes, np.int64)
        return np.stack([np.cumsum(of_ranks) - of_ranks, of_ranks], axis=1)
    matrix = _matrix(size, nbytes, sizes)
    table = np.zeros((size, size, 2), np.int64)
    table[:, :, 1] = matrix
    sent, received = matrix[rank], matrix[:, rank]
    table[rank, :, 0] = np.cumsum(sent) - sent
    table[:, rank, 0] = sent.sum() + np.cumsum(received) - received
    return table.reshape(-1, 2)


def _matrix(size: int, nbytes: int, sizes: Sizes | None) -> NDArray[np.int64]:
    """[source, target]: bytes of each block of an all-to-all."""
    if sizes is None:
        return np.full((size, size), nbytes // size, np.int64)
    return np.array(sizes, np.int64)


class Staging(NamedTuple):
    """Where a rank's tensors lie in its message, which is the buffer of a plan, of `nbytes`.

    The `given` bytes of the input lie at offset `put`; the `result` ones of the output at `get`, of
    which `kept` bytes from `keep_to` are those of the input that lie at `keep_from`.
    """

    put: int
    given: int
    keep_from: int
    keep_to: int
    kept: int
    get: int
    result: int
    nbytes: int


def staging(
    collective: str, size: int, rank: int, nbytes: int, sizes: Sizes | None = None, root: Root = 0
) -> Staging:
    """Return it for a message of `nbytes`; arguments as those of `block_table`.

    Only the root of a gather has a result, and only that of a scatter an input.
    """
    kind = COLLECTIVES[collective]
    if kind.layout is Layout.WHOLE:
        return Staging(0, nbytes, 0, 0, 0, 0, nbytes, nbytes)
    table = block_table(collective, size, rank, nbytes, sizes)
    if kind.layout is Layout.PER_RANK:
        (first, own), whole = table[rank].tolist(), int(table[:, 1].sum())
        gives = [kind.gives(size, root, rank, index) for index in range(size)]
        gets = [kind.goal(size, root, rank, index) is not None for index in range(size)]
        (put, given), (get, result) = (
            (0, whole) if all(blocks) else (first, own if blocks[rank] else 0)
            for blocks in (gives, gets)
        )
        kept = own if all(gives) and not all(gets) else 0
        return Staging(put, given, first, first, kept, get, result, whole)
    pairs = table.reshape(size, size, 2)
    sent, received = (int(pairs[at][..., 1].sum()) for at in (rank, (slice(None), rank)))
    before, own = int(pairs[rank, :rank, 1].sum()), int(pairs[rank, rank, 1])
    kept_at = int(pairs[rank, rank, 0])
    return Staging(0, sent, before, kept_at, own, sent, received, sent + received)


def reads(
    collective: str, size: int, rank: int, nbytes: int, sizes: Sizes | None = None, root: Root = 0
) -> NDArray[np.int64]:
    """What a rank's result consists of, if nothing is combined; arguments as those of `staging`.

    Returns [n, 4]: (rank, offset in its input, offset in the result, bytes). The ranks begin with
    different peers.
    """
    kind = COLLECTIVES[collective]
    if kind.layout is Layout.PER_PAIR:
        matrix = _matrix(size, nbytes, sizes)
        counts = matrix[:, rank]
        starts = matrix[:, :rank].sum(axis=1), np.cumsum(counts) - counts
        found = np.stack([np.arange(size), *starts, counts], axis=1)
    else:  # a block lies at the same offset in all messages
        table = block_table(collective, size, rank, nbytes, sizes)
        get = staging(collective, size, rank, nbytes, sizes, root).get
        goals = [kind.goal(size, root, rank, block) for block in range(len(table))]
        wanted = [(block, goal.bit_length() - 1) for block, goal in enumerate(goals) if goal]
        puts = {p: staging(collective, size, p, nbytes, sizes, root).put for _, p in wanted}
        found = np.array([
            (peer, table[block, 0] - puts[peer], table[block, 0] - get, table[block, 1])
            for block, peer in wanted
        ], np.int64).reshape(-1, 4)  # fmt: skip
    found = found[np.argsort((found[:, 0] - rank) % size, kind="stable")]
    return np.ascontiguousarray(found[found[:, 3] > 0])


def chunk_bytes(table: NDArray[np.int64], num_chunks: int) -> int:
    """Bytes of a full chunk: the least multiple of ALIGN with which all chunks cover each block."""
    parts = num_chunks // len(table)
    return -(-int(table[:, 1].max()) // (parts * ALIGN)) * ALIGN
