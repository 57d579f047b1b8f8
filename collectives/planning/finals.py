"""Which chunks each stream of a rank makes final, in which order: what a gradient queue counts.

A chunk of an all-reduce is final on a rank once: at its COPY, or at the REDUCE that completes it.
Streams finish their chunks in the order of their steps, so one counter for each stream tells
which chunks are there (C-Cube, section III-D: the enqueue semaphore; here one for every tree).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from collectives.errors import PlanError
from collectives.planning.plan import Op, Plan


def finals(plan: Plan, rank: int) -> list[list[int]]:
    """For each stream of `rank`, in the plan's order, the chunks that it makes final.

    Raises PlanError for anything but an all-reduce, and for one that copies a chunk more than once:
    the first copy need not be final.
    """
    if plan.collective != "allreduce":
        raise PlanError(f"a gradient queue belongs to an allreduce, not to {plan.collective}")
    found = [
        [
            chunk
            for _, chunk, step in plan.steps(stream)
            if step.op is Op.COPY or (step.op is Op.REDUCE and step.last)
        ]
        for stream in plan.streams
        if stream.rank == rank
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
    """[layers, streams]: how many chunks each stream must have made final before a layer's
    gradients are there (C-Cube, figure 9: the layer-chunk table).

    `layers`: bytes of each, in the order in which they lie in the message of `nbytes`.
    """
    bounds = plan.chunk_bounds(nbytes)
    stops = np.cumsum([0, *layers]).tolist()
    streams = finals(plan, rank)
    table = np.zeros((len(layers), len(streams)), np.int64)
    for column, chunks in enumerate(streams):
        for count, chunk in enumerate(chunks, 1):
            first, last = bounds[chunk]
            if first == last:
                continue
            at = bisect_right(stops, first) - 1  # the layer of the chunk's first byte
            while at < len(layers) and stops[at] < last:
                table[at, column] = count if layers[at] else 0
                at += 1
    return table
