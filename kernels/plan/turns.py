"""Two cores act in turns, each upon the other's flag: how long a flag, or a block, takes."""

from __future__ import annotations

from numba import njit

from linkweave.kernels.atomics import fence, load_acquire, sched_yield, store_release
from linkweave.kernels.plan.interpreter import move


@njit(inline="always")
def _raised(flag, k, looks, yields):
    looked = 0
    while load_acquire(flag) < k:
        looked += 1
        if looked > looks:
            return False
        if yields and looked > 1000:
            sched_yield()
    return True


@njit(nogil=True, cache=True)
def turns(mine, theirs, dst, src, nbytes, past, first, base, rounds, looks, yields):
    """Raise the flag at `mine` so many `rounds` from `base`, in turns with the one at `theirs`,
    each time after a copy of `nbytes` from `src` to `dst`, `past` the caches or through them.
    Returns False if the other flag was not raised in so many `looks` at it; `yields`: the peer may
    need this core."""
    for k in range(base + 1, base + rounds + 1):
        if not first and not _raised(theirs, k, looks, yields):
            return False
        if nbytes:
            move(dst, src, nbytes, past)
            fence()
        store_release(mine, k)
        if first and not _raised(theirs, k, looks, yields):
            return False
    return True
