"""The functions of `kernels.api` for arrays on a GPU; arguments are checked without waiting."""

from __future__ import annotations

import math
from typing import Any

from linkweave.kernels import validate as checks
from linkweave.kernels.gpu.arrays import Gpu
from linkweave.kernels.merge.gpu import merge, part
from linkweave.kernels.rows.gpu import Sorted, add, sort
from linkweave.kernels.topk.gpu import select

Pair = tuple[Any, Any]


class GpuKernels:
    """The functions of `kernels.api`, which documents them, on one GPU."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def topk_abs(self, x: Any, k: int) -> Pair:
        dtype = checks.dtype_of(x)
        if len(x.shape) != 1:
            raise ValueError(f"x must have one dimension, not shape {tuple(x.shape)}")
        n = int(x.shape[0])
        return select(self.gpu, self.gpu.contiguous(x), dtype, n, checks.count(k, n))

    def sparsify(self, grad: Any, residual: Any, k: int) -> Pair:
        checks.same_shape(grad, residual)
        _written(self.gpu, residual, "residual")
        n = math.prod(residual.shape)
        grad, dtype = self.gpu.contiguous(grad), checks.dtype_of(grad)
        return select(self.gpu, grad, dtype, n, checks.count(k, n), residual)

    def merge_topk(self, a: Pair, b: Pair, k: int) -> tuple[Pair, Pair]:
        dtype = checks.vectors(a, b)
        sizes = int(a[1].shape[0]), int(b[1].shape[0])
        if sum(sizes) > 1 << 31:
            raise ValueError(f"vectors of {sizes} entries; at most 2^31 together on a GPU")
        pairs = [
            (self.gpu.contiguous(values), self.gpu.contiguous(indices))
            for values, indices in (a, b)
        ]
        total = merge(self.gpu, pairs[0], pairs[1], sizes, dtype)
        if isinstance(total, int):
            raise ValueError(
                f"the {'first' if total == 1 else 'second'} vector's indices must ascend"
            )
        number = int(total[0].shape[0])
        kept = min(checks.at_least_0(k, "k"), number)
        if kept == number:
            return total, (total[0][:0], total[1][:0])
        _, found = select(self.gpu, total[0], "float32", number, kept)
        return part(self.gpu, total, number, found, kept, dtype)

    def coalesce(self, indices: Any, values: Any, num_rows: int) -> Pair:
        rows, dtype = self._rows(indices, values, num_rows), checks.dtype_of(values, "float64")
        shape = tuple(values.shape)[1:]
        width = math.prod(shape)
        if rows is None:
            return indices[:0], values[:0]
        sums = add(self.gpu, rows, self.gpu.contiguous(values), dtype, width)
        return rows.unique, sums.reshape((rows.runs, *shape))

    def split_rows(self, indices: Any, values: Any, needed_rows: Any) -> tuple[Pair, Pair]:
        for array, name in ((indices, "indices"), (needed_rows, "needed_rows")):
            checks.index_dtype(array, name)
        checks.one_for_each(indices, values)
        indices, values, needed = map(self.gpu.contiguous, (indices, values, needed_rows))
        first, others = self.gpu.parted((indices, values), indices, needed)
        return (first[0], first[1]), (others[0], others[1])

    def _rows(self, indices: Any, values: Any, num_rows: Any) -> Sorted | None:
        """The rows sorted by index; None if there are none."""
        dtype = checks.index_dtype(indices)
        limit = checks.at_least_0(num_rows, "num_rows")
        checks.one_for_each(indices, values)
        if not (n := int(indices.shape[0])):
            return None
        if n >= 1 << 32:
            raise ValueError(f"{n} rows; at most 2^32 - 1 at once on a GPU")
        found = sort(self.gpu, self.gpu.contiguous(indices), dtype, n, limit)
        if isinstance(found, int):
            raise ValueError(checks.outside(found, int(indices[found]), limit))
        return found


def _written(gpu: Gpu, x: Any, name: str) -> None:
    """Check an array that is changed in place."""
    if checks.dtype_of(x) != "float32" or gpu.address(gpu.contiguous(x)) != gpu.address(x):
        raise TypeError(f"{name} must be a contiguous float32 array")
