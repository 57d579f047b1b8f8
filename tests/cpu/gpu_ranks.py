"""Ranks on GPUs made of threads: what `collectives.spawn(device="cuda")` runs on in these tests."""

from __future__ import annotations

import gc
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from host_gpu import CURRENT, HostDevice, HostTensor, build
from on_ranks import on_ranks

from linkweave.collectives import CollectiveError
from linkweave.collectives.launch import processes
from linkweave.collectives.runtime.gpu import device as cuda

MODES = {
    "threads on one GPU": {"device": "cuda:0", "virtual": True},
    "processes on one GPU": {"device": "cuda:0"},
    "a process a GPU": {"device": "cuda"},
    "a thread a GPU": {"device": "cuda", "virtual": True},
}

queues = pytest.mark.parametrize(
    "machine", [False, True], ids=["apart", "one queue"], indirect=True
)
"""Runs a test with streams that run side by side, and with all streams of a GPU in one queue."""

_KEPT: list[HostTensor] = []
_LEFT = {threading.main_thread()}
"""Threads that have not ended with their test, each of which is waited for once."""


class Machine:
    """GPUs of this process by number, each made when it is first asked for."""

    def __init__(self, make: Callable[[int], HostDevice]) -> None:
        self._make = make
        self._made: dict[tuple[int, int], HostDevice] = {}

    def __call__(self, index: int) -> HostDevice:
        key = (os.getpid(), index)
        if key not in self._made:
            self._made[key] = self._make(index)
        return self._made[key]

    def ours(self) -> list[HostDevice]:
        return [device for (pid, _), device in self._made.items() if pid == os.getpid()]

    def left(self) -> list[object]:
        """What has been allocated, opened or registered in this process and not given back; a GPU
        that has died has lost it."""
        living = [device for device in self.ours() if not device.error]
        return [x for d in living for x in (*d.memory, *d.opened, *d.registered)]


class Numbered(HostDevice):
    """One of several GPUs."""

    def __init__(self, index: int, multiprocessors: int = 17) -> None:
        super().__init__(multiprocessors, index=index, bus_id=f"0000:0{index}:00.0")


class Faulty(Numbered):
    """GPU 1 raises what `raises` says where a method is called whose name is `fault`."""

    fault = ""
    raises: type[Exception] = RuntimeError

    def __getattribute__(self, name: str) -> Any:
        get = super().__getattribute__
        if name != get("fault") or get("index") != 1:
            return get(name)

        def fails(*arguments: Any) -> None:
            if name == "ipc_close":  # which leaves nothing open
                get(name)(*arguments)
            raise self.raises(f"cudaErrorIllegalAddress in {name}")

        return fails


class Choosy(Numbered):
    """Opens the memory of those GPUs of other processes that it sees: here of none."""

    def sees(self, peer: int) -> bool:
        return False

    def ipc_handle(self, address: int) -> bytes:
        return super().ipc_handle(address).rstrip(b"\0") + b"#%d" % self.index

    def ipc_open(self, handle: bytes) -> int:
        handle, _, owner = handle.partition(b"#")
        if not self.sees(int(owner.rstrip(b"\0"))):
            raise RuntimeError("cudaErrorMapBufferObjectFailed: mapping of buffer object failed")
        return super().ipc_open(handle)


@contextmanager
def gpus(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[int], HostDevice] = Numbered
) -> Iterator[Machine]:
    build(everything=True, what="library")  # before ranks are forked
    gc.collect()  # GPUs of earlier tests, whose streams are threads
    deadline = time.monotonic() + 5
    while (left := {*threading.enumerate()} - _LEFT) and time.monotonic() < deadline:
        time.sleep(0.01)
    if left:
        _LEFT.update(left)
        warnings.warn(f"earlier tests have left threads: {left}", stacklevel=1)
    # ranks that are not forked would miss what follows
    monkeypatch.setattr(processes, "can_fork", lambda: True)
    machine = Machine(make)
    monkeypatch.setattr(cuda, "open_device", machine)
    monkeypatch.setattr(cuda, "current_device", lambda: CURRENT.index)
    try:
        yield machine
    finally:  # a test that fails is kept, and would keep the threads of its streams
        for device in machine.ours():
            device.close()
    _KEPT.clear()
    gc.collect()  # tensors that threads had
    assert not machine.left()


def on_gpus(
    size: int, *modes: str, make: Callable[[int], HostDevice] | None = None, timeout: float = 200,
    **settings: Any,
) -> Callable[[Any], Any]:  # fmt: skip
    """`on_ranks` whose GPUs are linked each to each, in these modes, or in all.

    make: makes the GPU of a number, if it is to be a special one.
    """
    ranks = {"topology": f"mesh-{size}", "timeout": timeout, **settings}

    def test(body: Any) -> Any:
        made = on_ranks(size, modes={mode: MODES[mode] for mode in modes or MODES}, **ranks)(body)
        if make:
            made = pytest.mark.parametrize("machine", [make], indirect=True)(made)
        return pytest.mark.usefixtures("machine")(made)

    return test


def tensor(values: Any, dtype: str = "float32", stream: int = 0) -> HostTensor:
    """On this rank's GPU. Kept, as CuPy and torch give memory back in the stream's order."""
    _KEPT.append(HostTensor(np.array(values, dtype), CURRENT.index, stream))
    return _KEPT[-1]


def failure(call: Callable[[], Any]) -> CollectiveError | None:
    """What a call raises."""
    try:
        call()
    except CollectiveError as error:
        return error
    return None


def said(call: Callable[[], Any]) -> str:
    """What a call raises, with its kind."""
    error = failure(call)
    return f"{type(error).__name__}: {error}" if error else "no error"
