"""Conversions between 16-bit or 8-bit floats and float32, on bit patterns, in loops that vectorise.

Numba has none of them on CPUs. `widen_*` converts uint16 or uint8 patterns to float32 patterns
(uint32), `narrow_*` rounds these to nearest even. NaN stays NaN; infinities and subnormals are
exact. What float8_e4m3fn, which has no infinity, cannot hold becomes NaN, so that a sum that is too
large shows; torch.Tensor.to gives +-448.
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
    for i in range(src.size):  # changes the exponent bias from 15 to 127; exact for subnormals too
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
        # normal numbers: change the bias, add half a unit (less if even), and truncate
        odd = (size >> np.uint32(13)) & np.uint32(1)
        normal = (size + np.uint32(0xC8000FFF) + odd) >> np.uint32(13)
        special = np.uint32(0x7E00) if size > np.uint32(0x7F800000) else np.uint32(0x7C00)
        big = size >= np.uint32(0x47800000)
        out = special if big else normal
        src[i] = size  # for the subnormal case below
        dst[i] = np.uint16((out & np.uint32(0x7FFF)) | sign)
    for i in range(dst.size):
        if src[i] < np.uint32(0x38800000):  # subnormal, below 2^-14: adding 0.5 rounds it
            shifted = np.float32(floats[i] + np.float32(0.5))
            floats[i] = shifted
            low = np.uint16(src[i] - np.uint32(0x3F000000))
            dst[i] = (dst[i] & np.uint16(0x8000)) | low


@njit(inline="always")
def _widen_float8(src, dst, fraction, bias, special, above):
    """From a float of 8 bits. Patterns from `special` on have the bits `above` as well."""
    floats = dst.view(np.float32)
    shift, scale = np.uint32(23 - fraction), np.float32(2.0 ** (127 - bias))
    for i in range(src.size):
        dst[i] = (np.uint32(src[i]) & np.uint32(0x7F)) << shift
    for i in range(src.size):  # changes the exponent bias to 127; exact for subnormals too
        floats[i] = floats[i] * scale
    for i in range(src.size):
        h = np.uint32(src[i])
        top = np.uint32(above) if (h & np.uint32(0x7F)) >= np.uint32(special) else np.uint32(0)
        dst[i] = dst[i] | top | ((h & np.uint32(0x80)) << np.uint32(24))


@njit(inline="always")
def widen_float8_e5m2(src, dst):
    _widen_float8(src, dst, 2, 15, 0x7C, 0x7F800000)  # infinity, and NaN


@njit(inline="always")
def widen_float8_e4m3fn(src, dst):
    _widen_float8(src, dst, 3, 7, 0x7F, 0x7FC00000)  # NaN


@njit(inline="always")
def _narrow_float8(src, dst, fraction, bias, over, above):
    """To a float of 8 bits. Patterns from `over` on become `above`, those of NaN 0x7F."""
    floats = src.view(np.float32)
    cut = np.uint32(23 - fraction)
    rebias = np.uint32((127 - bias) << 23)
    half = np.uint32((1 << (22 - fraction)) - 1)
    least = np.uint32((128 - bias) << 23)  # the smallest normal number
    magic = np.uint32((151 - bias - fraction) << 23)  # adding it rounds a subnormal one
    for i in range(dst.size):
        x = src[i]
        size = x & np.uint32(0x7FFFFFFF)
        normal = (size - rebias + half + ((size >> cut) & np.uint32(1))) >> cut
        special = np.uint32(0x7F) if size > np.uint32(0x7F800000) else np.uint32(above)
        out = special if size >= np.uint32(over) else normal
        src[i] = size  # for the subnormal case below
        dst[i] = np.uint8((out & np.uint32(0x7F)) | ((x >> np.uint32(24)) & np.uint32(0x80)))
    shift = np.float32(2.0 ** (24 - bias - fraction))  # the float of the pattern `magic`
    for i in range(dst.size):
        if src[i] < least:
            floats[i] = np.float32(floats[i] + shift)
            dst[i] = (dst[i] & np.uint8(0x80)) | np.uint8(src[i] - magic)


@njit(inline="always")
def narrow_float8_e5m2(src, dst):
    _narrow_float8(src, dst, 2, 15, 0x47800000, 0x7C)  # from 65536 on infinity


@njit(inline="always")
def narrow_float8_e4m3fn(src, dst):
    _narrow_float8(src, dst, 3, 7, 0x43E80001, 0x7F)  # above 464 NaN
