"""Rows of an embedding's gradient on the CPU: equal ones summed, split, added into a table.

Rows that have the same index are summed in float32 in the order in which they come, whatever the
number of threads: these share out columns. Where the table has few rows beside those that come,
each row's place is looked up in a map of the table; else indices are sorted, on as many bits as
they have.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from linkweave.kernels.parallel import parts, run_parts
from linkweave.kernels.topk.cpu import U

DIGIT = 11  # bits that one pass of the sort looks at
_MAPPED = 8  # rows of the table for each that comes, up to which a map of it is cheaper
_LINE = 16  # float32 of a cache line, which threads do not share
_COLUMNS = 64  # float32 that are worth a thread: less of a row wastes what memory sends


@njit(nogil=True, cache=True)
def _outside(indices, num_rows):
    """Place of the first index that is out of range; -1: none is."""
    for i in range(indices.size):
        if not 0 <= indices[i] < num_rows:
            return i
    return -1


@njit(nogil=True, cache=True)
def _map_rows(indices, number, place):
    """`place[i]`: that of row i among those that occur, in ascending order. How many do; their
    indices stand in `number` afterwards, at the front."""
    for i in range(indices.size):
        number[indices[i]] = 1
    found = 0
    for row in range(number.size):
        if number[row]:
            number[row] = found
            found += 1
    for i in range(indices.size):
        place[i] = number[indices[i]]
    return found


@njit(nogil=True, cache=True)
def _names(indices, place, unique):
    for i in range(indices.size):
        unique[place[i]] = indices[i]


@njit(nogil=True, cache=True)
def _sort_pass(keys, order, shift, counts, keys_out, order_out):
    """One stable pass of a radix sort by DIGIT bits from `shift` on."""
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
def _places_of_sorted(keys, order, place):
    found = -1
    for i in range(keys.size):
        if i == 0 or keys[i] != keys[i - 1]:
            found += 1
        place[order[i]] = found
    return found + 1


@njit(nogil=True, cache=True)
def _add(place, values, sums, first, last):
    """sums[place[i]] += values[i], columns first to last, in the order of i."""
    for i in range(U(place.size)):
        row = U(place[i])
        for column in range(U(first), U(last)):
            sums[row, column] += values[i, column]


def first_outside(indices: np.ndarray, num_rows: int) -> int:
    """Place of the first index that is not from 0 to num_rows - 1; -1 where there is none."""
    return int(_outside(indices, num_rows))


def unique_places(indices: np.ndarray, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """(indices that occur, ascending; for each i the place of indices[i] among them)."""
    n = indices.size
    place = np.empty(n, np.int64)
    if num_rows <= max(_MAPPED * n, 1 << 16):
        found = _map_rows(indices, np.zeros(num_rows, np.int64), place)
    else:
        keys, order = indices.astype(np.int64), np.arange(n)
        spare = np.empty_like(keys), np.empty_like(order)
        counts = np.empty(1 << DIGIT, np.int64)
        for shift in range(0, int(num_rows - 1).bit_length(), DIGIT):
            _sort_pass(keys, order, shift, counts, *spare)
            (keys, order), spare = spare, (keys, order)
        found = _places_of_sorted(keys, order, place)
    unique = np.empty(found, indices.dtype)
    _names(indices, place, unique)
    return unique, place


def add_rows(place: np.ndarray, values: np.ndarray, sums: np.ndarray) -> None:
    """sums[place[i]] += values[i] in the order of i; values [n, width], sums [rows, width]."""
    spans = parts(values.shape[1], _LINE, _COLUMNS)
    run_parts(lambda i: _add(place, values, sums, *spans[i]), len(spans))
