"""A GPU through CuPy: kernels, memory, streams, events, and memory of other processes."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np

from linkweave.kernels.gpu.compile import cubin
from linkweave.kernels.gpu.source import PLAIN, PLAN_THREADS, options, source

OLDEST = 70
"""Compute capability from which GPUs have the instructions of the kernels, such as nanosleep."""
CHECK_THREADS = 128
_NOT_READY = 600  # cudaErrorNotReady
_MULTIPROCESSORS = 16  # cudaDevAttrMultiProcessorCount
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


def current() -> int:
    """The index of this thread's current GPU."""
    from cupy_backends.cuda.api import runtime

    return int(runtime.getDevice())


class CudaDevice:
    """The GPU with this CUDA device index. Thread-safe.

    Addresses, streams and events are integers. Memory comes from cudaMalloc, not from a pool, since
    only whole allocations can be shared with other processes. `allocate`, `store` and `upload` use
    a stream of their own and do not wait for kernels; `finish`, `free` and `download` may. Memory
    may be allocated, shared and freed while streams are captured, but is not part of the graph.
    Raises CuPy's errors, which are RuntimeErrors.
    """

    def __init__(self, index: int = 0) -> None:
        import cupy
        from cupy_backends.cuda.api import driver, runtime

        self._cupy, self._driver, self._runtime = cupy, driver, runtime
        self.index = index
        self._kernels: dict[tuple[object, ...], tuple[tuple[int, ...], object]] = {}
        self._lock = threading.Lock()
        self._runtime.getDeviceCount()  # starts the driver
        self._cuda = ctypes.CDLL("libcuda.so.1")  # for functions that CuPy does not wrap
        self._context = 0  # the GPU's own, of which CUDA has one in a process
        self._own = self.make_stream()
        with self.here():
            self._context = self._driver.ctxGetCurrent()

    def here(self) -> AbstractContextManager[None]:
        """Make this the thread's current GPU within a `with` block.

        If the thread had none, it stays current: CuPy assumes that a thread which has loaded a
        kernel has a context.
        """
        before = self._driver.ctxGetCurrent()
        return nullcontext() if before and before == self._context else self._switched(before)

    @contextmanager
    def _switched(self, before: int) -> Iterator[None]:
        """`here`, from another context, or from none (0)."""
        self._runtime.setDevice(self.index)  # restoring with it would create a context
        try:
            yield
        finally:
            if before:
                self._driver.ctxSetCurrent(before)

    def use(self) -> None:
        """Make this the thread's current GPU."""
        self._runtime.setDevice(self.index)

    @contextmanager
    def _beside_captures(self) -> Iterator[None]:
        """`here`, for calls that would invalidate a capture which any thread has begun: a tensor
        may be collected, and so freed, in the midst of one."""
        mode = ctypes.c_int(_RELAXED)
        with self.here():
            self._ask("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
            try:
                yield
            finally:
                self._ask("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def _ask(self, name: str, *arguments: object) -> None:
        if code := getattr(self._cuda, name)(*arguments):
            raise self._driver.CUDADriverError(code)

    # ---- kernels -----------------------------------------------------------------------------
    def _load(self, file: str, names: tuple[str, ...], words: tuple[str, ...]) -> tuple[int, ...]:
        """The CUfunctions of kernels of one file, compiled at first use."""
        key = (file, names, words)
        if found := self._kernels.get(key):
            return found[0]
        with self._lock, self.here():
            if key not in self._kernels:
                code = cubin(source(file), words, self._architecture())
                module = self._cupy.cuda.function.Module()
                module.load(code)
                functions = [module.get_function(name) for name in names]
                pointers = tuple(int(function.ptr) for function in functions)
                self._kernels[key] = pointers, (module, functions)
            return self._kernels[key][0]

    def kernel(self, dtype: str, op: str) -> int:
        """The CUfunction of the plan interpreter for a dtype and op."""
        return self._load("plan/plan.cu", ("run_plan",), options(dtype, op))[0]

    def _architecture(self) -> int:
        found = int(self._cupy.cuda.Device(self.index).compute_capability)
        if found < OLDEST:
            raise RuntimeError(
                f"GPU {self.index} has compute capability {found / 10}; kernels need "
                f"{OLDEST / 10} (V100) or more"
            )
        return found

    def registers(self, dtype: str, op: str) -> int:
        """Registers per thread of the plan interpreter."""
        kernel = self.kernel(dtype, op)
        with self.here():
            wanted = self._driver.CU_FUNC_ATTRIBUTE_NUM_REGS
            return int(self._driver.funcGetAttribute(wanted, kernel))

    def resident(self, dtype: str, op: str) -> int:
        """Thread blocks of the plan interpreter that can be resident at once.

        One multiprocessor is left free for a gradient queue's `check`.
        """
        kernel = self.kernel(dtype, op)
        with self.here():
            each = self._driver.occupancyMaxActiveBlocksPerMultiprocessor(kernel, PLAN_THREADS, 0)
            return int(each) * (self._multiprocessors() - 1)

    def launch(self, dtype: str, op: str, launch: np.ndarray, blocks: int, stream: int) -> None:
        """Enqueue the plan interpreter cooperatively: all blocks are resident at once, or the
        launch fails. `launch` is copied."""
        kernel = self.kernel(dtype, op)
        parameters = (ctypes.c_void_p * 1)(launch.ctypes.data)
        with self.here():
            self._driver.launchCooperativeKernel(
                kernel, blocks, 1, 1, PLAN_THREADS, 1, 1, 0, stream, ctypes.addressof(parameters)
            )

    def start(
        self, file: str, names: tuple[str, ...], words: tuple[str, ...], argument: np.ndarray,
        blocks: int, threads: int, stream: int,
    ) -> None:  # fmt: skip
        """Enqueue kernels of `kernels/FILE` whose argument is one struct, which is copied."""
        kernels = self._load(file, names, words)
        parameters = (ctypes.c_void_p * 1)(argument.ctypes.data)
        where = ctypes.addressof(parameters)
        with self.here():
            for kernel in kernels:
                self._driver.launchKernel(kernel, blocks, 1, 1, threads, 1, 1, 0, stream, where, 0)

    def load_check(self) -> None:
        """Compile the kernel of `check`, which is impossible during a stream capture."""
        self._load("plan/queue.cu", ("check",), PLAIN)

    def check(self, argument: np.ndarray, stream: int) -> None:
        """Enqueue the check of a gradient queue; the argument is copied."""
        self.start("plan/queue.cu", ("check",), PLAIN, argument, 1, CHECK_THREADS, stream)

    def blocks_to_fill(self) -> int:
        """Thread blocks of `source.THREADS` threads that fill the GPU: two per multiprocessor."""
        return 2 * self._multiprocessors()

    def _multiprocessors(self) -> int:
        return int(self._runtime.deviceGetAttribute(_MULTIPROCESSORS, self.index))

    # ---- memory ------------------------------------------------------------------------------
    def allocate(self, nbytes: int) -> int:
        """Allocate zeroed device memory, at least one byte. Raises MemoryError if there is none
        even after torch and CuPy have given back what they cache."""
        nbytes = max(nbytes, 1)
        return self._filled(nbytes, lambda at: self._runtime.memsetAsync(at, 0, nbytes, self._own))

    def _filled(self, nbytes: int, fill: Callable[[int], object]) -> int:
        """Device memory that `fill(address)` has written on the device's own stream."""
        with self._beside_captures():
            if not (address := self._malloc(nbytes)):
                self._empty_caches()
                address = self._malloc(nbytes)
            if not address:
                raise MemoryError(f"GPU {self.index} has no {nbytes} bytes left")
            try:
                fill(address)
                self._runtime.streamSynchronize(self._own)
            except BaseException:
                self._runtime.free(address)
                raise
        return address

    def _malloc(self, nbytes: int) -> int:
        """The address of device memory; 0 if there is none."""
        try:
            return int(self._runtime.malloc(nbytes))
        except self._runtime.CUDARuntimeError as error:
            if error.status != _OUT_OF_MEMORY:
                raise
            return 0

    def _empty_caches(self) -> None:
        self._cupy.get_default_memory_pool().free_all_blocks()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def free(self, address: int) -> None:
        with self._beside_captures():
            self._runtime.free(address)

    def array(self, address: int, nbytes: int, owner: object) -> object:
        """A CuPy array [nbytes] of uint8 over device memory; the array keeps `owner` alive."""
        cupy = self._cupy
        with self.here():
            memory = cupy.cuda.UnownedMemory(address, nbytes, owner, self.index)
            return cupy.ndarray((nbytes,), "uint8", cupy.cuda.MemoryPointer(memory, 0))

    def upload(self, array: np.ndarray) -> int:
        """Allocate device memory and copy the array's bytes to it. Raises as `allocate`."""
        if not array.nbytes:
            return self.allocate(0)
        whole = np.ascontiguousarray(array)
        return self._filled(whole.nbytes, lambda at: self.store(at, whole))

    def store(self, address: int, array: np.ndarray) -> None:
        """Enqueue a copy of a contiguous array's bytes to device memory; the array must live on."""
        with self._beside_captures():
            self._runtime.memcpyAsync(address, array.ctypes.data, array.nbytes,
                                      self._runtime.memcpyHostToDevice, self._own)  # fmt: skip

    def download(self, address: int, array: np.ndarray) -> None:
        """Copy device memory into a contiguous array."""
        with self.here():
            self._runtime.memcpy(array.ctypes.data, address, array.nbytes,
                                 self._runtime.memcpyDeviceToHost)  # fmt: skip

    def copy(self, dst: int, src: int, nbytes: int, stream: int = 0) -> None:
        """Enqueue a copy within the device."""
        with self.here():
            self._runtime.memcpyAsync(dst, src, nbytes, self._runtime.memcpyDeviceToDevice, stream)

    def zero(self, address: int, nbytes: int, stream: int) -> None:
        """Enqueue a memset of device memory to zero."""
        with self.here():
            self._runtime.memsetAsync(address, 0, nbytes, stream)

    def pinned(self, words: int) -> np.ndarray:
        """[words] zeroed uint32 of pinned host memory, which has the same address on the GPU."""
        with self._beside_captures():
            memory = self._cupy.cuda.alloc_pinned_memory(4 * words)
        array = np.frombuffer(memory, np.uint32, words)  # keeps the memory alive
        array[:] = 0
        return array

    def describe(self) -> dict[str, object]:
        """The GPU's name, and the versions of CuPy, the driver and the runtime."""
        properties = self._runtime.getDeviceProperties(self.index)
        return {
            "gpu": properties["name"].decode(), "cupy": self._cupy.__version__,
            "driver": self._runtime.driverGetVersion(),
            "runtime": self._runtime.runtimeGetVersion(),
        }  # fmt: skip

    # ---- streams and events ------------------------------------------------------------------
    def make_stream(self) -> int:
        """A stream that does not synchronise with the legacy default stream. Its blocks start
        before those of a model's kernels that wait for room: peers wait for a collective."""
        least, most, stream = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        with self.here():
            self._ask("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(most))
            self._ask("cuStreamCreateWithPriority", ctypes.byref(stream), _NON_BLOCKING, most)
        return stream.value or 0

    def free_stream(self, stream: int) -> None:
        with self.here():
            self._runtime.streamDestroy(stream)

    def synchronise(self, stream: int) -> None:
        """Wait for all work on a stream."""
        with self.here():
            self._runtime.streamSynchronize(stream)

    def finish(self) -> None:
        """Wait for all work of this process on the GPU, including graph replays."""
        with self.here():
            self._runtime.deviceSynchronize()

    def capturing(self, stream: int) -> int:
        """The id of the capture that a stream is part of; 0 if it is not being captured."""
        if not stream:  # it cannot be captured, and the query would break another stream's capture
            return 0
        status, number = ctypes.c_int(), ctypes.c_uint64()
        with self.here():
            self._ask("cuStreamGetCaptureInfo_v2", ctypes.c_void_p(stream), ctypes.byref(status),
                      ctypes.byref(number), None, None, None)  # fmt: skip
        return number.value + 1 if status.value else 0

    def capture(self, enqueue: Callable[[int], None]) -> Callable[[], None]:
        """Capture `enqueue(stream)` as a CUDA graph; returns a function that replays it and
        waits."""
        with self.here():
            stream = self._cupy.cuda.Stream(non_blocking=True)
            with stream:
                stream.begin_capture()
                enqueue(stream.ptr)
                graph = stream.end_capture()

        def replay() -> None:
            with self.here():
                graph.launch(stream)
                stream.synchronize()

        return replay

    def make_event(self) -> int:
        with self.here():
            return int(self._runtime.eventCreateWithFlags(self._runtime.eventDisableTiming))

    def free_event(self, event: int) -> None:
        with self.here():
            self._runtime.eventDestroy(event)

    def record(self, event: int, stream: int) -> None:
        """Record an event: it completes when all earlier work on the stream is done."""
        with self.here():
            self._runtime.eventRecord(event, stream)

    def wait(self, event: int, stream: int) -> None:
        """Make later work on a stream wait for an event."""
        with self.here():
            self._runtime.streamWaitEvent(stream, event)

    def ready(self, event: int) -> bool:
        """Whether an event has completed. Raises an error that has occurred on the GPU."""
        with self.here():
            code = int(self._runtime.eventQuery(event))
        if code not in (0, _NOT_READY):
            raise self._runtime.CUDARuntimeError(code)
        return code == 0

    # ---- peers -------------------------------------------------------------------------------
    def identity(self) -> tuple[str, str]:
        """(PCI bus id, UUID), written as by nvidia-smi, but a MIG instance's UUID as a GPU's."""
        device, raw = ctypes.c_int(), (ctypes.c_uint8 * 16)()
        self._ask("cuDeviceGet", ctypes.byref(device), self.index)
        self._ask("cuDeviceGetUuid_v2", raw, device)  # of a MIG instance its own
        text = bytes(raw).hex()
        parts = (text[:8], text[8:12], text[12:16], text[16:20], text[20:])
        return self._runtime.deviceGetPCIBusId(self.index).lower(), "GPU-" + "-".join(parts)

    def enable_peer_access(self, peer: int) -> bool:
        """Let this GPU access the memory of GPU `peer` in this process; False if it cannot."""
        with self.here():
            if not self._runtime.deviceCanAccessPeer(self.index, peer):
                return False
            try:
                self._runtime.deviceEnablePeerAccess(peer)
            except self._runtime.CUDARuntimeError as error:
                if "TooManyPeers" in str(error):  # over PCIe, eight at once
                    return False
                if "PeerAccessAlreadyEnabled" not in str(error):
                    raise
        return True

    def ipc_handle(self, address: int) -> bytes:
        """The CUDA IPC handle (64 bytes) of memory from `allocate`.

        It exports the whole 2 MiB block that contains the memory.
        """
        with self._beside_captures():
            return bytes(self._runtime.ipcGetMemHandle(address))

    def ipc_open(self, handle: bytes) -> int:
        """Map another process's memory; returns its address here."""
        with self._beside_captures():
            return int(self._runtime.ipcOpenMemHandle(handle))

    def ipc_close(self, address: int) -> None:
        """Undo `ipc_open`."""
        with self._beside_captures():
            self._runtime.ipcCloseMemHandle(address)

    def register(self, address: int, nbytes: int) -> None:
        """Pin pages of host memory and map them to the GPU at the same address.

        Raises RuntimeError if the GPU would map them at another address.
        """
        with self._beside_captures():
            attributes = self._cupy.cuda.Device(self.index).attributes
            if not attributes["CanUseHostPointerForRegisteredMem"]:
                raise RuntimeError("this GPU does not see host memory at the host's addresses")
            # cudaHostRegisterPortable | cudaHostRegisterMapped
            self._runtime.hostRegister(address, nbytes, 1 | 2)

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        with self._beside_captures():
            self._runtime.hostUnregister(address)
