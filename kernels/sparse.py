"""Sparse vectors on the CPU: selection fused with a residual, and sums of two.

A sparse vector is (values, indices), indices ascending and all different.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from kernels import topk
from kernels.parts import parts, run_parts
from kernels.topk import BLOCK, U, most_of


@njit(nogil=True, cache=True)
def _add_and_gather(grad, residual, start, stop, low, at):
    """residual += grad; positions of sums whose keys are >= low, or -1 where `at` is full."""
    bits = residual.view(np.uint32)
    mask = np.uint32(0x7FFFFFFF)
    found, full = U(0), False
    for first in range(U(start), U(stop), U(BLOCK)):
        last = min(first + U(BLOCK), U(stop))
        for i in range(first, last):
            residual[i] = grad[i] + residual[i]
        if not full and most_of(bits, mask, first, last) >= low:
            full = found + U(BLOCK) > U(at.size)
            if not full:
                for i in range(first, last):
                    at[found] = i
                    found += U((bits[i] & mask) >= low)
    return -1 if full else np.int64(found)


def sparsify(grad: np.ndarray, residual: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """(values, positions) of the k largest |grad + residual|, which leave the residual; the rest
    stays in it. Both float32 [n]. Each is read once and the residual written once."""
    keys = topk.Keys("float32")
    n = grad.size
    low = np.uint32(0xFFFFFFFF)
    room = 0
    if 0 < k <= n // 8:
        places = topk.places(n)
        sums = keys.of((grad[places] + residual[places]).view(np.uint32))
        bound = topk.bound(sums, n, k)
        if bound is not None:
            low, room = bound
    spans = parts(n, BLOCK)
    at = [np.empty(min(room, stop - start) + BLOCK, np.int64) for start, stop in spans]
    counts = run_parts(lambda i: _add_and_gather(grad, residual, *spans[i], low, at[i]), len(spans))
    bits = residual.view(np.uint32)
    if room and min(counts) >= 0 and k <= sum(counts) <= room:
        found = topk.among(bits, keys, k, topk.joined(at, counts))
    else:
        found = topk.select(bits, "float32", k)
    values = residual[found]
    residual[found] = 0
    return values, found


@njit(nogil=True, cache=True)
def _merge(a_values, a_indices, b_values, b_indices, values, indices):
    """The union, common indices summed: its size; -1 or -2 where a's or b's indices are not
    ascending."""
    i = j = found = 0
    while i < a_indices.size or j < b_indices.size:
        if j == b_indices.size or (i < a_indices.size and a_indices[i] < b_indices[j]):
            values[found], indices[found] = a_values[i], a_indices[i]
            i += 1
        elif i == a_indices.size or b_indices[j] < a_indices[i]:
            values[found], indices[found] = b_values[j], b_indices[j]
            j += 1
        else:
            values[found], indices[found] = a_values[i] + b_values[j], a_indices[i]
            i += 1
            j += 1
        found += 1
        if i and i < a_indices.size and a_indices[i] <= a_indices[i - 1]:
            return -1
        if j and j < b_indices.size and b_indices[j] <= b_indices[j - 1]:
            return -2
    return found


def merge(
    a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """The sum of two sparse vectors, float32. Raises ValueError for indices that do not ascend."""
    size = a[1].size + b[1].size
    values, indices = np.empty(size, np.float32), np.empty(size, a[1].dtype)
    found = _merge(*a, *b, values, indices)
    if found < 0:
        raise ValueError(f"the {'first' if found == -1 else 'second'} vector's indices must ascend")
    return values[:found], indices[:found]


@njit(nogil=True, cache=True)
def _split(values, indices, found, kept_values, kept_indices, values_left, indices_left):
    kept, left = U(0), U(0)
    for i in range(U(values.size)):
        if kept < U(found.size) and U(found[kept]) == i:
            kept_values[kept], kept_indices[kept] = values[i], indices[i]
            kept += U(1)
        else:
            values_left[left], indices_left[left] = values[i], indices[i]
            left += U(1)


def split(
    values: np.ndarray, indices: np.ndarray, found: np.ndarray
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """A sparse vector's entries at these ascending positions, and the others."""
    sizes = (found.size, values.size - found.size)
    kept, left = ((np.empty(n, values.dtype), np.empty(n, indices.dtype)) for n in sizes)
    _split(values, indices, found, *kept, *left)
    return kept, left
