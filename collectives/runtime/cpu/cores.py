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
_LOOKS = 500_000  # at a flag, some ms: a thread may have to wait for the interpreter
_PATIENCE = 0.02  # s of a measurement where the cores are busy


def round_trip_ns(one: int, other: int) -> float | None:
    """The round trip of a flag between two cores, in ns: the shortest of 8 bursts. 0 if they are
    one. None if this process may not run there, gets no time there, or is about to end."""
    if one == other:
        return 0.0
    flags = np.zeros(32, np.int64)  # used are two, 128 bytes apart
    mine, theirs = int(flags.ctypes.data), int(flags.ctypes.data) + 128
    at = (mine, theirs), (theirs, mine)

    def best_s(side: int) -> float:
        os.sched_setaffinity(0, {(one, other)[side]})  # of this thread
        turns(*at[side], side == 0, 0, 0, 0, False)  # loads its machine code, or compiles it
        best, until = float("inf"), time.perf_counter() + _PATIENCE
        for base in range(0, _BURSTS * (_ROUNDS + 1), _ROUNDS + 1):
            while not turns(*at[side], side == 0, base, 1, _LOOKS, False):  # both are there
                if time.perf_counter() > until:
                    return best
            start = time.perf_counter()
            if turns(*at[side], side == 0, base + 1, _ROUNDS, _LOOKS, False):
                best = min(best, time.perf_counter() - start)
        return best

    try:
        with ThreadPoolExecutor(2) as threads:
            found, _ = threads.map(best_s, (0, 1))
    except (OSError, RuntimeError):  # no such core; threads can no longer be started
        return None
    return found / _ROUNDS * 1e9 if np.isfinite(found) else None


def far_apart(first: int, last: int) -> bool | None:
    """Whether the lowest core on which process `first` may run and the highest of process `last`
    share no cache, so that messages between their ranks may pass between such cores. None if that
    cannot be measured."""
    try:
        ns = round_trip_ns(min(os.sched_getaffinity(first)), max(os.sched_getaffinity(last)))
    except OSError:  # one has ended
        return None
    return None if ns is None else ns > NEAR_NS
