"""What `CudaDevice` asks of CUDA, by a recording stand-in for CuPy's low-level modules."""

from __future__ import annotations

import ctypes
import sys
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from linkweave.kernels.gpu.device import CudaDevice


class CUDARuntimeError(RuntimeError):
    pass


class Runtime:
    """The runtime's functions: what was called, on the GPU that was current."""

    eventDisableTiming = 2
    memcpyHostToDevice, memcpyDeviceToDevice = 1, 3
    CUDARuntimeError = CUDARuntimeError

    def __init__(self) -> None:
        self.current, self.calls = 0, []
        self.answers: dict[str, Any] = {"malloc": 4096}

    mode = 0  # of captures, in this thread

    def setDevice(self, index: int) -> None:
        self.current = index

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, self.current, arguments))
            answer = self.answers.get(name, 0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    found = Runtime()
    contexts = SimpleNamespace(
        ctxGetCurrent=lambda: found.current, ctxSetCurrent=found.setDevice, CUDADriverError=OSError
    )
    api = SimpleNamespace(driver=contexts, runtime=found)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cupy_backends", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.api", api)
    found.mode = 0

    def exchange(mode: Any) -> int:
        found.mode, mode._obj.value = mode._obj.value, found.mode
        return 0

    def priorities(least: Any, greatest: Any) -> int:
        least._obj.value, greatest._obj.value = 0, -5
        return 0

    def create(stream: Any, flags: int, priority: Any) -> int:
        found.calls.append(("cuStreamCreateWithPriority", found.current, (flags, priority.value)))
        stream._obj.value = 77
        return 0

    library = SimpleNamespace(
        cuThreadExchangeStreamCaptureMode=exchange, cuCtxGetStreamPriorityRange=priorities,
        cuStreamCreateWithPriority=create,
    )  # fmt: skip
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    return found


def test_nothing_is_done_on_another_gpu_and_the_current_one_stays(runtime: Runtime) -> None:
    runtime.current = 5
    device = CudaDevice(3)
    device.allocate(100)
    device.wait(device.make_event(), 9)
    device.copy(1, 2, 3, 9)
    assert {index for name, index, _ in runtime.calls if name != "getDeviceCount"} == {3}
    assert runtime.current == 5
    device.use()
    assert runtime.current == 3


def test_a_gpu_that_is_current_is_not_made_so_again(runtime: Runtime) -> None:
    device = CudaDevice(3)
    device.use()
    set_again: list[int] = []
    runtime.setDevice = set_again.append  # type: ignore[method-assign]
    with device.here():
        device.record(device.make_event(), 9)
    assert not set_again
    runtime.current = 5
    device.wait(1, 9)
    assert set_again == [3]


def test_setting_up_waits_for_its_own_stream_only(runtime: Runtime) -> None:
    device = CudaDevice(0)
    runtime.calls.clear()
    assert device.allocate(0) == 4096
    assert [(name, arguments) for name, _, arguments in runtime.calls] == [
        ("malloc", (1,)), ("memsetAsync", (4096, 0, 1, 77)), ("streamSynchronize", (77,))
    ]  # fmt: skip


def test_an_upload_waits_once(runtime: Runtime) -> None:
    """The copy fills the memory, which need not be cleared before."""
    device, values = CudaDevice(0), np.arange(6, dtype=np.uint32)
    runtime.calls.clear()
    assert device.upload(values) == 4096
    names = [name for name, *_ in runtime.calls]
    assert names == ["malloc", "memcpyAsync", "streamSynchronize"]
    assert runtime.calls[1][2][:3] == (4096, values.ctypes.data, 24)
    runtime.answers["memcpyAsync"] = CUDARuntimeError("no")
    with pytest.raises(RuntimeError, match=r"^no$"):
        device.upload(values)
    assert runtime.calls[-1] == ("free", 0, (4096,))


def test_memory_that_is_full_is_asked_for_again_without_caches(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str] = []
    pool = SimpleNamespace(free_all_blocks=lambda: given.append("cupy"))
    cuda = SimpleNamespace(is_initialized=lambda: True, empty_cache=lambda: given.append("torch"))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    full = runtime.answers["malloc"] = CUDARuntimeError("cudaErrorMemoryAllocation")
    full.status = 2
    device = CudaDevice(0)
    device._cupy.get_default_memory_pool = lambda: pool
    with pytest.raises(MemoryError, match="GPU 0 has no 8 bytes left"):
        device.allocate(8)
    assert given == ["cupy", "torch"]

    def empty() -> None:
        runtime.answers["malloc"] = 512

    monkeypatch.setattr(cuda, "empty_cache", empty)
    assert device.allocate(8) == 512
    full.status = 700  # an illegal address: no lack of memory
    runtime.answers["malloc"] = full
    with pytest.raises(RuntimeError, match="cudaErrorMemoryAllocation"):
        device.allocate(8)


