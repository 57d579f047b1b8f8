"""Combine a chunk with several others on the CPU: the arithmetic of REDUCE.

One machine-code function for each (dtype, op), compiled at first use and cached on disk. Bytes
moved: each operand read once and the result written once, in blocks that stay in the L1 cache;
operands are added strictly in order. 16-bit floats are widened to float32, combined, and rounded
once (to nearest even; subnormals are kept). No fast-math.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import carray, cfunc, njit, types

from kernels.atomics import load, pointer
from kernels.halves import narrow_bfloat16, narrow_float16, widen_bfloat16, widen_float16

BLOCK = 2048  # elements: with float32 three operands are 24 KiB, inside a 32 KiB L1 cache
SIGNATURE = types.void(types.int64, types.int64, types.int64, types.int64, types.float64)


@njit(inline="always")
def _sum(a, b):
    return a + b


@njit(inline="always")
def _prod(a, b):
    return a * b


@njit(inline="always")
def _min(a, b):
    return b if (b < a or b != b) else a


@njit(inline="always")
def _max(a, b):
    return b if (b > a or b != b) else a


_STEPS: dict[str, Any] = {"sum": _sum, "avg": _sum, "prod": _prod, "min": _min, "max": _max}
_NATIVE: dict[str, Any] = {
    name: getattr(np, name)(0) for name in ("float32", "float64", "int8", "uint8", "int32", "int64")
}
_HALVES: dict[str, Any] = {
    "float16": (widen_float16, narrow_float16),
    "bfloat16": (widen_bfloat16, narrow_bfloat16),
}


def _native(step: Any, zero: Any, average: bool) -> Callable[..., None]:
    def kernel(dst, table, m, n, divisor):
        own = carray(pointer(dst, zero), n)
        for start in range(0, n, BLOCK):
            stop = min(start + BLOCK, n)
            a = own[start:stop]
            j = 0
            while j + 1 < m:  # two operands a pass: half the passes over the block
                b = carray(pointer(load(table + 8 * j), zero), n)[start:stop]
                c = carray(pointer(load(table + 8 * j + 8), zero), n)[start:stop]
                for i in range(a.size):
                    a[i] = step(step(a[i], b[i]), c[i])
                j += 2
            if j < m:
                b = carray(pointer(load(table + 8 * j), zero), n)[start:stop]
                for i in range(a.size):
                    a[i] = step(a[i], b[i])
            if average and divisor != 1.0:
                for i in range(a.size):
                    a[i] = a[i] / type_of(divisor)
        return

    type_of = {np.float32: types.float32}.get(type(zero), types.float64)
    return kernel


def _half(step: Any, widen: Any, narrow: Any, average: bool) -> Callable[..., None]:
    bits = np.uint16(0)

    def kernel(dst, table, m, n, divisor):
        own = carray(pointer(dst, bits), n)
        total = np.empty(BLOCK, np.uint32)
        other = np.empty(BLOCK, np.uint32)
        a = total.view(np.float32)
        b = other.view(np.float32)
        for start in range(0, n, BLOCK):
            stop = min(start + BLOCK, n)
            size = stop - start
            widen(own[start:stop], total)
            for j in range(m):
                widen(carray(pointer(load(table + 8 * j), bits), n)[start:stop], other)
                for i in range(size):
                    a[i] = step(a[i], b[i])
            if average and divisor != 1.0:
                for i in range(size):
                    a[i] = a[i] / np.float32(divisor)
            narrow(total, own[start:stop])
        return

    return kernel


@cache
def _compiled(dtype: str, op: str) -> Any:
    step, average = _STEPS[op], op == "avg"
    if dtype in _HALVES:
        kernel = _half(step, *_HALVES[dtype], average)
    else:
        kernel = _native(step, _NATIVE[dtype], average)
    return cfunc(SIGNATURE, cache=True)(kernel)


def combine_address(dtype: str, op: str) -> int:
    """Address of `void(dst, table, m, n, divisor)`.

    It combines `n` elements at `dst` in place with those at the `m` addresses in the int64 array
    at `table`, in order, and divides by `divisor` where the op is "avg".
    """
    return int(_compiled(dtype, op).address)
