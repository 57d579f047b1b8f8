"""The sum of two sparse vectors on the CPU, and the k largest entries of the sum.

A sparse vector is (values, indices), with ascending, distinct indices. Vectors interleave at
random, so the loops are branch-free: a branch would be mispredicted at every other entry.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from linkweave.kernels.topk.cpu import Keys, U, kth

HostVector = tuple[np.ndarray, np.ndarray]

PAD = (1 << 31) - 1
"""The index of what is no entry, behind a vector's entries where these have a fixed room."""

_KEYS = Keys("float32")


@njit(nogil=True, cache=True)
def _ascends(indices):
    found = True
    for i in range(U(1), U(indices.size)):
        found &= indices[i - U(1)] < indices[i]
    return found


@njit(nogil=True, cache=True)
def _unite(a_values, a_indices, b_values, b_indices, values, indices):
    """Write the sum of a and b, adding b's value to a's; returns its number of entries."""
    a_bits, b_bits = a_values.view(np.uint32), b_values.view(np.uint32)
    bits = values.view(np.uint32)
    a_size, b_size = U(a_indices.size), U(b_indices.size)
    i, j, found = U(0), U(0), U(0)
    while i < a_size and j < b_size:
        a, b = a_indices[i], b_indices[j]
        bits[found] = a_bits[i] if a <= b else b_bits[j]
        indices[found] = a if a <= b else b
        if a == b:
            values[found] = a_values[i] + b_values[j]
        i, j, found = i + U(a <= b), j + U(b <= a), found + U(1)
    while i < a_size:
        values[found], indices[found] = a_values[i], a_indices[i]
        i, found = i + U(1), found + U(1)
    while j < b_size:
        values[found], indices[found] = b_values[j], b_indices[j]
        j, found = j + U(1), found + U(1)
    return found


@njit(nogil=True, cache=True)
def _part(values, indices, mask, nan, least, equal, kept_values, kept_indices, values_left,
          indices_left):  # fmt: skip
    """Divide entries: those with keys above `least` and the first `equal` with key `least`, and
    the others. Each output has room for one extra entry, as every entry is written to both."""
    bits = values.view(np.uint32)
    kept, left = U(0), U(0)
    for i in range(U(values.size)):
        key = min(bits[i] & mask, nan)
        keeps = key > least
        if key == least and equal:
            keeps = True
            equal -= 1
        kept_values[kept], kept_indices[kept] = values[i], indices[i]
        values_left[left], indices_left[left] = values[i], indices[i]
        kept, left = kept + U(keeps), left + U(not keeps)


def merge_topk(a: HostVector, b: HostVector, k: int) -> tuple[HostVector, HostVector]:
    """(kept, dropped): the k largest entries of a + b, and the rest. Values are float32.

    Raises ValueError if indices do not ascend.
    """
    for vector, name in ((a, "first"), (b, "second")):
        if not _ascends(vector[1]):
            raise ValueError(f"the {name} vector's indices must ascend")
    size = a[1].size + b[1].size
    values, indices = np.empty(size, np.float32), np.empty(size, a[1].dtype)
    found = _unite(*a, *b, values, indices)
    values, indices = values[:found], indices[:found]
    if found <= k:
        return (values, indices), (values[:0], indices[:0])
    bits = values.view(np.uint32)
    # for k = 0, a threshold above every key
    least, equal, _ = kth(bits, _KEYS, k, [(0, found)]) if k else (_KEYS.mask, 0, [])
    sides = [(np.empty(n + 1, np.float32), np.empty(n + 1, indices.dtype)) for n in (k, found - k)]
    _part(values, indices, _KEYS.mask, _KEYS.nan, least, equal, *sides[0], *sides[1])
    kept, dropped = ((values[:-1], indices[:-1]) for values, indices in sides)
    return kept, dropped


@njit(nogil=True, cache=True)
def add_at(dense, indices, values):
    """dense[indices[i]] += values[i]; reads and writes each element once, unlike NumPy indexing."""
    for i in range(U(indices.size)):
        dense[U(indices[i])] += values[i]
