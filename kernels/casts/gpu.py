"""Casts between float32 or float64 and 16-bit floats on a GPU, with a factor, in Triton.

Bytes: each element is read once and written once, 6 bytes for float32. Block i computes elements
i * BLOCK to (i + 1) * BLOCK - 1. Blocks share nothing, so no memory order is needed beyond that of
the CUDA stream, and the result does not depend on the grid.

Bounds: offsets are int64, so that n may exceed 2^31. The grid has ceil(n / BLOCK) blocks; CUDA
allows 2^31 - 1, that is 2^41 elements. Only the last block can reach past n, and it alone has a
mask: under a mask, the compiler could not make accesses of several elements, as n is any number.

Block size: 8 warps with 4 elements per thread: one access of 16 bytes for float32 (two for
float64), one of 8 for 16-bit floats, and neighbouring threads access neighbouring memory. At 2,048
threads per multiprocessor, 32 KiB of float32 or 16 KiB of 16-bit floats are being read, more than
read bandwidth times latency of an H100: 2/3 or 1/3 of 25 bytes per ns, times 800 ns, is 14 or 7 KB.
With 8 elements per thread, Triton exchanges data between threads when widening to float32, as it
does with 4 for float64. Arrays that do not begin at a multiple of 16 bytes are accessed element by
element.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 1024, 8


@triton.jit
def _convert(v, scale, HALF: tl.constexpr, NARROW: tl.constexpr, RESULT: tl.constexpr):
    """`v * scale` as `RESULT`; 16-bit floats are bit patterns in uint16."""
    if NARROW:
        y = v.to(tl.float32) * scale
        if HALF == "float16":
            bits = y.to(tl.float16).to(tl.uint16, bitcast=True)
            found = tl.where(y == y, bits, 0x7E00)
        else:  # in integers, as Triton's interpreter truncates; the sum wraps for NaN only
            wide = y.to(tl.uint32, bitcast=True)
            rounded = (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16
            found = tl.where(y == y, rounded, 0x7FC0)
    else:
        if HALF == "float16":
            exact = v.to(tl.float16, bitcast=True).to(tl.float32)
        else:
            exact = (v.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        y = exact * scale
        found = tl.where(y == y, y.to(RESULT), float("nan"))
    return found.to(RESULT)


@triton.jit(do_not_specialize=["n"])
def cast_kernel(x, out, scale, n, HALF: tl.constexpr, NARROW: tl.constexpr, BLOCK: tl.constexpr):
    """out[i] = x[i] * scale; the 16-bit array is uint16, the patterns of `HALF`."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    RESULT: tl.constexpr = out.dtype.element_ty
    if start + BLOCK <= n:
        tl.store(out + at, _convert(tl.load(x + at), scale, HALF, NARROW, RESULT))
    else:
        inside = at < n
        v = tl.load(x + at, mask=inside, other=0)
        tl.store(out + at, _convert(v, scale, HALF, NARROW, RESULT), mask=inside)


def cast(x: torch.Tensor, out: torch.Tensor, half: str, scale: float) -> None:
    """Enqueue out[i] = x[i] * scale on the current CUDA stream; does not wait.

    One tensor is float32 or float64, the other is of dtype `half`; both are contiguous, on one GPU,
    and have n elements. `scale` is rounded to float32. Rounding is as in `kernels.api.cast`.
    """
    if not (n := x.numel()):
        return
    narrow = x.element_size() > out.element_size()
    x, out = (
        t.detach().view(torch.uint16) if t.element_size() == 2 else t.detach() for t in (x, out)
    )
    with torch.cuda.device_of(x):
        cast_kernel[(triton.cdiv(n, BLOCK),)](
            x, out, scale, n, HALF=half, NARROW=narrow, BLOCK=BLOCK, num_warps=WARPS
        )
