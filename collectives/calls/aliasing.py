"""Finds tensors of one call that share memory, of any library and on any device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.tensors import is_contiguous, is_torch

_WORK = 1000
"""Steps in which NumPy must prove that strided arrays do not share memory; else they count as
sharing it."""


def refuse_overlaps(inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Raise CollectiveError if an output shares memory with another output or an input.

    An output may be identical to the input at its own index.
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
            f"out overlaps the input{which}: it must be the input or share no memory with it"
        )


def is_same(a: Any, b: Any) -> bool:
    """Whether two tensors are the same elements at the same addresses."""
    return _extent(_memory(a)) == _extent(_memory(b))


def _extent(x: NDArray[Any]) -> tuple[object, ...]:
    sides = [(n, s) for n, s in zip(x.shape, x.strides, strict=True) if n > 1]
    return x.__array_interface__["data"][0], sides, x.itemsize


def _pairs(tensors: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """(i, j), i < j, of tensors that share memory."""
    spans = sorted((*_span(x), i) for i, x in enumerate(tensors) if 0 not in x.shape)
    near: list[tuple[int, int]] = []  # (end, index) of tensors whose span may reach the next one
    for start, stop, i in spans:
        near = [(end, j) for end, j in near if end > start]
        for _, j in near:
            a, b = _memory(tensors[i]), _memory(tensors[j])
            if np.may_share_memory(a, b, max_work=_WORK):  # type: ignore[arg-type]
                yield min(i, j), max(i, j)
        near.append((stop, i))


def _span(x: Any) -> tuple[int, int]:
    """The addresses of a tensor's first byte and of the byte after its last."""
    if is_torch(x) and is_contiguous(x):
        start = int(x.data_ptr())
        return start, start + int(x.nbytes)
    return np.lib.array_utils.byte_bounds(_memory(x))


def _memory(x: Any) -> NDArray[Any]:
    """A NumPy array over a tensor's memory. Do not read it: the memory may be on a GPU."""
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
