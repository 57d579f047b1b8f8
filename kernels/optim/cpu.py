"""Updates of parameters by SGD and Adam on the CPU: one compiled call for all tensors of a table.

Threads divide the blocks. Each element is read and written once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from linkweave.kernels.atomics import fma, pointer
from linkweave.kernels.optim.tables import COUNT, GRAD, PARAM, STATE, STATE_2, Table
from linkweave.kernels.parallel import parts, run_parts

LEAST = 256  # blocks for each thread: starting one takes as long as many


@njit(inline="always")
def _decayed(g, p, sign, decay):
    y = g * sign
    return fma(p, decay, y) if decay != 0 else y


@njit(nogil=True, cache=True, error_model="numpy")
def _sgd(rows, start, stop, scalars, nesterov):
    sign, decay, momentum, rest, rate = scalars
    for block in range(start, stop):
        n = rows[block, COUNT]
        p = carray(pointer(rows[block, PARAM], rate), n)
        g = carray(pointer(rows[block, GRAD], rate), n)
        if momentum == 0:
            for i in range(n):
                p[i] = fma(_decayed(g[i], p[i], sign, decay), rate, p[i])
            continue
        buffer = carray(pointer(rows[block, STATE], rate), n)
        for i in range(n):
            y = _decayed(g[i], p[i], sign, decay)
            b = fma(y, rest, buffer[i] * momentum)
            buffer[i] = b
            p[i] = fma(fma(b, momentum, y) if nesterov else b, rate, p[i])


@njit(nogil=True, cache=True, error_model="numpy")
def _adam(rows, start, stop, scalars, near):
    sign, shrink, decay, weight, beta2, rest, root, eps, rate = scalars
    for block in range(start, stop):
        n = rows[block, COUNT]
        p = carray(pointer(rows[block, PARAM], rate), n)
        g = carray(pointer(rows[block, GRAD], rate), n)
        mean = carray(pointer(rows[block, STATE], rate), n)
        square = carray(pointer(rows[block, STATE_2], rate), n)
        for i in range(n):
            x = p[i] * shrink
            y = _decayed(g[i], x, sign, decay)
            m = fma(y - mean[i], weight, mean[i] if near else y)
            v = fma(rest * y, y, square[i] * beta2)
            mean[i] = m
            square[i] = v
            p[i] = x + (rate * m) / (np.sqrt(v) / root + eps)


def sgd(table: Table, scalars: Any, nesterov: bool) -> None:
    """A step of SGD; `scalars` are those of `_sgd`, in the table's dtype."""
    _run(_sgd, table, scalars, nesterov)


def adam(table: Table, scalars: Any, near: bool) -> None:
    """A step of Adam; `scalars` are those of `_adam`, in the table's dtype."""
    _run(_adam, table, scalars, near)


def _run(update: Any, table: Table, *arguments: Any) -> None:
    spans = parts(table.blocks, least=LEAST)
    run_parts(lambda i: update(table.rows, *spans[i], *arguments), len(spans))
