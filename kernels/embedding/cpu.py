"""Rows and columns of embeddings on the CPU. Threads divide the rows.

Each element is read and written once. Copies are of integers of the same size as the floats.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit

from linkweave.kernels.api import coalesce
from linkweave.kernels.atomics import fma
from linkweave.kernels.parallel import parts, run_parts
from linkweave.kernels.rows.cpu import first_outside as _first_outside
from linkweave.kernels.rows.cpu import unique_positions
from linkweave.kernels.topk.cpu import U

PATTERNS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
LEAST = 1 << 14  # elements for each thread: starting one takes as long as many


@njit(nogil=True, cache=True)
def _first_wrong(indices, rows):
    before = -1
    for j in range(indices.size):
        if not before < indices[j] < rows:
            return j
        before = indices[j]
    return -1


@njit(nogil=True, cache=True, error_model="numpy")
def _sgd(start, stop, indices, gradient, rate, table):
    for j in range(start, stop):
        g, p = gradient[j], table[U(indices[j])]
        for c in range(g.size):
            p[c] = fma(g[c], rate, p[c])


@njit(nogil=True, cache=True, error_model="numpy")
def _adagrad(start, stop, indices, gradient, scalars, table, state_sum):
    eps, rate = scalars
    for j in range(start, stop):
        i = U(indices[j])
        g, p, s = gradient[j], table[i], state_sum[i]
        for c in range(g.size):
            s[c] += g[c] * g[c]
            p[c] = fma(g[c] / (np.sqrt(s[c]) + eps), rate, p[c])


@njit(nogil=True, cache=True, error_model="numpy")
def _adam(start, stop, indices, gradient, scalars, table, exp_avg, exp_avg_sq):
    rest, rest_2, eps, rate = scalars
    for j in range(start, stop):
        i = U(indices[j])
        g, p, m, v = gradient[j], table[i], exp_avg[i], exp_avg_sq[i]
        for c in range(g.size):
            mean = m[c] + (g[c] - m[c]) * rest
            square = v[c] + (g[c] * g[c] - v[c]) * rest_2
            m[c] = mean
            v[c] = square
            p[c] += mean / (np.sqrt(square) + eps) * rate


@njit(nogil=True, cache=True)
def _lookup(start, stop, indices, table, out):
    for j in range(start, stop):
        x, y = table[U(indices[j])], out[j]
        for c in range(x.size):
            y[c] = x[c]


@njit(nogil=True, cache=True)
def _copy_columns(start, stop, widths, blocks, columns, joins):
    """Copy between blocks, one after another, and columns."""
    n, total = U(columns.shape[0]), U(columns.shape[1])
    flat = columns.reshape(-1)
    for j in range(U(start), U(stop)):
        at = U(0)
        for width in widths:
            x, y = j * total + at, n * at + j * width
            if joins:
                for c in range(width):
                    flat[x + c] = blocks[y + c]
            else:
                for c in range(width):
                    blocks[y + c] = flat[x + c]
            at += width


def first_wrong(indices: torch.Tensor, rows: int) -> int:
    """The first position whose index is out of range, or not above the one before; -1 if none."""
    return int(_first_wrong(indices.numpy(), rows))


def first_outside(indices: torch.Tensor, rows: int) -> int:
    """The first position whose index is out of range; -1 if there is none."""
    return _first_outside(indices.numpy(), rows)


def unique(ids: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`kernels.embedding.unique`."""
    found, positions = unique_positions(ids.numpy(), num_rows)
    rows = torch.full_like(ids, num_rows)
    rows[: len(found)] = torch.from_numpy(found)
    return rows, torch.from_numpy(positions), torch.tensor([len(found)])


def sum_rows(
    rows: torch.Tensor, lengths: list[int], values: torch.Tensor, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kernels.embedding.sum_rows`."""
    found: tuple[torch.Tensor, torch.Tensor] = coalesce(rows, values, num_rows)
    return found


def sgd(indices: torch.Tensor, gradient: torch.Tensor, scalars: Any, table: torch.Tensor) -> None:
    """A step of SGD; `scalars` are (-lr,)."""
    _update(_sgd, indices, gradient, *scalars, table)


def adagrad(indices: torch.Tensor, gradient: torch.Tensor, scalars: Any, *tables: Any) -> None:
    """A step of Adagrad; `scalars` are those of `_adagrad`."""
    _update(_adagrad, indices, gradient, scalars, *tables)


def adam(indices: torch.Tensor, gradient: torch.Tensor, scalars: Any, *tables: Any) -> None:
    """A step of Adam; `scalars` are those of `_adam`."""
    _update(_adam, indices, gradient, scalars, *tables)


def lookup(table: torch.Tensor, indices: torch.Tensor, out: torch.Tensor) -> None:
    """`kernels.embedding.lookup` of indices in range."""
    _run(_lookup, out, indices.numpy(), _patterns(table), _patterns(out))


def join_columns(blocks: torch.Tensor, widths: list[int], columns: torch.Tensor) -> None:
    """`kernels.embedding.join_columns`."""
    _move(blocks, widths, columns, True)


def split_columns(columns: torch.Tensor, widths: list[int], blocks: torch.Tensor) -> None:
    """`kernels.embedding.split_columns`."""
    _move(blocks, widths, columns, False)


def _move(blocks: torch.Tensor, widths: list[int], columns: torch.Tensor, joins: bool) -> None:
    pair = _patterns(blocks), _patterns(columns)
    _run(_copy_columns, columns, np.array(widths, np.uint64), *pair, joins)


def _patterns(x: torch.Tensor) -> np.ndarray:
    """The bit patterns of floats."""
    return x.view(PATTERNS[x.element_size()]).numpy()


def _update(
    kernel: Any, indices: torch.Tensor, gradient: torch.Tensor, scalars: Any, *tables: torch.Tensor
) -> None:
    arrays = [table.numpy() for table in tables]
    _run(kernel, gradient, indices.numpy(), gradient.numpy(), scalars, *arrays)


def _run(kernel: Any, x: torch.Tensor, *arguments: Any) -> None:
    """Threads divide the rows of `x` [n, width]."""
    n, width = x.shape
    spans = parts(n, least=max(1, LEAST // max(1, width)))
    run_parts(lambda i: kernel(*spans[i], *arguments), len(spans))
