"""Top-k selection fused with the update of a residual, on the CPU."""

from __future__ import annotations

import numpy as np
from numba import njit

from linkweave.kernels.parallel import parts, run_parts
from linkweave.kernels.topk import cpu as topk
from linkweave.kernels.topk.cpu import BLOCK, U, most_of


@njit(nogil=True, cache=True)
def _add_and_gather(grad, residual, start, stop, low, at):
    """residual += grad, and `topk._gather` of the sums."""
    bits = residual.view(np.uint32)
    mask = np.uint32(0x7FFFFFFF)
    found, full = U(0), False
    for first in range(U(start), U(stop), U(BLOCK)):
        last = min(first + U(BLOCK), U(stop))
        for i in range(first, last):
            residual[i] = grad[i] + residual[i]
        if not full and most_of(bits, mask, first, last) >= low:
            full = found + U(BLOCK) > U(at.size)
            if not full:
                for i in range(first, last):
                    at[found] = i
                    found += U((bits[i] & mask) >= low)
    return -1 if full else np.int64(found)


def sparsify(grad: np.ndarray, residual: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """(values, positions) of the k largest |grad + residual|; the rest stays in `residual`.

    Both are float32 [n]. One pass reads both and writes the residual.
    """
    keys = topk.Keys("float32")
    n = grad.size
    low = np.uint32(0xFFFFFFFF)
    most = 0
    if 0 < k <= n // 8:
        at = topk.sample_positions(n)
        bound = topk.bound(keys.of((grad[at] + residual[at]).view(np.uint32)), n, k)
        if bound is not None:
            low, most = bound
    spans = parts(n, BLOCK)
    found_at = [np.empty(min(most, stop - start) + BLOCK, np.int64) for start, stop in spans]
    counts = run_parts(
        lambda i: _add_and_gather(grad, residual, *spans[i], low, found_at[i]), len(spans)
    )
    bits = residual.view(np.uint32)
    if most and min(counts) >= 0 and k <= sum(counts) <= most:
        found = topk.among(bits, keys, k, topk.joined(found_at, counts))
    else:
        found = topk.select(bits, "float32", k)
    values = residual[found]
    residual[found] = 0
    return values, found
