"""Floats as integers in the same order, on the bits of float16, bfloat16, float32 and float64.

The least and the greatest integer are those of the least and the greatest float, of zeros 0 being
greater than -0, and of a NaN where there is one: its integer lies beyond all others.
"""

from __future__ import annotations

from numba import njit


@njit(nogil=True, cache=True)
def to_integers(bits, found, mask, infinity, nan):
    """Write the integers of signed `bits` to `found`, which may be the same array or a wider one.
    `mask` is all bits but the sign, `infinity` the bits of infinity, `nan` the integer of a NaN."""
    for i in range(bits.size):
        b = bits[i]
        same_order = b ^ mask if b < 0 else b
        found[i] = nan if b & mask > infinity else same_order


@njit(nogil=True, cache=True)
def from_integers(found, bits, mask):
    """Write the bits of the floats whose integers are `found` to `bits`, which may be the same."""
    for i in range(bits.size):
        key = found[i]
        bits[i] = key ^ mask if key < 0 else key
