"""Selection on a GPU in Triton.

`accumulate_kernel` updates the residual and counts its exponents; the host reads the counts, which
tell the exponent of the k-th largest. `count_kernel` counts in each block the candidates, which
have at least this exponent; running sums of these tell where `gather_kernel` writes candidates and
their indices, in order. `kernels.topk_abs` selects among the candidates, and `clear_kernel` zeroes
what was selected.

Bytes: `accumulate_kernel` reads and writes 16 per float32 element; the next two read 4 each. Of
standard normal values and k = n / 1000, 1 in 22 is a candidate, of which 8 bytes are written; at
worst, where one exponent has nearly all, all are. More bits than the 8 of exponents would leave
fewer candidates, but in Triton's histogram each thread counts 1 / 32 of the bins for its warp: with
2,048 bins, that takes 100 registers and, for 4 elements, 256 `popc`, of which a multiprocessor does
16 per clock cycle: 4 cycles per element, while memory takes 2.

Memory order: blocks share nothing but the counts, to which they add integers atomically, in any
order, for the same sums; kernels follow one another on the CUDA stream. Blocks add only what is not
zero, mostly 10 neighbouring counts in 3 sectors of 32 bytes; at a sector per clock cycle, those of
2^24 elements take 30 us of an H100, whose memory takes 120 us.

Bounds: a block's first element is int64 and offsets within a block are less than BLOCK, so that no
sum overflows near 2^31; indices are int32, as n < 2^31. Only the last block has a mask. Indices
that are given are compared with bounds before memory is accessed.

Alignment: blocks begin at multiples of 1,024 elements of an array, and 8 warps have 4 elements per
thread: one access of 16 bytes for float32, of 8 for 16-bit floats. Arrays that do not begin at a
multiple of 16 bytes are accessed element by element.

Occupancy: at most 32 registers on an H100, so that 2,048 threads fit a multiprocessor and read 16
bytes of each of one or two arrays, 32 to 64 KiB; read bandwidth times latency is at most 25 bytes
per ns, times 800 ns, 20 KB. Older GPUs need at most 40, for 1,536 threads.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from linkweave.kernels.api import topk_abs

BLOCK, WARPS = 1024, 8
ENTRIES, ENTRY_WARPS = 256, 8  # of a block that works on entries
EXPONENTS = 256
_EXPONENTS = tl.constexpr(EXPONENTS)


@triton.jit
def _load(x, at, n, WHOLE: tl.constexpr):
    if WHOLE:
        return tl.load(x + at)
    return tl.load(x + at, mask=at < n, other=0)


@triton.jit
def _store(x, at, n, value, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(x + at, value)
    else:
        tl.store(x + at, value, mask=at < n)


@triton.jit
def _exponent(x):
    """The biased exponent; that of infinity and NaN is the largest."""
    return ((x.to(tl.uint32, bitcast=True) >> 23) & (_EXPONENTS - 1)).to(tl.int32)


@triton.jit
def _accumulate(
    grad, residual, counts, n, HALF: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    g = _load(grad, at, n, WHOLE)
    _store(grad, at, n, tl.zeros_like(g), WHOLE)
    if HALF == "float16":
        g = g.to(tl.float16, bitcast=True).to(tl.float32)
    elif HALF == "bfloat16":
        g = (g.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    r = _load(residual, at, n, WHOLE) + g
    _store(residual, at, n, r, WHOLE)
    if counts is not None:
        inside = None if WHOLE else at < n
        found = tl.histogram(_exponent(r), _EXPONENTS, mask=inside)
        to = counts + tl.arange(0, _EXPONENTS)
        tl.atomic_add(to, found, mask=found > 0, sem="relaxed")


@triton.jit(do_not_specialize=["n"])
def accumulate_kernel(grad, residual, counts, n, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Add to the residual; count its exponents.

    The counts may be None. 16-bit gradients are uint16, the patterns of `HALF`.
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK
    grad += start
    residual += start
    if start + BLOCK <= n:
        _accumulate(grad, residual, counts, n, HALF, BLOCK, True)
    else:
        _accumulate(grad, residual, counts, (n - start).to(tl.int32), HALF, BLOCK, False)


@triton.jit
def _candidates(residual, n, least, BLOCK: tl.constexpr):
    """(elements of the program's block, which of them have at least the exponent `least`)."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    if start + BLOCK <= n:
        x = tl.load(residual + start + at)
    else:
        x = tl.load(residual + start + at, mask=at < n - start, other=0)
    return x, (_exponent(x) >= least) & (at < n - start)


@triton.jit(do_not_specialize=["n", "least"])
def count_kernel(residual, counts, n, least, BLOCK: tl.constexpr):
    """The number of candidates in each block."""
    _, found = _candidates(residual, n, least, BLOCK)
    tl.store(counts + tl.program_id(0), tl.sum(found.to(tl.int32)))


@triton.jit(do_not_specialize=["n", "least"])
def gather_kernel(residual, ends, values, indices, n, least, BLOCK: tl.constexpr):
    """Write the candidates in order; those of block i end at ends[i]."""
    x, found = _candidates(residual, n, least, BLOCK)
    taken = found.to(tl.int32)
    to = tl.load(ends + tl.program_id(0)) - tl.sum(taken) + tl.cumsum(taken) - 1
    tl.store(values + to, x, mask=found)
    tl.store(indices + to, tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), mask=found)


