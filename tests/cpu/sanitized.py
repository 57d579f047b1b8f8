"""Runs the kernels of rows and sparse vectors built with a sanitizer: `sanitized.py thread`."""

from __future__ import annotations

import os
import sys

import host_kernels
import numpy as np

from linkweave.kernels.merge import entries as gpu_entries
from linkweave.kernels.merge import gpu as gpu_merge
from linkweave.kernels.rows import gpu as gpu_rows
from linkweave.kernels.topk import gpu as gpu_select


def main(sanitizer: str) -> None:
    os.environ.pop("LD_PRELOAD")  # which has been done: compilers are to run without it
    plain = host_kernels.library
    host_kernels.library = lambda file, words: plain(file, words, sanitizer)  # type: ignore[assignment]
    rng = np.random.default_rng(0)
    calls = host_kernels.HostKernels(4, 3)
    x = rng.standard_normal(70_001).astype(np.float32)
    gpu_select.select(calls, x, "float32", x.size, 500)
    gpu_select.select(calls, x[1:], "float32", x.size - 1, 9000)  # misaligned, and no lists
    gpu_select.select(calls, np.sort(x), "float32", x.size, 700)  # some lists are too short
    gpu_select.select(calls, x, "float32", x.size, 30, x.copy())
    gpu_select.select(calls, x.astype(np.float16), "float16", x.size, 30, x[::-1].copy())
    pair = x[:90].copy(), np.arange(0, 180, 2).astype(np.int32)
    other = x[:40].copy(), np.arange(0, 160, 4).astype(np.int32)
    total = gpu_merge.merge(calls, pair, other, (90, 40), "int32")
    assert not isinstance(total, int)
    number = total[0].size
    _, found = gpu_select.select(calls, total[0], "float32", number, 20)
    gpu_merge.part(calls, total, number, found, 20, "int32")
    for dtype in ("float32", "float16"):
        vector = gpu_entries.admit(calls, pair[0].astype(dtype), pair[1], dtype, 180)
        assert vector is not None
        gpu_entries.settle(calls, vector, dtype, np.zeros(180, np.float32))
        message = np.zeros(np.dtype(dtype).itemsize * 100 + 4 * 100, np.uint8)
        gpu_entries.pack(calls, vector, dtype, calls.address(message), 100)
        again = gpu_entries.unpack(calls, 100, dtype, calls.address(message))
        kept, left = gpu_merge.merge_padded(calls, again, again, 70, 180)
        assert left[1].size == 110
        residual = np.zeros(180, np.float32)
        gpu_entries.keep(calls, again, residual)
        gpu_entries.keep(calls, again, residual, common=kept[1])
        gpu_entries.keep(calls, again, residual, foreign=kept[1])
        assert gpu_entries.measured(calls, kept)[1].size == 70
        gpu_entries.narrowed(calls, again, dtype)
    indices = rng.integers(0, 700, 1000).astype(np.int32)
    rows = gpu_rows.sort(calls, indices, "int32", 1000, 700)
    assert not isinstance(rows, int)
    gpu_rows.add(calls, rows, x[:3000], "float32", 3)
    print("ran")


main(sys.argv[1])
