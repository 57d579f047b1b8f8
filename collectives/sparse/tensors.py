"""Sparse vectors and residuals as users hold them: on the CPU, or on a GPU by way of the host."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.errors import CollectiveError
from collectives.sparse.wire import ITEMS, Vector, Wire
from collectives.tensors import dtype_name, gpu_of, integer, is_torch, stands_in_order
from kernels.merging import add_at


def vector(values: Any, indices: Any, numel: Any) -> tuple[Vector, Wire]:
    """A sparse vector on the host, checked. Waits for a GPU. Raises CollectiveError."""
    if (number := integer(numel)) is None or not 0 <= number <= 1 << 31:
        raise CollectiveError(f"numel must be an integer from 0 to 2^31, not {numel!r}")
    if gpu_of(values) is None and not is_torch(values):
        values, indices = np.asarray(values), np.asarray(indices)
    if gpu_of(values) != gpu_of(indices):
        raise CollectiveError("values and indices must be on one device")
    name, shapes = dtype_name(values), (tuple(values.shape), tuple(indices.shape))
    if name not in ITEMS or len(shapes[0]) != 1 or shapes[0] != shapes[1]:
        raise CollectiveError(
            f"values must be {', '.join(ITEMS)} in one dimension, one for each index, not {name} "
            f"of shape {shapes[0]} for indices of shape {shapes[1]}"
        )
    numbers = _host(values.float() if is_torch(values) else values).astype(np.float32, copy=False)
    where = _host(indices)
    if where.dtype != np.int32:
        raise CollectiveError(f"indices must be int32, not {where.dtype}")
    if where.size and (where[0] < 0 or where[-1] >= numel or (np.diff(where) <= 0).any()):
        raise CollectiveError(f"indices must ascend from 0 to {numel - 1} at most, all different")
    return (numbers, where), Wire(name)


def result(found: Vector, like: Any, wire: Wire) -> tuple[Any, Any]:
    """As the library, the dtype and on the device of `like`."""
    values, indices = found
    if is_torch(like):
        torch = sys.modules["torch"]
        return (
            torch.from_numpy(values).to(like.device, like.dtype),
            torch.from_numpy(indices).to(like.device),
        )
    values = values.astype(wire.dtype, copy=False)
    if gpu_of(like) is None:
        return values, indices
    with _on(like):
        return sys.modules["cupy"].asarray(values), sys.modules["cupy"].asarray(indices)


class Residual:
    """A dense residual to which entries are added in place.

    `x`: contiguous, writable float32 of `numel` elements, where `like` is. On a GPU what is added
    is kept until `finish`. Raises CollectiveError.
    """

    def __init__(self, x: Any, numel: int, like: Any) -> None:
        on_gpu = gpu_of(x) is not None
        kind = on_gpu or is_torch(x) or isinstance(x, np.ndarray)
        if not kind or gpu_of(x) != gpu_of(like) or dtype_name(x) != "float32" or (
            int(np.prod(x.shape, dtype=np.int64)) != numel or not stands_in_order(x)
        ) or (isinstance(x, np.ndarray) and not x.flags.writeable):  # fmt: skip
            raise CollectiveError(
                f"residual must be a contiguous, writable float32 array of {numel} elements, on "
                "the values' device"
            )
        flat = (x.detach() if is_torch(x) else x).reshape(-1)
        self._gpu: Any = flat if on_gpu else None
        self._later: list[tuple[NDArray[np.int32], NDArray[np.float32]]] = []
        if not on_gpu:
            self._dense: NDArray[np.float32] = flat.numpy() if is_torch(flat) else flat

    def add(self, indices: NDArray[np.int32], values: NDArray[np.float32]) -> None:
        """Indices are all different."""
        if self._gpu is None:
            add_at(self._dense, indices, values)
        else:
            self._later.append((indices, values))

    def finish(self) -> None:
        """Enqueue on the GPU what has been added, in order."""
        for indices, values in self._later:
            where, what = result((values, indices), self._gpu, Wire("float32"))[::-1]
            with _on(self._gpu):
                self._gpu[where.long() if is_torch(where) else where] += what


def _on(x: Any) -> AbstractContextManager[object]:
    """Make the GPU of a CuPy array the current one for a while."""
    if is_torch(x):
        return nullcontext()
    found: AbstractContextManager[object] = sys.modules["cupy"].cuda.Device(gpu_of(x))
    return found


def _host(x: Any) -> NDArray[Any]:
    if is_torch(x):
        return np.asarray(x.detach().cpu().numpy())
    return np.asarray(x.get() if gpu_of(x) is not None else x)
