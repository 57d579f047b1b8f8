"""A GPU as the runtime sees it: the protocol, and which GPU a thread uses.

`kernels.gpu.device.CudaDevice` implements `Device` for real GPUs, `tests/cpu/host_gpu.py` with
threads of the host.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from linkweave.collectives.errors import CollectiveError


class Device(Protocol):
    """One GPU of this process. Addresses, CUDA streams and events are integers."""

    index: int

    def use(self) -> None: ...
    def here(self) -> AbstractContextManager[None]: ...
    def allocate(self, nbytes: int) -> int: ...
    def free(self, address: int) -> None: ...
    def array(self, address: int, nbytes: int, owner: object) -> Any: ...
    def store(self, address: int, array: NDArray[np.generic]) -> None: ...
    def upload(self, array: NDArray[np.generic]) -> int: ...
    def copy(self, dst: int, src: int, nbytes: int, stream: int = 0) -> None: ...
    def pinned(self, words: int) -> NDArray[np.uint32]: ...
    def resident(self, dtype: str, op: str) -> int: ...
    def registers(self, dtype: str, op: str) -> int: ...
    def launch(
        self, dtype: str, op: str, launch: NDArray[np.void], blocks: int, stream: int
    ) -> None: ...
    def load_check(self) -> None: ...
    def check(self, argument: NDArray[np.void], stream: int) -> None: ...
    def zero(self, address: int, nbytes: int, stream: int) -> None: ...
    def synchronise(self, stream: int) -> None: ...
    def finish(self) -> None: ...
    # streams
    def make_stream(self) -> int: ...
    def free_stream(self, stream: int) -> None: ...
    def capturing(self, stream: int) -> int: ...
    def make_event(self) -> int: ...
    def free_event(self, event: int) -> None: ...
    def record(self, event: int, stream: int) -> None: ...
    def wait(self, event: int, stream: int) -> None: ...
    def ready(self, event: int) -> bool: ...
    # peers
    def identity(self) -> tuple[str, str]: ...
    def enable_peer_access(self, peer: int) -> bool: ...
    def ipc_handle(self, address: int) -> bytes: ...
    def ipc_open(self, handle: bytes) -> int: ...
    def ipc_close(self, address: int) -> None: ...
    def register(self, address: int, nbytes: int) -> None: ...
    def unregister(self, address: int) -> None: ...


@cache
def open_device(index: int) -> Device:
    """The GPU with this CUDA device index, opened once per process.

    Raises CollectiveError if CuPy is missing or the GPU cannot be used.
    """
    try:
        from linkweave.kernels.gpu.arrays import device_of

        found: Device = device_of(index)
    except ImportError as error:
        raise CollectiveError(
            f"GPU tensors need CuPy: install linkweave with its extra cuda12 or cuda13 ({error})"
        ) from None
    except (RuntimeError, OSError) as error:  # CuPy's errors
        raise CollectiveError(f"GPU {index} cannot be used: {error}") from None
    return found


def gpu_named(device: str) -> int | None:
    """N of "cuda:N", None of "cuda". Raises CollectiveError for anything else."""
    kind, _, number = device.partition(":")
    if kind != "cuda" or (":" in device and not number.isdecimal()):
        raise CollectiveError(f"unknown device {device!r}; choose from cpu, cuda, cuda:N")
    return int(number) if number else None


def current_device() -> int:
    """The index of this thread's current GPU: torch's if it uses GPUs, otherwise CuPy's."""
    if torch := _torch_on_gpus():
        return int(torch.cuda.current_device())
    try:
        from linkweave.kernels.gpu.device import current

        found: int = current()
    except ImportError as error:
        raise CollectiveError(f"GPU tensors need CuPy ({error})") from None
    return found


def use_device(index: int) -> None:
    """Make a GPU this thread's current one, for CuPy and, if it is loaded, torch."""
    open_device(index).use()
    if torch := _torch_on_gpus():
        torch.cuda.set_device(index)


def _torch_on_gpus() -> Any:
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)  # which is not there while torch is imported
    return torch if cuda is not None and cuda.is_available() else None
