"""Which chunks each track of a rank completes, and in which order, for gradient queues.

A chunk of an all-reduce becomes final on a rank once: at its COPY, or at the REDUCE that completes
it. A track completes its chunks in the order of its steps, so one counter for each track tells
which chunks are final (the enqueue semaphore of C-Cube, section III-D; here one for every track).
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
    """Return, for each track of `rank` in the plan's order, the chunks that it makes final.

    Raises PlanError if the collective is not symmetric, or if the rank copies a chunk more than
    once, as the first copy need not be final.
    """
    if not plan.definition.symmetric:
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
    """Return [layers, tracks]: how many chunks each track must complete for each layer (C-Cube,
    figure 9: the layer-chunk table).

    `layers` gives the bytes of each layer, in the order in which they lie in the message of
    `nbytes`.
    """
    made = [np.array(chunks, np.int64) for chunks in finals(plan, rank)]
    return chunk_counts(made, plan.num_chunks, plan.chunk_bytes(nbytes), layers)


def chunk_counts(
    finals: Sequence[NDArray[np.int64]], num_chunks: int, chunk_bytes: int, layers: Sequence[int]
) -> NDArray[np.int64]:
    """Return `layer_chunk_table` from the chunks that each track makes final, in that order."""
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
