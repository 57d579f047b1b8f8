"""Where the blocks of a collective lie in a rank's buffer, equal or of sizes of their own.

The blocks are those that `goals.blocks` counts: one of an all-reduce, one for each rank of an
all-gather or a reduce-scatter, in the order of the ranks; of an all-to-all P x P, of which a rank
has those that it sends and, behind them, those that it receives. Every block is cut into as many
chunks, so the largest decides how large a chunk is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.planning.goals import blocks
from linkweave.collectives.planning.plan import ALIGN

Sizes = Sequence[Sequence[int]] | Sequence[int]


def table(
    collective: str, size: int, rank: int, nbytes: int, sizes: Sizes | None = None
) -> NDArray[np.int64]:
    """[blocks, 2]: first byte and bytes of each block in a rank's buffer of `nbytes`.

    `sizes` (bytes), where they are not equal: of each rank's block; of an all-to-all, for each rank
    those of what it sends to each. A block that a rank only passes on, or keeps to itself in an
    all-to-all, has a size, and lies at 0.
    """
    unit = blocks(collective, size)
    if unit == 1:
        return np.array([(0, nbytes)], np.int64)
    if collective != "alltoall":
        parts = [nbytes // size] * size if sizes is None else sizes
        of_ranks = np.array(parts, np.int64)
        return np.stack([np.cumsum(of_ranks) - of_ranks, of_ranks], axis=1)
    matrix = np.full((size, size), nbytes // size, np.int64) if sizes is None else np.array(sizes)
    found = np.zeros((size, size, 2), np.int64)
    found[:, :, 1] = matrix
    sent, received = matrix[rank], matrix[:, rank]
    found[rank, :, 0] = np.cumsum(sent) - sent
    found[:, rank, 0] = sent.sum() + np.cumsum(received) - received
    found[rank, rank, 0] = 0
    return found.reshape(unit, 2)


def chunk_bytes(table: NDArray[np.int64], num_chunks: int) -> int:
    """Bytes of a full chunk: the least multiple of 16 that lets all chunks cover every block."""
    parts = num_chunks // len(table)
    return -(-int(table[:, 1].max()) // (parts * ALIGN)) * ALIGN
