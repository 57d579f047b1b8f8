"""Casts between float32 or float64 and 16-bit floats on the CPU, with a factor.

Each block of the input is multiplied in float32 within the L1 cache and converted there, so that
memory is read once and written once. Threads divide the blocks.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from linkweave.kernels.dtypes import DTYPES
from linkweave.kernels.parallel import parts, run_parts
from linkweave.kernels.small_floats import narrow_float16, widen_bfloat16, widen_float16

BLOCK = 2048  # elements; with input and output at most 40 KiB, read and written in order
NAN = np.float32(np.nan)


@njit(inline="always")
def _scale(values, scale, scaled):
    for i in range(values.size):
        y = np.float32(values[i]) * scale
        scaled[i] = y if y == y else NAN  # the payload of a product differs between processors


@njit(inline="always")
def _round(bits, out):
    """To bfloat16, nearest even. Unlike `narrow_bfloat16`, this is right for no NaN but `NAN`."""
    for i in range(out.size):
        b = bits[i]
        out[i] = np.uint16((b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) >> 16)


@njit(nogil=True, cache=True)
def _narrow(x, out, start, stop, scale, is_float16):
    bits = np.empty(BLOCK, np.uint32)
    floats = bits.view(np.float32)
    for first in range(start, stop, BLOCK):
        last = min(first + BLOCK, stop)
        _scale(x[first:last], scale, floats)
        if is_float16:
            narrow_float16(bits, out[first:last])
        else:
            _round(bits, out[first:last])


@njit(nogil=True, cache=True)
def _widen(x, out, start, stop, scale, is_float16):
    bits = np.empty(BLOCK, np.uint32)
    floats = bits.view(np.float32)
    for first in range(start, stop, BLOCK):
        last = min(first + BLOCK, stop)
        if is_float16:
            widen_float16(x[first:last], bits)
        else:
            widen_bfloat16(x[first:last], bits)
        _scale(floats[: last - first], scale, out[first:last])


def cast(x: np.ndarray, out: np.ndarray, half: str, scale: float) -> None:
    """out[i] = x[i] * scale. One array is float32 or float64 [n]; the other is uint16 [n], the bit
    patterns of `half`: float16 or bfloat16. Rounding is as in `kernels.api.cast`."""
    run = _widen if x.dtype.itemsize == DTYPES[half].size else _narrow
    spans = parts(x.size, BLOCK)
    factor = np.float32(scale)
    run_parts(lambda i: run(x, out, *spans[i], factor, half == "float16"), len(spans))
