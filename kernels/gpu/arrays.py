"""Arrays on a GPU for the kernels' launchers: of torch, of CuPy, or (in tests) of NumPy.

Every kernel takes one struct by value, which `struct` builds from a dtype with the same layout.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np

from linkweave.kernels.dtypes import DTYPES
from linkweave.kernels.gpu.device import CudaDevice
from linkweave.kernels.gpu.source import PLAIN, THREADS
from linkweave.kernels.validate import is_torch

Words = tuple[str, ...]


class Gpu(Protocol):
    """What a launcher needs of a GPU. All launches go to one CUDA stream, in order."""

    threads: int  # per block
    blocks: int  # of a launch that fills the GPU

    def empty(self, size: int, dtype: str) -> Any:
        """A new array [size], which is not reused before the launches that use it are done."""

    def full(self, size: int, dtype: str, value: int) -> Any:
        """A new array [size] filled with `value`."""

    def contiguous(self, array: Any) -> Any:
        """The array, or a copy in C order. Raises TypeError if its library or device differs."""

    def parted(self, arrays: Sequence[Any], array: Any, among: Any) -> tuple[list[Any], list[Any]]:
        """The rows of `arrays` at which `array` has a value of `among`, and the other rows."""

    def nonzero(self, array: Any) -> tuple[Any, Any]:
        """(values, ascending int32 indices) of the elements that are not zero."""

    def address(self, array: Any) -> int: ...

    def read(self, array: Any) -> np.ndarray:
        """Wait for all launches; returns a copy on the host."""

    def launch(
        self, file: str, names: Words, words: Words, argument: np.ndarray, blocks: int
    ) -> None:
        """Enqueue kernels of `kernels/FILE`, compiled with the options `words`, in this order."""


def grid(most: int, n: int, least: int, unit: int) -> tuple[int, int]:
    """(blocks, elements per block) of a launch over n elements.

    The elements per block are a multiple of `unit`; there are at most `most` blocks, and at most
    one per `least` elements.
    """
    blocks = max(1, min(most, -(-n // least)))
    return blocks, -(-n // (blocks * unit)) * unit


def element(dtype: str, name: str = "ELEMENT") -> Words:
    """Options that define a macro as the CUDA type of a dtype."""
    return (f"-D{name}={DTYPES[dtype].element}",)


def struct(dtype: np.dtype, **fields: Any) -> np.ndarray:
    """[1] of the dtype; fields that are not given are zero."""
    made = np.zeros(1, dtype)
    for name, value in fields.items():
        made[name] = value
    return made


def fields(*widths: tuple[str, str]) -> np.dtype:
    """The dtype of a struct: `fields(("u8", "a b"), ("u4", "c"))`, the widest fields first."""
    return np.dtype([(name, width) for width, names in widths for name in names.split()])


_opening = threading.Lock()


def device_of(index: int) -> CudaDevice:
    """The GPU with this CUDA device index, opened once per process. Thread-safe."""
    with _opening:
        return _device_of(index)


@cache
def _device_of(index: int) -> CudaDevice:
    return CudaDevice(index)


class LibraryGpu:
    """A `Gpu`: that of `x`, a torch or CuPy array, with its library's current CUDA stream."""

    threads = THREADS

    def __init__(self, x: Any) -> None:
        self._torch = sys.modules["torch"] if is_torch(x) else None
        self._like = x
        if self._torch:
            self._device = device_of(x.device.index)
            self._stream = int(self._torch.cuda.current_stream(x.device).cuda_stream)
        else:
            cupy = sys.modules["cupy"]
            self._device = device_of(x.device.id)
            self._stream = int(cupy.cuda.get_current_stream(x.device.id).ptr)
        self.blocks = self._device.blocks_to_fill()

    def empty(self, size: int, dtype: str) -> Any:
        return self._make("empty", size, dtype)

    def full(self, size: int, dtype: str, value: int) -> Any:
        return self._make("full", size, dtype, value)

    def _make(self, how: str, size: int, dtype: str, *value: int) -> Any:
        if self._torch:
            kind, device = getattr(self._torch, dtype), self._like.device
            return getattr(self._torch, how)((size,), *value, dtype=kind, device=device)
        with self._device.here():
            return getattr(sys.modules["cupy"], how)((size,), *value, dtype=dtype)

    def contiguous(self, array: Any) -> Any:
        torch = self._torch
        kind = torch.Tensor if torch else type(self._like)
        if not isinstance(array, kind) or array.device != self._like.device:
            raise TypeError(
                f"an array like the others is needed, {type(self._like).__name__} on "
                f"{self._like.device}, not {type(array).__name__} on "
                f"{getattr(array, 'device', 'no device')}"
            )
        if torch:
            return array.detach().contiguous()
        with self._device.here():
            return sys.modules["cupy"].ascontiguousarray(array)

    def parted(self, arrays: Sequence[Any], array: Any, among: Any) -> tuple[list[Any], list[Any]]:
        with self._device.here():
            first = (self._torch or sys.modules["cupy"]).isin(array, among)
            return [x[first] for x in arrays], [x[~first] for x in arrays]

    def nonzero(self, array: Any) -> tuple[Any, Any]:
        with self._device.here():
            if self._torch:
                found = self._torch.nonzero(array).reshape(-1)
                return array[found], found.to(self._torch.int32)
            where = sys.modules["cupy"].flatnonzero(array)
            return array[where], where.astype("int32")

    def address(self, array: Any) -> int:
        return int(array.data_ptr() if self._torch else array.data.ptr)

    def read(self, array: Any) -> np.ndarray:
        found: np.ndarray = array.cpu().numpy() if self._torch else array.get()
        return found

    def launch(
        self, file: str, names: Words, words: Words, argument: np.ndarray, blocks: int
    ) -> None:
        self._device.start(file, names, (*PLAIN, *words), argument, blocks, THREADS, self._stream)
