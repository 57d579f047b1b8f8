"""Sums of the rows of an embedding gradient that have the same index, on the CPU.

Rows are summed in float32, in the order in which they are given. Threads divide the columns, so
their number does not change the result. If the table is not much larger than the gradient, each
index is looked up in a map of the table; otherwise the indices are radix-sorted.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from linkweave.kernels.parallel import parts, run_parts
from linkweave.kernels.topk.cpu import U

DIGIT = 11  # bits per pass of the radix sort
_MAPPED = 8  # table rows per gradient row, up to which a map of the table is cheaper
_LINE = 16  # float32 per cache line, which threads must not share
_COLUMNS = 64  # the fewest columns of a thread: narrower accesses waste memory bandwidth


@njit(nogil=True, cache=True)
def _outside(indices, num_rows):
    for i in range(indices.size):
        if not 0 <= indices[i] < num_rows:
            return i
    return -1


@njit(nogil=True, cache=True)
def _map_positions(indices, number, position):
    """Set `position[i]` to the rank of indices[i] among the distinct indices; returns how many
    these are. `number` [num_rows] is zeroed scratch memory."""
    for i in range(indices.size):
        number[indices[i]] = 1
    found = 0
    for row in range(number.size):
        if number[row]:
            number[row] = found
            found += 1
    for i in range(indices.size):
        position[i] = number[indices[i]]
    return found


@njit(nogil=True, cache=True)
def _write_unique(indices, position, unique):
    for i in range(indices.size):
        unique[position[i]] = indices[i]


@njit(nogil=True, cache=True)
def _sort_pass(keys, order, shift, counts, keys_out, order_out):
    """One stable pass of the radix sort, by the DIGIT bits from bit `shift` on."""
    counts[:] = 0
    digit = U(counts.size - 1)
    for i in range(U(keys.size)):
        counts[(U(keys[i]) >> U(shift)) & digit] += 1
    at = 0
    for d in range(counts.size):
        at, counts[d] = at + counts[d], at
    for i in range(U(keys.size)):
        d = (U(keys[i]) >> U(shift)) & digit
        keys_out[U(counts[d])] = keys[i]
        order_out[U(counts[d])] = order[i]
        counts[d] += 1


@njit(nogil=True, cache=True)
def _sorted_positions(keys, order, position):
    """`_map_positions` of sorted indices; `order[i]` is where key i comes from."""
    found = -1
    for i in range(keys.size):
        if i == 0 or keys[i] != keys[i - 1]:
            found += 1
        position[order[i]] = found
    return found + 1


@njit(nogil=True, cache=True)
def _add(position, values, sums, first, last):
    """`add_rows`, for the columns from `first` to `last`."""
    for i in range(U(position.size)):
        row = U(position[i])
        for column in range(U(first), U(last)):
            sums[row, column] += values[i, column]


def first_outside(indices: np.ndarray, num_rows: int) -> int:
    """The position of the first index that is not from 0 to num_rows - 1; -1 if there is none."""
    return int(_outside(indices, num_rows))


def unique_positions(indices: np.ndarray, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """(distinct indices, ascending; int64 [n]: the position of indices[i] among them)."""
    n = indices.size
    position = np.empty(n, np.int64)
    if num_rows <= max(_MAPPED * n, 1 << 16):
        found = _map_positions(indices, np.zeros(num_rows, np.int64), position)
    else:
        keys, order = indices.astype(np.int64), np.arange(n)
        spare = np.empty_like(keys), np.empty_like(order)
        counts = np.empty(1 << DIGIT, np.int64)
        for shift in range(0, int(num_rows - 1).bit_length(), DIGIT):
            _sort_pass(keys, order, shift, counts, *spare)
            (keys, order), spare = spare, (keys, order)
        found = _sorted_positions(keys, order, position)
    unique = np.empty(found, indices.dtype)
    _write_unique(indices, position, unique)
    return unique, position


def add_rows(position: np.ndarray, values: np.ndarray, sums: np.ndarray) -> None:
    """sums[position[i]] += values[i] in the order of i; values [n, width], sums [rows, width]."""
    spans = parts(values.shape[1], _LINE, _COLUMNS)
    run_parts(lambda i: _add(position, values, sums, *spans[i]), len(spans))
