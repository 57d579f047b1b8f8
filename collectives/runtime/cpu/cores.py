"""Whether the cores of the ranks share a cache, by a flag that goes back and forth between two."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from linkweave.kernels.plan.counters import turns

NEAR_NS = 350
"""Nanoseconds below which a round trip is one between cores that share a cache: some 120 to 180 on
an EPYC within eight cores of one cache, 600 between two such parts."""
_BURSTS, _ROUNDS = 8, 400
_SPINS = 20_000  # in which the other core must answer


def round_trip_ns(one: int, other: int) -> float:
    """The round trip of a flag between two cores, in ns: the shortest of 8 bursts. 0 if they are
    one, or if this process may not run there or gets no time there."""
    if one == other:
        return 0.0
    flags = np.zeros(32, np.int64)  # used are two, 128 bytes apart
    mine, theirs = int(flags.ctypes.data), int(flags.ctypes.data) + 128
    at = (mine, theirs), (theirs, mine)

    def burst_ns(side: int) -> float:
        os.sched_setaffinity(0, {(one, other)[side]})  # of this thread
        turns(*at[side], side == 0, 0, 1, _SPINS)
        best = float("inf")
        for burst in range(_BURSTS):
            start = time.perf_counter()
            if not turns(*at[side], side == 0, 1 + burst * _ROUNDS, _ROUNDS, _SPINS):
                break
            best = min(best, time.perf_counter() - start)
        return best / _ROUNDS * 1e9

    with ThreadPoolExecutor(2) as threads:
        sides = [threads.submit(burst_ns, side) for side in (0, 1)]
        try:
            found = sides[0].result(), sides[1].result()
        except OSError:
            return 0.0
    return found[0] if np.isfinite(found).all() else 0.0


def far_apart(first: int, last: int) -> bool:
    """Whether a message between processes `first` and `last`, which run wherever they may, can pass
    between cores that share no cache."""
    try:
        ns = round_trip_ns(min(os.sched_getaffinity(first)), max(os.sched_getaffinity(last)))
    except OSError:  # one has ended
        return False
    return ns > NEAR_NS
