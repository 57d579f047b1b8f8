"""Arrays on a GPU, as the kernels' launchers see them: of torch, of CuPy, or (in tests) of NumPy.

A kernel takes one struct by value; `struct` makes it from a dtype that mirrors the source's.
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

Words = tuple[str, ...]


class Gpu(Protocol):
    """What a launcher asks for. All launches go to one stream, in order."""

    threads: int  # of a block
    blocks: int  # of a launch that fills the GPU

    def empty(self, size: int, dtype: str) -> Any:
        """A new array; its memory is used again only behind the launches that were given it."""

    def full(self, size: int, dtype: str, value: int) -> Any:
        """The same, filled."""

    def contiguous(self, array: Any) -> Any:
        """The array, or a copy in C order. Raises TypeError for one of another library or
        device."""

    def parted(self, arrays: Sequence[Any], array: Any, among: Any) -> tuple[list[Any], list[Any]]:
        """Rows of `arrays` where `array` is among those numbers, and the others."""

    def nonzero(self, array: Any) -> tuple[Any, Any]:
        """(values, int32 indices, ascending) of what is not zero."""

    def address(self, array: Any) -> int: ...

    def read(self, array: Any) -> np.ndarray:
        """On the host, behind all launches so far."""

    def launch(self, file: str, name: str, words: Words, argument: np.ndarray, blocks: int) -> None:
        """Enqueue a kernel of `kernels/FILE`, compiled with these options."""


def grid(gpu: Gpu, n: int, least: int, unit: int) -> tuple[int, int]:
    """(blocks, elements of each): runs of whole `unit`s for a launch over n elements, of which
    `least` are worth a block."""
    blocks = max(1, min(gpu.blocks, -(-n // least)))
    return blocks, -(-n // (blocks * unit)) * unit


def element(dtype: str, name: str = "ELEMENT") -> Words:
    """Options for a kernel of one dtype, which its source calls by that name."""
    return (f"-D{name}={DTYPES[dtype].element}",)


def struct(dtype: np.dtype, **fields: Any) -> np.ndarray:
    """[1] of the dtype; what is not named is zero."""
    made = np.zeros(1, dtype)
    for name, value in fields.items():
        made[name] = value
    return made


def fields(*widths: tuple[str, str]) -> np.dtype:
    """("u8", "a b"), ("u4", "c"): a struct of numbers and addresses, the widest first."""
    return np.dtype([(name, width) for width, names in widths for name in names.split()])


_opening = threading.Lock()


def device_of(index: int) -> CudaDevice:
    """The GPU of this number, opened once, whichever thread asks first."""
    with _opening:
        return _device_of(index)


@cache
def _device_of(index: int) -> CudaDevice:
    return CudaDevice(index)


class LibraryGpu:
    """The GPU that `x`, a torch or CuPy array, lies on, and its library's current stream."""

    threads = THREADS

    def __init__(self, x: Any) -> None:
        torch = sys.modules.get("torch")
        self._torch = torch if torch is not None and isinstance(x, torch.Tensor) else None
        self._like = x
        if self._torch:
            self._device = device_of(x.device.index)
            self._stream = int(self._torch.cuda.current_stream(x.device).cuda_stream)
        else:
            cupy = sys.modules["cupy"]
            self._device = device_of(x.device.id)
            self._stream = int(cupy.cuda.get_current_stream(x.device.id).ptr)
        self.blocks = self._device.filled()

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

    def launch(self, file: str, name: str, words: Words, argument: np.ndarray, blocks: int) -> None:
        self._device.start(file, name, (*PLAIN, *words), argument, blocks, THREADS, self._stream)
