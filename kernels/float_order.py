"""Floats as integers in the same order, on the bits of float16, bfloat16, float32 and float64.

The least and the greatest integer are those of the least and the greatest float, of zeros 0 being
greater than -0, and of a NaN where there is one: its integer lies beyond all others.
"""

from __future__ import annotations

from numba import njit


@njit(nogil=True, cache=True)
def to_integers(keys, mask, infinity, nan):
    """Turn the bits of floats, which `keys` holds, into integers in place. `mask` is all bits of
    these floats but the sign, `infinity` the bits of infinity, `nan` the integer of a NaN; all of
    the type of `keys`, as wider ones take twice as long. Two arrays, which may be one memory, would
    take five times as long."""
    for i in range(keys.size):
        key = keys[i]
        same_order = key ^ mask if key < 0 else key
        keys[i] = nan if key & mask > infinity else same_order


@njit(nogil=True, cache=True)
def from_integers(keys, mask):
    """Turn the integers of floats into their bits, in place."""
    for i in range(keys.size):
        key = keys[i]
        keys[i] = key ^ mask if key < 0 else key
