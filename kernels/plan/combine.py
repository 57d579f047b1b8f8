"""The arithmetic of REDUCE on the CPU: combine a chunk with several others.

There is one function for each dtype and way to combine it, compiled at first use and cached on
disk. Each operand is read once and the result is written once, in blocks that fit the L1 cache.
Operands are combined strictly in order, without fast-math. Floats of 16 and 8 bits are widened to
float32, combined, and rounded once (to nearest even; subnormals are kept). Any nonzero byte of a
bool is True; results are 0 or 1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import carray, cfunc, njit, types

from linkweave.kernels.atomics import load, pointer
from linkweave.kernels.dtypes import DTYPES, step_of
from linkweave.kernels.small_floats import (
    narrow_bfloat16,
    narrow_float8_e4m3fn,
    narrow_float8_e5m2,
    narrow_float16,
    widen_bfloat16,
    widen_float8_e4m3fn,
    widen_float8_e5m2,
    widen_float16,
)

BLOCK = 2048  # elements; three float32 operands are 24 KiB and fit a 32 KiB L1 cache
SIGNATURE = types.void(*[types.int64] * 5, types.float64)

# Kernels close over numbers only; otherwise other processes would not find their cached code.
SUM, PROD, MIN, MAX, AND, OR, XOR, ALL, ANY, ODD = range(10)
FLOAT16, BFLOAT16, FLOAT8_E4M3FN, FLOAT8_E5M2 = range(4)
_STEPS = {
    "sum": SUM, "prod": PROD, "min": MIN, "max": MAX, "and": AND, "or": OR, "xor": XOR,
    "all": ALL, "any": ANY, "odd": ODD,
}  # fmt: skip
_SMALL = {
    "float16": FLOAT16, "bfloat16": BFLOAT16, "float8_e4m3fn": FLOAT8_E4M3FN,
    "float8_e5m2": FLOAT8_E5M2,
}  # fmt: skip
"""Floats that are combined in float32."""


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
    if step == ALL:  # this step and those below treat any nonzero byte as True
        return np.uint8((a != 0) & (b != 0))
    if step == ANY:
        return np.uint8((a | b) != 0)
    return np.uint8((a != 0) ^ (b != 0))


@njit(inline="always")
def _widen(small, src, dst):
    if small == FLOAT16:
        widen_float16(src, dst)
    elif small == BFLOAT16:
        widen_bfloat16(src, dst)
    elif small == FLOAT8_E4M3FN:
        widen_float8_e4m3fn(src, dst)
    else:
        widen_float8_e5m2(src, dst)


@njit(inline="always")
def _narrow(small, src, dst):
    if small == FLOAT16:
        narrow_float16(src, dst)
    elif small == BFLOAT16:
        narrow_bfloat16(src, dst)
    elif small == FLOAT8_E4M3FN:
        narrow_float8_e4m3fn(src, dst)
    else:
        narrow_float8_e5m2(src, dst)


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
            elif ahead > 1:  # the own value comes after `ahead` others
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
            while j + 1 < m:  # two operands per pass over the block
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


def _small(step: int, small: int, size: int, average: bool) -> Callable[..., None]:
    bits = np.dtype(f"u{size}").type(0)

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
            if ahead:  # the own value comes after `ahead` others
                _widen(small, own[start:stop], mine)
                _widen(small, carray(pointer(load(table), bits), n)[start:stop], total)
            else:
                _widen(small, own[start:stop], total)
            for j in range(1 if ahead else 0, m + 1):
                if ahead and j == ahead:
                    for i in range(size):
                        a[i] = _apply(step, a[i], c[i])
                if j < m:
                    _widen(small, carray(pointer(load(table + 8 * j), bits), n)[start:stop], other)
                    for i in range(size):
                        a[i] = _apply(step, a[i], b[i])
            if average and divisor != 1.0:
                for i in range(size):
                    a[i] = a[i] / np.float32(divisor)
            _narrow(small, total, own[start:stop])

    return kernel


def _bits(step: int, stored: str) -> Callable[..., None]:
    zero = np.dtype(stored).type(0)

    def kernel(dst, table, m, ahead, n, divisor):  # bitwise steps do not depend on the order
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
    """The address of the C function `void(dst, table, m, ahead, n, divisor)`.

    It combines `n` elements at `dst` in place with those at the `m` addresses in the int64 array
    at `table`, in order; the own elements come after the first `ahead` of these. If the op is
    "avg", it divides the result by `divisor`.
    """
    known, step, average = DTYPES[dtype], _STEPS[step_of(op, dtype)], op == "avg"
    if step >= AND:  # bitwise: int8, uint8 and bool share functions
        made = _compiled(_bits, step, f"u{known.size}")
    elif dtype in _SMALL:
        made = _compiled(_small, step, _SMALL[dtype], known.size, average)
    elif known.kind == "float" and known.stored != dtype:  # would be combined as integers
        raise NotImplementedError(f"no conversion of {dtype} to a float that can be combined")
    else:
        made = _compiled(_native, step, known.stored, average)
    return int(made.address)
