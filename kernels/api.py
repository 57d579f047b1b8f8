"""Top-k, sparse vectors and rows as users call them: NumPy arrays, torch tensors, CuPy arrays.

What comes out is of the library of what goes in, on its device; on a GPU it is enqueued on the
library's current stream. Results are the same bits on every run and for every number of threads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from linkweave.kernels import validate as checks
from linkweave.kernels.merge import cpu as merging
from linkweave.kernels.nvtx_ranges import ranged
from linkweave.kernels.rows import cpu as rows
from linkweave.kernels.topk import cpu as topk
from linkweave.kernels.topk import sparsify as sparse

Vector = tuple[Any, Any]
"""A sparse vector: (values, indices), indices ascending and all different."""


@ranged
def topk_abs(x: Any, k: int) -> Vector:
    """(values, indices) of the k largest |x|, indices ascending.

    `x`: [n] of float32, float16 or bfloat16; 0 <= k <= n. Of equals the lowest indices are taken;
    NaN counts above infinity, all NaN alike. Values keep their signs and dtype; indices are int32,
    int64 where n is beyond 2^31. Exact: no sort of the row, and the same bits on a GPU, which
    nothing waits for. Raises TypeError, ValueError.
    """
    if gpu := _gpu(x):
        return gpu.topk_abs(x, k)
    return _selected(topk.select, x, k)


@ranged
def threshold_abs(x: Any, k: int) -> Vector:
    """(values, indices) of all |x| from a threshold on that a sample tells: k and some more.

    Approximate: the k largest are among them always, and at most 3 k + 18 sqrt(k n / s) + 36 n / s
    + 4096 others, where s is the sample's size, min(n / 16, 65536); the expected excess is
    4.5 sqrt(k n / s). It saves the search among these. Where a sample cannot tell (k above n / 8,
    equal keys, 16-bit floats, GPUs) exactly k are returned. The rest as in `topk_abs`.
    """
    if gpu := _gpu(x):
        return gpu.topk_abs(x, k)
    return _selected(topk.at_least, x, k)


@ranged
def sparsify(grad: Any, residual: Any, k: int) -> Vector:
    """(values, indices) of the k largest |grad + residual|; what is not taken stays in `residual`.

    `grad`: any shape, float32, float16 or bfloat16, and not changed; `residual`: float32 of the
    same shape, contiguous, changed in place. Sums are float32, so values are. Float32 moves 12
    bytes an element: both read, the residual written, once. Ties, NaN and errors as in `topk_abs`;
    indices count in C order. A sum that is NaN may carry other bits on a GPU.
    """
    if gpu := _gpu(residual):
        return gpu.sparsify(grad, residual, k)
    kept = _written(residual, "residual")
    checks.same_shape(grad, residual)
    k = checks.count(k, kept.size)
    values, found = sparse.sparsify(_float32(grad, "grad").reshape(-1), kept.reshape(-1), k)
    return _out(values, residual), _out(found.astype(checks.index_type(kept.size)), residual)


@ranged
def merge_topk(a: Vector, b: Vector, k: int) -> tuple[Vector, Vector]:
    """(kept, dropped): the k largest of a + b, and the rest (gTop-k paper, definition 1).

    Common indices are summed, a's value first, in float32; `dropped` is what the paper's operator
    loses. Both are (values, indices), as `a` and `b`, whose indices must ascend. All are kept where
    there are no more than k. Ties, NaN and errors as in `topk_abs`; on a GPU the host waits once,
    for the number of different indices.
    """
    if gpu := _gpu(a[0]):
        return gpu.merge_topk(a, b, k)
    checks.vectors(a, b)
    k = checks.at_least_0(k, "k")
    kept, dropped = merging.merge_topk(_vector(a), _vector(b), k)
    like = a[0]
    return (_out(kept[0], like), _out(kept[1], like)), (
        _out(dropped[0], like), _out(dropped[1], like)
    )  # fmt: skip


@ranged
def coalesce(indices: Any, values: Any, num_rows: int) -> tuple[Any, Any]:
    """(indices that occur, ascending; for each the sum of its rows).

    `indices`: [n] of int32 or int64 from 0 to num_rows - 1; `values`: [n, ...] of float32, float16
    or bfloat16. Rows are summed in float32 and rounded once: in the order in which they come; on a
    GPU in that order within windows of 32 rows sorted by their index, then window by window. The
    host waits for a GPU once. Raises TypeError, ValueError.
    """
    if gpu := _gpu(values):
        return gpu.coalesce(indices, values, num_rows)
    where, dtype = _indices(indices, num_rows), checks.dtype_of(values)
    data = _rows(values, where)
    unique, place = rows.unique_places(where, num_rows)
    sums = np.zeros((unique.size, data.shape[1]), np.float32)
    rows.add_rows(place, data, sums)
    shape = (unique.size, *tuple(values.shape)[1:])
    return _out(unique, indices), _out(sums.reshape(shape), values, dtype, narrow=True)


@ranged
def split_rows(indices: Any, values: Any, needed_rows: Any) -> tuple[tuple[Any, Any], ...]:
    """(prior, delayed): rows that `needed_rows` names, and the others, each (indices, values) in
    the order in which they came (EmbRace, algorithm 1: what the next batch looks up goes first).

    `needed_rows`: any integers, in any order. Raises TypeError, ValueError.
    """
    if gpu := _gpu(values):
        return gpu.split_rows(indices, values, needed_rows)
    where, needed = _integers(indices, "indices"), _integers(needed_rows, "needed_rows")
    checks.one_for_each(where, values)
    first = np.isin(where, needed)
    parts = []
    for chosen in (first, ~first):
        take = _out(np.flatnonzero(chosen), values)
        parts.append((_out(where[chosen], indices), values[take]))
    return tuple(parts)


@ranged
def scatter_add_rows(table: Any, indices: Any, values: Any) -> None:
    """table[indices[i]] += values[i] in the order of i, in place.

    `table`: [rows, ...] float32, contiguous; the rest as in `coalesce`, whose sums are added on a
    GPU. Raises TypeError, ValueError, before anything is changed.
    """
    if gpu := _gpu(table):
        gpu.scatter_add_rows(table, indices, values)
        return
    sums = _written(table, "table")
    checks.rows_of(table, values)
    where = _indices(indices, sums.shape[0])
    data = _rows(values, where)
    rows.add_rows(where.astype(np.int64), data, sums.reshape(sums.shape[0], data.shape[1]))


# ---- what goes in and out ----------------------------------------------------------------------
def _gpu(x: Any) -> Any:
    """`gpu_face.GpuKernels` where `x` lies on a GPU."""
    if _is_torch(x):
        on_gpu = x.device.type == "cuda"
    else:
        on_gpu = not isinstance(x, np.ndarray) and hasattr(x, "__cuda_array_interface__")
    if not on_gpu:
        return None
    from linkweave.kernels.gpu import api as gpu_face
    from linkweave.kernels.gpu import arrays as gpu

    return gpu_face.GpuKernels(gpu.LibraryGpu(x))


def _is_torch(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _numpy(x: Any, name: str) -> np.ndarray:
    """A view, in which a bfloat16 is a uint16."""
    if _is_torch(x):
        if x.device.type != "cpu":
            raise TypeError(f"{name} is on {x.device}; all must be on the CPU or on one GPU")
        torch = sys.modules["torch"]
        x = x.detach()
        return x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy()
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{name} must be a NumPy array or a torch tensor, not {type(x).__name__}")
    return x


def _written(x: Any, name: str) -> np.ndarray:
    """What is changed in place."""
    array = _numpy(x, name)
    if array.dtype != np.float32 or not array.flags.c_contiguous or not array.flags.writeable:
        raise TypeError(
            f"{name} must be a contiguous, writable float32 array, not {array.dtype} of strides "
            f"{array.strides}"
        )
    return array


def _selected(choose: Callable[[np.ndarray, str, int], np.ndarray], x: Any, k: int) -> Vector:
    """What `choose` takes of a row on the CPU."""
    row, dtype = _row(x, "x")
    found = choose(row, dtype, checks.count(k, row.size))
    return _out(row[found], x, dtype), _out(found.astype(checks.index_type(row.size)), x)


def _row(x: Any, name: str) -> tuple[np.ndarray, str]:
    """(bit patterns, dtype) of a row."""
    array = _numpy(x, name)
    dtype = checks.dtype_of(x)
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, not shape {array.shape}")
    bits = np.uint32 if dtype == "float32" else np.uint16
    return np.ascontiguousarray(array).view(bits), dtype


def _float32(x: Any, name: str) -> np.ndarray:
    array, dtype = _numpy(x, name), checks.dtype_of(x)
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(array, np.float32)


def _out(array: np.ndarray, like: Any, dtype: str = "", narrow: bool = False) -> Any:
    """As an array of the library of `like`. Given a `dtype`, the array holds its bits, or
    (`narrow`) float32 to be rounded to it."""
    if _is_torch(like):
        torch = sys.modules["torch"]
        made = torch.from_numpy(np.ascontiguousarray(array))
        if narrow:
            return made.to(getattr(torch, dtype))
        return made.view(getattr(torch, dtype)) if dtype else made
    if narrow:
        return array.astype(dtype)
    return array.view(dtype) if dtype else array


def _integers(x: Any, name: str) -> np.ndarray:
    array = _numpy(x, name)
    checks.index_dtype(array, name)
    return np.ascontiguousarray(array)


def _indices(x: Any, num_rows: Any) -> np.ndarray:
    array, limit = _integers(x, "indices"), checks.at_least_0(num_rows, "num_rows")
    if (at := rows.first_outside(array, limit)) >= 0:
        raise ValueError(checks.outside(at, array[at], limit))
    return array


def _rows(values: Any, where: np.ndarray) -> np.ndarray:
    """float32 [n, width]."""
    data = _float32(values, "values")
    checks.one_for_each(where, data)
    width = int(np.prod(data.shape[1:], dtype=np.int64))
    return data.reshape(where.size, width)


def _vector(pair: Vector) -> tuple[np.ndarray, np.ndarray]:
    values, indices = (np.ascontiguousarray(_numpy(x, "a sparse vector")) for x in pair)
    return values, indices
