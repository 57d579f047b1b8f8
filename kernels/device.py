"""One GPU through CuPy: memory, the plan interpreter, its launches.

Nothing here has run on a GPU yet.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import numpy as np

from kernels.source import THREADS, options, source


class CudaDevice:
    """The GPU of this index, for one process.

    Addresses are plain integers. Memory comes from cudaMalloc itself, not from a pool: only whole
    allocations can be shared with other processes. Raises CuPy's errors.
    """

    def __init__(self, index: int = 0) -> None:
        import cupy
        from cupy_backends.cuda.api import driver, runtime

        self._cupy, self._driver, self._runtime = cupy, driver, runtime
        self.index = index
        self._device = cupy.cuda.Device(index)
        self._device.use()
        self.kernel = cache(self._kernel)
        self._own: dict[int, object] = {}

    def _kernel(self, dtype: str, op: str) -> int:
        with self._device:
            module = self._cupy.RawModule(code=source("plan.cu"), options=options(dtype, op))
            function = module.get_function("run_plan")
            self._own[function.kernel.ptr] = module
            return int(function.kernel.ptr)

    def allocate(self, nbytes: int) -> int:
        """Zeroed device memory of at least one byte."""
        with self._device:
            address = self._runtime.malloc(max(nbytes, 1))
            self._runtime.memset(address, 0, max(nbytes, 1))
            self._device.synchronize()
        return int(address)

    def free(self, address: int) -> None:
        with self._device:
            self._runtime.free(address)

    def upload(self, array: np.ndarray) -> int:
        """New device memory with the array's bytes."""
        address = self.allocate(array.nbytes)
        if array.nbytes:
            whole = np.ascontiguousarray(array)
            with self._device:
                self._runtime.memcpy(address, whole.ctypes.data, whole.nbytes,
                                     self._runtime.memcpyHostToDevice)  # fmt: skip
        return address

    def download(self, address: int, array: np.ndarray) -> None:
        """Fill a contiguous array with the bytes at the address."""
        with self._device:
            self._runtime.memcpy(array.ctypes.data, address, array.nbytes,
                                 self._runtime.memcpyDeviceToHost)  # fmt: skip

    def copy(self, dst: int, src: int, nbytes: int, stream: int = 0) -> None:
        """Enqueue a copy within the device."""
        with self._device:
            self._runtime.memcpyAsync(dst, src, nbytes, self._runtime.memcpyDeviceToDevice, stream)

    def capture(self, enqueue: Callable[[int], None]) -> Callable[[], None]:
        """A CUDA graph of what `enqueue(stream)` enqueues; returns its replay, which waits."""
        with self._device:
            stream = self._cupy.cuda.Stream(non_blocking=True)
            with stream:
                stream.begin_capture()
                enqueue(stream.ptr)
                graph = stream.end_capture()

        def replay() -> None:
            graph.launch(stream)
            stream.synchronize()

        return replay

    def describe(self) -> dict[str, object]:
        """Name, versions: what a result is to be read with."""
        properties = self._runtime.getDeviceProperties(self.index)
        return {
            "gpu": properties["name"].decode(), "cupy": self._cupy.__version__,
            "driver": self._runtime.driverGetVersion(),
            "runtime": self._runtime.runtimeGetVersion(),
        }  # fmt: skip

    def pinned(self, words: int) -> np.ndarray:
        """[words] zeroed uint32 of host memory that the device sees at the same address."""
        memory = self._cupy.cuda.alloc_pinned_memory(4 * words)
        array = np.frombuffer(memory, np.uint32, words)  # which keeps the memory
        array[:] = 0
        return array

    def resident(self, dtype: str, op: str) -> int:
        """Blocks of the interpreter that the device holds at once."""
        each = self._driver.occupancyMaxActiveBlocksPerMultiprocessor(
            self.kernel(dtype, op), THREADS, 0
        )
        return int(each) * int(self._device.attributes["MultiProcessorCount"])

    def launch(self, dtype: str, op: str, launch: np.ndarray, blocks: int, stream: int) -> None:
        """Enqueue the interpreter; `launch` is copied. All blocks come at once or none."""
        parameters = (ctypes.c_void_p * 1)(launch.ctypes.data)
        with self._device:
            self._driver.launchCooperativeKernel(
                self.kernel(dtype, op), blocks, 1, 1, THREADS, 1, 1, 0, stream,
                ctypes.addressof(parameters),
            )  # fmt: skip

    def synchronise(self, stream: int) -> None:
        """Until all that was enqueued is over."""
        with self._device:
            self._runtime.streamSynchronize(stream)
