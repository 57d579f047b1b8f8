"""Top-k, sparse vectors and rows as users call them: NumPy arrays and torch tensors on the CPU.

What comes out is of the library of what goes in. Results are the same bits on every run and for
every number of threads.
"""

from __future__ import annotations

import operator
import sys
from typing import Any

import numpy as np

from kernels import rows, sparse, topk

DTYPES = ("float32", "float16", "bfloat16")
Vector = tuple[Any, Any]
"""A sparse vector: (values, indices), indices ascending and all different."""


def topk_abs(x: Any, k: int) -> Vector:
    """(values, indices) of the k largest |x|, indices ascending.

    `x`: [n] of float32, float16 or bfloat16; 0 <= k <= n. Of equals the lowest indices are taken;
    NaN counts above infinity, all NaN alike. Values keep their signs and dtype; indices are int32,
    int64 where n is beyond 2^31. Exact: no sort of the row. Raises TypeError, ValueError.
    """
    row, dtype = _row(x, "x")
    found = topk.select(row, dtype, _count(k, row.size))
    return _out(row[found], x, dtype), _out(found.astype(_index_type(row.size)), x)


def sparsify(grad: Any, residual: Any, k: int) -> Vector:
    """(values, indices) of the k largest |grad + residual|; what is not taken stays in `residual`.

    `grad`: any shape, float32, float16 or bfloat16, and not changed; `residual`: float32 of the
    same shape, contiguous, changed in place. Sums are float32, so values are. Float32 moves 12
    bytes an element: both read, the residual written, once. Ties, NaN and errors as in `topk_abs`;
    indices count in C order.
    """
    kept = _written(residual, "residual")
    if tuple(grad.shape) != tuple(residual.shape):
        raise ValueError(
            f"grad has shape {tuple(grad.shape)}, residual {tuple(residual.shape)}: they must agree"
        )
    k = _count(k, kept.size)
    values, found = sparse.sparsify(_float32(grad, "grad").reshape(-1), kept.reshape(-1), k)
    return _out(values, residual), _out(found.astype(_index_type(kept.size)), residual)


def merge_topk(a: Vector, b: Vector, k: int) -> tuple[Vector, Vector]:
    """(kept, dropped): the k largest of a + b, and the rest (gTop-k paper, definition 1).

    Common indices are summed, a's value first, in float32; `dropped` is what the paper's operator
    loses. Both are (values, indices), as `a` and `b`, whose indices must ascend. All are kept where
    there are no more than k. Ties, NaN and errors as in `topk_abs`.
    """
    pairs = [_vector(v, name) for v, name in ((a, "a"), (b, "b"))]
    if pairs[0][1].dtype != pairs[1][1].dtype:
        raise TypeError(
            f"a's indices are {pairs[0][1].dtype}, b's {pairs[1][1].dtype}: they must agree"
        )
    values, indices = sparse.merge(*pairs)
    if (k := _integer(k, "k")) < 0:
        raise ValueError(f"k must be at least 0, not {k}")
    found = topk.select(values.view(np.uint32), "float32", min(k, values.size))
    kept, dropped = sparse.split(values, indices, found)
    like = a[0]
    return (_out(kept[0], like), _out(kept[1], like)), (
        _out(dropped[0], like), _out(dropped[1], like)
    )  # fmt: skip


def coalesce(indices: Any, values: Any, num_rows: int) -> tuple[Any, Any]:
    """(indices that occur, ascending; for each the sum of its rows).

    `indices`: [n] of int32 or int64 from 0 to num_rows - 1; `values`: [n, ...] of float32, float16
    or bfloat16. Rows are summed in float32 in the order in which they come and rounded once. Raises
    TypeError, ValueError.
    """
    where, dtype = _indices(indices, num_rows), _dtype(values)
    data = _rows(values, where)
    unique, place = rows.unique_places(where, num_rows)
    sums = np.zeros((unique.size, data.shape[1]), np.float32)
    rows.add_rows(place, data, sums)
    shape = (unique.size, *tuple(values.shape)[1:])
    return _out(unique, indices), _out(sums.reshape(shape), values, dtype, narrow=True)


