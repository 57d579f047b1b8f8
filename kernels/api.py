"""The public kernels: top-k, sparse vectors and rows of NumPy arrays, torch tensors, CuPy arrays.

Results belong to the library and device of the arguments. On a GPU, work is enqueued on the
library's current CUDA stream. Results are bitwise reproducible for any number of threads. Invalid
arguments raise TypeError or ValueError before anything is changed.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from linkweave.kernels import validate as checks
from linkweave.kernels.casts import cpu as casts
from linkweave.kernels.dtypes import DTYPES
from linkweave.kernels.merge import cpu as merging
from linkweave.kernels.nvtx_ranges import ranged
from linkweave.kernels.rows import cpu as rows
from linkweave.kernels.topk import cpu as topk
from linkweave.kernels.topk import sparsify as sparse

Vector = tuple[Any, Any]
"""A sparse vector: (values, indices), with ascending, distinct indices."""


@ranged
def topk_abs(x: Any, k: int) -> Vector:
    """Select the k largest |x| exactly; returns (values, ascending indices).

    `x` is [n] of float32, float16 or bfloat16, and 0 <= k <= n. Among equal magnitudes, the lowest
    indices are selected. NaN counts as larger than infinity; all NaN are equal. Values keep sign
    and dtype; indices are int32, or int64 if n > 2^31. CPUs and GPUs return the same bits. Does not
    wait for the GPU.
    """
    if gpu := _gpu(x):
        return gpu.topk_abs(x, k)
    array, dtype = _numpy(x, "x"), checks.dtype_of(x)
    if array.ndim != 1:
        raise ValueError(f"x must have one dimension, not shape {array.shape}")
    row = np.ascontiguousarray(array).view(f"u{DTYPES[dtype].size}")
    found = topk.select(row, dtype, checks.count(k, row.size))
    return _out(row[found], x, dtype), _out(found.astype(checks.index_type(row.size)), x)


@ranged
def sparsify(grad: Any, residual: Any, k: int) -> Vector:
    """Select the k largest |grad + residual|; the rest of the sum stays in `residual`.

    `grad` is float32, float16 or bfloat16 of any shape; `residual` is contiguous float32 of the
    same shape and is updated in place. Returns (float32 values, ascending indices in C order).
    Float32 gradients take one pass of 12 bytes per element. Ties and NaN are as in `topk_abs`, but
    the payload of a NaN may differ on a GPU.
    """
    if gpu := _gpu(residual):
        return gpu.sparsify(grad, residual, k)
    kept = _written(residual, "residual")
    checks.same_shape(grad, residual)
    k = checks.count(k, kept.size)
    values, found = sparse.sparsify(_summable(grad, "grad").reshape(-1), kept.reshape(-1), k)
    return _out(values, residual), _out(found.astype(checks.index_type(kept.size)), residual)


@ranged
def merge_topk(a: Vector, b: Vector, k: int) -> tuple[Vector, Vector]:
    """Add two sparse vectors; returns (the k largest entries of the sum, the other entries).

    The operator of the gTop-k paper (definition 1), which loses the other entries. Values are
    float32; for common indices, b's value is added to a's. If the sum has at most k entries, all
    are kept. Ties and NaN are as in `topk_abs`. On a GPU, the host waits once, for the number of
    distinct indices.
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
    """Sum rows that have the same index; returns (distinct ascending indices, sums).

    `indices` is [n] of int32 or int64 from 0 to num_rows - 1; `values` is [n, ...] of float32,
    float64, float16 or bfloat16. Rows are added in float32, those of float64 in float64, in the
    order given, and rounded once. On a GPU, rows are first sorted by index (stably), added within
    windows of 32 rows, and then window by window; the host waits once, for the number of distinct
    indices.
    """
    if gpu := _gpu(values):
        return gpu.coalesce(indices, values, num_rows)
    where, dtype = _indices(indices, num_rows), checks.dtype_of(values, "float64")
    data = _rows(values, where, "float64")
    unique, position = rows.unique_positions(where, num_rows)
    sums = np.zeros((unique.size, data.shape[1]), data.dtype)
    rows.add_rows(position, data, sums)
    shape = (unique.size, *tuple(values.shape)[1:])
    return _out(unique, indices), _out(sums.reshape(shape), values, dtype, narrow=True)


