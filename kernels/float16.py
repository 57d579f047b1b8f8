"""16-bit floats as bit patterns, to and from float32, in loops that vectorise.

Numba has no 16-bit float on the CPU. `widen_*` writes float32 bit patterns into a uint32 block,
`narrow_*` rounds them to nearest even; NaN stays NaN, infinities and subnormals are exact.
"""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(inline="always")
def widen_bfloat16(src, dst):
    for i in range(src.size):
        dst[i] = np.uint32(src[i]) << np.uint32(16)


@njit(inline="always")
def narrow_bfloat16(src, dst):
    for i in range(dst.size):
        x = src[i]
        up = (x + np.uint32(0x7FFF) + ((x >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        quiet = (x >> np.uint32(16)) | np.uint32(0x40)
        nan = (x & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        dst[i] = np.uint16(quiet if nan else up)


@njit(inline="always")
def widen_float16(src, dst):
    floats = dst.view(np.float32)
    for i in range(src.size):
        dst[i] = (np.uint32(src[i]) & np.uint32(0x7FFF)) << np.uint32(13)
    for i in range(src.size):  # moves the exponent from bias 15 to 127; exact, subnormals too
        floats[i] = floats[i] * np.float32(2.0**112)
    for i in range(src.size):
        h = np.uint32(src[i])
        special = (h & np.uint32(0x7FFF)) >= np.uint32(0x7C00)  # infinity or NaN
        top = np.uint32(0x7F800000) if special else np.uint32(0)
        dst[i] = dst[i] | top | ((h & np.uint32(0x8000)) << np.uint32(16))


@njit(inline="always")
def narrow_float16(src, dst):
    floats = src.view(np.float32)
    for i in range(dst.size):
        x = src[i]
        size = x & np.uint32(0x7FFFFFFF)
        sign = (x >> np.uint32(16)) & np.uint32(0x8000)
        # normal: move the bias, add half a unit less one, plus one if odd, and cut
        odd = (size >> np.uint32(13)) & np.uint32(1)
        normal = (size + np.uint32(0xC8000FFF) + odd) >> np.uint32(13)
        special = np.uint32(0x7E00) if size > np.uint32(0x7F800000) else np.uint32(0x7C00)
        big = size >= np.uint32(0x47800000)
        out = special if big else normal
        src[i] = size  # for the subnormal case below
        dst[i] = np.uint16((out & np.uint32(0x7FFF)) | sign)
    for i in range(dst.size):
        if src[i] < np.uint32(0x38800000):  # below 2^-14: adding 0.5 rounds at the last bit
            shifted = np.float32(floats[i] + np.float32(0.5))
            floats[i] = shifted
            low = np.uint16(src[i] - np.uint32(0x3F000000))
            dst[i] = (dst[i] & np.uint16(0x8000)) | low