@triton.jit(do_not_specialize=["n", "many"])
def clear_kernel(x, indices, n, many, ENTRIES: tl.constexpr):
    """x[indices] = 0."""
    j = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    at = tl.load(indices + j, mask=j < many, other=-1)
    tl.store(x + at, 0.0, mask=(at >= 0) & (at < n))


def select(
    grad: torch.Tensor, residual: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(values, indices) of `kernels.gtopk.select`; waits for the counts on the current stream."""
    n = residual.numel()
    half = "" if grad.dtype == torch.float32 else str(grad.dtype).removeprefix("torch.")
    patterns = grad.view(torch.uint16) if half else grad
    blocks = triton.cdiv(n, BLOCK)
    counts = residual.new_zeros(EXPONENTS, dtype=torch.int32) if k else None
    if n:
        _launch(accumulate_kernel, blocks, patterns, residual, counts, n, HALF=half)
    if counts is None:
        return residual.new_empty(0), residual.new_empty(0, dtype=torch.int32)
    least, many = _least(counts.tolist(), k)
    in_blocks = counts.new_empty(blocks)
    _launch(count_kernel, blocks, residual, in_blocks, n, least)
    ends = in_blocks.cumsum(0, dtype=torch.int32)
    values, where = residual.new_empty(many), counts.new_empty(many)
    _launch(gather_kernel, blocks, residual, ends, values, where, n, least)
    values, found = topk_abs(values, k)
    indices = where[found]
    clear(residual, indices)
    return values, indices


def _least(counts: list[int], k: int) -> tuple[int, int]:
    """(the exponent of the k-th largest, how many elements have at least this exponent)."""
    many = 0
    for exponent in reversed(range(EXPONENTS)):
        many += counts[exponent]
        if many >= k:
            return exponent, many
    raise AssertionError(f"{many} elements were counted; k is {k}")


def clear(x: torch.Tensor, indices: torch.Tensor) -> None:
    """Enqueue x[indices] = 0 on the current stream; does not wait."""
    if many := indices.numel():
        with torch.cuda.device_of(x):
            clear_kernel[(triton.cdiv(many, ENTRIES),)](
                x, indices, x.numel(), many, ENTRIES=ENTRIES, num_warps=ENTRY_WARPS
            )


def _launch(kernel: Any, blocks: int, x: torch.Tensor, *arguments: Any, **constants: Any) -> None:
    with torch.cuda.device_of(x):
        kernel[(blocks,)](
            x, *arguments, **constants, BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False
        )  # fmt: skip
