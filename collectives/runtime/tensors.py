"""Access to the memory of torch tensors, NumPy and CuPy arrays, without importing torch or CuPy."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.errors import CollectiveError
from linkweave.collectives.runtime.buffer import DTYPES, Buffer, unsupported
from linkweave.kernels.validate import is_torch

_address_of, _at = ctypes.addressof, ctypes.c_char.from_buffer
_NUMPY = {np.dtype(name): name for name in DTYPES if DTYPES[name].stored == name}


def _is_cuda_array(x: Any) -> bool:
    """Whether `x` is a CuPy array or similar. Its class is asked: the interface takes time."""
    return hasattr(type(x), "__cuda_array_interface__") and (
        hasattr(getattr(x, "device", None), "id")
    )  # fmt: skip


def _is_cupy(x: Any) -> bool:
    return type(x).__module__.split(".")[0] == "cupy"


def dtype_name(x: Any) -> str:
    if is_torch(x) or isinstance(x, np.ndarray):
        return str(x.dtype).removeprefix("torch.")
    return str(np.dtype(x.__cuda_array_interface__["typestr"]))


def gpu_of(x: Any) -> int | None:
    """The index of a tensor's GPU; None for a CPU tensor and for other objects."""
    if is_torch(x):
        return int(x.device.index) if x.device.type == "cuda" else None
    return int(x.device.id) if _is_cuda_array(x) else None


def stream_of(x: Any) -> int:
    """The current stream of a GPU tensor's library."""
    if is_torch(x):
        return int(sys.modules["torch"].cuda.current_stream(x.device).cuda_stream)
    if _is_cupy(x):  # its interface has the stream of the current GPU, not of the array's
        cupy = sys.modules["cupy"]
        return int(cupy.cuda.get_current_stream(x.device.id).ptr)
    stream = x.__cuda_array_interface__.get("stream")
    return 0 if stream in (None, 1) else int(stream)  # 1: the legacy default stream


def fast_buffer(x: Any) -> tuple[int, int, str] | None:
    """(address, bytes, dtype) of a contiguous, writable CPU tensor, as in most calls.

    None for any other object; `as_buffer` then raises the error, if there is one.
    """
    if type(x) is np.ndarray:
        name, nbytes = _NUMPY.get(x.dtype), x.nbytes
        if name is None:
            return None
        if nbytes == 0:  # has no buffer
            return (int(x.ctypes.data), 0, name) if x.flags.writeable else None
        try:  # the buffer protocol takes a fourth of the time of NumPy's own ways
            return _address_of(_at(x)), nbytes, name  # type: ignore[arg-type]
        except (TypeError, ValueError, BufferError):  # with gaps, or read-only
            return None
    if not is_torch(x):
        return None
    torch = sys.modules["torch"]
    if type(x) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if not x.is_cpu or x.layout is not torch.strided or x.is_neg():
        return None
    torch_name = str(x.dtype)[6:]
    if not x.is_contiguous() or torch_name not in DTYPES:
        return None
    return x.data_ptr(), x.nbytes, torch_name


def fast_gpu_buffer(x: Any, gpu: int) -> tuple[object, ...] | None:
    """(address, shape, dtype) of a contiguous, writable tensor on GPU `gpu`, as in most calls. None
    for any other object."""
    if not is_torch(x):
        if not _is_cuda_array(x) or x.device.id != gpu:
            return None
        interface = x.__cuda_array_interface__
        address, read_only = interface["data"]
        plain = interface.get("strides") is None and not read_only
        return (address, interface["shape"], interface["typestr"]) if plain else None
    torch = sys.modules["torch"]
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.device.type != "cuda":
        return None
    if x.device.index != gpu or x.layout is not torch.strided or x.is_neg():
        return None
    return (x.data_ptr(), x.shape, x.dtype) if x.is_contiguous() else None


