"""Updates of parameters by SGD and Adam on the CPU: one compiled call for all tensors of a table.

Threads divide the blocks. Each element is read and written once; sums of squares read a block of
gradients into the L1 cache, where the update finds them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import carray, njit

from linkweave.kernels.atomics import fma, pointer
from linkweave.kernels.optim.tables import BLOCK, COUNT, GRAD, PARAM, STATE, STATE_2, Table
from linkweave.kernels.parallel import parts, run_parts

LEAST = 256  # blocks for each thread: starting one takes as long as many
NONE = np.empty(0)


@njit(inline="always")
def _partial(g, squares):
    """The sum of the squares of up to BLOCK gradients, pairwise; NaN if one is not finite."""
    for i in range(g.size):
        x = np.float64(g[i])
        squares[i] = x * x
    squares[g.size :] = 0
    width = BLOCK
    while width > 1:
        width //= 2
        for i in range(width):
            squares[i] = squares[2 * i] + squares[2 * i + 1]
    total = squares[0]
    if not np.isfinite(total):  # a float64 that is finite may have an infinite square
        for i in range(g.size):
            if not np.isfinite(g[i]):
                return np.nan
    return total


@njit(inline="always")
def _decayed(g, p, sign, decay):
    y = g * sign
    return fma(p, decay, y) if decay != 0 else y


@njit(nogil=True, cache=True, error_model="numpy")
def _sgd(rows, start, stop, scalars, first, nesterov, partials):
    sign, decay, momentum, rest, rate = scalars
    squares = np.empty(BLOCK)
    for block in range(start, stop):
        n = rows[block, COUNT]
        p = carray(pointer(rows[block, PARAM], rate), n)
        g = carray(pointer(rows[block, GRAD], rate), n)
        if partials.size:
            partials[block] = _partial(g, squares)
        if momentum == 0:
            for i in range(n):
                p[i] = fma(_decayed(g[i], p[i], sign, decay), rate, p[i])
            continue
        buffer = carray(pointer(rows[block, STATE], rate), n)
        for i in range(n):
            y = _decayed(g[i], p[i], sign, decay)
            b = y if first else fma(y, rest, buffer[i] * momentum)
            buffer[i] = b
            p[i] = fma(fma(b, momentum, y) if nesterov else b, rate, p[i])


@njit(nogil=True, cache=True, error_model="numpy")
def _adam(rows, start, stop, scalars, near, partials):
    sign, shrink, decay, weight, beta2, rest, root, eps, rate = scalars
    squares = np.empty(BLOCK)
    for block in range(start, stop):
        n = rows[block, COUNT]
        p = carray(pointer(rows[block, PARAM], rate), n)
        g = carray(pointer(rows[block, GRAD], rate), n)
        mean = carray(pointer(rows[block, STATE], rate), n)
        square = carray(pointer(rows[block, STATE_2], rate), n)
        if partials.size:
            partials[block] = _partial(g, squares)
        for i in range(n):
            x = p[i] * shrink
            y = _decayed(g[i], x, sign, decay)
            m = fma(y - mean[i], weight, mean[i] if near else y)
            v = fma(rest * y, y, square[i] * beta2)
            mean[i] = m
            square[i] = v
            p[i] = x + (rate * m) / (np.sqrt(v) / root + eps)


def sgd(
    table: Table, scalars: Any, first: bool, nesterov: bool, partials: torch.Tensor | None
) -> None:
    """A step of SGD; `scalars` are those of `_sgd`, in the table's dtype."""
    _run(_sgd, table, scalars, first, nesterov, partials=partials)


def adam(table: Table, scalars: Any, near: bool, partials: torch.Tensor | None) -> None:
    """A step of Adam; `scalars` are those of `_adam`, in the table's dtype."""
    _run(_adam, table, scalars, near, partials=partials)


def _run(update: Any, table: Table, *arguments: Any, partials: torch.Tensor | None) -> None:
    out = NONE if partials is None else partials.numpy()
    spans = parts(table.blocks, least=LEAST)
    run_parts(lambda i: update(table.rows, *spans[i], *arguments, out), len(spans))
