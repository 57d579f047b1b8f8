"""torch tensors and NumPy arrays as the runtimes see them; torch is imported only if it is used."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.errors import CollectiveError
from collectives.runtime.reference import DTYPES
from collectives.runtime.shm import Buffer


def is_torch(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def dtype_name(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")


def as_buffer(x: Any, written: bool = True) -> tuple[Buffer, Callable[[], None]]:
    """The memory of `x`, and what must be called once the collective has filled it.

    What is only read (not `written`) may be read-only or expanded. A non-contiguous tensor is
    worked on in a contiguous copy that is copied back. Raises CollectiveError for what is no
    tensor, a dtype that is not supported, a read-only array, or a tensor on another device than
    the CPU.
    """
    if is_torch(x):
        if x.device.type != "cpu":
            raise CollectiveError(f"this communicator runs on the CPU; the tensor is on {x.device}")
        if x.layout is not sys.modules["torch"].strided:
            raise CollectiveError(f"a dense tensor is needed, not one of layout {x.layout}")
        x = x.detach()
    elif isinstance(x, np.ndarray):
        if written and not x.flags.writeable:
            raise CollectiveError("the array is read-only; a collective writes its result into it")
        if not x.dtype.isnative:
            raise CollectiveError(f"dtype {x.dtype} is not in this machine's byte order")
    else:
        raise CollectiveError(
            f"a torch tensor or a NumPy array is needed, not {type(x).__module__}."
            f"{type(x).__qualname__}"
        )
    strides = x.stride() if is_torch(x) else x.strides
    shared = any(step == 0 and size > 1 for step, size in zip(strides, x.shape, strict=True))
    if written and shared and 0 not in x.shape:  # NumPy's strides of nothing are 0
        raise CollectiveError(
            f"a tensor of shape {tuple(x.shape)} whose elements share memory (it was expanded) "
            "cannot be written in place"
        )
    name = dtype_name(x)
    if name not in DTYPES:
        raise CollectiveError(f"unsupported dtype {name}; choose from {', '.join(DTYPES)}")
    if is_torch(x):
        if x.is_contiguous():
            whole, done = x, _nothing
        else:
            whole = x.contiguous()
            done = _copy_back(x, whole)
        item = x.element_size()
        return Buffer(whole.data_ptr(), whole.numel() * item, name, item), _keep(whole, done)
    if x.flags.c_contiguous:
        whole, done = x, _nothing
    else:
        whole = np.ascontiguousarray(x)
        done = _copy_back(x, whole)
    buffer = Buffer(int(whole.ctypes.data), int(whole.nbytes), name, int(x.itemsize))
    return buffer, _keep(whole, done)


def _nothing() -> None:
    pass


def _copy_back(to: Any, source: Any) -> Callable[[], None]:
    def copy() -> None:
        to[...] = source

    return copy


def _keep(owner: Any, done: Callable[[], None]) -> Callable[[], None]:
    """`done`, holding on to the memory's owner until it has run."""

    def finish(owner: Any = owner) -> None:
        done()

    return finish


class Block:
    """A block of the arena; when the last array over it goes, the block is free again.

    Not an array itself: NumPy makes a view of a view refer to the first one's memory, and would
    let go of what lies between.
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory  # which keeps the mapping
        self.__array_interface__ = memory.__array_interface__


def bytes_of(buffer: Buffer) -> Any:
    """A buffer as a NumPy array of bytes."""
    if not buffer.nbytes:
        return np.empty(0, np.uint8)
    raw: Any = (ctypes.c_uint8 * buffer.nbytes).from_address(buffer.address)
    return np.frombuffer(raw, np.uint8)


def numpy_name(dtype: Any) -> str:
    """NumPy's name of a dtype; what is none, as text."""
    try:
        return str(np.dtype(dtype))
    except TypeError:
        return str(dtype)


def room_for(x: Any, shape: tuple[int, ...], out: Any) -> Any:
    """`out` if it can take a result of `x`'s kind in this shape; a new tensor where it is None."""
    if out is None:
        if is_torch(x):
            return sys.modules["torch"].empty(shape, dtype=x.dtype)
        return np.empty(shape, x.dtype)
    as_buffer(out)
    if is_torch(out) != is_torch(x):
        kinds = ["torch tensor" if is_torch(y) else "NumPy array" for y in (x, out)]
        raise CollectiveError(f"out must be a {kinds[0]} like the input, not a {kinds[1]}")
    if tuple(out.shape) != shape or out.dtype != x.dtype:
        raise CollectiveError(
            f"out must be of shape {shape} and {dtype_name(x)}, not {tuple(out.shape)} and "
            f"{dtype_name(out)}"
        )
    return out
