"""How a block passes between the cores of two ranks, by threads that act in turns on both."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from linkweave.kernels.plan.turns import turns

BLOCK = 512 << 10  # bytes: several slots, as a longer message has under way
_BURSTS, _ROUNDS = 4, 4
_LOOKS = 500_000  # at a flag, some ms: a thread may have to wait for the interpreter
_PATIENCE = 0.02  # s of a measurement where the cores are busy


def past_caches(first: int, last: int) -> bool | None:
    """Whether blocks pass sooner past the caches between the lowest core on which process `first`
    may run and the highest of process `last`: as a rule, where they share no cache, so that memory
    is nearer than the other's. None if that cannot be measured."""
    try:
        one, other = min(os.sched_getaffinity(first)), max(os.sched_getaffinity(last))
    except OSError:  # one has ended
        return None
    if one == other:
        return False
    through, past = (pass_s(one, other, way) for way in (False, True))
    return None if through is None or past is None else past < through


def pass_s(one: int, other: int, past: bool) -> float | None:
    """Seconds in which a block of 512 KiB gets from one core to another, which copies it on, and a
    flag back: the shortest of 4 bursts. Both copy it `past` the caches, by non-temporal stores, or
    through them. None if this process may not run there, gets no time there, or is about to end."""
    flags = np.zeros(32, np.int64)  # used are two, 128 bytes apart
    mine, theirs = int(flags.ctypes.data), int(flags.ctypes.data) + 128
    blocks = np.zeros((3, BLOCK), np.uint8)  # the first core's, one that both use, the second's
    own, shared, got = (int(block.ctypes.data) for block in blocks)
    at = ((mine, theirs, shared, own, BLOCK, past, True),
          (theirs, mine, got, shared, BLOCK, past, False))  # fmt: skip

    def best_s(side: int) -> float:
        os.sched_setaffinity(0, {(one, other)[side]})  # of this thread
        turns(*at[side], 0, 0, 0, False)  # loads its machine code, or compiles it
        best, until = float("inf"), time.perf_counter() + _PATIENCE
        for base in range(0, _BURSTS * (_ROUNDS + 1), _ROUNDS + 1):
            while not turns(*at[side], base, 1, _LOOKS, False):  # both are there
                if time.perf_counter() > until:
                    return best
            start = time.perf_counter()
            if turns(*at[side], base + 1, _ROUNDS, _LOOKS, False):
                best = min(best, time.perf_counter() - start)
        return best

    try:
        with ThreadPoolExecutor(2) as threads:
            found, _ = threads.map(best_s, (0, 1))
    except (OSError, RuntimeError):  # no such core; threads can no longer be started
        return None
    return found / _ROUNDS if np.isfinite(found) else None
