"""One GPU through CuPy: memory, the plan interpreter, its launches.

Nothing here has run on a GPU yet.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

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
        self.use()
        self._kernels: dict[tuple[str, str], object] = {}
        self._lock = threading.Lock()

    def use(self) -> None:
        """Make it the current one of this thread."""
        self._device.use()

    def kernel(self, dtype: str, op: str) -> int:
        """The interpreter for this dtype and op, compiled at first use: a CUfunction."""
        with self._lock, self._device:
            if (dtype, op) not in self._kernels:
                module = self._cupy.RawModule(code=source("plan.cu"), options=options(dtype, op))
                self._kernels[dtype, op] = module.get_function("run_plan")
            return int(self._kernels[dtype, op].kernel.ptr)

    def registers(self, dtype: str, op: str) -> int:
        """Registers that a thread of that kernel takes."""
        self.kernel(dtype, op)
        return int(self._kernels[dtype, op].num_regs)

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

    # ---- streams and events ------------------------------------------------------------------
    def make_stream(self) -> int:
        """A stream that the legacy default stream does not hold up."""
        with self._device:
            return int(self._runtime.streamCreateWithFlags(self._runtime.streamNonBlocking))

    def free_stream(self, stream: int) -> None:
        with self._device:
            self._runtime.streamDestroy(stream)

    def capturing(self, stream: int) -> bool:
        """Whether a graph is being captured from the stream."""
        # the legacy default stream cannot be captured, and must not be asked while another one is
        return bool(stream) and bool(self._runtime.streamIsCapturing(stream))

    def make_event(self) -> int:
        with self._device:
            return int(self._runtime.eventCreateWithFlags(self._runtime.eventDisableTiming))

    def free_event(self, event: int) -> None:
        with self._device:
            self._runtime.eventDestroy(event)

    def record(self, event: int, stream: int) -> None:
        """From now on the event stands for what the stream has been given so far."""
        with self._device:
            self._runtime.eventRecord(event, stream)

    def wait(self, event: int, stream: int) -> None:
        """What the stream is given from now on comes after the event."""
        with self._device:
            self._runtime.streamWaitEvent(stream, event)

    def ready(self, event: int) -> bool:
        """Whether what the event stands for is over."""
        with self._device:
            return int(self._runtime.eventQuery(event)) == 0

    # ---- peers -------------------------------------------------------------------------------
    def identity(self) -> tuple[str, str]:
        """(PCI bus id, UUID) as the driver's tools write them."""
        uuid = bytes(self._runtime.getDeviceProperties(self.index)["uuid"])[:16].hex()
        parts = (uuid[:8], uuid[8:12], uuid[12:16], uuid[16:20], uuid[20:])
        return self._runtime.deviceGetPCIBusId(self.index).lower(), "GPU-" + "-".join(parts)

    def reach(self, peer: int) -> bool:
        """Open the memory of another GPU of this process to this one; False where that cannot
        be."""
        with self._device:
            if not self._runtime.deviceCanAccessPeer(self.index, peer):
                return False
            try:
                self._runtime.deviceEnablePeerAccess(peer)
            except self._runtime.CUDARuntimeError as error:
                if "PeerAccessAlreadyEnabled" not in str(error):
                    raise
        return True

    def share(self, address: int) -> bytes:
        """A handle (64 bytes) by which another process opens memory of `allocate`."""
        with self._device:
            return bytes(self._runtime.ipcGetMemHandle(address))

    def open(self, handle: bytes) -> int:
        """The address here of another process's memory; raises RuntimeError where it may not be."""
        with self._device:
            return int(self._runtime.ipcOpenMemHandle(handle))

    def shut(self, address: int) -> None:
        """Undo `open`."""
        with self._device:
            self._runtime.ipcCloseMemHandle(address)

    def register(self, address: int, nbytes: int) -> None:
        """Open pages of host memory to the GPU, at the address that the host has for them.

        Raises RuntimeError where the GPU has another address for them.
        """
        with self._device:
            if not self._device.attributes["CanUseHostPointerForRegisteredMem"]:
                raise RuntimeError("this GPU does not see host memory at the host's addresses")
            # cudaHostRegisterPortable | cudaHostRegisterMapped
            self._runtime.hostRegister(address, nbytes, 1 | 2)

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        with self._device:
            self._runtime.hostUnregister(address)
