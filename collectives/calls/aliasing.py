"""Tensors of one call that share memory, of whatever library and on whatever device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.tensors import is_torch, stands_in_order

_WORK = 1000
"""Steps that NumPy may take to tell whether strided arrays share memory; beyond, they count as
sharing it."""


def refuse_overlaps(inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Raise CollectiveError where a tensor of `outputs` shares memory with any other one.

    It may be the input at its own place in the list, whole and with the same strides.
    """
    many, tensors = len(outputs), [*outputs, *inputs]
    for i, j in _pairs(tensors):
        if i >= many or (j == i + many and is_same(tensors[i], tensors[j])):
            continue
        if j < many:
            name = "out" if inputs else "the list"
            raise CollectiveError(
                f"tensors {i} and {j} of {name} share memory: each takes a result of its own"
            )
        which = f" (out[{i}], input {j - many})" if len(inputs) > 1 else ""
        raise CollectiveError(
            f"out overlaps the input{which}: it must be the input or lie elsewhere"
        )


def is_same(a: Any, b: Any) -> bool:
    """Whether they have the same elements in the same places."""
    return _extent(_memory(a)) == _extent(_memory(b))


def _extent(x: NDArray[Any]) -> tuple[object, ...]:
    sides = [(n, s) for n, s in zip(x.shape, x.strides, strict=True) if n > 1]
    return x.__array_interface__["data"][0], sides, x.itemsize


def _pairs(tensors: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """(i, j), i < j, of those that share memory."""
    spans = sorted((*_span(x), i) for i, x in enumerate(tensors) if 0 not in x.shape)
    near: list[tuple[int, int]] = []  # (end, number) of those that reach as far as the next one
    for start, stop, i in spans:
        near = [(end, j) for end, j in near if end > start]
        for _, j in near:
            a, b = _memory(tensors[i]), _memory(tensors[j])
            if np.may_share_memory(a, b, max_work=_WORK):  # type: ignore[arg-type]
                yield min(i, j), max(i, j)
        near.append((stop, i))


def _span(x: Any) -> tuple[int, int]:
    """The first byte that a tensor reaches, and the one behind the last."""
    if is_torch(x) and stands_in_order(x):
        start = int(x.data_ptr())
        return start, start + int(x.nbytes)
    return np.lib.array_utils.byte_bounds(_memory(x))


def _memory(x: Any) -> NDArray[Any]:
    """An array over the memory of a tensor that is not to be read: it may be on a GPU."""
    return x if isinstance(x, np.ndarray) else np.asarray(_Described(x))


class _Described:
    def __init__(self, x: Any) -> None:
        if is_torch(x):
            item = x.element_size()
            self.__array_interface__: dict[str, Any] = {
                "version": 3, "data": (x.data_ptr(), False), "shape": tuple(x.shape),
                "strides": tuple(s * item for s in x.stride()), "typestr": f"|V{item}",
            }  # fmt: skip
        else:
            self.__array_interface__ = {**x.__cuda_array_interface__, "version": 3}
