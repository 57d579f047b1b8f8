"""Sparse vectors on GPUs made of threads: the kernels of `host_kernels`, behind a GPU's streams."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from gpu_ranks import Machine, gpus
from host_gpu import HostTensor
from host_kernels import HostKernels, library

from linkweave.collectives.calls.sparse import gpu
from linkweave.collectives.runtime.gpu import device as cuda
from linkweave.kernels.gpu.arrays import element


class StreamKernels(HostKernels):
    """Of one GPU: behind what its stream holds, and never given back before the end."""

    kept: list[Any] = []  # noqa: RUF012
    threads_seen: set[int] = set()  # noqa: RUF012
    fail: tuple[int, Exception] | None = None  # what merges raise on a thread

    def __init__(self, like: HostTensor) -> None:
        super().__init__(threads=2, blocks=2)
        self._device, self._stream = cuda.open_device(like.device.id), like.stream

    def empty(self, size: int, dtype: str) -> np.ndarray:
        made = super().empty(size, dtype)
        self.kept.append(made)
        return made

    def full(self, size: int, dtype: str, value: int) -> np.ndarray:
        made = super().full(size, dtype, value)
        self.kept.append(made)
        return made

    def contiguous(self, array: Any) -> np.ndarray:
        return np.ascontiguousarray(getattr(array, "array", array))

    def address(self, array: Any) -> int:
        return super().address(getattr(array, "array", array))

    def nonzero(self, array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self._device.synchronise(self._stream)
        made = super().nonzero(array)
        self.kept += made
        return made

    def read(self, array: Any) -> np.ndarray:
        self._device.synchronise(self._stream)
        return super().read(array)

    def launch(self, *arguments: Any) -> None:
        self.threads_seen.add(threading.get_ident())
        if arguments[0] == "merge/merge.cu" and self.fail and self.fail[0] == threading.get_ident():
            raise self.fail[1]
        file, names, words, argument, blocks = arguments
        run = super().launch  # behind what the stream holds, while the host goes on
        self._device._enqueue(self._stream, lambda: run(file, names, words, argument, blocks))


@contextmanager
def sparse_gpus(monkeypatch: pytest.MonkeyPatch, *make: Any) -> Iterator[Machine]:
    for dtype in ("float32", "float16"):  # compiled before ranks are forked
        library("merge/entries.cu", element(dtype))
    library("merge/merge.cu", ("-DINDEX=int",))
    library("topk/select.cu", element("float32"))
    monkeypatch.setattr(gpu, "LibraryGpu", StreamKernels)
    with gpus(monkeypatch, *make) as machine:
        yield machine
    StreamKernels.kept.clear()