def test_captures_of_other_threads_go_on(runtime: Runtime) -> None:
    """What CUDA forbids while any thread captures a stream is called in the relaxed mode."""
    device, modes = CudaDevice(0), {}
    real = Runtime.__getattr__

    def noted(self: Runtime, name: str) -> Any:
        modes[name] = self.mode
        return real(self, name)

    Runtime.__getattr__ = noted  # type: ignore[method-assign]
    try:
        device.free(device.allocate(8))
        device.ipc_close(device.ipc_open(b""))
        device.record(device.make_event(), 3)
    finally:
        Runtime.__getattr__ = real  # type: ignore[method-assign]
    unsafe = {"malloc", "free", "ipcOpenMemHandle", "ipcCloseMemHandle"}
    assert {name: modes[name] for name in unsafe} == dict.fromkeys(unsafe, 2)
    assert modes["eventRecord"] == 0 and runtime.mode == 0


def test_streams_come_before_those_of_a_model(runtime: Runtime) -> None:
    assert CudaDevice(2).make_stream() == 77
    assert runtime.calls[-1] == ("cuStreamCreateWithPriority", 2, (1, -5))


def test_older_gpus_are_refused(runtime: Runtime) -> None:
    device = CudaDevice(2)
    found = SimpleNamespace(compute_capability="60")
    device._cupy.cuda = SimpleNamespace(Device=lambda index: found)
    with pytest.raises(RuntimeError, match=r"GPU 2 has compute capability 6\.0; kernels need 7\.0"):
        device.kernel("float32", "sum")


def test_memory_that_cannot_be_cleared_is_given_back(runtime: Runtime) -> None:
    device = CudaDevice(0)
    runtime.answers["memsetAsync"] = CUDARuntimeError("no")
    with pytest.raises(RuntimeError, match=r"^no$"):
        device.allocate(8)
    assert runtime.calls[-1] == ("free", 0, (4096,))


def test_an_array_lies_in_memory_of_ours_and_keeps_its_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the real CuPy, where it is installed: this needs no GPU."""
    cupy = pytest.importorskip("cupy")
    device = object.__new__(CudaDevice)
    device._cupy, device.index = cupy, 3
    monkeypatch.setattr(CudaDevice, "here", lambda self: nullcontext())
    owner = set("x")
    alone = weakref.ref(owner)
    array = device.array(1 << 20, 96, owner)
    assert (array.shape, array.dtype, array.data.ptr) == ((96,), "uint8", 1 << 20)
    part = array.view("float32").reshape(4, 6)[1:]
    del owner, array
    assert part.data.ptr == (1 << 20) + 24 and part.device.id == 3 and alone() is not None
    del part
    assert alone() is None


@pytest.mark.parametrize(("code", "wanted"), [(0, True), (600, False)])
def test_events_are_over_or_not(code: int, wanted: bool, runtime: Runtime) -> None:
    runtime.answers["eventQuery"] = code
    assert CudaDevice(0).ready(1) is wanted


def test_an_event_behind_a_fault_raises_it(runtime: Runtime) -> None:
    runtime.answers["eventQuery"] = 700
    with pytest.raises(RuntimeError, match=r"^700$"):
        CudaDevice(0).ready(1)


def test_the_default_stream_is_never_asked_whether_it_is_captured(runtime: Runtime) -> None:
    device = CudaDevice(0)
    device._cuda = None
    assert device.capturing(0) == 0


@pytest.mark.parametrize(
    ("access", "error", "wanted"),
    [(0, None, False), (1, None, True), (1, "cudaErrorPeerAccessAlreadyEnabled: x", True),
     (1, "cudaErrorTooManyPeers: peer mapping resources exhausted", False)],
)  # fmt: skip
def test_access_to_a_peer(access: int, error: str | None, wanted: bool, runtime: Runtime) -> None:
    runtime.answers["deviceCanAccessPeer"] = access
    runtime.answers["deviceEnablePeerAccess"] = CUDARuntimeError(error) if error else 0
    assert CudaDevice(0).enable_peer_access(1) is wanted


def test_other_faults_of_peer_access_are_raised(runtime: Runtime) -> None:
    runtime.answers["deviceCanAccessPeer"] = 1
    runtime.answers["deviceEnablePeerAccess"] = CUDARuntimeError("cudaErrorHardwareStackError")
    with pytest.raises(RuntimeError, match=r"HardwareStackError"):
        CudaDevice(0).enable_peer_access(1)
