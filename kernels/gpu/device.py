"""One GPU through CuPy: memory, the plan interpreter, its launches, streams, other processes.

Nothing here has run on a GPU yet.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from linkweave.kernels.gpu.compile import cubin
from linkweave.kernels.gpu.source import PLAIN, PLAN_THREADS, options, source

CHECK_THREADS = 128
_NOT_READY = 600  # cudaErrorNotReady


def current() -> int:
    """The number of this thread's current GPU."""
    from cupy_backends.cuda.api import runtime

    return int(runtime.getDevice())


class CudaDevice:
    """The GPU of this index, for one process; any thread may use it.

    Addresses are plain integers. Memory comes from cudaMalloc itself, not from a pool: only whole
    allocations can be shared with other processes. Setting up goes over a stream of its own, so
    that it waits for no kernel; `finish`, `free` and `download` may. Raises CuPy's errors, which
    are RuntimeErrors.
    """

    def __init__(self, index: int = 0) -> None:
        import cupy
        from cupy_backends.cuda.api import driver, runtime

        self._cupy, self._driver, self._runtime = cupy, driver, runtime
        self.index = index
        self._functions: dict[tuple[str, ...], tuple[int, object]] = {}
        self._lock = threading.Lock()
        self._runtime.getDeviceCount()  # starts the driver
        self._own = self.make_stream()
        self._cuda = ctypes.CDLL("libcuda.so.1")  # for the few questions that CuPy does not pass on

    @contextmanager
    def here(self) -> Iterator[None]:
        """Make it the current GPU of this thread for a while; of a thread that had none, from now
        on, as CuPy takes a thread that has loaded a kernel to have a context."""
        before = self._driver.ctxGetCurrent()  # to set a device would make a context on it
        self._runtime.setDevice(self.index)
        try:
            yield
        finally:
            if before:
                self._driver.ctxSetCurrent(before)

    def use(self) -> None:
        """Make it the current one of this thread from now on."""
        self._runtime.setDevice(self.index)

    def _ask(self, name: str, *arguments: object) -> None:
        if code := getattr(self._cuda, name)(*arguments):
            raise self._driver.CUDADriverError(code)

    # ---- kernels -----------------------------------------------------------------------------
    def _function(self, file: str, name: str, words: tuple[str, ...]) -> int:
        """A kernel, compiled at first use: a CUfunction."""
        key = (file, name, *words)
        with self._lock, self.here():
            if key not in self._functions:
                code = cubin(source(file), words, self._architecture())
                module = self._cupy.cuda.function.Module()
                module.load(code)
                function = module.get_function(name)
                self._functions[key] = int(function.ptr), (module, function)
            return self._functions[key][0]

    def kernel(self, dtype: str, op: str) -> int:
        """The plan interpreter for this dtype and op."""
        return self._function("plan/plan.cu", "run_plan", options(dtype, op))

    def _architecture(self) -> int:
        return int(self._cupy.cuda.Device(self.index).compute_capability)

    def registers(self, dtype: str, op: str) -> int:
        """Registers that a thread of that kernel takes."""
        kernel = self.kernel(dtype, op)
        with self.here():
            wanted = self._driver.CU_FUNC_ATTRIBUTE_NUM_REGS
            return int(self._driver.funcGetAttribute(wanted, kernel))

    def resident(self, dtype: str, op: str) -> int:
        """Blocks of the interpreter that the device holds at once, beside the check of a queue:
        one multiprocessor is left to that."""
        kernel = self.kernel(dtype, op)
        with self.here():
            each = self._driver.occupancyMaxActiveBlocksPerMultiprocessor(kernel, PLAN_THREADS, 0)
            many = self._cupy.cuda.Device(self.index).attributes["MultiProcessorCount"]
            return int(each) * (int(many) - 1)

    def launch(self, dtype: str, op: str, launch: np.ndarray, blocks: int, stream: int) -> None:
        """Enqueue the interpreter; `launch` is copied. All blocks come at once or none."""
        kernel = self.kernel(dtype, op)
        parameters = (ctypes.c_void_p * 1)(launch.ctypes.data)
        with self.here():
            self._driver.launchCooperativeKernel(
                kernel, blocks, 1, 1, PLAN_THREADS, 1, 1, 0, stream,
                ctypes.addressof(parameters),
            )  # fmt: skip

    def start(
        self, file: str, name: str, words: tuple[str, ...], argument: np.ndarray, blocks: int,
        threads: int, stream: int,
    ) -> None:  # fmt: skip
        """Enqueue a kernel of `kernels/FILE` that takes one struct; the argument is copied."""
        kernel = self._function(file, name, words)
        parameters = (ctypes.c_void_p * 1)(argument.ctypes.data)
        with self.here():
            self._driver.launchKernel(
                kernel, blocks, 1, 1, threads, 1, 1, 0, stream, ctypes.addressof(parameters), 0
            )

    def load_check(self) -> None:
        """Compile what `check` launches, which it could not in the middle of a capture."""
        self._function("plan/queue.cu", "check", PLAIN)

    def check(self, argument: np.ndarray, stream: int) -> None:
        """Enqueue a queue's `check`; the argument is copied."""
        self.start("plan/queue.cu", "check", PLAIN, argument, 1, CHECK_THREADS, stream)

    def filled(self) -> int:
        """Blocks of `source.THREADS` threads that fill the GPU: two a multiprocessor."""
        return 2 * int(self._cupy.cuda.Device(self.index).attributes["MultiProcessorCount"])

    # ---- memory ------------------------------------------------------------------------------
    def allocate(self, nbytes: int) -> int:
        """Zeroed device memory of at least one byte."""
        with self.here():
            address = int(self._runtime.malloc(max(nbytes, 1)))
            try:
                self._runtime.memsetAsync(address, 0, max(nbytes, 1), self._own)
                self._runtime.streamSynchronize(self._own)
            except BaseException:
                self._runtime.free(address)
                raise
        return address

    def free(self, address: int) -> None:
        with self.here():
            self._runtime.free(address)

    def array(self, address: int, nbytes: int, owner: object) -> object:
        """A CuPy array [nbytes] of uint8 over memory of `allocate`, which keeps `owner`."""
        cupy = self._cupy
        with self.here():
            memory = cupy.cuda.UnownedMemory(address, nbytes, owner, self.index)
            return cupy.ndarray((nbytes,), "uint8", cupy.cuda.MemoryPointer(memory, 0))

    def upload(self, array: np.ndarray) -> int:
        """New device memory with the array's bytes."""
        address = self.allocate(array.nbytes)
        if array.nbytes:
            whole = np.ascontiguousarray(array)
            with self.here():
                self._runtime.memcpyAsync(address, whole.ctypes.data, whole.nbytes,
                                          self._runtime.memcpyHostToDevice, self._own)  # fmt: skip
                self._runtime.streamSynchronize(self._own)
        return address

    def download(self, address: int, array: np.ndarray) -> None:
        """Fill a contiguous array with the bytes at the address."""
        with self.here():
            self._runtime.memcpy(array.ctypes.data, address, array.nbytes,
                                 self._runtime.memcpyDeviceToHost)  # fmt: skip

    def copy(self, dst: int, src: int, nbytes: int, stream: int = 0) -> None:
        """Enqueue a copy within the device."""
        with self.here():
            self._runtime.memcpyAsync(dst, src, nbytes, self._runtime.memcpyDeviceToDevice, stream)

    def zero(self, address: int, nbytes: int, stream: int) -> None:
        """Enqueue the clearing of device memory."""
        with self.here():
            self._runtime.memsetAsync(address, 0, nbytes, stream)

    def pinned(self, words: int) -> np.ndarray:
        """[words] zeroed uint32 of host memory that the device sees at the same address."""
        with self.here():
            memory = self._cupy.cuda.alloc_pinned_memory(4 * words)
        array = np.frombuffer(memory, np.uint32, words)  # which keeps the memory
        array[:] = 0
        return array

    def describe(self) -> dict[str, object]:
        """Name, versions: what a result is to be read with."""
        properties = self._runtime.getDeviceProperties(self.index)
        return {
            "gpu": properties["name"].decode(), "cupy": self._cupy.__version__,
            "driver": self._runtime.driverGetVersion(),
            "runtime": self._runtime.runtimeGetVersion(),
        }  # fmt: skip

    # ---- streams and events ------------------------------------------------------------------
    def make_stream(self) -> int:
        """A stream that the legacy default stream does not hold up."""
        with self.here():
            return int(self._runtime.streamCreateWithFlags(self._runtime.streamNonBlocking))

    def free_stream(self, stream: int) -> None:
        with self.here():
            self._runtime.streamDestroy(stream)

    def synchronise(self, stream: int) -> None:
        """Until all that the stream was given is over."""
        with self.here():
            self._runtime.streamSynchronize(stream)

    def finish(self) -> None:
        """Until all that the GPU was given by this process is over, replays of graphs as well."""
        with self.here():
            self._runtime.deviceSynchronize()

    def capturing(self, stream: int) -> int:
        """The number of the capture that the stream is part of; 0: none."""
        if not stream:  # cannot be captured, and must not be asked while another one is
            return 0
        status, number = ctypes.c_int(), ctypes.c_uint64()
        with self.here():
            self._ask("cuStreamGetCaptureInfo_v2", ctypes.c_void_p(stream), ctypes.byref(status),
                      ctypes.byref(number), None, None, None)  # fmt: skip
        return number.value + 1 if status.value else 0

    def capture(self, enqueue: Callable[[int], None]) -> Callable[[], None]:
        """A CUDA graph of what `enqueue(stream)` enqueues; returns its replay, which waits."""
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
        """From now on the event stands for what the stream has been given so far."""
        with self.here():
            self._runtime.eventRecord(event, stream)

    def wait(self, event: int, stream: int) -> None:
        """What the stream is given from now on comes after the event."""
        with self.here():
            self._runtime.streamWaitEvent(stream, event)

    def ready(self, event: int) -> bool:
        """Whether what the event stands for is over. Raises what has gone wrong on the GPU."""
        with self.here():
            code = int(self._runtime.eventQuery(event))
        if code not in (0, _NOT_READY):
            raise self._runtime.CUDARuntimeError(code)
        return code == 0

    # ---- peers -------------------------------------------------------------------------------
    def identity(self) -> tuple[str, str]:
        """(PCI bus id, UUID) as the driver's tools write them."""
        device, raw = ctypes.c_int(), (ctypes.c_uint8 * 16)()
        self._ask("cuDeviceGet", ctypes.byref(device), self.index)
        self._ask("cuDeviceGetUuid", raw, device)
        text = bytes(raw).hex()
        parts = (text[:8], text[8:12], text[12:16], text[16:20], text[20:])
        return self._runtime.deviceGetPCIBusId(self.index).lower(), "GPU-" + "-".join(parts)

    def reach(self, peer: int) -> bool:
        """Open the memory of another GPU of this process to this one; False where that cannot
        be."""
        with self.here():
            if not self._runtime.deviceCanAccessPeer(self.index, peer):
                return False
            try:
                self._runtime.deviceEnablePeerAccess(peer)
            except self._runtime.CUDARuntimeError as error:
                if "PeerAccessAlreadyEnabled" not in str(error):
                    raise
        return True

    def share(self, address: int) -> bytes:
        """A handle (64 bytes) by which another process opens memory of `allocate`.

        The whole 2 MiB block in which smaller memory lies is shared with it.
        """
        with self.here():
            return bytes(self._runtime.ipcGetMemHandle(address))

    def open(self, handle: bytes) -> int:
        """The address here of another process's memory."""
        with self.here():
            return int(self._runtime.ipcOpenMemHandle(handle))

    def shut(self, address: int) -> None:
        """Undo `open`."""
        with self.here():
            self._runtime.ipcCloseMemHandle(address)

    def register(self, address: int, nbytes: int) -> None:
        """Open pages of host memory to the GPU, at the address that the host has for them.

        Raises RuntimeError where the GPU has another address for them.
        """
        with self.here():
            attributes = self._cupy.cuda.Device(self.index).attributes
            if not attributes["CanUseHostPointerForRegisteredMem"]:
                raise RuntimeError("this GPU does not see host memory at the host's addresses")
            # cudaHostRegisterPortable | cudaHostRegisterMapped
            self._runtime.hostRegister(address, nbytes, 1 | 2)

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        with self.here():
            self._runtime.hostUnregister(address)