@ranged
def split_rows(indices: Any, values: Any, needed_rows: Any) -> tuple[tuple[Any, Any], ...]:
    """Split rows by whether the next batch needs them (EmbRace, algorithm 1).

    Returns (prior, delayed), each (indices, values) in the order given: rows whose index is in
    `needed_rows` (int32 or int64 in any order), and the others.
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
def cast(x: Any, out: Any, scale: float = 1.0) -> None:
    """out[i] = x[i] * scale, from float32 or float64 to float16 or bfloat16, or back.

    `x` and `out` are NumPy arrays or torch tensors (bfloat16: torch only) on the CPU or on one GPU
    (torch only, with Triton), contiguous, with equal numbers of elements, and do not overlap. Each
    element is converted to float32, multiplied by `scale` in float32, and rounded to the dtype of
    `out`, each time to nearest even. Overflow becomes infinity; nothing saturates. Subnormals are
    kept. NaN becomes the quiet NaN of sign and payload 0, so that CPUs and GPUs return the same
    bits. Does not wait for the GPU.
    """
    on_gpu = checks.is_torch(x) and x.device.type == "cuda"
    if on_gpu:
        checks.on_device_of(x, out)
        at = [int(tensor.data_ptr()) for tensor in (x, out)]
    else:
        source, target = _numpy(x, "x"), _numpy(out, "out")
        at = [int(array.ctypes.data) for array in (source, target)]
    half = checks.cast(x, out, *at)
    factor = float(np.float32(checks.float32_value(scale, "scale")))
    if on_gpu:
        from linkweave.kernels.casts import gpu  # which imports Triton

        gpu.cast(x, out, half, factor)
        return
    if not target.flags.writeable:
        raise TypeError("out must be writable")
    bits = [array.reshape(-1) for array in (source, target)]
    casts.cast(*(b.view(np.uint16) if b.itemsize == 2 else b for b in bits), half, factor)


# ---- arguments and results ---------------------------------------------------------------------
def _gpu(x: Any) -> Any:
    """The `GpuKernels` for `x` if it is on a GPU, otherwise None."""
    if checks.is_torch(x):
        on_gpu = x.device.type == "cuda"
    else:
        on_gpu = not isinstance(x, np.ndarray) and hasattr(x, "__cuda_array_interface__")
    if not on_gpu:
        return None
    from linkweave.kernels.gpu import api, arrays

    return api.GpuKernels(arrays.LibraryGpu(x))


def _numpy(x: Any, name: str) -> np.ndarray:
    """A NumPy view of an array or CPU tensor; bfloat16 becomes uint16."""
    if checks.is_torch(x):
        if x.device.type != "cpu":
            raise TypeError(f"{name} is on {x.device}; all must be on the CPU or on one GPU")
        torch = sys.modules["torch"]
        x = x.detach()
        return x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy()
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{name} must be a NumPy array or a torch tensor, not {type(x).__name__}")
    return x


def _written(x: Any, name: str) -> np.ndarray:
    """A NumPy view of an array that is changed in place."""
    array = _numpy(x, name)
    if array.dtype != np.float32 or not array.flags.c_contiguous or not array.flags.writeable:
        raise TypeError(
            f"{name} must be a contiguous, writable float32 array, not {array.dtype} of strides "
            f"{array.strides}"
        )
    return array


def _summable(x: Any, name: str, *others: str) -> np.ndarray:
    """`x` in float32, or in one of the other dtypes if it has that."""
    array, dtype = _numpy(x, name), checks.dtype_of(x, *others)
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(array, dtype if dtype in others else np.float32)


def _out(array: np.ndarray, like: Any, dtype: str = "", narrow: bool = False) -> Any:
    """The array in the library of `like`. With a `dtype`, the array holds its bit patterns, or
    with `narrow` float32 values to be rounded to it."""
    if checks.is_torch(like):
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


def _rows(values: Any, where: np.ndarray, *others: str) -> np.ndarray:
    """The values as [n, width] of float32, or of one of the other dtypes."""
    data = _summable(values, "values", *others)
    checks.one_for_each(where, data)
    width = int(np.prod(data.shape[1:], dtype=np.int64))
    return data.reshape(where.size, width)


def _vector(pair: Vector) -> tuple[np.ndarray, np.ndarray]:
    values, indices = (np.ascontiguousarray(_numpy(x, "a sparse vector")) for x in pair)
    return values, indices
