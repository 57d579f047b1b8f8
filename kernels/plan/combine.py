"""Combine a chunk with several others on the CPU: the arithmetic of REDUCE.

One machine-code function for each way to combine a dtype, compiled at first use and cached on
disk. Bytes moved: each operand read once and the result written once, in blocks that stay in the L1
cache; operands are added strictly in order. 16-bit floats are widened to float32, combined, and
rounded once (to nearest even; subnormals are kept). No fast-math. Any byte of a bool but 0 is True;
results are 0 or 1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import carray, cfunc, njit, types

from linkweave.kernels.atomics import load, pointer
from linkweave.kernels.dtypes import DTYPES, step_of
from linkweave.kernels.float16 import narrow_bfloat16, narrow_float16, widen_bfloat16, widen_float16

BLOCK = 2048  # elements: with float32 three operands are 24 KiB, inside a 32 KiB L1 cache
SIGNATURE = types.void(*[types.int64] * 5, types.float64)


# What a kernel closes over is numbers only: then its cached code is found again by other processes.
SUM, PROD, MIN, MAX, AND, OR, XOR, ALL, ANY, ODD = range(10)
FLOAT16, BFLOAT16 = range(2)
_STEPS = {
    "sum": SUM, "prod": PROD, "min": MIN, "max": MAX, "and": AND, "or": OR, "xor": XOR,
    "all": ALL, "any": ANY, "odd": ODD,
}  # fmt: skip
_HALVES = {"float16": FLOAT16, "bfloat16": BFLOAT16}


@njit(inline="always")
def _apply(step, a, b):
    if step == SUM:
        return a + b
    if step == PROD:
        return a * b
    if step == MIN:
        return b if (b < a or b != b) else a  # b != b: a NaN wins
    return b if (b > a or b != b) else a


@njit(inline="always")
def _join(step, a, b):
    if step == AND:
        return a & b
    if step == OR:
        return a | b
    if step == XOR:
        return a ^ b
    if step == ALL:  # of bytes that are True where they are not 0, as the others below
        return np.uint8((a != 0) & (b != 0))
    if step == ANY:
        return np.uint8((a | b) != 0)
    return np.uint8((a != 0) ^ (b != 0))


@njit(inline="always")
def _widen(half, src, dst):
    if half == FLOAT16:
        widen_float16(src, dst)
    else:
        widen_bfloat16(src, dst)


@njit(inline="always")
def _narrow(half, src, dst):
    if half == FLOAT16:
        narrow_float16(src, dst)
    else:
        narrow_bfloat16(src, dst)


def _native(step: int, stored: str, average: bool) -> Callable[..., None]:
    zero = np.dtype(stored).type(0)
    single = isinstance(zero, np.float32)

    def kernel(dst, table, m, ahead, n, divisor):
        own = carray(pointer(dst, zero), n)
        mine = np.empty(BLOCK if ahead > 1 else 0, own.dtype)
        for start in range(0, n, BLOCK):
            stop = min(start + BLOCK, n)
            a = own[start:stop]
            if ahead == 1:
                b = carray(pointer(load(table), zero), n)[start:stop]
                for i in range(a.size):
                    a[i] = _apply(step, b[i], a[i])
            elif ahead > 1:  # the own value waits until its turn
                b = carray(pointer(load(table), zero), n)[start:stop]
                for i in range(a.size):
                    mine[i] = a[i]
                    a[i] = b[i]
                for j in range(1, ahead):
                    b = carray(pointer(load(table + 8 * j), zero), n)[start:stop]
                    for i in range(a.size):
                        a[i] = _apply(step, a[i], b[i])
                for i in range(a.size):
                    a[i] = _apply(step, a[i], mine[i])
            j = ahead
            while j + 1 < m:  # two operands a pass: half the passes over the block
                b = carray(pointer(load(table + 8 * j), zero), n)[start:stop]
                c = carray(pointer(load(table + 8 * j + 8), zero), n)[start:stop]
                for i in range(a.size):
                    a[i] = _apply(step, _apply(step, a[i], b[i]), c[i])
                j += 2
            if j < m:
                b = carray(pointer(load(table + 8 * j), zero), n)[start:stop]
                for i in range(a.size):
                    a[i] = _apply(step, a[i], b[i])
            if average and divisor != 1.0:
                for i in range(a.size):
                    a[i] = a[i] / (np.float32(divisor) if single else divisor)

    return kernel


def _half(step: int, half: int, average: bool) -> Callable[..., None]:
    bits = np.uint16(0)

    def kernel(dst, table, m, ahead, n, divisor):
        own = carray(pointer(dst, bits), n)
        total = np.empty(BLOCK, np.uint32)
        other = np.empty(BLOCK, np.uint32)
        mine = np.empty(BLOCK, np.uint32)
        a = total.view(np.float32)
        b = other.view(np.float32)
        c = mine.view(np.float32)
        for start in range(0, n, BLOCK):
            stop = min(start + BLOCK, n)
            size = stop - start
            if ahead:  # the own value waits until its turn
                _widen(half, own[start:stop], mine)
                _widen(half, carray(pointer(load(table), bits), n)[start:stop], total)
            else:
                _widen(half, own[start:stop], total)
            for j in range(1 if ahead else 0, m + 1):
                if ahead and j == ahead:
                    for i in range(size):
                        a[i] = _apply(step, a[i], c[i])
                if j < m:
                    _widen(half, carray(pointer(load(table + 8 * j), bits), n)[start:stop], other)
                    for i in range(size):
                        a[i] = _apply(step, a[i], b[i])
            if average and divisor != 1.0:
                for i in range(size):
                    a[i] = a[i] / np.float32(divisor)
            _narrow(half, total, own[start:stop])

    return kernel


def _bits(step: int, stored: str) -> Callable[..., None]:
    zero = np.dtype(stored).type(0)

    def kernel(dst, table, m, ahead, n, divisor):  # the order of the operands makes no difference
        own = carray(pointer(dst, zero), n)
        for start in range(0, n, BLOCK):
            stop = min(start + BLOCK, n)
            a = own[start:stop]
            for j in range(m):
                b = carray(pointer(load(table + 8 * j), zero), n)[start:stop]
                for i in range(a.size):
                    a[i] = _join(step, a[i], b[i])

    return kernel


@cache
def _compiled(make: Callable[..., Callable[..., None]], *arguments: Any) -> Any:
    return cfunc(SIGNATURE, cache=True)(make(*arguments))


@cache
def combine_address(dtype: str, op: str) -> int:
    """Address of `void(dst, table, m, ahead, n, divisor)`.

    It combines `n` elements at `dst` in place with those at the `m` addresses in the int64 array
    at `table`, in order, and divides by `divisor` where the op is "avg". The own elements stand
    behind the first `ahead` of them.
    """
    known, step, average = DTYPES[dtype], _STEPS[step_of(op, dtype)], op == "avg"
    if step >= AND:  # bits have no sign: int8, uint8 and bool share functions
        made = _compiled(_bits, step, f"u{known.size}")
    elif dtype in _HALVES:
        made = _compiled(_half, step, _HALVES[dtype], average)
    else:
        made = _compiled(_native, step, known.stored, average)
    return int(made.address)
