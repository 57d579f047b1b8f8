"""Counters in shared memory, and how ranks wait for them.

A counter has one writer and only grows. A rank that waits yields its core; after `YIELDS` rounds it
sleeps on its *bell*, a word that whoever raises a counter for it clears and wakes. A rank that
wants to sleep sets its bell and looks once more behind a fence; a rank that has raised a counter
looks at the bells behind a fence: so at least one of the two sees the other.
"""

from __future__ import annotations

from numba import njit

from linkweave.kernels.atomics import (
    exchange_if,
    fence,
    futex_wait,
    futex_wake,
    load_acquire,
    sched_yield,
    store_release,
)

DONE, IDLE, ABORTED = 0, 1, 2  # what a wait returns

YIELDS = 400  # rounds without progress before sleeping
SLEEP_NS = 10_000_000
SLEEPS = 10  # after so many sleeps in a row the caller gets control: deadlines, ctrl-C


@njit(inline="always")
def wake(bell):
    """Wake who sleeps on it; behind a fence."""
    if load_acquire(bell) != 0:
        store_release(bell, 0)
        futex_wake(bell)


@njit(inline="always")
def ring(bells):
    """Wake every rank of these bells that sleeps; call after the stores they may wait for."""
    fence()
    for i in range(bells.size):
        wake(bells[i])


@njit(nogil=True, cache=True)
def await_counters(counters, values, own_bell, abort, yields):
    """Wait until the int64 at each address of `counters` is at least that of `values`.

    `yields`: rounds before sleeping on `own_bell`. Returns DONE, IDLE (as `interpret`) or ABORTED.
    """
    idle = 0
    sleeps = 0
    i = 0
    while i < counters.size:
        if load_acquire(counters[i]) >= values[i]:
            i += 1
            continue
        if load_acquire(abort) != 0:
            return ABORTED
        idle += 1
        if idle <= yields:
            sched_yield()
        elif idle == yields + 1:
            store_release(own_bell, 1)
            fence()
        else:
            futex_wait(own_bell, 1, SLEEP_NS)
            rung = load_acquire(own_bell) == 0
            store_release(own_bell, 0)
            sleeps += 1
            if sleeps == SLEEPS:
                return IDLE
            idle = yields // 2 if rung else yields  # to yield may take long on a busy machine
    return DONE


@njit(nogil=True, cache=True)
def raise_counter(address, value, bells):
    """Store `value` with release and wake every rank in `bells` (addresses) that sleeps."""
    store_release(address, value)
    ring(bells)


@njit(nogil=True, cache=True)
def read_counter(address):
    """The int64 at `address`, with acquire."""
    return load_acquire(address)


@njit(nogil=True, cache=True)
def claim(address, expected, value):
    """Replace the int64 at `address` if it is `expected`; whether it was."""
    return exchange_if(address, expected, value)


@njit(nogil=True, cache=True)
def add_one(address):
    """Add one to the int64 at `address`; what it then is. Any number of processes may."""
    while True:
        before = load_acquire(address)
        if exchange_if(address, before, before + 1):
            return before + 1
