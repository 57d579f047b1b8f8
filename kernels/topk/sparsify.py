"""Top-k selection fused with the update of a residual, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from linkweave.kernels.parallel import parts, run_parts
from linkweave.kernels.small_floats import widen_bfloat16, widen_float16
from linkweave.kernels.topk import cpu as topk
from linkweave.kernels.topk.cpu import BLOCK, U

WIDENED = 1024  # 16-bit floats that are converted at a time, into the L1 cache
NOTHING = np.float32(np.inf)  # a threshold that only infinities and NaN reach
NONE = np.empty(0, np.int64), np.empty(0, np.float32)


@njit(nogil=True, cache=True)
def _accumulate_and_gather(
    grad, patterns, is_float16, clear, residual, start, stop, low, at, values
):
    """Update the residual by the gradient; write the positions and the values of what in the
    residual is then not below `low` to `at` and `values`. Returns how many, or -1 if there is too
    little room.

    Numba compiles a version for each set of arguments that are None: `grad` (float32) or
    `patterns` (of 16-bit floats); `clear`, without which the one given is only read.
    """
    wide = np.empty(WIDENED, np.uint32)
    found, full = U(0), False
    for begin in range(U(start), U(stop), U(WIDENED)):
        end = min(begin + U(WIDENED), U(stop))
        if grad is not None:
            g, before = grad, U(0)
        if patterns is not None:
            if is_float16:
                widen_float16(patterns[begin:end], wide)
            else:
                widen_bfloat16(patterns[begin:end], wide)
            g, before = wide.view(np.float32), begin
        for first in range(begin, end, U(BLOCK)):
            last = min(first + U(BLOCK), end)
            reached = False
            for i in range(first, last):  # one loop: each element is loaded once
                total = g[i - before] + residual[i]
                residual[i] = total
                if clear is not None:
                    if grad is not None:
                        grad[i] = 0
                    if patterns is not None:
                        patterns[i] = 0
                reached |= not (abs(total) < low)  # also if NaN
            if reached and not full:
                full = found + U(BLOCK) > U(at.size)
                if not full:
                    for i in range(first, last):
                        total = residual[i]
                        at[found] = i
                        values[found] = total
                        found += U(not (abs(total) < low))
    return -1 if full else np.int64(found)


def sparsify(
    grad: np.ndarray, residual: np.ndarray, k: int, *, half: str = "", clear: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """(values, positions) of the k largest |residual + grad|; the rest stays in `residual`.

    `grad` is float32 [n], or uint16 [n], the bit patterns of `half`: float16 or bfloat16; with
    `clear` it is left zero. The residual is float32 [n]. One pass reads and writes both.
    """

    def arguments(grad: np.ndarray, residual: np.ndarray) -> Any:
        either = (None, grad) if half else (grad, None)
        # None, so that Numba leaves the store out: `grad` may be read-only
        return *either, half == "float16", clear or None, residual

    keys = topk.Keys("float32")
    n = residual.size
    low, most = NOTHING, 0
    if 0 < k <= n // 8:
        at = topk.sample_positions(n)
        sums = residual[at]
        copies = arguments(grad[at], sums)
        _accumulate_and_gather(*copies, 0, at.size, NOTHING, *NONE)
        bound = topk.bound(keys.of(sums.view(np.uint32)), n, k)
        if bound is not None:
            low, most = bound[0].view(np.float32), bound[1]
    spans = parts(n, BLOCK)
    rooms = [min(most, stop - start) + BLOCK for start, stop in spans]
    found = [(np.empty(room, np.int64), np.empty(room, np.float32)) for room in rooms]
    arrays = arguments(grad, residual)
    counts = run_parts(
        lambda i: _accumulate_and_gather(*arrays, *spans[i], low, *found[i]), len(spans)
    )
    if most and min(counts) >= 0 and k <= sum(counts) <= most:
        at, values = (topk.joined(pieces, counts) for pieces in zip(*found, strict=True))
        largest = topk.largest(keys.of(values.view(np.uint32)), k)
        at, values = at[largest], values[largest]
    else:
        at = topk.select(residual.view(np.uint32), "float32", k)
        values = residual[at]
    residual[at] = 0
    return values, at
