"""Counters in shared memory, and how ranks wait for them.

A counter has one writer and only grows. A rank that waits yields its core; after some rounds it
sleeps on its *bell*, a futex word. Whoever raises a counter clears the bells of the ranks that may
wait for it and wakes them. No wake-up is lost: before sleeping, a rank sets its bell, executes a
fence, and checks the counters again; after raising a counter, a rank executes a fence and then
checks the bells. So at least one of the two sees the other.
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

DONE, IDLE, ABORTED = 0, 1, 2  # results of a wait

YIELDS = 400  # rounds without progress before sleeping
BESIDE = 20  # the same beside a computation, which needs the core
SLEEP_NS = 10_000_000
SLEEPS = 10  # sleeps before a wait returns IDLE, so that the caller can check for timeouts, ctrl-C


@njit(inline="always")
def wake(bell):
    """Wake the rank that sleeps on a bell, if any; call after a fence."""
    if load_acquire(bell) != 0:
        store_release(bell, 0)
        futex_wake(bell)


@njit(inline="always")
def ring(bells):
    """Wake every rank that sleeps on one of these bells; call after raising counters."""
    fence()
    for i in range(bells.size):
        wake(bells[i])


@njit(nogil=True, cache=True)
def await_counters(counters, values, own_bell, abort, yields):
    """Wait until the int64 at each address of `counters` is at least the one in `values`.

    Sleeps on `own_bell` after `yields` rounds. Returns DONE, IDLE after SLEEPS sleeps, or ABORTED
    once the word at `abort` is set.
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
            idle = yields // 2 if rung else yields  # yielding is slow on a busy machine
    return DONE


@njit(nogil=True, cache=True)
def raise_counter(address, value, bells):
    """Store `value` with release, and wake the ranks that sleep on `bells` (addresses)."""
    store_release(address, value)
    ring(bells)


@njit(nogil=True, cache=True)
def read_counter(address):
    """Load the int64 at `address` with acquire."""
    return load_acquire(address)


@njit(nogil=True, cache=True)
def claim(address, expected, value):
    """Compare and swap the int64 at `address`; returns whether it was `expected`."""
    return exchange_if(address, expected, value)


@njit(nogil=True, cache=True)
def add_one(address):
    """Atomically add one to the int64 at `address`; returns the new value."""
    while True:
        before = load_acquire(address)
        if exchange_if(address, before, before + 1):
            return before + 1
