"""Top-k selection fused with the update of a residual, and of a momentum, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from linkweave.kernels.atomics import fma
from linkweave.kernels.float16 import widen_bfloat16, widen_float16
from linkweave.kernels.parallel import parts, run_parts
from linkweave.kernels.topk import cpu as topk
from linkweave.kernels.topk.cpu import BLOCK, U, most_of

UPDATED = 1024  # elements, then gathered from the L1 cache: at most 16 KiB
NOTHING = np.uint32(0xFFFFFFFF)  # a threshold that no key reaches
NONE = np.empty(0, np.int64)


@njit(nogil=True, cache=True)
def _accumulate_and_gather(
    grad, patterns, is_float16, cleared, residual, velocity, momentum, nesterov,
    start, stop, low, at,
):  # fmt: skip
    """Update the residual (and the velocity) by the gradient, and `topk._gather` of the residual.

    Numba compiles a version for each set of arguments that are None: `grad` (float32) or
    `patterns` (of 16-bit floats); `cleared`, one of the two again, to be left zero; `velocity`.
    """
    bits = residual.view(np.uint32)
    mask = np.uint32(0x7FFFFFFF)
    wide = np.empty(UPDATED, np.uint32)
    found, full = U(0), False
    for begin in range(U(start), U(stop), U(UPDATED)):
        end = min(begin + U(UPDATED), U(stop))
        if grad is not None:
            g, before = grad, U(0)
        if patterns is not None:
            if is_float16:
                widen_float16(patterns[begin:end], wide)
            else:
                widen_bfloat16(patterns[begin:end], wide)
            g, before = wide.view(np.float32), begin
        if velocity is None:
            for i in range(begin, end):
                residual[i] = g[i - before] + residual[i]
        else:
            for i in range(begin, end):
                velocity[i] = velocity[i] * momentum + g[i - before]
            if nesterov:
                for i in range(begin, end):
                    residual[i] = fma(velocity[i], momentum, g[i - before]) + residual[i]
            else:
                for i in range(begin, end):
                    residual[i] = velocity[i] + residual[i]
        if cleared is not None:
            for i in range(begin, end):
                cleared[i] = 0
        for first in range(begin, end, U(BLOCK)):
            last = min(first + U(BLOCK), end)
            if not full and most_of(bits, mask, first, last) >= low:
                full = found + U(BLOCK) > U(at.size)
                if not full:
                    for i in range(first, last):
                        at[found] = i
                        found += U((bits[i] & mask) >= low)
    return -1 if full else np.int64(found)


def sparsify(
    grad: np.ndarray, residual: np.ndarray, k: int, *, half: str = "", clear: bool = False,
    velocity: np.ndarray | None = None, momentum: float = 0.0, nesterov: bool = False,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """(values, positions) of the k largest |residual + d|; the rest stays in `residual`.

    `grad` is float32 [n], or uint16 [n], the bit patterns of `half`: float16 or bfloat16; with
    `clear` it is left zero. d is the gradient or, with `velocity`, as `kernels.gtopk.select`
    says. Residual and velocity are float32 [n]. One pass reads and writes all.
    """

    def arguments(grad: np.ndarray, residual: np.ndarray, velocity: np.ndarray | None) -> Any:
        either = (None, grad) if half else (grad, None)
        cleared = grad if clear else None
        factor = np.float32(momentum)
        return *either, half == "float16", cleared, residual, velocity, factor, nesterov

    keys = topk.Keys("float32")
    n = residual.size
    low, most = NOTHING, 0
    if 0 < k <= n // 8:
        at = topk.sample_positions(n)
        sums, sampled = residual[at], None if velocity is None else velocity[at]
        copies = arguments(grad[at], sums, sampled)
        _accumulate_and_gather(*copies, 0, at.size, NOTHING, NONE)
        bound = topk.bound(keys.of(sums.view(np.uint32)), n, k)
        if bound is not None:
            low, most = bound
    spans = parts(n, BLOCK)
    found_at = [np.empty(min(most, stop - start) + BLOCK, np.int64) for start, stop in spans]
    arrays = arguments(grad, residual, velocity)
    counts = run_parts(
        lambda i: _accumulate_and_gather(*arrays, *spans[i], low, found_at[i]), len(spans)
    )
    bits = residual.view(np.uint32)
    if most and min(counts) >= 0 and k <= sum(counts) <= most:
        found = topk.among(bits, keys, k, topk.joined(found_at, counts))
    else:
        found = topk.select(bits, "float32", k)
    values = residual[found]
    residual[found] = 0
    return values, found
