"""Which chunks each track of a rank makes final, in which order: what a gradient queue counts.

A chunk of an all-reduce is final on a rank once: at its COPY, or at the REDUCE that completes it.
Tracks finish their chunks in the order of their steps, so one counter for each track tells
which chunks are there (C-Cube, section III-D: the enqueue semaphore; here one for every tree).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.errors import PlanError
from linkweave.collectives.planning.plan import Op, Plan


def finals(plan: Plan, rank: int) -> list[list[int]]:
    """For each track of `rank`, in the plan's order, the chunks that it makes final.

    Raises PlanError for anything but an all-reduce, and for one that copies a chunk more than once:
    the first copy need not be final.
    """
    if plan.collective != "allreduce":
        raise PlanError(f"a gradient queue belongs to an allreduce, not to {plan.collective}")
    found = [
        [
            chunk
            for _, chunk, step in plan.steps(track)
            if step.op is Op.COPY or (step.op is Op.REDUCE and step.last)
        ]
        for track in plan.tracks
        if track.rank == rank
    ]
    chunk, times = max(Counter(chain(*found)).items(), key=itemgetter(1), default=(0, 0))
    if times > 1:
        raise PlanError(
            f"a gradient queue needs a plan that completes every chunk once; rank {rank} completes "
            f"chunk {chunk} {times} times"
        )
    return found


def layer_chunk_table(
    plan: Plan, rank: int, nbytes: int, layers: Sequence[int]
) -> NDArray[np.int64]:
    """[layers, tracks]: how many chunks each track must have made final before a layer's
    gradients are there (C-Cube, figure 9: the layer-chunk table).

    `layers`: bytes of each, in the order in which they lie in the message of `nbytes`.
    """
    made = [np.array(chunks, np.int64) for chunks in finals(plan, rank)]
    return table(made, plan.num_chunks, plan.chunk_bytes(nbytes), layers)


def table(
    finals: Sequence[NDArray[np.int64]], num_chunks: int, chunk_bytes: int, layers: Sequence[int]
) -> NDArray[np.int64]:
    """`layer_chunk_table` of the chunks that each track makes final, in that order."""
    sizes = np.array(layers, np.int64)
    stops = np.cumsum(sizes)
    found = np.zeros((len(sizes), len(finals)), np.int64)
    some = np.flatnonzero(sizes)  # an empty layer needs nothing
    if not some.size:
        return found
    first = (stops - sizes)[some] // chunk_bytes
    last = (stops[some] - 1) // chunk_bytes
    spans = np.stack([first, last + 1], axis=1).reshape(-1)
    for column, chunks in enumerate(finals):
        counts = np.zeros(num_chunks + 1, np.int64)
        counts[chunks] = np.arange(1, len(chunks) + 1)
        found[some, column] = np.maximum.reduceat(counts, spans)[::2]
    return found