def fast_result(
    x: Any, given: tuple[int, int, str], out: Any, shape: tuple[int, ...]
) -> tuple[int, int, str] | None:
    """`fast_buffer` of `out`, if it has the shape and is of the library and the dtype of `x`, whose
    own is `given`, and shares no memory with it."""
    if type(out) is not type(x) or out.shape != shape or (found := fast_buffer(out)) is None:
        return None
    apart = found[0] >= given[0] + given[1] or given[0] >= found[0] + found[1]
    return found if apart and found[2] == given[2] else None


def as_buffer(
    x: Any, written: bool = True, gpu: int | None = None
) -> tuple[Buffer, Callable[[], None]]:
    """The memory of `x`, and a function to call once the collective has written to it.

    A non-contiguous tensor is replaced by a contiguous copy, which that function copies back.
    Raises CollectiveError for an object that is no tensor, for an unsupported dtype, for a tensor
    that is not on `gpu` (None: the CPU), and if `written`, for read-only or expanded memory.
    """
    if is_torch(x):
        if x.device.type not in ("cpu", "cuda"):
            raise CollectiveError(f"a tensor on cpu or cuda is needed, not on {x.device}")
        if x.layout is not sys.modules["torch"].strided:
            raise CollectiveError(f"a dense tensor is needed, not one of layout {x.layout}")
        x = x.detach()
    elif isinstance(x, np.ndarray):
        if written and not x.flags.writeable:
            raise CollectiveError("the array is read-only; a collective writes its result into it")
        if not x.dtype.isnative:
            raise CollectiveError(f"dtype {x.dtype} is not in this machine's byte order")
    elif not _is_cuda_array(x):
        raise CollectiveError(
            f"a torch tensor, NumPy or CuPy array is needed, not {type(x).__module__}."
            f"{type(x).__qualname__}"
        )
    if gpu_of(x) != gpu:
        names = ["the CPU" if at is None else f"GPU {at}" for at in (gpu, gpu_of(x))]
        raise CollectiveError(f"this call runs on {names[0]}; the tensor is on {names[1]}")
    name = dtype_name(x)
    if name not in DTYPES:
        raise unsupported(name)
    if not is_torch(x) and not isinstance(x, np.ndarray):
        return _cuda_buffer(x, written, name)
    strides = x.stride() if is_torch(x) else x.strides
    if written:
        _refuse_shared(tuple(x.shape), strides)
    if is_torch(x):
        whole = x if is_contiguous(x) else x.resolve_neg().contiguous()
        item = x.element_size()
        buffer = Buffer(whole.data_ptr(), whole.numel() * item, name, item, whole)
    else:
        whole = x if x.flags.c_contiguous else np.ascontiguousarray(x)
        buffer = Buffer(int(whole.ctypes.data), int(whole.nbytes), name, int(x.itemsize), whole)
    return buffer, nothing if whole is x else _copy_back(x, whole)


def _cuda_buffer(x: Any, written: bool, name: str) -> tuple[Buffer, Callable[[], None]]:
    interface = x.__cuda_array_interface__
    shape, strides, item = (
        tuple(interface["shape"]),
        interface.get("strides"),
        int(np.dtype(name).itemsize),
    )
    if written and interface["data"][1]:
        raise CollectiveError("the array is read-only; a collective writes its result into it")
    whole, done = x, nothing
    if not is_contiguous(x):
        if written:
            _refuse_shared(shape, strides)
        if not _is_cupy(x):
            raise CollectiveError(f"a contiguous array is needed, not one of strides {strides}")
        whole = sys.modules["cupy"].ascontiguousarray(x)
        done = _copy_back(x, whole)
    nbytes = math.prod(shape) * item
    return Buffer(int(whole.__cuda_array_interface__["data"][0]), nbytes, name, item, whole), done


def is_contiguous(x: Any) -> bool:
    """Whether a tensor is contiguous and stored as its values, so that it needs no copy."""
    if is_torch(x):  # with the negative bit set, memory holds the negated values
        return bool(x.is_contiguous() and not x.is_neg())
    if isinstance(x, np.ndarray):
        return bool(x.flags.c_contiguous)
    interface = x.__cuda_array_interface__
    shape, strides = tuple(interface["shape"]), interface.get("strides")
    return strides is None or _in_c_order(shape, strides, np.dtype(interface["typestr"]).itemsize)


