"""Queries of the CUDA driver (libcuda) that need neither torch nor CuPy."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from linkweave.collectives.errors import CollectiveError

# CUdevice_attribute of cuda.h
_ATTRIBUTES = {
    "compute_mode": 20,  # 0 default, 2 prohibited, 3 one process
    "unified_addressing": 41,
    "vmm_posix_handles": 103,
    "ipc_events": 125,
}
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED


class CudaError(CollectiveError):
    """libcuda is missing, or a call to it failed."""


def started(library: Any = None) -> bool:
    """Whether this process has initialised CUDA; after that it must not fork."""
    try:
        cuda = library or ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False  # not loaded
    return bool(cuda.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED)


class CudaDriver:
    """The initialised driver. Raises CudaError if it is missing or cannot be initialised."""

    def __init__(self, library: Any = None) -> None:
        try:
            self._cuda = library or ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(f"libcuda.so.1 cannot be loaded: {error}") from None
        self._ask("cuInit", 0)

    def _ask(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(text))
            raise CudaError(f"{name}: {(text.value or b'unknown error').decode()} ({code})")

    def _number(self, name: str, *arguments: Any) -> int:
        found = ctypes.c_int()
        self._ask(name, ctypes.byref(found), *arguments)
        return found.value

    def version(self) -> tuple[int, int]:
        """(major, minor) of the newest CUDA version that the driver supports."""
        found = self._number("cuDriverGetVersion")
        return found // 1000, found % 1000 // 10

    def count(self) -> int:
        """The number of devices visible to CUDA."""
        return self._number("cuDeviceGetCount")

    def _device(self, index: int) -> int:
        return self._number("cuDeviceGet", index)

    def attribute(self, name: str, index: int) -> int:
        """The value of a device attribute; `name` is a key of `_ATTRIBUTES`."""
        return self._number("cuDeviceGetAttribute", _ATTRIBUTES[name], self._device(index))

    def can_access_peer(self, src: int, dst: int) -> bool:
        """Whether device `src` can access the memory of device `dst`."""
        devices = (self._device(src), self._device(dst))
        return bool(self._number("cuDeviceCanAccessPeer", *devices))