def split_rows(indices: Any, values: Any, needed_rows: Any) -> tuple[tuple[Any, Any], ...]:
    """(prior, delayed): rows that `needed_rows` names, and the others, each (indices, values) in
    the order in which they came (EmbRace, algorithm 1: what the next batch looks up goes first).

    `needed_rows`: any integers, in any order. Raises TypeError, ValueError.
    """
    where, needed = _integers(indices, "indices"), _integers(needed_rows, "needed_rows")
    if tuple(values.shape)[:1] != where.shape:
        raise ValueError(f"{where.size} indices, but values of shape {tuple(values.shape)}")
    first = np.isin(where, needed)
    parts = []
    for chosen in (first, ~first):
        take = _out(np.flatnonzero(chosen), values)
        parts.append((_out(where[chosen], indices), values[take]))
    return tuple(parts)


def scatter_add_rows(table: Any, indices: Any, values: Any) -> None:
    """table[indices[i]] += values[i] in the order of i, in place.

    `table`: [rows, ...] float32, contiguous; the rest as in `coalesce`. Raises TypeError,
    ValueError, before anything is changed.
    """
    sums = _written(table, "table")
    if not sums.ndim or tuple(values.shape)[1:] != sums.shape[1:]:
        raise ValueError(f"values of shape {tuple(values.shape)} for a table of {sums.shape}")
    where = _indices(indices, sums.shape[0])
    data = _rows(values, where)
    rows.add_rows(where.astype(np.int64), data, sums.reshape(sums.shape[0], data.shape[1]))


# ---- what goes in and out ----------------------------------------------------------------------
def _is_torch(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _dtype(x: Any) -> str:
    name = str(getattr(x, "dtype", type(x).__name__)).removeprefix("torch.")
    if name not in DTYPES:
        raise TypeError(f"dtype {name} is not supported; choose from {', '.join(DTYPES)}")
    return name


def _numpy(x: Any, name: str) -> np.ndarray:
    """A view, in which a bfloat16 is a uint16."""
    if _is_torch(x):
        if x.device.type != "cpu":
            raise TypeError(f"{name} is on {x.device}; these kernels run on the CPU")
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


def _row(x: Any, name: str) -> tuple[np.ndarray, str]:
    """(bit patterns, dtype) of a row."""
    array = _numpy(x, name)
    dtype = _dtype(x)
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, not shape {array.shape}")
    bits = np.uint32 if dtype == "float32" else np.uint16
    return np.ascontiguousarray(array).view(bits), dtype


def _float32(x: Any, name: str) -> np.ndarray:
    array, dtype = _numpy(x, name), _dtype(x)
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


def _integer(value: Any, name: str) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {value!r}") from None


def _count(k: Any, n: int) -> int:
    if not 0 <= (found := _integer(k, "k")) <= n:
        raise ValueError(f"k must be from 0 to {n}, not {found}")
    return found


def _index_type(n: int) -> type:
    return np.int32 if n <= 1 << 31 else np.int64


def _integers(x: Any, name: str) -> np.ndarray:
    array = _numpy(x, name)
    if array.ndim != 1 or array.dtype not in (np.int32, np.int64):
        raise TypeError(
            f"{name} must be int32 or int64 in one dimension, not {array.dtype} of shape "
            f"{array.shape}"
        )
    return np.ascontiguousarray(array)


def _indices(x: Any, num_rows: Any) -> np.ndarray:
    array = _integers(x, "indices")
    if (limit := _integer(num_rows, "num_rows")) < 0:
        raise ValueError(f"num_rows must be at least 0, not {limit}")
    if (at := rows.first_outside(array, limit)) >= 0:
        raise ValueError(f"indices[{at}] is {array[at]}; the table has {limit} rows, from 0")
    return array


def _rows(values: Any, where: np.ndarray) -> np.ndarray:
    """float32 [n, width]."""
    data = _float32(values, "values")
    if data.shape[:1] != where.shape:
        raise ValueError(f"{where.size} indices, but values of shape {data.shape}")
    width = int(np.prod(data.shape[1:], dtype=np.int64))
    return data.reshape(where.size, width)


def _vector(pair: Any, name: str) -> tuple[np.ndarray, np.ndarray]:
    values, indices = pair
    where = _integers(indices, f"{name}'s indices")
    data = _numpy(values, f"{name}'s values")
    if data.dtype != np.float32 or data.shape != where.shape:
        raise TypeError(
            f"{name}'s values must be float32, one for each of {where.size} indices, not "
            f"{data.dtype} of shape {data.shape}"
        )
    return np.ascontiguousarray(data), where