def _in_c_order(shape: Sequence[int], strides: Sequence[int], item: int) -> bool:
    step = item
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != step:
            return False
        step *= size
    return True


def _refuse_shared(shape: Sequence[int], strides: Sequence[int]) -> None:
    shared = any(step == 0 and size > 1 for step, size in zip(strides, shape, strict=True))
    if shared and 0 not in shape:  # NumPy's empty arrays have strides of 0
        raise CollectiveError(
            f"a tensor of shape {tuple(shape)} whose elements share memory (it was expanded) "
            "cannot be written in place"
        )


def nothing() -> None:
    """What is to be done with a tensor in which the result is already."""


def _copy_back(to: Any, source: Any) -> Callable[[], None]:
    def copy() -> None:
        to[...] = source
        read_here(source)

    return copy


def read_here(x: Any) -> None:
    """Keep the memory of a torch tensor from being reused before the current stream has read it:
    the tensor may have been made on another stream."""
    if is_torch(x) and x.is_cuda:
        x.record_stream(sys.modules["torch"].cuda.current_stream(x.device))


class Block:
    """The owner of a block of the arena; the block is freed when the last array over it is deleted.

    It is not an array, because a NumPy view of a view refers to the first array's memory and does
    not keep the arrays between alive.
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory  # keeps the mapping alive
        self.__array_interface__ = memory.__array_interface__


def parse_shape(shape: Any, dtype: Any) -> tuple[tuple[int, ...], str, int]:
    """(dimensions, name of the dtype, bytes of an element). Raises CollectiveError."""
    try:
        dims = tuple(map(index, shape if isinstance(shape, Iterable) else (shape,)))
    except TypeError:
        dims = (-1,)
    if any(d < 0 for d in dims):
        raise CollectiveError(f"a shape is made of integers >= 0, not {shape!r}")
    name = str(dtype).removeprefix("torch.")
    if not _of_torch(dtype):
        with suppress(TypeError):  # an object that is no dtype is refused by its text
            name = str(np.dtype(dtype))
    if name not in DTYPES or (DTYPES[name].stored != name and not _of_torch(dtype)):
        raise unsupported(name)
    return dims, name, DTYPES[name].size


def tensor_over(raw: Any, dims: tuple[int, ...], name: str, dtype: Any) -> Any:
    """A view of an array of bytes: for a torch dtype a torch tensor, else an array."""
    if _of_torch(dtype):
        from torch.utils.dlpack import from_dlpack

        return from_dlpack(raw).view(dtype).reshape(dims)
    return raw.view(name).reshape(dims)


def _of_torch(dtype: Any) -> bool:
    return type(dtype).__module__ == "torch"


def output_for(x: Any, shape: tuple[int, ...], out: Any) -> Any:
    """`out` if it has this shape and the library, dtype and device of `x`; None: a new tensor."""
    if out is None:
        if is_torch(x):
            return sys.modules["torch"].empty(shape, dtype=x.dtype, device=x.device)
        if isinstance(x, np.ndarray):
            return np.empty(shape, x.dtype)
        if not _is_cupy(x):
            raise CollectiveError(f"out is needed for results of type {type(x).__qualname__}")
        return sys.modules["cupy"].empty(shape, x.dtype)
    as_buffer(out, gpu=gpu_of(x))
    if _library(out) != _library(x):
        raise CollectiveError(f"out must be a {_library(x)} like the input, not a {_library(out)}")
    if tuple(out.shape) != shape or dtype_name(out) != dtype_name(x):
        raise CollectiveError(
            f"out must be of shape {shape} and {dtype_name(x)}, not {tuple(out.shape)} and "
            f"{dtype_name(out)}"
        )
    return out


def _library(x: Any) -> str:
    if is_torch(x):
        return "torch tensor"
    return "NumPy array" if isinstance(x, np.ndarray) else "CuPy array"
